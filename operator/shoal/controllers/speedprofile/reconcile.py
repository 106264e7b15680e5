"""Keeps SpeedProfiles up to date with the reports of running jobs.

Reports are merged in memory as they arrive (`learn`), so that a plan uses the newest; the object is written when an
estimate has moved, when a job ends, and otherwise every few minutes. A crash loses nothing: reports are cumulative, and
what is merged is written with what it was merged from. A profile that the operator made, nobody wrote anything in, and
no job uses is deleted when its measurements are too old to count, or to make room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from shoal.api.base import API_VERSION, ObjectMeta
from shoal.api.events import Event
from shoal.api.labels import MADE_BY, SPEED_PROFILE
from shoal.api.speed_profile import SpeedProfile, SpeedProfileSpec, SpeedProfileStatus
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.clock import loop_time
from shoal.cluster.transport import Answer, Transport
from shoal.controllers.speedprofile.condition import LEFT_OUT, Fault, conditions_of
from shoal.controllers.speedprofile.identity import chosen
from shoal.controllers.speedprofile.learn import forget, is_forgotten, kind_of, learn, moved, newest
from shoal.controllers.state import ClusterState, Wake
from shoal.errors import Unavailable
from shoal.policy.common.times import parse_time
from shoal.runtime.controller import Key, key_of
from shoal.runtime.status_writer import StatusWriter, collection_path, object_path
from shoal.runtime.work_queue import Priority
from shoal.sizing.speed.measurements import Kind
from shoal_trainer.contract import StatusReport

logger = logging.getLogger(__name__)

SOON_SECONDS = 20.0
"""Interval of looks at a profile of which jobs report, and so of writes while estimates move: each look merges all."""
LATE_SECONDS = 300.0
"""Interval of writes of estimates that do not move."""
MOST_MADE = 200
"""Profiles that are made in one namespace: every plan reads all of them."""
MOST_MODELS = 4
"""Models that are learned of one job. Which one it trains is what its pod says, and each one makes a profile."""
NOT_KEPT = "what this job learns of speeds is not kept"
NAMED_JOBS = 3
DAY_SECONDS = 86_400.0
"""Interval of looks at a profile that may be deleted some day."""
_EVER = datetime.min.replace(tzinfo=UTC)
_MADE = {MADE_BY: "shoal"}
"""Labels of profiles that the operator made."""


class _Said(NamedTuple):
    """The newest report of a job."""

    job: Key
    report: StatusReport
    began: datetime | None
    """When the job began."""


Heard = Mapping[str, _Said]
"""By uid of the job."""


@dataclass(frozen=True)
class Known:
    """A profile as it is stored, or to be made, and the reports that it may not have yet. Nothing in it changes."""

    profile: SpeedProfile
    heard: Heard
    now: datetime
    on_fault: Callable[[], None]

    @property
    def is_forgotten(self) -> bool:
        """Whether nothing in it counts any more."""
        return not self.heard and is_forgotten(self.profile, self.now)

    def merged(self) -> SpeedProfile:
        """The profile with the reports: milliseconds for each of them, so not for the event loop."""
        status = self.profile.status
        for uid, said in self.heard.items():
            try:
                status = learn(status, uid, said.report, self.now, said.began)
            except Exception:  # broad: a report comes from a pod of a user's own image
                self.on_fault()
                logger.exception("the report of job %s/%s cannot be merged and is left out", *said.job)
        return self.profile.model_copy(update={"status": status})


@dataclass
class _Source:
    """A job that reports, until it is gone."""

    key: Key
    """Of the profile of its model."""
    process: str = ""
    """The coordinator's."""
    models: list[Kind] = field(default_factory=list)
    """What it trained, the newest last."""
    complaints: set[str] = field(default_factory=set)
    """What it was told about."""


def _is_made(profile: SpeedProfile) -> bool:
    """Whether the operator made it."""
    return _MADE.items() <= profile.metadata.labels.items()


def _parsed(answer: Answer) -> SpeedProfile:
    return SpeedProfile.model_validate_json(answer.body, extra="ignore")


class Learner:
    """Hears reports, and reconciles profiles.

    `on_fault`: told of a report that cannot be merged; `tell`: tells of an event about a job.
    """

    def __init__(
        self,
        transport: Transport,
        state: ClusterState,
        writer: StatusWriter[SpeedProfile],
        *,
        wake: Wake,
        wall: Callable[[], datetime],
        on_fault: Callable[[], None],
        tell: Callable[[TrainingJob, Event], None],
    ) -> None:
        self._on_fault = on_fault
        self._tell = tell
        self._transport = transport
        self._state = state
        self._writer = writer
        self._wake = wake
        self._wall = wall
        self._heard: dict[Key, dict[str, _Said]] = {}
        """By profile."""
        self._sources: dict[str, _Source] = {}
        """By uid of the job."""
        state.on_gone.append(self._forget)
        self._written: dict[Key, float] = {}
        """When a profile was written last."""
        self._faults: Mapping[Key, Fault] | None = None
        """None: this operator has made no plan yet."""

    def hear(self, job: TrainingJob, report: StatusReport) -> None:
        """Take a report. Cheap: it is merged by the next reconcile or plan.

        None before the FLOPs are counted, which say of what it is: sums that are not read now are in the next one.
        """
        if report.model is None or report.model.flops_per_sample is None or job.status.finished:
            return
        uid, about = job.metadata.uid, key_of(job)
        model = kind_of(report.model)
        key = job.metadata.namespace, chosen(job, model, self._state.profiles)
        source = self._sources.setdefault(uid, _Source(key))
        if not all(each.alike(model) for each in source.models[-1:]):
            if source.process == report.speed_epoch:
                self._on_fault()  # a process has one model: whatever says otherwise would make a profile each time
                return
            new = not any(each.alike(model) for each in source.models)
            if new and len(source.models) >= MOST_MODELS:
                self._on_fault()
                words = f"it has trained {MOST_MODELS} models already: apply another one as a job of its own"
                self._complain(uid, "models", f"{NOT_KEPT}: {words}")
                return
        named = job.metadata.annotations.get(SPEED_PROFILE)
        if named and named != key[1]:
            where = f"what this job learns of speeds is kept in {key[1]}"
            other = "which is of another model, or of another size of its input"
            what = f"the annotation {SPEED_PROFILE} names SpeedProfile {named}, {other}"
            self._complain(uid, named, f"{what}: {where}")
        if source.key != key:
            self._heard.get(source.key, {}).pop(uid, None)
        source.key, source.process = key, report.speed_epoch
        source.models = [*(each for each in source.models if not each.alike(model)), model]
        if len(report.shards) < job.spec.parameter_servers.replicas:  # an update is work of all of them
            report = report.model_copy(update={"shards": ()})
        heard = self._heard.setdefault(key, {})
        if not heard:  # from then on it is looked at again by itself
            self._wake(key, Priority.ROUTINE)
        heard[uid] = _Said(about, report, job.status.start_time)

    def _forget(self, uid: str) -> None:
        self._sources.pop(uid, None)

    def judged(self, faults: Mapping[Key, str]) -> None:
        """Hear from the planner which profiles it leaves out, and why: it tells all of them every time."""
        every = {key_of(each): each for each in self._state.profiles.all()}
        known = {key: words for key, words in faults.items() if key in every}
        self._faults = {key: Fault(every[key].metadata.generation, words) for key, words in known.items()}
        for key, profile in every.items():
            if (key in faults) != any(each.reason == LEFT_OUT for each in profile.status.conditions):
                self._wake(key, Priority.NORMAL)

    def name_of(self, job: TrainingJob, fingerprint: str) -> str:
        """The profile of a job's model (see `identity`); `fingerprint` is empty before the job has reported it."""
        source = self._sources.get(job.metadata.uid)
        said = source.models[-1] if source is not None and source.models else Kind(fingerprint)
        kind = said if said.fingerprint == fingerprint else Kind(fingerprint)
        return chosen(job, kind, self._state.profiles)

    def known(self, key: Key) -> Known:
        """What is known of a model now. Cheap."""
        namespace, name = key
        stored = self._state.profiles.get(name, namespace)
        profile = (
            SpeedProfile(metadata=ObjectMeta(namespace=namespace, name=name))
            if stored is None
            else self._writer.as_known(stored)
        )
        return Known(profile, dict(self._heard.get(key, {})), self._wall(), self._on_fault)

    @property
    def keys(self) -> list[Key]:
        """Every profile that exists or will."""
        return list(dict.fromkeys([*map(key_of, self._state.profiles.all()), *self._heard]))

    async def __call__(self, key: Key) -> float | None:
        """Write a profile, if it is worth it; returns the seconds until it is looked at again."""
        namespace, name = key
        profile = self._state.profiles.get(name, namespace)
        if profile is None and self._heard.get(key):
            if not await self._has_room(namespace):
                return self._keep_in_memory(key)
            profile = await self._create(key)
        if profile is None:
            self._heard.pop(key, None)  # nothing is known, or the namespace goes
            self._written.pop(key, None)
            return None
        if not self._writer.can_write(profile):
            return LATE_SECONDS  # it changed to what cannot be read: what else it becomes is heard
        known = self.known(key)
        too_old = is_forgotten(profile, known.now) and is_forgotten(profile, self._served())
        if too_old and self._is_idle(profile, self._annotated(namespace)):
            return None if await self._delete(profile, "its measurements are too old") else DAY_SECONDS
        ended = {uid: each for uid, each in known.heard.items() if not self._runs(uid)}
        before = status = known.profile.status
        if known.heard:
            merged = await asyncio.to_thread(known.merged)
            status = self._summed_up(status, merged.status, known.heard)
        faults, generation = self._faults, profile.metadata.generation
        conditions = conditions_of(profile, (faults or {}).get(key), self._wall(), judged=faults is not None)
        judged = (conditions, generation) != (before.conditions, before.observed_generation)
        status = status.model_copy(update={"conditions": conditions, "observed_generation": generation})
        now = loop_time()
        due = self._written.get(key, -LATE_SECONDS) + LATE_SECONDS
        if status != before and (judged or ended or moved(before, status) or now >= due):
            if await self._writer.write(profile, status) is None:
                return 1.0  # it changed meanwhile: merge again
            self._written[key] = now
        heard = self._heard.get(key, {})
        for uid, each in ended.items():
            if heard.get(uid) is each:
                del heard[uid]
        if not heard:
            self._heard.pop(key, None)
            self._written.pop(key, None)
            return DAY_SECONDS if _is_made(profile) else None
        return SOON_SECONDS

    def _summed_up(
        self, old: SpeedProfileStatus, new: SpeedProfileStatus, heard: Heard
    ) -> SpeedProfileStatus:
        measured = {source.uid for source in new.sources}
        gone = {uid for uid in measured if not self._runs(uid)}
        named = [said.job[1] for uid, said in heard.items() if uid in measured]
        earlier = [name for name in old.jobs.split(", ") if name and name not in named]
        jobs = ", ".join([*named, *earlier][:NAMED_JOBS])
        return forget(new, gone).model_copy(update={"jobs": jobs})

    async def _create(self, key: Key) -> SpeedProfile | None:
        """The profile, made; None where its namespace does not take it any more.

        Raises:
            Unavailable: it may succeed on retry.
        """
        namespace, name = key
        body = {
            "apiVersion": API_VERSION,
            "kind": "SpeedProfile",
            "metadata": {"name": name, "namespace": namespace, "labels": _MADE},
            "spec": {},
        }
        path = collection_path(SpeedProfile, namespace)
        answer = await self._transport.request("POST", path, body=body)
        if answer.ok:
            made = _parsed(answer)
            self._state.profiles.put(made, ours=True)
            return made
        if answer.status in {403, 404} and "terminated" in answer.message:
            return None
        if answer.status in {400, 403, 422}:
            self._refused(key, answer.message)
        raise Unavailable(f"cannot create SpeedProfile {namespace}/{name}: {answer.status} {answer.message}")

    async def _has_room(self, namespace: str) -> bool:
        """Whether one more may be made: if need be, the one goes that was measured longest ago and is not used.

        Raises:
            Unavailable: it may succeed on retry.
        """
        every = (each for each in self._state.profiles.all() if each.metadata.namespace == namespace)
        made = sorted(filter(_is_made, every), key=newest)
        if len(made) < MOST_MADE:
            return True
        annotated = self._annotated(namespace)
        idle = next((each for each in made if self._is_idle(each, annotated)), None)
        return idle is not None and await self._delete(idle, f"the namespace has {len(made)}")

    def _keep_in_memory(self, key: Key) -> float | None:
        """What finds no room: plans know it as long as its jobs run. Returns the seconds until it is tried again."""
        self._on_fault()
        self._refused(key, f"namespace {key[0]} has {MOST_MADE} that Shoal made: delete those of old models")
        self._heard[key] = {uid: each for uid, each in self._heard[key].items() if self._runs(uid)}
        return SOON_SECONDS

    def _refused(self, key: Key, why: str) -> None:
        """Tell the jobs whose profile cannot be made: its name may be that of an annotation."""
        for uid in self._heard.get(key, {}):
            job = self._state.jobs.by_uid(uid)
            named = job is not None and job.metadata.annotations.get(SPEED_PROFILE) == key[1]
            whose = f", which the annotation {SPEED_PROFILE} names," if named else ""
            self._complain(uid, "refused", f"{NOT_KEPT}: SpeedProfile {key[1]}{whose} cannot be made: {why}")

    def _complain(self, uid: str, about: str, words: str) -> None:
        """Tell a job, while it runs, why its measurements are not kept, or not where they should. Once about each."""
        job, source = self._state.jobs.by_uid(uid), self._sources.get(uid)
        if job is not None and source is not None and about not in source.complaints:
            source.complaints.add(about)
            self._tell(job, Event("Warning", "SpeedProfileRefused", words))

    def _annotated(self, namespace: str) -> set[str]:
        """The names that unfinished jobs have in their annotation."""
        jobs = (each for each in self._state.jobs.all() if each.metadata.namespace == namespace)
        return {job.metadata.annotations.get(SPEED_PROFILE, "") for job in jobs if not job.status.finished}

    def _is_idle(self, profile: SpeedProfile, annotated: Collection[str]) -> bool:
        """Whether it may be deleted: the operator made it, nobody wrote anything in it, and no job uses it.

        It is not if it is deleted already, and only waits for a finalizer.
        """
        about = profile.metadata
        return _is_made(profile) and not (
            about.deletion_timestamp is not None
            or profile.spec != SpeedProfileSpec()
            or about.name in annotated
            or self._heard.get(key_of(profile))
            or any(self._runs(source.uid) for source in profile.status.sources)
        )

    async def _delete(self, profile: SpeedProfile, why: str) -> bool:
        """Delete a profile as it is known. False: that is not allowed, or it has changed, and it stays.

        Raises:
            Unavailable: it may succeed on retry.
        """
        about = profile.metadata
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": about.uid, "resourceVersion": about.resource_version},
        }
        answer = await self._transport.request("DELETE", object_path(profile), body=body)
        answer.accept(403, 404, 409)
        if answer.status in {403, 409}:
            return False
        stored = None if answer.status == 404 or answer.is_status else _parsed(answer)
        if stored is not None and stored.metadata.deletion_timestamp is not None:
            self._state.profiles.put(stored, ours=True)  # a finalizer of somebody's keeps it, and its name
        else:
            self._state.profiles.drop(about.uid)
        logger.info("SpeedProfile %s/%s is deleted: %s", about.namespace, about.name, why)
        return True

    def _served(self) -> datetime:
        """A time that has come by the API server's clock: when the newest object was made that is known.

        What is deleted is gone for good: the clock of this process alone does not say that it is old.
        """
        caches: tuple[Cache[Any], ...] = (self._state.profiles, self._state.jobs, self._state.pods)
        made = (each.metadata.creation_timestamp for cache in caches for each in cache.all())
        return max((parse_time(each) or _EVER for each in made), default=_EVER)

    def _runs(self, uid: str) -> bool:
        job = self._state.jobs.by_uid(uid)
        return job is not None and not job.status.finished
