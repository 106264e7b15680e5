"""Carries out an action, and writes the answer through to the caches for the next plan.

What is refused is not an error: the next plan sees it (`objects`). An answer that may differ on retry is one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any

from shoal import manifests
from shoal.api.base import Resource
from shoal.api.kube import Node
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import version
from shoal.cluster.clock import loop_time
from shoal.cluster.transport import MERGE_PATCH, Transport, apply
from shoal.controllers.state import ClusterState
from shoal.controllers.trainingjob.api_answers import AnswerStore, ApiAnswers
from shoal.controllers.trainingjob.credentials import JobCredentials
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.controllers.trainingjob.objects import (
    BUDGETS,
    JOBS,
    PODS,
    REFUSED,
    SECRETS,
    SERVICES,
    WORKLOADS,
    Kind,
    Objects,
    path,
)
from shoal.controllers.trainingjob.workloads import Workloads
from shoal.errors import Refused, Unavailable
from shoal.manifests import names
from shoal.manifests.objects import POD_GROUPS, Manifest
from shoal.policy.actions import (
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
    RequeueWorkload,
    TellWorkload,
    UpdateService,
)
from shoal.policy.model import RefusalKind

logger = logging.getLogger(__name__)

_POD_GROUPS = Kind(f"/apis/{POD_GROUPS}", "podgroups", None)
FIELD_MANAGER = "shoal-operator"


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
        self._metrics = metrics
        self._objects = Objects(transport, state, answers)
        self._workloads = Workloads(transport, state.workloads, manager=FIELD_MANAGER, wall=wall)

    async def carry_out(self, job: TrainingJob, action: Action) -> bool:
        """Carry out one action. False: it was refused, or the answer says more than that; plan again.

        Raises:
            ClusterError: it failed and may not on retry.
        """
        kind, answers = type(action).__name__, self._answers.get(job.metadata.uid)
        known, result = answers.first_look, "error"
        try:
            done = await self._do(job, action)
            result = "done" if done else "refused"
        finally:
            self._metrics.actions.labels(kind, result).inc()
        if done:
            logger.info("%s/%s: %s %s", job.metadata.namespace, job.metadata.name, kind, action.name)
        return done and (known or not answers.first_look)  # others may have made more than was known

    async def _do(self, job: TrainingJob, action: Action) -> bool:
        """Carry out one action; False if it was refused."""
        objects, answers = self._objects, self._answers.get(job.metadata.uid)
        match action:
            case CreatePod(name):
                await self._confirm_basis(job, answers)
                return await objects.create(
                    job, PODS, name, action.make, urgent=action.replaces, pool=action.pool
                )
            case CreateService(name, manifest):
                return await objects.create(job, SERVICES, name, manifest)
            case CreateSecret(name):
                data = self._credentials(job.metadata.uid).secret_data()
                return await objects.create(job, SECRETS, name, manifests.secret(job, data))
            case CreateDisruptionBudget(name, manifest):
                return await objects.create(job, BUDGETS, name, manifest)
            case CreateWorkload(name, manifest):
                return await self._create_workload(job, name, manifest)
            case ApplyPodGroup(name, manifest):
                return await self._apply_pod_group(job, answers, name, manifest)
            case TellWorkload():
                await self._workloads.tell(job, action)
            case RequeueWorkload(name, uid):
                await objects.confirm_none_runs(job)
                await self._workloads.requeue(job, name, uid)
            case DeleteWorkload(name, uid):
                if _waits_as_a_whole(job) and not job.status.finished:
                    await objects.confirm_none_runs(job)  # else they run without quota, or may stay
                await objects.delete(job, WORKLOADS, name, uid)
            case DeletePod():
                return await self._delete_pod(job, answers, action)
            case UpdateService(name, selector, back_from, back_to):
                await self._confirm_newest(job, answers)
                for pod in filter(None, (back_to, back_from)):
                    await self._confirm_seen(job, answers, pod)
                await self._select(job, name, selector)
            case DeleteService(name, uid):
                if (await objects.delete(job, SERVICES, name, uid)).status == 404:
                    answers.others_knew_more()
            case DeleteDisruptionBudget(name):
                deleted = await self._transport.request("DELETE", path(job, BUDGETS, name))
                deleted.accept(403, 404)  # it is only tidied up
                if deleted.status == 404:
                    answers.others_knew_more()
                answers.existing.pop(name, None)
                if (budget := self._state.budgets.get(name, job.metadata.namespace)) is not None:
                    self._state.budgets.drop(budget.metadata.uid)
            case ConfirmAbsent(name, "Pod"):
                answers.gone_pods |= await objects.confirm_absent(job, name)
            case ConfirmAbsent(name):
                if (node := await self._node(name)) is not None:
                    self._state.nodes.put(node)
                elif name not in self._state.nodes_by_name:  # else it came meanwhile
                    answers.gone_nodes[name] = loop_time()
            case DeleteJob(name, uid, version):
                (await objects.delete(job, JOBS, name, uid, version, propagationPolicy="Background")).accept(
                    404
                )
        return True

    async def _delete_pod(self, job: TrainingJob, answers: ApiAnswers, action: DeletePod) -> bool:
        """Delete a pod; False if it is another one by now, or runs or has ended, which the next plan is to know.

        One that only has changed, as when its scheduler says anew why it waits, is deleted as it is now.
        """
        name, version = action.name, action.version
        await self._confirm_node(job, name, force=action.grace_seconds == 0)
        if (successor := action.successor) is not None:
            await self._objects.confirm_possible(job, PODS, successor.name, successor.make)
        options = {} if action.grace_seconds is None else {"gracePeriodSeconds": action.grace_seconds}
        deleted = await self._objects.delete(job, PODS, name, action.uid, version, **options)
        if deleted.status == 409:
            answers.gone_pods |= await self._objects.confirm_absent(job, name)
            now = self._state.pods.get(name, job.metadata.namespace)
            if now is None or now.metadata.uid != action.uid or now.running or now.ended:
                return False
            if action.homeless and now.spec.node_name:
                return False
            version = now.metadata.resource_version
            (await self._objects.delete(job, PODS, name, action.uid, version, **options)).accept(404)
        logger.info("%s/%s: %s is deleted: %s", job.metadata.namespace, job.metadata.name, name, action.why)
        return True

    async def _apply_pod_group(
        self, job: TrainingJob, answers: ApiAnswers, name: str, manifest: Manifest
    ) -> bool:
        """Make the PodGroup as it should be; False if there are none, or they are not allowed."""
        answer = await apply(self._transport, path(job, _POD_GROUPS, name), manifest, FIELD_MANAGER)
        key = names.group_key(job)
        if answer.ok:
            answers.refused.pop(key, None)
            answers.existing[key] = loop_time()
        elif answer.status in {*REFUSED, 404}:  # asked again: what is missing may be installed
            self._objects.refused(job, key, RefusalKind.FORBIDDEN, answer.message)
        else:
            raise Unavailable(f"cannot apply {name}: {answer.status} {answer.message}")
        return answer.ok

    async def _confirm_basis(self, job: TrainingJob, answers: ApiAnswers) -> None:
        """Ask whether a pod is to be made, by a leader that may have read old lists.

        Raises:
            Unavailable: what that follows from has changed.
        """
        await self._confirm_newest(job, answers)
        await self._confirm_quota(job, answers)

    async def _confirm_newest(self, job: TrainingJob, answers: ApiAnswers) -> None:
        """Ask whether this is the job as it is, before a leader that stored no status makes a pod or turns a Service.

        In an old list, a pod that came and went since is not there yet, and would be made again; and a Service would be
        turned back to a server that is gone. If the job has changed, the next plan is recorded before it is carried
        out, which fails until the watches have told what others made.

        Raises:
            Unavailable: it is not.
        """
        if answers.stored or not answers.made_before:
            return
        answer = await self._transport.request("GET", path(job, JOBS, job.metadata.name), urgent=True)
        answer.accept(403)
        if answer.ok:  # who may not ask (the roles of an older chart) believes the list
            found = Resource.model_validate_json(answer.body, extra="ignore").metadata
            if found.resource_version != job.metadata.resource_version:
                answers.others_knew_more()
                raise Unavailable(f"{job.metadata.name} has changed since it was listed")
        answers.stored = True

    async def _confirm_quota(self, job: TrainingJob, answers: ApiAnswers) -> None:
        """Ask whether the Workload is as it was listed, before a leader makes the first pod of a job that others began.

        The API server has a cache of each kind: an old one shows the quota of a job that was preempted since.

        Raises:
            Unavailable: it is not.
        """
        if answers.quota_confirmed or not answers.made_before or not _waits_as_a_whole(job):
            return
        if (known := self._state.workloads.get(names.workload_name(job), job.metadata.namespace)) is not None:
            await self._workloads.confirm(job, known)
            answers.quota_confirmed = True

    async def _confirm_seen(self, job: TrainingJob, answers: ApiAnswers, name: str) -> None:
        """Ask whether a pod is as it was seen, or absent as it was: the watch of Services may be ahead of that of pods.

        Raises:
            Unavailable: it is not.
        """
        before = self._state.pods.get(name, job.metadata.namespace)
        gone = await self._objects.confirm_absent(job, name)
        answers.gone_pods |= gone
        now = None if gone else self._state.pods.get(name, job.metadata.namespace)
        if (before and version(before)) != (now and version(now)):
            raise Unavailable(f"{name} is gone, or has changed since")

    async def _confirm_node(self, job: TrainingJob, name: str, *, force: bool) -> None:
        """Ask for the node of a server that works, before it is deleted: all workers would wait for the next one.

        The watch of nodes may be behind that of pods, and show the node as it was before the server was put there.
        `force`: of any server, whose final snapshot would be cut off.

        Raises:
            Unavailable: it has changed.
        """
        pod = self._state.pods.get(name, job.metadata.namespace)
        if pod is None or pod.place is None or pod.place.role != "ps":
            return
        if not force and (job.spec.suspend or not pod.ready):
            return
        if (known := self._state.nodes_by_name.get(pod.spec.node_name or "")) is None:
            return
        if (found := await self._node(known.metadata.name)) is not None:
            self._state.nodes.put(found)
            if version(found) != version(known):
                raise Unavailable(f"the node {known.metadata.name} of {name} has changed since")

    async def _node(self, name: str) -> Node | None:
        """The node of this name; None if there is none, or to who may not ask, who believes the watch."""
        answer = await self._transport.request("GET", f"/api/v1/nodes/{name}", urgent=True)
        answer.accept(403, 404)
        return Node.model_validate_json(answer.body) if answer.ok else None

    async def _create_workload(self, job: TrainingJob, name: str, manifest: Manifest) -> bool:
        """Create a Workload; False if it was refused, or if its priority class does not exist."""
        try:
            manifest = await self._workloads.with_priority(job, manifest)
        except Refused as error:  # asked again: it may be made
            self._objects.refused(job, name, RefusalKind.FORBIDDEN, str(error))
            return False
        return await self._objects.create(job, WORKLOADS, name, manifest)

    async def _select(self, job: TrainingJob, name: str, selector: dict[str, str]) -> None:
        known = self._state.services.get(name, job.metadata.namespace)
        gone = dict.fromkeys(known.spec.selector if known else ())
        patch: dict[str, Any] = {"spec": {"selector": {**gone, **selector}}}
        if known is not None:
            patch["metadata"] = {"uid": known.metadata.uid}
        answer = await self._transport.request(
            "PATCH", path(job, SERVICES, name), body=patch, content_type=MERGE_PATCH, urgent=True
        )
        answer.accept(*((404, 409) if known is not None else ()))
        if not answer.ok and known is not None:
            # A 409 may have another reason than a new Service of that name: then the next answer shows it again.
            at = math.inf if answer.status == 404 else version(known) - 1
            self._state.services.drop(known.metadata.uid, at)
            return
        self._objects.saw(SERVICES, answer)


def _waits_as_a_whole(job: TrainingJob) -> bool:
    """Whether its quota is that of a Workload."""
    return job.spec.run_policy.scheduling_policy.queue_as == "Workload"
