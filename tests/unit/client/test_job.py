"""A job on the cluster: waits that outlive the API server's absence, newer objects, words that look like markup."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.api.training_job import TrainingJob
from shoal.client.job import WATCH_SECONDS, Job, JobFailed
from shoal.errors import NotFound, Refused, Unavailable, UsageError
from shoal_trainer.contract import EPOCH_LINE, EpochReport
from tests.unit.client.fake_api import FakeApi, client_of
from tests.unit.policy.build import NOW, job_manifest, pod_manifest, stamp

PATH = "/apis/shoal.dev/v1alpha1/namespaces/team/trainingjobs/digits"
TENSORFLOW = (
    "incompatible: In[0]: [32,10] [Op:MatMul] on [/job:localhost/replica:0/task:0/device:CPU:0] [bold]:0:"
)


def manifest(phase: str, version: str, *, message: str = "", **status: Any) -> dict[str, Any]:
    kind = {"Succeeded": "Complete", "Failed": "Failed"}.get(phase, "Running")
    condition = {
        "type": kind,
        "status": "True",
        "reason": phase,
        "message": message,
        "lastTransitionTime": stamp(NOW),
    }
    made = job_manifest() | {"status": {"phase": phase, "conditions": [condition], **status}}
    made["metadata"] = {**made["metadata"], "resourceVersion": version}
    return made


@pytest.fixture
def api() -> FakeApi:
    found = FakeApi()
    found.objects[PATH] = manifest("Running", "1")
    return found


def test_a_watch_outlives_the_absence_of_the_api_server(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 9:
            api.objects[PATH] = manifest("Succeeded", "2")

    api.away = [False, *[True] * 8]
    with caplog.at_level(logging.WARNING):
        seen = [each.status.phase for each in Job(api, "digits").watch(sleep=sleep, clock=lambda: 0.0)]
    assert seen == ["Running", "Succeeded"]
    assert slept[1:] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]  # the first: a watch that ended at once
    assert [record.message.count("does not answer") for record in caplog.records] == [1]


def test_a_watch_that_finds_nobody_ends(api: FakeApi) -> None:
    api.away = [True]
    with pytest.raises(Unavailable):
        list(Job(api, "digits").watch())


def test_a_wait_ends_in_time_while_nobody_answers(api: FakeApi) -> None:
    clock = 0.0

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    api.away = [False, *[True] * 99]
    assert [
        each.status.phase for each in Job(api, "digits").watch(seconds=60, sleep=sleep, clock=lambda: clock)
    ] == ["Running"]
    assert clock == 60


def test_a_wait_says_once_what_only_a_person_can_mend(api: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a script waits for ever, and its log does not say for what."""

    def told(version: str, kind: str, reason: str, message: str) -> dict[str, Any]:
        made = manifest("Pending", version)
        [condition] = made["status"]["conditions"]
        made["status"]["conditions"] = [condition | {"type": kind, "reason": reason, "message": message}]
        return made

    api.changes = [
        told("2", "Degraded", "Unschedulable", "no node fits"),  # one may come
        told("3", "Stalled", "Invalid", "a pod is refused"),
        told("4", "Stalled", "Invalid", "another pod is refused"),
        told("5", "Degraded", "ImagePullFailed", "no such image"),
        manifest("Running", "6"),
        told("7", "Stalled", "Invalid", "a pod is refused"),
        manifest("Succeeded", "8"),
    ]
    assert Job(api, "digits").wait().phase == "Succeeded"
    stalled = "digits waits for somebody: Stalled, Invalid: a pod is refused. shoal explain digits says more"
    image = (
        "digits waits for somebody: Degraded, ImagePullFailed: no such image. shoal explain digits says more"
    )
    assert [record.getMessage() for record in caplog.records] == [stalled, image, stalled]


@pytest.mark.parametrize(
    ("now", "awaited"),
    [("Succeeded", "Running"), ("Succeeded", "Pending"), ("Running", "Starting"), ("Running", "Running")],
)
def test_a_phase_that_is_over_was_there(api: FakeApi, now: str, awaited: str) -> None:
    """A short job has succeeded before anybody looks whether it runs: it was said to have failed."""
    api.objects[PATH] = manifest(now, "1")
    assert Job(api, "digits").wait(awaited, timeout=0.0).phase == now


@pytest.mark.parametrize("awaited", ["Suspended", "Failed"])
def test_a_job_that_succeeded_did_not_fail_whatever_was_awaited(api: FakeApi, awaited: str) -> None:
    api.objects[PATH] = manifest("Succeeded", "1")
    with pytest.raises(TimeoutError, match=f"digits has succeeded, and is never {awaited} any more"):
        Job(api, "digits").wait(awaited)


@pytest.mark.parametrize("awaited", [None, "Running", "Suspended"])
def test_a_job_that_failed_has_failed_whatever_was_awaited(api: FakeApi, awaited: str | None) -> None:
    api.objects[PATH] = manifest("Failed", "1", message="the loss is NaN")
    with pytest.raises(JobFailed, match="digits has failed: the loss is NaN"):
        Job(api, "digits").wait(awaited)


def test_a_phase_that_does_not_exist_is_no_endless_wait(api: FakeApi) -> None:
    with pytest.raises(UsageError, match="no phase 'running': it must be one of Pending, Starting, Running"):
        Job(api, "digits").wait("running")


def test_jobs_of_a_newer_version_are_read(api: FakeApi) -> None:
    newer = manifest("Running", "1", newField=1)
    newer["spec"]["workers"] = {"replicas": 3, "newField": 1}
    api.objects[PATH] = newer | {"newField": 1}
    assert [each.seen.spec.workers.replicas for each in client_of(api).list()] == [3]


def test_a_job_that_cannot_be_read_takes_the_list_from_nobody(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    newer = manifest("Running", "1")
    newer["metadata"] = {**newer["metadata"], "name": "other"}
    newer["spec"]["workers"] = {"replicas": 3, "capacity": "Reserved"}
    api.objects[f"{PATH.rpartition('/')[0]}/other"] = newer
    client = client_of(api)
    assert [[each.name for each in client.list()] for _ in range(3)] == [["digits"]] * 3
    [said] = [record.getMessage() for record in caplog.records]
    assert "cannot read trainingjobs team/other: spec.workers.capacity" in said
    assert "correct it, or, if the cluster's Shoal is newer, upgrade this one" in said
    with pytest.raises(UsageError, match=r"trainingjobs team/other: spec.workers.capacity.*upgrade"):
        client.job("other").refresh()


@given(
    message=st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1) | st.just(TENSORFLOW)
)
def test_follow_prints_what_was_said(message: str) -> None:
    """`[/job:…]` of TensorFlow is no markup of rich's."""
    api = FakeApi()
    api.objects[PATH] = manifest("Failed", "1", message=message)
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(
            "rich.console.Console._write_buffer", lambda self: said.extend(s.text for s in self._buffer)
        )
        assert Job(api, "digits").follow().phase == "Failed"
    assert message in "".join(said)
    with pytest.raises(JobFailed) as failed:
        Job(api, "digits").wait()
    assert message in str(failed.value)


def test_events_are_of_this_job_and_its_pods(api: FakeApi) -> None:
    for number, (kind, name) in enumerate(
        [
            ("TrainingJob", "digits"),
            ("Pod", "digits-worker-2-0"),
            ("Pod", "digits-ps-study-worker-0-0"),
            ("Pod", "x"),
        ]
    ):
        event = {"involvedObject": {"kind": kind, "name": name}, "lastTimestamp": stamp(NOW)}
        api.objects[f"/api/v1/namespaces/team/events/{number}"] = event
    api.get = _selecting(api)  # type: ignore[method-assign]
    found = [each["involvedObject"]["name"] for each in Job(api, "digits").events()]
    assert found == ["digits", "digits-worker-2-0"]


def _selecting(api: FakeApi) -> Any:
    everything = api.get

    def get(path: str, **query: str) -> dict[str, Any]:
        selector = query["fieldSelector"].removesuffix(",type!=Normal")
        wanted = dict(part.split("=") for part in selector.split(","))
        items = everything(path)["items"]
        return {
            "items": [
                each for each in items
                if all(each["involvedObject"][key.removeprefix("involvedObject.")] == v for key, v in wanted.items())
            ]
        }  # fmt: skip

    return get


def test_of_the_pods_of_a_namespace_only_what_went_wrong_is_asked_for(api: FakeApi) -> None:
    """A thousand pods of others have thousands of events that say how well they go."""
    Job(api, "digits").events()
    assert [query["fieldSelector"] for query in api.queries] == [
        "involvedObject.kind=TrainingJob,involvedObject.name=digits",
        "involvedObject.kind=Pod,type!=Normal",
    ]


@pytest.mark.parametrize(("jupyter", "raises"), [(False, True), (True, False)])
def test_ctrl_c_ends_the_table_and_in_a_notebook_nothing_else(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, jupyter: bool, raises: bool
) -> None:
    """In a terminal the command is interrupted, with the exit code of docs/cli.md; a cell only stops to show."""
    screen = Console(file=io.StringIO(), force_terminal=True)
    screen.is_jupyter = jupyter
    monkeypatch.setattr("shoal.client.view.plain_console", lambda: screen)
    monkeypatch.setattr("rich.live.Live.refresh", lambda _: None)
    job = Job(api, "digits")

    def interrupted() -> Iterator[TrainingJob]:
        yield job.seen
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt) if raises else contextlib.nullcontext():
        assert job.follow().phase == "Running"


def test_what_is_asked_for_again_and_again_comes_from_memory(api: FakeApi) -> None:
    client_of(api).list(cached=True)
    assert [query.get("resourceVersion") for query in api.queries] == ["0"]
    client_of(api).list()
    assert api.queries[-1].get("resourceVersion") is None


def test_only_the_first_page_may_name_a_version(api: FakeApi) -> None:
    """The API server refuses it beside `continue`."""
    asked: list[dict[str, str]] = []

    def get(path: str, **query: str) -> dict[str, Any]:
        del path
        asked.append(query)
        return {"items": [], "metadata": {"continue": "" if "continue" in query else "more"}}

    api.get = get  # type: ignore[method-assign]
    api.list("/api/v1/pods", resourceVersion="0", labelSelector="a")
    assert asked == [
        {"resourceVersion": "0", "labelSelector": "a", "limit": "500"},
        {"labelSelector": "a", "limit": "500", "continue": "more"},
    ]


def test_lists_are_asked_in_pages(api: FakeApi) -> None:
    pages = {"": ({"a": 1}, "more"), "more": ({"b": 2}, "")}

    def get(path: str, **query: str) -> dict[str, Any]:
        del path
        assert query["limit"] == "500"
        item, go_on = pages[query.get("continue", "")]
        return {"items": [item], "metadata": {"continue": go_on}}

    api.get = get  # type: ignore[method-assign]
    assert api.list("/api/v1/pods") == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(("first", "told"), [(0, 0), (84, 1)])
def test_epochs_that_the_log_lacks_are_told(
    api: FakeApi, caplog: pytest.LogCaptureFixture, first: int, told: int
) -> None:
    lines = [
        EPOCH_LINE + EpochReport(epoch=epoch, metrics={"loss": 1.0}).to_json() for epoch in range(first, 100)
    ]
    api.objects["/api/v1/namespaces/team/pods/digits-ps-0-1"] = pod_manifest("ps", 0, 1)
    api.lines = lambda *_, **__: iter(lines)  # type: ignore[method-assign]
    assert len(Job(api, "digits").history()) == 100 - first
    assert len(caplog.records) == told
    assert all("Epochs 1 to 84 are no longer" in each.message for each in caplog.records)


@pytest.mark.parametrize("change", [lambda job: job.scale(3), Job.suspend, Job.resume])
def test_nothing_of_a_finished_job_is_changed(api: FakeApi, change: Callable[[Job], None]) -> None:
    api.objects[PATH] = manifest("Succeeded", "2")
    with pytest.raises(UsageError, match="digits has succeeded: a finished job does not change"):
        change(Job(api, "digits"))
    assert api.patches == []
    api.objects[PATH] = manifest("Running", "3")
    change(Job(api, "digits"))
    assert len(api.patches) == 1


def test_a_job_whose_workers_shoal_chooses_is_not_scaled(api: FakeApi) -> None:
    spec = api.objects[PATH]["spec"]
    spec |= {"elasticity": {"mode": "Auto"}}
    with pytest.raises(UsageError, match=r"between workers.minReplicas and workers.maxReplicas"):
        Job(api, "digits").scale(3)
    assert api.patches == []
    Job(api, "digits").suspend()
    assert api.patches == [{"spec": {"suspend": True}}]


@pytest.mark.parametrize(("tail", "asked"), [(None, None), (0, "0"), (7, "7")])
def test_the_last_lines_of_a_log_may_be_none(api: FakeApi, tail: int | None, asked: str | None) -> None:
    pod = pod_manifest(role="ps")
    api.objects[f"/api/v1/namespaces/team/pods/{pod['metadata']['name']}"] = pod
    list(Job(api, "digits").logs(tail=tail))
    assert api.queries[-1].get("tailLines") == asked


@pytest.fixture
def with_logs(api: FakeApi) -> FakeApi:
    """A slot whose earlier pod is there, one whose container was restarted, and a worker and a server that are new."""
    for pod in (
        pod_manifest("worker", 0, 2), pod_manifest("worker", 0, 10), pod_manifest("worker", 1, restarts=1),
        pod_manifest("worker", 2), pod_manifest("ps", 0),
    ):  # fmt: skip
        name = pod["metadata"]["name"]
        api.objects[f"/api/v1/namespaces/team/pods/{name}"] = pod
        api.logs[name, False] = [f"{name} now"]
        api.logs[name, True] = [f"{name} before"]
    return api


def put_pod(api: FakeApi, **how: Any) -> None:
    pod = pod_manifest("ps", **how)
    api.objects[f"/api/v1/namespaces/team/pods/{pod['metadata']['name']}"] = pod


WAITS = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"node": None, "conditions": [WAITS]}, "0/3 nodes are available"),
        ({"node": None}, "it has no node yet"),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, "its container is being made"),
        (
            {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}},
            "ErrImagePull: no such tag",
        ),
    ],
)
def test_a_pod_that_has_not_begun_has_no_log_yet(api: FakeApi, how: dict[str, Any], why: str) -> None:
    """The API server answers 204 for a pod without a node: nothing was printed, as of a log that is empty."""
    put_pod(api, phase="Pending", created=datetime.now(UTC), **how)
    with pytest.raises(
        NotFound, match=f"digits-ps-0-0 has no log yet: {why}; shoal explain digits says more"
    ):
        Job(api, "digits").logs()


def test_a_log_that_is_followed_is_waited_for_from_the_resume_on(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.logs["digits-ps-0-1", False] = ["begun"]
    to_come = [
        {},
        {"phase": "Pending", "node": None},
        {"phase": "Pending", "node": None},
        {"phase": "Running"},
    ]

    def sleep(_seconds: float) -> None:
        if how := to_come.pop(0):
            put_pod(api, incarnation=1, created=datetime.now(UTC), **how)

    assert list(Job(api, "digits").logs(follow=True, sleep=sleep)) == ["begun"]
    assert [each.message.partition("; ")[0] for each in caplog.records] == [
        "waiting for a log: digits has no pods (Running)",
        "waiting for a log: digits-ps-0-1 has no log yet: it has no node yet",
    ]


@pytest.mark.parametrize(
    ("phase", "suspend", "slot"), [("Suspended", True, None), ("Failed", False, None), ("Running", False, 99)]
)
def test_a_log_that_does_not_come_is_not_waited_for(
    api: FakeApi, phase: str, suspend: bool, slot: int | None
) -> None:
    api.objects[PATH] = manifest(phase, "1")
    api.objects[PATH]["spec"]["suspend"] = suspend
    with pytest.raises(NotFound):
        Job(api, "digits").logs(slot, follow=True, sleep=lambda _: pytest.fail("it waits"))


@pytest.mark.parametrize(
    ("slot", "previous", "line"),
    [
        (0, False, "digits-worker-0-10 now"),
        (0, True, "digits-worker-0-2 now"),
        (1, False, "digits-worker-1-0 now"),
        (1, True, "digits-worker-1-0 before"),
        (None, False, "digits-ps-0-0 now"),
    ],
)
def test_a_log_of_before_is_of_the_older_pod_or_the_earlier_container(
    with_logs: FakeApi, slot: int | None, previous: bool, line: str
) -> None:
    assert list(Job(with_logs, "digits").logs(slot, previous=previous)) == [line]
    role = "worker" if slot is not None else "ps"
    assert with_logs.queries[-1]["container"] == role


def test_pods_of_a_deleted_job_of_the_name_are_not_those_of_the_job(with_logs: FakeApi) -> None:
    """They end for a minute, and longer on a lost node; one that was a replacement is of a higher incarnation."""
    old = pod_manifest("ps", 0, 1)
    old["metadata"]["labels"]["shoal.dev/job-uid"] = "uid-before"
    with_logs.objects["/api/v1/namespaces/team/pods/digits-ps-0-1"] = old
    with_logs.logs["digits-ps-0-1", False] = ["of the job before"]
    job = Job(with_logs, "digits")
    assert list(job.logs()) == ["digits-ps-0-0 now"]
    assert "digits-ps-0-1" not in {each["metadata"]["name"] for each in job.pods()}


def test_a_job_that_was_submitted_again_has_the_pods_of_now(with_logs: FakeApi) -> None:
    job = Job(with_logs, "digits")
    before = job.refresh().metadata.uid
    for path, each in with_logs.objects.items():
        if "/pods/" in path:
            each["metadata"]["labels"]["shoal.dev/job-uid"] = f"{before}-again"
    with_logs.objects[job.path]["metadata"]["uid"] = f"{before}-again"
    assert list(job.logs()) == ["digits-ps-0-0 now"]


def test_a_log_that_went_with_its_node_is_told(with_logs: FakeApi) -> None:
    for slot, role in ((2, "worker"), (0, "ps"), (7, "worker")):
        with pytest.raises(
            NotFound, match=f"no earlier pod of {role} {slot} exists: .* `shoal status digits`"
        ):
            Job(with_logs, "digits").logs(slot, role=role, previous=True)


def test_a_watch_without_news_shows_the_job_again(api: FakeApi) -> None:
    """Where nobody works any more nothing changes: that its last step is an hour old must still be told."""
    now = [0.0]

    def nothing(path: str, query: Mapping[str, str], *, seconds: float | None = None) -> Iterator[str]:
        now[0] += seconds or 0.0
        return iter(())

    api.lines = nothing  # type: ignore[method-assign]
    shown = list(Job.of(api, api.objects[PATH]).watch(seconds=300.0, clock=lambda: now[0]))
    assert len(shown) == 1 + 300 / WATCH_SECONDS


@pytest.mark.parametrize("lasts", [0.0, 0.11, 0.9])
def test_a_watch_that_ends_at_once_shows_the_job_once_a_minute(api: FakeApi, lasts: float) -> None:
    """And is no storm of questions, as where a proxy ends it soon."""
    now, watches = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def ends(path: str, query: Mapping[str, str], *, seconds: float | None = None) -> Iterator[str]:
        watches.append(now[0])
        sleep(lasts)
        return iter(())

    api.lines = ends  # type: ignore[method-assign]
    shown = list(Job.of(api, api.objects[PATH]).watch(seconds=300.0, clock=lambda: now[0], sleep=sleep))
    assert len(shown) == pytest.approx(1 + 300 / WATCH_SECONDS, abs=1)
    assert len(watches) <= 300.0 / (lasts + 0.5) + 1


def test_who_waits_is_told_that_nobody_works(api: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    hour = api.now() - timedelta(hours=1)
    api.objects[PATH] = manifest("Running", "1", training={"step": 5, "lastProgressTime": stamp(hour)})
    api.changes = [manifest("Succeeded", "2")]
    Job.of(api, api.objects[PATH]).wait()
    assert caplog.text.count("waits for somebody: no step is known for 1h00m") == 1


def test_another_job_that_has_the_name_by_now_is_not_deleted(api: FakeApi) -> None:
    """A question about the old one may stand for minutes, and an object of a notebook for days."""
    mine = client_of(api).job("digits")
    again = manifest("Running", "2")
    api.objects[PATH] = again | {"metadata": again["metadata"] | {"uid": "of-a-colleague"}}
    with pytest.raises(Refused, match="UID"):
        mine.delete()
    assert PATH in api.objects


def test_a_look_at_another_job_of_the_name_is_no_leave_to_delete_it(api: FakeApi) -> None:
    """In a notebook one looks at the log, or the status, before one deletes."""
    mine = client_of(api).job("digits")
    again = manifest("Running", "2")
    api.objects[PATH] = again | {"metadata": again["metadata"] | {"uid": "of-a-colleague"}}
    assert (list(mine.pods()), mine.status.phase) == ([], "Running")
    with pytest.raises(Refused, match="UID"):
        mine.delete()
    client_of(api).job("digits").delete()
    assert PATH not in api.objects


NEWER: list[dict[str, Any]] = [
    {"phase": "Resharding"},
    {"slots": [{"role": "router", "index": 0, "incarnation": 0, "state": "Running"}]},
    {"parameterServers": {"ready": "many"}},
]


def newer(api: FakeApi, status: dict[str, Any], **spec: Any) -> None:
    made = manifest("Running", "1")
    api.objects[PATH] = made | {"spec": made["spec"] | spec, "status": made["status"] | status}


def test_values_of_a_status_that_only_a_newer_version_knows_are_left_out(
    with_logs: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can correct a status; the end of the job is known by its conditions all the same."""
    newer(with_logs, {"phase": "Resharding", "training": {"step": 7}})
    job = client_of(with_logs).job("digits")
    assert (job.status.phase, job.status.training.step, job.phase) == ("", 7, "Resharding")
    assert list(job.logs()) == ["digits-ps-0-0 now"]
    with_logs.changes = [manifest("Running", "2"), manifest("Succeeded", "3")]
    assert job.wait().phase == "Succeeded"
    [said] = caplog.messages
    assert "status.phase" in said


def test_a_phase_that_only_a_newer_version_knows_is_no_endless_wait(api: FakeApi) -> None:
    """It may be a final one; of a job that still runs its end is awaited."""
    newer(api, {"phase": "Cancelled", "conditions": []})
    with pytest.raises(UsageError, match=r"status.phase.*upgrade"):
        Job(api, "digits").wait()


def test_a_phase_that_only_a_newer_version_knows_is_no_absent_operator(api: FakeApi) -> None:
    newer(api, {"phase": "Resharding"})
    with pytest.raises(NotFound, match=r"digits has no pods \(Resharding\)"):
        list(Job(api, "digits").logs())
    with pytest.raises(TimeoutError, match="digits is Resharding after 0 s"):
        Job(api, "digits").wait(timeout=0.0)


@pytest.mark.parametrize("status", NEWER)
@pytest.mark.parametrize("spec", [{}, {"workers": {"replicas": 3, "capacity": "Reserved"}}])
def test_a_job_that_is_not_understood_can_be_stopped(
    api: FakeApi, status: dict[str, Any], spec: dict[str, Any]
) -> None:
    newer(api, status, **spec)
    job = client_of(api).job("digits")
    job.scale(0)
    job.suspend()
    assert api.patches == [{"spec": {"workers": {"replicas": 0}}}, {"spec": {"suspend": True}}]
    job.delete()
    assert PATH not in api.objects


@pytest.mark.parametrize(
    "line",
    [
        '{"type":"MODIFIED","obj',
        '{"type":"BOOKMARK","object":{"kind":"TrainingJob","metadata":{"resourceVersion":"9"}}}',
        "[]",
    ],
)
def test_a_line_of_a_watch_that_tells_nothing_ends_it_and_no_wait(api: FakeApi, line: str) -> None:
    """A proxy cuts a stream within a line."""

    def told(path: str, query: Mapping[str, str], *, seconds: float | None = None) -> Iterator[str]:
        del path, query, seconds
        yield line
        raise AssertionError("it is read on")

    def sleep(_seconds: float) -> None:
        api.objects[PATH] = manifest("Succeeded", "2")

    api.lines = told  # type: ignore[method-assign]
    seen = [each.status.phase for each in Job(api, "digits").watch(sleep=sleep, clock=lambda: 0.0)]
    assert seen == ["Running", "Succeeded"]


def test_a_watch_goes_on_after_blank_lines_and_is_asked_again_once_a_minute(api: FakeApi) -> None:
    """A proxy keeps a stream alive with them, also one whose API server is gone."""
    now, watches = [0.0], list[float]()

    def blank(path: str, query: Mapping[str, str], *, seconds: float | None = None) -> Iterator[str]:
        del path, query, seconds
        watches.append(now[0])
        if len(watches) == 6:
            yield from ("", json.dumps({"type": "MODIFIED", "object": manifest("Succeeded", "2")}))
        while True:
            now[0] += 5.0
            yield ""

    api.lines = blank  # type: ignore[method-assign]
    shown = [each.status.phase for each in Job(api, "digits").watch(seconds=1000.0, clock=lambda: now[0])]
    assert watches == [WATCH_SECONDS * number for number in range(6)]
    assert shown == ["Running"] * 6 + ["Succeeded"]
