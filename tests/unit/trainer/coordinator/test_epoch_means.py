"""The training loss and metrics of each epoch."""

import json
import math

import pytest

from shoal_trainer.contract import StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.epoch_means import EpochMeans
from shoal_trainer.wire.messages import MetricSum, Progress, PushMeta
from tests.unit.trainer.coordinator.bench import Bench


def push(epoch, samples, loss, *metrics, steps=1):
    marks = (Progress(epoch, -1, 0, samples),)
    return PushMeta(samples, steps, loss, progress=marks, metrics=tuple(MetricSum(*each) for each in metrics))


def test_means_are_weighted_by_samples():
    means = EpochMeans()
    means.pushed(push(0, 4, 1.0, ("accuracy", 3.0, 4.0)))
    means.pushed(push(0, 2, 4.0, ("accuracy", 0.0, 2.0)))
    means.pushed(push(1, 2, 9.0, ("accuracy", 2.0, 2.0)))
    assert means.current() == {"accuracy": 1.0, "loss": 9.0}
    assert means.end(0, None) == {"accuracy": 0.5, "loss": 2.0}
    assert means.end(0, 0.25) == {"loss": 0.25}
    assert means.end(1, 0.25) == {"accuracy": 1.0, "loss": 9.0}
    assert means.current() == {}


def test_a_small_loss_is_as_small_in_the_logs_as_in_training():
    """Callbacks decide by it: rounded to six decimals, one that falls by 3 % an epoch would have ended."""
    means = EpochMeans()
    means.pushed(push(0, 3, 4.2e-7, ("mse", 1e-9, 3.0)))
    assert (
        means.current()
        == means.end(0, None)
        == {"loss": pytest.approx(4.2e-7), "mse": pytest.approx(1e-9 / 3)}
    )
    assert means.end(1, 4.2e-7) == {"loss": 4.2e-7}


def test_unknown_and_non_finite_losses_are_left_out():
    means = EpochMeans()
    means.pushed(push(0, 4, math.nan, ("accuracy", 3.0, 4.0)))
    means.pushed(push(0, 4, math.inf))
    means.pushed(push(0, 4, 2.0, ("masked", 0.0, 0.0)))
    means.pushed(PushMeta(4, loss=100.0))  # covers nothing
    assert means.end(0, None) == {"accuracy": 0.75, "loss": 2.0}


def test_samples_that_were_left_out_do_not_weigh():
    means = EpochMeans()
    marks = (Progress(0, -1, 0, 8),)
    means.pushed(PushMeta(8, 2, 1.0, progress=marks, left_out=4))
    means.pushed(PushMeta(4, 1, 4.0, progress=marks))
    means.pushed(PushMeta(4, 1, math.nan, progress=marks, left_out=4))
    assert means.end(0, None) == {"loss": 2.5}


def test_a_sum_that_is_no_longer_finite_leaves_the_push_out():
    """In a snapshot it would be null, with which parameter server 0 could not start again."""
    means, loaded = EpochMeans(), EpochMeans()
    for _ in range(3):
        means.pushed(push(0, 4, 1.0, ("accuracy", 1.7e308, 4.0)))
    assert means.dump() == {"0": {"accuracy": [1.7e308, 4.0], "loss": [12.0, 12.0]}}
    loaded.load(json.loads(json.dumps(means.dump())))
    means.pushed(push(0, 4, 1.0, ("tiny", 1.0, 5e-324)))
    assert "tiny" not in means.end(0, None)


def test_an_epoch_that_nobody_was_leased_has_no_means():
    bench = Bench(stop=StopAfter(epochs=2), workers=1)
    lease = bench.ask(0).lease
    bench.push(0, lease.model_copy(update={"epoch": 1 << 31}), lease.stop, loss=1.0)
    assert bench.coordinator.record.means.dump() == {}
    bench.push(0, lease, lease.stop, loss=1.0)
    assert bench.coordinator.record.means.dump() == {"0": {"loss": [2.0, 2.0]}}


def test_a_push_of_several_epochs_counts_in_each_of_them():
    means = EpochMeans()
    marks = tuple(Progress(epoch, -1, *part) for epoch, *part in ((0, 8, 12), (1, 0, 12), (2, 0, 4)))
    sums = [("loss", 8.0, 4.0), ("accuracy", 1.0, 4.0), ("loss", 12.0, 12.0), ("loss", 2.0, 4.0)]
    of_all = PushMeta(20, 5, 1.1, progress=marks, metrics=tuple(MetricSum(*each) for each in sums))
    means.pushed(push(0, 8, 0.5, ("accuracy", 5.0, 8.0)))
    means.pushed(of_all)
    means.pushed(push(2, 8, 2.0))
    assert means.end(0, None) == {"loss": 1.0, "accuracy": 0.5}
    assert means.end(1, None) == {"loss": 1.0}
    assert means.end(2, None) == {"loss": 1.5}


def test_an_earlier_worker_tells_no_epochs_apart():
    means = EpochMeans()
    marks = Progress(0, -1, 8, 12), Progress(1, -1, 0, 4)
    means.pushed(PushMeta(8, 2, 0.5, progress=marks, metrics=(MetricSum("accuracy", 6.0, 8.0),)))
    assert means.end(0, None) == {"accuracy": 0.75, "loss": 0.5}


def test_means_survive_a_dump():
    means, loaded = EpochMeans(), EpochMeans()
    means.pushed(push(3, 4, 1.5, ("accuracy", 3.0, 4.0)))
    loaded.load(means.dump())
    assert loaded.current() == means.current() == {"accuracy": 0.75, "loss": 1.5}


def train(bench, lease, end, loss, accuracy):
    bench.push(0, lease, end, loss=loss, metrics=(MetricSum("accuracy", 2 * accuracy, 2.0),))


def test_status_and_logs_contain_them():
    bench = Bench(stop=StopAfter(epochs=2), callbacks=True, workers=1)
    accuracies, done = iter((0.0, 0.5, 1.0, 1.0)), []
    while (work := bench.ask(0)).kind == "data":
        for end in range(work.lease.start + 2, work.lease.stop + 1, 2):
            done.append(next(accuracies))
            train(bench, work.lease, end, loss=2.0 * len(done), accuracy=done[-1])
            assert report.metrics(bench.coordinator.record)["accuracy"] == pytest.approx(
                sum(done) / len(done)
            )
    assert work.history == ({"loss": 5.0, "accuracy": 0.625},)
    assert report.status(bench.coordinator).metrics == {"accuracy": 0.625}


def test_restart_continues_the_means_of_the_snapshot():
    bench = Bench(workers=1)
    lease = bench.ask(0).lease
    train(bench, lease, lease.start + 2, loss=1.0, accuracy=0.5)
    new = bench.successor()
    new.join(0)
    assert report.metrics(new.coordinator.record) == {"accuracy": pytest.approx(0.5)}
