"""Runs steps on one and on several virtual devices, in a process of its own; prints what differs as JSON.

TensorFlow makes virtual devices only before it computes anything.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)

from shoal_trainer import Indexed  # noqa: E402
from shoal_trainer.data.source import Part  # noqa: E402
from shoal_trainer.ps.coding import decode  # noqa: E402
from shoal_trainer.worker import flat_model as flat_models  # noqa: E402
from shoal_trainer.worker.flat_model import FlatModel  # noqa: E402
from tests.unit.trainer.worker.models import (  # noqa: E402
    DATA,
    OwnStep,
    Plain,
    X,
    Y,
    begin,
    body,
    compiled,
    functional,
    job,
    subclassed,
)
from tests.unit.trainer.worker.trained import parameters  # noqa: E402

L = keras.layers
ONE, SEVERAL = ["/CPU:0"], ["/CPU:1", "/CPU:2", "/CPU:3"]
WITH_THE_FIRST = ["/CPU:0", "/CPU:2", "/CPU:3"]
"""As on GPUs, the first has the model's variables, and those of its optimizer."""
WEIGHTS = np.linspace(0.1, 2, len(X)).astype(np.float32)
WEIGHED = Indexed.from_arrays(X, Y, WEIGHTS)


def batch(rows=16, source=DATA, size=16):
    return next(iter(source.read(Part(0, rows), size)))


def stepped(build, example, devices, *, wire="fp32", steps=1):
    """The model after so many steps at its first parameters, and what each gave."""
    flat_model = FlatModel(build(), example, wire, on_host=False, devices=devices)
    flat_model.trace()
    tensors, found = parameters(flat_model), []
    for _ in range(steps):
        step = flat_model.step(tensors, example)
        update = np.zeros(flat_model.layout.size, np.float32)
        decode(np.asarray(step.update), update, flat_model.layout.trainable)
        found.append((update, step))
    return flat_model, found


def difference(build, example):
    """The largest difference of the updates, of the losses, and of the metrics' sums."""
    _, ((one, alone),) = stepped(build, example, ONE)
    model, ((all_, together),) = stepped(build, example, SEVERAL)
    assert model.device_count == 3
    assert alone.finite
    assert together.finite
    assert np.abs(one).max() > 1e-4
    of_metrics = np.subtract([m[1:] for m in alone.metrics], [m[1:] for m in together.metrics])
    return [
        float(np.abs(one - all_).max()),
        abs(alone.loss - together.loss),
        float(np.abs(of_metrics).max(initial=0)),
    ]


def with_loss(loss, **options):
    def build():
        begin()
        model = Plain()
        model.compile("sgd", loss, weighted_metrics=["accuracy"], **options)
        return model

    return build


def sparse(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def clipping():
    return functional(keras.optimizers.SGD(0.1, global_clipnorm=0.01), regularizer="l2")


def frozen():
    begin()
    inputs = x = keras.Input((6, 6, 1))
    base = L.Conv2D(8, 3, trainable=False)
    for layer in [base, L.BatchNormalization(trainable=False), *body()]:
        x = layer(x)
    return compiled(keras.Model(inputs, x))


def overflowing():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return functional(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**30)
        )
    finally:
        keras.config.set_dtype_policy("float32")


class Spare(Plain):
    """It has a layer that it does not use."""

    def __init__(self):
        super().__init__()
        self.spare = L.Dense(4)
        self.spare.build((None, 4))


class Hidden(Plain):
    """It reads a variable that Keras does not know."""

    def __init__(self):
        super().__init__()
        self._own = [tf.Variable(2.0)]

    def call(self, x):
        return super().call(x) * self._own[0]


def norm_differs():
    """Against the mean of the same samples in three batches: (gradients and moving statistics), within rounding."""
    example = batch(12, size=12)
    _, ((all_, _),) = stepped(lambda: functional(norm=True), example, SEVERAL)
    thirds = list(DATA.read(Part(0, 12), 4))
    each = [stepped(lambda: functional(norm=True), third, ONE)[1][0][0] for third in thirds]
    return [float(np.abs(np.mean(each, 0) - all_).max()), float(np.abs(each[0] - all_).max())]


def mirrored():
    """What Keras trains in a step under `MirroredStrategy`, against the same update applied: the largest difference."""
    example, rate = batch(12, size=12), 0.1
    begin()
    with tf.distribute.MirroredStrategy(SEVERAL).scope():
        inputs = x = keras.Input((6, 6, 1))
        for layer in body(norm=True):
            x = layer(x)
        model = compiled(keras.Model(inputs, x), keras.optimizers.SGD(rate))
    model.fit(example.x, example.y, batch_size=12, epochs=1, verbose=0, shuffle=False)
    expected = np.concatenate([np.ravel(v.numpy()) for v in model.trainable_variables])
    ours, ((update, _),) = stepped(lambda: functional(norm=True), example, SEVERAL)
    found = (ours.initial() - rate * update)[: ours.layout.trainable]
    return float(np.abs(found - expected).max())


def drawn():
    """Whether devices, and steps, draw different numbers: of a layer with a seed, and of one without."""

    class Noise(L.Layer):
        def call(self, x):
            return x + keras.random.normal((keras.ops.shape(x)[0], 4))

    def build():
        begin()
        inputs = keras.Input((4,))
        x = Noise()(L.Dropout(0.5)(inputs))
        model = keras.Model(inputs, L.Dense(4, kernel_initializer="identity")(x))
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError(reduction="sum"))
        return model

    data = Indexed.from_arrays(np.ones((12, 4), np.float32), np.zeros((12, 4), np.float32))
    example = next(iter(data.read(Part(0, 12), 12)))
    _, found = stepped(build, example, SEVERAL, steps=2)
    _, again = stepped(build, example, SEVERAL, steps=2)
    _, one = stepped(build, example, ["/CPU:1"])
    losses = [step.loss for _, step in found]
    return {
        "steps differ": losses[0] != losses[1],
        "repeatable": losses == [step.loss for _, step in again],
        "devices differ": abs(one[0][1].loss - losses[0]) > 1e-3,
    }


def overflow():
    _, found = stepped(overflowing, batch(), SEVERAL, steps=24)
    return [[step.skipped for _, step in found].count(True), found[0][1].skipped, found[-1][1].skipped]


def applied(make, of=functional, **options):
    """The largest difference of three updates, losses, and sums of metrics, of an optimizer that the worker runs."""

    def build():
        return of(make(), options=options)

    (one, alone), (all_, together) = (
        stepped(build, batch(11), devices, steps=3) for devices in (ONE, WITH_THE_FIRST)
    )
    assert (one.device_count, all_.device_count, all_.on_server) == (1, 3, False)
    assert np.abs(together[0][0] - together[2][0]).max() > 1e-6, "the optimizer's state changes what it does"
    state = [v.numpy() for v in all_.model.optimizer.variables]
    all_.compile()  # it runs a step, and undoes what that assigns
    assert all(
        np.array_equal(v.numpy(), was) for v, was in zip(all_.model.optimizer.variables, state, strict=True)
    )
    metrics = [[m[1:] for _, step in found for m in step.metrics] for found in (alone, together)]
    losses = [[step.loss for _, step in found] for found in (alone, together)]
    updates = [[update for update, _ in found] for found in (alone, together)]
    return [float(np.abs(np.subtract(*each)).max()) for each in (updates, losses, metrics)]


def ramp(accumulated=1):
    """The loss on several devices after four updates, by that after one, of a loss that grows with them."""

    class Ramp(Plain):
        def compute_loss(self, *arguments, **named):
            loss = super().compute_loss(*arguments, **named)
            return loss * keras.ops.cast(self.optimizer.iterations, loss.dtype)

    begin()
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=accumulated if accumulated > 1 else None)
    flat_model = FlatModel(compiled(Ramp(), optimizer), batch(), "fp32", on_host=False, devices=SEVERAL)
    flat_model.trace()
    tensors, batches = parameters(flat_model), (accumulated, 4 * accumulated)
    first, second = (flat_model.step(tensors, batch(), count).loss for count in batches)
    return [flat_model.device_count, second / first]


def decaying(**options):
    return keras.optimizers.Adadelta(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), **options)


def spare(optimizer, options):
    begin()
    return compiled(Spare(), optimizer, **options)


def not_finite():
    """What a gradient that is not finite leaves in the optimizer's state: (the step is finite, the state is)."""
    example = batch(11)
    example.x[3] = np.inf
    model, ((_, step),) = stepped(lambda: functional("adamax"), example, WITH_THE_FIRST)
    state = np.concatenate([np.ravel(v.numpy()) for v in model.model.optimizer.variables])
    return [bool(step.finite), bool(np.isfinite(state).all())]


def recomputed():
    class Recomputed(L.Dense):
        def call(self, x):
            return keras.remat(super().call)(x)

    begin()
    return compiled(keras.Sequential([keras.Input((6, 6, 1)), L.Flatten(), Recomputed(4)]))


def fallback():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("shoal_trainer").addHandler(handler)
    on_one, ((_, step),) = stepped(hidden, batch(), SEVERAL)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adamax())
    on_worker, ((_, other),) = stepped(lambda: functional(scaled), batch(), SEVERAL)
    own_step, _ = stepped(lambda: subclassed(OwnStep), batch(), SEVERAL)
    marking, _ = stepped(marked, batch(), SEVERAL)
    again, _ = stepped(recomputed, batch(), SEVERAL)
    counts = [each.device_count for each in (on_one, on_worker, own_step, marking, again)]
    return [*counts, step.finite, other.finite, records]


def copies():
    """What a step sends between the host and one other device: how often into it, and out of it."""
    first, second = DATA.read(Part(0, 32), 16)
    model = FlatModel(functional(norm=True), first, "bf16", on_host=False, devices=["/CPU:1"])
    model.trace()
    tensors = parameters(model)
    assert all(tensor.device.endswith("CPU:1") for tensor in tensors)
    upload = model._inputs._uploads.submit(model._inputs._place, first)
    assert all(tensor.device.endswith("CPU:1") for tensor in upload.result()[0])
    model._inputs._ahead = (
        first,
        upload,
    )  # as if a step had run before: metadata are those of a function's first call
    context.context().enable_run_metadata()
    model.step(tensors, first, 0, second)
    functions = context.context().export_run_metadata().function_graphs
    context.context().disable_run_metadata()
    nodes = [node for function in functions for graph in function.partition_graphs for node in graph.node]
    assert all(node.device.endswith("CPU:1") for node in nodes if "CrossEntropy" in node.op)
    sent = [node.attr for node in nodes if node.op == "_Send"]
    ways = [[each[key].s.decode()[-1] for key in ("send_device", "recv_device")] for each in sent]
    return [ways.count(["0", "1"]), ways.count(["1", "0"])]


def frozen_copies():
    """How many copies of a frozen weight are there after one shape of a batch, and after four."""

    def batch_of(length):
        x = np.ones((4, length, 64), np.float32)
        return Indexed.from_arrays(x, np.zeros(4, np.int64)).example(4)

    inputs = keras.Input((None, 64))
    base = L.Dense(1000, trainable=False)
    model = compiled(keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(base(inputs)))))
    model.jit_compile = False
    flat_model = FlatModel(model, batch_of(8), "fp32", on_host=False, devices=SEVERAL)
    flat_model.trace()
    tensors, found = parameters(flat_model), []
    for length in (8, 16, 32, 64):
        flat_model.step(tensors, batch_of(length))
        captured = [each for traced in flat_model._traced.values() for each in traced.captured_inputs]
        found.append(len({id(each) for each in captured if tuple(each.shape) == (64, 1000)}))
    assert len(flat_model._traced) == 4
    return [found[0], found[-1]]


def hidden():
    begin()
    return compiled(Hidden())


def marked():
    """It assigns a variable that Keras does not know, and does not read it."""
    mark = keras.Variable(0.0)

    class Marks(Plain):
        def call(self, x):
            mark.assign(1.0)
            return super().call(x)

    begin()
    return compiled(Marks())


def jitted():
    return functional(options={"jit_compile": True})


def whole_worker():
    """A whole worker, with its loop and real servers: how it ended, the samples, the devices, the steps of a push."""
    from tests.unit.trainer.worker.fakes import FakeCoordinator, Servers
    from tests.unit.trainer.worker.running import Running

    flat_models.device_name, flat_models.accelerators = (lambda: "a GPU"), (lambda: tuple(SEVERAL))
    coordinator = FakeCoordinator(DATA.size, tasks=("evaluate",))
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder) / "secret", coordinator)
        training = job(lambda: functional("adam", norm=True), batches_per_push=2)
        running = Running(training, servers, coordinator)
        end = running.start().join()
        servers.close()
    return [end.name, coordinator.samples, running.flat_model.device_count, coordinator.steps[0]]


CASES = {
    "frozen copies": frozen_copies,
    "copies": copies,
    "whole batch": lambda: difference(functional, batch()),
    "part of a batch": lambda: difference(functional, batch(5)),
    "some devices have no samples": lambda: difference(functional, batch(1)),
    "weights": lambda: difference(with_loss(sparse()), batch(16, WEIGHED)),
    "weights of a part": lambda: difference(with_loss(sparse()), batch(7, WEIGHED)),
    "sum": lambda: difference(with_loss(sparse(reduction="sum")), batch(13, WEIGHED)),
    "none": lambda: difference(with_loss(sparse(reduction=None)), batch(16, WEIGHED)),
    "clipping": lambda: difference(clipping, batch(11)),
    "frozen": lambda: difference(frozen, batch(11)),
    "xla": lambda: difference(jitted, batch(11)),
    "norm": norm_differs,
    "mirrored": mirrored,
    "drawn": drawn,
    "overflow": overflow,
    "adadelta": lambda: applied(decaying),
    "adadelta, xla": lambda: applied(decaying, jit_compile=True),
    "moving average": lambda: applied(
        lambda: keras.optimizers.Adam(
            0.01, use_ema=True, ema_overwrite_frequency=2, clipnorm=0.1, weight_decay=0.01
        )
    ),
    "without gradient": lambda: applied(lambda: decaying(weight_decay=0.1), of=spare),
    "ramp": ramp,
    "accumulated ramp": lambda: ramp(2),
    "not finite": not_finite,
    "fallback": fallback,
    "whole worker": whole_worker,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        print(json.dumps([name, CASES[name]()]), flush=True)
