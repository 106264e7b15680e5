"""Entrypoints and trainings, and what their errors say."""

import re
import sys
import zipfile

import pytest

from shoal_trainer import Training, UserError
from shoal_trainer.errors import Unreachable
from shoal_trainer.worker import entrypoint
from shoal_trainer.worker.entrypoint import load

GOOD = """
import numpy as np
from shoal_trainer import Indexed, Training

def build():
    raise AssertionError("is not called to load")

job = Training(model=build, data=Indexed.from_arrays(np.ones(4)))

def make(width=1):
    return Training(model=build, data=Indexed.from_arrays(np.ones(width)))

def nothing():
    pass

def mistaken(width=1):
    return len(width)

def needs(width):
    return mistaken(width)

def rated(rate: float):
    return job

def wide(layers: list[int], flags: "dict[str, int]" = {}, tag: str = "", fast: bool = False, name="a", **others):
    return Training(model=build, data=Indexed.from_arrays(np.ones(4)), callbacks=lambda: [layers, tag, name, others])

from typing import Literal, Optional

def mixed(tag: str | None = None, other: Optional[str] = None, kind: Literal["1.5", "2.5"] = "1.5",
          number: int | str = 0, rate: float | str = 0, size: int | None = None, text: "str | None" = None):
    return Training(model=build, data=Indexed.from_arrays(np.ones(4)), callbacks=lambda: [
        tag, other, kind, number, rate, size, text])

def floats(rate: float, decay: float | None = None, by_default=0.5, size: int = 1.5, either: int | float = 0.5,
           most=float("inf")):
    return Training(model=build, data=Indexed.from_arrays(np.ones(4)), callbacks=lambda: [
        rate, decay, by_default, size, either, most])

def reads():
    open("no/such.csv")

def leave():
    raise SystemExit(0)

number = 7
"""


OPTIONS = """
import argparse
parser = argparse.ArgumentParser("options", allow_abbrev=False)
parser.add_argument("--rate-that-nobody-gives", required=True)
parser.parse_args()
"""


FITS = """
import keras
import numpy as np
from shoal_trainer import Training

def build():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

x = np.ones((4, 1))
job = Training(model=build, data=(x, x))
histories = [build().fit(x, x, epochs=1, verbose=0) for _ in range(2)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "goodjob.py").write_text(GOOD)
    (tmp_path / "syntaxerror.py").write_text("def broken(:\n")
    (tmp_path / "exits.py").write_text("import sys\n\nif __name__ != '__main__':\n    sys.exit('no GPU')\n")
    (tmp_path / "importerror.py").write_text("import numpy\n\nnumpy.nothing_of_this_name\n")
    (tmp_path / "options.py").write_text(OPTIONS)
    (tmp_path / "package.py").write_text("import lightgbm_of_nobody\n")
    (tmp_path / "reads.py").write_text("open('no/such.csv')\n")
    (tmp_path / "fits.py").write_text(FITS)
    (tmp_path / "epochs.py").write_text("from shoal_trainer import Training\n\njob = Training(epochs=3)\n")
    (tmp_path / "writes.py").write_text("raise OSError(30, 'Read-only file system', 'out')\n")
    yield tmp_path
    for name in ("goodjob", "loading", "syntaxerror", "importerror", "exits", "fits"):
        sys.modules.pop(name, None)


def test_entrypoint_is_a_training_or_a_function(folder):
    assert isinstance(load("goodjob:job", folder=folder), Training)
    assert load("goodjob:make", {"width": 3}, folder=folder).data.size == 3


@pytest.mark.parametrize(
    ("entrypoint", "args", "words"),
    [
        ("goodjob", {}, "must be module:object, for example digits:job"),
        ("godjob:job", {}, "names the module 'godjob', which does not exist. Did you mean 'goodjob'?"),
        ("elsewhere:job", {}, "Put elsewhere.py into"),
        ("goodjob:jib", {}, "has no 'jib'. Did you mean 'job'?"),
        ("goodjob:number", {}, "is a int. It must be a shoal_trainer.Training or return one"),
        ("goodjob:nothing", {}, "returned NoneType. It must return a shoal_trainer.Training"),
        ("goodjob:job", {"a": 1}, "takes no args, but spec.training.args gives a"),
        ("goodjob:make", {"depth": 1}, "unexpected keyword argument 'depth'"),
        ("goodjob:mistaken", {"width": 3}, "failed: TypeError: object of type 'int' has no len() ("),
        (
            "goodjob:needs",
            {},
            "cannot be called with spec.training.args: missing a required argument: 'width'",
        ),
        ("goodjob:rated", {"rate": "high"}, "the argument rate must be a number (float), not 'high'"),
        (
            "goodjob:wide",
            {"layers": "[64, 32"},
            "the argument layers must be a list of JSON, such as [64, 32], not",
        ),
        (
            "goodjob:wide",
            {"layers": 64},
            "the argument layers must be a list of JSON, such as [64, 32], not 64",
        ),
        ("goodjob:wide", {"layers": [], "flags": "a"}, "the argument flags must be an object of JSON"),
        ("goodjob:wide", {"layers": [], "fast": "yes"}, "the argument fast must be true or false, not 'yes'"),
        (
            "goodjob:make",
            {"width": 0},
            "must have at least one sample; the arrays are empty. (goodjob.py:11 in make)",
        ),
        ("syntaxerror:job", {}, "cannot be imported: SyntaxError: invalid syntax"),
        ("importerror:job", {}, "importerror.py:3"),
        ("exits:job", {}, "cannot be imported: SystemExit: no GPU ("),
        ("exits:job", {}, "exits.py:4"),
        (
            "goodjob:training",
            {},
            "has no 'training'. It has: job, build, floats, leave, make, mistaken, mixed, needs, nothing, rated, "
            "reads, wide.",
        ),
        ("epochs:job", {}, "What Keras' fit takes is elsewhere in a job (docs/keras.md, From fit)"),
        ("options:job", {}, "An entrypoint has no command line: take the values as arguments of a function"),
        (
            "package:job",
            {},
            "No module named 'lightgbm_of_nobody' (package.py:1). A package: install it here with pip, and",
        ),
        ("goodjob:leave", {}, "failed: SystemExit: 0 ("),
        (
            "reads:job",
            {},
            "'no/such.csv' (reads.py:1). A pod has the script and what travels with it (--file PATH)",
        ),
        ("writes:job", {}, "Read-only file system: 'out' (writes.py:1). In a pod only /tmp can be written"),
        ("goodjob:reads", {}, "A pod has the script"),
    ],
)
def test_invalid_entrypoint_says_what_to_change(folder, monkeypatch, entrypoint, args, words):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as caught:
        load(entrypoint, args, folder=folder)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["queue", "numpy"])
def test_a_file_that_another_module_hides_is_told(folder, name):
    """It is imported already, from Python itself or from a package: the file never is."""
    (folder / f"{name}.py").write_text(GOOD)
    words = f"The file {name}.py of the entrypoint is hidden by the module {name!r} of "
    with pytest.raises(UserError, match=re.escape(words) + ".*: give the file another name"):
        load(f"{name}:job", folder=folder)


def test_a_parameter_that_is_a_string_gets_text_and_others_get_numbers(folder):
    args = {"layers": [64, 32], "tag": 5, "name": True, "rate": "1e-3", "depth": 2}
    layers, tag, name, others = load("goodjob:wide", args, folder=folder).callbacks()
    assert (layers, tag, name, others) == ([64, 32], "5", "true", {"rate": 0.001, "depth": 2})
    assert load("goodjob:wide", {"layers": [], "tag": "1.10"}, folder=folder).callbacks()[1] == "1.10"


def test_a_parameter_that_may_be_a_string_gets_text(folder):
    quoted = {
        "tag": "1.10",
        "other": "1e5",
        "kind": "2.5",
        "number": "1.0",
        "rate": "1.5",
        "size": 3,
        "text": "0.5",
    }
    found = load("goodjob:mixed", quoted, folder=folder).callbacks()
    assert found == ["1.10", "1e5", "2.5", "1.0", 1.5, 3, "0.5"]
    found = load("goodjob:mixed", {"tag": 5, "number": 5, "rate": 5, "text": True}, folder=folder).callbacks()
    assert found == ["5", None, "1.5", 5, 5, None, "true"]
    with pytest.raises(UserError, match=r"the argument size must be a number \(int\), not 'many'"):
        load("goodjob:mixed", {"size": "many"}, folder=folder)


def test_a_whole_number_for_a_float_arrives_as_a_float(folder):
    """Keras refuses `SGD(1)`, and a manifest cannot say 1.0: kubectl sends it as 1."""
    found = load(
        "goodjob:floats",
        {"rate": 1, "decay": 2, "by_default": 3, "size": 4, "either": 5, "most": 6},
        folder=folder,
    )
    assert list(map(repr, found.callbacks())) == ["1.0", "2.0", "3.0", "4", "5", "6"]


def test_annotations_that_are_text_mean_the_same(folder):
    (folder / "goodjob.py").write_text("from __future__ import annotations\n" + GOOD)
    found = load("goodjob:mixed", {"tag": "1.10", "rate": "1.5", "text": 5}, folder=folder).callbacks()
    assert found == ["1.10", None, "1.5", 0, 1.5, None, "5"]


@pytest.mark.parametrize("where", ["module", "function"])
def test_data_that_user_code_cannot_load_now_are_waited_for(folder, where):
    """As `datasets.load_dataset` and `keras.datasets`, which download."""
    lines = [
        "import pathlib",
        "def job():",
        "    if not pathlib.Path(__file__).with_name('there').exists():",
        "        raise ConnectionResetError('reset by peer')",
        "    return goodjob.job",
        "import goodjob",
        *(["job = job()"] if where == "module" else []),
    ]
    (folder / "loading.py").write_text("\n".join(lines))
    for _ in range(2):
        with pytest.raises(Unreachable, match=r"loading.*reset by peer"):
            load("loading:job", folder=folder)
    (folder / "there").write_text("")
    assert isinstance(load("loading:job", folder=folder), Training)


def test_a_module_that_trains_when_it_is_imported_is_told_once(folder, caplog):
    assert load("fits:job", folder=folder) is sys.modules["fits"].job
    assert [len(each.history["loss"]) for each in sys.modules["fits"].histories] == [1, 1]
    told = [each.getMessage() for each in caplog.records if "calls fit()" in each.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": 7}, "must be a function that returns a compiled Keras model"),
        (
            {"data": [1, 2]},
            "Training(data=…) cannot be of the type list. Use arrays (x, y), Indexed, Files",
        ),
        (
            {"validation": 0.2},
            "cannot be of the type float. There is no validation_split: pass other samples. Use",
        ),
        ({"validation": 7}, "Training(validation=…) cannot be of the type int. Use arrays"),
        (
            {"validation": print},
            "Training(validation=…) is a function. Pass the data that it returns, or Stream(",
        ),
        ({"callbacks": []}, "must be a function that returns a list of Keras callbacks"),
        ({"wire": "fp16"}, 'must be "bf16" or "fp32"'),
        ({"on_nan": "ignore"}, 'must be "stop", "skip" or "rollback"'),
        ({"seed": None}, "Training(seed=…) must be a whole number from 0 to 4294967295, not None"),
        ({"seed": -1}, "Training(seed=…) must be a whole number from 0 to 4294967295, not -1"),
        (
            {"batches_per_push": 0},
            "Training(batches_per_push=…) must be a whole number from 1 to 4096, not 0",
        ),
        ({"class_weight": [1, 2]}, "Training(class_weight=…) must be a map from class numbers to weights"),
        (
            {"class_weight": {"cat": 2}},
            "Training(class_weight=…) must be a map from class numbers to weights",
        ),
    ],
)
def test_invalid_training_says_what_to_change(options, words):
    import numpy as np

    from shoal_trainer import Indexed

    right = {"model": lambda: None, "data": Indexed.from_arrays(np.ones(3))}
    with pytest.raises(UserError) as caught:
        Training(**(right | options))
    assert words in str(caught.value)


def test_code_of_the_job_is_before_that_of_the_image(folder, monkeypatch):
    image, code = folder / "image", folder / "code"
    for each, size in ((image, 1), (code, 2)):
        each.mkdir()
        (each / "bothjob.py").write_text(GOOD.replace("np.ones(4)", f"np.ones({size})"))
    (image / "helper.py").write_text(GOOD)
    monkeypatch.chdir(image)
    assert load("bothjob:job").data.size == 1
    sys.modules.pop("bothjob")
    monkeypatch.setattr(entrypoint, "CODE_DIR", str(code))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(image)])
    assert load("bothjob:job").data.size == 2
    assert load("helper:job").data.size == 4, "the image's own modules stay"
    for name in ("bothjob", "helper"):
        sys.modules.pop(name)


def test_code_in_an_archive_is_first(folder, monkeypatch):
    """Packages, and more code than a ConfigMap holds as it is, come as an archive."""
    (folder / "code").mkdir()
    with zipfile.ZipFile(folder / "code" / "code.zip", "w") as archive:
        archive.writestr("goodjob.py", GOOD + "from inner.part import PART\n")
        archive.writestr("inner/__init__.py", "")
        archive.writestr("inner/part.py", "PART = 1\n")
    monkeypatch.chdir(folder)
    assert isinstance(load("goodjob:job", archive=folder / "code" / "code.zip"), Training)
    for name in ("goodjob", "inner", "inner.part"):
        sys.modules.pop(name)
    monkeypatch.setattr(entrypoint, "CODE_DIR", str(folder / "code"))
    assert isinstance(load("goodjob:job"), Training)
    assert "code.zip" in sys.modules["goodjob"].__file__
    with pytest.raises(UserError, match=r"Did you mean 'job'"):
        load("goodjob:jib")
    with pytest.raises(UserError, match=r"names the module 'godjob', which does not exist"):
        load("godjob:job")
    for name in ("inner", "inner.part"):
        sys.modules.pop(name, None)
