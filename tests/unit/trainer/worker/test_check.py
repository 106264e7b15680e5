"""`shoal-trainer check` names at once what a cluster would refuse part by part, each after a start of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from click.testing import CliRunner

from shoal_trainer.cli import main
from shoal_trainer.contract import StopAfter
from shoal_trainer.worker.rehearsal import Rehearsal

# Keras' h5 files with this numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GOOD = """
    import keras, numpy as np
    from shoal_trainer import Indexed, Training

    x, y = np.random.default_rng(0).normal(size=(640, 4)).astype("float32"), np.arange(640) % 2
    DATA = Indexed.from_arrays(x, y)

    def build(loss="sparse_categorical_crossentropy", layer=None, **options):
        layers = [keras.Input((4,)), *([layer] if layer else []), keras.layers.Dense(2, activation="softmax")]
        model = keras.Sequential(layers)
        model.compile("adam", loss, metrics=["accuracy"], **options)
        return model
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rehearse a job of these lines; returns {part: finding}. XLA takes half of the time: only with `gpu`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = Rehearsal._part

    def run(lines: str, args: dict | None = None, *, gpu: bool = False, **options):
        def part(self, name, attempt):
            return whole(self, name, attempt) if gpu or name != "as on a GPU" else None

        monkeypatch.setattr(Rehearsal, "_part", part)
        monkeypatch.delitem(sys.modules, "case", raising=False)
        (tmp_path / "case.py").write_text(dedent(GOOD) + dedent(lines))
        settings = {"batch_size": 32, "stop_after": StopAfter(epochs=1)} | options
        rehearsal = Rehearsal("case:job", args or {}, folder=tmp_path, **settings)
        assert rehearsal.run() == rehearsal.passed
        return {finding.part: finding for finding in rehearsal.findings}

    return run


def states(findings) -> dict[str, str]:
    """The parts that are not ok. Their messages are printed for a failing test."""
    for finding in findings.values():
        print(finding.part, finding.state, finding.message)
    return {part: finding.state for part, finding in findings.items() if finding.state != "ok"}


def test_a_good_job_passes_every_part(check):
    found = check("""
        job = Training(model=build, data=DATA, validation=DATA,
                       callbacks=lambda: [keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True)])
    """, gpu=True)  # fmt: skip
    assert states(found) == {}
    assert "10 parameters" in found["model and data"].message
    assert "float32(32, 4)" in found["model and data"].message
    assert "one parameter server needs 168 MB of memory" in found["training step"].message
    assert found["as on a GPU"].message == "the training step compiles with XLA"
    assert "val_accuracy" in found["evaluation"].message
    assert "logs/best.keras" in found["callbacks"].message


@pytest.mark.parametrize("options", ["", ", class_weight={0: 1.0, 1: 2.0, 2: 1.0}"])
def test_labels_beyond_the_first_batch_are_looked_at(check, options):
    """Data sorted by class: a run would refuse them when it comes to the last class."""
    found = check(f"""
        job = Training(model=build, data=Indexed.from_arrays(x, np.repeat([0, 1, 2], [300, 339, 1])){options})
    """)  # fmt: skip
    assert states(found) == {"training step": "error"}
    assert (
        "Labels are outside the loss's range: 2, but the model's output has 2 classes"
        in found["training step"].message
    )


def test_a_step_that_several_gpus_cannot_share_is_told(check):
    found = check("""
        class Own(keras.Sequential):
            def train_step(self, data):
                return super().train_step(data)

        def own():
            model = Own([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
            model.compile("sgd", "sparse_categorical_crossentropy")
            return model

        job = Training(model=own, data=DATA)
    """, gpu=True)  # fmt: skip
    told = "of several GPUs of a worker one computes: the model has a custom train_step"
    assert told in found["as on a GPU"].message


def test_a_model_that_only_keras_can_compute_whole_is_told(check):
    found = check("""
        class Recomputed(keras.layers.Dense):
            def call(self, x):
                return keras.remat(super().call)(x)

        job = Training(model=lambda: build(layer=Recomputed(4)), data=DATA)
    """)  # fmt: skip
    assert states(found) == {"training step": "warning"}
    (told,) = found["training step"].warnings
    assert told.startswith("the optimizer runs on the workers: keras.remat or a tf.custom_gradient uses ")


def test_what_a_stream_does_not_promise_is_a_warning(check):
    found = check("""
        import tensorflow as tf
        job = Training(model=build, data=tf.data.Dataset.from_tensor_slices((x, y)).batch(60))
    """)
    assert states(found) == {"amount of data": "warning"}
    samples, size = found["amount of data"].warnings
    assert "an epoch is 660 samples, its batches times the rows of the first" in samples
    assert "a step has 32 samples, and the data have batches of 60, which are cut" in size
    assert "--batch-size 60" in size


def test_files_with_fewer_samples_than_a_batch_are_a_warning(check, tmp_path):
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", x=np.ones((2, 4), np.float32), y=[0, 1])
    found = check("""
        import tensorflow as tf
        from pathlib import Path
        from shoal_trainer import Files

        def read(path):
            rows = np.load(path)
            return tf.data.Dataset.from_tensor_slices((rows["x"], rows["y"]))

        job = Training(model=build, data=Files(f"{Path(__file__).parent}/*.npz", read))
    """)
    assert states(found) == {"amount of data": "warning"}
    [words] = found["amount of data"].warnings
    assert "the first of 3 files has 2: 30 of 32 rows are padding" in words


@pytest.mark.nightly
def test_a_warning_is_told_once(check):
    """Of a GAN, four parts found that its model cannot be saved, and two that its optimizers run on the workers."""
    found = check("""
        class Own(keras.Model):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def call(self, x):
                return self.inner(x)

            def train_step(self, data):
                return super().train_step(data)

        def own():
            model = Own(build())
            model.compile("adam", "sparse_categorical_crossentropy")
            return model

        job = Training(model=own, data=DATA, validation=DATA, callbacks=lambda: [keras.callbacks.CSVLogger("log.csv")])
    """)
    words = [words for finding in found.values() for words in finding.warnings]
    assert any(each.startswith("the optimizer runs on the workers") for each in words), words
    [unsaved] = [each for each in words if "model.keras" in each]
    assert unsaved in found["export"].warnings
    assert "get_config" in unsaved
    assert "Example" not in unsaved, "the tutorial that Keras adds"
    assert len(words) == len(set(words))


@pytest.mark.nightly
def test_a_step_that_fails_is_not_blamed_on_xla(check):
    found = check(
        "job = Training(model=build, data=Indexed.from_arrays(np.full((640, 4), np.nan, 'float32'), y))",
        gpu=True,
    )
    assert states(found)["training step"] == "error"
    assert "not finite" in found["training step"].message
    assert "as on a GPU" not in found


@pytest.mark.nightly
def test_what_does_not_compile_is_said_once(check):
    found = check("""
        import tensorflow as tf

        class Text(keras.layers.Layer):
            def call(self, x):
                return x + 0 * tf.strings.to_number(tf.strings.as_string(x))

        job = Training(model=lambda: build(layer=Text()), data=DATA)
    """, gpu=True)  # fmt: skip
    message = found["as on a GPU"].message
    assert message.count("jit_compile=False") == 1
    assert ".." not in message


def test_a_module_that_trains_when_it_is_imported_is_warned_of(check):
    found = check("""
        build().fit(x, y, verbose=0)
        job = Training(model=build, data=DATA)
    """)
    assert states(found) == {"import": "warning"}
    assert "calls fit() when it is imported" in found["import"].warnings[0]


@pytest.mark.nightly
def test_a_package_that_the_image_lacks_is_warned_of(check):
    found = check("""
        import hypothesis.strategies, sklearn, numpy, tensorflow, s3fs
        from google.cloud import storage
        job = Training(model=build, data=DATA)
    """)
    assert states(found) == {"import": "warning"}
    assert (
        found["import"].warnings[0].startswith("hypothesis: on this machine, and not in Shoal's worker image")
    )


def test_output_that_does_not_fit_the_labels_is_named_with_both_shapes(check):
    found = check("""
        def wide():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            model.compile("adam", "mse", metrics=["mae"])
            return model

        job = Training(model=wide, data=(x, y.astype("float32")))
    """)
    message = found["model and data"].message
    assert (
        "In compile(), the metric 'mae' cannot be computed for the first batch, y of the shape (32,)"
        in message
    )
    assert "the model's output (32, 3)" in message


@pytest.mark.parametrize("own", [False, True])
def test_a_metric_that_does_not_fit_is_named_among_others(check, own):
    auc = "Mine(name='mine')" if own else "keras.metrics.AUC()"
    found = check(f"""
        class Mine(keras.metrics.Metric):
            def update_state(self, true, found, sample_weight=None):
                keras.ops.add(true, keras.ops.zeros((7,)))

            def result(self):
                return 0.0

        def rated():
            model = build()
            model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy", {auc}])
            return model

        job = Training(model=rated, data=(x, y))
    """)
    name = "mine" if own else "auc"
    assert f"In compile(), the metric {name!r} cannot be computed" in found["model and data"].message


@pytest.mark.nightly
def test_command_prints_nothing_of_tensorflow(tmp_path: Path):
    """In a process of its own: TensorFlow greets once."""
    (tmp_path / "case.py").write_text(dedent(GOOD) + "job = Training(model=build, data=DATA)")
    command = [sys.executable, "-m", "shoal_trainer.cli", "check", "case:job"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "a cluster would take this job" in done.stdout
    assert done.stderr == ""


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("lines", "part", "words"),
    [
        ("job = 1 / 0", "import", "ZeroDivisionError"),
        (
            "job = Training(model=build, data=Indexed.from_arrays(x, y + 1))",
            "training step",
            "outside the loss's range: 2",
        ),
        ("job = Training(model=lambda: keras.Sequential(), data=DATA)", "model and data", "not compiled"),
        ("job = Training(model=lambda: build(loss='mse_'), data=DATA)", "model and data", "Did you mean"),
        (
            "import tensorflow as tf\n"
            "class Slow(keras.layers.Layer):\n"
            "    def call(self, x):\n"
            "        return tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), x.shape)\n"
            "job = Training(model=lambda: build(layer=Slow()), data=DATA)",
            "as on a GPU",
            r"(?s)XLA, which Keras uses on a GPU.*PyFunc.*jit_compile=False",
        ),
        (
            "job = Training(model=build, data=DATA, callbacks=lambda: [keras.callbacks.SwapEMAWeights()])",
            "callbacks",
            "SwapEMAWeights has no effect",
        ),
        (
            "job = Training(model=build, data=DATA, validation=(x, y + 100))",
            "evaluation",
            "outside the loss.s range: 100, 101",
        ),
    ],
)  # fmt: skip
def test_what_would_fail_later_is_named(check, lines, part, words):
    finding = check(lines, gpu=part == "as on a GPU")[part]
    assert finding.state == "error"
    assert re.search(words, finding.message), finding.message


def test_one_run_names_all_errors(check):
    found = check("""
        job = Training(model=build, data=DATA, validation=(x, y + 100),
                       callbacks=lambda: [keras.callbacks.SwapEMAWeights()])
    """, stop_after=StopAfter(metric="val_acuracy", value=0.9))  # fmt: skip
    assert states(found) == {"target": "error", "evaluation": "error", "callbacks": "error"}
    assert "Did you mean val_accuracy" in found["target"].message


@pytest.mark.nightly
def test_a_model_that_is_compiled_at_import_is_tried_as_on_a_gpu(check):
    """Keras chose for this machine when it was compiled; on a GPU it would choose XLA."""
    found = check("""
        import tensorflow as tf

        class Slow(keras.layers.Layer):
            def call(self, x):
                return tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), x.shape)

        model = build(layer=Slow())
        job = Training(model=lambda: model, data=DATA)
    """, gpu=True)  # fmt: skip
    assert found["as on a GPU"].state == "error"
    assert "XLA, which Keras uses on a GPU, cannot run the training step" in found["as on a GPU"].message


@pytest.mark.parametrize("optimizer", ["Adamax", "Adam"])
def test_an_optimizer_that_is_made_at_import_is_no_error(check, optimizer):
    """A worker builds one model with it; the rehearsal would need another for the second."""
    found = check(f"""
        optimizer = keras.optimizers.{optimizer}()

        def made():
            model = build()
            model.compile(optimizer, "sparse_categorical_crossentropy")
            return model

        job = Training(model=made, data=DATA)
    """, gpu=True)  # fmt: skip
    assert found["as on a GPU"].state == "ok"
    assert ("not tried" in found["as on a GPU"].message) == (optimizer == "Adamax")


def test_models_that_are_tried_have_the_names_of_a_workers(check):
    found = check("""
        made = set()

        def named():
            model = build()
            made.add(model.layers[-1].name)
            if len(made) > 1:
                raise KeyError(made)
            return model

        class Longer(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                longer = keras.layers.Dense(1)(self.model.layers[-1].output)
                keras.Model(self.model.inputs, longer)

        job = Training(model=named, data=DATA, callbacks=lambda: [Longer()])
    """, gpu=True)  # fmt: skip
    assert states(found) == {}


@pytest.mark.nightly
def test_one_worker_may_have_few_steps(check):
    assert states(check("job = Training(model=build, data=DATA)", batch_size=600)) == {}


@pytest.mark.nightly
def test_packages_of_modules_beside_the_script_are_looked_for(check, tmp_path):
    (tmp_path / "mine.py").write_text("import hypothesis\n")
    found = check("import mine\njob = Training(model=build, data=DATA)")
    [words] = found["import"].warnings
    assert words.startswith("hypothesis: on this machine, and not in Shoal's worker image")


@pytest.mark.nightly
def test_xla_that_is_switched_off_is_respected(check):
    found = check("""
        import tensorflow as tf
        class Slow(keras.layers.Layer):
            def call(self, x):
                return tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), x.shape)
        job = Training(model=lambda: build(layer=Slow(), jit_compile=False), data=DATA)
    """, gpu=True)  # fmt: skip
    assert found["as on a GPU"].state == "ok"


def test_what_callbacks_write_is_told_and_no_file_of_the_user_changes(check, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("snap.keras", "mylog.txt"):
        (tmp_path / name).write_text("precious")
    found = check("""
        class Log(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                with open("mylog.txt", "a") as file:
                    file.write("epoch")
                self.model.save("snap.keras")

        job = Training(model=build, data=DATA, callbacks=lambda: [Log()])
    """)
    assert states(found) == {"callbacks": "warning"}
    (words,) = found["callbacks"].warnings
    assert (
        "they write mylog.txt, snap.keras to the current folder, which a pod cannot. A pod can write below /tmp"
        in words
    )
    assert [(tmp_path / name).read_text() for name in ("snap.keras", "mylog.txt")] == ["precious"] * 2


def test_a_batch_larger_than_the_data_is_a_warning(check):
    found = check("job = Training(model=build, data=DATA)", batch_size=6400)
    assert states(found) == {"amount of data": "warning"}
    assert found["amount of data"].warnings == [
        "a batch of 6,400 is more than all 640 samples: the rest of each is padding, which is computed, too. Use a "
        "smaller batch size"
    ]


def test_too_few_steps_for_the_workers_are_a_warning(check):
    found = check("job = Training(model=build, data=DATA)", batch_size=600, workers=3)
    assert states(found) == {"amount of data": "warning"}
    assert found["amount of data"].warnings == [
        "2 steps in an epoch: few for 3 workers, since asynchronous training needs many small steps. Use a smaller "
        "batch size, or fewer workers"
    ]


@pytest.mark.nightly
def test_a_decimal_arrives_as_a_float(check):
    found = check("""
        def job(rate, name="1.5", tag: str = ""):
            assert (rate, name, tag) == (0.001, "2.5", "3.5"), (rate, name, tag)
            return Training(model=build, data=DATA)
    """, {"rate": "1e-3", "name": "2.5", "tag": "3.5"})  # fmt: skip
    assert states(found) == {}


def test_a_wrong_argument_lists_those_that_there_are(check):
    found = check("def job(rate=0.1, width=3): return Training(model=build, data=DATA)", {"lr": 1})
    assert states(found) == {"import": "error"}
    assert "It takes rate=0.1, width=3" in found["import"].message


@pytest.mark.nightly
def test_a_share_above_one_is_no_target(check):
    found = check("job = Training(model=build, data=DATA, validation=DATA)",
                  stop_after=StopAfter(metric="val_accuracy", value=95))  # fmt: skip
    assert "at most 1" in found["target"].message


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("lines", "code"), [("job = Training(model=build, data=DATA)", 0), ("job = 3", 1)])
def test_exit_code_and_json(tmp_path, monkeypatch, lines, code):
    (tmp_path / f"case{code}.py").write_text(dedent(GOOD) + lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner().invoke(main, ["check", f"case{code}:job", "-o", "json"])
    assert result.exit_code == code
    report = json.loads(result.stdout)
    assert report["passed"] == (code == 0)
    assert {finding["state"] for finding in report["findings"]} == ({"ok"} if code == 0 else {"error"})


def test_usage_error_has_another_exit_code():
    assert CliRunner().invoke(main, ["check"]).exit_code == 2


LENGTHS = """
    def tagger(layer=None):
        parts = [keras.Input((None,), dtype="int32"), keras.layers.Embedding(4, 2), *([layer] if layer else [])]
        model = keras.Sequential([*parts, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    class OfFour(keras.layers.Layer):
        def call(self, x):
            return keras.ops.reshape(x, (-1, 4, 2))[: keras.ops.shape(x)[0]] + 0 * x

    rows = [(np.ones(n, "int32"), np.float32(1)) for n in [2] * 320 + [7] * 320]
    ITEMS = Indexed.from_items(rows, lengths=[4, 8])
    SHORT = Indexed.from_items(rows[:320], lengths=[4, 8])
"""


@pytest.mark.nightly
def test_validation_of_several_lengths_passes(check):
    found = check(LENGTHS + "    job = Training(model=tagger, data=ITEMS, validation=ITEMS)")
    assert states(found) == {}
    assert found["validation"].message == "a batch of each of 2 shapes, of 64 samples was read"


@pytest.mark.nightly
def test_length_that_the_model_cannot_evaluate_is_found(check):
    job = "    job = Training(model=lambda: tagger(OfFour()), data=SHORT, validation=ITEMS)"
    assert states(check(LENGTHS + job)) == {"evaluation": "error"}
