"""Chaos by seed on a real control plane: two replicas behind a faulty proxy, and what happens to pods, nodes and jobs.

`steady` is a job that nobody edits: its counters must agree with what was done to its workers. `edited` is changed at
random. The namespace of `doomed` is deleted midway.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from dev.audit import writes
from dev.cluster import ControlPlane
from dev.fake_kubelet import FakeKubelet
from dev.faulty_api import FaultyApi, Trouble, Weather
from dev.kube import ApiError, Json, Kube, tolerant
from tests.control_plane.installed import install_account, user_of
from tests.control_plane.operators import Job, OperatorProcess, eventually
from tests.control_plane.witness import Witness, utc_now
from tests.every_field import BASE, REFUSED, changes

REPLICAS = ("replica-a", "replica-b")
WORKERS, SURGE, SERVERS = 3, 1, 2
START_SECONDS = 120.0
"""On a busy machine two operators take a while to start."""
SETTLED_SECONDS = 60.0
"""After the faults: until then the world is as specified."""
PAUSE_SECONDS = (5.0, 25.0)
"""Around the time after which the Lease may be taken."""
QUIET_WRITES = 12
"""More in some seconds in which nothing happens are a hot loop."""
ENDS_THE_JOB = ("runPolicy.activeDeadlineSeconds", "runPolicy.maxDisruptions", "runPolicy.backoffLimit")
EDITS = [c for c in changes() if str(c) not in REFUSED and c.path not in ENDS_THE_JOB]


@dataclass
class Expected:
    """What `steady` must have counted."""

    sure: int = 0
    failures: int = 0
    """Of these, failures."""
    perhaps: int = 0
    """Workers on nodes that were not heard for a while."""


@dataclass
class Storm:
    """One seed."""

    plane: ControlPlane
    kube: Kube
    kubelet: FakeKubelet
    home: str
    doomed: str
    folder: Path
    seed: int
    expected: Expected = field(default_factory=Expected)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.weather = Weather(random.Random(self.seed + 1))
        self.steady = Job(self.kube, self.home, "steady")
        self.edited = Job(self.kube, self.home, "edited")
        self.processes: list[OperatorProcess] = []
        self._edits: Json = BASE
        self._bindings: list[Json] = []

    @contextlib.asynccontextmanager
    async def brewing(self) -> AsyncIterator[None]:
        """The cluster, the operators and the jobs, while all is well."""
        for name in ("safe-1", "safe-2"):
            await self.kubelet.add_node(name)
        for number in range(4):
            await self.kubelet.add_node(f"spot-{number}", spot=True)
        objects = await install_account(self.plane, self.kube, self.home)
        self._bindings = [o for o in objects if o["kind"] == "ClusterRoleBinding"]
        async with contextlib.AsyncExitStack() as stack:
            self.api = await stack.enter_async_context(FaultyApi(self.plane.kubeconfig, self.weather))
            self.witness = await stack.enter_async_context(
                Witness(
                    self.kube,
                    self.plane.audit_log,
                    {self.home, self.doomed},
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
                    POD_NAME=name,
                    POD_NAMESPACE=self.home,
                    SHOAL_LOG_LEVEL="info",
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
            await Job(self.kube, self.doomed, "doomed").apply()
            try:
                await self.steady.runs(WORKERS, START_SECONDS)
                yield
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self._story()}") from None
            for binding in self._bindings:
                with tolerant(404):
                    await self.kube.delete(_path(binding))

    async def rage(self, steps: dict[str, int], pauses: tuple[float, float], share: float) -> None:
        """Faults at random, `steps` of each kind in random order; requests meet one with this probability."""
        self.weather.share, self.weather.repeated = share, 0.2
        script = [what for what, times in steps.items() for _ in range(times)]
        self.chance.shuffle(script)
        for what in script:
            self.told.append(f"{utc_now():%X} {what}")
            await getattr(self, f"_{what}")()
            await asyncio.sleep(self.chance.uniform(*pauses))

    async def clear(self) -> None:
        """The end of all faults."""
        self.api.heal()
        self.told.append(f"{utc_now():%X} the sky clears")
        await self._edit(BASE)

    async def as_specified(self, quiet_seconds: float = 10.0) -> None:
        """The world is as specified in time, then quiet; no rule was broken meanwhile, and every loss is counted."""
        deadline = asyncio.get_running_loop().time() + SETTLED_SECONDS
        while wrong := await self._wrong():
            assert asyncio.get_running_loop().time() < deadline, "\n".join(wrong)
            await asyncio.sleep(0.1)
        assert not (broken := self.witness.judge()), "\n".join(broken)
        self._compare((await self.steady.status())["restarts"])
        before = self._written()
        await asyncio.sleep(quiet_seconds)
        count = self._written() - before
        assert count <= QUIET_WRITES, f"{count} writes in {quiet_seconds:.0f} s"
        assert not (broken := self.witness.judge()), "\n".join(broken)

    # --- what happens

    async def _kill(self) -> None:
        await self.chance.choice(self.processes).kill()

    async def _pause(self) -> None:
        """The leader hangs until the other one leads, and goes on."""
        leader = next((p for p in self.processes if p.log.parent.name == self.witness.leader), None)
        if leader is not None:
            await leader.pause(self.chance.uniform(*PAUSE_SECONDS))

    async def _watches(self) -> None:
        self.api.disturb(0.5, self.chance.choice(list(Trouble)))

    async def _outage(self) -> None:
        await self._out(self.chance.uniform(2, 15))

    async def _long_outage(self) -> None:
        await self._out(60)

    async def _out(self, seconds: float) -> None:
        self.api.cut()
        await asyncio.sleep(seconds)
        self.api.restore()

    async def _lose(self) -> None:
        if pod := self._victim():
            with tolerant(404):
                await self.kube.delete(f"/api/v1/namespaces/{self.home}/pods/{pod}", grace_seconds=0)
                self.expected.sure += 1

    async def _crash(self) -> None:
        if pod := self._victim():
            with tolerant(404, 409):
                await self.kubelet.fail_pod(self.home, pod, exit_code=1)
                self.expected.sure += 1
                self.expected.failures += 1

    async def _blip(self) -> None:
        name = self.chance.choice([name for name in self.kubelet.nodes if name.startswith("spot")])
        await self._unheard([name], self.chance.uniform(3, 20))

    async def _all_unknown(self) -> None:
        await self._unheard(list(self.kubelet.nodes), self.chance.uniform(15, 40))

    async def _unheard(self, names: list[str], seconds: float) -> None:
        before = self._workers_on(names)
        for name in names:
            await self.kubelet.vanish(name, unknown_after=0)
        await asyncio.sleep(seconds)
        self.expected.perhaps += len(before | self._workers_on(names))
        for name in names:
            await self.kubelet.appear(name)

    async def _edit_once(self) -> None:
        change = self.chance.choice(EDITS)
        self.told[-1] += f" {change}"
        # One change at a time is admitted; of several together, what the schema says of each is not enough.
        await self._edit(change.of(BASE))

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
        await asyncio.sleep(self.chance.uniform(3, 15))
        for binding in self._bindings:
            await self.kube.create(_path(binding).rpartition("/")[0], binding)

    async def _doom(self) -> None:
        with tolerant(404, 409):
            await self.kube.delete(f"/api/v1/namespaces/{self.doomed}")

    async def _edit(self, spec: Json) -> None:
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

    def _victim(self) -> str:
        """A worker of `steady` that certainly counts if it is lost: alone in its slot, at work, its node well."""
        candidates = []
        for pods in self._slots().values():
            pod = pods[0]
            if len(pods) == 1 and _works(pod) and not self.witness.troubled(pod["spec"]["nodeName"]):
                candidates.append(str(pod["metadata"]["name"]))
        return self.chance.choice(sorted(candidates)) if candidates else ""

    def _slots(self) -> dict[str, list[Json]]:
        found: dict[str, list[Json]] = {}
        for pod in self.witness.pods.values():
            labels = pod["metadata"]["labels"]
            if labels["shoal.dev/job"] == "steady" and labels["shoal.dev/role"] == "worker":
                found.setdefault(labels["shoal.dev/index"], []).append(pod)
        return found

    def _workers_on(self, nodes: list[str]) -> set[str]:
        pods = (pod for slot in self._slots().values() for pod in slot)
        return {pod["metadata"]["uid"] for pod in pods if pod["spec"].get("nodeName") in nodes}

    # --- afterwards

    async def _wrong(self) -> list[str]:
        """What is not as specified."""
        wrong = [f"orphan: {each}" for each in await self._orphans()]
        if any("doom" in line for line in self.told):
            with tolerant(404):
                doomed = await self.kube.get(f"/api/v1/namespaces/{self.doomed}")
                wrong.append(f"the namespace is still there: {doomed['status']}")
        wanted = ((self.steady, WORKERS, SERVERS), (self.edited, BASE["workers"]["replicas"], 1))
        for job, workers, servers in wanted:
            status = await job.status()
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

    async def _orphans(self) -> list[str]:
        """Objects of jobs that are no longer there."""
        found = []
        for collection in ("api/v1/{}/pods", "api/v1/{}/services", "api/v1/{}/secrets",
                           "apis/policy/v1/{}/poddisruptionbudgets"):  # fmt: skip
            path = "/" + collection.format(f"namespaces/{self.home}")
            for each in (await self.kube.get(path, labelSelector="shoal.dev/job"))["items"]:
                owners = [owner["uid"] for owner in each["metadata"].get("ownerReferences", [])]
                if not any(uid in self.witness.jobs for uid in owners):
                    found.append(f"{collection} {each['metadata']['name']}")
        return found

    def _compare(self, restarts: Json) -> None:
        expected, counted = self.expected, restarts["failures"] + restarts["disruptions"]
        words = f"{restarts} after {expected}"
        assert expected.sure <= counted <= expected.sure + expected.perhaps, words
        assert restarts["failures"] <= expected.failures, words
        assert expected.perhaps or restarts["failures"] == expected.failures, words

    def _written(self) -> int:
        done = writes(self.plane.audit_log)
        return sum(w.agent in REPLICAS and w.namespace in {self.home, self.doomed} for w in done)

    def _story(self) -> str:
        logs = [f"{p.log}:\n" + "\n".join(p.log.read_text().splitlines()[-60:]) for p in self.processes]
        return "\n".join(
            [f"seed {self.seed}", *self.told, str(dict(self.weather.met)), *self.witness.judge(), *logs]
        )


def _works(pod: Json) -> bool:
    return pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def _path(binding: Json) -> str:
    return f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{binding['metadata']['name']}"
