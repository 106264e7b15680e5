"""When the hooks of callbacks are called on a worker, and with which arguments."""

import errno
import os
import sys
import urllib.error
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from shoal_trainer import UserError
from shoal_trainer.errors import CallbackOutage, DiskFull
from shoal_trainer.worker.callbacks import callbacks_of
from shoal_trainer.worker.hooks import Hooks
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.work import TaskWork
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, functional, job
from tests.unit.trainer.worker.running import Running

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


def test_catching_up_takes_a_time_in_proportion_to_the_epochs(running):
    """Training is at most an epoch ahead of callbacks, so all workers wait while those of a new worker catch up."""

    def calls(epochs):
        hooks, counted = running(callbacks.Callback), []
        sys.setprofile(lambda _, event, __: counted.append(event))  # also each turn of a generator
        try:
            hooks.run([dict(LOGS[0]) for _ in range(epochs)])
        finally:
            sys.setprofile(None)
        return len(counted)

    assert calls(400) < 2.5 * calls(200)


def test_callback_that_fails_has_seen_the_epochs_before(running):
    seen, fails = [], [True]

    def fail(epoch, _):
        if epoch == 2 and fails.pop():
            raise OSError("away")

    hooks = running(lambda: Recorder(seen), lambda: callbacks.LambdaCallback(on_epoch_end=fail))
    with pytest.raises(UserError, match="away"):
        hooks.run(LOGS[:3])
    fails.append(False)
    hooks.run(LOGS[:3])
    assert seen == ["begin", (0, 3.0), (1, 2.0), (2, 1.5), (2, 1.5)]


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


@pytest.mark.parametrize("contained", [False, True])
def test_name_that_is_not_utf_8_is_stored_under_one_that_is(running, contained):
    """Of an archive, for example. No message can have it: the worker that sent the file ended, and the next one."""
    name = os.fsdecode(b"caf\xe9.csv")
    writes = callbacks.LambdaCallback(on_epoch_end=lambda *_: Path(name).write_text("1"))
    hooks = running(lambda: callbacks.CSVLogger(name), *[lambda: writes] * contained, contained=contained)
    hooks.run(LOGS[:1])
    ((stored, path),) = hooks.files()
    assert (stored, path.name) == ("caf\N{REPLACEMENT CHARACTER}.csv", name)
    assert hooks.written == ([stored] if contained else [])


def test_callback_objects_that_are_reused_keep_their_paths(model):
    shared = [callbacks.CSVLogger("tables/log.csv")]
    hooks = Hooks(lambda: shared, model)
    for _ in range(2):
        hooks.run(LOGS[:1])
    assert [name for name, _ in hooks.files()] == ["tables/log.csv"]
    hooks.close()


def test_paths_of_other_callbacks_are_left_alone(running):
    class Reads(callbacks.Callback):
        filename = property(lambda _: "labels.txt")

    assert running(Reads).run(LOGS[:1]) is False


class Calls(callbacks.Callback):
    """Records the logs that each hook gets."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def on_train_begin(self, logs=None):
        self.calls.append(("train begin", logs, self.params))

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append((f"epoch {epoch} begin", logs))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append((f"epoch {epoch} end", logs))

    def on_train_end(self, logs=None):
        self.calls.append(("train end", logs))


def test_hooks_get_the_arguments_of_fit(running):
    calls = []
    hooks = running(lambda: Calls(calls), epochs=2)
    for n in range(2):
        hooks.run(LOGS[: n + 1])
    assert calls == [
        ("train begin", {}, {"epochs": 2, "steps": None, "verbose": 0}),
        ("epoch 0 begin", {}),
        ("epoch 0 end", LOGS[0]),
        ("epoch 1 begin", {}),
        ("epoch 1 end", LOGS[1]),
        ("train end", LOGS[1]),
    ]


def test_epoch_begins_when_the_one_before_has_ended(running):
    """So that a rate that is set there is that of the epoch."""
    calls = []
    running(lambda: Calls(calls), epochs=2).run(LOGS[:1])
    assert [call[0] for call in calls] == ["train begin", "epoch 0 begin", "epoch 0 end", "epoch 1 begin"]


def test_each_hook_is_called_for_all_callbacks_in_turn(running):
    calls = []
    hooks = running(lambda: Calls(calls), lambda: Calls(calls))
    hooks.run(LOGS[:1])
    assert [call[0] for call in calls] == [
        name for name in ("train begin", "epoch 0 begin", "epoch 0 end", "epoch 1 begin") for _ in range(2)
    ]


def test_callbacks_of_a_worker_know_the_epochs_of_the_job(start_servers):
    calls = []
    coordinator = FakeCoordinator(64, tasks=())
    coordinator.tasks = [TaskWork((0, 1), "callbacks", 0, tuple(LOGS[:1]))]
    training = job(callbacks=lambda: [Calls(calls)])
    assert Running(training, start_servers(coordinator), coordinator).start().join() is End.FINISHED
    assert calls[0][2]["epochs"] == 1
    assert calls[-1][0] == "train end"


def test_callbacks_are_made_only_on_the_worker_that_runs_them(start_servers):
    """A worker that trains or waits makes none: its function may begin a run of a tracker."""
    made = []
    coordinator = FakeCoordinator(DATA.size, epochs=3, tasks=())
    coordinator.tasks = [TaskWork((0, 1), "callbacks", 2, tuple(LOGS[:3]))]
    servers = start_servers(coordinator)
    workers = [
        Running(job(callbacks=lambda slot=slot: made.append(slot) or []), servers, coordinator, slot=slot)
        for slot in range(2)
    ]
    assert not made
    assert [worker.join() for worker in [each.start() for each in workers]] == [End.FINISHED] * 2
    assert len(made) == 1
    assert any(each.worker.loop.steps for each in workers)


class Final(callbacks.CSVLogger):
    """Writes its file only when training ends."""

    def __init__(self, last=None):
        super().__init__("final.txt")
        self.last = last

    def on_train_begin(self, logs=None):
        pass

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == self.last

    def on_train_end(self, logs=None):
        with Path(self.filename).open("a") as file:
            file.write(f"{logs['loss']}\n")


@pytest.mark.parametrize(("last", "epochs"), [(None, 2), (1, None), (1, 9)])
def test_files_of_on_train_end_belong_to_the_last_epoch(running, last, epochs):
    hooks = running(lambda: Final(last), epochs=epochs)
    assert not hooks.run(LOGS[:1])
    assert list(hooks.files()) == []
    hooks.run(LOGS[:2])
    ((name, path),) = hooks.files()
    assert (name, path.read_text()) == ("final.txt", "2.0\n")
    if last is not None:
        assert hooks.run(LOGS[:3])  # an epoch that had begun before the stop
        assert path.read_text() == "2.0\n"


def test_error_in_on_train_end_is_logged(running, caplog):
    class Broken(callbacks.Callback):
        def on_train_end(self, logs=None):
            raise KeyError("accuracy")

    calls = []
    hooks = running(Broken, lambda: Calls(calls))
    hooks.run(LOGS[:1])
    hooks.close()
    assert calls[-1] == ("train end", LOGS[0])
    assert "Broken.on_train_end failed: KeyError: 'accuracy'" in caplog.text


def schedule(model):
    model.optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(0.1, 100)


def recompile(model):
    model.compile(keras.optimizers.SGD(0.001), "mse")


def freeze(model):
    model.layers[1].trainable = False


def freeze_statistics(model):
    model.get_layer("batch_normalization").trainable = False


@pytest.mark.by_day(4)
@pytest.mark.parametrize("optimizer", ["sgd", "adamax"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (schedule, "cannot replace the optimizer or its schedule"),
        (recompile, "cannot replace the optimizer or its schedule"),
        (freeze, "cannot change which variables are trained.*loads the exported model"),
        (freeze_statistics, "cannot change which variables are trained"),
    ],
)
@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_end"])
def test_change_that_the_job_would_not_follow_is_refused(optimizer, change, words, hook):
    model = functional(optimizer, norm=True)
    keywords = {hook: lambda *_: change(model)}
    hooks = Hooks(lambda: [callbacks.LambdaCallback(**keywords)], model)
    with pytest.raises(UserError, match=words):
        hooks.run(LOGS[:1])
    hooks.close()


@pytest.mark.parametrize(
    "rate", [0.1, keras.optimizers.schedules.CosineDecay(0.1, 100), iter([0.3, 0.2, 0.1]).__next__]
)
def test_unchanged_optimizer_is_accepted(rate):
    model = functional(keras.optimizers.SGD(rate))
    hooks = Hooks(lambda: [callbacks.LambdaCallback(on_epoch_end=lambda *_: model.get_weights())], model)
    assert not hooks.run(LOGS[:1])
    hooks.close()


def test_a_rehearsed_callback_leaves_the_users_files_alone(running, tmp_path, monkeypatch):
    """An untrained model would replace the one of yesterday."""
    (tmp_path / "snap.txt").write_text("precious")
    monkeypatch.chdir(tmp_path)
    (tmp_path.parent / "above.txt").write_text("precious")

    def write(*_):
        for name in ("snap.txt", "../above.txt"):
            Path(name).write_text("untrained")

    hooks = running(lambda: callbacks.LambdaCallback(on_epoch_end=write), contained=True)
    hooks.run(LOGS[:1])
    assert (hooks.written, list(hooks.files())) == (["snap.txt"], [])
    assert [p.read_text() for p in (tmp_path / "snap.txt", tmp_path.parent / "above.txt")] == ["precious"] * 2


def test_another_error_of_a_rehearsed_callback_says_nothing_of_folders(running):
    hooks = running(
        lambda: callbacks.LambdaCallback(on_epoch_end=lambda _, logs: logs["accuracy"]), contained=True
    )
    with pytest.raises(UserError, match="KeyError: 'accuracy'") as raised:
        hooks.run(LOGS[:1])
    assert "folder" not in str(raised.value)


@pytest.mark.parametrize("when", ["made", "called"])
def test_a_file_that_a_callback_does_not_find_says_where_to_look(model, tmp_path, monkeypatch, when):
    (tmp_path / "labels.txt").write_text("cat")
    monkeypatch.chdir(tmp_path)

    def read(*_):
        return Path("labels.txt").read_text()

    training = job(functional, callbacks=lambda: [
        callbacks.LambdaCallback(on_epoch_end=read if when == "called" else read())
    ])  # fmt: skip
    hooks = Hooks(lambda: callbacks_of(training), model, contained=True)
    with pytest.raises(
        UserError, match=r"'labels\.txt' \(.*what they read needs an absolute path, .*Path\(__file__\)"
    ):
        hooks.run(LOGS[:1])
    hooks.close()


@pytest.mark.parametrize(
    "read",
    [
        lambda: keras.models.load_model("teacher.keras"),
        lambda: keras.models.load_model("teacher.h5"),
        lambda: tf.saved_model.load("teacher"),
    ],
)
def test_a_model_that_a_rehearsed_callback_does_not_find_says_where_to_look(running, read):
    """Keras and TensorFlow raise what is no FileNotFoundError."""
    hooks = running(lambda: callbacks.LambdaCallback(on_epoch_end=lambda *_: read()), contained=True)
    with pytest.raises(UserError, match=r"teacher.*what they read needs an absolute path"):
        hooks.run(LOGS[:1])


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system", "log.txt"),
        tf.errors.PermissionDeniedError(None, None, "m.h5; Read-only file system"),
    ],
    ids=["python", "tensorflow"],
)
def test_a_callback_that_writes_where_a_pod_cannot_says_where_it_can(running, error):
    def write(*_):
        raise error

    hooks = running(lambda: callbacks.LambdaCallback(on_epoch_end=write))
    with pytest.raises(
        UserError, match=r"A pod can write below /tmp, and .*CSVLogger or TensorBoard, whose files"
    ):
        hooks.run(LOGS[:1])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("own", [False, True])
def test_checkpoints_are_deleted_unless_callbacks_of_the_user_may_read_them(running, own):
    def checkpoint():
        return callbacks.ModelCheckpoint("{epoch}.weights.h5", save_weights_only=True)

    hooks = running(checkpoint, lambda: Calls([]) if own else callbacks.CSVLogger("log.csv"))
    for n in range(3):
        hooks.run(LOGS[: n + 1])
    names = [name for name, _ in hooks.files() if name.endswith(".h5")]
    assert names == ([f"{n}.weights.h5" for n in (1, 2, 3)] if own else ["3.weights.h5"])


def test_path_outside_of_the_stored_folder_is_refused():
    training = job(functional, callbacks=lambda: [callbacks.CSVLogger("logs/../../epochs.csv")])
    with pytest.raises(UserError, match=r"CSVLogger.* writes outside of logs/"):
        callbacks_of(training)


@pytest.mark.parametrize("path", ["history.csv", "./history.csv", "history.csv/train"])
def test_the_name_of_shoals_own_history_is_refused(path):
    """One file would replace the other, whichever is written later."""
    training = job(functional, callbacks=lambda: [callbacks.CSVLogger(path)])
    with pytest.raises(UserError, match=r"logs/history\.csv, which Shoal writes.*another path"):
        callbacks_of(training)


class Warm(callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.001 * batch


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Warm, "Warm: on_train_batch_begin is not called"),
        (
            lambda: callbacks.LambdaCallback(on_train_batch_end=print),
            "LambdaCallback: on_train_batch_end is not called",
        ),
        (lambda: callbacks.CSVLogger("/nowhere/log.csv"), "lost with its pod"),
        (callbacks.TerminateOnNaN, None),
        (lambda: callbacks.ModelCheckpoint("a.keras"), None),
    ],
)
def test_what_a_callback_will_not_do_is_told(make, words, caplog):
    callbacks_of(job(functional, callbacks=lambda: [make()]))
    assert words in caplog.text if words else not caplog.text


@pytest.mark.parametrize("made", [None, [], Warm(), [Warm()], (Warm(), Warm())])
def test_what_fit_takes_as_callbacks_is_taken(made):
    given = job(functional, callbacks=lambda: made)
    assert list(callbacks_of(given)) == keras.callbacks.CallbackList(made).callbacks


def test_backup_is_left_out_with_a_warning(tmp_path, caplog):
    backup = callbacks.BackupAndRestore(tmp_path)
    made = callbacks_of(job(functional, callbacks=lambda: [backup, Warm()]))
    assert [type(each) for each in made] == [Warm]
    assert "BackupAndRestore is left out" in caplog.text


@pytest.mark.filterwarnings("ignore:Early stopping conditioned on metric")
def test_what_no_callback_before_puts_into_the_logs_is_told_once(model, caplog):
    class Score(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_f1"] = 0.5

    def made():
        return [Score(), *(callbacks.EarlyStopping(name, mode="max") for name in ("val_f1", "val_f2"))]

    hooks = Hooks(lambda: callbacks_of(job(callbacks=made), evaluated=["val_loss"]), model)
    for n in (1, 2):
        hooks.run(LOGS[:n])
    hooks.close()
    told = [each.getMessage() for each in caplog.records if "not in its logs" in each.getMessage()]
    assert told == ["EarlyStopping uses 'val_f2', which is not in its logs, loss, val_f1"]


def test_absolute_path_is_contained_in_a_rehearsal(model, tmp_path):
    kept = tmp_path / "log.csv"
    kept.write_text("of an earlier run")
    hooks = Hooks(lambda: [callbacks.CSVLogger(str(kept))], model, contained=True)
    hooks.run(LOGS[:1])
    assert [name for name, _ in hooks.files()] == [str(kept).lstrip("/")]
    hooks.close()
    assert kept.read_text() == "of an earlier run"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), CallbackOutage),
        (urllib.error.URLError(TimeoutError("timed out")), CallbackOutage),
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (OSError(errno.EACCES, "Permission denied"), UserError),
        (KeyError("val_loss"), UserError),
    ],
)
@pytest.mark.parametrize("hook", ["__init__", "on_train_begin", "on_epoch_begin", "on_epoch_end"])
def test_outage_in_a_callback_ends_its_worker_and_any_other_error_the_job(model, error, kind, hook):
    def fails(*_arguments, **_options):
        raise error

    made = type("Reports", (callbacks.Callback,), {hook: fails})
    training = job(callbacks=lambda: [made()])
    hooks = Hooks(lambda: callbacks_of(training), model)
    with pytest.raises(kind, match="failed: "):
        hooks.run(LOGS[:1])
    hooks.close()


def test_callbacks_that_met_an_outage_are_new_on_the_next_worker(running):
    """A worker that is replaced has none; they see the epochs from the first one."""
    seen, reachable = [], []

    class Reports(Recorder):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            if epoch == 1 and not reachable:
                raise ConnectionError("the server of metrics is away")

    hooks = running(lambda: Reports(seen))
    hooks.run(LOGS[:1])
    with pytest.raises(CallbackOutage, match="the server of metrics is away"):
        hooks.run(LOGS[:2])
    seen.clear()
    reachable.append(True)
    assert running(lambda: Reports(seen)).run(LOGS[:2]) is False
    assert seen == ["begin", (0, 3.0), (1, 2.0)]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("shared", [False, True])
def test_callbacks_begin_anew_after_a_rollback_also_where_a_function_returns_the_same_objects(model, shared):
    class Seen(callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.rows = []

        def on_epoch_end(self, epoch, logs=None):
            self.rows.append(logs["loss"])

    def made():
        best = callbacks.ModelCheckpoint(
            "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
        )
        return [best, Seen(), callbacks.CSVLogger("log.csv")]

    kept, ran = made(), []

    def build():
        ran.append(callbacks_of(job(callbacks=(lambda: kept) if shared else made)))
        return ran[-1]

    hooks = Hooks(build, model, 10)
    first, best, worse = {"loss": 1.0}, {"loss": 0.2}, {"loss": 0.6}
    hooks.run([first])
    hooks.run([first, best])
    hooks.run([first, worse])  # the job was rolled back to its first epoch
    checkpoint, seen, _ = ran[-1]
    assert (checkpoint.best, seen.rows) == (0.6, [1.0, 0.6])
    assert [name for name, _ in hooks.files()] == ["best.weights.h5", "log.csv"]
    hooks.close()


class Anneals(callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.beta.assign(epoch / 2)


class Evaluates(callbacks.Callback):
    """With other values, which it takes back."""

    def on_epoch_end(self, epoch, logs=None):
        before = float(self.model.beta)
        self.model.beta.assign(7.0)
        self.model.beta.assign(before)


class Ends(callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.beta.assign(3.0)


@pytest.mark.parametrize("kind", [Anneals, Evaluates, Ends])
def test_a_value_that_only_the_worker_of_a_callback_would_have_is_refused(kind):
    model = functional(norm=True)
    model.beta = keras.Variable(0.0, trainable=False, name="beta")
    hooks = Hooks(lambda: [kind()], model, 2)
    if kind is Anneals:
        with pytest.raises(
            UserError, match=r"A callback sets beta, .* from the step, self\.optimizer\.iterations"
        ):
            hooks.run(LOGS[:1])
    else:
        hooks.run(LOGS[:1])
        hooks.run(LOGS[:2])
    hooks.close()


def test_callbacks_find_the_history_of_the_model(running, model):
    seen = []

    class Reads(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.history.history.get("loss", [])[:])  # as in Keras, of the epochs before

    hooks = running(Reads)
    for n in (1, 2):
        hooks.run(LOGS[:n])
    assert seen == [[], [3.0]]
    assert model.history.history == {"loss": [3.0, 2.0]}
