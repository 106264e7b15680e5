"""Events: said once, counted when they are said again, and never a reason to fail."""

from __future__ import annotations

from shoal.controller.events import Recorder
from shoal.errors import Unavailable
from shoal.policy.model import Event
from tests.unit.controller.clusters import NOW, Rig

LOST = Event("Warning", "WorkerDisrupted", "worker digits-worker-0-0 was disrupted")


def events(rig: Rig) -> list[dict[str, object]]:
    return [o for path, o in rig.cluster.objects.items() if "/events/" in path]


async def test_said_again_it_is_counted() -> None:
    rig = Rig()
    job = rig.apply()
    for _ in range(3):
        await rig.recorder.record(job, [LOST, LOST])
    [said] = events(rig)
    assert (said["reason"], said["count"], said["type"]) == ("WorkerDisrupted", 3, "Warning")
    assert said["involvedObject"]["uid"] == job.metadata.uid  # type: ignore[index]
    await rig.recorder.record(job, [Event("Warning", "WorkerDisrupted", "another one")])
    assert len(events(rig)) == 2


async def test_said_again_after_a_restart_it_is_the_same_event() -> None:
    rig = Rig()
    job = rig.apply()
    await rig.recorder.record(job, [LOST])
    await Recorder(rig.cluster, reporter="next", wall=lambda: NOW).record(job, [LOST])
    assert len(events(rig)) == 1


async def test_what_kubernetes_has_forgotten_is_said_as_new() -> None:
    rig = Rig()
    job = rig.apply()
    for _ in range(2):
        await rig.recorder.record(job, [LOST])
    for path in [path for path in rig.cluster.objects if "/events/" in path]:
        del rig.cluster.objects[path]  # its time to live is over
    await rig.recorder.record(job, [LOST])
    assert [said["count"] for said in events(rig)] == [1]
    await rig.recorder.record(job, [LOST])
    assert [said["count"] for said in events(rig)] == [2]


async def test_losing_one_is_no_error() -> None:
    rig = Rig()
    job = rig.apply()
    rig.cluster.fault = lambda _method, _path: Unavailable("not now")
    await rig.recorder.record(job, [LOST])
    assert not events(rig)


async def test_a_long_message_is_cut() -> None:
    rig = Rig()
    job = rig.apply()
    await rig.recorder.record(job, [Event("Normal", "Failed", "x" * 5000)])
    [said] = events(rig)
    assert len(str(said["message"])) == 1024
