"""Creates and deletes the objects of a job, and reads the answers: whose an existing object is, why one is refused.

Names are deterministic, so a repeated create is a 409 (AlreadyExists) and not a duplicate. Deletes have the uid as a
precondition. Nothing is created for a job whose uid is not in the cache. What exists goes into the caches, so that the
next plan sees it. A refusal of the object is kept for the next plan; an answer that may differ on retry is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.api import labels
from shoal.api.base import API_VERSION
from shoal.api.kube import DisruptionBudget, Pod, Service
from shoal.api.kueue import KUEUE, Workload
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.clock import loop_time
from shoal.cluster.transport import JSON, Answer, Transport
from shoal.controllers.belonging import run_of
from shoal.controllers.state import ClusterState
from shoal.controllers.trainingjob.api_answers import AnswerStore
from shoal.controllers.trainingjob.observe import name_conflict
from shoal.errors import Unavailable
from shoal.manifests.objects import Manifest
from shoal.policy.model import Refusal, RefusalKind
from shoal.runtime.controller import key_of


class Kind(NamedTuple):
    """A kind of objects in the job's namespace."""

    group: str
    plural: str
    model: Any
    """None: nobody watches them."""
    unique: bool = False
    """Names contain the job's uid, so what has one is the job's."""
    strict: bool = True
    """A field that the API server does not know is an error."""


JOBS = Kind(f"/apis/{API_VERSION}", TrainingJob.PLURAL, TrainingJob)
PODS = Kind("/api/v1", "pods", Pod)
SERVICES = Kind("/api/v1", "services", Service)
SECRETS = Kind("/api/v1", "secrets", None, unique=True)
BUDGETS = Kind("/apis/policy/v1", "poddisruptionbudgets", DisruptionBudget, unique=True)
WORKLOADS = Kind(f"/apis/{KUEUE}", "workloads", Workload, strict=False)
"""Not strict: Kueue may know fewer fields of a pod than the cluster."""

REFUSED = frozenset({400, 403, 413, 422})
"""Refusals of the object. Any other status (401, 404, 405, 409 of an admission plugin) may be temporary."""
LABEL_REMOVED = "LabelRemoved"
"""Why a pod that is not the job's any more was lost."""
_FULL, _NO_DRY_RUN = "exceeded quota", "does not support dry run"
_ADMISSION = ("admission webhook", "ValidatingAdmissionPolicy")
"""Named in refusals by a cluster's own rules, which may change while the object does not. They answer any status."""


class Objects:
    """The objects of all jobs."""

    def __init__(self, transport: Transport, state: ClusterState, answers: AnswerStore) -> None:
        self._transport, self._answers = transport, answers
        self._jobs, self._pools = state.jobs, state.pools_by_name
        self._caches: dict[str, Cache[Any]] = {
            JOBS.plural: state.jobs,
            PODS.plural: state.pods,
            SERVICES.plural: state.services,
            BUDGETS.plural: state.budgets,
            WORKLOADS.plural: state.workloads,
        }

    async def create(
        self,
        job: TrainingJob,
        kind: Kind,
        name: str,
        manifest: Manifest | Callable[[], Manifest],
        *,
        urgent: bool = False,
        pool: str = "",
    ) -> bool:
        """Create an object; True if it exists now and is of the job.

        `manifest`, or what makes it when it is sent. `pool`: the CapacityPool that it is for.
        """
        known = self._jobs.get(job.metadata.name, job.metadata.namespace)
        if known is None or known.metadata.uid != job.metadata.uid or known.metadata.deletion_timestamp:
            return False  # the job was deleted meanwhile
        validation = {"fieldValidation": "Strict" if kind.strict else "Ignore"}
        answer = await self._transport.request(
            "POST", path(job, kind), query=validation, body=manifest, urgent=urgent
        )
        answers = self._answers.get(job.metadata.uid)
        exists = answer.status == 409 and answer.reason == "AlreadyExists"
        if exists and not kind.unique:
            return await self._already_exists(job, kind, name)
        # A full quota refuses a create even if the object exists already.
        exists_still = answer.status == 403 and kind.unique and name in answers.existing
        if answer.ok or exists or exists_still:
            answers.refused.pop(name, None)
            answers.conflicting.pop(name, None)
            answers.made_before = answers.made_before or exists
            if answer.ok and kind.model:
                return await self._made(job, kind, name, answer, pool)
            if kind.unique:  # nothing else remembers that it exists
                answers.existing[name] = loop_time()
            return True
        if answer.status not in REFUSED:
            raise Unavailable(f"cannot create {name}: {answer.status} {answer.message}")
        self.refused(job, name, _why(answer), answer.message, pool)
        return False

    async def _made(self, job: TrainingJob, kind: Kind, name: str, answer: Answer, pool: str) -> bool:
        """Take what was created; False if somebody changed it on its way, so that it would be made again and again."""
        found = kind.model.model_validate_json(answer.body)
        if _is_known(job, kind, found):
            self._caches[kind.plural].put(found, ours=True)
            return True
        await self.delete(job, kind, name, found.metadata.uid)
        words = "it was made with other labels or another owner than asked for, perhaps by a mutating admission webhook"
        self.refused(job, name, RefusalKind.FORBIDDEN, words, pool)
        return False

    async def delete(
        self, job: TrainingJob, kind: Kind, name: str, uid: str, version: str = "", **options: Any
    ) -> Answer:
        """Delete an object, unless another one has its name by now.

        `version`: only if it has this resourceVersion; else the answer is 409.

        Raises:
            Unavailable: another one has its name, or it changed at that moment: its watch says which.
        """
        where = path(job, kind, name)
        asked = {"uid": uid, "resourceVersion": version} if version else {"uid": uid}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": asked, **options}
        answer = await self._transport.request("DELETE", where, body=body, content_type=JSON)
        answer.accept(404, *((409,) if version else ()))
        if answer.status == 409:
            return answer
        if answer.ok and _stays(answer):
            terminating = kind.model.model_validate_json(answer.body, extra="ignore")
            self._caches[kind.plural].put(terminating)  # wakes the job: the plan that deleted it is over
        else:
            self._caches[kind.plural].drop(uid)
        return answer

    async def confirm_possible(
        self, job: TrainingJob, kind: Kind, name: str, manifest: Callable[[], Manifest]
    ) -> None:
        """Ask whether an object would be made, which takes the place of another.

        So a quota may be full: it is the last to be asked. Webhooks of old that know no dry run cannot be.

        Raises:
            Unavailable: it would be refused.
        """
        query = {"fieldValidation": "Strict", "dryRun": "All"}
        answer = await self._transport.request(
            "POST", path(job, kind), query=query, body=manifest, urgent=True
        )
        if not answer.ok and not any(words in answer.message for words in (_FULL, _NO_DRY_RUN)):
            raise Unavailable(f"{name} would be refused: {answer.status} {answer.message}")

    async def confirm_absent(self, job: TrainingJob, name: str) -> dict[str, str]:
        """Ask for a pod: by name the reason of its end, as far as it is known; empty if it is there.

        One that the job has no more, by its labels or its owner, counts as gone, and is deleted if it was made for it:
        no watch tells what becomes of it.
        """
        if (found := await self._pod(job, name)) is None:
            return {name: ""}
        if run_of(found) != (key_of(job), job.metadata.uid):
            if found.metadata.controller_uid == job.metadata.uid:
                await self.delete(job, PODS, name, found.metadata.uid)
            return {name: LABEL_REMOVED}
        self._caches[PODS.plural].put(found, ours=True)
        return {}

    async def _pod(self, job: TrainingJob, name: str) -> Pod | None:
        """The pod of this name. Who may not get it may list it, as the watch does."""
        answer = await self._transport.request("GET", path(job, PODS, name), urgent=True)
        answer.accept(403, 404)
        if answer.status == 404:
            return None
        if answer.ok:
            return Pod.model_validate_json(answer.body)
        only = {"fieldSelector": f"metadata.name={name}"}
        listed = await self._transport.request("GET", path(job, PODS), query=only, urgent=True)
        listed.accept()
        return next(map(Pod.model_validate, json.loads(listed.body)["items"]), None)

    async def confirm_none_runs(self, job: TrainingJob) -> None:
        """Ask for the job's pods, before their quota is given back: the watch of pods may be behind that of Workloads.

        Raises:
            Unavailable: one has not ended.
        """
        only = {"labelSelector": f"{labels.JOB_UID}={job.metadata.uid}"}
        listed = await self._transport.request("GET", path(job, PODS), query=only)
        listed.accept()
        found = map(Pod.model_validate, json.loads(listed.body)["items"])
        pods = [pod for pod in found if run_of(pod) == (key_of(job), job.metadata.uid)]  # not a copy by hand
        for pod in pods:
            self._caches[PODS.plural].put(pod)
        if running := [pod.metadata.name for pod in pods if not pod.ended]:
            raise Unavailable(f"{running[0]} has not ended")

    def saw(self, kind: Kind, answer: Answer) -> None:
        """Write an object through to the cache."""
        self._caches[kind.plural].put(kind.model.model_validate_json(answer.body), ours=True)

    def refused(self, job: TrainingJob, name: str, why: RefusalKind, message: str, pool: str = "") -> None:
        """Remember a refusal."""
        refused = self._answers.get(job.metadata.uid).refused
        specs = job.metadata.generation, self._pools[pool].metadata.generation if pool in self._pools else 0
        before = refused.get(name)
        again = before is not None and (before.kind, before.specs) == (why, specs)
        times = before.times + 1 if before is not None and again else 0
        refused[name] = Refusal(why, name, message, specs, loop_time(), times, pool)

    async def _already_exists(self, job: TrainingJob, kind: Kind, name: str) -> bool:
        """Handle a 409: the object is the job's own (True), or belongs to another owner.

        One that was made for it and lost the job's labels is deleted. It is made again; of a pod, the next one.
        """
        answer = await self._transport.request("GET", path(job, kind, name))
        if answer.status == 404:
            raise Unavailable(f"cannot create {name}: it is there, and is not")  # being deleted
        answer.accept()
        answers = self._answers.get(job.metadata.uid)
        found = Pod.model_validate_json(answer.body)  # or any other object with an owner
        owned = found.metadata.controller_uid == job.metadata.uid
        if owned and not _is_known(job, kind, found):
            await self.delete(job, kind, name, found.metadata.uid)
            if kind is PODS:
                answers.gone_pods[name] = LABEL_REMOVED
            raise Unavailable(f"cannot create {name}: it was there without the labels of the job")
        if owned:
            answers.refused.pop(name, None)
            answers.conflicting.pop(name, None)
            answers.made_before = True
            self.saw(kind, answer)
            return True
        answers.taken(name, name_conflict(found.metadata, job, found.spec.node_name), loop_time())
        return False


def _is_known(job: TrainingJob, kind: Kind, found: Pod) -> bool:
    """Whether the caches show an object as one of the job that owns it."""
    if kind is PODS:
        return run_of(found) == (key_of(job), job.metadata.uid)
    meta = found.metadata
    return (meta.controller_uid, meta.labels.get(labels.JOB)) == (job.metadata.uid, job.metadata.name)


def _stays(deleted: Answer) -> bool:
    """Whether a deleted object is still there, for a pod's grace period or until its finalizers are gone."""
    meta: dict[str, Any] = json.loads(deleted.body).get("metadata") or {}
    held = meta.get("deletionGracePeriodSeconds") or meta.get("finalizers")
    return bool(meta.get("deletionTimestamp") and held)


def path(job: TrainingJob, kind: Kind, name: str = "") -> str:
    """The path of a job's object, or of all of a kind in its namespace."""
    collection = f"{kind.group}/namespaces/{job.metadata.namespace}/{kind.plural}"
    return f"{collection}/{name}" if name else collection


def _why(answer: Answer) -> RefusalKind:
    if answer.status == 403 or any(words in answer.message for words in _ADMISSION):
        return RefusalKind.QUOTA if _FULL in answer.message else RefusalKind.FORBIDDEN
    return RefusalKind.INVALID
