"""A model's manifest that was truncated neither ends the job nor prevents its end."""

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest

from shoal_trainer.contract import Outcome, TerminationMessage
from shoal_trainer.coordinator.artefacts import MANIFEST, Artefacts, MadeBy
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.snapshot.storage import LocalStorage

TOKEN = (0, 1)
MESSAGE = TerminationMessage(outcome=Outcome.SUCCEEDED, message="all epochs are complete", step=7)


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """A volume without hard links."""

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    return LocalStorage(tmp_path / "run")


@pytest.fixture
def artefacts(storage):
    artefacts = Artefacts(storage, "uid")
    artefacts.receive(TOKEN, "export", "model.keras", iter([b"a model"]))
    return artefacts


@pytest.mark.parametrize("content", [b"", b'{"version": 1, "job'])
def test_truncated_manifest_is_replaced_by_the_next_export(artefacts, storage, caplog, content):
    storage.write(MANIFEST, [content])
    assert artefacts.published() is None
    outcome = artefacts.publish_model(TOKEN, MESSAGE)
    assert outcome.model_digest
    assert artefacts.published() == outcome
    assert "model/manifest.json cannot be read" in caplog.text
    assert "replacing the unreadable" in caplog.text


def test_manifest_of_another_run_is_not_replaced(artefacts, storage):
    other = Artefacts(storage, "another uid")
    other.receive(TOKEN, "export", "model.keras", iter([b"one"]))
    other.publish_model(TOKEN, MESSAGE)
    before = storage.read(MANIFEST)
    with pytest.raises(Fenced, match="another parameter server"):
        artefacts.publish_model(TOKEN, MESSAGE)
    assert storage.read(MANIFEST) == before


def test_manifest_that_calls_the_run_by_its_earlier_name_ends_the_job(artefacts, storage):
    outcome = artefacts.publish_model(TOKEN, MESSAGE)
    storage.write(MANIFEST, [storage.read(MANIFEST).replace(b'"run"', b'"jobUid"')])
    assert artefacts.published() == outcome


def test_failed_create_leaves_no_file(storage, monkeypatch):
    """A full volume without hard links."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    beside = storage._write_temporary

    @contextlib.contextmanager
    def then_full(path, chunks):
        with beside(path, chunks) as part:
            monkeypatch.setattr(os, "fsync", full)
            yield part

    monkeypatch.setattr(storage, "_write_temporary", then_full)
    with pytest.raises(Unreachable, match="No space left"):
        storage.create(MANIFEST, b"content")
    assert storage.names("model") == []
    monkeypatch.undo()
    assert storage.create(MANIFEST, b"content")


def test_create_in_place_writes_all_of_a_short_write(storage, monkeypatch):
    opened = Path.open

    class Reluctant:
        """Write two bytes per call, as a kernel may."""

        def __init__(self, handle):
            self.handle = handle

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.handle.close()

        def fileno(self):
            return self.handle.fileno()

        def write(self, data):
            return self.handle.write(bytes(data)[:2])

    def reluctant(self, mode="r", **arguments):
        handle = opened(self, mode, **arguments)
        return Reluctant(handle) if mode == "xb" else handle

    monkeypatch.setattr(Path, "open", reluctant)
    assert storage.create("manifest", b"content")
    assert storage.read("manifest") == b"content"


def test_manifest_says_what_made_the_model(storage):
    made_by = MadeBy(entrypoint="digits:job", args={"rate": 0.1, "layers": [64, 32]}, batch_size=128)
    artefacts = Artefacts(storage, "uid", made_by)
    artefacts.publish_model(TOKEN, MESSAGE)
    assert json.loads(storage.read(MANIFEST))["madeBy"] == {
        "entrypoint": "digits:job", "args": {"rate": 0.1, "layers": [64, 32]}, "batchSize": 128
    }  # fmt: skip
