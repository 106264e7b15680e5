"""The played cloud: it makes a machine for each worker that waits for one of a pool, and takes those that are idle.

`decide` is pure. The rest makes and kills real nodes, in a thread, since a node takes seconds. A machine boots with a
full core, as burstable ones do, and is held to its share as soon as its worker trains.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from dev.cluster.cgroups import Used
from dev.cluster.local import LocalCluster
from dev.cluster.node import GRACE_SECONDS
from dev.errors import DevError

LABEL = "example.com/pool"
BOOT_CORES = 1.0

Pod = Mapping[str, Any]


@dataclass(frozen=True)
class Offer:
    """What the cloud offers of one pool: an idle machine goes after `idle` seconds, and it has at most `stock` now."""

    cores: float
    spot: bool
    idle: float
    stock: int


@dataclass
class Machine:
    """A machine. `idle_since`: the clock's time since when it has no pod of a job."""

    pool: str
    idle_since: float | None = None
    noticed_at: float | None = None
    limited: bool = False


def decide(
    now: float,
    offers: Mapping[str, Offer],
    machines: Mapping[str, Machine],
    pods: Sequence[Pod],
    booting: int,
) -> tuple[list[str], list[str]]:
    """The pools for which to make a machine, and the machines to take: idle ones, and those whose notice has run out.

    `booting`: machines that are being made; until they are there, no more are.
    """
    waiting = [
        p for p in pods if not p["spec"].get("nodeName") and not p["metadata"].get("deletionTimestamp")
    ]
    busy = {
        p["spec"].get("nodeName") for p in pods if p["status"].get("phase") not in ("Succeeded", "Failed")
    }
    for name, machine in machines.items():
        machine.idle_since = None if name in busy else machine.idle_since or now
    gone = [
        name
        for name, each in machines.items()
        if (each.noticed_at is not None and now - each.noticed_at >= GRACE_SECONDS)
        or (
            each.noticed_at is None
            and each.idle_since is not None
            and now - each.idle_since >= offers[each.pool].idle
        )
    ]
    made: list[str] = []
    for pool, offer in offers.items():
        wanted = sum((p["spec"].get("nodeSelector") or {}).get(LABEL) == pool for p in waiting)
        here = [n for n, m in machines.items() if m.pool == pool and m.noticed_at is None]
        free = sum(name not in busy for name in here)
        made += [pool] * max(0, min(wanted - free, offer.stock - len(here)))
    return ([] if booting else made), gone


@dataclass
class Cloud:
    """The machines of the pools, on a local cluster. `report` takes a line of output."""

    cluster: LocalCluster
    offers: dict[str, Offer]
    report: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    machines: dict[str, Machine] = field(default_factory=dict)
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))
    _booting: list[Future[None]] = field(default_factory=list)
    _ending: list[Future[None]] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def advance(self, pods: Sequence[Pod], trains: Sequence[str]) -> None:
        """Make and take machines. `trains`: the machines whose worker trains."""
        for done in [each for each in (*self._booting, *self._ending) if each.done()]:
            done.result()
        self._booting = [each for each in self._booting if not each.done()]
        self._ending = [each for each in self._ending if not each.done()]
        for name in trains:
            if name in self.machines and not self.machines[name].limited:
                self.machines[name].limited = True
                self.cluster.node(name).limit(self.offers[self.machines[name].pool].cores)
        made, gone = decide(self.clock(), self.offers, self.machines, pods, len(self._booting))
        for name in gone:
            self.report(f"the cloud takes {name}")
            self.machines.pop(name)
            self._ending.append(self._threads.submit(self._end, name))
        if made:
            self._booting.append(self._threads.submit(self._make, made))

    def used(self) -> dict[str, Used]:
        """What the workers of each machine had of the CPUs so far."""
        found = {}
        for name in tuple(self.machines):
            with contextlib.suppress(OSError, DevError):  # it is being ended
                found[name] = self.cluster.node(name).used()
        return found

    def reclaim(self, pool: str) -> list[str]:
        """Give notice to all machines of a pool, and have none of it any more."""
        self.stock(pool, 0)
        names = [name for name, m in self.machines.items() if m.pool == pool and m.noticed_at is None]
        for name in names:
            self.machines[name].noticed_at = self.clock()
            self.cluster.node(name).power_button()
        return names

    def stock(self, pool: str, machines: int) -> None:
        """Have so many machines of a pool."""
        self.offers[pool] = replace(self.offers[pool], stock=machines)

    def close(self) -> None:
        """Wait for what is under way."""
        self._threads.shutdown(wait=True)

    def _make(self, pools: Sequence[str]) -> None:
        for pool in dict.fromkeys(pools):
            names = [f"{pool}-{next(self._numbers)}" for _ in range(pools.count(pool))]
            self.report(f"the cloud makes {', '.join(names)}")
            offer = self.offers[pool]
            self.cluster.add_nodes([(name, offer.spot) for name in names], labels={LABEL: pool})
            for name in names:
                self.cluster.node(name).limit(BOOT_CORES)
                self.machines[name] = Machine(pool)

    def _end(self, name: str) -> None:
        with contextlib.suppress(DevError):
            self.cluster.kill(name)
        self.cluster.plane.kubectl("delete", "node", name, "--ignore-not-found", "--wait=false")
