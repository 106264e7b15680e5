"""A whole job in this process that returns to a snapshot: after a NaN loss, or with more or fewer servers."""

import dataclasses
import threading

import numpy as np
import pytest

from shoal_trainer import Training, UserError
from shoal_trainer.coordinator import report
from shoal_trainer.data.arrays import Arrays
from shoal_trainer.run.watch import describe_data
from shoal_trainer.termination.termination_log import TERMINATION_LOG_ENV
from tests.unit.trainer.threads import Job

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
EPOCHS, BATCH, SIZE = 8, 16, 1024
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(SIZE, 8)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int64)


class Poisoned(Arrays):
    """Batches become NaN where `bad(epoch, end)` returns true. The last epoch waits for `may_end`."""

    def bad(self, epoch, end):
        raise NotImplementedError

    def read(self, part, batch_size, local=None):
        for batch in super().read(part, batch_size, local):
            if part.epoch == EPOCHS - 1:
                assert self.may_end.wait(50)
            yield dataclasses.replace(batch, x=batch.x * np.nan) if self.bad(part.epoch, batch.end) else batch


class RollsBack(Job):
    """A job of workers whose losses may be NaN. `bad_batches`: how many batches to poison."""

    def __init__(self, folder, shards=1, workers=2, steps_per_push=1, optimizer="adam", on_nan="rollback"):
        self.bad_batches, self.poisoned, self.lock = 0, set(), threading.Lock()
        data = Poisoned(X, Y, None, 0)
        self.may_end = threading.Event()
        self.may_end.set()
        object.__setattr__(data, "bad", self.bad)
        object.__setattr__(data, "may_end", self.may_end)
        training = Training(
            model=lambda: model(optimizer),
            data=data,
            on_nan=on_nan,
            wire="fp32",
            batches_per_push=steps_per_push,
        )
        super().__init__(folder, training, shards=shards, epochs=EPOCHS, batch_size=BATCH)
        for slot in range(workers):
            self.start_worker(slot)

    def bad(self, epoch, end):
        """Whether the batch is poisoned. It stays so, as it may be read again under another lease."""
        with self.lock:
            if self.bad_batches > 0:
                self.bad_batches -= 1
                self.poisoned.add((epoch, end))
            return (epoch, end) in self.poisoned

    def finish(self):
        message = super().finish()
        assert not self.errors
        return message

    def snapshot(self):
        """Train for half an epoch, take a snapshot, and train for half an epoch."""
        begun = self.samples
        self.wait(lambda: self.samples > begun + SIZE // 2)
        manifest = self.servers[0].service.snapshotter.take()
        assert manifest is not None
        more = self.samples
        self.wait(lambda: self.samples > more + SIZE // 2)
        return manifest

    def suspend(self):
        """Drain the workers, then stop the servers, the first one first: it takes the last snapshot."""
        for each in self.workers.values():
            each.drain.set()
        for each in self.workers.values():
            each.thread.join(30)
        for index, server in self.servers.items():
            server.stop()
            self.serving[index].join(30)
        assert not self.errors

    def resume_servers(self, shards, epoch):
        """Start this many servers, and wait until they have restored the snapshot."""
        self.start_servers(shards, epoch)
        self.wait(lambda: all(server._restored for server in self.servers.values()))

    def arrays(self):
        """The parameters and optimizer states of all shards."""
        parts = [server.shard.model.arrays() for server in self.servers.values()]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def model(optimizer):
    import keras

    built = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2, "softmax")]
    )
    built.compile(
        keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.01}}),
        "sparse_categorical_crossentropy",
    )
    return built


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "termination"))
    jobs = []

    def make(**options):
        jobs.append(RollsBack(tmp_path, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.stop()


def exact(job, message):
    """The samples match the counters, and the parameters are finite."""
    assert message.samples + message.data.lost == EPOCHS * SIZE + message.data.repeated
    for server in job.servers.values():
        assert np.isfinite(server.shard.copy().arrays["parameters"]).all()


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("shards", "steps_per_push", "optimizer"),
    [(1, 3, "adam"), (2, 1, "adam"), (1, 1, "adamax")],
)
def test_one_bad_batch_rolls_back_all_workers_once(start, shards, steps_per_push, optimizer):
    job = start(shards=shards, steps_per_push=steps_per_push, optimizer=optimizer)
    job.snapshot()
    job.bad_batches = 1
    message = job.finish()
    status = report.status(job.coordinator)
    assert (status.rollbacks, message.data.lost, message.data.repeated) == (1, BATCH, 0)
    assert [server.shard.history.generation for server in job.servers.values()] == [1] * shards
    assert all(each.worker.loop.upstream.generation == 1 for each in job.workers.values())
    assert status.wasted_steps >= SIZE // 2 // BATCH // steps_per_push
    exact(job, message)


@pytest.mark.nightly
@pytest.mark.parametrize("steps_per_push", [1, 3])
def test_batches_that_are_skipped_are_counted_as_lost(start, steps_per_push):
    job = start(steps_per_push=steps_per_push, on_nan="skip")
    job.bad_batches = 2
    message = job.finish()
    assert (message.data.lost, message.data.repeated) == (2 * BATCH, 0)
    assert describe_data(message).endswith("32 samples left out")


def test_repeated_divergence_fails_the_job(start):
    job = start(workers=1)
    job.snapshot()
    job.bad_batches = 1 << 30
    job.wait(lambda: job.errors)
    assert isinstance(job.errors[0], UserError)
    assert "rolled back 3 times" in str(job.errors[0])
    assert "learning rate" in str(job.errors[0])
    assert report.status(job.coordinator).rollbacks == 3


def test_divergence_before_the_first_snapshot_fails_the_job(start):
    job = start(workers=1)
    job.bad_batches = 1
    job.wait(lambda: job.errors)
    assert isinstance(job.errors[0], UserError)
    assert "no snapshot yet" in str(job.errors[0])


@pytest.mark.nightly
def test_divergence_during_a_server_outage_rolls_back(start):
    job = start()
    job.may_end.clear()
    job.snapshot()
    job.kill_server(0, lambda: setattr(job, "bad_batches", 1))
    job.may_end.set()
    message = job.finish()
    assert report.status(job.coordinator).rollbacks == 1
    assert message.data.lost == BATCH
    exact(job, message)


@pytest.mark.nightly
@pytest.mark.parametrize("index", [0, 1])
def test_server_lost_after_a_rollback_restarts_in_its_generation(start, index):
    job = start(shards=2)
    job.may_end.clear()
    job.snapshot()
    job.bad_batches = 1
    job.wait(lambda: [server.shard.history.generation for server in job.servers.values()] == [1, 1])
    job.wait(lambda: all(each.worker.loop.upstream.generation == 1 for each in job.workers.values()))
    job.kill_server(index)
    job.wait(lambda: job.servers[index].shard.history.generation == 1)
    job.may_end.set()
    message = job.finish()
    assert report.status(job.coordinator).rollbacks == 1
    assert message.data.lost == BATCH
    exact(job, message)


def test_suspended_job_resumes_with_fewer_and_with_more_parameter_servers(start):
    job = start(shards=2)
    for epoch, shards in enumerate((1, 3), 1):
        begun = job.samples
        job.wait(lambda begun=begun: job.samples > begun + SIZE)
        job.suspend()
        arrays, samples = job.arrays(), job.samples
        job.resume_servers(shards, epoch)
        assert [server.shard.history.samples for server in job.servers.values()] == [samples] * shards
        for name, values in job.arrays().items():
            np.testing.assert_array_equal(values, arrays[name], err_msg=name)
        for slot in job.workers:
            job.start_worker(slot, epoch)
    message = job.finish()
    assert message.samples == EPOCHS * SIZE
    assert (message.ranges.repeated, message.ranges.partial, message.ranges.never) == (0, 0, 0)
    assert (message.data.repeated, message.data.partial, message.data.lost) == (0, 0, 0)
    exact(job, message)
