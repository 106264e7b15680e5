"""When the hooks of callbacks are called on a worker, and with which arguments."""

import keras
import pytest

from shoal_trainer.worker.hooks import Hooks
from tests.unit.trainer.worker.models import functional

callbacks = keras.callbacks
LOGS = [{"loss": loss} for loss in (3.0, 2.0, 1.5, 1.0)]


@pytest.fixture(scope="module")
def model():
    return functional()


@pytest.fixture
def running(model):
    """Makes hooks, and closes them after the test."""
    made = []

    def run(*makers, **options):
        made.append(Hooks(lambda: [make() for make in makers], model, **options))
        return made[-1]

    yield run
    for hooks in made:
        hooks.close()


class Recorder(callbacks.Callback):
    """Records the epochs that it sees; asks to stop after the epoch `last`."""

    def __init__(self, seen, last=None):
        super().__init__()
        self.seen, self.last = seen, last

    def on_train_begin(self, logs=None):
        self.seen.append("begin")

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((epoch, logs["loss"]))
        if epoch == self.last:
            self.model.stop_training = True


def test_repeated_task_asks_to_stop_again(running):
    seen = []
    hooks = running(lambda: Recorder(seen, last=1))
    assert [hooks.run(LOGS[: n + 1]) for n in range(2)] == [False, True]
    seen.clear()
    assert hooks.run(LOGS[:2])
    assert seen == ["begin", (0, 3.0), (1, 2.0)]


def test_rolled_back_epochs_are_replayed_to_new_callbacks(running):
    seen = []
    hooks = running(lambda: Recorder(seen))
    for n in range(4):
        hooks.run(LOGS[: n + 1])
    repeated = [*LOGS[:2], {"loss": 1.7}]
    for history, expected in [
        (repeated, ["begin", (0, 3.0), (1, 2.0), (2, 1.7)]),
        ([*repeated, {"loss": 1.2}], [(3, 1.2)]),
    ]:
        seen.clear()
        hooks.run(history)
        assert seen == expected


def test_longer_history_with_other_logs_is_replayed(running):
    seen = []
    hooks = running(lambda: Recorder(seen))
    hooks.run(LOGS[:2])
    seen.clear()
    hooks.run([{"loss": 5.0}, *LOGS[1:3]])  # another worker repeated the first epochs
    assert seen == ["begin", (0, 5.0), (1, 2.0), (2, 1.5)]


@pytest.mark.parametrize("known", [0, 2])
def test_no_epoch_follows_a_stop(running, known):
    seen = []
    hooks = running(lambda: Recorder(seen, last=1))
    for n in range(known):
        hooks.run(LOGS[: n + 1])
    assert hooks.run(LOGS[:3])
    assert seen == ["begin", (0, 3.0), (1, 2.0)]


def test_replayed_epochs_replace_the_files(running):
    hooks = running(lambda: callbacks.CSVLogger("tables/log.csv", append=True))
    for n in range(3):
        hooks.run(LOGS[: n + 1])
    hooks.run(LOGS[:2])
    ((name, path),) = hooks.files()
    assert name == "tables/log.csv"
    assert path.read_text().split() == ["epoch,loss,val_loss", "0,3.0,NA", "1,2.0,NA"]


def test_callback_objects_that_are_reused_keep_their_paths(model):
    shared = [callbacks.CSVLogger("tables/log.csv")]
    hooks = Hooks(lambda: shared, model)
    for _ in range(2):
        hooks.run(LOGS[:1])
    assert [name for name, _ in hooks.files()] == ["tables/log.csv"]
    hooks.close()
