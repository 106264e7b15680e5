"""`Job.model()`: what a worker exported is what Keras loads here."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

from shoal.client.job import Job, JobFailed
from shoal.errors import UsageError
from shoal_trainer.worker.saving import save
from tests.unit.client.fake_api import FakeApi
from tests.unit.policy.build import job_manifest

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ONES = np.ones((2, 4), np.float32)


def finished(folder: Path) -> Job:
    """A job whose model is there."""
    api, made = FakeApi(), job_manifest()
    files = [
        {"name": str(path.relative_to(folder)), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.rglob("*")
        if path.is_file()
    ]
    (folder / "manifest.json").write_text(json.dumps({"files": files, "outcome": {"modelDigest": "d"}}))
    made["status"] = {"phase": "Succeeded", "output": {"uri": f"file://{folder}", "digest": "d"}}
    api.objects[Job(api, "digits").path] = made
    return Job(api, "digits")


def exported(model: keras.Model, folder: Path) -> Job:
    model.compile("adam", "mse")
    model.fit(ONES, ONES[:, :1], verbose=0)
    folder.mkdir()
    save(model, folder)
    return finished(folder)


@keras.saving.register_keras_serializable("team")
class Mine(keras.Model):  # type: ignore[misc]
    """A model that Keras saves."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units, self.dense = units, keras.layers.Dense(units)

    def call(self, x: object) -> object:
        return self.dense(x)

    def get_config(self) -> dict[str, int]:
        return {"units": self.units}


class Guide(keras.Model):  # type: ignore[misc]
    """As in Keras' guide: Keras saves it, and cannot load it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: object) -> object:
        return self.dense(x)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files lie while they are loaded."""
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "made", [lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), lambda: Mine(1)]
)
def test_a_model_is_loaded_as_it_was_trained(
    tmp_path: Path, temporary: Path, made: Callable[[], keras.Model]
) -> None:
    model = made()
    loaded = exported(model, tmp_path / "model").model()
    assert type(loaded) is type(model)
    assert np.array_equal(loaded.predict(ONES, verbose=0), model.predict(ONES, verbose=0))
    assert list(temporary.glob("shoal-*")) == []


def test_the_files_are_there_beside(tmp_path: Path) -> None:
    job = exported(Mine(1), tmp_path / "model")
    there = job.model(tmp_path / "here")
    assert there == tmp_path / "here"
    assert {each.name for each in there.iterdir()} == {
        *("model.keras", "model.weights.h5", "saved_model", "manifest.json")
    }


def test_what_keras_cannot_load_is_told_with_what_would_help(tmp_path: Path, temporary: Path) -> None:
    """As of a class that nobody has imported in a notebook. The files stay, for whoever knows how to load them."""
    with pytest.raises(
        UsageError, match=r"(?s)cannot load model.keras.*Guide.*import the module.*model.weights.h5"
    ) as told:
        exported(Guide(), tmp_path / "model").model()
    [folder] = temporary.glob("shoal-*")
    assert str(folder) in str(told.value)
    assert (folder / "model.weights.h5").exists()


def test_a_model_that_keras_could_not_save_is_told(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.weights.h5").write_bytes(b"weights")
    with pytest.raises(
        UsageError,
        match=r"saved no model.keras, since Keras could not; .* has manifest.json, model.weights.h5",
    ):
        finished(tmp_path / "model").model()


def test_without_keras_there_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(UsageError, match="needs keras: install it, or give a folder"):
        finished(tmp_path).model()


def test_a_job_that_is_not_finished_has_no_model() -> None:
    api = FakeApi()
    api.objects[Job(api, "digits").path] = job_manifest() | {"status": {"phase": "Running"}}
    with pytest.raises(JobFailed, match="digits has no model: it is Running"):
        Job(api, "digits").model()
