"""Leader election with a `coordination.k8s.io` Lease, on a monotonic clock.

Wall clocks of two machines differ and jump, so the times in the Lease are informational and never compared. A candidate
takes over after it has seen the Lease unchanged for its whole duration *by its own monotonic clock*. The leader counts
from *before* it sent its last renewal and sends nothing after `renew_deadline`, which is shorter than the duration, so
two leaders never write at the same time. (This is client-go's leaderelection plus that fence.) That clock goes on while
the machine is suspended, as the others' do. (Of a machine that its hypervisor stops it may say nothing.) The process
ends when the Lease is lost; the next start lists everything again.

Renewing must not depend on how busy the process or the server is. So it may run in a thread of its own (`runs`), and a
renewal is one request, a JSON patch that tests who holds the Lease and not its version: several may be under way, and
one that is answered late does not delay the next. The release is another such patch, of which a watch tells the
candidates: nobody leads from then until the next one has it. A process whose own loop stands still is another matter:
it renews no more (`beat`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shoal.cluster.clock import boot_time, loop_time, utc_now
from shoal.cluster.own_thread import Runs, here
from shoal.cluster.transport import JSON, JSON_PATCH, Answer, StreamRefused, Transport
from shoal.errors import LeaseLost, Unavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry_period: float = 2.0
    stalled: float = 60.0
    """A holder whose `beat` was not heard for so long leaves the Lease to another."""


_NOT_OURS = frozenset({404, 422})
"""Answers to a renewal where the Lease is gone, or has another holder."""
WATCH_SECONDS = 300
"""How long a candidate's watch is asked for."""
SILENT_RENEWALS = 3
"""Of a holder that is alive, after which a candidate looks for itself: a watch that is cut off says nothing either."""
_NONSENSE = (ValueError, LookupError, TypeError, AttributeError)
"""What reading ends with that is no Lease: a line that is cut off, or the page of a proxy."""
RANDOM_START = 0.1
"""Seconds within which the candidates try that have seen the Lease end at once."""
RELEASE_TRIES = 4
"""Each a `retry_period` long: together less than the kubelet waits for the process to end."""
MOST_UNANSWERED = 4
"""Renewals under way at once. Each has a connection."""


class Lease:
    """A candidate for one Lease: `acquire`, then `keep`, and `seconds_left` before every write.

    `clock`: whose time counts. `runs`: where its requests run; the transport belongs to that event loop.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes = LeaseTimes(),
        clock: Callable[[], float] = boot_time,
        wall: Callable[[], datetime] = utc_now,
        runs: Runs = here,
        on_renewed: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._transport = transport
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._name = name
        self.identity = identity
        self._times = times
        self._clock = clock
        self._wall = wall
        self._runs = runs
        self._on_renewed = on_renewed
        self._unanswered = 0
        self._beat_at: float | None = None
        self._renewed_at: float | None = None
        self.abandoned_seconds = 0.0
        """For how long the Lease had not been renewed, by the wall clocks, when it was taken; 0 if it was released."""
        self._seen = ""
        """Version of the Lease when it was last seen, empty if there was none."""
        self._free_at = 0.0
        """When another holder's Lease is over, if it does not change until then."""

    @property
    def held(self) -> bool:
        """Whether writes may be sent now."""
        return self._renewed_at is not None and self._clock() < self._renewed_at + self._times.renew_deadline

    def seconds_left(self) -> float:
        """How long writes may still be sent. Any thread may ask.

        Raises:
            LeaseLost: they may not be sent any more.
        """
        left = (
            0.0 if self._renewed_at is None else self._renewed_at + self._times.renew_deadline - self._clock()
        )
        if left <= 0:
            raise LeaseLost(f"{self.identity} does not hold Lease {self._name}: the request is not sent")
        return left

    def beat(self) -> None:
        """Show that the process is alive. Once it has, it must again and again while it keeps the Lease."""
        self._beat_at = self._clock()

    async def acquire(self) -> None:
        """Wait until the Lease is held."""
        await self._runs(self._acquire())

    async def keep(self) -> None:
        """Renew the Lease until it is lost.

        Raises:
            LeaseLost: another process holds it, it could not be renewed in time, or this process stands still.
        """
        try:
            await self._runs(self._keep())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def release(self) -> None:
        """Leave the Lease to the next leader, unless another has it. Nothing may be written afterwards."""
        if self._renewed_at is not None:
            await self._runs(self._release())
            self._renewed_at = None

    async def _acquire(self) -> None:
        while True:
            try:
                if await self._try():
                    logger.info("%s acquired Lease %s", self.identity, self._name)
                    return
            except (Unavailable, TimeoutError) as error:
                logger.warning("%s", error)
            await self._until_free()

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as tries:
            while True:
                await asyncio.sleep(self._times.retry_period)
                self._check_beat()
                self.seconds_left()
                if self._unanswered < MOST_UNANSWERED:
                    tries.create_task(self._renew())

    async def _renew(self) -> None:
        self._unanswered += 1
        began = self._clock()
        try:
            answer = await self._send("PATCH", self._path, self._renewal(), JSON_PATCH)
            if answer.status not in _NOT_OURS:
                self._held_since(began, answer)
            elif not await self._try():
                self._renewed_at = None
                raise LeaseLost(f"another process holds Lease {self._name}")
            self._on_renewed(self._clock() - began)
        except (Unavailable, TimeoutError) as error:
            logger.warning("%s", error)
        finally:
            self._unanswered -= 1

    def _check_beat(self) -> None:
        if self._beat_at is not None and (still := self._clock() - self._beat_at) > self._times.stalled:
            self._renewed_at = None
            words = f"{self.identity} stands still since {still:.0f} s: Lease {self._name} is left to another"
            raise LeaseLost(words)

    async def _until_free(self) -> None:
        """Wait until the Lease may be taken, as a watch of it tells; where that fails, for half a retry period."""
        if self._seen and self._clock() < self._free_at:
            query = {
                "watch": "true",
                "fieldSelector": f"metadata.name={self._name}",
                "resourceVersion": self._seen,
                "timeoutSeconds": str(WATCH_SECONDS),
            }
            try:
                async with (
                    asyncio.timeout(self._until_look()) as limit,
                    self._transport.stream(self._collection, query) as lines,
                ):
                    async for line in lines:
                        if self._is_free(json.loads(line)):
                            return
                        limit.reschedule(loop_time() + self._until_look())
            except TimeoutError:
                return
            except (StreamRefused, Unavailable, *_NONSENSE) as error:
                logger.debug("Lease %s cannot be watched: %s", self._name, error)
        pause = self._times.retry_period * random.uniform(0.4, 0.6)
        left = self._free_at - self._clock()
        await asyncio.sleep(min(pause, left + RANDOM_START * random.random()) if left > 0 else pause)

    def _until_look(self) -> float:
        """Seconds until the candidate looks for itself."""
        return min(
            self._free_at - self._clock() + RANDOM_START * random.random(),
            SILENT_RENEWALS * self._times.retry_period,
        )

    def _is_free(self, event: dict[str, Any]) -> bool:
        """Whether this event of the watch says so."""
        lease = event["object"]
        if event["type"] == "ERROR":
            raise Unavailable(f"watch of Lease {self._name}: {lease.get('message')}")
        if event["type"] == "DELETED":  # its holder does not know of it until it renews it
            self._seen = ""
            return self._clock() >= self._free_at
        return self._may_take(lease.get("spec") or {}, str(lease["metadata"].get("resourceVersion")))

    async def _release(self) -> None:
        patch = [
            self._if_ours(),
            {"op": "replace", "path": "/spec/holderIdentity", "value": ""},
            {"op": "replace", "path": "/spec/leaseDurationSeconds", "value": 1},
        ]
        for _ in range(RELEASE_TRIES):
            try:
                answer = await self._send("PATCH", self._path, patch, JSON_PATCH, self._times.retry_period)
            except (Unavailable, TimeoutError) as error:
                logger.warning("%s", error)
                continue
            if not answer.ok and answer.status not in _NOT_OURS:  # such as when a release is uninstalled
                logger.warning(
                    "Lease %s cannot be given back, and ends by itself: %s", self._name, answer.message
                )
            return

    async def _try(self) -> bool:
        """Try once to take or renew the Lease; whether it is held."""
        began = self._clock()
        found = await self._read()
        if found is None:
            if self._clock() < self._free_at and not self.held:
                return False
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            spec = self._spec({})
            self._held_since(began, await self._send("POST", self._collection, {**body, "spec": spec}))
            return True
        lease, spec, version = found
        if not self._may_take(spec, version):
            return False
        if self._renewed_at is None:
            self.abandoned_seconds = self._since_renewal(spec)
        body = {**lease, "spec": self._spec(spec)}
        self._held_since(began, await self._send("PUT", self._path, body))
        return True

    def _may_take(self, spec: dict[str, Any], version: str) -> bool:
        if (spec.get("holderIdentity") or "") in {"", self.identity}:
            self._seen, self._free_at = version, self._clock()
            return True
        if version != self._seen:  # not renewTime, which depends on the holder's clock
            duration = float(spec.get("leaseDurationSeconds") or self._times.duration)
            self._seen, self._free_at = version, self._clock() + duration
        return self._clock() >= self._free_at

    def _since_renewal(self, spec: dict[str, Any]) -> float:
        """Only a hint, since it compares the clocks of two machines."""
        if not spec.get("holderIdentity"):
            return 0.0
        try:
            renewed = datetime.fromisoformat(str(spec.get("renewTime")))
        except ValueError:
            return 0.0
        return max(0.0, (self._wall() - renewed).total_seconds())

    def _spec(self, old: dict[str, Any]) -> dict[str, Any]:
        now = self._wall_time()
        ours = old.get("holderIdentity") == self.identity
        return {
            **old,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": round(self._times.duration),
            "renewTime": now,
            "acquireTime": old.get("acquireTime", now) if ours else now,
            "leaseTransitions": old.get("leaseTransitions", -1) + (0 if ours else 1),
        }

    def _renewal(self) -> list[dict[str, Any]]:
        return [self._if_ours(), {"op": "replace", "path": "/spec/renewTime", "value": self._wall_time()}]

    def _if_ours(self) -> dict[str, Any]:
        return {"op": "test", "path": "/spec/holderIdentity", "value": self.identity}

    def _wall_time(self) -> str:
        return self._wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _held_since(self, began: float, answer: Answer) -> None:
        _, spec, _ = self._parsed(answer)
        if spec.get("holderIdentity") != self.identity:
            raise Unavailable(f"Lease {self._name}: an answer with another holder")
        self._renewed_at = max(began, self._renewed_at or began)

    async def _read(self) -> tuple[dict[str, Any], dict[str, Any], str] | None:
        answer = await self._transport.request("GET", self._path, timeout=self._timeout)
        return None if answer.status == 404 else self._parsed(answer)

    def _parsed(self, answer: Answer) -> tuple[dict[str, Any], dict[str, Any], str]:
        """The Lease of an answer, its spec and its version.

        Raises:
            Unavailable: there is none, as in a 409: it changed since it was read.
        """
        if not answer.ok:
            raise Unavailable(f"Lease {self._name}: {answer.status} {answer.message}")
        try:
            lease = json.loads(answer.body)
            return lease, dict(lease.get("spec") or {}), str(lease["metadata"]["resourceVersion"])
        except _NONSENSE as error:
            raise Unavailable(f"Lease {self._name}: an answer that is none: {answer.body[:100]!r}") from error

    async def _send(
        self, method: str, path: str, body: Any, content_type: str = JSON, timeout: float | None = None
    ) -> Answer:
        return await self._transport.request(
            method, path, body=body, content_type=content_type, timeout=timeout or self._timeout
        )

    @property
    def _timeout(self) -> float:
        """Of a renewal: as long as its answer is of use, since others are sent beside it."""
        return self._times.renew_deadline / (1 if self.held else 2)
