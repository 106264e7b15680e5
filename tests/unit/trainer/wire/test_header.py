"""Round trips of the wire format, and decoders with invalid input."""

from __future__ import annotations

import json
import math
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal_trainer.contract import Message, RuntimeConfig, Shard, StatusReport, TerminationMessage
from shoal_trainer.coordinator.artefacts import ModelManifest
from shoal_trainer.coordinator.protocol import REQUESTS, Alive, Assignment, Joined, Pushes
from shoal_trainer.errors import ProtocolError, TrainerError
from shoal_trainer.ps.shard_client import ShardClient, Target, _Link
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.manifest import Manifest, ShardFile, applied_from_list, applied_to_list
from shoal_trainer.wire import header
from shoal_trainer.wire.channel import Channel
from shoal_trainer.wire.encoding import decode_answer, decode_json, decode_push, encode_answer, encode_push
from shoal_trainer.wire.handshake import Server, read_peer
from shoal_trainer.wire.header import ASK, Codec, Header, Op
from shoal_trainer.wire.messages import (
    MAX_APPLIED,
    MAX_JOURNAL,
    MAX_MARKS,
    MAX_METRICS,
    MAX_NAME,
    AnswerMeta,
    BegunPush,
    Entry,
    Held,
    Hello,
    Journal,
    MetricSum,
    ModelSpec,
    Progress,
    PushMeta,
    ShardWelcome,
    Timings,
    WorkerIdentity,
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
i32 = st.integers(-(2**31), 2**31 - 1)
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
f64 = st.floats(allow_nan=False, allow_infinity=False)
marks = st.builds(Progress, u32, i32, u64, u64)
applied = st.dictionaries(st.tuples(u32, u32), u64, max_size=40)
headers = st.builds(
    Header,
    op=st.sampled_from(Op),
    codec=st.just(Codec.BF16),
    shard=u16,
    slot=u32,
    incarnation=u32,
    meta=st.integers(0, header.MAX_META),
    boot=u64,
    seq=u64,
    version=u64,
    length=st.integers(0, 2**40).map(lambda n: 2 * n),
    flags=st.integers(0, 255),
    ahead=st.floats(0, 8192, width=32),
    waited=st.floats(0, 8192, width=32),
    filled=st.floats(0, 1, width=16),
)
pushes = st.builds(
    PushMeta,
    samples=u32,
    steps=u32,
    loss=f32,
    learning_rate=st.none() | f32,
    scale=f32,
    length=f32,
    left_out=u32,
    skipped=st.booleans(),
    timings=st.builds(Timings, f32, f32, f32, f32, f32, wait=st.just(0.0)),  # a worker does not know it
    progress=st.lists(marks, max_size=20).map(tuple),
    metrics=st.lists(st.builds(MetricSum, st.text(max_size=60), f64, f64), max_size=9).map(tuple),
)
journals = st.builds(
    Journal,
    u64,
    st.lists(st.builds(Entry, u64, u32, u32, u64, u32, u32, i32, u64, u64), max_size=20).map(tuple),
)
begun = st.builds(
    BegunPush, u32, u32, u64, u32, st.integers(-1, 2**62), st.lists(marks, max_size=3).map(tuple)
)
answers = st.builds(
    AnswerMeta,
    u64,
    u32,
    applied,
    journals,
    u64,
    st.lists(begun, max_size=3).map(tuple),
    st.booleans(),
    st.floats(0, 1, width=32),
)


@settings(deadline=None)
@given(headers)
def test_header_round_trip(value: Header) -> None:
    data = header.encode(value)
    assert len(data) == header.SIZE == 64
    assert header.decode(data) == value


@pytest.mark.parametrize("ahead", [-1.0, math.nan, math.inf, 1e9])
def test_header_that_looks_ahead_too_far_is_refused(ahead: float) -> None:
    with pytest.raises(ProtocolError, match="PULL asks for the parameters after"):
        header.decode(header.encode(Header(Op.PULL, ahead=ahead)))


@pytest.mark.parametrize("waited", [-1.0, math.nan, math.inf])
def test_header_of_a_push_that_waited_for_no_time_is_refused(waited: float) -> None:
    with pytest.raises(ProtocolError, match="OK says that a push was held up for"):
        header.decode(header.encode(Header(Op.OK, waited=waited)))


@pytest.mark.parametrize("filled", [-0.5, math.nan, 1.5])
def test_header_of_a_moment_of_more_than_gradients_is_refused(filled: float) -> None:
    with pytest.raises(ProtocolError, match="PARAMETERS says that a moment is"):
        header.decode(header.encode(Header(Op.PARAMETERS, filled=filled)))


@settings(deadline=None)
@given(pushes)
def test_push_round_trip(value: PushMeta) -> None:
    assert decode_push(encode_push(value)) == value


@settings(deadline=None)
@given(answers)
def test_answer_round_trip(value: AnswerMeta) -> None:
    assert decode_answer(encode_answer(value)) == value


@settings(deadline=None)
@given(applied)
def test_applied_vector_json_round_trip(value: dict[tuple[int, int], int]) -> None:
    assert applied_from_list(applied_to_list(value)) == value


def test_push_with_too_many_marks_is_refused_not_truncated() -> None:
    marks = tuple(Progress(0, number, 0, 1) for number in range(MAX_MARKS + 1))
    assert decode_push(encode_push(PushMeta(1, progress=marks[1:]))).progress == marks[1:]
    with pytest.raises(ProtocolError, match="covers 257 ranges of the data, at most 256"):
        encode_push(PushMeta(1, progress=marks))


def test_only_so_many_metrics_with_short_names_are_sent() -> None:
    metrics = tuple(MetricSum(f"{number}" + "ä" * MAX_NAME, 1.0, 2.0) for number in range(MAX_METRICS + 1))
    found = decode_push(encode_push(PushMeta(1, metrics=metrics))).metrics
    assert len(found) == MAX_METRICS
    assert all(metric.name.startswith(each.name) for metric, each in zip(metrics, found, strict=False))
    assert max(len(each.name.encode()) for each in found) == MAX_NAME


def test_push_with_a_metric_that_is_no_number_is_refused() -> None:
    with pytest.raises(ProtocolError, match="non-finite"):
        decode_push(encode_push(PushMeta(1, metrics=(MetricSum("accuracy", math.nan, 1.0),))))


def test_push_without_loss_has_nan_loss() -> None:
    assert math.isnan(decode_push(encode_push(PushMeta(1))).loss)


def of_json(kind: type[Message]) -> Callable[[bytes], Message]:
    return lambda data: decode_json(kind, data)


MESSAGES: tuple[type[Message], ...] = (
    Held,
    Hello,
    ShardWelcome,
    *REQUESTS.values(),
    *(Joined, Assignment, Alive, ShardFile, Pushes),
    *(Manifest, ModelManifest, StatusReport, TerminationMessage, RuntimeConfig),
)
DECODERS: tuple[Callable[[bytes], Any], ...] = (
    *(header.decode, decode_push, decode_answer, read_peer),
    *map(of_json, MESSAGES),
)
MEMORY = 1 << 20
"""Bytes that a decoder may allocate for a message of some hundred bytes."""


@contextmanager
def allocates(limit: int) -> Iterator[None]:
    """Check that no more bytes are allocated at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= limit
    finally:
        tracemalloc.stop()


def check_refused_or_decoded(data: bytes) -> None:
    with allocates(MEMORY):
        for decode in DECODERS:
            with suppress(ProtocolError):
                decode(data)


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_decoded(data: bytes) -> None:
    check_refused_or_decoded(data)


def damaged(data: bytes, damage: list[tuple[int, int]], cut: int) -> bytes:
    """The message with bytes changed, removed or added."""
    broken = bytearray(data[:cut] if cut < 0 else data + bytes(cut))
    for place, value in damage:
        if broken:
            broken[place % len(broken)] = value
    return bytes(broken)


damages = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.one_of(headers.map(header.encode), pushes.map(encode_push), answers.map(encode_answer)),
    damages,
    st.integers(-8, 8),
)
def test_damaged_messages_are_refused_or_decoded(
    data: bytes, damage: list[tuple[int, int]], cut: int
) -> None:
    check_refused_or_decoded(damaged(data, damage, cut))


keys = st.sampled_from(
    sorted({field.alias or name for kind in MESSAGES for name, field in kind.model_fields.items()})
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=9,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.dictionaries(keys, values, max_size=12))
def test_json_of_any_shape_is_refused_or_decoded(fields: dict[str, Any]) -> None:
    check_refused_or_decoded(json.dumps(fields).encode())


@contextmanager
def answering(data: bytes, credentials: Credentials) -> Iterator[ShardClient]:
    """A client whose server answers `data`, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        with listener.accept()[0] as theirs:
            theirs.sendall(data)
    client = ShardClient(0, Shard(host="127.0.0.1"), WorkerIdentity("uid", 0, 0), credentials)
    client._link = _Link(Channel(ours, timeout=30), Server(0, 1))
    yield client
    client.close()


@settings(max_examples=examples(200), deadline=None)
@given(
    headers.map(lambda head: head._replace(op=Op.PARAMETERS)) | headers,
    answers.map(encode_answer),
    st.none() | u32,
    st.sampled_from((0, 128, 256)),
    damages | st.just([]),
    st.integers(-8, 8),
)
def test_answer_of_a_hostile_server_is_refused_or_decoded(
    head: Header, meta: bytes, announced: int | None, payload: int, damage: list[tuple[int, int]], cut: int
) -> None:
    size = len(meta) if announced is None else announced
    message = header.encode(head._replace(meta=size, length=payload)) + meta + bytes(payload)
    out = np.zeros(64, np.float32)
    with (
        answering(damaged(message, damage, cut), Credentials(Path(), "1", b"")) as client,
        allocates(header.MAX_META_HELLO + MEMORY),
        suppress(TrainerError),
    ):
        decode_answer(client.receive(Op.PARAMETERS, Target(out, 64, 64, Codec.BF16))[1])


def test_answer_with_a_full_journal_and_hundreds_of_begun_pushes_may_be_read() -> None:
    """Those of workers that send, after an outage, what they have trained: else none could pull any more."""
    marks = tuple(Progress(0, -1, 2 * mark, 2 * mark + 1) for mark in range(MAX_MARKS))
    begun = tuple(BegunPush(slot, 0, 1, 1, -1, marks) for slot in range(500))
    entry = Entry(1, 0, 0, 1, 1, 0, -1, 0, 2)
    meta = encode_answer(AnswerMeta(journal=Journal(0, (entry,) * MAX_JOURNAL), begun=begun))
    assert header.decode(header.encode(Header(Op.PARAMETERS, meta=len(meta)))).meta == len(meta)


def test_a_payload_that_was_not_sent_is_not_sent_again() -> None:
    message = header.encode(Header(Op.BUSY, flags=ASK))
    with (
        answering(message, Credentials(Path(), "1", b"")) as client,
        pytest.raises(ProtocolError, match="not sent"),
    ):
        client.receive(Op.OK)


def test_oversized_count_is_refused_without_allocation() -> None:
    meta = bytearray(encode_push(PushMeta(1)))
    struct.pack_into("<H", meta, len(meta) - 2, 0xFFFF)
    with pytest.raises(ProtocolError, match="length that it states"):
        decode_push(meta)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: b"X"}, "not a message"),
        ({4: b"\x09"}, "version 9"),
        ({5: b"\x63"}, "unknown operation"),
        ({6: b"\x07"}, "codec 7"),
        ({24: b"\xff\xff\xff\x7f"}, "meta block of"),
        ({52: b"\x03"}, "bytes of payload"),
    ],
)
def test_invalid_header_is_refused(change: dict[int, bytes], message: str) -> None:
    data = bytearray(header.encode(Header(Op.PUSH_PULL, Codec.BF16)))
    for place, value in change.items():
        data[place : place + len(value)] = value
    with pytest.raises(ProtocolError, match=message):
        header.decode(data)


def test_model_without_parameters_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"Hello: model\.parameters"):
        decode_json(Hello, b'{"model": {"fingerprint": "0123456789", "parameters": 0}}')


def test_model_spec_json_round_trip() -> None:
    hello = Hello(model=ModelSpec(fingerprint="f" * 64, parameters=10, statistics=2), held=Held(version=3))
    assert decode_json(Hello, hello.to_json().encode()) == hello


def test_of_too_many_workers_the_newest_of_each_slot_are_told() -> None:
    """Else a shard that is restored from a worker's copy would apply their resent pushes twice."""
    slots = MAX_APPLIED * 3 // 4
    applied = {(slot, incarnation): 1 + slot for incarnation in (0, 1, 7) for slot in range(slots)}
    found = decode_answer(encode_answer(AnswerMeta(applied=applied))).applied
    assert len(found) == MAX_APPLIED
    assert found.items() <= applied.items()
    assert all((slot, 7) in found for slot in range(slots))
    assert not any(incarnation == 0 for _, incarnation in found)
