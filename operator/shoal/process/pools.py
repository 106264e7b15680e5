"""The process `shoal-pools`: makes CapacityPools with scaling mode Buffer, Scale or Cloud the recommended size.

It is not the operator, and has another service account: rights to a cloud and to create pods do not meet. Pools are of
the cluster, so one process in the cluster sizes them, however many releases enable it: all want the same Lease. Exit
codes as `shoal-operator`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime

from shoal.api.base import API_VERSION
from shoal.api.capacity_pool import CapacityPool
from shoal.cluster.cache import Cache
from shoal.cluster.clock import boot_time, utc_now
from shoal.cluster.http import connect
from shoal.cluster.lease import MOST_UNANSWERED, Lease, LeaseTimes
from shoal.cluster.own_thread import OwnThread, Runs, here
from shoal.cluster.reflector import Reflector, Source
from shoal.cluster.transport import Fenced, Transport
from shoal.errors import UsageError
from shoal.manifests.installed import labels_of, own_spot_of
from shoal.manifests.platforms import GENERIC, Platform, platform_of
from shoal.pools.metrics import LEADING, PoolMetrics
from shoal.pools.scaler import PoolScaler
from shoal.pools.subject import drivers
from shoal.process.endpoints import exposition, healthy, open_ports, ready
from shoal.process.life import (
    allow_open_files,
    end_with,
    exempt_what_is_loaded,
    keep_tls_small,
    signalled,
    until,
)
from shoal.process.log import start_log
from shoal.process.settings import ProcessSettings, of_any_process, said_platform
from shoal.runtime.controller import Controller, count_waiting
from shoal.runtime.limiter import Limited
from shoal.runtime.manager import Manager
from shoal.runtime.metrics import Metrics
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter
from shoal.runtime.work_queue import Priority

LEASE_TIMES = LeaseTimes()
CONNECTIONS = 8
LEASE_CONNECTIONS = MOST_UNANSWERED
WORKERS = 4
"""Pools sized concurrently."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings(ProcessSettings):
    """The settings of one installation. The Lease is the same of each: two that lead would write each pool in turns."""

    lease_name: str = "shoal-pools"
    platform: Platform = GENERIC
    """Of the nodes, which this process does not read: of all that there may be, unless somebody says it."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes of all pods of jobs."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> PoolSettings:
        """Read the variables.

        Raises:
            UsageError: a variable is invalid; the message names it.
        """
        return cls(
            **of_any_process(environment),
            platform=platform_of((), said_platform(environment), own_spot_of(environment)),
            node_selector=labels_of(environment, "SHOAL_NODE_SELECTOR"),
        )


class NodePools:
    """One replica. `lease_transport`, `lease_runs`, `lease_clock`: see `shoal.process.operator.Operator`."""

    def __init__(
        self,
        transport: Transport,
        settings: PoolSettings,
        *,
        lease_transport: Transport | None = None,
        lease_runs: Runs = here,
        lease_clock: Callable[[], float] = boot_time,
        wall: Callable[[], datetime] = utc_now,
    ) -> None:
        self.metrics = metrics = Metrics(LEADING)
        self.cache: Cache[CapacityPool] = Cache(self._changed)
        lease = Lease(
            lease_transport or transport,
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            identity=settings.identity,
            times=LEASE_TIMES,
            clock=lease_clock,
            wall=wall,
            runs=lease_runs,
            on_renewed=metrics.renewal_seconds.observe,
        )
        fenced = Limited(
            Fenced(transport, lease.seconds_left),
            on_answer=lambda verb, code, seconds: metrics.requests.labels(verb, code).observe(seconds),
        )
        recorder = Recorder(
            fenced,
            reporter=settings.identity,
            wall=wall,
            on_result=lambda result: metrics.events.labels(result).inc(),
        )
        pools = Reflector(
            fenced,
            Source(f"/apis/{API_VERSION}/{CapacityPool.PLURAL}", CapacityPool),
            self.cache,
            on_restart=lambda why: metrics.watch_restarts.labels(CapacityPool.PLURAL, why).inc(),
            on_unread=metrics.unread_objects.labels(CapacityPool.PLURAL).inc,
        )
        scaler = PoolScaler(
            self.cache,
            drivers(fenced, settings.platform, settings.node_selector, lease.seconds_left),
            StatusWriter(
                fenced,
                self.cache,
                CapacityPool,
                on_result=lambda result: metrics.status_writes.labels("CapacityPool", result).inc(),
                on_stale=pools.request_refresh,
            ),
            recorder,
            PoolMetrics(metrics),
            wall=wall,
        )
        self.controller = Controller(
            "nodepool",
            scaler,
            keys=lambda: [("", pool.metadata.name) for pool in self.cache.all()],
            metrics=metrics,
            workers=WORKERS,
        )
        count_waiting([self.controller], metrics)
        self.manager = Manager(
            lease,
            [self.controller],
            needed={CapacityPool.PLURAL: pools},
            optional={},
            recorder=recorder,
            metrics=metrics,
        )

    async def run(self) -> None:
        """Run until cancelled; see `Manager.run`."""
        await self.manager.run()

    def _changed(self, old: CapacityPool | None, new: CapacityPool | None, ours: bool) -> None:
        if (seen := new or old) is not None and not ours:
            self.controller.wake(("", seen.metadata.name), Priority.NORMAL)


def main() -> None:
    """Run until a signal arrives."""
    try:
        settings = PoolSettings.from_environment()
    except UsageError as error:
        print(f"shoal-pools: {error}", file=sys.stderr)
        sys.exit(2)
    end_with(run(settings))  # a cloud that does not answer holds its threads longer than the kubelet waits


async def run(settings: PoolSettings) -> int:
    """Run it with its endpoints; returns the exit code."""
    start_log(settings.log_level, settings.log_format)
    allow_open_files()
    keep_tls_small()
    exempt_what_is_loaded()
    stop = signalled()
    async with AsyncExitStack() as resources:
        transport = await connect(CONNECTIONS)
        resources.push_async_callback(transport.close)
        aside = resources.enter_context(OwnThread("lease"))
        lease_transport = await connect(LEASE_CONNECTIONS)
        resources.push_async_callback(lambda: aside(lease_transport.close()))
        pools = NodePools(transport, settings, lease_transport=lease_transport, lease_runs=aside)
        await open_ports(
            resources,
            (settings.health_port, {"/healthz": healthy, "/readyz": ready(pools.manager.unread)}),
            (settings.metrics_port, {"/metrics": exposition(pools.metrics.registry)}),
        )
        return await until(stop, "scaler of node pools", pools.run())
    return 1


if __name__ == "__main__":
    main()
