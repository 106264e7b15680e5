"""Events: created once, counted when repeated, and never a reason to fail."""

from __future__ import annotations

from shoal.controller.events import Recorder
from shoal.errors import Unavailable
from shoal.policy.model import Event
from tests.unit.controller.clusters import NOW, Rig

DISRUPTED = Event("Warning", "WorkerDisrupted", "worker digits-worker-0-0 was disrupted")


def events(rig: Rig) -> list[dict[str, object]]:
    return [o for path, o in rig.cluster.objects.items() if "/events/" in path]


async def test_repeated_event_is_counted() -> None:
    rig = Rig()
    job = rig.apply()
    for _ in range(3):
        await rig.recorder.record(job, [DISRUPTED, DISRUPTED])
    [event] = events(rig)
    assert (event["reason"], event["count"], event["type"]) == ("WorkerDisrupted", 3, "Warning")
    assert event["involvedObject"]["uid"] == job.metadata.uid  # type: ignore[index]
    await rig.recorder.record(job, [Event("Warning", "WorkerDisrupted", "another one")])
    assert len(events(rig)) == 2


async def test_repeated_event_after_a_restart_is_the_same_object() -> None:
    rig = Rig()
    job = rig.apply()
    await rig.recorder.record(job, [DISRUPTED])
    await Recorder(rig.cluster, reporter="next", wall=lambda: NOW).record(job, [DISRUPTED])
    assert len(events(rig)) == 1


async def test_expired_event_is_created_again() -> None:
    rig = Rig()
    job = rig.apply()
    for _ in range(2):
        await rig.recorder.record(job, [DISRUPTED])
    for path in [path for path in rig.cluster.objects if "/events/" in path]:
        del rig.cluster.objects[path]  # expired
    await rig.recorder.record(job, [DISRUPTED])
    assert [event["count"] for event in events(rig)] == [1]
    await rig.recorder.record(job, [DISRUPTED])
    assert [event["count"] for event in events(rig)] == [2]


async def test_failed_event_is_not_an_error() -> None:
    rig = Rig()
    job = rig.apply()
    rig.cluster.fault = lambda _method, _path: Unavailable("not now")
    await rig.recorder.record(job, [DISRUPTED])
    assert not events(rig)


async def test_long_event_message_is_truncated() -> None:
    rig = Rig()
    job = rig.apply()
    await rig.recorder.record(job, [Event("Normal", "Failed", "x" * 5000)])
    [event] = events(rig)
    assert len(str(event["message"])) == 1024
