"""The real worker against real parameter servers on loopback and a coordinator in memory."""

import math
import threading
from contextlib import contextmanager
from itertools import count

import keras
import numpy as np
import pytest

from shoal_trainer import Training, UserError
from shoal_trainer.data.source import Part
from shoal_trainer.errors import Unreachable
from shoal_trainer.wire.messages import MAX_MARKS
from shoal_trainer.worker import answers as waits
from shoal_trainer.worker import cadence
from shoal_trainer.worker.loop import LATE_SECONDS, End
from shoal_trainer.worker.work import DataWork, Finished, reporting
from tests.unit.trainer.ps.shards import pull_from
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, compiled, functional, job
from tests.unit.trainer.worker.running import SECONDS, Running, on_host, wait

# From Keras' saving code with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("shards", [1, 2])
def test_worker_trains_each_sample_once_then_runs_tasks(start_servers, shards):
    coordinator = FakeCoordinator(DATA.size, epochs=2, tasks=("evaluate", "export"))
    servers = start_servers(coordinator, count=shards)
    running = Running(job(lambda: functional("adam", norm=True)), servers, coordinator).start()
    assert running.join() is End.FINISHED
    assert coordinator.samples == 2 * DATA.size
    assert coordinator.left == 1
    (evaluate, metrics, _, _), (export, _, files, _) = coordinator.results
    assert (evaluate, export) == ("evaluate", "export")
    assert set(metrics) == {"val_loss", "val_accuracy"}
    assert {"model.keras", "saved_model/saved_model.pb"} <= set(files)
    begun, ended = coordinator.reported_steps[::2], coordinator.reported_steps[1::2]
    assert len(begun) == len(ended) == running.worker.loop.steps
    assert all(map(callable, begun))
    assert set(ended) == {""}


def test_long_step_is_reported():
    coordinator, now = FakeCoordinator(DATA.size), [0.0]
    with reporting(coordinator, "a training step on a.csv", lambda: now[0]):
        (message,) = coordinator.reported_steps
        now[0] = 299.0
        assert message() == ""
        now[0] = 300.0
        assert message() == "has waited 300 s for a training step on a.csv"
    assert coordinator.reported_steps[1:] == [""]


@pytest.mark.nightly
@on_host  # XLA fuses Keras' update into its step, and rounds otherwise
def test_sequential_worker_equals_keras_bit_for_bit(start_servers):
    coordinator = FakeCoordinator(DATA.size, tasks=())
    servers = start_servers(coordinator)
    running = Running(job(wire="fp32"), servers, coordinator, sequential=True)
    assert running.start().join() is End.FINISHED
    plain = functional()
    for batch in DATA.read(Part(0, DATA.size), 16):
        plain.train_on_batch(batch.x, batch.y)
    flat = np.zeros(running.flat_model.layout.size, np.float32)
    pull_from(servers.stores[0], 0, flat)
    assert np.array_equal(flat, np.concatenate([v.numpy().ravel() for v in plain.trainable_variables]))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("share", [0.0, math.inf], ids=["overlapped", "in rounds"])
@pytest.mark.parametrize("shards", [1, 2])
def test_two_workers_share_the_data(start_servers, monkeypatch, shards, share):
    monkeypatch.setattr(cadence, "ROUND_SHARE", share)
    coordinator = FakeCoordinator(
        DATA.size, epochs=40
    )  # the first one must not be done before the other has begun
    servers = start_servers(coordinator, count=shards)
    workers = [Running(job(), servers, coordinator, slot=slot) for slot in range(2)]
    for worker in workers:
        worker.start()
    assert [worker.join() for worker in workers] == [End.FINISHED] * 2
    assert coordinator.samples == 40 * DATA.size
    assert all(worker.worker.loop.steps for worker in workers)
    assert any(worker.worker.loop._cadence.in_round for worker in workers) == (share > 0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("batches", [7, 1])
def test_drained_worker_pushes_all_that_it_has_computed(start_servers, batches):
    coordinator = FakeCoordinator(DATA.size, epochs=50)
    servers = start_servers(coordinator)
    running = Running(job(batches_per_push=batches), servers, coordinator)
    loop = running.worker.loop
    step = loop._step

    def counted(*arguments):
        if coordinator.pushes >= 5 and loop.steps % batches == batches // 2:
            running.drain.set()  # within a push's batches
        return step(*arguments)

    loop._step = counted
    running.start()
    assert running.join() is End.DRAINED
    assert coordinator.left == 1
    assert coordinator.samples == loop.steps * 16
    assert loop.upstream.wasted == 0
    assert loop.steps % batches or batches == 1


def test_what_may_hang_in_an_accelerator_is_watched(start_servers):
    """To where it computes go the parameters, from there the update: as long as a step a driver may take for them."""
    coordinator = FakeCoordinator(DATA.size)
    watched, seen = [], set()

    @contextmanager
    def watch(what):
        watched.append(what)
        yield
        watched.pop()

    def noted(name, call):
        def called(*arguments):
            seen.add((name, *(what.partition(" on ")[0] for what in watched)))
            return call(*arguments)

        return called

    running = Running(job(), start_servers(coordinator), coordinator)
    loop = running.worker.loop
    vector, pile, buffers = running.flat_model.vector, loop.upstream.pending, loop.upstream._buffers
    loop._watch = loop.upstream._watch = watch
    for owner, name in ((vector, "on_devices"), (pile, "add"), (pile, "update"), (buffers, "swap")):
        setattr(owner, name, noted(name, getattr(owner, name)))
    assert running.start().join() is End.FINISHED
    adding, copying = "adding up the steps of a push", "copying parameters to the accelerator"
    assert {("on_devices", "a training step"), ("add", adding), ("update", adding), ("swap", copying)} <= seen
    assert {each for each in seen if len(each) == 1} <= {("swap",)}, "that of a pull is the host's"


def test_a_push_without_an_answer_does_not_keep_a_drained_worker(start_servers, monkeypatch):
    """A server may take any time for one: the wait for stale workers, a server that is short of memory."""
    monkeypatch.setattr(waits, "LEAVE_SECONDS", 0.2)
    coordinator = FakeCoordinator(DATA.size, epochs=50)
    running = Running(job(), start_servers(coordinator), coordinator)
    client = running.worker.loop.upstream._exchange._client
    held, answers, push = threading.Event(), threading.Event(), client.push_pull

    def unanswered(*arguments):
        held.set()
        assert answers.wait(SECONDS)
        return push(*arguments)

    client.push_pull = unanswered
    running.start()
    assert held.wait(SECONDS)
    running.drain.set()
    try:
        assert running.join() is End.DRAINED
        assert coordinator.left == 1
        assert coordinator.given == waits.GOODBYE_SECONDS
        assert running.worker.loop.upstream.wasted == running.worker.loop.steps
    finally:
        answers.set()


def nan_loss(y, p):
    return keras.ops.mean(p) * float("nan")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_non_finite_loss_follows_the_policy(start_servers, policy):
    def build():
        model = functional()
        model.compile("sgd", nan_loss)
        return model

    coordinator = FakeCoordinator(64, tasks=())
    servers = start_servers(coordinator)
    training = Training(model=build, data=DATA, on_nan=policy)
    end = Running(training, servers, coordinator).start().join()
    if policy == "skip":
        assert end is End.FINISHED
        assert servers.stores[0].history.samples == 64
    else:
        assert isinstance(end, UserError)
        assert "not finite" in str(end)


def test_worker_with_another_model_is_refused(start_servers):
    coordinator = FakeCoordinator(DATA.size, epochs=50)
    servers = start_servers(coordinator)
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


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("training", "batches"),
    [
        (lambda: job(functional, batches_per_push=4), 4),
        (lambda: job(lambda: functional(keras.optimizers.SGD(0.01, gradient_accumulation_steps=4))), 4),
        (lambda: job(lambda: functional(options={"steps_per_execution": 4})), 1),
    ],
    ids=["batches_per_push", "gradient_accumulation_steps", "steps_per_execution"],
)
def test_push_of_several_batches_counts_each_step(start_servers, training, batches):
    """`steps_per_execution` saves time in Python, in Keras: it makes as many updates."""
    coordinator = FakeCoordinator(DATA.size, tasks=())
    servers = start_servers(coordinator)
    running = Running(training(), servers, coordinator)
    running.never_idle(DATA.size // 16)
    assert running.start().join() is End.FINISHED
    assert coordinator.steps == [batches] * (DATA.size // 16 // batches)
    assert coordinator.samples == DATA.size


@pytest.mark.parametrize(
    ("late", "steps"),
    [(0.0, [4, 4, 4]), (LATE_SECONDS, [1] * 12)],
    ids=["slow", "later than others may wait"],
)
def test_slow_data_cut_no_accumulation(start_servers, late, steps):
    """The update would depend on the speed of the disk. What comes after the last batch is waited for by nobody."""
    coordinator, now = FakeCoordinator(12 * 16, size=12 * 16, tasks=()), [0.0]
    training = job(lambda: functional(keras.optimizers.SGD(0.01, gradient_accumulation_steps=4)))
    running = Running(training, start_servers(coordinator), coordinator)
    loop = running.worker.loop
    get, turns = loop._feed.get, count()

    def slow(timeout):
        if next(turns) % 2:
            now[0] += late
            return None
        return get(SECONDS if loop.steps < 12 else timeout)

    loop._clock, loop._feed.get = (lambda: now[0]), slow
    assert running.start().join() is End.FINISHED
    assert coordinator.steps == steps


def test_no_accumulation_waits_for_batches_that_nobody_reads(start_servers):
    coordinator = FakeCoordinator(3 * 16, tasks=())
    training = job(lambda: functional(keras.optimizers.SGD(0.01, gradient_accumulation_steps=4)))
    running = Running(training, start_servers(coordinator), coordinator)
    running.worker.loop._clock = lambda: 0.0
    assert running.start().join() is End.FINISHED
    assert sum(coordinator.steps) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("cut_off", [False, True])
def test_push_is_sent_when_its_marks_are_full(start_servers, cut_off):
    """A lease without a mark is never completed; this also holds for steps made during an outage."""
    coordinator = FakeCoordinator(DATA.size, size=1, tasks=())
    coordinator.free.reverse()  # no two leases are adjacent
    servers = start_servers(coordinator)
    training = job(functional, batches_per_push=300)
    running = Running(training, servers, coordinator)
    exchange = running.worker.loop.upstream._exchange
    push_pull = exchange.push_pull

    def cut(*_arguments, **_options):
        exchange.push_pull = push_pull
        return exchange._pool.submit(unreachable)

    def unreachable():
        raise Unreachable("the connection is reset")

    if cut_off:
        exchange.push_pull = cut
    running.never_idle(DATA.size)
    assert running.start().join() is End.FINISHED
    assert coordinator.steps == [MAX_MARKS, DATA.size - MAX_MARKS]
    assert coordinator.samples == DATA.size


class Hasty(FakeCoordinator):
    """Ends the job although pushes are pending."""

    def next_work(self, generation=0, stopped=None):
        return super().next_work(generation) if self.free else Finished()


def test_pending_batches_are_dropped_when_the_job_has_ended(start_servers):
    coordinator = Hasty(7 * 16, size=7 * 16, tasks=())
    training = job(functional, batches_per_push=4)
    running = Running(training, start_servers(coordinator), coordinator)
    running.never_idle()
    assert running.start().join() is End.FINISHED
    assert coordinator.samples == 4 * 16  # a push after the export would be in no model


class TaskFirst(FakeCoordinator):
    """Assigns tasks before data; the answer to the first result is lost."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.events = []

    def next_work(self, generation=0, stopped=None):
        self.events.append("request")
        return self.tasks.pop(0) if self.tasks else super().next_work(generation)

    def task_done(self, work, metrics, files, *, stop, message, learning_rate=None):
        super().task_done(work, metrics, files, stop=stop, message=message)
        self.events.append(work.kind)
        if self.events.count("evaluate") == 1:
            raise Unreachable("the answer is lost")


@pytest.mark.nightly
def test_worker_takes_no_lease_during_a_task(start_servers):
    coordinator = TaskFirst(64, tasks=("evaluate",))
    assert Running(job(), start_servers(coordinator), coordinator).start().join() is End.FINISHED
    assert coordinator.events[:4] == ["request", "evaluate", "evaluate", "request"]
    assert coordinator.samples == 64


def test_revoked_lease_is_not_read_further(start_servers):
    coordinator = FakeCoordinator(64)
    running = Running(job(), start_servers(coordinator), coordinator)
    holds, work = running.worker.loop._feed._holds, DataWork((0, 1), 0, 0, 64)
    running.worker.leases.grant(work)
    assert holds(work)
    running.worker.leases.reset(1)
    assert not holds(work)
    running.worker.close()
