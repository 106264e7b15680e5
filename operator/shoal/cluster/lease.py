"""Leader election with a `coordination.k8s.io` Lease, on a monotonic clock.

Wall clocks of two machines differ and jump, so the times in the Lease are informational and never compared. A candidate
takes over after it has seen the Lease unchanged for its whole duration *by its own monotonic clock*. The leader counts
from *before* it sent its last renewal and sends nothing after `renew_deadline`, which is shorter than the duration, so
two leaders never write at the same time. (This is client-go's leaderelection plus that fence.) The process ends when
the Lease is lost; the next start lists everything again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shoal.cluster.transport import Answer, Transport
from shoal.errors import LeaseLost, Unavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry_period: float = 2.0


class Lease:
    """A candidate for one Lease: `acquire`, then `keep`, and `seconds_left` before every write."""

    def __init__(
        self,
        transport: Transport,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes = LeaseTimes(),
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._transport = transport
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._name = name
        self.identity = identity
        self._times = times
        self._wall = wall
        self._renewed_at: float | None = None
        self.abandoned_seconds = 0.0
        """For how long the Lease had not been renewed, by the wall clocks, when it was taken; 0 if it was released."""
        self._seen = ""
        self._seen_at = 0.0

    @property
    def held(self) -> bool:
        """Whether writes may be sent now."""
        return self._renewed_at is not None and self._now() < self._renewed_at + self._times.renew_deadline

    def seconds_left(self) -> float:
        """How long writes may still be sent.

        Raises:
            LeaseLost: they may not be sent any more.
        """
        left = (
            0.0 if self._renewed_at is None else self._renewed_at + self._times.renew_deadline - self._now()
        )
        if left <= 0:
            raise LeaseLost(f"{self.identity} does not hold Lease {self._name}: the request is not sent")
        return left

    async def acquire(self) -> None:
        """Wait until the Lease is held."""
        while True:
            try:
                if await self._try():
                    logger.info("%s acquired Lease %s", self.identity, self._name)
                    return
            except (Unavailable, TimeoutError) as error:
                logger.warning("%s", error)
            await asyncio.sleep(self._times.retry_period * random.uniform(1.0, 1.2))

    async def keep(self) -> None:
        """Renew the Lease until it is lost.

        Raises:
            LeaseLost: another process holds it, or it could not be renewed in time.
        """
        while True:
            await asyncio.sleep(self._times.retry_period)
            try:
                if not await self._try():
                    self._renewed_at = None
                    raise LeaseLost(f"another process holds Lease {self._name}")
            except (Unavailable, TimeoutError) as error:
                logger.warning("%s", error)
            self.seconds_left()

    async def release(self) -> None:
        """Release the Lease for the next leader. Nothing may be written afterwards."""
        if not self.held:
            return
        try:
            lease = await self._read()
            if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._send("PUT", self._path, lease)
        except (Unavailable, TimeoutError) as error:
            logger.warning("%s", error)
        self._renewed_at = None

    async def _try(self) -> bool:
        """Try once to take or renew the Lease; whether it is held."""
        began = self._now()
        lease = await self._read()
        if lease is None:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            spec = self._spec({})
            self._held_since(began, await self._send("POST", self._collection, {**body, "spec": spec}))
            return True
        spec = lease.get("spec") or {}
        if not self._may_take(spec, str(lease["metadata"].get("resourceVersion"))):
            return False
        if self._renewed_at is None:
            self.abandoned_seconds = self._since_renewal(spec)
        lease["spec"] = self._spec(spec)
        self._held_since(began, await self._send("PUT", self._path, lease))
        return True

    def _may_take(self, spec: dict[str, Any], version: str) -> bool:
        if (spec.get("holderIdentity") or "") in {"", self.identity}:
            return True
        if version != self._seen:  # not renewTime, which depends on the holder's clock
            self._seen, self._seen_at = version, self._now()
        return self._now() >= self._seen_at + float(spec.get("leaseDurationSeconds") or self._times.duration)

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
        now = self._wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = old.get("holderIdentity") == self.identity
        return {
            **old,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": round(self._times.duration),
            "renewTime": now,
            "acquireTime": old.get("acquireTime", now) if ours else now,
            "leaseTransitions": old.get("leaseTransitions", -1) + (0 if ours else 1),
        }

    def _held_since(self, began: float, answer: Answer) -> None:
        if not answer.ok:  # including 409: it changed since it was read
            raise Unavailable(f"Lease {self._name}: {answer.status} {answer.message}")
        self._renewed_at = began

    async def _read(self) -> dict[str, Any] | None:
        answer = await self._transport.request("GET", self._path, timeout=self._timeout)
        if answer.status == 404:
            return None
        if not answer.ok:
            raise Unavailable(f"Lease {self._name}: {answer.status} {answer.message}")
        lease: dict[str, Any] = json.loads(answer.body)
        return lease

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        return await self._transport.request(method, path, body=body, timeout=self._timeout)

    @property
    def _timeout(self) -> float:
        """Short enough that a slow request leaves time for another attempt."""
        return self._times.renew_deadline / 2

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
