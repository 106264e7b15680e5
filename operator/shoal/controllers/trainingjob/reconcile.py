"""Reconciles one job: observe, plan, and hand over what is to be sent. Nothing is awaited.

The plan is pure and cheap, so it is repeated when something was answered or has changed: the status reports what
exists, not what was intended. Nothing is deleted before the reason is in the status: after a crash in between, neither
the pod nor the reason would be known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from shoal.api.training_job import TrainingJob
from shoal.cluster.clock import loop_time
from shoal.controllers.state import ClusterState, Wake
from shoal.controllers.trainingjob.api_answers import AnswerStore
from shoal.controllers.trainingjob.apply import Applier
from shoal.controllers.trainingjob.claims import Claims
from shoal.controllers.trainingjob.credentials import JobCredentials
from shoal.controllers.trainingjob.observe import Observer
from shoal.controllers.trainingjob.reactions import Reactions
from shoal.controllers.trainingjob.report import Report, Reporter
from shoal.controllers.trainingjob.requests import REMOVALS, Request, Requests, WriteStatus
from shoal.controllers.trainingjob.unreadable import Complaints
from shoal.errors import ShoalError
from shoal.policy.actions import ConfirmAbsent
from shoal.policy.facts.sightings import Memory
from shoal.policy.model import Observation, Plan
from shoal.policy.plan import plan
from shoal.policy.tell.internal_error import internal_error
from shoal.runtime.controller import Key
from shoal.runtime.tasks import Tasks
from shoal.runtime.work_queue import Priority
from shoal.telemetry.coordinator import Endpoint
from shoal.telemetry.poller import Poller

REST_SECONDS_PER_POD = 40e-6
"""A plan takes a tenth of this for each pod, so that a job of any size has a tenth of the event loop, and half of it in
a wave of losses (`work_queue.URGENT_SHARE`)."""
REST_SHARE = 9.0
"""The same where much has changed, or the machine is busy: the rest is so many times as long as the reconcile."""
FEWEST_PODS_THAT_REST = 64


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
        tasks: Tasks,
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
        self._tasks = tasks
        self._requests = Requests(self._carry_out, tasks, wake)
        self._memories: defaultdict[str, Memory] = defaultdict(Memory)
        """Of each run of a job, by uid."""
        parts = (answers, poller, reporter, self._requests, reactions)
        state.on_gone += [self._forget, *(each.forget for each in parts)]
        state.on_node.append(answers.see_node)
        state.on_lost.append(answers.see_room)

    async def __call__(self, key: Key) -> float | None:
        """Reconcile one job."""
        began = loop_time()
        woken = began - self._waited(key)
        if self._complaints.about(key):
            self._tasks.start(key, self._complaints.complain(key))
        namespace, name = key
        if (job := self._state.jobs.get(name, namespace)) is None:
            return None
        uid = job.metadata.uid
        in_flight, failing = self._requests.pods_in_flight(uid), self._requests.failing(uid)
        if (seen := self._observer.observe(key, in_flight, failing)) is None:
            self._requests.forget(uid)
            return None
        decided = self._plan(seen, self._memories[uid])
        self._reactions.lost(seen, decided.status, woken)
        self._reactions.replaced(seen, loop_time())
        self._listen(key, seen, decided)
        pause = self._requests.want(seen.job, decided.actions)
        reported = self._report(seen.job, decided, awaited=_awaits_status(seen, decided))
        # What is due once the status is stored is planned when it is.
        due = decided.wake_after if decided.wake_after or reported.recorded else None
        answers = self._answers.get(uid)
        delays = [pause, reported.wait, due, answers.next_conflict_seconds(seen.at)]
        expiry = answers.next_expiry_seconds(seen.at)
        # A pod that does not start may wait for a deleted Secret.
        if expiry and [pod for pod in seen.pods if not pod.untroubled and pod.starts_on_node]:
            delays.append(expiry)
        if (pods := len(seen.pods)) >= FEWEST_PODS_THAT_REST:
            self._rest(key, max(REST_SECONDS_PER_POD * pods, REST_SHARE * (loop_time() - began)))
        return min((delay for delay in delays if delay is not None), default=None)

    def _plan(self, seen: Observation, memory: Memory) -> Plan:
        """The plan. An unexpected error is also reported on the job, where its owner can see it."""
        try:
            decided = plan(seen, memory)
        except Exception as error:
            if not isinstance(error, ShoalError) and (failed := internal_error(seen, error)) is not None:
                self._report(seen.job, failed, complete=False)
            raise
        self._claims.decide(seen.job, decided)
        return decided

    def _report(
        self, job: TrainingJob, decided: Plan, *, complete: bool = True, awaited: bool = True
    ) -> Report:
        """Have the status written if that is due, and what follows from it done. `complete`: it tells of all pods."""
        makes = self._requests.makes(job.metadata.uid)
        reported = self._reporter.report(job, decided.status, decided.events, makes=makes, awaited=awaited)
        if reported.recorded and complete:
            self._recorded(job, decided)
        if reported.wait == 0.0:
            write = WriteStatus(job, decided, complete)
            return replace(reported, wait=self._requests.start(job, write))
        return reported

    def _recorded(self, job: TrainingJob, decided: Plan) -> None:
        if not any(isinstance(each, ConfirmAbsent) for each in decided.actions):  # else it does not know all
            self._answers.get(job.metadata.uid).record(decided.looked_at)
        self._requests.allow(job, decided.actions)

    async def _carry_out(self, job: TrainingJob, request: Request) -> bool:
        """Send one request; False: its kind is to be planned again."""
        if not isinstance(request, WriteStatus):
            return await self._applier.carry_out(job, request)
        decided, answers = request.plan, self._answers.get(job.metadata.uid)
        if decided.status.counted_until != request.job.status.counted_until:
            answers.count(decided.status.counted_until, loop_time())
        stored = await self._reporter.write(
            request.job, decided.status, decided.events, urgent=request.awaited
        )
        if stored:
            answers.stored = True
        if stored and request.complete:
            self._recorded(job, decided)
        return stored

    def _forget(self, uid: str) -> None:
        self._memories.pop(uid, None)

    def _listen(self, key: Key, seen: Observation, decided: Plan) -> None:
        """Poll the coordinator while its pod runs, one that is recorded, and the job is not being deleted."""
        uid = seen.job.metadata.uid
        if seen.job.status.finished:
            self._poller.forget(uid)
            return
        servers = takewhile(lambda slot: slot.role == "ps", decided.status.slots)  # they come first
        recorded = {slot.place for slot in servers if slot.index == 0}
        running = [
            (place.incarnation, pod.status.pod_ip, pod.ready)
            for pod in seen.pods
            if (place := pod.place) is not None
            and place.role == "ps"  # else a thousand are compared as a whole
            if place in recorded and pod.running and pod.status.pod_ip
        ]
        if not running or seen.job.metadata.deletion_timestamp:
            self._poller.pause(uid)
            return
        _, address, serves = max(running)
        assert address is not None
        self._poller.follow(
            _endpoint(uid, address, self._credentials(uid)),
            lambda urgent: self._wake(key, Priority.URGENT if urgent else Priority.ROUTINE),
            awaited=serves and seen.report is None and not seen.job.status.training.phase,
        )


def _awaits_status(seen: Observation, decided: Plan) -> bool:
    """Whether a pod is to be made, or something that is in use to be removed, when the status is stored."""
    removed = {each.name for each in decided.actions if isinstance(each, REMOVALS)}
    if not removed:
        return decided.wake_after == 0.0
    return decided.wake_after == 0.0 or not removed <= {pod.metadata.name for pod in seen.pods if pod.ended}


def _endpoint(uid: str, address: str, known: JobCredentials) -> Endpoint:
    previous = _endpoint(uid, address, known.previous) if known.previous is not None else None
    return Endpoint(uid, address, known.token, known.certificate, previous)
