"""Lets a Shoal node move running requests, with their KV, between unpatched vLLM engines.

vLLM loads `shoal_vllm.connector` and builds its `ShoalConnector` twice:

- in the process of the scheduler (`scheduler.py`), which knows requests and block tables, keeps blocks where they are (`pins.py`) and
  answers on `scheduler.sock`;
- in each worker (`worker.py`), which owns the KV tensors (`blocks.py`) and answers on `worker.sock`. Where NIXL is, it can read
  blocks out of another engine (`direct.py`, `address.py`).

The node beside the engine speaks to both sockets (`wire.py`) and names its requests in `kv_transfer_params` (`params.py`).
What the scheduler wants the worker to do travels with each engine step (`step.py`).
"""

__version__ = "0.2.0"

PROTOCOL = 1
"""Version of the protocol on both sockets."""
