"""The real worker and its training data: files of unknown length, short reads, an unreachable store."""

import fsspec
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Files, Indexed, Training, UserError
from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.positions import Positions
from shoal_trainer.worker.feed import Failed
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.work import DataWork, Finished, Idle
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import X, Y, functional
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.scripted import TERM, Bench


def test_short_data_function_ends_the_worker(start_servers):
    def short(begin, stop):
        return tf.data.Dataset.from_tensor_slices((X[begin : stop - 1], Y[begin : stop - 1]))

    def enough_for_the_example(begin, stop):
        return short(begin, stop + 1) if begin == 0 and stop == 16 else short(begin, stop)

    coordinator = FakeCoordinator(512)
    servers = start_servers(coordinator)
    training = Training(model=functional, data=Indexed(512, enough_for_the_example, shuffle=0))
    end = Running(training, servers, coordinator).start().join()
    assert isinstance(end, UserError)
    assert "63 samples instead of 64" in str(end)


def test_sample_that_the_model_cannot_compute_with_is_reported_with_its_place(start_servers):
    y = Y.copy()
    y[200] = 77
    data = Indexed(
        512,
        lambda begin, stop: tf.data.Dataset.from_tensor_slices((X[begin:stop], y[begin:stop])),
        shuffle=0,
    )
    coordinator = FakeCoordinator(512)
    end = (
        Running(Training(model=functional, data=data), start_servers(coordinator), coordinator).start().join()
    )
    assert isinstance(end, UserError)
    assert str(end).startswith(
        "samples 192-256 in the order of epoch 1: Labels are outside the loss's range: 77"
    )


class FileCoordinator(FakeCoordinator):
    """Leases whole files of unknown length."""

    def __init__(self, names):
        super().__init__(0, tasks=())
        self.names = list(names)
        self.lengths = {}

    def next_work(self, generation=0, stopped=None):
        with self.lock:
            if self.names:
                self.counter += 1
                work = DataWork((0, self.counter), 0, 0, None, self.names.pop(0), self.counter - 1)
                self.leased[work.token] = work
                return work
            return Finished() if len(self.lengths) == len(self.leased) else Idle(0.01)

    def file_ended(self, token, length):
        with self.lock:
            done = self.applied.get((0, self.leased[token].number), Positions())
            assert done.total == length, "reported before its samples were in the parameters"
            self.lengths[self.leased[token].file] = length


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("batches_per_push", "store"), [(1, False), (4, False), (1, True)])
def test_files_of_unknown_length_are_trained_completely(start_servers, tmp_path, batches_per_push, store):
    import tensorflow as tf

    sizes = [40, 0, 17, 64, 80]
    for number, size in enumerate(sizes):
        with tf.io.TFRecordWriter(str(tmp_path / f"{number}.tfrecord")) as writer:
            for row in range(size):
                writer.write(tf.io.serialize_tensor(X[row]).numpy())

    def parse(record):
        return tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), (6, 6, 1)), tf.constant(1, tf.int64)

    if store:
        fsspec.filesystem("memory").put(f"{tmp_path}/*.tfrecord", "/unknown-length/")
    files = Files.tfrecord(f"{'memory://unknown-length' if store else tmp_path}/*.tfrecord", parse)
    coordinator = FileCoordinator(files.list())
    servers = start_servers(coordinator)
    training = Training(model=functional, data=files, batches_per_push=batches_per_push)
    assert Running(training, servers, coordinator).start().join() is End.FINISHED
    assert [coordinator.lengths[name] for name in files.list()] == sizes
    assert servers.stores[0].history.samples == sum(sizes)


class Outage(Files):
    """One file of 32 samples, in a store that is unreachable at the first read."""

    def list(self):
        return ("s3://bucket/part-3",)

    def example(self, batch_size):
        return next(self.rows(0, batch_size))

    def read(self, part, batch_size, local=None):
        name, start = part.file, part.start
        if not (tried := self.__dict__.setdefault("tried", [])):
            tried.append(name)
            raise Unreachable(f"{name}: no answer")
        return self.rows(start, batch_size)

    @staticmethod
    def rows(start, batch_size):
        for begin in range(start, 32, batch_size):
            end = min(begin + batch_size, 32)
            yield Batch(X[begin:end], Y[begin:end], np.ones(end - begin, np.float32), end - begin, end)


def test_unreadable_file_is_reported_until_it_can_be_read(start_servers):
    files = Outage("s3://bucket/*", lambda _path: None)
    coordinator = FileCoordinator(files.list())
    servers = start_servers(coordinator)
    training = Training(model=functional, data=files)
    assert Running(training, servers, coordinator).start().join() is End.FINISHED
    assert servers.stores[0].history.samples == 32
    assert coordinator.messages == ["cannot read s3://bucket/part-3: no answer", ""]


def test_data_that_cannot_be_read_are_discarded_after_the_stop():
    bench = Bench()
    failed = Failed(bench.work, UserError("samples 0-8: the data function failed"))
    bench.items, bench.server.stopped = [failed, Finished()], TERM
    assert bench.run() is End.FINISHED
    assert bench.loop.upstream.wasted == 0


def test_data_error_after_the_last_sample_of_a_lease_fails_the_job(start_servers):
    def too_long(begin, end):
        return tf.data.Dataset.from_tensor_slices((X[begin : end + 5], Y[begin : end + 5]))

    def right_for_the_example(begin, end):
        return too_long(begin, end - 5) if end == 16 else too_long(begin, end)

    coordinator = FakeCoordinator(512)
    training = Training(model=functional, data=Indexed(512, right_for_the_example, shuffle=0))
    end = Running(training, start_servers(coordinator), coordinator).start().join()
    assert isinstance(end, UserError)
    assert "more than 64 samples" in str(end)


def test_batch_that_fails_the_step_is_discarded_after_the_stop():
    bench = Bench()

    def fail(*_):
        raise UserError("indices[0] = 77 is not in [0, 10)")

    bench.loop._flat_model.step, bench.server.stopped = fail, TERM
    bench.items = [bench.batch(), Finished()]
    assert bench.run() is End.FINISHED
    assert bench.loop.upstream.wasted == 1


def test_data_that_cannot_be_read_fail_the_job_after_an_outage():
    bench = Bench()
    failed = Failed(bench.work, UserError("samples 0-8: the data function failed"))
    bench.server.reachable, bench.items = False, [failed]

    def connect(_copy):
        assert not bench.server.reachable
        bench.server.reachable = True
        return bench.server.probe()

    bench.server.connect = connect
    with pytest.raises(UserError, match="the data function failed"):
        bench.run()
    assert bench.server.reachable  # it was raised only then
