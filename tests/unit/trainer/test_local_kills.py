"""Which processes of a local run are killed. (`--kill-every` with real processes: the soak test.)"""

import types
from pathlib import Path

import pytest

from shoal_trainer.contract import Role
from shoal_trainer.run.processes import LocalJob, LocalRun, Process


def process(role, index):
    popen = types.SimpleNamespace(poll=lambda: None, send_signal=lambda _how: None)
    return Process(role, index, 0, popen, Path("log"), Path("termination"))


def killed_by(job, count=200):
    run = LocalRun(job)
    run.processes = [process(role, index) for role in (Role.PS, Role.WORKER) for index in range(3)]
    victims = [run.kill() for _ in range(count)]
    return {(victim.role, victim.index) for victim in victims}


def test_kill_leaves_out_never_killed_processes():
    spared = frozenset({(Role.PS, 1), (Role.WORKER, 2)})
    everyone = {(role, index) for role in (Role.PS, Role.WORKER) for index in range(3)}
    assert killed_by(LocalJob("m:job", seed=1)) == everyone
    assert killed_by(LocalJob("m:job", seed=1, never_killed=spared)) == everyone - spared


def test_kill_of_never_killed_processes_only_kills_none():
    run = LocalRun(LocalJob("m:job", never_killed=frozenset({(Role.PS, 0)})))
    run.processes = [process(Role.PS, 0)]
    assert run.kill() is None
    assert run.kills == 0


@pytest.mark.parametrize("log", ["", "INFO shoal_trainer.worker.loop: joined: hello 0.1 s, pull 0.1 s\n"])
def test_kill_of_a_worker_that_has_not_started_yet_is_told_once(tmp_path, log):
    now = [0.0]
    run = LocalRun(LocalJob("m:job", kill_every=5.0, kill="worker"), clock=lambda: now[0])
    worker = process(Role.WORKER, 0)
    worker.log = tmp_path / "log"
    worker.log.write_text(log)
    run.processes, run._next_kill = [worker], 5.0
    run.poll()
    assert run.too_often == ""
    now[0] = 5.2
    run.poll()
    assert run.kills == 1
    if log:
        assert run.too_often == ""
        return
    assert (
        "worker-0-0 was killed 5 s after its start, before it had joined: with --kill-every 5"
        in run.too_often
    )
    told, now[0] = run.too_often, 30.0
    run.poll()
    assert run.too_often is told
