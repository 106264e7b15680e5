"""The 64-byte, little-endian header of every message.

It contains the lengths of what follows, so a receiver can refuse a message before it allocates memory. Unassigned codec
numbers are refused; they are reserved for compression.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from shoal_trainer.errors import OtherVersion, ProtocolError

MAGIC = b"SHOL"
VERSION = 8
_LAYOUT = struct.Struct("<4sBBBBHeIIfIQQQQf")
SIZE = _LAYOUT.size

IDLE = 1
"""Flag of a PULL: no gradient will be computed on these parameters."""
ASK = 2
"""Flag of a request with a payload: the client sends the payload only after a GO, so that a server without memory for
it can make the client wait, instead of a connection that makes no progress. Of a BUSY: the server has dropped the
payload, which came without; the client asks, and sends it again."""
FOLLOWS = 4
"""Flag of a PULL: the worker has the journal up to `version`."""
ALONE = 8
"""Flag of a PUSH: its worker waits for no other one."""

MAX_AHEAD = 1e4
"""Updates by which an answer may be asked to be ahead."""

MAX_META = 64 << 10
MAX_META_HELLO = 8 << 20
"""For the operations in `_LARGE_META`: a full journal has 3.4 MB, and a begun push up to 6 kB."""


class Op(IntEnum):
    """The type of a request (below 64) or an answer."""

    HELLO = 1
    OFFER = 3
    """The parameters that HELLO has offered and WELCOME asks for. Without a meta block: the worker's first ones."""
    PULL = 4
    PUSH_PULL = 5
    DELTA_PULL = 6
    PUSH = 7
    """Answered with OK, when its worker has waited for the others (`ps/rounds`) unless it is ALONE; a PULL follows."""
    BYE = 8
    OK = 64
    WELCOME = 65
    PARAMETERS = 66
    ERROR = 67
    GO = 68
    """Send the payload. `seq`: the server answers each piece of so many values before it reads the one after the next;
    0: it reads all of it first."""
    BUSY = 69
    """The request waits for memory, and keeps its place; another answer follows."""
    STREAM = 70
    """A payload that is sent while it is made; PARAMETERS without a payload follow it."""


class Codec(IntEnum):
    """The encoding of a payload."""

    NONE = 0
    FP32 = 1
    BF16 = 2

    @property
    def itemsize(self) -> int:
        """Bytes per value; statistics have 4 also in bf16 (`ps/coding`)."""
        return (0, 4, 2)[self]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of a buffer in this codec; bf16 values are uint16."""
        return np.dtype((np.uint8, np.float32, np.uint16)[self])


class ErrorCode(IntEnum):
    """Why a request failed: the `seq` field of an ERROR."""

    PROTOCOL = 1
    FENCED = 2
    USER = 3
    NOT_READY = 4


_OPS = {int(op): op for op in Op}
_CODECS = {int(codec): codec for codec in Codec}
_LARGE_META = frozenset({Op.HELLO, Op.WELCOME, Op.OFFER, Op.PARAMETERS})


class Header(NamedTuple):
    """The header of a message.

    `version`: the parameters' version on which a push was computed, or which an answer contains. `seq`: the sequence
    number of a push, the generation of an offered copy, or an `ErrorCode`. `meta`, `length`: the bytes of the meta
    block and of the payload that follow it, in this order. `ahead`: of a pull or push, after how many more updates the
    worker's next gradient will arrive; the answer has the parameters expected there. `waited`: of an answer, for how
    many seconds slower workers held its push up (`ps/workers`). `filled`: of an answer, see `Pulled`, to three digits.
    An earlier server has nothing in these two, which is 0.
    """

    op: Op
    codec: Codec = Codec.NONE
    shard: int = 0
    slot: int = 0
    incarnation: int = 0
    meta: int = 0
    boot: int = 0
    seq: int = 0
    version: int = 0
    length: int = 0
    flags: int = 0
    ahead: float = 0.0
    waited: float = 0.0
    filled: float = 0.0


def encode(header: Header, version: int = VERSION) -> bytes:
    """Encode a header into 64 bytes. `version`: of a peer that can read no other, which is told so."""
    return _LAYOUT.pack(
        MAGIC,
        version,
        header.op,
        header.codec,
        header.flags,
        header.shard,
        header.filled,
        header.slot,
        header.incarnation,
        header.waited,
        header.meta,
        header.boot,
        header.seq,
        header.version,
        header.length,
        header.ahead,
    )


def decode(data: bytes | bytearray | memoryview) -> Header:
    """Decode 64 bytes; `ProtocolError` if they are no valid header, `OtherVersion` if it is of another version.

    The first five bytes are the same in each version, and so is all of an ERROR since version 7.
    """
    if len(data) != SIZE:
        raise ProtocolError(f"a header has {SIZE} bytes, not {len(data)}")
    magic, version, op, codec, flags, shard, filled, slot, inc, waited, meta, *rest = _LAYOUT.unpack(data)
    boot, seq, base, length, ahead = rest
    if magic != MAGIC:
        raise ProtocolError("not a message of the Shoal data plane")
    if version != VERSION:
        raise OtherVersion(version, VERSION)
    kind, coding = _OPS.get(op), _CODECS.get(codec)
    if kind is None or coding is None:
        raise ProtocolError(f"unknown operation {op} or codec {codec}")
    if meta > MAX_META and (meta > MAX_META_HELLO or kind not in _LARGE_META):
        raise ProtocolError(f"{kind.name} has a meta block of {meta} bytes, which is too long")
    if (coding is Codec.NONE and length) or (coding is not Codec.NONE and length % coding.itemsize):
        raise ProtocolError(f"{kind.name} has {length} bytes of payload in codec {coding.name}")
    if not 0 <= ahead <= MAX_AHEAD:
        raise ProtocolError(f"{kind.name} asks for the parameters after {ahead} updates")
    if not 0 <= waited < math.inf:
        raise ProtocolError(f"{kind.name} says that a push was held up for {waited} s")
    if not 0 <= filled <= 1:
        raise ProtocolError(f"{kind.name} says that a moment is {filled} gradients")
    return Header(kind, coding, shard, slot, inc, meta, boot, seq, base, length, flags, ahead, waited, filled)
