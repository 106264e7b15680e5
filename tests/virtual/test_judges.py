"""The judges of the virtual chaos and of the scripts see each rule that is broken, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tests.virtual.cluster import Machine, Process
from tests.virtual.judge import MOST_REFUSED, Judge
from tests.virtual.loop import now, play
from tests.virtual.script import watch_slots
from tests.virtual.server import Sent
from tests.virtual.test_every_field import End
from tests.virtual.trainer import Truth
from tests.virtual.world import World

JOB = ("trainingjobs", "team", "digits")
OTHER = ("trainingjobs", "other", "digits")
SERVER = ("pods", "team", "digits-ps-0-0")


class Scene:
    """A job with one server, and a leader."""

    def __init__(self) -> None:
        self.world = World(lambda _uid: Truth(samples=1e9))
        self.judge = Judge(self.world, None)
        watch_slots(self.world)
        for name in ("safe-0", "safe-1"):
            self.world.cluster.add(Machine(name, {}))
        self.world.server.store(JOB, {"spec": {}, "status": {"phase": "Running"}})
        self.world.server.store(("leases", "default", "shoal"), {"spec": {"holderIdentity": "a"}})
        self.pod(SERVER[2])
        self.process = self.run(0)

    def pod(self, name: str) -> None:
        body = {"metadata": {"ownerReferences": [{"uid": "job"}]}, "status": {"phase": "Running"}}
        self.world.server.store(("pods", "team", name), body)

    def run(self, incarnation: int, uid: str = "") -> Process:
        machine = self.world.cluster.machines["safe-0"]
        key, uid = ("pods", "team", f"digits-ps-0-{incarnation}"), uid or str(incarnation)
        process = Process(key, uid, machine, "ps", 0, incarnation, "job", 0.0, "", 0.0, begun=True)
        self.world.cluster.processes[uid] = process
        return process

    def sends(self, who: str = "a", verb: str = "DELETE", status: int = 200) -> None:
        self.world.server.sent.append(Sent(now(), who, verb, SERVER, "", status))

    def is_refused(self, times: int) -> None:
        for _ in range(times):
            self.sends(verb="POST", status=403)

    def loses(self, number: int, job: tuple[str, str, str] = JOB, *, crash: bool = False) -> None:
        """So many workers of a job, each another one: to the platform, or by their own fault."""
        judge, uid = self.judge, self.world.server.objects[job]["metadata"]["uid"]
        lost = (judge.crashed if crash else judge.struck)[uid]
        lost |= {f"{crash}-{each}" for each in range(number)}

    def counts(self, failures: int = 0, disruptions: int = 0, withdrawn: int = 0) -> None:
        restarts = {"failures": failures, "disruptions": disruptions, "withdrawn": withdrawn}
        self.status(restarts=restarts)

    def status(self, **status: Any) -> None:
        known = copy.deepcopy(self.world.server.objects[JOB])
        self.world.server.store(JOB, {**known, "status": {**known["status"], **status}})

    def suspend(self, job: tuple[str, str, str]) -> None:
        self.world.edit(job[2], job[1], suspend=True)

    def service(self, incarnation: int) -> None:
        body = {"spec": {"selector": {"shoal.dev/incarnation": str(incarnation)}}}
        self.world.server.store(("services", "team", "digits-ps-0"), body)

    def broken(self) -> list[str]:
        self.judge.look()
        return [*self.judge.broken, *map(str, self.world.faults_of_the_operator)]


Change = Callable[[Scene], object]


def judged(*changes: Change) -> list[str]:
    async def story() -> list[str]:
        scene = Scene()
        for change in changes:
            change(scene)
        return scene.broken()

    return play(story)


def silence(scene: Scene, names: tuple[str, ...]) -> None:
    for name in names:
        scene.world.cluster.disconnect(name)


ENDED: Change = lambda s: setattr(s.process, "end", (1, ""))  # noqa: E731
SUSPENDED: Change = lambda s: s.world.edit(suspend=True)  # noqa: E731
ANOTHER: Change = lambda s: s.run(1)  # noqa: E731
TWO_JOBS: Change = lambda s: s.world.server.store(OTHER, {"spec": {}, "status": {}})  # noqa: E731
ENDING: Change = lambda s: s.world.server.namespaces.update(team="Terminating")  # noqa: E731
CRASHED: Change = lambda s: s.loses(2, crash=True)  # noqa: E731


@pytest.mark.parametrize(
    "changes",
    [
        (),
        (lambda s: s.sends(verb="POST"),),
        (ENDED, Scene.sends),
        (SUSPENDED, Scene.sends),
        (ANOTHER, Scene.sends),
        (lambda s: silence(s, ("safe-0",)), Scene.sends),
        (CRASHED, lambda s: s.counts(failures=1)),
        (CRASHED, lambda s: s.loses(1), lambda s: s.counts(failures=1, disruptions=2)),
        (lambda s: s.loses(1), lambda s: s.counts(disruptions=2, withdrawn=1)),
        (lambda s: s.service(0), lambda s: s.service(1)),
        (lambda s: s.is_refused(MOST_REFUSED + 1),),
        (ENDING, lambda s: s.is_refused(MOST_REFUSED)),
    ],
    ids=[
        "peace",
        "written",
        "ended",
        "suspended",
        "newer",
        "silent",
        "counted",
        "both counted",
        "withdrawn",
        "turned",
        "refused",
        "namespace",
    ],
)
def test_what_is_allowed(changes: tuple[Change, ...]) -> None:
    assert judged(*changes) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((lambda s: s.sends("b", "POST"),), "b wrote POST"),
        ((Scene.sends,), "healthy server digits-ps-0-0 deleted"),
        ((lambda s: silence(s, ("safe-0", "safe-1")), Scene.sends), "healthy server digits-ps-0-0 deleted"),
        ((lambda s: s.run(0, "again"),), "two processes"),
        ((lambda s: s.world.server.remove(SERVER), lambda s: s.pod(SERVER[2])), "made a second time"),
        (
            (CRASHED, lambda s: s.counts(failures=2), lambda s: s.counts(failures=1)),
            "a counter goes from (2, 0, 0) to (1, 0, 0)",
        ),
        (
            (lambda s: s.pod("digits-ps-0-1"), lambda s: s.service(1), lambda s: s.service(0)),
            "goes from 1 back to 0",
        ),
        ((lambda s: s.status(phase="Starting", workers={"desired": 1}),), "the phase goes from Running"),
        ((CRASHED, lambda s: s.counts(failures=3)), "3 failures and 0 disruptions of digits"),
        ((lambda s: s.loses(2), lambda s: s.counts(failures=1)), "of 0 and 2 that were struck"),
        ((CRASHED, lambda s: s.loses(1), lambda s: s.counts(1, 3)), "1 failures and 3 disruptions of digits"),
        ((TWO_JOBS, lambda s: s.loses(1, OTHER), lambda s: s.counts(disruptions=1)), "of 0 and 0 that were"),
        ((ENDING, lambda s: s.is_refused(MOST_REFUSED + 1)), "were refused in team, which ends"),
        (
            (TWO_JOBS, lambda s: s.suspend(OTHER), Scene.sends),
            "healthy server digits-ps-0-0 deleted",
        ),
    ],
    ids=[
        "no lease",
        "healthy",
        "all silent",
        "two processes",
        "name again",
        "counter",
        "service",
        "phase",
        "failures",
        "no failure",
        "disruptions",
        "another job's",
        "hot loop",
        "another is suspended",
    ],
)
def test_what_is_broken(changes: tuple[Change, ...], words: str) -> None:
    (broken,) = judged(*changes)
    assert words in broken


WHOLE = {"phase": "Running", "objects": 2, "pods": 4, "workers": 3, "observed": True, "lacks": []}


def end(*because: str, failed: bool = False, **shape: object) -> End:
    return End({}, {**WHOLE, **shape}, frozenset(because), failed, "")


@pytest.mark.parametrize(
    ("told", "fresh", "back", "same"),
    [
        (end(), end(), False, True),
        (end(pods=3, workers=2), end(), False, False),
        (end("NotFeasible", pods=3, workers=2), end("NotFeasible"), False, True),
        (end("NotFeasible", pods=3, workers=2), end(), False, False),
        (end("NotFeasible", phase="Pending"), end("NotFeasible"), False, False),
        (end("NotFeasible", pods=3), end("NotFeasible"), True, False),
        (end("PoolNotFound"), end("PoolNotFound", phase="Pending", pods=0), False, True),
        (end("PoolNotFound", lacks=["a Service"]), end("PoolNotFound"), False, False),
        (end("PoolNotFound", observed=False), end("PoolNotFound"), False, False),
        (end("DeadlineExceeded", failed=True, phase="Failed", pods=0, objects=1), end(), True, True),
        (end("DeadlineExceeded", phase="Failed"), end(), False, False),
    ],
)
def test_a_reason_explains_what_it_is_a_reason_of(
    monkeypatch: pytest.MonkeyPatch, told: End, fresh: End, back: bool, same: bool
) -> None:
    monkeypatch.setattr("tests.virtual.test_every_field.fresh", lambda _spec: fresh)
    with nullcontext() if same else pytest.raises(AssertionError):
        told.compare(back=back)
