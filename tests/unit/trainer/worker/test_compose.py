"""Building a worker: outages at the start, and errors of user code."""

import contextlib
import itertools
import threading
import urllib.error
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, Stream, Training
from shoal_trainer.contract import InitialFrom
from shoal_trainer.errors import OutOfMemory, Unreachable, UserError
from shoal_trainer.worker.compose import Worker, build_flat_model, compose
from shoal_trainer.worker.watchdog import FIRST_SECONDS, Watchdog
from shoal_trainer.worker.work import TaskWork
from tests.unit.trainer.configs import pod_config
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, compiled, functional, job
from tests.unit.trainer.worker.running import SECONDS
from tests.unit.trainer.worker.trained import parameters

CONFIG = pod_config(batch_size=4)


def raises(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize(
    "error",
    [Unreachable("the store does not answer"), ConnectionResetError(104, "reset"), TimeoutError("late")],
)
def test_data_outage_at_start_is_unreachable(error):
    with pytest.raises(Unreachable):
        build_flat_model(Training(model=functional, data=Indexed(size=8, fn=raises(error))), CONFIG)


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (functional, Indexed(8, raises(SystemExit(0))), "The data function failed: SystemExit: 0"),
        (raises(SystemExit(0)), Indexed(8, raises(KeyError)), r"Training\(model=…\) failed: SystemExit: 0"),
        (functional, Indexed(8, raises(KeyError("label"))), "The data function failed: KeyError: 'label'"),
    ],
)
def test_user_code_failure_is_a_user_error(model, data, words):
    with pytest.raises(UserError, match=words):
        build_flat_model(Training(model=model, data=data), CONFIG)


def test_a_loss_that_is_a_sum_is_that_of_a_batch_of_the_job():
    """Where this worker's batches have another size (`batchSizes`)."""

    def model():
        made = functional()
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"))
        return made

    losses = []
    for reference in (None, 12):
        config = CONFIG.model_copy(update={"reference_batch_size": reference})
        flat_model = build_flat_model(job(model), config)
        losses.append(flat_model.step(parameters(flat_model), flat_model.example).loss)
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-5)


def test_a_part_of_the_model_from_its_module_has_a_name_of_its_own():
    """As where a script makes an augmentation at its top, and the rest in the function."""
    keras.backend.clear_session(free_memory=False)
    keras.config.disable_flash_attention()
    augmentation = keras.Sequential([keras.layers.RandomFlip()])

    def model():
        inputs = keras.Input((6, 6, 1))
        features = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(4)])
        made = keras.Model(inputs, features(augmentation(inputs)))
        made.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return made

    made = []
    for data in (Indexed(8, raises(Unreachable("the store does not answer"))), DATA):
        with contextlib.suppress(Unreachable):
            build_flat_model(Training(model=lambda: made.append(model()) or made[-1], data=data), CONFIG)
    first, again = ([layer.name for layer in each.layers] for each in made)
    assert first == again, "a worker that could not read its data at first has the job's names"
    assert not keras.config.is_flash_attention_enabled(), "what a script sets, is set"
    keras.config.enable_flash_attention()


def test_layer_that_is_made_after_the_model_has_another_name():
    """As by a callback that exports the model with one layer more."""

    def model():
        inputs = keras.Input((6, 6, 1))
        made = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Flatten()(inputs)))
        made.compile("sgd", "sparse_categorical_crossentropy")
        return made

    keras.backend.clear_session(free_memory=False)
    built = build_flat_model(Training(model=model, data=DATA), CONFIG).model
    more = keras.layers.Dense(1)(built.layers[-1].output)
    assert keras.Model(built.inputs, more).layers[:-1] == built.layers


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), urllib.error.URLError(TimeoutError())])
def test_weights_that_cannot_be_loaded_now_are_waited_for(error):
    """As those of `keras.applications`."""
    with pytest.raises(Unreachable, match=r"Training\(model=…\)"):
        build_flat_model(Training(model=raises(error), data=DATA), CONFIG)


NO_MEMORY = [
    tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9,9]"),
    tf.errors.InternalError(None, None, "Dst tensor is not initialized."),
    tf.errors.InternalError(None, None, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"),
    MemoryError("Unable to allocate 9 GiB"),
]


class Large(keras.layers.Layer):
    """Does not fit where it is built, or where the step is traced for the first time."""

    def __init__(self, error, fails):
        super().__init__()
        self.error, self.fails = error, fails

    def build(self, _):
        if self.fails == "build":
            raise self.error

    def call(self, x):
        if self.fails == "step" and not isinstance(x, keras.KerasTensor):
            raise self.error
        return x


@pytest.mark.parametrize("error", NO_MEMORY)
@pytest.mark.parametrize("fails", ["model", "build", "step"])
def test_a_model_that_does_not_fit_here_may_fit_on_another_worker(error, fails):
    def model():
        if fails == "model":
            raise error
        layers = [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(4)]
        made = compiled(keras.Sequential(layers))
        call = made.call
        large = Large(error, fails)
        made.call = lambda x, **options: large(call(x, **options))
        return made

    with pytest.raises(OutOfMemory, match="ran out of memory"):
        build_flat_model(job(model), CONFIG).trace()


@pytest.mark.parametrize("error", NO_MEMORY)
def test_worker_that_runs_out_of_memory_gives_its_leases_back_and_suggests_a_smaller_batch(error):
    left = []
    loop = SimpleNamespace(run=raises(error), leave=lambda: left.append(True))
    with pytest.raises(OutOfMemory, match=r"ran out of memory: .*Use a smaller batch size"):
        Worker(loop, None, None, None, Watchdog(), lambda: None).run(print)
    assert left == [True]


def test_other_errors_are_not_out_of_memory():
    loop = SimpleNamespace(run=raises(tf.errors.InternalError(None, None, "ptxas fatal")))
    with pytest.raises(tf.errors.InternalError):
        Worker(loop, None, None, None, Watchdog(), lambda: None).run(print)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("optimizer", "messages"),
    [
        ("sgd", []),
        (
            "adamax",
            [
                "the optimizer runs on the workers: the parameter servers do not implement Adamax. "
                "Each worker has its own optimizer state"
            ],
        ),
    ],
)
def test_only_an_optimizer_on_the_workers_is_logged(start_servers, caplog, optimizer, messages):
    coordinator = FakeCoordinator(DATA.size)
    servers = start_servers(coordinator)
    training, config = job(lambda: functional(optimizer)), servers.config()
    flat_model = build_flat_model(training, config)
    flat_model.trace()
    compose(training, config, flat_model, coordinator, servers.credentials, threading.Event()).close()
    assert [r.getMessage() for r in caplog.records if "optimizer" in r.getMessage()] == messages


def test_worker_trains_the_samples_in_the_order_of_the_seed_of_the_job(start_servers):
    """Else runs with several seeds, for error bars, would all train them in one order."""
    servers = start_servers(None)
    first = [first_batch(servers, job(seed=seed)) for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


def first_batch(servers, training, begin=None):
    """What a worker trains first of a job, which begins from another run."""
    config = servers.config().model_copy(update={"initial_from": begin})
    flat_model = build_flat_model(training, config)
    flat_model.trace()
    coordinator, drain = FakeCoordinator(DATA.size), threading.Event()
    worker = compose(training, config, flat_model, coordinator, servers.credentials, drain)
    worker.loop._feed.start()
    ready = worker.loop._feed.get(SECONDS)
    worker.close()
    return ready.batch.x.tolist()


def test_a_run_that_goes_on_draws_other_samples_of_a_stream(start_servers):
    """Else the head of a long stream would be trained in each run, and never the rest."""

    def drawn(seed):
        rows = np.random.default_rng(seed).normal(size=(32, *DATA.x.shape[1:])).astype(np.float32)
        yield rows, DATA.y[:32]

    servers = start_servers(None)
    training = Training(model=functional, data=Stream(drawn, samples=DATA.size))
    first, second = (InitialFrom(uri=f"s3://bucket/n/j/{run}") for run in "ab")
    found = [first_batch(servers, training, begin) for begin in (None, first, second, first)]
    assert found[1] == found[3]
    assert not any(a == b for a, b in itertools.combinations(found[:3], 2))
    assert first_batch(servers, training, first.model_copy(update={"weights_only": True})) == found[0]


def test_task_is_watched_but_not_the_wait_for_its_data(start_servers):
    coordinator, watched, outages = FakeCoordinator(DATA.size), [], [Unreachable("the store does not answer")]

    def validation():
        watched.append(worker.watchdog._watched)
        if outages:
            raise outages.pop()
        return tf.data.Dataset.from_tensor_slices((DATA.x[:4], DATA.y[:4]))

    servers = start_servers(coordinator)
    judged = Stream(validation, samples=4)
    training = Training(model=functional, data=DATA, validation=judged)
    config = servers.config().model_copy(
        update={"incarnation": 1}
    )  # the first looks at the data when it begins
    flat_model = build_flat_model(training, config)
    flat_model.trace()
    worker = compose(training, config, flat_model, coordinator, servers.credentials, threading.Event())
    worker.loop._do_task(TaskWork((0, 1), "evaluate", 2), flat_model.initial())
    worker.close()
    assert [(each.what, each.least) for each in watched] == [
        ("the task evaluate of epoch 3", FIRST_SECONDS)
    ] * 2
    assert worker.watchdog._watched is None


def test_model_in_the_scope_of_a_strategy_is_refused():
    def scoped():
        with tf.distribute.MirroredStrategy(["/CPU:0"]).scope():
            return compiled(
                keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(4)])
            )

    with pytest.raises(UserError, match=r"Take out strategy\.scope\(\)"):
        build_flat_model(job(scoped), CONFIG)
