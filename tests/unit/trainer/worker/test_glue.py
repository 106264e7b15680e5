"""The flat function against plain Keras: the same numbers, bit for bit where the order of operations allows it."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed
from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import UserError
from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec, PushMeta
from shoal_trainer.worker.compose import steps_per_push
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.glue import Glue
from shoal_trainer.worker.layout import averages_of, flatten
from shoal_trainer.worker.optimizers import place, why_worker
from shoal_trainer.worker.send import combined
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.worker.models import DATA, OwnStep, X, Y, body, compiled, functional, job, subclassed

BATCHES = list(DATA.batches(0, 0, 160, 16))
SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
schedules = keras.optimizers.schedules


class Server:
    """One shard and one worker without staleness, no network between."""

    def __init__(self, model, wire="fp32", *, on_host=True, example=BATCHES[0]):
        self.glue = Glue(model, example, wire, on_host=on_host)
        self.placement = place(model, self.glue.layout, 16)
        layout = self.glue.layout
        self.store = ShardStore(0, 1, 0)
        self.store.hello(0, 0, ModelSpec(
            fingerprint=layout.fingerprint, parameters=layout.trainable,
            statistics=layout.size - layout.trainable, optimizer=self.placement.config,
        ))  # fmt: skip
        self.store.initialize(self.glue.initial())
        self.io = aligned(layout.size, np.uint16 if wire == "bf16" else np.float32)
        self.buffer = aligned(layout.size, self.glue.dtype)
        self.tensor = self.glue.alias(self.buffer)
        self.version = self.store.pull(0, self.io).version
        self.seq = self.samples = 0

    def take(self):
        """The parameters, as a worker has them."""
        if self.buffer.dtype == self.io.dtype:
            self.buffer[:] = self.io
        else:
            kernels.decode(self.io, self.buffer)

    def step(self, batch):
        self.take()
        made = self.glue.step(self.tensor, batch, self.samples // 16)
        self.seq += 1
        self.io[:] = made.update
        rate = float("nan") if self.placement.rate is None else self.placement.rate(self.samples)
        meta = PushMeta(batch.samples, learning_rate=rate)
        self.version = self.store.push(0, 0, self.seq, self.version, meta, self.io).version
        self.samples += batch.samples
        return made.loss

    def flat(self):
        out = aligned(self.glue.layout.size)
        self.store.pull(0, out)
        return out


def compare(make, **how):
    """(largest difference of parameters after 10 steps from plain Keras, losses of both)."""
    server = Server(make(), **how)
    losses = [server.step(batch) for batch in BATCHES]
    plain = make()
    expected = []
    for batch in BATCHES:
        plain.reset_metrics()
        expected.append(float(plain.train_on_batch(batch.x, batch.y, return_dict=True)["loss"]))
    return np.abs(flatten(plain, server.glue.layout) - server.flat()).max(), losses, expected


class Falling(schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


EXACT = {
    "sgd": lambda: functional(SGD(0.1)),
    "momentum": lambda: functional(SGD(0.1, momentum=0.9)),
    "nesterov": lambda: functional(SGD(0.1, momentum=0.9, nesterov=True)),
    "dropout": lambda: functional(SGD(0.1), dropout=0.3),
    "regularizer": lambda: functional(SGD(0.1), regularizer="l2"),
    "clipnorm": lambda: functional(SGD(0.1, clipnorm=0.1)),
    "clipvalue": lambda: functional(SGD(0.1, clipvalue=0.01)),
    "weight_decay": lambda: functional(SGD(0.1, momentum=0.9, weight_decay=0.01)),
    "PiecewiseConstantDecay": lambda: functional(
        SGD(schedules.PiecewiseConstantDecay([3, 6], [0.1, 0.05, 0.01]))
    ),
    "loss_scale_factor": lambda: functional(SGD(0.1, loss_scale_factor=1024.0)),
}
CLOSE = {
    "own schedule": lambda: functional(SGD(Falling())),
    "adagrad": lambda: functional(keras.optimizers.Adagrad(0.05)),
    "global_clipnorm": lambda: functional(SGD(0.1, global_clipnorm=0.1)),
    "adam": lambda: functional(ADAM(0.01)),
    "adamw": lambda: functional(keras.optimizers.AdamW(0.01, weight_decay=0.01)),
    "cosine": lambda: functional(SGD(schedules.CosineDecay(0.1, 8, warmup_target=0.2, warmup_steps=3))),
    "exponential": lambda: functional(SGD(schedules.ExponentialDecay(0.1, 3, 0.5))),
    "batch_normalization": lambda: functional(SGD(0.1, momentum=0.9), norm=True),
    "subclassed": lambda: subclassed(optimizer=SGD(0.1)),
    "xla": lambda: functional(SGD(0.1), options={"jit_compile": True}),
    "rmsprop (worker)": lambda: functional(keras.optimizers.RMSprop(0.001)),
    "amsgrad (worker)": lambda: functional(ADAM(0.01, amsgrad=True)),
    "use_ema (worker)": lambda: functional(SGD(0.1, use_ema=True)),
    "constraint (worker)": lambda: functional(SGD(0.1), constraint=keras.constraints.MaxNorm(0.5)),
    "train_step (worker)": lambda: subclassed(OwnStep, SGD(0.1)),
}


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_bit_for_bit(name, on_host):
    difference, losses, expected = compare(EXACT[name], on_host=on_host)
    assert losses == expected
    assert difference == 0


@pytest.mark.parametrize("name", CLOSE)
def test_within_rounding(name):
    difference, losses, expected = compare(CLOSE[name])
    assert losses == pytest.approx(expected, rel=1e-4)
    assert difference < 2e-5


@pytest.mark.parametrize("name", ["momentum", "adam", "batch_normalization"])
def test_bf16_on_the_wire_stays_near(name):
    difference, losses, expected = compare((EXACT | CLOSE)[name], wire="bf16")
    assert losses == pytest.approx(expected, rel=0.05)
    assert difference < 0.2


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "name", ["momentum", "adam", "batch_normalization", "clipnorm", "rmsprop (worker)", "train_step (worker)"]
)
def test_a_worker_without_accelerator_makes_the_updates_of_one_with(name, wire):
    def steps(on_host):
        server = Server((EXACT | CLOSE)[name](), wire, on_host=on_host)
        return [server.step(batch) for batch in BATCHES], server.flat()

    (losses, flat), (others, other) = steps(on_host=True), steps(on_host=False)
    assert losses == others
    assert np.array_equal(flat, other)


def test_where_each_optimizer_runs():
    reasons = {name: why_worker(make()) for name, make in (EXACT | CLOSE).items()}
    assert {name for name, reason in reasons.items() if reason} == {
        name for name in CLOSE if "worker" in name
    }
    assert reasons["rmsprop (worker)"] == "the parameter server has no RMSprop"
    assert why_worker(functional(SGD(0.1, use_ema=True))) == "SGD(use_ema=True)"


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # Keras' saving meets NumPy 2
@pytest.mark.parametrize("overwrite", [None, 4])
def test_the_exported_model_is_the_average_where_keras_makes_one(overwrite):
    def make():
        return functional(SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=overwrite))

    server, plain = Server(make()), make()
    tasks = Tasks(job(), server.glue, 16)

    def exported():
        path = tasks.export(server.flat()).files["model.keras"]
        return flatten(keras.models.load_model(path), server.glue.layout)

    assert np.array_equal(exported(), server.flat())  # no step, no average
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    plain.optimizer.finalize_variable_values(plain.trainable_variables)
    average = exported()
    assert np.abs(average - flatten(plain, server.glue.layout)).max() < 2e-5
    assert np.abs(average - server.flat()).max() > 1e-3
    server.step(BATCHES[0])  # training goes on from the parameters, not from the average
    tasks.close()


def test_variables_excluded_from_weight_decay_are_ranges_of_the_flat_vector():
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = functional(optimizer)
    glue = Glue(model, BATCHES[0], "fp32")
    biases = [(e.offset, e.offset + e.size) for e in glue.layout.entries if e.path.endswith("bias")]
    assert list(place(model, glue.layout, 16).config.no_decay) == biases


def test_mixed_float16_scales_the_loss_and_skips_an_overflow():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        server = Server(functional(SGD(0.1)))
    finally:
        keras.config.set_dtype_policy("float32")
    losses = [server.step(batch) for batch in BATCHES * 3]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert {entry.dtype for entry in server.glue.layout.entries} == {"float32"}


def test_another_worker_drops_other_units():
    updates = []
    for worker in [(0, 0), (1, 0), (1, 1), (0, 0)]:
        glue = Glue(functional(dropout=0.5), BATCHES[0], "fp32", worker)
        buffer = aligned(glue.layout.size)
        buffer[:] = glue.initial()
        updates.append(glue.step(glue.alias(buffer), BATCHES[0]).update.copy())
    assert np.array_equal(updates[0], updates[3])
    assert not np.array_equal(updates[0], updates[1])
    assert not np.array_equal(updates[1], updates[2])


def test_a_short_batch_is_not_traced_again_and_gives_the_mean_of_its_own_samples():
    glue = Glue(functional(), BATCHES[0], "fp32")
    buffer = aligned(glue.layout.size)
    buffer[:] = glue.initial()
    tensor = glue.alias(buffer)
    (short,) = DATA.batches(0, 0, 5, 16)
    made = glue.step(tensor, short)
    plain = functional()
    assert made.loss == pytest.approx(
        float(plain.train_on_batch(short.x[:5], short.y[:5], return_dict=True)["loss"]), rel=1e-5
    )
    assert glue._function.experimental_get_tracing_count() == 1


def by_name():
    """A model of two named inputs, told apart by their size and what is done with them."""
    keras.utils.set_random_seed(1)
    b, a = keras.Input((3,), name="b"), keras.Input((2,), name="a")
    parts = [keras.layers.Dense(4)(a), keras.layers.Dense(4)(b)]
    return compiled(keras.Model({"b": b, "a": a}, keras.layers.add(parts)))


def test_named_inputs_may_come_in_any_order():
    rng, rows = np.random.default_rng(0), np.arange(8)
    x = {"b": rng.normal(size=(8, 3)).astype("float32"), "a": rng.normal(size=(8, 2)).astype("float32")}
    batch, turned = (
        Batch(given, rows % 4, np.ones(8, np.float32), 8, 8) for given in (x, dict(sorted(x.items())))
    )
    glue = Glue(by_name(), batch, "fp32")
    buffer = aligned(glue.layout.size)
    buffer[:] = glue.initial()
    made, again = (glue.step(glue.alias(buffer), one) for one in (batch, turned))
    assert np.array_equal(made.update, again.update)
    plain = by_name().train_on_batch(x, rows % 4, return_dict=True)
    assert made.loss == pytest.approx(float(plain["loss"]), rel=1e-5)


def test_samples_of_another_shape_are_traced_once_more():
    def any_length():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((None, 3)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(4)]
        return compiled(keras.Sequential(layers))

    def batch(length):
        x = np.random.default_rng(length).normal(size=(8, length, 3)).astype("float32")
        return Batch(x, np.arange(8) % 4, np.ones(8, np.float32), 8, 8)

    glue = Glue(any_length(), batch(5), "fp32")
    buffer = aligned(glue.layout.size)
    buffer[:] = glue.initial()
    for length in (5, 7, 5, 7):
        given = batch(length)
        expected = any_length().train_on_batch(given.x, given.y, return_dict=True)["loss"]
        assert glue.step(glue.alias(buffer), given).loss == pytest.approx(float(expected), rel=1e-5)
    assert glue._function.experimental_get_tracing_count() == 2


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_is_told_though_the_loss_is(wire, on_host):
    def steep(_labels, predicted):
        return keras.ops.mean(keras.ops.sqrt(predicted * 0), axis=-1)

    def step(loss):
        model = functional()
        model.compile("sgd", loss=loss)
        glue = Glue(model, BATCHES[0], wire, on_host=on_host)
        buffer = aligned(glue.layout.size, glue.dtype)
        return glue.step(glue.alias(buffer), BATCHES[0])

    made = step(steep)
    assert made.loss == 0
    assert not made.finite
    assert step("sparse_categorical_crossentropy").finite


class Unpacks(keras.Model):
    """As Keras' guide writes it."""

    def __init__(self):
        super().__init__()
        self.parts = body()

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Rebuilds(keras.Model):
    """Its data are x alone."""

    def __init__(self):
        super().__init__()
        self.middle, self.out = keras.layers.Dense(3), keras.layers.Dense(36)

    def call(self, x):
        return self.out(self.middle(keras.ops.reshape(x, (-1, 36))))

    def train_step(self, images):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(images) - keras.ops.reshape(images, (-1, 36))))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("kind", "given", "plain"),
    [
        (Unpacks, (X, Y), lambda x, y: (x, y)),
        (Rebuilds, (X,), lambda x, _: x),
    ],
)
def test_a_train_step_of_ones_own_gets_what_the_data_give_and_no_row_twice(kind, given, plain):
    data = Indexed.from_arrays(*given)
    (whole,), (short,) = data.batches(0, 0, 16, 16), data.batches(0, 16, 21, 16)

    def make():
        made = kind()
        made.compile(SGD(0.1), loss="sparse_categorical_crossentropy" if kind is Unpacks else None)
        return made

    glue = Glue(make(), whole, "fp32")
    buffer = aligned(glue.layout.size)
    buffer[:] = glue.initial()
    model = make()
    glue.load(buffer)
    model(whole.x)
    for own, other in zip(model.variables, glue.model.variables, strict=True):
        own.assign(other)
    for batch in (whole, short):
        made = glue.step(glue.alias(buffer), batch)
        n = batch.samples
        logs = model.train_step(plain(batch.x[:n], None if batch.y is None else batch.y[:n]))
        assert made.loss == pytest.approx(float(logs["loss"]), rel=1e-5)
        buffer += made.update
        assert np.abs(buffer - flatten(model, glue.layout)).max() < 1e-6


def noisy():
    """A layer that draws from Keras' global generator."""

    class Noisy(keras.layers.Layer):
        def call(self, x):
            return keras.random.dropout(x, 0.5) + keras.random.normal((4,))

    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    parts = [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(4), Noisy()]
    return compiled(keras.Sequential(parts), SGD(0.1))


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}])
def test_what_is_drawn_without_a_generator_of_ones_own_differs_from_step_to_step(options):
    def losses(worker):
        model = noisy()
        model.compile(SGD(0.1), model.loss, **options)
        glue = Glue(model, BATCHES[0], "fp32", worker)
        buffer = aligned(glue.layout.size)
        buffer[:] = glue.initial()
        return [glue.step(glue.alias(buffer), BATCHES[0]).loss for _ in range(4)]

    first = losses((0, 0))
    assert len(set(first)) == 4
    assert first == losses((0, 0))
    assert not set(first) & set(losses((1, 0)))
    plain = noisy()
    plain.compile(SGD(0.0), plain.loss, **options)
    for loss in first:
        plain.reset_metrics()
        expected = plain.train_on_batch(BATCHES[0].x, BATCHES[0].y, return_dict=True)["loss"]
        assert loss == pytest.approx(float(expected), rel=1e-5)


def test_a_schedule_on_the_worker_follows_the_updates_of_the_whole_job():
    glue = Glue(
        functional(keras.optimizers.RMSprop(schedules.PiecewiseConstantDecay([3], [0.1, 0.0]))),
        BATCHES[0], "fp32", (0, 1),
    )  # fmt: skip
    buffer = aligned(glue.layout.size)
    buffer[:] = glue.initial()
    moved = [
        bool(glue.step(glue.alias(buffer), BATCHES[0], updates).update.any()) for updates in (0, 3, 4, 100, 2)
    ]
    assert moved == [True, True, False, False, True]


def pushed(server, batches):
    """Several steps as one push."""
    server.take()
    push(server, [(server.glue.step(server.tensor, batch), Ready(None, batch)) for batch in batches])


def push(server, pile):
    server.io[:], samples, _ = combined(pile, averages_of(server.glue.model, server.glue.layout))
    server.seq += 1
    server.samples += samples
    meta = PushMeta(samples)
    server.version = server.store.push(0, 0, server.seq, server.version, meta, server.io).version


def test_statistics_move_as_far_as_the_steps_of_a_push_would_have_moved_them():
    """Batches that are all alike: in the order in which they come nothing is to be seen."""

    def make():
        return functional(SGD(0.0), norm=True, momentum=0.99)

    server, plain = Server(make()), make()
    for _ in range(4):
        pushed(server, BATCHES[:1] * 8)
        for _ in range(8):
            plain.train_on_batch(BATCHES[0].x, BATCHES[0].y)
    low = server.glue.layout.trainable
    assert np.abs(server.flat()[low:] - flatten(plain, server.glue.layout)[low:]).max() < 1e-5


@pytest.mark.parametrize("momentum", [0.999, 0.99, 0.9])
def test_a_moving_variance_never_falls_below_zero_however_many_steps_a_push_has(momentum):
    """Each push is made while the one before is under way, and the data vary much less than the layer thinks."""
    server = Server(functional(SGD(0.0), norm=True, momentum=momentum))
    low, still = server.glue.layout.trainable, replace(BATCHES[0], x=BATCHES[0].x * 1e-3)
    before = server.flat()
    for _ in range(60):
        now = server.flat()
        server.buffer[:] = before
        push(server, [(server.glue.step(server.tensor, still), Ready(None, still))] * 200)
        before = now
        assert (server.flat()[low:] >= -1e-4).all()  # means and variances of data that are next to nothing
    assert server.flat()[low:].max() < 0.01


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_accumulated_gradients_are_one_push_of_weight_one(optimizer):
    def make():
        rate = schedules.ExponentialDecay(0.1, 5, 0.5)  # of batches
        return functional(optimizer(rate, gradient_accumulation_steps=5))

    server, plain = Server(make()), make()
    assert server.placement.on_server
    assert steps_per_push(server.glue.model) == 5
    for begin in (0, 5):
        pushed(server, BATCHES[begin : begin + 5])
    for batch in BATCHES:
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(server.flat() - flatten(plain, server.glue.layout)).max() < 2e-5


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: SGD(0.1, gradient_accumulation_steps=2, clipnorm=1.0),
        lambda: keras.optimizers.RMSprop(0.1, gradient_accumulation_steps=2),
    ],
)
def test_gradients_that_a_worker_would_hoard_are_refused(optimizer):
    glue = Glue(functional(optimizer()), BATCHES[0], "fp32")
    with pytest.raises(UserError, match="gradient_accumulation_steps=2 is not possible here"):
        place(glue.model, glue.layout, 16)


def test_what_was_not_aligned_is_refused_instead_of_aborting():
    glue = Glue(functional(), BATCHES[0], "fp32")
    with pytest.raises(ValueError, match="aligned"):
        glue.alias(aligned(glue.layout.size + 1)[1:])


def test_models_that_cannot_be_used_say_what_to_change():
    def not_compiled():
        return keras.Sequential([keras.layers.Dense(1)])

    def not_a_tensor():
        model = functional()
        model.compile("sgd", loss=lambda y, p: p if float(y[0]) > 0 else -p)
        return model

    class Broken(keras.Model):
        def call(self, x):
            return keras.ops.reshape(x, (-1, 7))

    for make, words in [
        (not_compiled, "not compiled"),
        (lambda: 7, "must return a keras.Model"),
        (lambda: compiled(Broken()), "cannot be built from the first batch"),
        (not_a_tensor, "cannot be built from the first batch: TypeError: float"),
    ]:
        with pytest.raises(UserError, match=words):
            Glue(make(), BATCHES[0], "fp32")
