"""The parameter server's optimizers and schedules compared with those of Keras."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_trainer.errors import UserError
from shoal_trainer.ps import kernels, schedules
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.model_state import ModelState
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.ps.update_rules import (
    Optimizer,
    Update,
    adam_momentum,
    fill,
    filled_by,
    free_pace,
    momentum_at,
    stretch,
)
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta, Schedule
from tests.unit.trainer.ps.shards import grad, pull_from, push_to, ready

N, STEPS, BATCH = 1000, 20, 8

CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("SGD", {"learning_rate": 0.1}, True),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9}, True),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}, True),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01}, False),
    ("Adam", {"learning_rate": 0.01}, False),
    ("Adam", {"learning_rate": 0.01, "beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-3}, False),
    ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.05}, False),
    ("Adagrad", {"learning_rate": 0.1}, True),
    ("Nadam", {"learning_rate": 0.01}, False),
    ("Nadam", {"learning_rate": 0.01, "beta_1": 0.8, "beta_2": 0.99, "weight_decay": 0.05}, False),
    ("Lion", {"learning_rate": 0.001, "beta_2": 0.99}, True),
    ("Lion", {"learning_rate": 0.001, "beta_1": 0.8, "beta_2": 0.9, "weight_decay": 0.05}, False),
    ("RMSprop", {"learning_rate": 0.01}, False),
    ("RMSprop", {"learning_rate": 0.01, "rho": 0.8, "weight_decay": 0.05}, False),
    ("RMSprop", {"learning_rate": 0.01, "momentum": 0.9}, False),
]


def run_keras(optimizer: Any, start: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    variable = keras.Variable(start)
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)])
    return np.asarray(variable.value.numpy())


def run_shard(config: OptimizerConfig, start: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    shard = ShardStore(0, 1, 0)
    shard.hello(0, 0, ModelSpec(fingerprint="f" * 64, parameters=N, optimizer=config))
    shard.offer(0, 0, start)
    io = start.copy()
    for seq, gradient in enumerate(gradients, start=1):
        io = gradient.copy()
        push_to(shard, 0, 0, seq, seq - 1, PushMeta(samples=BATCH), io)
    return io


@pytest.fixture
def numbers() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(N).astype(np.float32), rng.standard_normal((STEPS, N)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "arguments", "exact"), CASES, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(CASES)]
)
def test_optimizer_matches_keras(
    numbers: tuple[np.ndarray, np.ndarray], name: str, arguments: dict[str, Any], exact: bool
) -> None:
    """Bit for bit unless TensorFlow and NumPy round a scalar of the formula differently."""
    start, gradients = numbers
    theirs = run_keras(getattr(keras.optimizers, name)(**arguments), start, gradients)
    config = OptimizerConfig(name=name.lower(), batch_size=BATCH, **arguments)
    mine = run_shard(config, start, gradients)
    if exact:
        np.testing.assert_array_equal(mine, theirs)
    else:
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


SCHEDULES = [
    keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5),
    keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5, staircase=True),
    keras.optimizers.schedules.InverseTimeDecay(0.1, 10, 0.5),
    keras.optimizers.schedules.PiecewiseConstantDecay([5, 15], [0.1, 0.01, 0.001]),
    keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.01, power=2.0),
    keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.01, cycle=True),
    keras.optimizers.schedules.CosineDecay(0.1, 20, alpha=0.1),
    keras.optimizers.schedules.CosineDecay(0.0, 20, warmup_target=0.1, warmup_steps=5),
    keras.optimizers.schedules.CosineDecayRestarts(0.1, 7, t_mul=2.0, m_mul=0.9, alpha=0.01),
    keras.optimizers.schedules.CosineDecayRestarts(0.1, 7, t_mul=1.0),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{type(s).__name__}-{SCHEDULES.index(s)}")
def test_schedule_matches_keras(schedule: Any) -> None:
    config = {k: v for k, v in schedule.get_config().items() if k != "name"}
    mine = Schedule(name=type(schedule).__name__, config=config)
    for step in (0, 1, 4, 5, 6, 9, 10, 11, 15, 16, 19, 22, 30, 60):
        value = schedules.learning_rate(mine, step)
        assert value == pytest.approx(float(schedule(step)), rel=1e-4, abs=1e-8), step


def test_schedule_follows_the_samples_of_all_workers() -> None:
    rate = Schedule(name="PiecewiseConstantDecay", config={"boundaries": [1], "values": [1.0, 0.5]})
    shard = ShardStore(0, 1, 0)
    config = OptimizerConfig(learning_rate=rate, batch_size=BATCH)
    shard.hello(0, 0, ModelSpec(fingerprint="f" * 64, parameters=1, optimizer=config))
    shard.offer(0, 0, np.zeros(1, np.float32))
    steps = []
    for slot in range(4):
        before, io = shard.history.samples // BATCH, np.ones(1, np.float32)
        push_to(shard, slot, 0, 1, shard.history.version, PushMeta(samples=BATCH), io)
        steps.append((before, float(io[0])))
    assert steps == [(0, -1.0), (1, -2.0), (2, -2.5), (3, -3.0)]


def test_learning_rate_of_a_push_overrides_the_schedule() -> None:
    shard = ShardStore(0, 1, 0)
    config = OptimizerConfig(learning_rate=Schedule(name="MySchedule"), batch_size=1)
    shard.hello(0, 0, ModelSpec(fingerprint="f" * 64, parameters=1, optimizer=config))
    shard.offer(0, 0, np.zeros(1, np.float32))
    io = np.ones(1, np.float32)
    push_to(shard, 0, 0, 1, 0, PushMeta(samples=1, learning_rate=0.25), io)
    assert io[0] == -0.25
    with pytest.raises(UserError, match="MySchedule cannot be evaluated"):
        push_to(shard, 0, 0, 2, 1, PushMeta(samples=1), io)


@pytest.mark.parametrize("pace", [1.0, 2.0, 7.5, 31.0])
def test_momentum_lasts_longer_at_a_higher_pace_and_a_gradient_does_as_much(pace: float) -> None:
    config = OptimizerConfig(momentum=0.9)
    mu, slower = momentum_at(config, pace), stretch(pace)
    assert 1 / slower / (1 - mu) == pytest.approx(1 / (1 - 0.9))
    assert (mu == 0.9) == (pace == 1)
    assert (adam_momentum(config, pace) == 0.9) == (pace == 1)
    assert 0.9 <= adam_momentum(config, pace) < 1


@settings(deadline=None)
@given(st.floats(0, 0.999), st.floats(1, 1000), st.integers(1, 300))
def test_at_one_pace_the_first_moment_is_filled_as_keras_says(beta_1: float, pace: float, steps: int) -> None:
    beta, filled = adam_momentum(OptimizerConfig(beta_1=beta_1), pace), 0.0
    for _ in range(steps):
        filled = fill(filled, beta)
    assert filled == pytest.approx(filled_by(beta, steps), rel=1e-9)
    assert filled <= 1


def adam_steps(name: Any, paces: list[float], *, ahead: float = 0.0) -> tuple[ModelState, list[float]]:
    """How far each update moves the parameters by the same gradient, in learning rates."""
    config = OptimizerConfig(name=name, learning_rate=0.001, batch_size=1)
    model, steps = ModelState(ModelSpec(fingerprint="f" * 64, parameters=4, optimizer=config), 0, 1), []
    for pace in paces:
        before = float(model.parameters[0])
        model.apply_gradient(grad(1.0, 4), model.next_update(PushMeta(1), 1.0, 0, pace, ahead), 1, 0)
        steps.append((before - float(model.parameters[0])) / 0.001)
    return model, steps


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam"])
@pytest.mark.parametrize(("alone", "pace"), [(5, 3.5), (10, 7.5), (20, 31.5), (50, 499.5)])
def test_same_gradient_moves_adam_by_the_rate_whoever_joins(name: Any, alone: int, pace: float) -> None:
    """A longer momentum does not make what was learned at a shorter one many times as long."""
    _, steps = adam_steps(name, [1.0] * alone + [pace] * 100)
    assert steps[alone] == pytest.approx(steps[alone - 1], rel=0.04)
    if name != "nadam":  # whose first steps are shorter also in Keras
        np.testing.assert_allclose(steps, 1, rtol=1e-3)


@pytest.mark.parametrize("name", ["adam", "nadam"])
def test_answer_after_others_join_looks_ahead_as_far_as_the_next_update(name: Any) -> None:
    model, _ = adam_steps(name, [1.0] * 20 + [31.5])
    start, ahead = float(model.parameters[0]), grad(0.0, 4)
    model.anticipate(ahead, 1.0, 1.0, 31.5, 0)
    pushed = grad(0.0, 4)
    model.apply_gradient(pushed, model.next_update(PushMeta(1), 1.0, 0, 31.5, 1.0), 1, 0)
    assert start - ahead[0] == pytest.approx(start - model.parameters[0], rel=1e-3)
    assert model.parameters[0] - pushed[0] == pytest.approx(start - model.parameters[0], rel=0.05)


def test_gradients_that_are_the_same_agree_wholly_whoever_joins() -> None:
    for paces in ([1.0] * 20, [1.0] * 20 + [31.5], [31.5] * 20 + [1.0]):
        model, _ = adam_steps("adam", paces)
        assert model.agreement() == pytest.approx(1, abs=1e-3)


def test_velocity_goes_as_far_when_the_pace_changes() -> None:
    """Without another gradient, momentum moves the parameters by mu / (1 - mu) times the velocity, at any pace."""
    config = OptimizerConfig(learning_rate=0.1, momentum=0.9)

    def distance(paces: list[float]) -> float:
        optimizer, w = Optimizer(config, 0, 1), np.zeros(1, np.float32)
        optimizer.apply(w, np.ones(1, np.float32), Update(0.1, 1, paces[0]))
        for before, pace in pairwise(paces):
            optimizer.apply(w, np.zeros(1, np.float32), Update(0.1, 2, pace, before=before))
        return float(w[0])

    constant = distance([1.0] * 4000)
    assert constant == pytest.approx(-1.0, rel=1e-3)
    assert distance([1.0] * 3 + [15.0] * 4000) == pytest.approx(constant, rel=0.02)
    assert distance([15.0] * 100 + [1.0] * 4000) == pytest.approx(constant, rel=0.02)


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(learning_rate=0.1, momentum=0.9, batch_size=BATCH),
        OptimizerConfig(learning_rate=0.1, momentum=0.9, nesterov=True, batch_size=BATCH),
        OptimizerConfig(name="adam", learning_rate=0.01, batch_size=BATCH),
        OptimizerConfig(name="nadam", learning_rate=0.02, batch_size=BATCH),
        OptimizerConfig(name="lion", learning_rate=0.01, batch_size=BATCH),
        OptimizerConfig(name="rmsprop", learning_rate=0.01, momentum=0.9, batch_size=BATCH),
        OptimizerConfig(
            name="adamw",
            learning_rate=Schedule(
                name="PolynomialDecay", config={"initial_learning_rate": 0.1, "decay_steps": 200}
            ),
            batch_size=BATCH,
        ),
    ],
    ids=["momentum", "nesterov", "adam", "nadam", "lion", "rmsprop", "adamw with a schedule"],
)
def test_answer_one_update_ahead_lacks_only_the_next_gradient(
    numbers: tuple[np.ndarray, np.ndarray], config: OptimizerConfig
) -> None:
    """A push of zeros moves the parameters to where the answer was; Adam's second moments decay by a thousandth."""
    start, gradients = numbers
    shard = ShardStore(0, 1, 0)
    shard.hello(0, 0, ModelSpec(fingerprint="f" * 64, parameters=N, optimizer=config))
    shard.offer(0, 0, start)
    meta = PushMeta(samples=BATCH)
    for seq, gradient in enumerate(gradients, start=1):
        ahead = gradient.copy()
        push_to(shard, 0, 0, seq, seq - 1, meta, ahead, ahead=1.0)
    pulled, exact, after = start.copy(), start.copy(), np.zeros_like(start)
    pull_from(shard, 0, pulled, ahead=1.0)
    pull_from(shard, 0, exact)
    push_to(shard, 0, 0, STEPS + 1, STEPS, meta, after)
    moved = float(np.abs(after - exact).max())
    assert moved > 0.005
    np.testing.assert_allclose(ahead, after, atol=0.002 * moved)
    np.testing.assert_allclose(pulled, after, atol=0.002 * moved)


@pytest.mark.parametrize("name", ["adam", "lion"])
def test_pull_looks_ahead_at_the_learning_rate_of_the_last_push(name: Any) -> None:
    """Not at that of `compile()`, once a callback has set another one."""
    config = OptimizerConfig(name=name, learning_rate=0.01, batch_size=1)
    shard = ShardStore(0, 1, 0)
    shard.hello(0, 0, ModelSpec(fingerprint="f" * 64, parameters=1, optimizer=config))
    shard.offer(0, 0, np.ones(1, np.float32))
    for seq, rate in enumerate([None, 1e-4, 1e-4, None], 1):
        told, pulled = np.ones(1, np.float32), np.empty(1, np.float32)
        push_to(shard, 0, 0, seq, seq - 1, PushMeta(1, learning_rate=rate), told, ahead=3.0)
        pull_from(shard, 0, pulled, ahead=3.0)
        np.testing.assert_allclose(pulled, told, atol=1e-4 * (rate or 0.01))


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam"])
@pytest.mark.parametrize("pace", [1.0, 8.0])
def test_moments_tell_how_far_gradients_agree(name: Any, pace: float) -> None:
    """0 for noise, 1 for the same gradient again and again, and the share of the signal between them."""
    size, steps, rng = 20_000, 60, np.random.default_rng(0)
    signal = rng.choice([-1.0, 1.0], size)
    for share in (0.0, 0.5, 1.0):
        optimizer = Optimizer(OptimizerConfig(name=name), 0, size)
        assert optimizer.agreement(1, pace, 0.1) == 0
        w = np.zeros(size, np.float32)
        for step in range(1, steps + 1):
            noise = rng.standard_normal(size)
            io = (share**0.5 * signal + (1 - share) ** 0.5 * noise).astype(np.float32)
            optimizer.apply(w, io, Update(0.001, step, pace))
        filled = filled_by(adam_momentum(optimizer.config, pace), steps)
        assert optimizer.agreement(steps, pace, filled) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adagrad", "lion"])
def test_without_both_moments_nothing_tells_whether_gradients_agree(name: Any) -> None:
    assert Optimizer(OptimizerConfig(name=name), 0, 8).agreement(9, 1.0, 1.0) == 0


@pytest.mark.parametrize(
    ("config", "free"),
    [
        (OptimizerConfig(momentum=0.9), 4),
        (OptimizerConfig(), 1),
        (OptimizerConfig(name="delta"), 1),
        (OptimizerConfig(name="delta", normalized=True), 2.5),
        (OptimizerConfig(name="rmsprop"), 2.5),
        (OptimizerConfig(name="adagrad"), 2.5),
        (OptimizerConfig(name="rmsprop", momentum=0.9), 4),
        (OptimizerConfig(name="lion"), 4),
        (OptimizerConfig(name="nadam"), 4),
    ],
)
def test_optimizer_that_looks_ahead_is_free_for_longer(config: OptimizerConfig, free: float) -> None:
    assert free_pace(config) == free


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(name="adam", learning_rate=0.1, batch_size=1),
        OptimizerConfig(name="nadam", learning_rate=0.1, batch_size=1),
        OptimizerConfig(name="rmsprop", learning_rate=0.1, batch_size=1),
        OptimizerConfig(name="rmsprop", learning_rate=0.1, momentum=0.9, batch_size=1),
        OptimizerConfig(name="adagrad", learning_rate=0.1, batch_size=1),
    ],
    ids=lambda config: config.name,
)
@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_without_a_finite_square_counts_as_not_finite(
    config: OptimizerConfig, bf16: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its second moment would be infinite, and the parameter NaN with the next push."""
    shard = ready(ModelSpec(fingerprint="f" * 64, parameters=8, optimizer=config))
    for seq, value in enumerate((2e19, -3e38, 1.0, 1.0), start=1):
        io: Any = grad(value)
        if bf16:
            io = aligned(8, np.uint16)
            kernels.encode(grad(value), io)
        push_to(shard, 0, 0, seq, seq - 1, PushMeta(1), io)
    copy = shard.copy()
    assert copy is not None
    assert all(np.isfinite(values).all() for values in copy.arrays.values())
    assert (copy.arrays["parameters"] < 0).all()
    assert "pushed non-finite values" in caplog.text
