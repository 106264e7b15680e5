"""The file format of a shard: a JSON header, then the arrays.

```
"SHOALSF1"  u64 length of the JSON   JSON, padded to 64   parameters, padded to 64   state, padded to 64   …
```

Arrays are little-endian fp32. The SHA-256 of the whole file is in the manifest. A reader streams the file once and
copies the range that it needs, so a snapshot of three shards can be restored into two. What else is known of a shard
is in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np

from shoal_trainer.errors import SnapshotError
from shoal_trainer.ps.aligned import aligned, octets
from shoal_trainer.ps.kernels import Vector
from shoal_trainer.ps.shard import ShardCopy

MAGIC = b"SHOALSF1"
_LENGTH = struct.Struct("<Q")
MAX_HEADER = 16 << 20
CHUNK = 4 << 20
GRAIN = 64


def _padding(length: int) -> bytes:
    return bytes(-length % GRAIN)


def chunks(copy: ShardCopy) -> Iterator[bytes | memoryview]:
    """The content of the file for `copy`, in chunks."""
    header = json.dumps(
        {
            "low": copy.low,
            "high": copy.high,
            "arrays": [[name, int(values.size)] for name, values in copy.arrays.items()],
        }
    ).encode()
    head = MAGIC + _LENGTH.pack(len(header)) + header
    yield head + _padding(len(head))
    for values in copy.arrays.values():
        data = octets(values)
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]
        yield _padding(len(data))


class Digest:
    """An iterable over `source` that computes its size in bytes and its SHA-256."""

    def __init__(self, source: Iterable[bytes | memoryview]) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self.size = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for chunk in self._source:
            self._hash.update(chunk)
            self.size += len(chunk)
            yield chunk

    @property
    def hex(self) -> str:
        """The SHA-256 of the chunks so far."""
        return self._hash.hexdigest()


class _Reader:
    """Reads a stream of `size` bytes and hashes it."""

    def __init__(self, handle: IO[bytes], size: int) -> None:
        self._handle = handle
        self._hash = hashlib.sha256()
        self.left = size

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise SnapshotError("the file is shorter than its header states")
        data = self._handle.read(count)
        while len(data) < count:
            rest = self._handle.read(count - len(data))
            if not rest:
                raise SnapshotError("the file is truncated")
            data += rest
        self._hash.update(data)
        self.left -= count
        return data

    def fill(self, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            part[:] = self.take(len(part))

    def skip(self, count: int) -> None:
        while count > 0:
            count -= len(self.take(min(count, CHUNK)))

    @property
    def hex(self) -> str:
        return self._hash.hexdigest()


def read_into(
    handle: IO[bytes], size: int, sha256: str, low: int, high: int, arrays: dict[str, Vector]
) -> None:
    """Read one file, and copy its part of the range [low, high) into `arrays`.

    `arrays`: fp32 by name; each begins at position `low` of the flat vector. `SnapshotError` if the file is
    damaged: `arrays` may contain wrong values then.
    """
    reader = _Reader(handle, size)
    if reader.take(len(MAGIC)) != MAGIC:
        raise SnapshotError("it is not a shard file")
    (length,) = _LENGTH.unpack(reader.take(_LENGTH.size))
    if length > min(MAX_HEADER, reader.left):
        raise SnapshotError(f"the header states an invalid length of {length} bytes")
    try:
        header = json.loads(reader.take(length))
        start, stop = int(header["low"]), int(header["high"])
        listed = [(str(name), int(values)) for name, values in header["arrays"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"the header is invalid: {error!r}") from None
    reader.skip(-(len(MAGIC) + _LENGTH.size + length) % GRAIN)
    for name, values in listed:
        if values < 0 or values > stop - start or values * 4 > reader.left:
            raise SnapshotError(f"array {name} states an invalid length of {values} values")
        target = arrays.get(name)
        first, last = max(low, start), min(high, start + values, low + (0 if target is None else target.size))
        if target is None or first >= last:
            reader.skip(values * 4)
        else:
            reader.skip((first - start) * 4)
            reader.fill(octets(target[first - low : last - low]))
            reader.skip((start + values - last) * 4)
        reader.skip(-values * 4 % GRAIN)
    reader.skip(reader.left)
    if handle.read(1) or reader.hex != sha256:
        raise SnapshotError("the SHA-256 does not match the manifest")


def empty(size: int) -> Vector:
    """An array to read into: `size` zeros, fp32."""
    return aligned(size, np.float32)
