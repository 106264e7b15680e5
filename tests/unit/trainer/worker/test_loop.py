"""The real worker against real parameter servers on loopback and a coordinator in memory."""

import threading
import time

import fsspec
import keras
import numpy as np
import pytest

from shoal_trainer import Files, Indexed, Training, UserError
from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.positions import Positions
from shoal_trainer.wire.messages import MAX_MARKS
from shoal_trainer.worker.compose import build_glue, compose
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.work import DataWork, Finished, Idle, TaskWork
from tests.unit.trainer.worker.fakes import FakeCoordinator, Servers
from tests.unit.trainer.worker.models import DATA, X, Y, compiled, functional, job

SECONDS = 40
# Keras' own saving code meets NumPy 2 with this; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Running:
    """A worker in a thread."""

    def __init__(self, training, servers, coordinator, **config):
        config = servers.config(**config)
        self.drain = threading.Event()
        self.glue = build_glue(training, config)
        self.worker = compose(training, config, self.glue, coordinator, servers.credentials, self.drain)
        self.end = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.end = self.worker.loop.run()
        except Exception as error:
            self.end = error

    def start(self):
        self.thread.start()
        return self

    def join(self):
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), "the worker did not end"
        self.worker.close()
        return self.end


def wait(coordinator, condition):
    with coordinator.pushed:
        assert coordinator.pushed.wait_for(condition, SECONDS)


@pytest.fixture
def start(tmp_path):
    made = []

    def make(coordinator, **options):
        servers = Servers(tmp_path / f"secret{len(made)}", coordinator, **options)
        made.append(servers)
        return servers

    yield make
    for servers in made:
        servers.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_every_sample_once_then_tasks_then_the_end(start, shards):
    coordinator = FakeCoordinator(DATA.size, epochs=2, tasks=("evaluate", "export"))
    servers = start(coordinator, count=shards)
    running = Running(job(lambda: functional("adam", norm=True)), servers, coordinator).start()
    assert running.join() is End.FINISHED
    assert coordinator.samples == 2 * DATA.size
    assert coordinator.left == 1
    (evaluate, metrics, _, _), (export, _, files, _) = coordinator.results
    assert (evaluate, export) == ("evaluate", "export")
    assert set(metrics) == {"val_loss", "val_accuracy"}
    assert {"model.keras", "saved_model/saved_model.pb"} <= set(files)


def test_one_worker_that_waits_is_plain_keras_bit_for_bit(start):
    coordinator = FakeCoordinator(DATA.size, tasks=())
    servers = start(coordinator)
    running = Running(job(wire="fp32"), servers, coordinator, sequential=True)
    assert running.start().join() is End.FINISHED
    plain = functional()
    for batch in DATA.batches(0, 0, DATA.size, 16):
        plain.train_on_batch(batch.x, batch.y)
    flat = np.zeros(running.glue.layout.size, np.float32)
    servers.stores[0].pull(0, flat)
    assert np.array_equal(flat, np.concatenate([v.numpy().ravel() for v in plain.trainable_variables]))


def test_two_workers_share_the_data(start):
    coordinator = FakeCoordinator(DATA.size, epochs=3)
    servers = start(coordinator)
    workers = [Running(job(), servers, coordinator, slot=slot) for slot in range(2)]
    for worker in workers:
        worker.start()
    assert [worker.join() for worker in workers] == [End.FINISHED] * 2
    assert coordinator.samples == 3 * DATA.size
    assert all(worker.worker.loop.steps for worker in workers)


def test_a_worker_that_is_told_to_stop_sees_its_push_through(start):
    coordinator = FakeCoordinator(DATA.size, epochs=50)
    servers = start(coordinator)
    running = Running(job(), servers, coordinator).start()
    wait(coordinator, lambda: coordinator.pushes >= 5)
    running.drain.set()
    assert running.join() is End.DRAINED
    assert coordinator.left == 1
    assert coordinator.samples == running.worker.loop.steps * 16


def test_a_server_that_comes_back_with_its_snapshot_gets_the_newer_copy_and_loses_nothing(start):
    coordinator = FakeCoordinator(DATA.size, epochs=8, tasks=("evaluate",))
    servers = start(coordinator)
    running = Running(job(), servers, coordinator).start()
    wait(coordinator, lambda: coordinator.pushes >= 10)
    saved = servers.stores[0].copy()
    wait(coordinator, lambda: coordinator.pushes >= 20)
    servers.stop(0)
    version = servers.stores[0].version
    loop = running.worker.loop
    deadline = time.monotonic() + SECONDS
    while loop.steps < version + 3:  # it trains on alone
        assert time.monotonic() < deadline
        assert running.end is None
        threading.Event().wait(0.01)
    servers.start(0, epoch=1, restore=saved)
    assert running.join() is End.FINISHED
    assert len(coordinator.joins) == 1
    # the copy was at most one push behind; that push is sent again
    assert servers.stores[0].samples >= 8 * DATA.size - 2 * 16
    assert [coordinator.applied[epoch, -1].total for epoch in range(8)] == [DATA.size] * 8


def test_a_server_that_is_lost_while_nothing_is_to_do_is_noticed(start):
    coordinator = FakeCoordinator(64, tasks=())
    coordinator.hold = True
    servers = start(coordinator)
    running = Running(job(), servers, coordinator).start()
    wait(coordinator, lambda: coordinator.pushes >= 4)
    saved = servers.stores[0].copy()
    servers.stop(0)
    servers.start(0, epoch=1, restore=saved)
    deadline = time.monotonic() + SECONDS
    while not coordinator.joins:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    coordinator.hold = False
    assert running.join() is End.FINISHED


def test_steps_in_vain_are_told_until_it_is_answered(start):
    coordinator = FakeCoordinator(DATA.size)
    running = Running(job(), start(coordinator), coordinator)
    loop, answered, told = running.worker.loop, coordinator.join, []

    def lost(_held, wasted):
        told.append(wasted)
        raise Unreachable("the answer was lost")

    coordinator.join = lost
    loop._wasted = 3
    with pytest.raises(Unreachable):
        loop._join_coordinator({})
    coordinator.join = answered
    for more in (2, 1):
        loop._wasted += more
        loop._join_coordinator({})
    assert told + [wasted for _, wasted in coordinator.joins] == [(3, 0), (5, 0), (6, 5)]
    running.worker.close()


def test_a_push_whose_answer_was_lost_is_not_applied_twice(start):
    coordinator = FakeCoordinator(DATA.size, epochs=4, tasks=())
    servers = start(coordinator)
    running = Running(job(), servers, coordinator).start()
    for pushes in (5, 15, 25):
        wait(coordinator, lambda pushes=pushes: coordinator.pushes >= pushes)
        servers.stop(0)  # cuts every connection, the shard itself lives on
        store = servers.stores[0]
        servers.start(0)
        servers.servers[0]._shard = servers.stores[0] = store
    assert running.join() is End.FINISHED
    assert servers.stores[0].samples == 4 * DATA.size
    assert coordinator.samples == 4 * DATA.size


def nan_loss(y, p):
    return keras.ops.mean(p) * float("nan")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_that_is_not_finite(start, policy):
    def build():
        model = functional()
        model.compile("sgd", nan_loss)
        return model

    coordinator = FakeCoordinator(64, tasks=())
    servers = start(coordinator)
    training = Training(model=build, data=DATA, on_nan=policy)
    end = Running(training, servers, coordinator).start().join()
    if policy == "skip":
        assert end is End.FINISHED
        assert servers.stores[0].samples == 64
    else:
        assert isinstance(end, UserError)
        assert "not finite" in str(end)


def test_a_data_function_that_gives_too_few_samples_ends_the_worker(start):
    import tensorflow as tf

    def short(begin, stop):
        return tf.data.Dataset.from_tensor_slices((X[begin : stop - 1], Y[begin : stop - 1]))

    def enough_for_the_example(begin, stop):
        return short(begin, stop + 1) if begin == 0 and stop == 16 else short(begin, stop)

    coordinator = FakeCoordinator(512)
    servers = start(coordinator)
    training = Training(model=functional, data=Indexed(512, enough_for_the_example))
    end = Running(training, servers, coordinator).start().join()
    assert isinstance(end, UserError)
    assert "63 samples, but 64 were promised" in str(end)


def test_another_model_is_refused(start):
    coordinator = FakeCoordinator(DATA.size, epochs=50)
    servers = start(coordinator)
    first = Running(job(), servers, coordinator).start()
    wait(coordinator, lambda: coordinator.pushes >= 1)

    def wider():
        return compiled(
            keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(8), keras.layers.Dense(4)])
        )

    end = Running(job(wider), servers, coordinator, slot=1).start().join()
    assert isinstance(end, UserError)
    assert "build the same model in every worker" in str(end)
    first.drain.set()
    assert first.join() is End.DRAINED


@pytest.mark.parametrize(
    "model",
    [
        lambda: functional(options={"steps_per_execution": 4}),
        lambda: functional(keras.optimizers.SGD(0.01, gradient_accumulation_steps=4)),
    ],
    ids=["steps_per_execution", "gradient_accumulation_steps"],
)
def test_several_batches_a_push_are_as_many_steps(start, model):
    coordinator = FakeCoordinator(DATA.size, tasks=())
    servers = start(coordinator)
    running = Running(job(model), servers, coordinator)
    assert running.start().join() is End.FINISHED
    assert coordinator.steps == [4] * (DATA.size // 16 // 4)
    assert coordinator.samples == DATA.size


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_push_of_many_small_leases_goes_as_soon_as_it_can_tell_no_more_of_them(start, cut_off):
    """What is not told is leased for ever. Also what an outage has piled up is told."""
    coordinator = FakeCoordinator(DATA.size, size=1, tasks=())
    coordinator.free.reverse()  # none follows the one before it
    servers = start(coordinator)
    training = job(lambda: functional(options={"steps_per_execution": 300}))
    running = Running(training, servers, coordinator)
    exchange = running.worker.loop._exchange
    push_pull = exchange.push_pull

    def cut(*arguments):
        exchange.push_pull = push_pull
        return exchange._pool.submit(unreachable)

    def unreachable():
        raise Unreachable("the connection is reset")

    if cut_off:
        exchange.push_pull = cut
    assert running.start().join() is End.FINISHED
    assert coordinator.steps == [MAX_MARKS, DATA.size - MAX_MARKS]
    assert coordinator.samples == DATA.size


class Hasty(FakeCoordinator):
    """The job ends, whatever is not pushed yet."""

    def next_work(self, generation=0):
        return super().next_work(generation) if self.free else Finished()


def test_what_is_piled_up_when_the_job_has_ended_is_not_pushed(start):
    coordinator = Hasty(7 * 16, size=7 * 16, tasks=())
    training = job(lambda: functional(options={"steps_per_execution": 4}))
    running = Running(training, start(coordinator), coordinator)
    get = running.worker.loop._feed.get
    running.worker.loop._feed.get = lambda timeout: get(max(timeout, SECONDS))  # it never seems to be idle
    assert running.start().join() is End.FINISHED
    assert coordinator.samples == 4 * 16  # what comes after the export is in no model


class Forgetful(FakeCoordinator):
    """The answer to the first result is lost."""

    def task_done(self, work, metrics, files, *, stop, message):
        super().task_done(work, metrics, files, stop=stop, message=message)
        if len(self.results) == 1:
            raise Unreachable("the answer is lost")


def test_a_result_whose_answer_was_lost_is_told_again_and_not_made_again(start):
    coordinator = Forgetful(64, tasks=("callbacks",))
    servers = start(coordinator)
    seen = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _logs: seen.append(epoch))
    training = Training(model=functional, data=DATA, callbacks=lambda: [callback])
    coordinator.tasks = [TaskWork((0, 1), "callbacks", 0, ({"loss": 1.0},))]
    assert Running(training, servers, coordinator).start().join() is End.FINISHED
    assert seen == [0]
    assert [kind for kind, *_ in coordinator.results] == ["callbacks", "callbacks"]


class TaskFirst(FakeCoordinator):
    """Its tasks come before its data."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.story = []

    def next_work(self, generation=0):
        self.story.append("asked")
        return self.tasks.pop(0) if self.tasks else super().next_work(generation)

    def task_done(self, work, metrics, files, *, stop, message):
        super().task_done(work, metrics, files, stop=stop, message=message)
        self.story.append(work.kind)
        if self.story.count("evaluate") == 1:
            raise Unreachable("the answer is lost")


def test_who_does_a_task_takes_no_lease_meanwhile_that_others_could_train(start):
    coordinator = TaskFirst(64, tasks=("evaluate",))
    assert Running(job(), start(coordinator), coordinator).start().join() is End.FINISHED
    assert coordinator.story[:4] == ["asked", "evaluate", "evaluate", "asked"]
    assert coordinator.samples == 64


class FileCoordinator(FakeCoordinator):
    """Leases whole files of unknown length."""

    def __init__(self, names):
        super().__init__(0, tasks=())
        self.names = list(names)
        self.lengths = {}

    def next_work(self, generation=0):
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
            assert done.total == length, "told before its samples were in the parameters"
            self.lengths[self.leased[token].file] = length


def test_a_lease_that_is_somebody_elses_is_read_no_further(start):
    coordinator = FakeCoordinator(64)
    running = Running(job(), start(coordinator), coordinator)
    holds, work = running.worker.loop._feed._holds, DataWork((0, 1), 0, 0, 64)
    running.worker.leases.grant(work)
    assert holds(work)
    running.worker.leases.begin_again(1)
    assert not holds(work)
    running.worker.close()


@pytest.mark.parametrize(("steps_per_execution", "store"), [(1, False), (4, False), (1, True)])
def test_files_of_unknown_length_one_of_them_empty(start, tmp_path, steps_per_execution, store):
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
    servers = start(coordinator)
    options = {"steps_per_execution": steps_per_execution}
    training = Training(model=lambda: functional(options=options), data=files)
    assert Running(training, servers, coordinator).start().join() is End.FINISHED
    assert [coordinator.lengths[name] for name in files.list()] == sizes
    assert servers.stores[0].samples == sum(sizes)


class Away(Files):
    """One file of 32 samples, in a store that is away when a worker reads it first."""

    def list(self):
        return ("s3://bucket/part-3",)

    def example(self, batch_size):
        return next(self.of(0, batch_size))

    def batches(self, name, start, stop, batch_size, here=None):
        if not (tried := self.__dict__.setdefault("tried", [])):
            tried.append(name)
            raise Unreachable(f"{name}: no answer")
        return self.of(start, batch_size)

    @staticmethod
    def of(start, batch_size):
        for begin in range(start, 32, batch_size):
            end = min(begin + batch_size, 32)
            yield Batch(X[begin:end], Y[begin:end], np.ones(end - begin, np.float32), end - begin, end)


def test_what_cannot_be_read_is_told_until_it_can(start):
    files = Away("s3://bucket/*", lambda _path: None)
    coordinator = FileCoordinator(files.list())
    servers = start(coordinator)
    training = Training(model=functional, data=files)
    assert Running(training, servers, coordinator).start().join() is End.FINISHED
    assert servers.stores[0].samples == 32
    assert coordinator.said == ["cannot read s3://bucket/part-3: no answer", ""]
