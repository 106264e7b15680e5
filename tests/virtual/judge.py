"""What holds in the virtual world, whatever happens: who may write and how often, what may be deleted and counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from shoal.api.training_job_status import UNWANTED
from tests.virtual.cluster import Process
from tests.virtual.kueue import Kueue
from tests.virtual.loop import now
from tests.virtual.server import Json, Key, Sent
from tests.virtual.world import World

STALE_SECONDS = 90.0
"""For so long a half-open watch may hide that a suspended job is wanted again."""

NEARLY_ALL = 0.9
"""Of the machines: where more are silent, none of them is gone for that."""

MOST_REFUSED = 20
"""Writes in a namespace that ends, of which nothing more can be made, in a minute: more are a hot loop."""
MINUTE = 60.0


@dataclass
class Judge:
    """The invariants."""

    world: World
    kueue: Kueue | None
    broken: list[str] = field(default_factory=list)
    sent: int = 0
    unwanted_at: defaultdict[Key, float] = field(default_factory=lambda: defaultdict(lambda: -inf))
    """When each job was last suspended, queued, finished or gone."""
    given_up: set[str] = field(default_factory=set)
    """Servers of which a status said so then: they go, whatever is wanted later."""
    struck: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Uids of the workers to whom something happened that may count as a disruption, by their job's..."""
    crashed: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """... and of those that failed."""
    refused: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """When writes were refused in a namespace that ends: those of the last minute."""

    def strike(self, processes: Iterable[Process], *, crash: bool = False) -> None:
        """Something is about to happen to these, of whom only workers are counted."""
        for process in processes:
            if process.role == "worker":
                (self.crashed if crash else self.struck)[process.job].add(process.uid)

    def look(self) -> None:
        """At each step: who wrote what."""
        world = self.world
        live: Counter[tuple[str, str, str, str]] = Counter()
        for process in world.cluster.processes.values():
            if process.runs:
                live[process.job, process.role, str(process.index), str(process.incarnation)] += 1
        self.broken += [f"two processes of {key} at {now()}" for key, count in live.items() if count > 1]
        jobs = {key: found for key, found in world.server.objects.items() if key[0] == "trainingjobs"}
        for key in self.unwanted_at.keys() | jobs.keys():
            self._look_at(key, jobs.get(key))
        lease = world.server.get("leases", "shoal", "default")
        holder = lease["spec"].get("holderIdentity") if lease else None
        for sent in world.server.sent[self.sent :]:
            if sent.key[0] not in {"leases"} and sent.status < 300 and sent.who != holder:
                self.broken.append(f"{sent.who} wrote {sent.verb} {sent.key} at {sent.at}; {holder} leads")
            if (sent.verb, sent.key[0]) == ("DELETE", "pods") and "-ps-" in sent.key[2] and sent.status < 300:
                self._server_deleted(sent.key, sent.at)
            if sent.status >= 400 and world.server.namespaces.get(sent.key[1]) == "Terminating":
                self._refused(sent)
        self.sent = len(world.server.sent)

    def _look_at(self, key: Key, job: Json | None) -> None:
        held = self.kueue is not None and _is_queued(job) and not self.kueue.grants()
        if job is None or job["spec"].get("suspend") or _finished(job) or held:
            self.unwanted_at[key] = now()
        if job is None:
            return
        status, uid = job.get("status", {}), job["metadata"]["uid"]
        if now() <= self.unwanted_at[key] + STALE_SECONDS:
            self.given_up |= {
                f"{key[2]}-ps-{s['index']}-{s['incarnation']}"
                for s in status.get("slots", [])
                if s.get("cause") == UNWANTED
            }
        counted = status.get("restarts", {})
        failures = counted.get("failures", 0)
        disruptions = counted.get("disruptions", 0) - counted.get("withdrawn", 0)
        struck, crashed = self.struck.get(uid, set()), self.crashed.get(uid, set())
        if failures > len(crashed) or failures + disruptions > len(struck | crashed):
            words = f"{failures} failures and {disruptions} disruptions of {key[2]}"
            self.broken.append(f"{words} at {now()}, of {len(crashed)} and {len(struck)} that were struck")

    def _refused(self, sent: Sent) -> None:
        namespace, since = sent.key[1], sent.at - MINUTE
        self.refused[namespace] = [*(at for at in self.refused[namespace] if at > since), sent.at]
        if (number := len(self.refused[namespace])) > MOST_REFUSED:
            words = f"{number} writes of a minute were refused in {namespace}, which ends"
            self.broken.append(f"{words}: the last {sent.verb} {sent.key} at {sent.at}")

    def _server_deleted(self, pod: Key, at: float) -> None:
        world, name = self.world, pod[2]
        process = world.cluster.process_of(name)
        job = ("trainingjobs", pod[1], name.rpartition("-ps-")[0])
        wanted = now() > self.unwanted_at[job] + STALE_SECONDS
        if process is None or not wanted or not process.runs or name in self.given_up:
            return
        machine = process.machine
        heard = machine.connected and machine.unheard_since is None
        healthy = machine.powered and machine.leaves_at is None and (heard or self._nearly_all_are_silent())
        newer = any(
            p.job == process.job and p.role == "ps" and p.index == process.index
            and p.incarnation > process.incarnation and p.runs
            for p in world.cluster.processes.values()
        )  # fmt: skip
        if healthy and not newer:
            self.broken.append(f"healthy server {name} deleted at {at}")

    def _nearly_all_are_silent(self) -> bool:
        """Then it is not the machines: who is away is the API server."""
        machines = [each for each in self.world.cluster.machines.values() if each.powered]
        return sum(not each.connected for each in machines) > NEARLY_ALL * len(machines)


def _finished(job: Json) -> bool:
    return job.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def _is_queued(job: Json | None) -> bool:
    return job is not None and bool(job["spec"].get("runPolicy", {}).get("schedulingPolicy", {}).get("queue"))
