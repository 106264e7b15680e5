"""Chaos by seed on a real control plane: two replicas behind a faulty proxy, and what happens to pods, nodes and jobs.

`steady` is a job that nobody edits: its counters must agree with what was done to its pods. `edited` is changed at
random. `doomed` is in a namespace that is deleted midway. Many storms may follow each other in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dev.cluster import ControlPlane
from dev.kube import ApiError, Json, Kube, tolerant
from shoal.policy.facts.signals import NODES_HEARD_WITHIN
from tests import belongings
from tests.control_plane.installed import install_account, user_of
from tests.control_plane.operators import Job, OperatorProcess, eventually
from tests.control_plane.witness import SLACK, Witness, utc_now
from tests.doubles.fake_kubelet import FakeKubelet
from tests.doubles.faulty_api import FaultyApi, Trouble, Weather
from tests.every_field import BASE, REFUSED, changes

REPLICAS = ("replica-a", "replica-b")
WORKERS, SURGE, SERVERS = 3, 1, 2
START_SECONDS = 120.0
"""On a busy machine two operators take a while to start."""
SETTLED_SECONDS = 60.0
"""After the faults: until then the world is as specified."""
MANY = 5
"""Workers of `edited`, of which its leader hangs in the midst."""
QUIET_WRITES = 12
"""More in some seconds in which nothing happens are a hot loop."""
NODES = {"safe-1": False, "safe-2": False, **{f"spot-{number}": True for number in range(4)}}
"""Whether it is a spot node."""
ENDS_THE_JOB = ("runPolicy.activeDeadlineSeconds", "runPolicy.maxDisruptions", "runPolicy.backoffLimit")
EDITS = [c for c in changes() if str(c) not in REFUSED and c.path not in ENDS_THE_JOB]


Range = tuple[float, float]


@dataclass(frozen=True)
class Force:
    """How strong a storm is. Times are in seconds, each between two."""

    share: float
    """Of requests that meet a fault."""
    between: Range
    """From one event to the next."""
    pause: Range
    """A replica hangs, or reaches nothing. The Lease may be taken after 15 s."""
    outage: Range
    long_outage: Range
    forbidden: Range
    """Without any rights."""
    unheard: Range
    """One node."""
    silence: Range
    """All nodes: longer than the patience with one; by day than that of workers."""


LIGHT = Force(0.1, (0.05, 0.4), (0.3, 1.5), (0.3, 1.5), (2.0, 3.0), (0.3, 1.0), (0.5, 1.5), (12.0, 15.0))
BY_DAY = replace(LIGHT, silence=(6.5, 7.5))
HEAVY = Force(
    0.08, (0.3, 3.0), (5.0, 25.0), (2.0, 15.0), (60.0, 60.0), (3.0, 15.0), (5.0, 20.0), (12.0, 40.0)
)


@dataclass
class Expected:
    """What `steady` must have counted, since it was applied."""

    sure: int = 0
    failures: int = 0
    """Of these, failures."""
    servers: int = 0
    perhaps: set[str] = field(default_factory=set)
    """Uids of pods on nodes that were not heard, or not well, for a while, but for all at once."""
    kept: set[str] = field(default_factory=set)
    """Uids of pods that worked when all nodes fell silent at once: nobody is replaced for that."""
    taken: set[str] = field(default_factory=set)
    """Uids of pods that were deleted or crashed."""
    unheard: list[tuple[str, dt.datetime]] = field(default_factory=list)
    """A node, and since when. Of a pod that is bound soon after that, an operator whose watches are behind cannot know
    whether its node is back."""


@dataclass
class Storm:
    """Two replicas, two jobs, and one storm after the other."""

    plane: ControlPlane
    kube: Kube
    kubelet: FakeKubelet
    home: str
    folder: Path
    expected: Expected = field(default_factory=Expected)
    told: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    """How often each step found something to do."""

    def __post_init__(self) -> None:
        self.chance, self.force = random.Random(), LIGHT
        self.weather = Weather(random.Random())
        self.steady = Job(self.kube, self.home, "steady")
        self.edited = Job(self.kube, self.home, "edited")
        self.processes: list[OperatorProcess] = []
        self._bindings: list[Json] = []
        self._namespaces = {self.home}
        self._doomed: list[str] = []
        """Of these, those that are deleted in a storm."""

    @contextlib.asynccontextmanager
    async def brewing(self) -> AsyncIterator[None]:
        """The cluster, the operators and the jobs, while all is well."""
        for name, spot in NODES.items():
            await self.kubelet.add_node(name, spot=spot)
        objects = await install_account(self.plane, self.kube, self.home)
        self._bindings = [o for o in objects if o["kind"] == "ClusterRoleBinding"]
        async with contextlib.AsyncExitStack() as stack:
            self.api = await stack.enter_async_context(FaultyApi(self.plane.kubeconfig, self.weather))
            self.witness = await stack.enter_async_context(
                Witness(
                    self.kube,
                    self.plane.audit_log,
                    self._namespaces,
                    self.home,
                    set(REPLICAS),
                    {"steady": WORKERS + SURGE},
                )
            )
            for name in REPLICAS:
                door = await self.api.door(name, user_of(self.home, "shoal"), self.folder / name)
                process = OperatorProcess(
                    door,
                    "",
                    self.folder / name,
                    {"POD_NAME": name, "POD_NAMESPACE": self.home, "SHOAL_LOG_LEVEL": "info"},
                )
                await stack.enter_async_context(process)
                await stack.enter_async_context(process.kept_running())
                self.processes.append(process)
            workers = {"replicas": WORKERS, "maxSurge": SURGE}
            servers = {"replicas": SERVERS}
            await self.steady.apply(
                workers=workers, parameterServers=servers, runPolicy={"backoffLimit": 1000}
            )
            await self.edited.apply(**BASE)
            try:
                await self.steady.runs(WORKERS, START_SECONDS)
                yield
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self._story()}") from None
            for binding in self._bindings:
                with tolerant(404):
                    await self.kube.delete(_path(binding))

    async def rage(self, seed: int, steps: Sequence[str], force: Force) -> None:
        """The storm of one seed: these steps in random order, while requests meet faults."""
        self.told.append(f"seed {seed}")
        self.chance, self.force = random.Random(seed), force
        self.weather.chance = random.Random(seed + 1)
        self.weather.share, self.weather.repeated = force.share, 0.2
        if "doom" in steps:
            await self._build_on_sand(seed)
        for what in self.chance.sample(steps, len(steps)):
            self.told.append(f"{utc_now():%X} {what}")
            if await getattr(self, f"_{what}")() is not False:
                self.happened[what] += 1
            await self._last(force.between)

    async def clear(self) -> None:
        """The end of all faults."""
        self.api.heal()
        self.told.append(f"{utc_now():%X} the sky clears")
        await self.edit(BASE)

    async def as_specified(self, quiet_seconds: float = 10.0) -> None:
        """The world is as specified in time, then quiet; no rule was broken meanwhile, and every loss is counted."""
        deadline = asyncio.get_running_loop().time() + SETTLED_SECONDS
        while wrong := await self._wrong():
            assert asyncio.get_running_loop().time() < deadline, "\n".join(wrong)
            await asyncio.sleep(0.1)
        crashes = [words for process in self.processes for words in process.crashes()]
        broken = [*self.witness.judge(), *self._replaced_for_silence(), *crashes]
        assert not broken, "\n".join(broken)
        status = await self.steady.status()
        self._compare(status["restarts"], status["parameterServers"]["restarts"])
        before = self._written()
        await asyncio.sleep(quiet_seconds)
        self.witness.settle()
        count = self._written() - before
        assert count <= QUIET_WRITES, f"{count} writes in {quiet_seconds:.0f} s"
        assert not (broken := self.witness.judge()), "\n".join(broken)

    async def doomed_are_gone(self) -> None:
        """Every namespace that was deleted is gone, with all that was in it."""
        for name in self._doomed:

            async def gone(path: str = f"/api/v1/namespaces/{name}") -> bool:
                with tolerant(404):
                    await self.kube.get(path)
                    return False
                return True

            await eventually(gone, SETTLED_SECONDS, f"the namespace {name} is gone")

    # --- what happens

    async def _last(self, between: Range) -> None:
        await asyncio.sleep(self.chance.uniform(*between))

    async def _kill(self) -> None:
        await self.chance.choice(self.processes).kill()

    async def _stop(self) -> bool:
        """The leader is stopped cleanly, so that the other one leads, and comes back."""
        if (leader := self._leader()) is not None:
            await leader.stop()
        return leader is not None

    async def _pause(self) -> bool:
        """The leader hangs, in a long pause until the other one leads, and goes on."""
        if (leader := self._leader()) is not None:
            await leader.pause(self.chance.uniform(*self.force.pause))
        return leader is not None

    async def _takeover(self) -> None:
        """The leader hangs in the midst of its work until the other one leads, and wakes with the answer to a write.

        A pod is lost meanwhile, too.
        """

        async def leads() -> OperatorProcess | None:
            return self._leader()

        async def another_leads() -> bool:
            return self.witness.leader not in {"", before}

        leader: OperatorProcess = await eventually(leads, START_SECONDS, "a replica leads")
        before = self.witness.leader
        held = self.api.hold(before)

        async def works_or_leads_no_more() -> bool:
            return held.done or self.witness.leader != before

        await self.edit({**BASE, "workers": {**BASE["workers"], "replicas": MANY}})
        await eventually(works_or_leads_no_more, START_SECONDS, f"{before} writes something")
        async with leader.hanging():
            held.answer.set()
            await self._lose()
            await eventually(another_leads, START_SECONDS, f"another one than {before} leads")
        await self._last(self.force.pause)

    async def _partition(self) -> None:
        """The leader reaches nothing, and the other one does."""
        self.api.cut(self.witness.leader or REPLICAS[0])
        await self._last(self.force.pause)
        self.api.restore()

    def _leader(self) -> OperatorProcess | None:
        return next((p for p in self.processes if p.log.parent.name == self.witness.leader), None)

    async def _watches(self) -> bool:
        return self.api.disturb(0.5, self.weather.rarest(list(Trouble))) > 0

    async def _outage(self) -> None:
        await self._out(self.force.outage)

    async def _long_outage(self) -> None:
        await self._out(self.force.long_outage)

    async def _minute_outage(self) -> None:
        await self._out(HEAVY.long_outage)

    async def _out(self, between: Range) -> None:
        self.api.cut()
        await self._last(between)
        self.api.restore()

    async def _lose(self) -> bool:
        lost = (pod := self._victim()) is not None and await self._delete(pod)
        self.expected.sure += lost
        return lost

    async def _lose_server(self) -> bool:
        lost = (pod := self._victim("ps")) is not None and await self._delete(pod)
        self.expected.servers += lost
        return lost

    async def _delete(self, pod: Json) -> bool:
        self.expected.taken.add(pod["metadata"]["uid"])
        with tolerant(404):
            await self.kube.delete(
                f"/api/v1/namespaces/{self.home}/pods/{pod['metadata']['name']}", grace_seconds=0
            )
            return True
        return False

    async def _crash(self) -> bool:
        if pod := self._victim():
            self.expected.taken.add(pod["metadata"]["uid"])
            with tolerant(404, 409):
                await self.kubelet.fail_pod(self.home, pod["metadata"]["name"], exit_code=1)
                self.expected.sure += 1
                self.expected.failures += 1
                return True
        return False

    async def _blip(self) -> None:
        name = self._a_spot_node()
        before = self._pods_on([name])
        self.expected.unheard.append((name, utc_now()))
        await self._silence([name], self.force.unheard)
        self.expected.perhaps |= before | self._pods_on([name])
        await self.kubelet.appear(name)

    async def _all_unknown(self) -> None:
        """It is no loss, however long it lasts and whoever leads: the control plane is suspected."""
        self.expected.kept |= {
            pod["metadata"]["uid"]
            for pod in self._pods()
            if _works(pod) and not self.witness.troubled(pod["spec"]["nodeName"])
        }
        await self._silence(list(NODES), self.force.silence)
        for name in NODES:
            await self.kubelet.appear(name)

    async def _silence(self, names: list[str], between: Range) -> None:
        for name in names:
            await self.kubelet.vanish(name, unknown_after=0)
        await self._last(between)

    async def _reclaim(self) -> None:
        """A spot node gets its notice and ends; another one of its name comes."""
        name = self._a_spot_node()
        before = self._pods_on([name])
        await self.kubelet.notice(name)
        await self._last(self.force.unheard)
        self.expected.perhaps |= before | self._pods_on([name])
        await self.kubelet.end_shutdown(name)
        await self.kubelet.remove_node(name)
        await self.kubelet.add_node(name, spot=True)

    def _a_spot_node(self) -> str:
        return self.chance.choice([name for name, spot in NODES.items() if spot])

    async def _edit_once(self) -> None:
        change = self.chance.choice(EDITS)
        self.told[-1] += f" {change}"
        # One change at a time is admitted; of several together, what the schema says of each is not enough.
        await self.edit(change.of(BASE))

    async def _replace(self) -> None:
        with tolerant(404):
            await self.kube.delete(self.edited.path)

        async def gone() -> bool:
            with tolerant(404):
                await self.edited.get()
                return False
            return True

        await eventually(gone)
        await self.edited.apply(**BASE)

    async def _forbid(self) -> None:
        for binding in self._bindings:
            await self.kube.delete(_path(binding))
        before = self.weather.met["forbidden"]

        async def told() -> bool:
            self.api.disturb(1.0, Trouble.RESET)  # who watches need not ask for anything else
            return self.weather.met["forbidden"] > before

        await eventually(told, what="an operator is told that it is forbidden")
        await self._last(self.force.forbidden)
        for binding in self._bindings:
            await self.kube.create(_path(binding).rpartition("/")[0], binding)

    async def _build_on_sand(self, seed: int) -> None:
        """A job in a namespace that will be deleted."""
        name = f"{self.home}-doomed-{seed}"
        await self.kube.create("/api/v1/namespaces", {"metadata": {"name": name}})
        self._namespaces.add(name)
        self._doomed.append(name)
        await Job(self.kube, name, "doomed").apply()

    async def _doom(self) -> None:
        with tolerant(404, 409):
            await self.kube.delete(f"/api/v1/namespaces/{self._doomed[-1]}")

    async def edit(self, spec: Json) -> None:
        """Make it the whole spec, whatever it was."""
        while True:
            seen = await self.edited.get()
            try:
                await self.kube.request("PUT", self.edited.path, {**seen, "spec": spec})
            except ApiError as error:
                if error.status != 409:
                    raise
            else:
                return

    def _victim(self, role: str = "worker") -> Json | None:
        """A pod of `steady` that certainly counts if it is lost: alone in its place, at work, its node well."""
        candidates = {}
        for pods in self._places(role).values():
            pod = pods[0]
            if len(pods) == 1 and _works(pod) and not self.witness.troubled(pod["spec"]["nodeName"]):
                candidates[str(pod["metadata"]["name"])] = pod
        return candidates[self.chance.choice(sorted(candidates))] if candidates else None

    def _places(self, role: str) -> dict[str, list[Json]]:
        found: dict[str, list[Json]] = {}
        for pod in self.witness.pods.values():
            labels = pod["metadata"]["labels"]
            if labels["shoal.dev/job"] == "steady" and labels["shoal.dev/role"] == role:
                found.setdefault(labels["shoal.dev/index"], []).append(pod)
        return found

    def _pods(self) -> list[Json]:
        places = [*self._places("worker").values(), *self._places("ps").values()]
        return [pod for place in places for pod in place]

    def _pods_on(self, nodes: list[str]) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self._pods() if pod["spec"].get("nodeName") in nodes}

    def _bound_when_unheard(self) -> set[str]:
        """Pods of `steady` that were bound to nodes soon after they were not heard."""
        late = NODES_HEARD_WITHIN + SLACK
        return {
            uid
            for uid, node, at in self.witness.bindings("steady")
            if any(
                node == name and since <= at + SLACK <= since + late for name, since in self.expected.unheard
            )
        }

    # --- afterwards

    async def _wrong(self) -> list[str]:
        """What is not as specified."""
        found = {kind: await self._of_jobs(kind) for kind in ("pods", *belongings.KINDS)}
        wrong = [f"orphan: {each}" for each in self._orphans(found)]
        if (
            missed := self._missed(await self.steady.status())
        ) > 0:  # pods are replaced before a loss is written
            wrong.append(f"{missed} losses are not counted yet")
        wanted = ((self.steady, WORKERS, SERVERS), (self.edited, BASE["workers"]["replicas"], 1))
        for job, workers, servers in wanted:
            seen = await job.get()
            status = seen.get("status") or {}
            wrong += [f"{job.name}: {words}" for words in belongings.lacking(seen, found["pods"], found)]
            ready = [(status.get(role) or {}).get("ready") for role in ("workers", "parameterServers")]
            if ready != [workers, servers]:
                wrong.append(f"{job.name}: ready {ready}, {status.get('conditions')}")
            pods = list((await job.pods()).values())
            alive = sorted(p["metadata"]["name"].rpartition("-")[0] for p in pods if _works(p))
            # Which workers stay after a scale-down is the operator's choice.
            if len(set(alive)) != len(alive) or len(alive) != workers + servers:
                wrong.append(f"{job.name}: at work {alive}")
            ending = [p["metadata"]["name"] for p in pods if p["metadata"].get("deletionTimestamp")]
            if ending:
                wrong.append(f"{job.name}: still ending {ending}")
        return wrong

    async def _of_jobs(self, kind: str) -> list[Json]:
        group = "apis/policy/v1" if kind == "poddisruptionbudgets" else "api/v1"
        path = f"/{group}/namespaces/{self.home}/{kind}"
        return list((await self.kube.get(path, labelSelector="shoal.dev/job"))["items"])

    def _orphans(self, found: Mapping[str, Sequence[Json]]) -> list[str]:
        """Objects of jobs that are no longer there."""
        return [
            f"{kind} {each['metadata']['name']}"
            for kind, objects in found.items()
            for each in objects
            if not any(o["uid"] in self.witness.jobs for o in each["metadata"].get("ownerReferences", []))
        ]

    def _replaced_for_silence(self) -> list[str]:
        """Pods that are gone though nothing happened to them but the silence of all nodes."""
        expected, there = self.expected, self.witness.pods
        lost = expected.kept - expected.taken - expected.perhaps - self._bound_when_unheard()
        return [f"{uid} was replaced because all nodes were silent" for uid in lost if uid not in there]

    def _missed(self, status: Json) -> int:
        """How many certain losses `steady` has not counted."""
        restarts, servers = status["restarts"], status["parameterServers"]["restarts"]
        workers = self.expected.sure - restarts["failures"] - restarts["disruptions"]
        return max(0, workers) + max(0, self.expected.servers - servers)

    def _compare(self, restarts: Json, servers: int) -> None:
        expected, counted = self.expected, restarts["failures"] + restarts["disruptions"]
        perhaps = len(expected.perhaps | self._bound_when_unheard())
        words = f"{restarts} and {servers} servers after {expected}\n{self._story()}"
        assert expected.sure <= counted <= expected.sure + perhaps, words
        assert expected.servers <= servers <= expected.servers + perhaps, words
        assert restarts["failures"] <= expected.failures, words
        uncertain = perhaps or expected.kept
        assert uncertain or restarts["failures"] == expected.failures, words

    def _written(self) -> int:
        return sum(write.namespace == self.home for write in self.witness.written())

    def _story(self) -> str:
        logs = [f"{p.log}:\n" + "\n".join(p.log.read_text().splitlines()[-60:]) for p in self.processes]
        return "\n".join([*self.told[-60:], str(dict(self.weather.met)), *self.witness.judge(), *logs])


def _works(pod: Json) -> bool:
    return pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def _path(binding: Json) -> str:
    return f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{binding['metadata']['name']}"
