"""Carries out the actions of a plan, and writes the answers through to the caches for the next plan.

Names are deterministic, so a repeated create is a 409 (AlreadyExists) and not a duplicate. Deletes have the uid as a
precondition. Nothing is created for a job whose uid is not in the cache. A refusal of the object is stored for the next
plan; an answer that may differ on retry is an error, after which the work queue backs off.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shoal import manifests
from shoal.api import labels
from shoal.api.base import API_VERSION
from shoal.api.kube import DisruptionBudget, Node, Pod, Service
from shoal.api.kueue import KUEUE, Workload
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import APPLY_PATCH, JSON, MERGE_PATCH, Answer, Transport
from shoal.controllers.state import ClusterState
from shoal.controllers.trainingjob.api_answers import AnswerStore, ApiAnswers
from shoal.controllers.trainingjob.credentials import JobCredentials
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.controllers.trainingjob.observe import name_conflict
from shoal.controllers.trainingjob.workloads import Workloads
from shoal.errors import ClusterError, Refused, Unavailable
from shoal.manifests import names
from shoal.manifests.objects import POD_GROUPS
from shoal.policy.model import (
    Action,
    ApplyPodGroup,
    ConfirmAbsent,
    CreateDisruptionBudget,
    CreatePod,
    CreateSecret,
    CreateService,
    CreateWorkload,
    DeleteDisruptionBudget,
    DeleteJob,
    DeletePod,
    DeleteService,
    DeleteWorkload,
    Manifest,
    Refusal,
    RefusalKind,
    RequeueWorkload,
    TellWorkload,
    UpdateService,
)

logger = logging.getLogger(__name__)

_TOGETHER: dict[type[Action], str] = {
    CreateSecret: "what pods need",
    CreateService: "what pods need",
    CreatePod: "pods and their budget",
    CreateDisruptionBudget: "pods and their budget",
}
"""Actions that run concurrently where they follow each other, as those of one kind do."""
_FIRST = _TOGETHER[CreateSecret]
"""If one of these is refused, the actions after it are skipped."""
_REFUSED = frozenset({400, 403, 413, 422})
"""Refusals of the object. Any other status (401, 404, 405, 409 of an admission plugin) may be temporary."""
_ADMISSION = ("admission webhook", "ValidatingAdmissionPolicy")
"""Named in refusals by a cluster's own rules, which may change while the object does not. They answer any status."""
FIELD_MANAGER = "shoal-operator"
MAX_IN_FLIGHT = 16
"""Concurrent requests of one job, so that a large job does not delay the others."""
GROWTH_IN_FLIGHT = 8
"""Of these, those for pods that replace none: more would only wait in the API server, and losses behind them."""


@dataclass(frozen=True)
class Outcome:
    """The result of a plan's actions."""

    changed: bool = False
    """Something was created, deleted or found to exist: plan again."""
    error: ClusterError | None = None
    """The first error that may not occur on retry."""


class Applier:
    """Carries out actions."""

    def __init__(
        self,
        transport: Transport,
        state: ClusterState,
        answers: AnswerStore,
        *,
        credentials: Callable[[str], JobCredentials],
        wall: Callable[[], datetime],
        metrics: JobMetrics,
    ) -> None:
        self._transport = transport
        self._state = state
        self._answers = answers
        self._credentials = credentials
        self._wall = wall
        self._metrics = metrics
        self._workloads = Workloads(transport, state.workloads, manager=FIELD_MANAGER, wall=wall)

    async def apply(self, job: TrainingJob, actions: tuple[Action, ...]) -> Outcome:
        """Carry out the actions in order; consecutive ones that belong together run concurrently."""
        errors: list[ClusterError] = []
        changed, refused = 0, False
        answers = self._answers.get(job.metadata.uid)
        known = answers.first_look
        limit, growth = asyncio.Semaphore(MAX_IN_FLIGHT), asyncio.Semaphore(GROWTH_IN_FLIGHT)

        async def one(action: Action) -> None:
            nonlocal changed, refused
            kind = type(action).__name__
            try:
                async with growth if _grows(job, action) else contextlib.nullcontext(), limit:
                    done = await self._do(job, action)
            except ClusterError as error:
                errors.append(error)
                self._metrics.actions.labels(kind, "error").inc()
                return
            if not done:
                refused = True
                self._metrics.actions.labels(kind, "refused").inc()
            else:
                changed += 1
                logger.info("%s/%s: %s %s", job.metadata.namespace, job.metadata.name, kind, action.name)
                self._metrics.actions.labels(kind, "done").inc()

        for stage, group in itertools.groupby(actions, key=_stage):
            refused = False
            async with asyncio.TaskGroup() as together:
                for action in group:
                    together.create_task(one(action))
            if (refused and stage == _FIRST) or (answers.first_look and not known):
                break  # others have made more than was known: planned anew
        return Outcome(changed=changed > 0, error=errors[0] if errors else None)

    async def _do(self, job: TrainingJob, action: Action) -> bool:
        """Carry out one action; False if it was refused."""
        answers = self._answers.get(job.metadata.uid)
        match action:
            case CreatePod(name, manifest):
                urgent = not _grows(job, action)
                return await self._create(
                    job, answers, "/api/v1", "pods", name, manifest, self._saw_pod, urgent=urgent
                )
            case CreateService(name, manifest):
                return await self._create(
                    job, answers, "/api/v1", "services", name, manifest, self._saw_service
                )
            case CreateSecret(name):
                data = self._credentials(job.metadata.uid).secret_data()
                manifest = manifests.secret(job, data)
                return await self._create(
                    job, answers, "/api/v1", "secrets", name, manifest, None, unique=True
                )
            case CreateDisruptionBudget(name, manifest):
                return await self._create(
                    job,
                    answers,
                    "/apis/policy/v1",
                    "poddisruptionbudgets",
                    name,
                    manifest,
                    self._saw_budget,
                    unique=True,
                )
            case ApplyPodGroup(name, manifest):
                return await self._apply_pod_group(job, answers, name, manifest)
            case CreateWorkload(name, manifest):
                return await self._create_workload(job, answers, name, manifest)
            case TellWorkload():
                await self._workloads.tell(job, action)
            case RequeueWorkload(name, uid):
                await self._workloads.requeue(job, name, uid)
            case DeleteWorkload(name, uid):
                await self._workloads.delete(job, name, uid)
            case DeletePod(name, uid, grace_seconds):
                await self._delete_pod(job, name, uid, grace_seconds)
            case UpdateService(name, selector):
                await self._select(job, name, selector)
            case DeleteService(name, uid):
                answer = await self._delete(_path("/api/v1", job, "services", name), uid)
                answer.accept(404, 409)
                if answer.status == 404:  # others knew more than this process
                    answers.recorded, answers.made_before = False, True
                self._state.services.drop(uid)
            case DeleteDisruptionBudget(name):
                path = _path("/apis/policy/v1", job, "poddisruptionbudgets", name)
                (await self._transport.request("DELETE", path)).accept(403, 404)  # it is only tidied up
                answers.existing.pop(name, None)
                if (budget := self._state.budgets.get(name, job.metadata.namespace)) is not None:
                    self._state.budgets.drop(budget.metadata.uid)
            case ConfirmAbsent(name, kind):
                await self._confirm_absent(job, answers, name, kind)
            case DeleteJob(name, uid):
                path = _path(f"/apis/{API_VERSION}", job, TrainingJob.PLURAL, name)
                (await self._delete(path, uid, propagationPolicy="Background")).accept(404, 409)
                self._state.jobs.drop(uid)
        return True

    async def _create(
        self,
        job: TrainingJob,
        answers: ApiAnswers,
        group: str,
        plural: str,
        name: str,
        manifest: Manifest,
        saw: Callable[[bytes], None] | None,
        *,
        unique: bool = False,
        strict: bool = True,
        urgent: bool = False,
    ) -> bool:
        """Create an object; True if it exists now and belongs to the job.

        `saw`: None for kinds without a watch. `unique`: its name contains the job's uid, so what has it is the job's.
        `strict`: a field that the API server does not know is an error.
        """
        known = self._state.jobs.get(job.metadata.name, job.metadata.namespace)
        if known is None or known.metadata.uid != job.metadata.uid or known.metadata.deletion_timestamp:
            return False  # the job was deleted meanwhile
        answer = await self._transport.request(
            "POST",
            _path(group, job, plural),
            query={"fieldValidation": "Strict" if strict else "Ignore"},
            body=manifest,
            urgent=urgent,
        )
        exists = answer.status == 409 and answer.reason == "AlreadyExists"
        # A full quota refuses a create even if the object exists already.
        exists_still = answer.status == 403 and unique and name in answers.existing
        if exists and not unique:
            assert saw is not None
            return await self._already_exists(job, answers, _path(group, job, plural, name), name, saw)
        if answer.ok or exists or exists_still:
            answers.refused.pop(name, None)
            answers.made_before = answers.made_before or exists
            if unique and not (answer.ok and saw):  # what the watch will report is not remembered here
                answers.existing[name] = self._wall()
            if answer.ok and saw is not None:
                saw(answer.body)
            return True
        if answer.status not in _REFUSED:
            raise Unavailable(f"cannot create {name}: {answer.status} {answer.message}")
        answers.refused[name] = self._refusal(job, name, answer)
        return False

    async def _apply_pod_group(
        self, job: TrainingJob, answers: ApiAnswers, name: str, manifest: Manifest
    ) -> bool:
        """Make the PodGroup as it should be; False if there are none, or they are not allowed."""
        answer = await self._transport.request(
            "PATCH",
            _path(f"/apis/{POD_GROUPS}", job, "podgroups", name),
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body=manifest,
            content_type=APPLY_PATCH,
        )
        key = names.group_key(job)
        if answer.ok:
            answers.refused.pop(key, None)
            answers.existing[key] = self._wall()
            return True
        if answer.status not in {*_REFUSED, 404}:
            raise Unavailable(f"cannot apply {name}: {answer.status} {answer.message}")
        # All of these are asked again: what is missing may be installed.
        refusal = Refusal(RefusalKind.FORBIDDEN, key, answer.message, job.metadata.generation, self._wall())
        answers.refused[key] = refusal
        return False

    async def _create_workload(
        self, job: TrainingJob, answers: ApiAnswers, name: str, manifest: Manifest
    ) -> bool:
        """Create a Workload; False if it was refused, or if its priority class does not exist."""
        try:
            manifest = await self._workloads.with_priority(job, manifest)
        except Refused as error:  # asked again: it may be made
            kind = RefusalKind.FORBIDDEN
            answers.refused[name] = Refusal(kind, name, str(error), job.metadata.generation, self._wall())
            return False
        group, saw = f"/apis/{KUEUE}", self._saw_workload
        # Not strict: Kueue may know fewer fields of a pod than the cluster.
        return await self._create(job, answers, group, "workloads", name, manifest, saw, strict=False)

    async def _already_exists(
        self, job: TrainingJob, answers: ApiAnswers, path: str, name: str, saw: Callable[[bytes], None]
    ) -> bool:
        """Handle a 409: the object is the job's own (True), or belongs to another owner."""
        answer = await self._transport.request("GET", path)
        if answer.status == 404:
            return False  # deleted meanwhile: the next plan retries
        answer.accept()
        found = Pod.model_validate_json(answer.body)  # or any other object with an owner
        if found.metadata.controller_uid == job.metadata.uid and found.metadata.labels.get(labels.JOB):
            answers.refused.pop(name, None)
            answers.made_before = True
            saw(answer.body)
            return True
        answers.conflicting[name] = (name_conflict(found.metadata, job, found.spec.node_name), self._wall())
        return False

    def _refusal(self, job: TrainingJob, name: str, answer: Answer) -> Refusal:
        kind = RefusalKind.INVALID
        if answer.status == 403 or any(words in answer.message for words in _ADMISSION):
            kind = RefusalKind.QUOTA if "exceeded quota" in answer.message else RefusalKind.FORBIDDEN
        return Refusal(kind, name, answer.message, job.metadata.generation, self._wall())

    async def _delete_pod(self, job: TrainingJob, name: str, uid: str, grace_seconds: int | None) -> None:
        options = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        answer = await self._delete(_path("/api/v1", job, "pods", name), uid, **options)
        if answer.ok and grace_seconds != 0:
            pod = Pod.model_validate_json(answer.body)
            if pod.metadata.deletion_timestamp and pod.metadata.deletion_grace_period_seconds:
                self._state.pods.put(pod)  # wakes the job: the plan that deleted it is over
                return
        answer.accept(404, 409)  # 409: another pod has the name now
        self._state.pods.drop(uid)

    async def _delete(self, path: str, uid: str, **options: Any) -> Answer:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}, **options}
        return await self._transport.request("DELETE", path, body=body, content_type=JSON)

    async def _confirm_absent(self, job: TrainingJob, answers: ApiAnswers, name: str, kind: str) -> None:
        """Ask for an object that is not in the cache, which may lag behind."""
        path = _path("/api/v1", job, "pods", name) if kind == "Pod" else f"/api/v1/nodes/{name}"
        answer = await self._transport.request("GET", path)
        if answer.status == 404 or (
            kind == "Node" and answer.status == 403
        ):  # who may not ask believes the watch
            if kind == "Pod":
                answers.gone_pods[name] = ""
            else:
                answers.gone_nodes[name] = self._wall()
            return
        answer.accept()
        if kind == "Pod":
            self._saw_pod(answer.body)
        else:
            self._state.nodes.put(Node.model_validate_json(answer.body))

    async def _select(self, job: TrainingJob, name: str, selector: dict[str, str]) -> None:
        known = self._state.services.get(name, job.metadata.namespace)
        gone = dict.fromkeys(known.spec.selector if known else ())
        patch: dict[str, Any] = {"spec": {"selector": {**gone, **selector}}}
        if known is not None:
            patch["metadata"] = {"uid": known.metadata.uid}
        path = _path("/api/v1", job, "services", name)
        answer = await self._transport.request("PATCH", path, body=patch, content_type=MERGE_PATCH)
        if answer.status in {404, 409} and known is not None:
            self._state.services.drop(known.metadata.uid)
            return
        answer.accept()
        self._saw_service(answer.body)

    def _saw_pod(self, body: bytes) -> None:
        self._state.pods.put(Pod.model_validate_json(body), ours=True)

    def _saw_service(self, body: bytes) -> None:
        self._state.services.put(Service.model_validate_json(body), ours=True)

    def _saw_workload(self, body: bytes) -> None:
        self._state.workloads.put(Workload.model_validate_json(body), ours=True)

    def _saw_budget(self, body: bytes) -> None:
        self._state.budgets.put(DisruptionBudget.model_validate_json(body), ours=True)


def _grows(job: TrainingJob, action: Action) -> bool:
    """Whether it makes a pod that replaces none."""
    return isinstance(action, CreatePod) and action.incarnation == names.first_incarnation(job)


def _stage(action: Action) -> str:
    kind = type(action)
    return _TOGETHER.get(kind, kind.__name__)


def _path(group: str, job: TrainingJob, plural: str, name: str = "") -> str:
    collection = f"{group}/namespaces/{job.metadata.namespace}/{plural}"
    return f"{collection}/{name}" if name else collection
