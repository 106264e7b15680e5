"""Pushes to a shard: fencing, repeated pushes, and weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shoal_trainer.contract import Staleness
from shoal_trainer.errors import Fenced, ProtocolError, Unreachable, UserError
from shoal_trainer.ps.history import APPLIED_INCARNATIONS
from shoal_trainer.ps.shard import AppliedPush, ShardStore
from shoal_trainer.wire.messages import (
    Average,
    ModelSpec,
    OptimizerConfig,
    PushMeta,
)
from tests.unit.trainer.ps.shards import DELTA, MODEL, ONE, SGD, N, grad, pull_from, push_to, read, ready


def test_second_initialization_is_ignored() -> None:
    shard = ready()
    shard.offer(0, 0, grad(7.0))
    np.testing.assert_array_equal(read(shard), 0)


def test_push_returns_updated_parameters() -> None:
    shard, io = ready(), grad()
    answer = push_to(shard, 0, 0, 1, 0, ONE, io)
    np.testing.assert_array_equal(io, -1)
    assert (answer.version, answer.meta.samples, answer.meta.applied) == (1, 1, {})  # the journal tells it
    assert pull_from(shard, 0, io).meta.applied == {(0, 0): 1}


def test_batches_of_a_push_are_reported_beside_it() -> None:
    """The speed of workers is in batches: a server that takes ten with a push was a tenth of what it is."""
    shard = ready()
    for seq, steps in ((1, 10), (2, 10), (2, 10), (3, 4)):
        push_to(shard, 0, 0, seq, 0, PushMeta(samples=steps, steps=steps), grad())
    report = shard.report()
    assert (report.updates, report.batches) == (3, 24)


def test_resent_push_is_answered_but_applied_once() -> None:
    applied: list[AppliedPush] = []
    shard = ready(on_applied=applied.append)
    for _ in range(3):
        io = grad()
        assert push_to(shard, 0, 0, 1, 0, ONE, io).version == 1
        np.testing.assert_array_equal(io, -1)
    assert [push.seq for push in applied] == [1]


def test_push_for_another_boot_is_rejected() -> None:
    shard = ready()
    with pytest.raises(Unreachable, match="before its restart"):
        push_to(shard, 0, 0, 1, 0, ONE, grad(), boot=2)
    assert shard.history.version == 0


def test_older_incarnation_is_fenced() -> None:
    shard = ready()
    shard.workers.connect(3, 1)
    push_to(shard, 3, 1, 1, 0, ONE, grad())
    shard.workers.connect(3, 2)
    with pytest.raises(Fenced):
        push_to(shard, 3, 1, 2, 0, ONE, grad())
    with pytest.raises(Fenced):
        shard.workers.connect(3, 1)
    shard.workers.fence(4, 5)
    with pytest.raises(Fenced, match="slot 4 has incarnation 5"):
        shard.hello(4, 4, MODEL)
    assert shard.history.version == 1


def test_malformed_requests_are_rejected() -> None:
    shard = ready()
    with pytest.raises(ProtocolError, match="holds 8 values, the message 9"):
        push_to(shard, 0, 0, 1, 0, ONE, grad(1.0, 9))
    with pytest.raises(ProtocolError, match="begin at 1"):
        push_to(shard, 0, 0, 0, 0, ONE, grad())
    with pytest.raises(Unreachable, match="recovering"):
        pull_from(ShardStore(0, 1, 0), 0, grad(0.0, 0))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (MODEL.model_copy(update={"parameters": 9}), "8 trainable and 0 other values, this worker's 9 and 0"),
        (MODEL.model_copy(update={"fingerprint": "0" * 64}), "names, shapes or types"),
        (MODEL.model_copy(update={"averages": (Average(8, 9, 0.9),)}), "another momentum"),
        (MODEL.model_copy(update={"optimizer": OptimizerConfig()}), "optimizer is configured differently"),
    ],
)
def test_different_model_is_a_user_error(other: ModelSpec, message: str) -> None:
    shard = ready()
    with pytest.raises(UserError, match=message):
        shard.hello(1, 0, other)


@pytest.mark.parametrize("policy", ["Constant", "InverseSquareRoot", "Inverse"])
def test_gradient_that_is_staler_than_normal_is_weighted_down(policy: str) -> None:
    applied: list[AppliedPush] = []
    shard = ready(staleness=Staleness(policy=policy), on_applied=applied.append)
    for seq in range(1, 5):
        push_to(shard, 1, 0, seq, seq - 1, ONE, grad(0.0))
    io = grad()
    push_to(shard, 0, 0, 1, 0, ONE, io)
    np.testing.assert_allclose(io, -0.25)
    assert applied[-1].staleness == 4
    assert applied[-1].weight == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("policy", "power"), [("Constant", 0.0), ("InverseSquareRoot", 0.5), ("Inverse", 1.0)]
)
@pytest.mark.parametrize(
    ("momentum", "agree", "over"),
    [(0.9, False, 10 / 4), (0.0, False, 10), (0.9, True, 21), (0.0, True, 10)],
)
def test_normal_staleness_is_weighted_by_policy_and_agreement(
    policy: str, power: float, momentum: float, agree: bool, over: float
) -> None:
    """Eleven workers that take turns: each gradient is 10 updates old."""
    applied: list[AppliedPush] = []
    config = OptimizerConfig(momentum=momentum, batch_size=1)
    model = MODEL.model_copy(update={"optimizer": config})
    shard = ready(model, staleness=Staleness(policy=policy), on_applied=applied.append)
    shard.workers.set_live(11)
    for turn in range(220):
        seq, slot = divmod(turn, 11)
        gradient = np.eye(N, dtype=np.float32)[turn % N] + agree * 1000
        push_to(shard, slot, 0, seq + 1, max(0, turn - 10), ONE, gradient)
    assert applied[-1].staleness == 10
    assert applied[-1].weight == pytest.approx(over**-power, rel=1e-4)


@pytest.mark.parametrize(
    "config", [OptimizerConfig(batch_size=1), OptimizerConfig(momentum=0.9, batch_size=1)]
)
def test_one_worker_has_the_rate_of_keras_whatever_others_agreed_on(config: OptimizerConfig) -> None:
    applied: list[AppliedPush] = []
    shard = ready(MODEL.model_copy(update={"optimizer": config}), on_applied=applied.append)
    shard.workers.set_live(8)
    for seq in range(1, 30):
        for slot in range(8):
            push_to(shard, slot, 0, seq, max(0, shard.history.version - 7), ONE, grad())
    shard.workers.set_live(1)
    for seq in range(30, 200):
        push_to(shard, 0, 0, seq, shard.history.version, ONE, grad())
    assert applied[100].weight < 0.5
    assert applied[-1].weight == 1


def test_own_gradient_in_flight_is_no_staleness() -> None:
    """A worker that overlaps has added its last gradient itself; so one that is alone is not slowed down."""
    applied: list[AppliedPush] = []
    shard = ready(on_applied=applied.append)
    for seq in range(1, 9):
        push_to(shard, 0, 0, seq, max(0, seq - 2), PushMeta(samples=1, length=float(seq)), grad(0.0))
    assert [push.staleness for push in applied] == [0] + [1] * 7
    assert [push.weight for push in applied] == [1.0] * 8


def test_push_is_weighted_by_its_samples() -> None:
    shard, io = ready(), grad()
    push_to(shard, 0, 0, 1, 0, PushMeta(samples=3), io)
    np.testing.assert_array_equal(io, -3)


def test_statistics_are_averaged_not_optimized() -> None:
    model = ModelSpec(fingerprint="f" * 64, parameters=N, statistics=2, optimizer=SGD)
    shard = ready(model)
    io = grad(1.0, N + 2)
    push_to(shard, 0, 0, 1, 0, ONE, io)
    np.testing.assert_array_equal(io, [-1] * N + [1, 1])
    push_to(shard, 0, 0, 2, 1, ONE, grad(0.0, N + 2))
    io = grad(1.0, N + 2)
    push_to(shard, 1, 0, 1, 0, ONE, io)
    np.testing.assert_array_equal(io[N:], 1.5)  # two versions old: weight 1/2


@pytest.mark.parametrize("config", [SGD, OptimizerConfig(name="adam", batch_size=1)], ids=["sgd", "adam"])
def test_push_without_a_gradient_moves_only_the_statistics(config: OptimizerConfig) -> None:
    """It counts like another one, but the optimizer takes no step, as in Keras."""
    averages = (Average(N, N + 1, 0.75),)
    shard = ready(
        ModelSpec(fingerprint="f" * 64, parameters=N, statistics=2, averages=averages, optimizer=config)
    )
    push_to(shard, 0, 0, 1, 0, ONE, grad(1.0, N + 2))
    assert shard.model is not None
    before = {name: values.copy() for name, values in shard.model.arrays().items()}
    io = grad(5.0, N + 2)
    answer = push_to(shard, 0, 0, 2, 1, PushMeta(samples=3, skipped=True), io)
    assert (answer.version, answer.meta.samples, shard.model.updates) == (2, 4, 1)
    np.testing.assert_array_equal(io[N:], [0.25 + (5 - 0.25) / 4, 1 + 5])
    np.testing.assert_array_equal(io[:N], before["parameters"][:N])
    for name, values in shard.model.optimizer.state.items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.parametrize("value", [3e18, 1e20])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "lion", "rmsprop", "adagrad"])
def test_gradient_whose_length_is_beyond_fp32_moves_nothing(name: str, value: float) -> None:
    """Nor a moment: Lion's would walk with its sign, and others' would make all later steps small."""
    options: dict[str, Any] = {"name": "sgd", "momentum": 0.9} if name == "momentum" else {"name": name}
    shard = ready(MODEL.model_copy(update={"optimizer": OptimizerConfig(batch_size=1, **options)}))
    shard.workers.set_live(4)
    for slot in range(4):
        push_to(shard, slot, 0, 1, 0, PushMeta(samples=1, length=3.0), grad())
    assert shard.model is not None
    before = {key: values.copy() for key, values in shard.model.arrays().items()}
    push_to(shard, 0, 0, 2, 1, PushMeta(samples=1, length=math.inf), grad(value))
    assert (shard.history.version, shard.model.updates) == (5, 4)
    for key, values in shard.model.arrays().items():
        np.testing.assert_array_equal(values, before[key])


def test_weight_decay_skips_excluded_ranges() -> None:
    config = OptimizerConfig(
        name="adamw", learning_rate=0.1, weight_decay=0.5, batch_size=1, no_decay=((2, 4), (6, 100))
    )
    shard = ShardStore(0, 1, 0)
    shard.hello(0, 0, MODEL.model_copy(update={"optimizer": config}))
    shard.offer(0, 0, grad(1.0))
    io = grad(0.0)
    push_to(shard, 0, 0, 1, 0, ONE, io)
    np.testing.assert_allclose(io, [0.95, 0.95, 1, 1, 0.95, 0.95, 1, 1])


def test_worker_side_updates_are_weighted_like_gradients() -> None:
    model = MODEL.model_copy(update={"optimizer": DELTA, "parameters": N - 2, "statistics": 2})
    shard = ready(model)
    io = grad()
    push_to(shard, 0, 0, 1, 0, PushMeta(samples=4), io)
    np.testing.assert_array_equal(io, 1)  # a delta is added
    for seq in range(2, 5):
        push_to(shard, 0, 0, seq, shard.history.version, PushMeta(samples=4), grad(0.0))
    io = grad()
    push_to(shard, 1, 0, 1, 0, PushMeta(samples=4), io)  # four updates old, where none is normal
    np.testing.assert_allclose(io, [*[1.25] * (N - 2), *[1.25] * 2])
    io = grad()
    push_to(shard, 1, 0, 2, shard.history.version, PushMeta(samples=2), io)  # half a batch
    np.testing.assert_allclose(io[: N - 2], 1.75)


def test_outage_delta_is_multiplied_by_its_scale() -> None:
    shard, io = ready(MODEL.model_copy(update={"optimizer": DELTA})), grad()
    push_to(shard, 0, 0, 1, 0, PushMeta(samples=4, scale=0.5), io, delta=True)
    np.testing.assert_array_equal(io, 0.5)


@pytest.mark.parametrize("optimizer", [SGD, SGD.model_copy(update={"momentum": 0.9}), DELTA])
def test_non_finite_values_become_zero_and_are_logged_once(
    optimizer: OptimizerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODEL.model_copy(update={"optimizer": optimizer, "parameters": N - 2, "statistics": 2})
    shard = ready(model)
    for seq in range(1, 4):
        io = np.array([np.nan, np.inf, -np.inf, 1, 1, 1, np.nan, 1], np.float32)
        push_to(shard, 0, 0, seq, shard.history.version, ONE, io)
        assert np.isfinite(io).all()
        np.testing.assert_array_equal(io[[0, 1, 2, 6]], 0)
        assert io[3] != 0
    io = grad(np.nan)
    push_to(shard, 1, 0, 1, shard.history.version, ONE, io, delta=True)
    assert np.isfinite(io).all()
    assert [record.getMessage() for record in caplog.records] == [
        f"worker {slot}-0 pushed non-finite values: they were replaced by 0" for slot in (0, 1)
    ]


def test_applied_vector_is_bounded() -> None:
    shard = ready()
    for incarnation in range(20):
        for slot in range(3):
            push_to(shard, slot, incarnation, 1, shard.history.version, ONE, grad(0.0))
    assert len(shard.history.applied) == 3 * APPLIED_INCARNATIONS
    assert set(shard.history.applied) == {
        (slot, inc) for slot in range(3) for inc in range(20 - APPLIED_INCARNATIONS, 20)
    }


def test_momentum_lasts_longer_with_more_live_workers() -> None:
    config = OptimizerConfig(learning_rate=1.0, momentum=0.9, batch_size=1)
    shard = ready(MODEL.model_copy(update={"optimizer": config}), staleness=Staleness(policy="Constant"))
    push_to(shard, 0, 0, 1, 0, ONE, grad())  # m = -1
    shard.workers.set_live(2)
    io = grad(0.0)
    push_to(shard, 0, 0, 2, 1, ONE, io)  # two workers that wait for their answers: m = 0.9 · -1
    np.testing.assert_allclose(io, -1.9, rtol=1e-6)
    shard.workers.set_live(33)  # a pace of 16: slower by 16 ** 1.25 = 32
    io = grad(0.0)
    push_to(shard, 0, 0, 3, 2, ONE, io)  # m = 0.9 / 32 · -0.9
    np.testing.assert_allclose(io, -1.9 - 0.81 / 32, rtol=1e-6)
    io = grad(0.0)
    push_to(shard, 0, 0, 4, 3, ONE, io)
    np.testing.assert_allclose(io, -1.9 - 0.81 / 32 * (1 + 1 - 0.1 / 32), rtol=1e-6)
