"""The coordinator's background threads log unexpected errors and continue."""

import logging
import socket
import threading
from types import SimpleNamespace

import pytest

from shoal_trainer import background
from shoal_trainer.contract import JobIdentity, ShardReport, SnapshotPolicy
from shoal_trainer.coordinator.http import ControlServer
from shoal_trainer.coordinator.other_shard import OtherShard
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.coordinator.snapshotter import Snapshotter
from shoal_trainer.errors import Fenced
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import create_secret_dir

SECONDS = 120


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
    instance.wake()
    assert compare.enough.wait(SECONDS)
    assert "can't start new thread" in caplog.text
    instance.stop()


@pytest.mark.parametrize("request_of", ["fence", "report", "roll_back"])
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), Fenced("another one")])
def test_what_another_shard_is_told_survives_an_unexpected_error(monkeypatch, caplog, error, request_of):
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.001)
    caplog.set_level(logging.DEBUG)
    other = SimpleNamespace(fence=Calls(), report=lambda: ShardReport(index=1, epoch=0), roll_back=Calls())
    fails = Calls(error)
    failing = lambda *_: fails() or ShardReport(index=1, epoch=0)  # noqa: E731
    setattr(other, request_of, failing)
    shard = ShardStore(0, 2, 0)
    shard.history.generation = 1
    instance = OtherShard(shard, 1, other)
    instance.start()
    assert fails.enough.wait(SECONDS)
    assert str(error) in caplog.text
    instance.stop()


def test_control_server_logs_a_refused_thread_and_continues(tmp_path, monkeypatch, caplog):
    """A pod's process limit also counts threads."""
    credentials = create_secret_dir(tmp_path / "secret")
    control = ControlServer(credentials, {}, host="127.0.0.1")
    control.start()
    start, refused = threading.Thread.start, []

    def limited(self):
        if self.name.startswith("control-") and not refused:
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
            assert secured.recv(12) == b"HTTP/1.1 401"
    finally:
        control.close()
