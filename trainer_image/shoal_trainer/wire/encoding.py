"""The messages of the data plane as bytes.

HELLO and WELCOME are rare and extensible, so they are JSON. Pushes and answers are sent with every step and have a
binary layout. Decoders take untrusted bytes: invalid input raises `ProtocolError`, and memory is bounded by its length.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from shoal_trainer.contract import Message
from shoal_trainer.errors import ProtocolError
from shoal_trainer.wire.messages import (
    MAX_APPLIED,
    MAX_JOURNAL,
    MAX_MARKS,
    MAX_METRICS,
    MAX_NAME,
    AnswerMeta,
    BegunPush,
    Entry,
    Journal,
    MetricSum,
    Progress,
    PushMeta,
    Timings,
)

M = TypeVar("M", bound=Message)

_PUSH = struct.Struct("<III4f5f?HH")
_MARK = struct.Struct("<IiQQ")
_METRIC = struct.Struct("<Bdd")
_ANSWER = struct.Struct("<QIHQIQH?f")
_BEGUN = struct.Struct("<IIQIqH")
_ENTRY = struct.Struct("<QIIQIIiQQ")
_APPLIED = struct.Struct("<IIQ")


def encode_push(meta: PushMeta) -> bytes:
    """Encode `meta`; `ProtocolError` if it has more than `MAX_MARKS` marks.

    Only the first `MAX_METRICS` metrics are sent, with names of at most `MAX_NAME` bytes.
    """
    marks, metrics = meta.progress, meta.metrics[:MAX_METRICS]
    if len(marks) > MAX_MARKS:
        raise ProtocolError(
            f"the push covers {len(marks)} ranges of the data, at most {MAX_MARKS} are allowed"
        )
    rate = math.nan if meta.learning_rate is None else meta.learning_rate
    head = _PUSH.pack(
        meta.samples, meta.steps, meta.left_out, meta.loss, rate, meta.scale, meta.length,
        *meta.timings[:5], meta.skipped, len(marks), len(metrics),
    )  # fmt: skip
    parts = [head, *(_MARK.pack(*mark) for mark in marks)]
    for metric in metrics:
        name = metric.name.encode()[:MAX_NAME].decode(errors="ignore").encode()
        parts += [_METRIC.pack(len(name), metric.total, metric.weight), name]
    return b"".join(parts)


def decode_push(data: bytes | bytearray | memoryview) -> PushMeta:
    """Decode the output of `encode_push`; `ProtocolError` if it is invalid."""
    if len(data) < _PUSH.size:
        raise ProtocolError(f"the meta block of a push has {len(data)} bytes, expected at least {_PUSH.size}")
    samples, steps, left_out, loss, rate, scale, length, *rest = _PUSH.unpack_from(data)
    *seconds, skipped, count, named = rest
    marked = _PUSH.size + count * _MARK.size
    if count > MAX_MARKS or len(data) < marked:
        raise ProtocolError("the meta block of a push does not match the length that it states")
    progress = tuple(map(Progress._make, _MARK.iter_unpack(data[_PUSH.size : marked])))
    metrics = _decode_metrics(bytes(data[marked:]), named)
    numbers = scale, *seconds, *(number for metric in metrics for number in metric[1:])
    if not all(map(math.isfinite, numbers)):
        raise ProtocolError("the meta block of a push has a non-finite number")
    own_rate, timings = rate if math.isfinite(rate) else None, Timings(*seconds)
    return PushMeta(
        samples, steps, loss, own_rate, scale, timings, progress, metrics, length, left_out, skipped
    )


def _decode_metrics(data: bytes, count: int) -> tuple[MetricSum, ...]:
    """Decode all of `data`, `count` metrics."""
    metrics, at = [], 0
    try:
        for _ in range(min(count, MAX_METRICS)):
            length, total, weight = _METRIC.unpack_from(data, at)
            at += _METRIC.size + length
            metrics.append(MetricSum(data[at - length : at].decode(), total, weight))
    except (struct.error, UnicodeDecodeError):
        at = -1
    if at != len(data) or count > MAX_METRICS:
        raise ProtocolError("the meta block of a push does not match the length that it states")
    return tuple(metrics)


def encode_answer(meta: AnswerMeta) -> bytes:
    """Encode `meta`."""
    entries = _newest(meta.applied)
    journal = meta.journal
    counts = meta.samples, meta.live_workers, len(entries)
    lengths = len(journal.entries), meta.stopped, len(meta.begun)
    head = _ANSWER.pack(*counts, journal.floor, *lengths, meta.torn, meta.factor)
    applied = b"".join(_APPLIED.pack(slot, incarnation, seq) for (slot, incarnation), seq in entries)
    recorded = b"".join(_ENTRY.pack(*entry) for entry in journal.entries)
    return head + applied + recorded + b"".join(map(_encode_begun, meta.begun))


def _newest(applied: Mapping[tuple[int, int], int]) -> list[tuple[tuple[int, int], int]]:
    """As many as may be sent: of each slot the newest incarnations, as the older ones push no more."""
    if len(applied) <= MAX_APPLIED:
        return list(applied.items())
    seen: Counter[int] = Counter()
    ranked = []
    for entry in sorted(applied.items(), reverse=True):
        slot = entry[0][0]
        ranked.append((seen[slot], entry))
        seen[slot] += 1
    return [entry for _, entry in sorted(ranked)[:MAX_APPLIED]]


def decode_answer(data: bytes | bytearray | memoryview) -> AnswerMeta:
    """Decode the output of `encode_answer`; `ProtocolError` if it is invalid."""
    if len(data) < _ANSWER.size:
        raise ProtocolError(
            f"the meta block of an answer has {len(data)} bytes, expected at least {_ANSWER.size}"
        )
    samples, live, count, floor, entries, stopped, parts, torn, factor = _ANSWER.unpack_from(data)
    middle = _ANSWER.size + count * _APPLIED.size
    end = middle + entries * _ENTRY.size
    if count > MAX_APPLIED or entries > MAX_JOURNAL or parts > MAX_APPLIED or len(data) < end:
        raise ProtocolError("the meta block of an answer does not match the length that it states")
    if not 0 <= factor <= 1:
        raise ProtocolError(f"the meta block of an answer has the factor {factor}")
    applied = {(slot, inc): seq for slot, inc, seq in _APPLIED.iter_unpack(data[_ANSWER.size : middle])}
    journal = Journal(floor, tuple(map(Entry._make, _ENTRY.iter_unpack(data[middle:end]))))
    begun = _decode_begun(bytes(data[end:]), parts)
    return AnswerMeta(samples, live, applied, journal, stopped, begun, torn, factor)


def _encode_begun(push: BegunPush) -> bytes:
    *numbers, progress = push
    return _BEGUN.pack(*numbers, len(progress)) + b"".join(_MARK.pack(*mark) for mark in progress)


def _decode_begun(data: bytes, count: int) -> tuple[BegunPush, ...]:
    """Decode all of `data`, `count` begun pushes."""
    begun, at = [], 0
    try:
        for _ in range(count):
            slot, incarnation, seq, pieces, closed, marks = _BEGUN.unpack_from(data, at)
            at += _BEGUN.size
            stop = at + marks * _MARK.size
            if stop > len(data):
                break
            progress = tuple(map(Progress._make, _MARK.iter_unpack(data[at:stop])))
            begun.append(BegunPush(slot, incarnation, seq, pieces, closed, progress))
            at = stop
    except struct.error:
        at = -1
    if at != len(data) or len(begun) != count:
        raise ProtocolError("the meta block of an answer does not match the length that it states")
    return tuple(begun)


def decode_json(kind: type[M], data: bytes | bytearray | memoryview) -> M:
    """Decode a JSON message of type `kind`; `ProtocolError` if it is invalid."""
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"not a valid {kind.__name__}: {where}: {first['msg']}") from None
