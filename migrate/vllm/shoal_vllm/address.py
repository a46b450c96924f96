"""Where another engine's blocks lie in its memory, as a node tells it. Nothing is taken on trust."""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import fields
from .blocks import Plane
from .fields import Refused

MAX_METADATA = 1 << 20
"""Characters of NIXL's metadata. A piece of memory takes some 100 of them, and a model has a few hundred at most."""
MAX_BLOCKS = 1 << 32
"""Blocks of an engine."""
MAX_DEVICE = 1 << 16
"""Devices of an engine."""

Ours = TypeVar("Ours")
Integers = npt.NDArray[np.uint64]
Descriptors = npt.NDArray[np.uint64]
"""NIXL's pieces of memory, one a row: address, bytes, device."""


@dataclass(frozen=True)
class Source:
    """Blocks in another engine's memory."""

    metadata: bytes
    """What NIXL must know to reach the engine."""
    memory: str
    """NIXL's word for the kind of memory."""
    device: int
    planes: list[list[Plane]]
    ids: list[int]

    def batches(self, size: int) -> Iterator[Descriptors]:
        """What to read, in the order of the file, in batches of at most `size` bytes."""
        batch: list[Descriptors] = []
        room = size
        for planes in self.planes:
            block_bytes = sum(plane.length for plane in planes)
            first = 0
            while first < len(self.ids):
                ids = self.ids[first : first + room // block_bytes]
                if not ids:
                    yield np.concatenate(batch)
                    batch, room = [], size
                    continue
                batch.append(self._pieces(planes, ids))
                room -= len(ids) * block_bytes
                first += len(ids)
        if batch:
            yield np.concatenate(batch)

    def _pieces(self, planes: list[Plane], ids: list[int]) -> Descriptors:
        """Blocks of one layer. Neighbours in memory are one piece."""
        lengths = np.tile(np.array([plane.length for plane in planes], dtype=np.uint64), len(ids))
        index = np.array(ids, dtype=np.uint64)
        starts = np.stack([np.uint64(plane.base) + index * np.uint64(plane.stride) for plane in planes], axis=1).ravel()
        heads = np.flatnonzero(np.concatenate([[True], starts[1:] != starts[:-1] + lengths[:-1]]))
        return descriptors(starts[heads], np.add.reduceat(lengths, heads), self.device)


def descriptors(starts: Integers, lengths: Integers, device: int) -> Descriptors:
    """Pieces of memory."""
    return np.stack([starts, lengths, np.full_like(starts, device)], axis=1)


def parse(wanted: Any, count: int, ours: list[list[Plane]]) -> Source:
    """Reads `{"address", "ids"}` for `count` blocks that are made like ours. Raises `Refused`."""
    address = wanted.get("address") if isinstance(wanted, dict) else None
    if not isinstance(address, dict):
        raise Refused("bad", "from must be an object with an address")
    if address.get("kind") != "nixl":
        raise Refused("unfit", "the address is not one of NIXL")
    num_blocks, device = fields.integer(address, "num_blocks", low=1), fields.integer(address, "device")
    if num_blocks > MAX_BLOCKS or device > MAX_DEVICE or address.get("memory") not in ("DRAM", "VRAM"):
        raise Refused("bad", "num_blocks, device or memory of the address makes no sense")
    ids = fields.integers(wanted, "ids", below=num_blocks)
    if len(ids) != count:
        raise Refused("bad", f"there are {len(ids)} ids for {count} blocks")
    layers = [
        [_plane(theirs, plane, num_blocks) for theirs, plane in _pairs(layer, planes)]
        for layer, planes in _pairs(address.get("planes"), ours)
    ]
    return Source(_metadata(address), address["memory"], device, layers, ids)


def _pairs(theirs: Any, ours: list[Ours]) -> Iterator[tuple[Any, Ours]]:
    if not isinstance(theirs, list):
        raise Refused("bad", "planes must be lists of lists")
    if len(theirs) != len(ours):
        raise Refused("unfit", f"the other engine has {len(theirs)} layers or planes where this one has {len(ours)}")
    return zip(theirs, ours, strict=True)


def _plane(theirs: Any, ours: Plane, num_blocks: int) -> Plane:
    if not isinstance(theirs, list) or len(theirs) != 3 or not all(fields.is_integer(value) and value >= 0 for value in theirs):
        raise Refused("bad", "a plane must be three integers of at least 0")
    plane = Plane(*theirs)
    if plane.length != ours.length:
        raise Refused("unfit", f"the other engine has {plane.length} bytes of a block where this one has {ours.length}")
    if plane.base + plane.stride * (num_blocks - 1) + plane.length > 1 << 64:
        raise Refused("bad", "a plane ends behind the end of memory")
    return plane


def _metadata(address: dict[str, Any]) -> bytes:
    text = address.get("agent")
    if not isinstance(text, str) or not 0 < len(text) <= MAX_METADATA:
        raise Refused("bad", f"agent must be a string of 1 to {MAX_METADATA} characters")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused("bad", "agent is not base64") from error
