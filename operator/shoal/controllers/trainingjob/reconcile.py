"""Reconciles one job: observe, plan, create, report, delete.

Missing objects are created first, without waiting. The plan is pure and cheap, so it is repeated afterwards: the status
reports what exists, not what was intended. Nothing is deleted before the reason is in the status: after a crash in
between, neither the pod nor the reason would be known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.controllers.state import ClusterState, Key, Wake
from shoal.controllers.trainingjob.api_answers import AnswerStore
from shoal.controllers.trainingjob.apply import Applier
from shoal.controllers.trainingjob.claims import Claims
from shoal.controllers.trainingjob.credentials import JobCredentials
from shoal.controllers.trainingjob.observe import Observer
from shoal.controllers.trainingjob.reactions import Reactions
from shoal.controllers.trainingjob.report import Reporter
from shoal.controllers.trainingjob.unreadable import Complaints
from shoal.errors import ClusterError, Refused, ShoalError, Unavailable
from shoal.policy.decide.workers import MOST_AT_ONCE
from shoal.policy.model import (
    DeleteDisruptionBudget,
    DeleteJob,
    DeletePod,
    DeleteService,
    DeleteWorkload,
    Observation,
    Plan,
    RequeueWorkload,
)
from shoal.policy.plan import plan
from shoal.policy.tell.internal_error import internal_error
from shoal.runtime.work_queue import Priority
from shoal.telemetry.coordinator import Endpoint
from shoal.telemetry.poller import Poller

ROUNDS = 4
"""Plans per reconcile. What is still missing after them is created in the next. So is the rest of a large job: people
and programs wait for its first status."""
NAME_CONFLICT_SECONDS = 3.0
"""Interval of retries after a name conflict: no watch reports when the name is free."""
UNCHANGED_SECONDS = 1.0
"""Delay after a reconcile that had objects to create but changed nothing."""
REST_SECONDS_PER_POD = 150e-6
"""A plan takes a tenth of this for each pod, so that a job of any size has a tenth of the event loop."""
LEAST_REST_SECONDS = 0.01

_REMOVALS = (DeletePod, DeleteService, DeleteDisruptionBudget, DeleteJob, DeleteWorkload, RequeueWorkload)


class Reconciler:
    """Called by the work queue with the key of a job; returns the seconds until the next reconcile, or None.

    `waited`: for how long the key that is being reconciled had waited in the queue. `rest`: has it wait before the next
    reconcile, unless that is urgent.
    """

    def __init__(
        self,
        observer: Observer,
        applier: Applier,
        reporter: Reporter,
        *,
        state: ClusterState,
        answers: AnswerStore,
        claims: Claims,
        poller: Poller,
        credentials: Callable[[str], JobCredentials],
        complaints: Complaints,
        reactions: Reactions,
        waited: Callable[[Key], float],
        wake: Wake,
        rest: Callable[[Key, float], None] = lambda _key, _seconds: None,
    ) -> None:
        self._observer = observer
        self._applier = applier
        self._reporter = reporter
        self._state = state
        self._answers = answers
        self._claims = claims
        self._poller = poller
        self._credentials = credentials
        self._complaints = complaints
        self._reactions = reactions
        self._waited = waited
        self._wake = wake
        self._rest = rest
        self._uids: dict[Key, str] = {}
        self._large: set[Key] = set()

    async def __call__(self, key: Key) -> float | None:
        """Reconcile one job."""
        woken = self._now() - self._waited(key)
        await self._complaints.complain(key)
        if key in self._large:
            await asyncio.sleep(0)  # what was decided for others just now is sent first
        self._forget_earlier_runs(key)
        failed: ClusterError | None = None
        changed, made = False, 0
        for _ in range(ROUNDS):
            if (observed := self._observer.observe(key)) is None:
                return None
            seen, decided = observed, await self._plan(observed)
            self._reactions.lost(seen, decided.status, woken)
            self._reactions.replaced(seen, self._now())
            to_make = tuple(a for a in decided.actions if not isinstance(a, _REMOVALS))
            if failed is not None or not to_make or made >= MOST_AT_ONCE:
                break
            outcome = await self._applier.apply(seen.job, to_make)
            failed, changed, made = outcome.error, outcome.changed, made + len(to_make)
        if (rest := REST_SECONDS_PER_POD * len(seen.pods)) > LEAST_REST_SECONDS:
            self._large.add(key)
            self._rest(key, rest)
        else:
            self._large.discard(key)
        self._listen(key, seen)
        # Only the last plan is reported: an earlier one may have given the same loss another reason.
        reported = await self._reporter.report(seen.job, decided.status, decided.events)
        if reported.recorded:
            self._answers.get(seen.job.metadata.uid).recorded = True
            to_remove = tuple(a for a in decided.actions if isinstance(a, _REMOVALS))
            failed = (await self._applier.apply(seen.job, to_remove)).error or failed
        if failed is not None:
            raise failed
        delays = [reported.wait]
        if not reported.conflict:
            delays.append(decided.wake_after)
        if to_make:
            delays.append(0.0 if changed else UNCHANGED_SECONDS)
        answers = self._answers.get(seen.job.metadata.uid)
        if answers.conflicting:
            delays.append(NAME_CONFLICT_SECONDS)
        if any(pod.spec.node_name and pod.status.phase == "Pending" for pod in seen.pods):
            delays.append(answers.next_expiry_seconds(seen.now))  # it may wait for a deleted Secret
        return min((delay for delay in delays if delay is not None), default=None)

    async def _plan(self, seen: Observation) -> Plan:
        """The plan. An unexpected error is also reported on the job, where its owner can see it."""
        try:
            decided = plan(seen)
        except Exception as error:
            if not isinstance(error, ShoalError) and (failed := internal_error(seen, error)) is not None:
                try:
                    await self._reporter.report(seen.job, failed.status, failed.events)
                except (
                    Refused,
                    Unavailable,
                ) as refused:  # what is raised is the fault itself, with its traceback
                    error.add_note(f"The error could not be recorded in the status of the job: {refused}")
            raise
        self._claims.decide(seen.job, decided)  # at once: nothing is awaited since the observation
        return decided

    def _forget_earlier_runs(self, key: Key) -> None:
        """Drop the state of a run whose job was deleted or applied again under the same name."""
        namespace, name = key
        job = self._state.jobs.get(name, namespace)
        uid = job.metadata.uid if job is not None else None
        old = self._uids.get(key)
        if old is not None and old != uid:
            self._answers.forget(old)
            self._poller.forget(old)
            self._reporter.forget(old)
            self._reactions.forget(old)
        if uid is None:
            self._uids.pop(key, None)
            self._large.discard(key)
        else:
            self._uids[key] = uid

    def _listen(self, key: Key, seen: Observation) -> None:
        """Poll the coordinator while its pod runs."""
        uid = seen.job.metadata.uid
        if seen.job.status.finished:
            self._poller.forget(uid)
            return
        running = [
            (pod.place.incarnation, pod.status.pod_ip)
            for pod in seen.pods
            if pod.place is not None and pod.place.is_coordinator and pod.running and pod.status.pod_ip
        ]
        if not running:
            self._poller.pause(uid)
            return
        address = max(running)[1]
        assert address is not None
        self._poller.follow(
            _endpoint(uid, address, self._credentials(uid)),
            lambda urgent: self._wake(key, Priority.URGENT if urgent else Priority.ROUTINE),
        )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _endpoint(uid: str, address: str, known: JobCredentials) -> Endpoint:
    previous = _endpoint(uid, address, known.previous) if known.previous is not None else None
    return Endpoint(uid, address, known.token, known.certificate, previous)
