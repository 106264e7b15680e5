"""How a parameter server stops: SIGTERM, the marker of an unsaved shard, and a rollback that is impossible."""

import math
import signal
import threading
import time

import pytest

from shoal_trainer.contract import EXIT_DRAINED, Role, Shard
from shoal_trainer.coordinator.protocol import DataSpec, Join
from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.serve import ParameterServer, stop_on_sigterm
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig
from tests.unit.trainer.configs import pod_config

MODEL = ModelSpec(fingerprint="0" * 64, parameters=4, optimizer=OptimizerConfig(name="delta", batch_size=2))


@pytest.fixture
def server(tmp_path):
    """PS 0 of one, or PS 1 of two: with parameters and the marker, not serving."""

    def make(index):
        servers = (Shard(host="127.0.0.1"),) * (index + 1)
        config = pod_config(Role.PS, tmp_path, index=index, parameter_servers=servers, batch_size=2)
        server = ParameterServer(config)
        server.shard.workers.connect(0, 0)
        server.shard.hello(0, 0, MODEL)
        server.shard.offer(0, 0, aligned(server.shard.size))
        if index == 0:
            server.service.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=2), batch_size=2))
        server._create_marker()
        assert server._marker.exists()
        return server

    return make


@pytest.fixture
def sigterm():
    """Restores the handler of SIGTERM."""
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


def stopped(server):
    """Stop the server and let it end."""
    server.stop()
    assert server._serve() == EXIT_DRAINED
    return server


@pytest.mark.usefixtures("sigterm")
def test_sigterm_while_the_main_thread_holds_the_lock_of_the_event_stops_the_server(server):
    started = server(0)
    stop_on_sigterm(started)
    with started._stop._cond:  # held at times within `Event.wait`
        signal.raise_signal(signal.SIGTERM)
        handled = time.monotonic()
        assert not started._stop.is_set()
    assert started._stop.wait(20)
    assert started._stopped_at <= handled


@pytest.mark.usefixtures("sigterm")
def test_sigterm_ends_a_server_that_waits(server):
    started, main = server(0), threading.main_thread().ident
    stop_on_sigterm(started)
    sender = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGTERM))
    sender.start()
    assert started._serve() == EXIT_DRAINED
    sender.join()
    assert not started._marker.exists()


def test_final_snapshot_removes_the_marker(server):
    assert not stopped(server(0))._marker.exists()


def test_server_without_changes_since_its_last_snapshot_removes_the_marker(server):
    started = server(0)
    assert started.service.snapshotter.take().number == 1
    assert not stopped(started)._marker.exists()
    assert started.service.snapshotter.last.number == 1


def test_failed_final_snapshot_keeps_the_marker(server, monkeypatch):
    started = server(0)

    def unreachable():
        raise Unreachable("the storage is unreachable")

    monkeypatch.setattr(started.service.snapshotter, "take", unreachable)
    started.stop(at=time.monotonic() - started.config.grace_seconds)
    assert stopped(started)._marker.exists()


def test_final_snapshot_is_tried_again_while_there_is_time(server, monkeypatch):
    started, failures = server(0), [Unreachable("the storage is unreachable"), OSError("too busy")]
    take = started.service.snapshotter.take

    def busy():
        if failures:
            raise failures.pop()
        return take()

    monkeypatch.setattr(started.service.snapshotter, "take", busy)
    assert not stopped(started)._marker.exists()
    assert started.service.snapshotter.last.number == 1


def test_server_that_cannot_take_a_snapshot_yet_keeps_the_marker(server, monkeypatch):
    started = server(0)
    monkeypatch.setattr(started.service.snapshotter, "take", lambda: None)
    assert stopped(started)._marker.exists()


@pytest.mark.parametrize(("saved", "kept"), [(-math.inf, True), (0.0, True), (math.inf, False)])
def test_other_shard_keeps_the_marker_unless_it_has_written_its_part(server, monkeypatch, saved, kept):
    started = server(1)
    monkeypatch.setattr(started, "_coordinator_serves", lambda: False)
    started._follower.saved = saved
    assert stopped(started)._marker.exists() == kept


def test_shard_that_cannot_roll_back_ends_the_job(server):
    started = server(1)
    started._follower.failed = UserError("the file is damaged")
    with pytest.raises(UserError, match="the file is damaged"):
        started._serve()
