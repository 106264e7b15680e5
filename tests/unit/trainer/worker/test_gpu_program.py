"""What is different on a machine with a GPU: XLA, device memory, compilations, data that only a CPU would refuse."""

import json
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, UserError
from shoal_trainer.contract import ACCELERATORS_ENV, CONFIG_ENV
from shoal_trainer.data.source import Part
from shoal_trainer.errors import NoAccelerator
from shoal_trainer.ps.coding import decode
from shoal_trainer.worker import main
from shoal_trainer.worker.flat_model import MAX_SHAPES, FlatModel
from shoal_trainer.worker.hardware import require_accelerators
from shoal_trainer.worker.inputs import Inputs
from shoal_trainer.worker.keras_internals import evaluate
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.configs import pod_config
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, OwnStep, compiled, functional, job, subclassed
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.trained import parameters

L = keras.layers
as_on_gpu = pytest.mark.parametrize("engine", ["gpu"], indirect=True)
both = pytest.mark.parametrize("engine", ["host", "gpu"], indirect=True)
BATCHES = list(DATA.read(Part(0, 48), 16))


def compiles(graph):
    """Whether a part of this graph is compiled by XLA."""
    library = graph.as_graph_def().library.function
    return any(
        function.attr["_XlaMustCompile"].b for function in library if "_XlaMustCompile" in function.attr
    )


@pytest.mark.by_day(1)
@as_on_gpu
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_step_equals_that_of_a_cpu(wire):
    on_gpu = FlatModel(functional(norm=True), BATCHES[0], wire)
    assert on_gpu.model.jit_compile
    plain = functional(norm=True, options={"jit_compile": False})
    on_cpu = FlatModel(plain, BATCHES[0], wire, on_host=True)
    steps = [model.step(parameters(model), BATCHES[0]) for model in (on_gpu, on_cpu)]
    found = [np.zeros(on_gpu.layout.size, np.float32) for _ in steps]
    for out, step in zip(found, steps, strict=True):
        decode(np.asarray(step.update), out, on_gpu.layout.trainable)
    np.testing.assert_allclose(
        *found, rtol=2e-2 if wire == "bf16" else 1e-4, atol=1e-2 if wire == "bf16" else 1e-6
    )
    assert steps[0].loss == pytest.approx(steps[1].loss, rel=1e-2)
    assert steps[0].finite


@pytest.mark.nightly
@both
def test_compiling_changes_nothing():
    def made():
        flat_model = FlatModel(functional("adamax", dropout=0.5, norm=True), BATCHES[0], "fp32")
        flat_model.trace()
        return flat_model

    before, after = made(), made()
    after.compile()
    steps = [[model.step(parameters(model), batch).loss for batch in BATCHES] for model in (before, after)]
    assert steps[0] == steps[1]


@as_on_gpu
def test_a_diverged_batch_is_found_on_the_device():
    flat_model = FlatModel(functional(), BATCHES[0], "bf16")
    bad = Indexed.from_arrays(np.full((16, 6, 6, 1), np.nan, np.float32), np.zeros(16)).example(16)
    assert flat_model.step(parameters(flat_model), BATCHES[0]).finite
    assert not flat_model.step(parameters(flat_model), bad).finite


@as_on_gpu
def test_what_surrounds_the_compiled_cluster_is_small():
    flat_model = FlatModel(functional(norm=True), BATCHES[0], "bf16")
    flat_model.trace()
    (traced,) = flat_model._traced.values()
    kinds = [op.type for op in traced.graph.get_operations()]
    assert "Cast" not in kinds
    outside = [kind for kind in kinds if kind not in {"Placeholder", "Identity", "NoOp"}]
    assert len(outside) <= 2, outside
    assert compiles(traced.graph)


@pytest.mark.nightly
@as_on_gpu
def test_short_batches_of_a_custom_step_are_not_compiled():
    flat_model = FlatModel(subclassed(OwnStep), BATCHES[0], "fp32")
    given = [DATA.read(Part(0, rows), 16) for rows in (16, 5, 7, 9)]
    losses = [flat_model.step(parameters(flat_model), next(each)).loss for each in given]
    assert np.isfinite(losses).all()
    (traced,) = flat_model._traced.values()
    assert compiles(traced.graph)
    concrete = flat_model._function.get_concrete_function(
        tf.TensorSpec((flat_model.layout.size,)),
        tf.TensorSpec((None, 6, 6, 1)),
        tf.TensorSpec((None,), tf.int64),
    )
    assert not compiles(concrete.graph)
    assert flat_model._function.experimental_get_tracing_count() <= 3


@as_on_gpu
def test_evaluation_is_not_compiled_and_training_stays_so(monkeypatch):
    flat_model = FlatModel(functional(), BATCHES[0], "fp32")
    tasks = Tasks(job(), flat_model, 16)
    seen = []
    monkeypatch.setattr(
        "shoal_trainer.worker.tasks.evaluate",
        lambda model, batches: (seen.append(model.jit_compile), evaluate(model, batches))[1],
    )
    assert "val_loss" in tasks.evaluate(flat_model.initial()).metrics
    tasks.close()
    assert seen == [False]
    assert flat_model.model.jit_compile


@pytest.mark.nightly
@as_on_gpu
def test_each_length_is_traced_once_and_many_shapes_share_one_function(caplog):
    def model():
        inputs = keras.Input((None, 3))
        return compiled(keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(inputs))))

    def batch(length):
        return Indexed.from_arrays(np.ones((4, length, 3), np.float32), np.zeros(4, np.int64)).example(4)

    flat_model = FlatModel(model(), batch(8), "fp32")
    flat_model.trace()
    for length in (8, 16, 8, 16):
        flat_model.step(parameters(flat_model), batch(length))
    assert len(flat_model._traced) == 2
    for length in range(20, 20 + MAX_SHAPES):
        flat_model.step(parameters(flat_model), batch(length))
    assert len(flat_model._traced) == MAX_SHAPES
    assert "lengths=… of the data would limit them" in caplog.text


@as_on_gpu
def test_operation_that_xla_refuses_is_named_with_what_to_do():
    class Slow(L.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), x.shape)

    inputs = keras.Input((6, 6, 1))
    flat_model = FlatModel(
        compiled(keras.Model(inputs, L.Dense(4)(L.Flatten()(Slow()(inputs))))), BATCHES[0], "fp32"
    )
    with pytest.raises(UserError, match=r"XLA.*cannot compile.*PyFunc.*jit_compile=False"):
        flat_model.trace()
        flat_model.step(parameters(flat_model), BATCHES[0])


@pytest.mark.nightly
@as_on_gpu
def test_worker_trains_and_evaluates(start_servers):
    coordinator = FakeCoordinator(DATA.size, tasks=("evaluate",))
    running = Running(job(lambda: functional("adam", norm=True)), start_servers(coordinator), coordinator)
    assert running.start().join() is End.FINISHED
    assert coordinator.samples == DATA.size


# --- the device -------------------------------------------------------------------------------------------------------


def test_a_worker_without_its_gpu_says_why():
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    require_accelerators(0)
    with pytest.raises(NoAccelerator, match=r"has 2 GPUs.*sees none: the driver is missing: libcuda\.so\.1"):
        require_accelerators(2, missing)
    with pytest.raises(NoAccelerator, match=r"has 1 GPU in its limits.*could not use the driver"):
        require_accelerators(1, lambda _: None)


def test_a_worker_without_its_gpu_ends_so_that_another_node_is_tried(monkeypatch, tmp_path):
    (tmp_path / "job.py").write_text(
        "import numpy as np\nfrom shoal_trainer import Training\n"
        "job = Training(model=lambda: None, data=(np.ones(4),))\n"
    )
    config = pod_config(folder=tmp_path, entrypoint="job:job")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "job", raising=False)  # of an earlier worker of this process
    monkeypatch.setenv(CONFIG_ENV, config.to_json())
    monkeypatch.setenv(ACCELERATORS_ENV, "1")
    monkeypatch.setenv("SHOAL_TERMINATION_LOG", str(tmp_path / "message"))
    monkeypatch.setattr(main, "Drain", lambda: None)
    assert main.main() == 1
    message = json.loads((tmp_path / "message").read_text())
    assert message["reason"] == "NoAccelerator"


def test_next_batch_is_copied_while_the_step_runs(monkeypatch):
    inputs = Inputs(BATCHES[0], (), as_given=False, on_host=False)
    stepped, place, in_time = threading.Event(), inputs._place, []

    def waits(batch):
        if batch is BATCHES[1]:
            in_time.append(stepped.wait(10))
        return place(batch)

    monkeypatch.setattr(inputs, "_place", waits)
    inputs.place(BATCHES[0], BATCHES[1])
    stepped.set()
    inputs.place(BATCHES[1], None)
    assert in_time == [True]


@pytest.mark.nightly
@as_on_gpu
def test_only_the_next_batch_is_copied_ahead_and_only_for_its_step():
    flat_model, alone = (FlatModel(functional(), BATCHES[0], "fp32") for _ in range(2))
    copied, place = [], flat_model._inputs._place
    flat_model._inputs._place = lambda batch: (copied.append(batch), place(batch))[1]
    # The second batch is not what came next, as after a rollback; the last one is the end of a lease.
    steps = [(BATCHES[0], BATCHES[1]), (BATCHES[2], BATCHES[1]), (BATCHES[1], None)]
    losses = [flat_model.step(parameters(flat_model), batch, 0, ahead).loss for batch, ahead in steps]
    assert [id(batch) for batch in copied] == [id(BATCHES[index]) for index in (0, 1, 2, 1)]
    assert flat_model._inputs._ahead is None
    assert losses == [alone.step(parameters(alone), batch).loss for batch, _ in steps]
