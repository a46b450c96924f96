"""KV blocks of this engine's tensors, copied to and from files.

In a file the blocks are ordered layer by layer: all of the first layer's blocks, then all of the second layer's. Files are read and
written and never mapped, because a mapped file that the node cuts short would kill the engine.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

FORMAT = 1
"""Version of the order of bytes in a file."""
CHUNK_BYTES = 16 << 20
"""Bytes copied at once: the size of the one buffer, and how long a small copy may wait for a large one."""
SAME_SIZE_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Blocks are copied as integers, since not every operation knows every floating point type."""


class Unmovable(Exception):
    """The KV tensors do not have a shape that this package understands."""


@dataclass(frozen=True)
class Layout:
    """What a node must know about an engine's KV. KV can go from one engine to another only if their digests are equal."""

    digest: str
    block_bytes: int
    """Bytes of one block in all layers."""
    layers: int
    dtype: str
    num_blocks: int


@dataclass(frozen=True)
class Plane:
    """Where a part of every block of one layer lies in memory: that of block `i` is at `base + i * stride`."""

    base: int
    stride: int
    length: int
    """Bytes of the part."""


@dataclass(frozen=True)
class _Layer:
    """One layer's cache, seen as integers, with the blocks in the first dimension."""

    name: str
    cache: torch.Tensor
    block_bytes: int


class KvBlocks:
    """All KV blocks of one worker.

    Copies run in the caller's thread, one chunk of any caller at a time. If the cache is on a GPU they run on a stream of their own,
    beside the model's. The GPU path is written and was not run yet.
    """

    def __init__(
        self, caches: dict[str, torch.Tensor], num_blocks: int, block_size: int, page_bytes: dict[str, int], version: str
    ) -> None:
        """`page_bytes` is what vLLM says one block of a layer has. Raises `Unmovable`."""
        self.num_blocks = num_blocks
        self._layers: list[_Layer] = []
        described: list[tuple[str, list[int], int, str]] = []
        for name, cache in _distinct(caches):
            dim, blocks_first = _blocks_first(name, cache, num_blocks)
            layer = _Layer(name, blocks_first, blocks_first[0].numel() * cache.element_size())
            if layer.block_bytes != page_bytes.get(name, layer.block_bytes):
                raise Unmovable(f"a block of {name} has {page_bytes[name]} bytes, and its tensor shows {layer.block_bytes}")
            self._layers.append(layer)
            described.append((name, list(blocks_first.shape[1:]), dim, str(cache.dtype)))
        if not described:
            raise Unmovable("the engine has no KV cache")
        self.layout = Layout(
            digest=_digest({"format": FORMAT, "vllm": version, "block_size": block_size, "layers": described}),
            block_bytes=sum(layer.block_bytes for layer in self._layers),
            layers=len(self._layers),
            dtype=",".join(sorted({dtype.removeprefix("torch.") for *_, dtype in described})),
            num_blocks=num_blocks,
        )
        self.device = self._layers[0].cache.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._lock = threading.Lock()
        self._buffer = self.new_buffer()

    def layout_fields(self) -> dict[str, str | int]:
        """The layout as it is sent to a node."""
        return asdict(self.layout)

    def new_buffer(self) -> torch.Tensor:
        """Memory of the host that a chunk fits in, and a block of any layer."""
        size = max(CHUNK_BYTES, *(layer.block_bytes for layer in self._layers))
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None)

    def planes(self) -> list[list[Plane]]:
        """Where the blocks lie, layer by layer, the planes of a layer in the order in which a block's bytes are in a file.

        Raises `Unmovable` if a layer's bytes are in memory in another order than in a file.
        """
        return [_planes(layer) for layer in self._layers]

    def memory(self) -> list[tuple[int, int]]:
        """Address and bytes of each piece of memory that holds blocks. Layers may share one."""
        storages = (layer.cache.untyped_storage() for layer in self._layers)
        return list({storage.data_ptr(): storage.nbytes() for storage in storages}.items())

    def now(self) -> torch.cuda.Event | None:
        """The moment in the model's stream that a later `load` must come after. None if the cache is not on a GPU."""
        return torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None

    def export(self, ids: list[int], fd: int) -> None:
        """Writes the blocks to the start of the file. Raises `OSError` if the file does not take them.

        What is written belongs to the request only if its blocks were not freed meanwhile; the caller finds that out.
        """
        for layer, chunk, offset in self._chunks(ids, file_blocks=len(ids), skip=0):
            with self._lock, torch.inference_mode():
                write(fd, self._gather(layer, chunk), offset)

    def load(self, fd: int, file_blocks: int, skip: int, ids: list[int], after: torch.cuda.Event | None) -> None:
        """Copies blocks `skip..skip + len(ids)` of a file of `file_blocks` into the blocks `ids`.

        Raises `OSError` if the file is too short. Then the blocks hold anything.
        """
        if self._stream is not None and after is not None:
            self._stream.wait_event(after)
        for layer, chunk, offset in self._chunks(ids, file_blocks, skip):
            with self._lock, torch.inference_mode():
                data = self._buffer[: len(chunk) * layer.block_bytes]
                _read(fd, memoryview(data.numpy()), offset)
                self._scatter(layer, chunk, data)

    def _chunks(self, ids: list[int], file_blocks: int, skip: int) -> Iterator[tuple[_Layer, list[int], int]]:
        """Pieces that fit the buffer: a layer, ids of blocks in it, and the place of their bytes in the file."""
        layer_start = 0
        for layer in self._layers:
            step = max(1, self._buffer.numel() // layer.block_bytes)
            for first in range(0, len(ids), step):
                yield layer, ids[first : first + step], layer_start + (skip + first) * layer.block_bytes
            layer_start += file_blocks * layer.block_bytes

    def _gather(self, layer: _Layer, ids: list[int]) -> memoryview:
        """Bytes of the blocks. They are valid until the lock is given back."""
        index = torch.tensor(ids)
        if self._stream is None:
            return memoryview(_bytes(layer.cache.index_select(0, index)).numpy())
        data = self._buffer[: len(ids) * layer.block_bytes]
        with torch.cuda.stream(self._stream):
            data.copy_(_bytes(layer.cache.index_select(0, index.to(self.device))), non_blocking=True)
        self._stream.synchronize()
        return memoryview(data.numpy())

    def _scatter(self, layer: _Layer, ids: list[int], data: torch.Tensor) -> None:
        """Puts bytes into the blocks."""
        values = data.view(layer.cache.dtype).view(len(ids), *layer.cache.shape[1:])
        index = torch.tensor(ids)
        if self._stream is None:
            layer.cache.index_copy_(0, index, values)
            return
        with torch.cuda.stream(self._stream):
            layer.cache.index_copy_(0, index.to(self.device), values.to(self.device, non_blocking=True))
        self._stream.synchronize()


def _distinct(caches: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Layers in the order of their numbers, those that share another layer's cache left out."""
    seen: set[int] = set()
    for name in sorted(caches, key=lambda name: [(len(part), part) for part in re.split(r"(\d+)", name)]):
        cache = caches[name]
        if not isinstance(cache, torch.Tensor):
            raise Unmovable(f"the cache of {name} is not one tensor")
        if cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            yield name, cache


def _blocks_first(name: str, cache: torch.Tensor, num_blocks: int) -> tuple[int, torch.Tensor]:
    """Where the blocks are in the shape, and a view with them in front. A block that the attention kernel splits is one again."""
    shape = cache.shape
    if cache.dim() >= 2 and shape[0] >= num_blocks and shape[0] % num_blocks == 0:
        dim = 0
    elif cache.dim() >= 3 and shape[0] == 2 and shape[1] >= num_blocks and shape[1] % num_blocks == 0:
        dim = 1  # Keys and values come first.
    else:
        raise Unmovable(f"the cache of {name} has the shape {tuple(shape)}, with no place for {num_blocks} blocks")
    as_integers = cache.view(SAME_SIZE_INTEGERS[cache.element_size()])
    if shape[dim] != num_blocks:
        as_integers = as_integers.unflatten(dim, (num_blocks, shape[dim] // num_blocks))
    return dim, as_integers.movedim(dim, 0)


def _planes(layer: _Layer) -> list[Plane]:
    """One plane, or two if keys and values lie apart."""
    size, stride = layer.cache.element_size(), layer.cache.stride(0)
    block = layer.cache[0]
    parts = [block] if block.is_contiguous() else list(block.unbind(0)) if block.dim() > 1 and len(block) == 2 else []
    if not parts or not all(part.is_contiguous() for part in parts):
        raise Unmovable(f"a block of {layer.name} does not lie in one or two pieces")
    return [Plane(part.data_ptr(), stride * size, part.numel() * size) for part in parts]


def _bytes(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(-1).view(torch.uint8)


def _digest(facts: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()[:8].hex()


def write(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of it. Raises `OSError`."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(fd, [data], offset)
        if count == 0:
            raise OSError("the file is too short")
        data, offset = data[count:], offset + count
