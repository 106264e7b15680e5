"""Steps without a gradient: an overflow of mixed_float16, a non-finite batch under `on_nan="skip"`."""

from contextlib import closing

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.errors import UserError
from shoal_trainer.worker import loop
from shoal_trainer.worker.compose import build_flat_model
from shoal_trainer.worker.flat_model import MAX_OVERFLOWS, FlatModel
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.ps.shards import pull_from
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, X, Y, begin, functional, job
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.test_compose import CONFIG
from tests.unit.trainer.worker.trained import SGD, Server, parameters, pushed


@pytest.fixture
def mixed():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("mixed")
def test_overflow_has_no_gradient_and_halves_the_scale():
    batch = Indexed.from_arrays(X * 1000, Y).example(16)
    flat_model = FlatModel(functional(keras.optimizers.SGD(0.1)), batch, "bf16")
    tensor = parameters(flat_model)
    skipped = [flat_model.step(tensor, batch).skipped for _ in range(40)]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)  # until the scale fits


@pytest.mark.usefixtures("mixed")
def test_callbacks_of_a_model_with_a_scaled_loss_run():
    """The scale is a variable of the step alone, which nothing else holds."""
    flat_model = FlatModel(functional("adam"), DATA.example(16), "bf16")
    flat_model.trace()
    with closing(Tasks(job(callbacks=keras.callbacks.Callback), flat_model, 16)) as tasks:
        assert tasks.run_callbacks(flat_model.initial(), [{"loss": 2.0}])


@pytest.mark.usefixtures("mixed")
def test_step_with_a_scaled_loss_is_compiled_before_the_worker_joins():
    """As XLA does on a GPU, where mixed_float16 is usual."""
    flat_model = FlatModel(functional("adam", options={"jit_compile": True}), DATA.example(16), "bf16")
    flat_model.trace()
    before = flat_model.initial()
    flat_model.compile()
    assert np.array_equal(flat_model.initial(), before)
    assert not flat_model.step(parameters(flat_model), DATA.example(16)).skipped


@pytest.mark.usefixtures("mixed")
def test_overflow_in_the_forward_pass_is_skipped_as_in_keras_unless_it_never_ends():
    batch = Indexed.from_arrays(np.full_like(X, 1e6), Y).example(16)  # more than float16 can hold
    flat_model = FlatModel(keras_model(), batch, "bf16")
    tensor = parameters(flat_model)
    steps = [flat_model.step(tensor, batch) for _ in range(MAX_OVERFLOWS + 1)]
    assert not np.isfinite([step.loss for step in steps]).any()
    assert all(step.skipped and not np.asarray(step.update).any() for step in steps)
    assert [step.finite for step in steps] == [True] * MAX_OVERFLOWS + [False]


@pytest.mark.usefixtures("mixed")
def test_step_without_overflow_has_a_gradient():
    batch = DATA.example(16)
    flat_model = FlatModel(functional(keras.optimizers.SGD(0.1)), batch, "bf16")
    tensor = parameters(flat_model)
    assert not flat_model.step(tensor, batch).skipped


@pytest.mark.parametrize("on_host", [True, False])
def test_gradient_of_zeros_is_a_step_of_the_optimizer_as_in_keras(on_host):
    """Momentum and weight decay move the parameters, as with a hinge that every sample of a batch satisfies."""

    def made():
        begin()
        kernel = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        model = keras.Sequential([keras.Input((3,)), kernel])
        inner = SGD(0.1, momentum=0.9, weight_decay=0.1)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0), "hinge")
        return model

    x, y = np.full((16, 3), 2, np.float32), np.ones((16, 1), np.float32)
    moving, still = (next(iter(Indexed.from_arrays(x, sign * y).read(Part(0, 16), 16))) for sign in (-1, 1))
    server, plain = Server(made(), example=moving, on_host=on_host), made()
    for batch in (moving, still, still):
        pushed(server, [batch])
        plain.train_on_batch(batch.x, batch.y)
    assert server.store.model.updates == int(plain.optimizer.inner_optimizer.iterations) == 3
    assert server.flat() == pytest.approx(flatten(plain, server.flat_model.layout), rel=1e-6)


@pytest.mark.usefixtures("mixed")
def test_model_uses_the_dtype_policy_of_the_jobs_module():
    flat_model = build_flat_model(job(keras_model), CONFIG)
    assert isinstance(flat_model.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert flat_model.model.layers[-1].compute_dtype == "float16"


def keras_model():
    model = keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_skipped_batches_do_not_step_the_optimizer(start_servers, monkeypatch):
    """Keras does not step for an overflow; with momentum, a zero gradient would still move the parameters."""
    coordinator = FakeCoordinator(DATA.size, tasks=())
    servers = start_servers(coordinator)
    non_finite = Indexed.from_arrays(np.full_like(X, np.nan), Y)
    monkeypatch.setattr(loop, "MAX_LEFT_OUT", DATA.size)
    training = job(lambda: functional("adam"), wire="fp32", on_nan="skip")
    running = Running(
        type(training)(model=training.model, data=non_finite, wire="fp32", on_nan="skip"),
        servers,
        coordinator,
    )
    first = running.flat_model.initial()
    assert running.start().join() is End.FINISHED
    store = servers.stores[0]
    assert store.history.version == DATA.size // 16
    assert store.model.updates == 0
    flat = np.zeros(running.flat_model.layout.size, np.float32)
    pull_from(store, 0, flat)
    assert np.array_equal(flat, first)


def test_job_of_which_every_batch_is_skipped_fails(start_servers):
    """Otherwise it would succeed with parameters that nothing has trained, or that are not finite."""
    coordinator = FakeCoordinator(DATA.size, tasks=())
    non_finite = Indexed.from_arrays(np.full_like(X, np.nan), Y)
    training = job(lambda: functional("adam"), wire="fp32", on_nan="skip")
    training = type(training)(model=training.model, data=non_finite, wire="fp32", on_nan="skip")
    running = Running(training, start_servers(coordinator), coordinator)
    end = running.start().join()
    assert isinstance(end, UserError)
    assert "as in the 20 batches before. Lower the learning rate" in str(end)
