"""Sends what the newest plan of each job asks for: a bounded number at once, and one about each object.

Nobody waits for an answer. It goes into the caches, and wakes the job where it changes what the next plan does. A plan
asks for all that is still to be done: what it no longer asks for, and was not sent yet, is dropped. So a job that is
suspended, or loses pods, amid a ramp is planned and served as at any other time.

Replacements go before what a job grows by, which has fewer requests in flight: more would only wait in the API server,
and losses behind them. After an error, requests of that kind pause, longer each time, and then one is tried. A request
that was done and is asked for again pauses, too: somebody undoes it, or plans do not go by what the answer showed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from shoal.api.labels import Place
from shoal.api.training_job import TrainingJob
from shoal.cluster.clock import loop_time
from shoal.controllers.state import Wake
from shoal.errors import ShoalError
from shoal.policy.actions import (
    Action,
    ApplyPodGroup,
    ConfirmAbsent,
    CreateDisruptionBudget,
    CreatePod,
    CreateSecret,
    CreateService,
    DeleteDisruptionBudget,
    DeleteJob,
    DeletePod,
    DeleteService,
    DeleteWorkload,
    RequeueWorkload,
)
from shoal.policy.model import Plan
from shoal.runtime.backoff import DUE_SECONDS, FIRST_SECONDS, pause
from shoal.runtime.controller import key_of
from shoal.runtime.shares import Shares
from shoal.runtime.tasks import Tasks
from shoal.runtime.work_queue import Priority

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 48
"""Concurrent requests of one job: not all places of the process (`runtime.limiter`), so that others are not delayed.
With fewer, a wave of losses had a small share of an API server that was busy with the wave itself."""
ORDINARY_IN_FLIGHT = 4
"""Of these, those for pods that replace none, and for removals, while a job has many to make. With twice as many, 1,000
workers were made a tenth sooner on two cores, and an API server as busy as that told of another job's loss after 0.9 s
in place of 0.1."""
FEW = 8
"""No more than these are sent at once: a job of a few pods begins with one round of requests, and one plan fewer."""
LONGEST_PAUSE = 10.0
"""Between tries of a kind of requests that fail, and of one that is done again and again."""
TELL_AFTER = 30.0
"""Seconds for which a kind of requests has failed when the job tells of it."""
AGAIN_SECONDS = 2 * LONGEST_PAUSE
"""What is asked for so soon after it was done was done in vain."""

FOUNDATIONS = (CreateSecret, CreateService, ApplyPodGroup)
"""Pods need them, and are asked for again when these are answered, or have failed."""
SERVICES_IN_FLIGHT = 8
"""Services that are being made, of a namespace; twice as many of all. An API server takes their addresses one at a
time: that of 1.36 holds one lock while it makes the IPAddress (`MetaAllocator.AllocateNextService`), so that more would
only wait there. When all were asked for at once while 100 jobs began, each took 5 s and a third of them timed out
(504). Alone, sixteen at once are made as fast as four; beside the pods of those jobs four have too small a share of the
API server: a quarter to a half of the time only Services were left. Webhooks are asked before that: where those of one
namespace take long, others have places."""
REMOVALS = (DeletePod, DeleteService, DeleteDisruptionBudget, DeleteJob, DeleteWorkload, RequeueWorkload)


@dataclass(frozen=True)
class WriteStatus:
    """Write the status of a plan that was made of this job. `complete`: it tells of all pods."""

    job: TrainingJob
    plan: Plan
    complete: bool = True
    name: str = "status"

    @property
    def awaited(self) -> bool:
        """Whether a pod of the next plan waits for it."""
        return self.plan.wake_after == 0.0


Request = Action | WriteStatus
What = tuple[type[Request], str]


@dataclass
class _Failures:
    """Of a kind of requests: how many in a row, since when, until when none is sent, and with which words."""

    since: float
    count: int = 0
    until: float = 0.0
    words: str = ""
    """Of the first after `TELL_AFTER`: each change of them is a write of the status."""


@dataclass(slots=True)
class _Done:
    """A request that was answered: when, how often in a row before, and until when it is not sent again."""

    at: float
    times: int = 0
    until: float = 0.0


@dataclass
class _Run:
    """One run of a job: what is to be sent, in this order, and what is in flight.

    Lists, since an empty deque takes 0.75 KiB, and hundreds of jobs have nothing to send.
    """

    job: TrainingJob
    urgent: list[Request] = field(default_factory=list)
    ordinary: list[Request] = field(default_factory=list)
    removals: list[Request] = field(default_factory=list)
    due: frozenset[Request] = frozenset()
    """The removals that the newest plan asks for."""
    in_flight: dict[What, Request] = field(default_factory=dict)
    failures: dict[type[Request], _Failures] = field(default_factory=dict)
    done: dict[What, _Done] = field(default_factory=dict)
    """What was answered lately, the earliest first."""
    failed: dict[What, int] = field(default_factory=dict)
    """How often in a row what is asked for has failed: what has not goes first, else one would keep all from a try."""
    answered: set[What] = field(default_factory=set)
    """Foundations that were made: pods wait for them no more, even if no cache shows them."""


class Requests:
    """The requests of all jobs. `carry_out`: see `Applier.carry_out`; `wake`: has a job planned again."""

    def __init__(
        self,
        carry_out: Callable[[TrainingJob, Request], Awaitable[bool]],
        tasks: Tasks,
        wake: Wake,
    ) -> None:
        self._carry_out = carry_out
        self._tasks = tasks
        self._wake = wake
        self._runs: dict[str, _Run] = {}
        self._services = Shares(2 * SERVICES_IN_FLIGHT)

    def want(self, job: TrainingJob, actions: Sequence[Request]) -> float | None:
        """Ask for this and nothing else, of removals as far as they are allowed.

        Returns the seconds until more of it may be tried; None: that depends on no time.
        """
        run = self._run(job)
        run.job = job
        early = any(self._early(run, each) for each in actions)
        # What is in flight may be answered before the queue comes to it: it is not to be sent twice.
        known = {(type(each), each.name) for each in actions}
        run.failed = {what: times for what, times in run.failed.items() if what in known}
        asked = _willing_first(
            run, (each for each in actions if (type(each), each.name) not in run.in_flight)
        )
        makes = [
            each
            for each in asked
            if not (isinstance(each, REMOVALS) or (early and isinstance(each, CreatePod)))
        ]
        run.urgent = [each for each in makes if not _grows(each)]
        run.ordinary = [each for each in makes if _grows(each)]
        run.due = frozenset(each for each in asked if isinstance(each, REMOVALS))
        run.removals = [each for each in run.removals if each in run.due]
        _forget_old(run.done)
        told = bool(self.failing(job.metadata.uid))
        asked_for = {WriteStatus, *map(type, actions), *(kind for kind, _ in run.in_flight)}
        run.failures = {kind: each for kind, each in run.failures.items() if kind in asked_for}
        self._send(run)
        pauses = [self._pause(run, (type(each), each.name)) for each in actions]
        if told and not self.failing(job.metadata.uid):
            pauses.append(FIRST_SECONDS)  # the status is to say so
        return min((each for each in pauses if each), default=None)

    def _early(self, run: _Run, action: Request) -> bool:
        """Whether pods wait for the answer to this.

        A Service may be refused, and is waited for, but not behind those of other jobs: workers look its name up until
        there is one.
        """
        if not isinstance(action, FOUNDATIONS):
            return False
        if isinstance(action, CreateService) and not self._services.open_to(run.job.metadata.namespace):
            return False
        return type(action) not in run.failures and (type(action), action.name) not in run.answered

    def allow(self, job: TrainingJob, actions: Iterable[Request]) -> None:
        """Send the removals among these that are still asked for: their reasons are stored."""
        run = self._run(job)
        run.removals = _willing_first(
            run, (each for each in actions if isinstance(each, REMOVALS) and each in run.due)
        )
        self._send(run)

    def start(self, job: TrainingJob, request: Request) -> float | None:
        """Send one beside the others, unless one like it is in flight.

        Returns the seconds until it may be tried, if not now.
        """
        run = self._run(job)
        what = (type(request), request.name)
        if what in run.in_flight:
            return None  # its answer wakes the job
        if pause := self._pause(run, what):
            return pause
        self._start(run, request)
        return None

    def makes(self, uid: str) -> bool:
        """Whether something is being made or asked, of which there will be more to say."""
        run = self._runs.get(uid)
        if run is None:
            return False
        sent = any(not issubclass(kind, (WriteStatus, *REMOVALS)) for kind, _ in run.in_flight)
        return sent or bool(run.urgent or run.ordinary)

    def pods_in_flight(self, uid: str) -> frozenset[Place]:
        """The places whose pods are being created."""
        run = self._runs.get(uid)
        sent = run.in_flight.values() if run else ()
        return frozenset(each.place for each in sent if isinstance(each, CreatePod))

    def failing(self, uid: str) -> str:
        """What requests of the job that are to make something have failed with for long; empty: they do not."""
        run = self._runs.get(uid)
        return next((each.words for each in run.failures.values() if each.words), "") if run else ""

    def forget(self, uid: str) -> None:
        """Drop a run that is gone, and what was to be sent."""
        self._tasks.forget(uid)
        if (run := self._runs.pop(uid, None)) is not None:  # it may be one of its own answers that says so
            for queue in (run.urgent, run.ordinary, run.removals):
                queue.clear()

    def _run(self, job: TrainingJob) -> _Run:
        return self._runs.setdefault(job.metadata.uid, _Run(job))

    def _send(self, run: _Run) -> None:
        while len(run.in_flight) < MAX_IN_FLIGHT:
            if run.urgent:
                request = run.urgent.pop(0)
            elif (queue := run.removals or run.ordinary) and _may_start(queue, _ordinary(run)):
                request = queue.pop(0)
            else:
                return
            what = (type(request), request.name)
            if what not in run.in_flight and self._may_try(run, what):
                self._start(run, request)

    def _pause(self, run: _Run, what: What) -> float:
        """Seconds until this is tried again, after an error of its kind, or since it was done in vain."""
        failures, done = run.failures.get(what[0]), run.done.get(what)
        if failures is None and done is None:
            return 0.0
        until = max(failures.until if failures else 0.0, done.until if done else 0.0)
        left = until - loop_time()
        return left if left > DUE_SECONDS else 0.0

    def _may_try(self, run: _Run, what: What) -> bool:
        if self._pause(run, what):
            return False
        return what[0] not in run.failures or all(kind is not what[0] for kind, _ in run.in_flight)

    def _start(self, run: _Run, request: Request) -> None:
        run.in_flight[type(request), request.name] = request
        self._tasks.start(run.job.metadata.uid, self._answered(run, run.job, request))

    async def _answered(self, run: _Run, job: TrainingJob, request: Request) -> None:
        kind = type(request)
        try:
            async with self._place(job, kind):
                done = await self._carry_out(job, request)
            run.failures.pop(kind, None)
            run.failed.pop((kind, request.name), None)
            # What was refused is asked for again by rules of its own.
            if (done and kind is not WriteStatus) or kind is ConfirmAbsent:
                _note(run.done, (kind, request.name))
            if done and isinstance(request, FOUNDATIONS):
                run.answered.add((kind, request.name))
        except Exception as error:  # broad: an error of one request must not stop the others
            done = False
            self._failed(run, request, error)
        finally:
            del run.in_flight[kind, request.name]
        if not done:  # others of its kind would fare no better: they are planned again
            run.urgent, run.ordinary, run.removals = (
                [each for each in queue if type(each) is not kind]
                for queue in (run.urgent, run.ordinary, run.removals)
            )
        if not (done and self._more_follows(run, request)):
            self._wake(key_of(job), Priority.URGENT if _is_awaited(request) else Priority.NORMAL)
        self._send(run)

    def _more_follows(self, run: _Run, request: Request) -> bool:
        """Whether a plan may wait for answers that are still to come: nothing that is to be sent waits for this one."""
        if isinstance(request, FOUNDATIONS):
            early = any(self._early(run, each) for each in run.in_flight.values())
            return early or any(map(_grows, (*run.in_flight.values(), *run.ordinary)))
        waited_for = not (_grows(request) or isinstance(request, CreateDisruptionBudget))
        return not waited_for and bool(run.ordinary or run.in_flight)

    def _place(self, job: TrainingJob, kind: type[Request]) -> AbstractAsyncContextManager[None]:
        if kind is CreateService:
            return self._services.place(job.metadata.namespace)
        return contextlib.nullcontext()

    def _failed(self, run: _Run, request: Request, error: Exception) -> None:
        what = (type(request), request.name)
        run.failed[what] = run.failed.get(what, 0) + 1
        failures = run.failures.setdefault(type(request), _Failures(loop_time()))
        if failures.until - loop_time() <= DUE_SECONDS:  # those that were sent with it count as one
            failures.count += 1
            failures.until = loop_time() + pause(failures.count, error, LONGEST_PAUSE)
        if (
            not failures.words
            and loop_time() - failures.since >= TELL_AFTER
            and not isinstance(request, WriteStatus)
        ):
            failures.words = f"{type(request).__name__} {request.name}: {error or repr(error)}"
        logger.warning(
            "%s/%s: %s %s: %s; retrying in %.2f s",
            *key_of(run.job),
            type(request).__name__,
            request.name,
            error or repr(error),
            failures.until - loop_time(),
            exc_info=None if isinstance(error, ShoalError) else error,
        )


def _willing_first(run: _Run, actions: Iterable[Request]) -> list[Request]:
    """In this order, but for those that have failed: the oftener, the later."""
    return sorted(actions, key=lambda each: run.failed.get((type(each), each.name), 0))


def _note(done: dict[What, _Done], what: What) -> None:
    """Note that it was answered. The second time in a row, and each time after that, it is to wait for longer."""
    before, at = done.pop(what, None), loop_time()
    times = before.times + 1 if before is not None and at - before.at < AGAIN_SECONDS else 0
    done[what] = _Done(at, times, at + pause(times, None, LONGEST_PAUSE) if times else 0.0)


def _forget_old(done: dict[What, _Done]) -> None:
    while done and loop_time() - (first := next(iter(done.items())))[1].at >= AGAIN_SECONDS:
        del done[first[0]]


def _grows(request: Request) -> bool:
    """Whether it makes a pod that replaces none."""
    return isinstance(request, CreatePod) and not request.replaces


def _is_awaited(request: Request) -> bool:
    """Whether a replacement may wait for its answer."""
    return request.awaited if isinstance(request, WriteStatus) else isinstance(request, ConfirmAbsent)


def _may_start(queue: Sequence[Request], in_flight: int) -> bool:
    """Whether one more of those that wait for no replacement may be sent."""
    return in_flight < (FEW if in_flight + len(queue) <= FEW else ORDINARY_IN_FLIGHT)


def _ordinary(run: _Run) -> int:
    return sum(_grows(each) or isinstance(each, REMOVALS) for each in run.in_flight.values())
