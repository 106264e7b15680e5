"""The 64 bytes before every message, and every check on them that needs nothing else.

Little endian, one cache line, fixed: a header is decoded without allocating anything, and it states how much follows,
so that a receiver can refuse a length before it makes room for it. `codec` says how the payload is encoded; codes
that are not assigned are refused, which leaves room for compression later.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from shoal_trainer.errors import ProtocolError

MAGIC = b"SHOL"
VERSION = 1
_LAYOUT = struct.Struct("<4sBBBBHHIIIIQQQQ4x")
SIZE = _LAYOUT.size

IDLE = 1
"""Flag of a PULL: no gradient will be computed on these parameters that others should wait for."""

MAX_META = 64 << 10
MAX_META_HELLO = 4 << 20


class Op(IntEnum):
    """What a message asks for, or answers."""

    HELLO = 1
    INITIALIZE = 2
    OFFER = 3
    PULL = 4
    PUSH_PULL = 5
    DELTA_PULL = 6
    MERGE_PULL = 7
    BYE = 8
    OK = 64
    WELCOME = 65
    PARAMETERS = 66
    ERROR = 67


class Codec(IntEnum):
    """How a payload's numbers are encoded."""

    NONE = 0
    FP32 = 1
    BF16 = 2

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return (0, 4, 2)[self]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type of a buffer in this codec; bf16 travels as its 16 bits."""
        return np.dtype((np.uint8, np.float32, np.uint16)[self])


class ErrorCode(IntEnum):
    """Why a request was refused: the `seq` field of an ERROR."""

    PROTOCOL = 1
    FENCED = 2
    USER = 3
    NOT_READY = 4


_OPS = {int(op): op for op in Op}
_CODECS = {int(codec): codec for codec in Codec}
_LARGE_META = frozenset({Op.HELLO, Op.WELCOME, Op.OFFER, Op.PARAMETERS})


class Header(NamedTuple):
    """One message's header. `version`: of parameters, the one that a push was computed on or that an answer holds.

    `seq` of an offered copy is its generation. `scale`-like numbers are in the meta block; `length` counts the bytes of
    the payload, `meta` those before it.
    """

    op: Op
    codec: Codec = Codec.NONE
    shard: int = 0
    slot: int = 0
    incarnation: int = 0
    epoch: int = 0
    meta: int = 0
    boot: int = 0
    seq: int = 0
    version: int = 0
    length: int = 0
    flags: int = 0


def encode(header: Header) -> bytes:
    """The 64 bytes of a header."""
    return _LAYOUT.pack(
        MAGIC,
        VERSION,
        header.op,
        header.codec,
        header.flags,
        header.shard,
        0,
        header.slot,
        header.incarnation,
        header.epoch,
        header.meta,
        header.boot,
        header.seq,
        header.version,
        header.length,
    )


def decode(data: bytes | bytearray | memoryview) -> Header:
    """The header in `data` (64 bytes); `ProtocolError` if there is none, or one that this version cannot serve."""
    if len(data) != SIZE:
        raise ProtocolError(f"a header has {SIZE} bytes, not {len(data)}")
    magic, version, op, codec, flags, shard, _, slot, inc, epoch, meta, boot, seq, base, length = (
        _LAYOUT.unpack(data)
    )
    if magic != MAGIC:
        raise ProtocolError("not a message of Shoal's data plane")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks version {version} of the data plane, this side {VERSION}")
    kind, coding = _OPS.get(op), _CODECS.get(codec)
    if kind is None or coding is None:
        raise ProtocolError(f"unknown operation {op} or codec {codec}")
    if meta > MAX_META and (meta > MAX_META_HELLO or kind not in _LARGE_META):
        raise ProtocolError(f"{kind.name} states {meta} bytes of description")
    if (coding is Codec.NONE and length) or (coding is not Codec.NONE and length % coding.itemsize):
        raise ProtocolError(f"{kind.name} states {length} bytes of payload in codec {coding.name}")
    return Header(kind, coding, shard, slot, inc, epoch, meta, boot, seq, base, length, flags)
