"""One worker whose push overlaps its next step trains as one that waits for each answer."""

import numpy as np
import pytest

from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire import header
from shoal_trainer.wire.header import MAX_AHEAD, Header, Op
from shoal_trainer.wire.messages import (
    AnswerMeta,
    ModelSpec,
    OptimizerConfig,
    Pulled,
    Push,
    PushMeta,
    Schedule,
)
from shoal_trainer.worker.anticipation import LEAD, Anticipation
from shoal_trainer.worker.on_host import HostInclusion
from shoal_trainer.worker.send import Send
from tests.unit.trainer.ps.shards import pull_from, push_to

N, STATISTICS, STEPS = 40, 4, 60
WARM_UP = Schedule(
    name="CosineDecay",
    config={"initial_learning_rate": 0.001, "decay_steps": 50, "warmup_target": 0.02, "warmup_steps": 10},
)
rng = np.random.default_rng(0)
CURVATURES = np.geomspace(0.05, 20, N).astype(np.float32)
NOISE = rng.standard_normal((STEPS, N)).astype(np.float32)
START = rng.standard_normal(N + STATISTICS).astype(np.float32)


def update(parameters, step, config):
    """The gradient of a noisy quadratic bowl (or a step of a worker's own SGD), and a change of statistics."""
    gradient = CURVATURES * parameters[:N] + 0.1 * NOISE[step]
    trained = -0.05 * gradient if config.name == "delta" else gradient
    return np.concatenate([trained, 0.1 * (1 - parameters[N:])]).astype(np.float32)


def server(config):
    shard = ShardStore(0, 1, 0)
    spec = ModelSpec(fingerprint="f" * 64, parameters=N, statistics=STATISTICS, optimizer=config)
    shard.hello(0, 0, spec)
    shard.offer(0, 0, START.copy())
    return shard


def exact(shard):
    out = np.empty_like(START)
    pull_from(shard, 0, out)
    return out


def waiting(config):
    shard, held = server(config), START.copy()
    for step in range(STEPS):
        held = update(held, step, config)
        push_to(shard, 0, 0, step + 1, step, PushMeta(samples=1), held)
    return exact(shard)


def overlapping(config, *, anticipates):
    """Step k computes on the answer to push k - 2, while push k - 1 is in flight."""
    shard = server(config)
    anticipation = Anticipation(
        config, N, HostInclusion(N + STATISTICS, lambda array: array, [(N, N + STATISTICS)])
    )
    held, known, flight = START.copy(), Pulled((0,), (AnswerMeta(),)), None
    for step in range(STEPS):
        parameters = held
        if flight is not None and anticipates:
            parameters = anticipation.include(held, flight[0], known).copy()
        io = update(parameters, step, config)
        send = Send(io.copy(), Push(step + 1, known.versions, PushMeta(1)), overlapped=flight is not None)
        if flight is not None:  # its answer comes during the step
            held, known = flight[1], flight[2]
            base = flight[0].push.base_versions[0]
            anticipation.answered(known, base, overlapped=flight[0].overlapped)
        ahead = anticipation.ahead(in_flight=True) if anticipates else 0.0
        base = send.push.base_versions[0]
        answer = push_to(shard, 0, 0, step + 1, base, PushMeta(samples=1), io, ahead=ahead)
        flight = send, io, Pulled((answer.version,), (answer.meta._replace(live_workers=1),))
    return exact(shard)


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("config", "share"),
    [
        (OptimizerConfig(learning_rate=0.08, batch_size=1), 1e-4),
        (OptimizerConfig(learning_rate=0.08, momentum=0.9, batch_size=1), 1e-4),
        (OptimizerConfig(learning_rate=0.04, momentum=0.9, nesterov=True, batch_size=1), 1e-4),
        (OptimizerConfig(name="delta", learning_rate=1.0, batch_size=1), 1e-4),
        (OptimizerConfig(name="rmsprop", learning_rate=0.02, batch_size=1), 1e-4),
        (OptimizerConfig(name="rmsprop", learning_rate=0.01, momentum=0.5, batch_size=1), 1e-4),
        (OptimizerConfig(name="nadam", learning_rate=0.02, batch_size=1), 0.1),
        (OptimizerConfig(name="adam", learning_rate=0.02, batch_size=1), 0.1),
        (OptimizerConfig(name="adamw", learning_rate=WARM_UP, weight_decay=0.01, batch_size=1), 0.1),
    ],
    ids=[
        "sgd",
        "momentum",
        "nesterov",
        "worker",
        "rmsprop",
        "rmsprop with momentum",
        "nadam",
        "adam",
        "adamw with warm-up",
    ],
)
def test_one_worker_that_overlaps_trains_as_one_that_waits(config, share):
    """The difference is at most this share of what a delay of one step makes."""
    reference = waiting(config)
    delayed = np.abs(overlapping(config, anticipates=False) - reference).max()
    anticipated = np.abs(overlapping(config, anticipates=True) - reference).max()
    assert delayed > 0.005
    assert anticipated <= max(share * delayed, 2e-5)


def test_gradient_in_flight_goes_as_far_as_the_servers_say() -> None:
    anticipation = Anticipation(
        OptimizerConfig(learning_rate=0.5, batch_size=1), N, HostInclusion(N, lambda array: array)
    )
    send = Send(np.ones(N, np.float32), Push(1, (0,), PushMeta(1)), overlapped=False)
    for factor in (1.0, 0.25):
        moved = anticipation.include(
            np.zeros(N, np.float32), send, Pulled((0,), (AnswerMeta(0, 4, factor=factor),))
        )
        np.testing.assert_allclose(moved, -0.5 * factor)


@pytest.mark.parametrize("name", ["adam", "nadam"])
def test_gradient_in_flight_moves_as_far_as_the_first_moment_of_the_servers_lets_it(name) -> None:
    """Not as if the moment had been made by as many workers as there are now, or began with this run."""
    config = OptimizerConfig(name=name, learning_rate=0.1, batch_size=1)

    def moved(version, filled=0.0, live=1):
        anticipation = Anticipation(config, N, HostInclusion(N, lambda array: array))
        send = Send(np.ones(N, np.float32), Push(1, (version,), PushMeta(1)), overlapped=False)
        known = Pulled((version,), (AnswerMeta(0, live),), filled=filled)
        return -float(anticipation.include(np.zeros(N, np.float32), send, known)[0])

    assert moved(10) == pytest.approx(moved(10, 1 - 0.9**10), rel=1e-5)  # an earlier server does not say
    assert moved(0, 1.0) < 0.6 * moved(0)  # of an earlier run
    share = 0.2 if name == "adam" else 1.0  # Nadam's goes along its gradient more than along its moment
    assert moved(20, 1 - 0.9**20, live=64) < share * moved(20, live=64)  # of one worker, before the others


def test_look_ahead_grows_with_the_staleness_that_others_make():
    anticipation = Anticipation(OptimizerConfig(), 1, None)
    assert anticipation.ahead(in_flight=False) == 0
    assert anticipation.ahead(in_flight=True) == 1
    for _ in range(200):
        anticipation.answered(
            Pulled((9,), (AnswerMeta(0, 4),)), 4, overlapped=True
        )  # of 4 updates one is its own
    assert anticipation.ahead(in_flight=True) == pytest.approx(1 + 3 * LEAD)
    assert anticipation.ahead(in_flight=False) == pytest.approx(3 * LEAD)


def test_look_ahead_of_a_very_stale_worker_is_one_that_the_servers_answer():
    anticipation, version = Anticipation(OptimizerConfig(), 1, None), 0
    for _ in range(60):
        base, version = version, version + 6000
        anticipation.answered(Pulled((version,), (AnswerMeta(0, 1000),)), base, overlapped=True)
    asked = anticipation.ahead(in_flight=True)
    assert header.decode(header.encode(Header(Op.PULL, ahead=asked))).ahead == asked == MAX_AHEAD
