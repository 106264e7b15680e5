"""Task outputs: whole files with digests, and a model that is published atomically and once."""

import errno
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal_trainer.contract import Outcome, TerminationMessage
from shoal_trainer.coordinator import artefacts as artefacts_module
from shoal_trainer.coordinator.artefacts import MANIFEST, Artefacts
from shoal_trainer.errors import Fenced, Overtaken, ProtocolError, Unreachable
from shoal_trainer.snapshot.storage import LocalStorage

TOKEN, OTHER = (0, 1), (1, 1)
OUTCOME = TerminationMessage(outcome=Outcome.SUCCEEDED, message="all epochs are complete", step=7)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "run")


@pytest.fixture
def artefacts(storage):
    return Artefacts(storage, "uid")


def cut_off():
    yield b"half of "
    raise Unreachable("the upload ended early")


def files_in(storage):
    return sorted(str(path.relative_to(storage.root)) for path in storage.root.rglob("*") if path.is_file())


def test_model_is_published_with_its_manifest(artefacts, storage):
    artefacts.receive(TOKEN, "export", "model.keras", iter([b"ker", b"as"]))
    artefacts.receive(TOKEN, "export", "saved_model/saved_model.pb", iter([]))
    assert artefacts.published() is None
    artefacts.check(TOKEN, ("model.keras", "saved_model/saved_model.pb"))
    outcome = artefacts.publish_model(TOKEN, OUTCOME)
    assert files_in(storage) == [MANIFEST, "model/model.keras", "model/saved_model/saved_model.pb"]
    assert storage.read("model/model.keras") == b"keras"
    held = json.loads(storage.read(MANIFEST))
    assert [(f["name"], f["size"], f["sha256"]) for f in held["files"]] == [
        ("model.keras", 5, hashlib.sha256(b"keras").hexdigest()),
        ("saved_model/saved_model.pb", 0, hashlib.sha256(b"").hexdigest()),
    ]
    assert (outcome.model_uri, outcome.message) == (f"{storage.uri}/model", OUTCOME.message)
    assert artefacts.published() == outcome
    assert Artefacts(storage, "uid").published() == outcome  # a restarted server reports the same outcome


def test_digest_depends_on_contents_and_names(tmp_path):
    def digest(folder, name, content):
        artefacts = Artefacts(LocalStorage(tmp_path / folder), "uid")
        artefacts.receive(TOKEN, "export", name, iter([content]))
        return artefacts.publish_model(TOKEN, OUTCOME).model_digest

    one = digest("a", "model.keras", b"x")
    assert digest("b", "model.keras", b"x") == one
    assert len({one, digest("c", "model.keras", b"y"), digest("d", "model.h5", b"x")}) == 3


def test_second_export_returns_the_published_outcome(artefacts, storage):
    first = Artefacts(storage, "uid")
    artefacts.receive(TOKEN, "export", "model.keras", iter([b"one"]))
    outcome = artefacts.publish_model(TOKEN, OUTCOME)
    first.receive(OTHER, "export", "model.keras", iter([b"one"]))
    assert first.publish_model(OTHER, OUTCOME.model_copy(update={"step": 8})) == outcome


class BegunMeanwhile:
    """A lock that another request takes between a look at it and the attempt to take it."""

    def locked(self):
        return False

    def acquire(self, blocking=True):
        assert not blocking, "it waits for the storage"
        return False

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        pass


def test_publication_waits_for_no_other_one(artefacts):
    """Its thread would be held for as long as the storage takes, and the worker asks again."""
    with artefacts.publishing():
        pass
    artefacts._publishing = BegunMeanwhile()
    with pytest.raises(Unreachable, match="being published"), artefacts.publishing():
        pass


def test_model_of_another_run_is_fenced(artefacts, storage):
    other = Artefacts(storage, "another uid")
    other.receive(TOKEN, "export", "model.keras", iter([b"one"]))
    other.publish_model(TOKEN, OUTCOME)
    assert artefacts.published() is None
    with pytest.raises(Fenced, match="another parameter server"):
        artefacts.publish_model(TOKEN, OUTCOME)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("export", "manifest.json"), ("callbacks", "model/model.keras"), ("evaluate", "snapshots/x")],
)
def test_task_output_outside_its_folder_is_refused(artefacts, storage, kind, name):
    with pytest.raises(ProtocolError):
        artefacts.receive(TOKEN, kind, name, iter([b"x"]))
    assert not storage.root.exists()


def test_callbacks_overwrite_their_logs(artefacts, storage):
    artefacts.receive(TOKEN, "callbacks", "logs/history.csv", iter([b"a"]))
    artefacts.receive(OTHER, "callbacks", "logs/history.csv", iter([b"a", b"b"]))  # after the next epoch
    assert storage.read("logs/history.csv") == b"ab"


def test_truncated_upload_leaves_no_file_and_is_not_counted(artefacts, storage):
    with pytest.raises(Unreachable, match="ended early"):
        artefacts.receive(TOKEN, "export", "model.keras", cut_off())
    assert files_in(storage) == []
    with pytest.raises(ProtocolError, match=r"model\.keras was not uploaded"):
        artefacts.check(TOKEN, ("model.keras",))
    artefacts.receive(TOKEN, "export", "model.keras", iter([b"whole"]))
    artefacts.check(TOKEN, ("model.keras",))


def names_in_manifest(storage):
    return [file["name"] for file in json.loads(storage.read(MANIFEST))["files"]]


def test_files_of_another_token_do_not_count(artefacts, storage):
    artefacts.receive(TOKEN, "export", "model.keras", iter([b"x"]))
    with pytest.raises(ProtocolError, match="was not uploaded"):
        artefacts.check(OTHER, ("model.keras",))
    artefacts.receive(OTHER, "export", "new.keras", iter([b"y"]))
    artefacts.publish_model(OTHER, OUTCOME)
    assert names_in_manifest(storage) == ["new.keras"]


def test_late_upload_of_a_replaced_worker_is_not_published(artefacts, storage):
    def slow():
        yield b"begun before, "
        artefacts.receive(OTHER, "export", "model.keras", iter([b"the successor's"]))
        yield b"ended after"

    artefacts.receive(TOKEN, "export", "other.keras", slow())
    artefacts.check(OTHER, ("model.keras",))
    artefacts.publish_model(OTHER, OUTCOME)
    assert names_in_manifest(storage) == ["model.keras"]


def test_file_that_is_sent_again_is_not_written_again(artefacts, storage, monkeypatch):
    """The answer to the first was lost, or came too late."""
    write, written = storage.write, []
    monkeypatch.setattr(storage, "write", lambda *call: (written.append(call[0]), write(*call)))
    for _ in range(3):
        artefacts.receive(TOKEN, "export", "model.keras", iter([b"mo", b"del"]))
    assert written == ["model/model.keras"]
    with pytest.raises(Overtaken):
        artefacts.receive(TOKEN, "export", "model.keras", iter([b"model"]), reassigned)
    with pytest.raises(Unreachable, match=r"model\.keras is not what was sent before"):
        artefacts.receive(TOKEN, "export", "model.keras", iter([b"other"]))
    with pytest.raises(ProtocolError, match="was not uploaded"):
        artefacts.check(TOKEN, ("model.keras",))
    artefacts.receive(TOKEN, "export", "model.keras", iter([b"other"]))
    artefacts.check(TOKEN, ("model.keras",))
    assert storage.read("model/model.keras") == b"other"


def reassigned():
    raise Overtaken("another worker has the task")


def test_file_that_is_sent_again_waits_for_the_first(artefacts, storage):
    """On a slow volume both would be written, and each would make the other slower."""
    begun, go, together = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go.wait(60)
        together.append(len(list(storage.root.rglob("*.part"))))
        yield b"model"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(artefacts.receive, TOKEN, "export", "model.keras", slow())
        assert begun.wait(60)
        second = pool.submit(artefacts.receive, TOKEN, "export", "model.keras", iter([b"model"]))
        artefacts.receive(TOKEN, "export", "other.keras", iter([b"another file waits for none"]))
        assert not second.done()
        go.set()
        first.result(60)
        second.result(60)
    assert together == [1]
    artefacts.check(TOKEN, ("model.keras", "other.keras"))


def test_file_whose_first_writer_hangs_says_so(artefacts, monkeypatch):
    monkeypatch.setattr(artefacts_module, "AGAIN_SECONDS", 0.0)

    def slow():
        with pytest.raises(Unreachable, match=r"model\.keras is still being written"):
            artefacts.receive(TOKEN, "export", "model.keras", iter([b"model"]))
        yield b"model"

    artefacts.receive(TOKEN, "export", "model.keras", slow())


def test_upload_records_do_not_grow_with_tasks(artefacts, storage):
    for n in range(9):
        artefacts.receive((0, n), "callbacks", f"logs/{n}.h5", iter([b"x"]))
        artefacts.check((0, n), (f"logs/{n}.h5",))
        artefacts.check((0, n), (f"logs/{n}.h5",))  # the answer to the first was lost
    assert list(artefacts._files) == ["logs/8.h5"]
    assert files_in(storage) == [f"logs/{n}.h5" for n in range(9)]


def test_upload_after_a_full_disk_succeeds(artefacts, storage, monkeypatch):
    real = storage._write_temporary

    def full(path, chunks):
        with real(path, [next(iter(chunks))]):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "_write_temporary", full)
    with pytest.raises(Unreachable, match="No space left on device"):
        artefacts.receive(TOKEN, "export", "model.keras", iter([b"x"]))
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match="was not uploaded"):
        artefacts.check(TOKEN, ("model.keras",))
    artefacts.receive(TOKEN, "export", "model.keras", iter([b"x"]))
    artefacts.check(TOKEN, ("model.keras",))
