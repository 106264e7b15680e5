"""Payloads in pieces have the same effect as arrays."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.ps.pieces import Payload, Pieces, parts
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta
from tests.unit.trainer.ps.shards import pull_from, push_to

TRAINABLE, SIZE = 50, 70


def split(array: np.ndarray, length: int) -> Pieces:
    return Pieces([array[low : low + length] for low in range(0, array.size, length)])


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 60), st.integers(0, 60))
def test_parts_cover_a_range_once_and_in_order(size: int, length: int, low: int, high: int) -> None:
    values = np.arange(size, dtype=np.float32)
    low, high = sorted((min(low, size), min(high, size)))
    found = list(parts(split(values, length), low, high))
    assert [i for part, _ in found for i in range(part.start, part.stop)] == list(range(low, high))
    assert all((values[part] == view).all() and np.shares_memory(values, view) for part, view in found)
    assert all(part.start // length == (part.stop - 1) // length for part, _ in found)


def trained(config: OptimizerConfig, dtype: type, shape: Callable[[np.ndarray], Payload]) -> list[np.ndarray]:
    """The answers to gradients and differences of 70 values, and the optimizer's state."""
    rng = np.random.default_rng(1)
    shard = ShardStore(0, 1, 0, boot=1)
    shard.hello(
        0,
        0,
        ModelSpec(fingerprint="f" * 64, parameters=TRAINABLE, statistics=SIZE - TRAINABLE, optimizer=config),
    )
    shard.offer(0, 0, shape(rng.normal(size=SIZE).astype(np.float32)))
    answers = []
    for seq in range(1, 7):
        io = rng.normal(size=SIZE).astype(np.float32)
        io = io if dtype is np.float32 else (io.view(np.uint32) >> 16).astype(np.uint16)
        if seq == 3:
            io[60:] = np.nan if dtype is np.float32 else 0x7FC0
        arguments = 0, 0, seq, max(0, seq - 3), PushMeta(samples=1), shape(io)
        if seq < 4:
            push_to(shard, *arguments)
        else:
            push_to(shard, *arguments, delta=True)
        answers.append(io)
    pulled: np.ndarray = np.zeros(SIZE, dtype)
    pull_from(shard, 0, shape(pulled))
    assert shard.model is not None
    return [*answers, pulled, *shard.model.arrays().values()]


def test_empty_shard_takes_every_push() -> None:
    shard, empty = ShardStore(0, 2, 0, boot=1), Pieces([])
    config = OptimizerConfig(momentum=0.9, batch_size=1)
    shard.hello(0, 0, ModelSpec(fingerprint="f" * 64, parameters=3, optimizer=config))
    assert shard.size == 0
    shard.offer(0, 0, empty)
    push_to(shard, 0, 0, 1, 0, PushMeta(samples=1), empty)
    push_to(shard, 0, 0, 2, 0, PushMeta(samples=1), empty, delta=True)
    assert pull_from(shard, 0, empty).version == 2


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(momentum=0.9, batch_size=1),
        OptimizerConfig(name="adamw", weight_decay=0.1, no_decay=((3, 20), (31, 33)), batch_size=1),
        OptimizerConfig(name="adagrad", batch_size=1),
        OptimizerConfig(name="delta", learning_rate=1.0, batch_size=1),
    ],
    ids=lambda config: config.name,
)
@pytest.mark.parametrize("length", [16, 69])
def test_updates_are_those_of_one_array(config: OptimizerConfig, dtype: type, length: int) -> None:
    whole = trained(config, dtype, lambda array: array)
    pieces = trained(config, dtype, lambda array: split(array, length))
    assert len(whole) == len(pieces)
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one, other)
