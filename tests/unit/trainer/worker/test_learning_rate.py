"""Callbacks that set the learning rate set that of the whole job, as Keras' `fit` would in one process."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from shoal_trainer import UserError
from shoal_trainer.contract import StopAfter
from shoal_trainer.coordinator.protocol import Heartbeat, TaskDone
from shoal_trainer.coordinator.task_queue import Tasks as Queue
from shoal_trainer.wire.messages import OptimizerConfig
from shoal_trainer.worker.callbacks import rate_of, set_rate
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.tasks import Tasks
from shoal_trainer.worker.work import TaskWork
from tests.unit.trainer.coordinator.bench import Bench
from tests.unit.trainer.ps.shards import pull_from
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, X, Y, functional, job
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.scripted import Bench as Scripted

# From Keras' optimizer with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
callbacks = keras.callbacks
LOSSES = (3.0, 2.0, 2.5, 2.5, 2.4, 2.6, 2.6, 1.0)
HISTORY = [{"loss": 1.0, "val_loss": loss} for loss in LOSSES]


def plateau():
    return callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=2, min_delta=0)


def falling():
    return callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch == 0 else rate * 0.9)


class Halves(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch % 2:
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)


class PerEpoch(callbacks.Callback):
    """The first epoch has the rate of `compile()`, which is the same here."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.01 / 2**epoch


class AtBegin(callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.optimizer.learning_rate = 0.5


class Table(callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch in (0, 3):
            self.model.optimizer.learning_rate = 0.5 / (1 + epoch)


def compounding():
    return callbacks.LearningRateScheduler(lambda _, rate: 0.9 * rate)


@pytest.fixture
def worker():
    """Makes the tasks of a new worker."""
    made = []

    def tasks(*makers, optimizer="sgd"):
        training = job(callbacks=lambda: [make() for make in makers])
        made.append(Tasks(training, FlatModel(functional(optimizer), DATA.example(16), "fp32"), 16))
        return made[-1]

    yield tasks
    for each in made:
        each.close()


def in_keras(make):
    """The rate of each epoch and the one after it, in one process."""
    model, seen = functional(), []
    callback = make()
    callback.set_model(model)
    callback.on_train_begin({})
    for epoch, logs in enumerate(HISTORY):
        callback.on_epoch_begin(epoch, {})
        seen.append(rate_of(model))
        callback.on_epoch_end(epoch, dict(logs))
    callback.on_epoch_begin(len(HISTORY), {})
    return [*seen, rate_of(model)]


@pytest.mark.by_day(4)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("make", [plateau, falling, Halves, PerEpoch])
def test_rates_are_those_of_fit_whichever_worker_runs_the_callbacks(worker, make, every):
    expected, rate, seen = in_keras(make), None, []
    for epoch in range(len(HISTORY)):
        if epoch % every == 0:
            tasks = worker(make)  # another one, which has only the logs
        outcome = tasks.run_callbacks(tasks._flat_model.initial(), HISTORY[: epoch + 1], rate)
        rate = rate if outcome.learning_rate is None else outcome.learning_rate
        seen.append(0.01 if rate is None else rate)
    assert len(set(expected)) > 1
    assert seen == pytest.approx(expected[1:])


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("make", [AtBegin, Table, compounding])
def test_a_rate_set_before_the_first_epoch_is_that_of_fit_from_the_second_on(worker, make, every, caplog):
    """Callbacks run only when the first epoch is complete: it has the rate of `compile()`, and the worker says so."""
    fitted, in_fit = functional(), []
    note = callbacks.LambdaCallback(on_epoch_end=lambda *_: in_fit.append(rate_of(fitted)))
    fitted.fit(X[:16], Y[:16], epochs=5, verbose=0, callbacks=[make(), note])
    rate, trained = None, []
    for epoch in range(5):
        trained.append(0.01 if rate is None else rate)
        if epoch % every == 0:
            tasks = worker(make)
        outcome = tasks.run_callbacks(tasks._flat_model.initial(), HISTORY[: epoch + 1], rate)
        rate = rate if outcome.learning_rate is None else outcome.learning_rate
    assert trained == pytest.approx([0.01, *in_fit[1:]])
    assert f"a learning rate of {in_fit[0]:.3g}" in caplog.text
    assert "Give it to compile()" in caplog.text


def test_the_rate_of_compile_is_not_told_as_another_one(worker, caplog):
    for make in (plateau, falling, PerEpoch):
        tasks = worker(make)
        tasks.run_callbacks(tasks._flat_model.initial(), HISTORY[:1])
    assert "learning rate" not in caplog.text


def test_the_rate_of_the_job_counts_not_that_of_the_replay(worker):
    tasks = worker(plateau)
    outcome = tasks.run_callbacks(tasks._flat_model.initial(), HISTORY[:4], 0.004)
    assert outcome.learning_rate == pytest.approx(0.002)


def test_a_rate_that_the_job_has_lost_is_set_again_by_the_same_worker(worker):
    """By a rollback, or with a parameter server that had not saved it: the callbacks see the epoch again."""
    tasks = worker(plateau)
    first, again = (tasks.run_callbacks(tasks._flat_model.initial(), HISTORY[:4], None) for _ in range(2))
    assert first.learning_rate == again.learning_rate == pytest.approx(0.005)


def test_an_optimizer_on_the_worker_has_the_rate_of_the_job_whatever_its_callbacks_left():
    model, seen = functional("adamax"), []
    compiled = rate_of(model)
    placement = Placement(OptimizerConfig(name="delta"), "adamax runs on the worker")
    bench = Scripted(keras_model=model, placement=placement, task=lambda *_: set_rate(model, 1e-4))
    bench.loop.upstream.pull_exact = lambda _flat: SimpleNamespace(samples=0)
    step = bench.loop._flat_model.step
    bench.loop._flat_model.step = lambda *given: (seen.append(rate_of(model)), step(*given))[1]
    task = TaskWork((1, 1), "callbacks")
    for told, item in [(None, task), (None, bench.batch()), (1e-4, bench.batch(2)), (None, bench.batch(4))]:
        bench.coordinator.rate = told
        bench.loop._train(item) if isinstance(item, Ready) else bench.loop._handle(item)
    assert seen == [compiled, pytest.approx(1e-4), compiled]


def test_schedule_in_the_optimizer_refuses_such_callbacks(worker):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    tasks = worker(plateau, optimizer=keras.optimizers.SGD(schedule))
    with pytest.raises(UserError, match=r"ReduceLROnPlateau cannot change.*has a schedule"):
        tasks.run_callbacks(tasks._flat_model.initial(), HISTORY[:1])
    with pytest.raises(UserError, match="was created with a `LearningRateSchedule`"):
        again = worker(Halves, optimizer=keras.optimizers.SGD(schedule))
        again.run_callbacks(again._flat_model.initial(), HISTORY[:2])


class HalvesOneOfSeveral(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.optimizers[0].learning_rate = 0.5


def test_rates_of_several_optimizers_are_not_for_callbacks(worker):
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1)))
    for make, words in [(plateau, "several rates"), (HalvesOneOfSeveral, "the rates of a MultiOptimizer")]:
        tasks = worker(make, optimizer=several)
        with pytest.raises(UserError, match=words):
            tasks.run_callbacks(tasks._flat_model.initial(), HISTORY[:1])


def test_monitor_that_is_not_in_the_logs_is_refused(worker):
    tasks = worker(lambda: callbacks.ReduceLROnPlateau("auc"))
    with pytest.raises(UserError, match="not in its logs"):
        tasks.run_callbacks(tasks._flat_model.initial(), HISTORY[:1])


def test_the_coordinator_tells_all_workers_and_keeps_the_rate_in_snapshots():
    bench = Bench(callbacks=True, stop=StopAfter(epochs=2))
    for slot in (0, 1):
        bench.join(slot)
    work = bench.train(0)
    coordinator, queue = bench.coordinator, bench.coordinator.record.tasks
    assert coordinator.heartbeat(Heartbeat(slot=1, incarnation=0)).learning_rate is None
    assert (work.task, work.learning_rate) == ("callbacks", None)
    coordinator.task_done(TaskDone(slot=0, incarnation=0, token=work.token, learning_rate=0.005))
    assert coordinator.heartbeat(Heartbeat(slot=1, incarnation=0)).learning_rate == 0.005
    assert bench.train(1).kind == "idle"
    assert bench.ask(0).learning_rate == 0.005
    restored = Queue()
    restored.load(queue.dump())
    assert restored.learning_rate == 0.005
    restored.load({key: value for key, value in queue.dump().items() if key != "learningRate"})
    assert restored.learning_rate is None


@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamax"])
def test_a_worker_trains_with_the_rate_of_the_job(start_servers, optimizer):
    coordinator = FakeCoordinator(64, tasks=())
    coordinator.rate = 1e-30
    rates, record = [], coordinator.on_applied
    coordinator.on_applied = lambda push: (rates.append(push.meta.learning_rate), record(push))
    servers = start_servers(coordinator)
    running = Running(job(lambda: functional(optimizer), wire="fp32"), servers, coordinator).start()
    assert running.join() is End.FINISHED
    before = FlatModel(functional(optimizer), DATA.example(16), "fp32").initial()
    flat = np.zeros_like(before)
    pull_from(servers.stores[0], 0, flat)
    assert abs(flat - before).max() < 1e-20
    if optimizer == "sgd":
        assert rates == [pytest.approx(1e-30)] * 4
