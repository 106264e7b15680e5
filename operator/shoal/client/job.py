"""`Job`: one TrainingJob on the cluster. Every read asks the API server; nothing needs to be closed."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.api.base import API_VERSION, Condition
from shoal.api.labels import JOB_UID
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import PASSES, PHASES, Phase, TrainingJobStatus
from shoal.client.api import Api, Json, read_as, without_unknown_status
from shoal.client.explain import why_pending
from shoal.client.history import History
from shoal.client.model_files import download, load
from shoal.errors import NotFound, ShoalError, Unavailable, UsageError
from shoal.words import few
from shoal_trainer.contract import plain

log = logging.getLogger(__name__)

UNNAMED = "new"
"""What a job without a phase is called."""
UNSEEN = "no operator has looked at it yet: shoal doctor says whether one runs"
WATCH_SECONDS = 60.0
"""A watch is asked again after so long without news, which also finds one that died silently."""
ONWARD: tuple[Phase, ...] = ("Pending", "Starting", "Running", "Succeeded")
"""The phases of a job that all goes well with: in a later one, it was in those before."""
FINISHED: tuple[Phase, ...] = ("Succeeded", "Failed")
"""The phases of a job that does not change any more."""
LOOK_SECONDS = 1.0
"""Between two looks at the pod whose log is waited for."""
LONGEST_PAUSE = 30.0
"""Seconds between two tries while the API server does not answer."""


class JobFailed(ShoalError):
    """`wait` or `model` of a job that failed; the message is the job's own."""


class Job:
    """A job by name. It need not exist yet."""

    def __init__(
        self, api: Api, name: str, namespace: str | None = None, *, manifest: Json | None = None
    ) -> None:
        if not name:
            raise UsageError("the job's name is empty: shoal list shows those that there are")
        self._api, self.name = api, name
        self.namespace = namespace or api.namespace
        self._manifest = manifest
        """As it was last read: what needs no more of it can be done with a job that is not understood."""
        self._uid = _uid(manifest) if manifest else None
        """Of the job that it was first: another one may have its name by now."""
        self._seen: TrainingJob | None = None
        self._told = ""

    @classmethod
    def of(cls, api: Api, manifest: Json) -> Job:
        """A job that was read already."""
        metadata = manifest["metadata"]
        job = cls(api, metadata["name"], metadata["namespace"], manifest=manifest)
        job._seen = read_as(TrainingJob, manifest)
        return job

    def __repr__(self) -> str:
        return f"<Job {self.namespace}/{self.name} {self.phase if self._manifest else 'not read yet'}>"

    @property
    def path(self) -> str:
        """Its path in the API."""
        return f"/apis/{API_VERSION}/namespaces/{self.namespace}/trainingjobs/{self.name}"

    # --- reading --------------------------------------------------------------------------------------------------

    def read(self) -> Json:
        """Its manifest as it is now. Raises NotFound."""
        self._manifest, self._seen = self._api.get(self.path), None
        self._uid = self._uid or _uid(self._manifest)
        return self._manifest

    def refresh(self) -> TrainingJob:
        """The TrainingJob as it is now. Raises NotFound."""
        return self._understood(self.read())

    @property
    def seen(self) -> TrainingJob:
        """As it was last read; read now if it never was."""
        return self._seen or self._understood(self._manifest or self.read())

    @property
    def phase(self) -> str:
        """That it was last read with, also where nothing else of it is understood; `new` without one."""
        return _status(self._manifest or self.read()).get("phase") or UNNAMED

    def _understood(self, manifest: Json) -> TrainingJob:
        """What was read, without those values of its status that only a newer version knows; that is logged once."""
        self._manifest = manifest
        try:
            self._seen = read_as(TrainingJob, manifest)
        except UsageError as error:
            self._seen = read_as(TrainingJob, without_unknown_status(TrainingJob, manifest))
            if (words := str(error)) != self._told:
                log.warning("%s. It is left out.", words)
            self._told = words
        return self._seen

    @property
    def status(self) -> TrainingJobStatus:
        """Its status as it is now."""
        return self.refresh().status

    def pods(self) -> list[Json]:
        """Its pods that exist; not those of an earlier job of its name, which may end for long."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        found = self._api.list(path, labelSelector=f"{JOB_UID}={_uid(self._manifest or self.read())}")
        if not found:  # it may have been deleted and submitted again since it was seen
            found = self._api.list(path, labelSelector=f"{JOB_UID}={_uid(self.read())}")
        return found

    def events(self) -> list[Json]:
        """The events about it, and what went wrong with its pods, as far as Kubernetes still has them; oldest first.

        That is an hour by default. What goes well with pods is not asked for: a namespace has thousands of these.
        """
        path = f"/api/v1/namespaces/{self.namespace}/events"
        about_it = f"involvedObject.kind=TrainingJob,involvedObject.name={self.name}"
        mine = self._api.list(path, fieldSelector=about_it)
        pods = self._api.list(path, fieldSelector="involvedObject.kind=Pod,type!=Normal")
        mine += [each for each in pods if _is_pod_of(each["involvedObject"]["name"], self.name)]
        return sorted(mine, key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "")

    def watch(
        self,
        *,
        seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[TrainingJob]:
        """The job now, each time that it changes, and each minute without news, until it is finished or for so long.

        Where the API server stops to answer, as while it is upgraded, it is asked again until it does.

        Raises:
            NotFound: it is deleted.
            Unavailable: nobody answers from the beginning.
        """
        before, end, pause, shown = "", clock() + seconds, 0.0, -math.inf
        while True:
            try:
                job = self.refresh()
            except Unavailable as error:
                if not before:
                    raise
                if not pause:
                    log.warning("%s Waiting until it does; the job goes on.", error)
                if clock() >= end:
                    return
                pause = min(max(0.5, 2 * pause), LONGEST_PAUSE, end - clock())
                sleep(pause)
                continue
            pause = 0.0
            if job.metadata.resource_version != before or clock() - shown >= WATCH_SECONDS:
                shown = clock()
                yield job
            if job.status.finished:
                return
            before = job.metadata.resource_version
            if (start := clock()) >= end:
                return
            for changed in self._changes(before, min(WATCH_SECONDS, end - start), clock):
                before = changed.metadata.resource_version
                shown = clock()
                yield changed
                if changed.status.finished or clock() >= end:
                    return
            if (
                clock() - start < 1.0
            ):  # the server ends watches at once while it starts or stops, or a proxy does
                sleep(0.5)

    def wait(self, phase: str | None = None, *, timeout: float | None = None) -> TrainingJobStatus:
        """Block until the job is in this phase (None: finished). `timeout` is in seconds.

        A job that is beyond the phase was in it: a short one has succeeded before anybody looks whether it runs.

        What keeps it that only a person can mend is logged as a warning, each time that it is something else; and that
        nobody works on it.

        Raises:
            JobFailed: it failed while another phase was awaited, or nothing but its end was.
            TimeoutError: it took longer; or it succeeded, and another phase was awaited that it is never in.
            UsageError: there is no such phase; or its own is one that only a newer version knows, and it does not run.
        """
        if phase is not None and phase not in PHASES:
            raise UsageError(f"there is no phase {phase!r}: it must be one of {', '.join(PHASES)}")
        sought = phase or "Succeeded"
        awaited = ONWARD[ONWARD.index(sought) :] if sought in ONWARD else (sought,)
        told = None
        for job in self.watch(seconds=math.inf if timeout is None else timeout):
            status = job.status
            if status.phase in awaited:
                return status
            if status.phase == "Succeeded":
                raise TimeoutError(f"{self.name} has succeeded, and is never {phase} any more")
            if status.finished:
                raise JobFailed(f"{self.name} has {status.phase.lower()}: {reason_of(status)}")
            running = status.condition("Running")
            if not (status.phase or self.phase == UNNAMED or (running and running.status == "True")):
                raise UsageError(self._told)  # it may have ended
            found, stands = _for_a_person(status), status.standing(self._api.now())
            what = (found.type, found.reason) if found is not None else stands and "it stands"
            if what and what != told:
                words = stands if found is None else f"{found.type}, {found.reason}: {found.message}"
                log.warning(
                    "%s waits for somebody: %s. shoal explain %s says more",
                    self.name,
                    plain(words.rstrip(".")),
                    self.name,
                )
            told = what
        now = self.phase if self.phase != UNNAMED else f"without a phase ({UNSEEN})"
        raise TimeoutError(f"{self.name} is {now} after {timeout:g} s; shoal explain {self.name} says why")

    def follow(self) -> TrainingJobStatus:
        """Show a live table until the job is finished; Ctrl-C stops the table, not the job.

        In a notebook the cell then ends as usual; elsewhere KeyboardInterrupt is raised.
        """
        from rich.live import Live

        from shoal.client.view import follow_view, one_line, plain_console

        console = plain_console()
        if not console.is_terminal and not console.is_jupyter:
            shown = ""
            for job in self.watch():
                if (line := one_line(job, now=self._api.now())) != shown:
                    console.print(line, soft_wrap=True)
                    shown = line
            return self.seen.status
        most = console.height if console.is_terminal else None
        with Live(console=console, refresh_per_second=2) as live:
            try:
                for job in self.watch():
                    live.update(follow_view(job, now=self._api.now(), most=most))
            except KeyboardInterrupt:
                if not console.is_jupyter:
                    raise
        return self.seen.status

    def logs(
        self, slot: int | None = None, *, role: str = "worker", previous: bool = False, follow: bool = False,
        tail: int | None = None, sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[str]:  # fmt: skip
        """The log of the newest pod of a slot, line by line. Default: parameter server 0, which coordinates the job.

        Args:
            slot: The worker's slot, or with `role="ps"` the shard.
            role: `worker` or `ps`.
            previous: Of the pod before the newest, or of its container before a restart.
            follow: Go on until the pod ends. What its log waits for until it begins is logged as a warning.
            tail: Only so many last lines.
            sleep: Waits for so many seconds.

        Raises:
            NotFound: there is no such pod any more, or it has not begun.
        """
        role, slot = ("ps", 0) if slot is None else (role, slot)
        pods, told = self.pods(), ""
        while not previous and (why := self._no_log_yet(pods, role, slot)):
            if not (follow and self._may_come(role, slot)):
                raise NotFound(why)
            if why != told:
                log.warning("waiting for a log: %s", plain(why))
            told = why
            sleep(LOOK_SECONDS)
            pods = self.pods()
        mine = _of_slot(pods, role, slot)
        query = (
            {"container": role}
            | ({"tailLines": str(tail)} if tail is not None else {})
            | ({"follow": "true"} if follow else {})
        )
        if previous and len(mine) > 1:
            mine.pop()
        elif previous and mine and _restarts(mine[-1], role):
            query["previous"] = "true"
        elif previous:
            raise NotFound(
                f"no earlier pod of {role} {slot} exists: pods of lost nodes take their logs along. `shoal status "
                f"{self.name}` has the reasons, and a log collector of the cluster has the logs"
            )
        name = mine[-1]["metadata"]["name"]
        return self._api.lines(f"/api/v1/namespaces/{self.namespace}/pods/{name}/log", query)

    def _no_log_yet(self, pods: list[Json], role: str, slot: int) -> str:
        """Why the newest pod of a slot has no log; empty: it has one."""
        more = f"shoal explain {self.name} says more"
        if not pods:
            return f"{self.name} has no pods ({_status(self.read()).get('phase') or UNSEEN}); {more}"
        if not (mine := _of_slot(pods, role, slot)):
            there = sorted(f"{r} {i}" for r, i in {_place(each) for each in pods})
            return f"{self.name} has no pod of {role} {slot}; it has {few(there, 20)}"
        newest = mine[-1]
        if newest["status"].get("phase") != "Pending":
            return ""
        passes = "its container is being made" if newest["spec"].get("nodeName") else "it has no node yet"
        why = next(why_pending(newest, self._api.now()), passes)
        return f"{newest['metadata']['name']} has no log yet: {why}; {more}"

    def _may_come(self, role: str, slot: int) -> bool:
        """Whether the job may make a pod of this slot by itself."""
        job = self.refresh()
        workers, servers = job.spec.workers, job.spec.parameter_servers
        most = servers.replicas if role == "ps" else max(workers.replicas, workers.max_replicas or 0)
        return slot < most and not job.spec.suspend and not job.status.finished

    def history(self) -> History:
        """The loss and metrics of each epoch, from the log of parameter server 0; also after the job's end.

        Epochs that its node has rotated away are missing, which is logged; `logs/history.csv` of the run has them.
        """
        found = History.from_lines(self.logs())
        if found and (first := found[0].epoch):
            log.warning(
                "Epochs 1 to %d are no longer in the log of %s: logs/history.csv in its storage has them.",
                first,
                self.name,
            )
        return found

    def model(self, folder: str | Path | None = None) -> Any:
        """The exported model: with Keras installed, loaded; with `folder`, its files there.

        Raises:
            JobFailed: there is none, since the job failed or is not finished.
            UsageError: it went with its pod (storage: ephemeral).
            Unavailable: its storage cannot be read.
        """
        status = self.status
        if status.output is None:
            raise JobFailed(
                f"{self.name} has no model: it is {status.phase or 'not started'}. {reason_of(status)}".rstrip()
            )
        return (
            download(status.output.uri, Path(folder), self, self._api)
            if folder is not None
            else load(status.output.uri, self, self._api)
        )

    # --- changing -------------------------------------------------------------------------------------------------

    def scale(self, workers: int) -> None:
        """Change the number of workers while training continues.

        Raises:
            UsageError: the job is finished, or in mode Auto, where Shoal chooses the number.
        """
        if (self._unfinished()["spec"].get("elasticity") or {}).get("mode") == "Auto":
            raise UsageError(
                f"Shoal chooses how many workers {self.name} has (elasticity.mode Auto), between workers.minReplicas "
                "and workers.maxReplicas: change these, or the mode to Manual"
            )
        self._api.patch(self.path, {"spec": {"workers": {"replicas": workers}}})

    def suspend(self) -> None:
        """Stop all pods after a final snapshot. Raises UsageError if the job is finished."""
        self._unfinished()
        self._api.patch(self.path, {"spec": {"suspend": True}})

    def resume(self) -> None:
        """Continue from the snapshot. Raises UsageError if the job is finished."""
        self._unfinished()
        self._api.patch(self.path, {"spec": {"suspend": False}})

    def _unfinished(self) -> Json:
        """The job as it is now. Raises UsageError if it is finished, and nothing can change it any more."""
        manifest = self.read()
        if self.phase in FINISHED:
            raise UsageError(
                f"{self.name} has {self.phase.lower()}: a finished job does not change. A new one with "
                "training.initialFrom (initial_from=…, --initial-from) continues from its snapshots"
            )
        return manifest

    def delete(self) -> None:
        """Delete the job and its pods. What is in the storage stays.

        Raises:
            Refused: another job has its name since it was first read.
        """
        self._api.delete(self.path, self._uid)

    def _changes(self, version: str, seconds: float, clock: Callable[[], float]) -> Iterator[TrainingJob]:
        query = {"watch": "true", "fieldSelector": f"metadata.name={self.name}", "resourceVersion": version}
        query |= {"timeoutSeconds": "300"}
        lines = self._api.lines(self.path.rpartition("/")[0], query, seconds=seconds)
        heard = clock()
        try:
            for line in lines:
                if not line.strip():  # a proxy keeps a stream alive, also one that tells nothing any more
                    if clock() - heard >= seconds:
                        return
                    continue
                heard = clock()
                try:
                    event = json.loads(line)
                    kind, changed = event["type"], event["object"]
                except (ValueError, KeyError, TypeError):
                    return  # a proxy cuts a stream within a line: it is asked again
                if kind == "DELETED":
                    raise NotFound(f"{self.name} was deleted")
                if kind not in {"ADDED", "MODIFIED"}:
                    return
                yield self._understood(changed)
        except Unavailable:
            return


def reason_of(status: TrainingJobStatus) -> str:
    """The message of the condition that matters most, or of the last failure."""
    return status.words or (status.last_failure.message if status.last_failure else status.reason)


def _for_a_person(status: TrainingJobStatus) -> Condition | None:
    """The condition of an unfinished job that does not pass by itself, if there is one."""
    found = (status.condition(kind) for kind in ("Stalled", "Degraded"))
    return next((c for c in found if c is not None and c.status == "True" and c.reason not in PASSES), None)


def _uid(job: Json) -> str:
    uid: str = job["metadata"]["uid"]
    return uid


def _status(job: Json) -> Json:
    return job.get("status") or {}


def _place(pod: Json) -> tuple[str, int]:
    labels = pod["metadata"].get("labels") or {}
    return labels.get("shoal.dev/role", ""), int(labels.get("shoal.dev/index", -1))


def _of_slot(pods: list[Json], role: str, slot: int) -> list[Json]:
    """Its pods, the newest one last."""
    mine = [each for each in pods if _place(each) == (role, slot)]
    return sorted(mine, key=lambda pod: int(pod["metadata"]["labels"].get("shoal.dev/incarnation", 0)))


def _restarts(pod: Json, container: str) -> int:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((int(each.get("restartCount", 0)) for each in statuses if each["name"] == container), 0)


def _is_pod_of(name: str, job: str) -> bool:
    return re.fullmatch(rf"{re.escape(job)}-(worker|ps)-\d+-\d+", name) is not None
