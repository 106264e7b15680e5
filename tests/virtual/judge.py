"""What holds in the virtual world, whatever happens: who may write, and what may be deleted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shoal.api.training_job_status import UNWANTED
from shoal.policy.decide.members import TAKEN_BACK
from tests.virtual.kueue import Kueue
from tests.virtual.loop import now
from tests.virtual.server import Json
from tests.virtual.world import World

STALE_SECONDS = 90.0
"""For so long a half-open watch may hide that a suspended job is wanted again."""

NEARLY_ALL = 0.9
"""Of the machines: where more are silent, none of them is gone for that."""


@dataclass
class Judge:
    """The invariants."""

    world: World
    kueue: Kueue | None
    broken: list[str] = field(default_factory=list)
    sent: int = 0
    unwanted_at: float = -STALE_SECONDS
    """When the job was last suspended, queued, finished or gone."""
    given_up: set[str] = field(default_factory=set)
    """Servers of which a status said so then, or that it took back: they go, whatever is wanted later."""

    def look(self) -> None:
        """At each step: who wrote what."""
        world = self.world
        live: Counter[tuple[str, str, str, str]] = Counter()
        for process in world.cluster.processes.values():
            if process.runs:
                live[process.job, process.role, str(process.index), str(process.incarnation)] += 1
        self.broken += [f"two processes of {key} at {now()}" for key, count in live.items() if count > 1]
        job = world.server.get("trainingjobs", "digits", "team")
        held = self.kueue is not None and not self.kueue.grants()
        if job is None or job["spec"].get("suspend") or _finished(job) or held:
            self.unwanted_at = now()
        if job is not None:
            causes = {TAKEN_BACK} | ({UNWANTED} if now() <= self.unwanted_at + STALE_SECONDS else set())
            slots = job.get("status", {}).get("slots", [])
            self.given_up |= {
                f"digits-ps-{s['index']}-{s['incarnation']}" for s in slots if s.get("cause") in causes
            }
        lease = world.server.get("leases", "shoal", "default")
        holder = lease["spec"].get("holderIdentity") if lease else None
        for sent in world.server.sent[self.sent :]:
            if sent.key[0] not in {"leases"} and sent.status < 300 and sent.who != holder:
                self.broken.append(f"{sent.who} wrote {sent.verb} {sent.key} at {sent.at}; {holder} leads")
            if (sent.verb, sent.key[0]) == ("DELETE", "pods") and "-ps-" in sent.key[2] and sent.status < 300:
                self._server_deleted(sent.key[2], sent.at)
        self.sent = len(world.server.sent)

    def _server_deleted(self, name: str, at: float) -> None:
        world = self.world
        process = world.cluster.process_of(name)
        wanted = now() > self.unwanted_at + STALE_SECONDS
        if process is None or not wanted or not process.runs or name in self.given_up:
            return
        machine = process.machine
        heard = machine.connected and machine.unheard_since is None
        healthy = machine.powered and machine.leaves_at is None and (heard or self._nearly_all_are_silent())
        newer = any(
            p.role == "ps" and p.index == process.index and p.incarnation > process.incarnation and p.runs
            for p in world.cluster.processes.values()
        )
        if healthy and not newer:
            self.broken.append(f"healthy server {name} deleted at {at}")

    def _nearly_all_are_silent(self) -> bool:
        """Then it is not the machines: who is away is the API server."""
        machines = [each for each in self.world.cluster.machines.values() if each.powered]
        return sum(not each.connected for each in machines) > NEARLY_ALL * len(machines)


def _finished(job: Json) -> bool:
    return job.get("status", {}).get("phase") in {"Succeeded", "Failed"}
