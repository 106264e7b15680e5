"""The coordinator's background threads log unexpected errors and continue."""

import socket
import threading
from types import SimpleNamespace

import pytest

from shoal_trainer import background
from shoal_trainer.contract import JobIdentity, SnapshotPolicy
from shoal_trainer.coordinator import rollback
from shoal_trainer.coordinator.fencing import Fencing
from shoal_trainer.coordinator.http import ControlServer
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.coordinator.rollback import Rollback
from shoal_trainer.coordinator.shard_reports import ShardReports
from shoal_trainer.coordinator.snapshotter import Snapshotter
from shoal_trainer.errors import Fenced
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import create_secret_dir

SECONDS = 60


class Coordinator:
    """What the constructors need of one."""

    job = JobIdentity(namespace="n", name="j", uid="uid")


class Calls:
    """Fails the first `failures` times; `enough` is set by the call after them."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.enough = threading.Event()

    def __call__(self, *_, **__):
        if self.errors:
            raise self.errors.pop(0)
        self.enough.set()


@pytest.fixture
def snapshotter():
    policy = SnapshotPolicy.model_construct(every_seconds=0.001, retain=2)
    result = Snapshotter(ShardStore(0, 1, 0), [], Coordinator(), None, None, policy, fenced=lambda _: None)
    yield result
    result.stop()


def test_snapshotter_survives_an_unexpected_error(snapshotter, monkeypatch, caplog):
    take = Calls(RuntimeError("can't start new thread"), KeyError("x"))
    monkeypatch.setattr(snapshotter, "take", take)
    snapshotter.start()
    assert take.enough.wait(SECONDS)
    assert "can't start new thread" in caplog.text


def test_reconciler_survives_an_unexpected_error(monkeypatch, caplog):
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.001)
    instance = Reconciler(ShardStore(0, 2, 0), [object()], Coordinator())
    compare = Calls(RuntimeError("can't start new thread"))
    monkeypatch.setattr(instance, "compare", compare)
    instance.start()
    instance.schedule()
    assert compare.enough.wait(SECONDS)
    assert "can't start new thread" in caplog.text
    instance.stop()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), Fenced("another one")])
def test_rollback_survives_an_unexpected_error(monkeypatch, caplog, error):
    monkeypatch.setattr(rollback, "RETRY_SECONDS", 0.001)
    shard = ShardStore(0, 2, 0)
    shard.history.generation = 1

    class Other:
        roll_back = Calls(error)

    instance = Rollback(shard, {1: Other()}, Coordinator(), None, SimpleNamespace(), fenced=lambda _: None)
    instance.start()
    assert Other.roll_back.enough.wait(SECONDS)
    assert str(error) in caplog.text
    instance.stop()


def test_fencing_survives_an_unexpected_error(monkeypatch, caplog):
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.001)

    class Other:
        fence = Calls(RuntimeError("can't start new thread"))

    instance = Fencing(ShardStore(0, 2, 0).workers, {1: Other()})
    instance.start()
    instance.schedule()
    assert Other.fence.enough.wait(SECONDS)
    assert "can't start new thread" in caplog.text
    instance.stop()


def test_reports_survive_an_unexpected_error(monkeypatch, caplog):
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr("shoal_trainer.coordinator.shard_reports.ASK_EVERY_SECONDS", 0.001)

    class Other:
        report = Calls(RuntimeError("can't start new thread"))

    instance = ShardReports({1: Other()})
    instance.start()
    assert Other.report.enough.wait(SECONDS)
    assert "can't start new thread" in caplog.text
    instance.stop()


def test_control_server_logs_a_refused_thread_and_continues(tmp_path, monkeypatch, caplog):
    """A pod's process limit also counts threads."""
    credentials = create_secret_dir(tmp_path / "secret")
    control = ControlServer(credentials, {}, host="127.0.0.1")
    control.start()
    start, refused = threading.Thread.start, []

    def limited(self):
        if self.name.startswith("http-") and not refused:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    try:
        with socket.create_connection(("127.0.0.1", control.port), timeout=SECONDS) as sock:
            assert sock.recv(1) == b""
        assert "can't start new thread" in caplog.text
        with (
            socket.create_connection(("127.0.0.1", control.port), timeout=SECONDS) as sock,
            credentials.client_context().wrap_socket(sock) as secured,
        ):
            secured.sendall(b"GET /nothing HTTP/1.1\r\n\r\n")
            assert secured.recv(12) == b"HTTP/1.1 400"
    finally:
        control.close()
