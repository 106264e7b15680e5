"""The coordinator's background threads log what they did not expect, and go on."""

import threading

import pytest

from shoal_trainer.contract import JobIdentity, SnapshotPolicy
from shoal_trainer.coordinator import reconciler, rollback
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.coordinator.rollback import RollBack
from shoal_trainer.coordinator.snapshotter import Snapshotter
from shoal_trainer.errors import Fenced
from shoal_trainer.ps.shard import ShardStore

SECONDS = 20


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
    made = Snapshotter(ShardStore(0, 1, 0), [], Coordinator(), None, None, policy, fenced=lambda _: None)
    yield made
    made.stop()


def test_snapshotter_survives_an_unexpected_error(snapshotter, monkeypatch, caplog):
    take = Calls(RuntimeError("can't start new thread"), KeyError("x"))
    monkeypatch.setattr(snapshotter, "take", take)
    snapshotter.start()
    assert take.enough.wait(SECONDS)
    assert "can't start new thread" in caplog.text


def test_reconciler_survives_an_unexpected_error(monkeypatch, caplog):
    monkeypatch.setattr(reconciler, "RETRY_SECONDS", 0.001)
    made = Reconciler(ShardStore(0, 2, 0), [object()], Coordinator())
    look = Calls(RuntimeError("can't start new thread"))
    monkeypatch.setattr(made, "look", look)
    made.start()
    made.due()
    assert look.enough.wait(SECONDS)
    assert "can't start new thread" in caplog.text
    made.stop()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), Fenced("another one")])
def test_rollback_survives_an_unexpected_error(monkeypatch, caplog, error):
    monkeypatch.setattr(rollback, "RETRY_SECONDS", 0.001)
    shard = ShardStore(0, 2, 0)
    shard.generation = 1

    class Other:
        roll_back = Calls(error)

    made = RollBack(shard, {1: Other()}, Coordinator(), None, None, fenced=lambda _: None)
    made.start()
    assert Other.roll_back.enough.wait(SECONDS)
    assert str(error) in caplog.text
    made.stop()
