"""What the API server itself shows of an operator under faults, and which of it must never be.

The witness watches past the proxy that plays the faults, and reads the audit log. Its order of events of one resource
is the API server's; events of different resources, and times of the audit log, are compared with some slack.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp

from dev.audit import READS, AuditTail, Write
from dev.kube import ApiError, Json, Kube

SLACK = dt.timedelta(seconds=3)
"""Between the audit log, the watches and the clocks of processes of one busy machine."""
AFTERMATH = dt.timedelta(seconds=90)
"""How long after the trouble of a node, or after its end, the operator may act on it..."""
SETTLED = dt.timedelta(seconds=10)
"""... and after the world was found as specified: a deaf watch may end so late."""
COUNTERS = ("failures", "disruptions", "withdrawn", "excused")
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
JOBS = "/apis/shoal.dev/v1alpha1/trainingjobs"


def utc_now() -> dt.datetime:
    """Now."""
    return dt.datetime.now(dt.UTC)


@dataclass
class Span:
    """From one time to another, or still."""

    since: dt.datetime
    until: dt.datetime | None = None
    over: dt.datetime | None = None
    """When nobody acts on it any more."""

    def end(self) -> None:
        """It holds no longer."""
        self.until = utc_now()
        self.over = self.until + AFTERMATH

    def near(self, at: dt.datetime) -> bool:
        """Whether a time is in it, or shortly after it."""
        return self.since - SLACK <= at and (self.over is None or at <= self.over)


@dataclass
class Spans:
    """When something held."""

    spans: list[Span] = field(default_factory=list)

    def set(self, holds: bool) -> None:
        """What holds from now on."""
        last = self.spans[-1] if self.spans else None
        if holds and (last is None or last.until is not None):
            self.spans.append(Span(utc_now()))
        elif not holds and last is not None and last.until is None:
            last.end()

    def settle(self) -> None:
        """Whoever acts on what held has done so."""
        for span in self.spans:
            if span.over is not None:
                span.over = min(span.over, utc_now() + SETTLED)

    def near(self, at: dt.datetime) -> bool:
        """Whether it held then, or shortly before."""
        return any(span.near(at) for span in self.spans)


def counters_of(job: Json) -> dict[str, int]:
    """Every counter of restarts in the status, by a name."""
    status = job.get("status") or {}
    restarts = status.get("restarts") or {}
    found = {name: restarts.get(name) or 0 for name in COUNTERS}
    found |= {f"byReason {reason}": count for reason, count in (restarts.get("byReason") or {}).items()}
    found["servers"] = (status.get("parameterServers") or {}).get("restarts", 0)
    return found


class Witness:
    """Watches the jobs of some namespaces, whose operators' Lease is in one; an asynchronous context manager.

    `most`: workers with their surge, of jobs that nobody scales.
    """

    def __init__(
        self,
        kube: Kube,
        audit_log: Path,
        namespaces: set[str],
        home: str,
        agents: set[str],
        most: Mapping[str, int],
    ) -> None:
        self._kube, self._log = kube, AuditTail(audit_log)
        self._namespaces, self._home, self._agents = namespaces, home, agents
        self._most = most
        self.broken: list[str] = []
        self.jobs: dict[str, Json] = {}
        """Those that exist, by uid."""
        self.pods: dict[str, Json] = {}
        """The same of pods."""
        self._all_pods: dict[tuple[str, str], dict[str, Json]] = defaultdict(dict)
        """Every pod that ever was, as last seen, by namespace and name, and by uid."""
        self._ran: set[str] = set()
        self._ending: dict[str, dt.datetime] = {}
        """When pods were first seen to end, by uid."""
        self._nodes: dict[str, Spans] = defaultdict(Spans)
        self._unwanted: dict[str, Spans] = defaultdict(Spans)
        self._counted: dict[str, dict[str, int]] = defaultdict(dict)
        self._tenures: list[tuple[dt.datetime, str]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Witness:
        lease = LEASES.format(self._home)
        for path, see in (
            ("/api/v1/nodes", self.see_node),
            (JOBS, self.see_job),
            ("/api/v1/pods", self.see_pod),
            (lease, self.see_lease),
        ):
            self._tasks.append(asyncio.create_task(self._follow(path, see)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def leader(self) -> str:
        """Who holds the Lease; empty if nobody does."""
        return self._tenures[-1][1] if self._tenures else ""

    @property
    def holders(self) -> set[str]:
        """Who ever held the Lease."""
        return {holder for _, holder in self._tenures if holder}

    @property
    def takeovers(self) -> int:
        """How often a replica took the Lease that another one had not given back."""
        holders = [holder for _, holder in self._tenures]
        return sum(bool(before and after) for before, after in pairwise(holders))

    def settle(self) -> None:
        """The world is as specified: the trouble of nodes that was is no longer acted on."""
        for node in self._nodes.values():
            node.settle()

    def bindings(self, job: str) -> Iterator[tuple[str, str, dt.datetime]]:
        """Of every pod of a job that ever was: its uid, its node, and when it was bound to it."""
        for pods in self._all_pods.values():
            for uid, pod in pods.items():
                if pod["metadata"]["labels"]["shoal.dev/job"] == job and (
                    node := pod["spec"].get("nodeName")
                ):
                    conditions = pod["status"].get("conditions", [])
                    bound: Json = next((c for c in conditions if c["type"] == "PodScheduled"), {})
                    at = bound.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]
                    yield uid, node, dt.datetime.fromisoformat(at)

    def judge(self) -> list[str]:
        """Every rule that was broken, in words."""
        sent = self.written()
        done = [write for write in sent if write.code < 300]
        return [*self.broken, *self._written_without_the_lease(sent), *self._healthy_servers_deleted(done)]

    def written(self) -> list[Write]:
        """What the operators wrote in the namespaces so far, refused or not."""
        return [
            write
            for write in self._log.read()
            if write.verb not in READS and write.agent in self._agents and write.namespace in self._namespaces
        ]

    def troubled(self, node: str) -> bool:
        """Whether a node is not well, or was not until a while ago."""
        return self._nodes[node].near(utc_now())

    # --- what is seen

    async def _follow(self, path: str, see: Callable[[str, Json], None]) -> None:
        while True:
            try:
                listed = await self._kube.get(path)
                for each in listed["items"]:
                    see("ADDED", each)
                version = listed["metadata"]["resourceVersion"]
                async for kind, seen in self._kube.watch(path, resourceVersion=version):
                    if kind != "BOOKMARK":
                        see(kind, seen)
            except (ApiError, aiohttp.ClientError, TimeoutError, ValueError):
                await asyncio.sleep(0.2)

    def see_node(self, kind: str, node: Json) -> None:
        """A node changed."""
        ready: Json = next((c for c in node["status"].get("conditions", []) if c["type"] == "Ready"), {})
        troubled = ready.get("status") != "True" or bool(node["spec"].get("taints"))
        self._nodes[node["metadata"]["name"]].set(kind == "DELETED" or troubled)

    def see_job(self, kind: str, job: Json) -> None:
        """A job changed."""
        meta = job["metadata"]
        uid, name = meta["uid"], f"{meta['namespace']}/{meta['name']}"
        if meta["namespace"] not in self._namespaces:
            return
        finished = (job.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
        gone = kind == "DELETED" or bool(meta.get("deletionTimestamp"))
        self._unwanted[uid].set(gone or finished or bool(job["spec"].get("suspend")))
        if kind == "DELETED":
            self.jobs.pop(uid, None)
            return
        self.jobs[uid] = job
        before, now = self._counted[uid], counters_of(job)
        for counter in before:
            if now.get(counter, 0) < before[counter]:
                self.broken.append(f"{name}: {counter} fell from {before[counter]} to {now.get(counter, 0)}")
        self._counted[uid] = now

    def see_pod(self, kind: str, pod: Json) -> None:
        """A pod changed."""
        meta = pod["metadata"]
        if meta["namespace"] not in self._namespaces or "shoal.dev/job" not in meta.get("labels", {}):
            return
        known = self._all_pods[meta["namespace"], meta["name"]]
        again = meta["uid"] not in known and any(_owner(each) == _owner(pod) for each in known.values())
        if again:  # an incarnation is used once: it tells the processes apart, and that of a server fences
            self.broken.append(f"pod {meta['name']} of one job was created twice")
        known[meta["uid"]] = pod
        if pod["status"].get("phase") == "Running":
            self._ran.add(meta["uid"])
        if meta.get("deletionTimestamp") or pod["status"].get("phase") in {"Succeeded", "Failed"}:
            self._ending.setdefault(meta["uid"], utc_now())
        if kind == "DELETED":
            self.pods.pop(meta["uid"], None)
            return
        self.pods[meta["uid"]] = pod
        if meta["labels"]["shoal.dev/role"] == "ps":
            self._one_server_of_a_shard(pod)
        elif meta["labels"]["shoal.dev/job"] in self._most:
            self._not_too_many_workers(pod)

    def _one_server_of_a_shard(self, pod: Json) -> None:
        shard = pod["metadata"]["labels"]["shoal.dev/index"]
        same = [n for n, labels in self._live(pod) if labels["shoal.dev/index"] == shard]
        if len(same) > 1:
            self.broken.append(f"servers of one shard beside each other: {', '.join(sorted(same))}")

    def _not_too_many_workers(self, pod: Json) -> None:
        workers, most = (
            [n for n, _ in self._live(pod)],
            self._most[pod["metadata"]["labels"]["shoal.dev/job"]],
        )
        if len(workers) > most:
            self.broken.append(f"more than {most} workers: {', '.join(sorted(workers))}")

    def _live(self, like: Json) -> list[tuple[str, dict[str, str]]]:
        """Names and labels of the pods of the same job and role that are to stay, on nodes that are heard."""
        role = like["metadata"]["labels"]["shoal.dev/role"]
        return [
            (each["metadata"]["name"], each["metadata"]["labels"])
            for each in self.pods.values()
            if _owner(each) == _owner(like)
            and each["metadata"]["labels"]["shoal.dev/role"] == role
            and not each["metadata"].get("deletionTimestamp")
            and each["status"].get("phase") in {"Pending", "Running"}
            and not self.troubled(each["spec"].get("nodeName", ""))
        ]

    def see_lease(self, kind: str, lease: Json) -> None:
        """A Lease changed."""
        if lease["metadata"]["name"] != "shoal" or kind == "DELETED":
            return
        spec = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if self._tenures and self._tenures[-1][1] == holder:
            return
        since = dt.datetime.fromisoformat(spec["acquireTime"]) if holder else utc_now() + SLACK
        self._tenures.append((since, holder))

    # --- the rules

    def _written_without_the_lease(self, mine: list[Write]) -> list[str]:
        broken = []
        for write in mine:
            holder = next((who for since, who in reversed(self._tenures) if since <= write.received), "")
            if write.agent != holder:
                broken.append(
                    f"{write.agent} sent {write.verb} {write.resource} {write.name} at {write.received:%X.%f},"
                    f" when the Lease was held by {holder or 'nobody'}"
                )
        return broken

    def _healthy_servers_deleted(self, mine: list[Write]) -> list[str]:
        """A server that works is deleted when nobody wants it: not otherwise. A node that is not heard is no reason."""
        broken = []
        for write in mine:
            if (write.verb, write.resource, write.subresource) != ("delete", "pods", ""):
                continue
            pod = self._pod_at(write)
            if pod is None or pod["metadata"]["labels"]["shoal.dev/role"] != "ps":
                continue
            uid = pod["metadata"]["uid"]
            ended = self._ending.get(uid)
            unwanted = self._unwanted[_owner(pod)].near(write.received)
            if uid in self._ran and not unwanted and (ended is None or ended > write.received):
                broken.append(
                    f"{write.agent} deleted {write.name}, which worked, at {write.received:%X.%f}"
                    f" (seen to end: {f'{ended:%X.%f}' if ended else 'never'}; recorded: {self._record_of(pod)})"
                )
        return broken

    def _record_of(self, pod: Json) -> Json | None:
        """What the status of its job says of a server, as it was last seen."""
        labels, status = pod["metadata"]["labels"], self.jobs.get(_owner(pod), {}).get("status") or {}
        place = (labels["shoal.dev/role"], int(labels["shoal.dev/index"]))
        slots: list[Json] = status.get("slots") or []
        return next((each for each in slots if (each.get("role"), each["index"]) == place), None)

    def _pod_at(self, write: Write) -> Json | None:
        """The pod that had the name then: a job that is applied again uses the names of the first one."""
        created = {
            dt.datetime.fromisoformat(pod["metadata"]["creationTimestamp"]): pod
            for pod in self._all_pods[write.namespace, write.name].values()
        }
        before = [at for at in created if at <= write.received]
        return created[max(before)] if before else None


def _owner(pod: Json) -> str:
    return str(pod["metadata"].get("ownerReferences", [{}])[0].get("uid", ""))
