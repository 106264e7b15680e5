"""Local steps while the parameter servers are unreachable."""

import numpy as np
import pytest

from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import coded, encode
from shoal_trainer.wire.messages import Average, OptimizerConfig, Progress, Push, PushMeta
from shoal_trainer.worker.outage import Outage
from shoal_trainer.worker.send import Send
from tests.unit.trainer.ps.shards import Clock


def begin(name="sgd", dtype=np.float32, clock=None, averages=(), **options):
    current = coded(6, 4, dtype)
    return Outage(
        current,
        OptimizerConfig(name=name, learning_rate=0.5, batch_size=16, **options),
        4,
        0.5,
        clock or Clock(),
        averages=averages,
        max_steps=3,
    )


def test_local_steps_make_a_delta_without_absorbed_updates():
    outage = begin()
    outage.absorb(Send(np.array([1, 1, 1, 1, 7, 7], np.float32), Push(1, (0,), PushMeta(16))))
    outage.step(np.array([2, 0, 0, 0, 1, -1], np.float32), 16, [Progress(0, -1, 0, 16)])
    out = aligned(6)
    outage.difference_into(out)
    assert list(out) == [-1, 0, 0, 0, 1, -1]  # -lr g for parameters, + difference for statistics
    outage.parameters_into(out)
    assert list(out) == [-1.5, -0.5, -0.5, -0.5, 8, 6]
    outage.rebase()
    outage.difference_into(out)
    assert not out.any()
    assert outage.steps == outage.samples == len(outage.progress) == 0


def test_moving_averages_go_on_as_on_the_servers():
    outage = begin(averages=(Average(5, 6, 0.5),))
    update = np.array([0, 0, 0, 0, 8, 8], np.float32)
    outage.absorb(Send(update, Push(1, (0,), PushMeta(48, steps=3))))
    assert list(outage.master[4:]) == [8, 7]
    outage.step(update, 16, [Progress(0, -1, 0, 16)])
    assert list(outage.master[4:]) == [16, 7.5]
    out = aligned(6)
    outage.difference_into(out)
    assert list(out[4:]) == [8, 0.5]


def test_local_training_stops_after_max_steps_or_seconds():
    clock = Clock()
    outage = begin(clock=clock)
    for n in range(3):
        assert not outage.exhausted
        outage.step(np.zeros(6, np.float32), 1, [Progress(0, -1, n, n + 1)])
    assert outage.exhausted
    other = begin(clock=clock)
    clock.now += 60
    assert other.exhausted


@pytest.mark.parametrize(
    ("name", "options"), [("sgd", {"momentum": 0.9}), ("adam", {}), ("adagrad", {}), ("delta", {})]
)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("parameters", [np.float32, np.uint16])
def test_every_optimizer_steps_locally_without_changing_the_update(name, options, dtype, parameters):
    outage = begin(name, parameters, **options)
    update = coded(6, 4, dtype)
    encode(np.ones(6, np.float32), update, 4)
    before = update.copy()
    update.setflags(write=False)
    outage.step(update, 1, [Progress(0, -1, 0, 1)])
    assert np.array_equal(update, before)
    assert np.all(outage.master[:4] != 0)
    assert np.sign(outage.master[0]) == (1 if name == "delta" else -1)
    assert outage.as_send(1, (0,)).update.dtype == dtype
