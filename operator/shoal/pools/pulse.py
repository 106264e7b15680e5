"""Whether the operator runs: it renews its Lease every two seconds.

A recommendation is written only when it changes, so its age says nothing. The Lease's times are of another machine's
clock; that its version changes is seen with this one's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from shoal.cluster.clock import loop_time
from shoal.cluster.transport import Transport
from shoal.errors import ClusterError

EVERY_SECONDS = 5.0
SILENT_SECONDS = 30.0


class Pulse:
    """Watches one Lease; `every`: seconds between two looks. `on_return` is called when it is alive again."""

    def __init__(
        self,
        transport: Transport,
        namespace: str,
        name: str,
        every: float = EVERY_SECONDS,
        *,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self._every = every
        self._on_return = on_return
        self._transport = transport
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._version = ""
        self._renewed_at: float | None = None

    def alive(self) -> bool:
        """Whether the Lease was renewed lately, as far as it was watched."""
        return self._renewed_at is not None and loop_time() - self._renewed_at < SILENT_SECONDS

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                answer = await self._transport.request("GET", self._path)
                if answer.ok:
                    self._take(json.loads(answer.body))
            except (ClusterError, TimeoutError):
                pass  # what is not seen is not alive
            await asyncio.sleep(self._every)

    def _take(self, lease: dict[str, dict[str, str]]) -> None:
        version = lease["metadata"]["resourceVersion"]
        if not lease["spec"].get("holderIdentity"):  # it was released
            self._renewed_at = None
        elif self._version and version != self._version:
            returned = not self.alive()
            self._renewed_at = loop_time()
            if returned:
                self._on_return()
        self._version = version
