"""What a worker's process prepares before it imports the user's code: threads, and no search for garbage."""

import gc
import os
from types import SimpleNamespace

import pytest

from shoal_trainer.contract import Role
from shoal_trainer.errors import UserError
from shoal_trainer.local import LocalJob, LocalRun
from shoal_trainer.worker import process
from shoal_trainer.worker.hardware import THREADS_ENV


def test_threads_and_garbage_are_settled_before_the_users_code_is_imported(monkeypatch):
    monkeypatch.setenv(THREADS_ENV, "")  # what is set below is undone after the test
    monkeypatch.delenv(THREADS_ENV)
    monkeypatch.setattr("shoal_trainer.worker.hardware.cores", lambda: 3)
    seen = []

    def load(_entrypoint, _args):
        seen.append((os.environ[THREADS_ENV], gc.isenabled()))
        raise UserError("there is no such module")

    monkeypatch.setattr("shoal_trainer.worker.entrypoint.load", load)
    gc.unfreeze()
    try:
        with pytest.raises(UserError):
            process._work(SimpleNamespace(entrypoint="a:b", args={}), None, 0.0)
        assert seen == [("3", False)]
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_workers_of_a_local_run_share_the_machine(monkeypatch):
    monkeypatch.delenv(THREADS_ENV, raising=False)
    monkeypatch.setattr("shoal_trainer.worker.hardware.cores", lambda: 6)
    threads = []

    def start(_command, *, env, **_):
        threads.append(env[THREADS_ENV])
        return SimpleNamespace(poll=lambda: 0, wait=lambda: 0, pid=-1)

    monkeypatch.setattr("shoal_trainer.local.subprocess.Popen", start)
    with LocalRun(LocalJob(entrypoint="a:b", workers=3)) as run:
        assert [process.role for process in run.processes] == [Role.PS, *[Role.WORKER] * 3]
    assert threads == ["2"] * 4
