"""The story of the pools: examples/pools.yaml on a played cloud, then a second job of the same model.

The fast spot machines are taken when a sixth of the work is done, and none is to be had until on-demand machines have
trained for a while.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

from dev.commands import side_by_side
from dev.demo.local import Local
from dev.demo.pools.chart import draw
from dev.demo.pools.cloud import LABEL, Cloud, Offer
from dev.demo.pools.figures import figures, missed, throughput
from dev.demo.pools.record import Moment, moment
from dev.demo.pools.work import FIRST_SECONDS, SECOND_SECONDS, epochs, measured
from dev.demo.tell import NAMESPACE, VALUES, Stage, Told
from dev.demo.watch import Picture, Watcher
from dev.errors import DevError
from dev.paths import ROOT
from shoal.api.speed_profile import SpeedProfile
from shoal.sizing.fleet.resources import profile_of
from shoal.sizing.speed.model import SpeedModel

MANIFEST = ROOT / "examples" / "pools.yaml"
APPLIED = ROOT / "build" / "demo-pools.yaml"
BASE = "base"
LIMIT_SECONDS = 420.0
TAKEN, ON_DEMAND = "spot-fast", "on-demand-fast"
TAKEN_AT_PERCENT = 16.0
BACK_AFTER_SECONDS = 15.0
"""The pool is in stock again when on-demand machines have trained for so long."""
WORKERS = 2
"""Each job begins with so many, in the pool that is taken."""
_ENV = {"SHOAL_PLAN_SECONDS": "3", "SHOAL_TELEMETRY_SECONDS": "2"}


def values() -> dict[str, str]:
    """The chart's values: everything on the base node, one replica, and a loop that is fast enough for a short job."""
    chosen = VALUES | {r"nodeSelector.example\.com/pool": BASE, "replicas": "1"}
    for number, (name, value) in enumerate(_ENV.items()):
        chosen |= {f"extraEnv[{number}].name": name, f"extraEnv[{number}].value": value}
    return chosen


def documents() -> list[dict[str, Any]]:
    """The example."""
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def offers(manifests: list[dict[str, Any]]) -> dict[str, Offer]:
    """What the cloud has of each pool of the example."""
    return {
        each["metadata"]["name"]: Offer(
            float(each["spec"]["cores"]),
            each["spec"]["capacityType"] == "Spot",
            float(each["spec"]["scaling"]["shrinkAfterSeconds"]),
            each["spec"]["limits"]["nodes"],
        )
        for each in manifests
        if each["kind"] == "CapacityPool"
    }


def first_job(example: dict[str, Any], rate: float, samples: int) -> dict[str, Any]:
    """The job of the example with the work for this machine. `rate`: samples/s of the machines that it begins with."""
    spec = example["spec"]
    stop = {"epochs": epochs(FIRST_SECONDS, rate, samples)}
    return {**example, "spec": {**spec, "training": {**spec["training"], "stopAfter": stop}}}


def second_job(first: dict[str, Any], profile: str, rate: float, samples: int) -> dict[str, Any]:
    """A shorter job of the same model that knows its profile, on the workers that it names."""
    spec = first["spec"]
    workers = {**spec["workers"], "replicas": WORKERS, "pools": [TAKEN]}
    workers.pop("maxReplicas")
    training = {**spec["training"], "stopAfter": {"epochs": epochs(SECOND_SECONDS, rate, samples)}}
    return {
        **first,
        "metadata": {"name": "digits-again", "annotations": {"shoal.dev/speed-profile": profile}},
        "spec": {
            **{k: v for k, v in spec.items() if k != "elasticity"},
            "workers": workers,
            "training": training,
        },
    }


@dataclass
class Script:
    """What the cloud does to the job, by what is seen of it. `events`: by seconds after the job's start."""

    cloud: Cloud
    events: dict[float, str] = field(default_factory=dict)
    _taken: bool = False
    _on_demand_since: float | None = None
    _back: bool = False

    def advance(self, now: Moment) -> None:
        """Take the pool, or have it again."""
        if not self._taken and (now.progress or 0.0) >= TAKEN_AT_PERCENT and now.by_pool[TAKEN]:
            names = self.cloud.reclaim(TAKEN)
            self._taken = True
            self.cloud.report(f"the cloud reclaims {', '.join(names)} and has no {TAKEN} any more")
            self.events[now.at] = f"{TAKEN} reclaimed, out of stock"
        if not self._taken or self._back or not now.by_pool[ON_DEMAND]:
            return
        self._on_demand_since = self._on_demand_since or now.at
        if now.at - self._on_demand_since >= BACK_AFTER_SECONDS:
            self.cloud.stock(TAKEN, 2)
            self._back = True
            self.cloud.report(f"the cloud has {TAKEN} again")
            self.events[now.at] = f"{TAKEN} in stock again"


def pools(stage: Stage) -> Told:
    """Play the cloud to a job with a deadline, in mode Auto, then to a second one."""
    backend = stage.backend
    if not isinstance(backend, Local):
        raise DevError("STORY=pools needs the local cluster: unset CLUSTER, and run it as root on Linux.")
    manifests = documents()
    offered = offers(manifests)
    here: list[tuple[float, int]] = []
    side_by_side(lambda: backend.up([(BASE, False)]), lambda: here.append(measured()))
    [(rate, samples)] = here
    of_workers = WORKERS * offered[TAKEN].cores * rate
    manifests = [first_job(m, of_workers, samples) if m["kind"] == "TrainingJob" else m for m in manifests]
    job = next(each for each in manifests if each["kind"] == "TrainingJob")
    backend.cluster.plane.kubectl("label", "node", BASE, f"{LABEL}={BASE}")
    backend.cluster.node(BASE).limit(0)
    stage.install(values())
    with closing(Cloud(backend.cluster, offered, stage.report)) as cloud:
        script = Script(cloud)
        watcher = Watcher(backend, NAMESPACE, job["metadata"]["name"])
        moments, last = _follow(stage, cloud, watcher, manifests, script)
        stage.part("firstJob")
        profile = _profile(watcher)
        cloud.offers.update(offers(manifests))
        watcher = Watcher(backend, NAMESPACE, "digits-again")
        rate = WORKERS * throughput(moments).get(TAKEN, 0.0)
        second = second_job(job, profile.metadata.name, rate, samples)
        again, _ = _follow(stage, cloud, watcher, [second])
        stage.part("secondJob")
    start, end = last.job.status.start_time, last.job.status.completion_time
    finished = (end - start).total_seconds() if start and end else None
    batch = int(job["spec"]["training"]["batchSize"])
    known = SpeedModel([found] if (found := profile_of(profile, datetime.now(UTC))) else [])
    seen = {
        "first": [*map(asdict, moments)],
        "second": [*map(asdict, again)],
        "profile": profile.model_dump(),
    }
    APPLIED.with_name("demo-pools-moments.json").write_text(json.dumps(seen) + "\n")
    deadline = float(job["spec"]["elasticity"]["objective"]["deadlineSeconds"])
    prices = {
        each["metadata"]["name"]: float(each["spec"]["price"]["perHour"])
        for each in manifests
        if each["kind"] == "CapacityPool"
    }
    result = figures(
        moments,
        deadline=deadline,
        finished=finished,
        samples=float(samples * job["spec"]["training"]["stopAfter"]["epochs"]),
        learned={} if found is None else {
            name: known.worker(found.model, "CPU", 1, offer.cores, batch).seconds
            for name, offer in cloud.offers.items()
        },
        cores={name: offer.cores for name, offer in cloud.offers.items()},
        on_demand=(ON_DEMAND, prices[ON_DEMAND]),
        second=(_first_prediction(again), again),
    )  # fmt: skip
    return Told(
        result,
        lambda path: draw(path, moments, list(prices), deadline, finished, script.events),
        well=result["deadlineKept"],
        words=missed(result),
    )


def _follow(
    stage: Stage,
    cloud: Cloud,
    watcher: Watcher,
    manifests: list[dict[str, Any]],
    script: Script | None = None,
) -> tuple[list[Moment], Picture]:
    """Apply a job and watch it to its end, while the cloud is played."""
    APPLIED.parent.mkdir(exist_ok=True)
    APPLIED.write_text(yaml.safe_dump_all(manifests))
    stage.apply(APPLIED)
    moments: list[Moment] = []
    pools: dict[str, str] = {}

    def advance(picture: Picture) -> None:
        pools.update({name: machine.pool for name, machine in cloud.machines.items()})
        now = moment(picture, datetime.now(UTC), pools, cloud.used())
        if now.revision != (moments[-1].revision if moments else 0):
            stage.report(f"plan {now.revision}: {dict(now.plan)}: {now.reason}")
        moments.append(now)
        if picture.job.status.finished:
            return
        workers = [p for p in picture.pods if p["metadata"]["labels"].get("shoal.dev/role") == "worker"]
        cloud.advance(workers, [w.node for w in picture.pushing])
        if script is not None:
            script.advance(now)

    last = stage.follow(watcher, advance, lambda _: _line(moments[-1]), LIMIT_SECONDS)
    return moments, last


def _line(now: Moment) -> str:
    finish = "?" if now.remaining is None else f"{now.at + now.remaining:.0f} s"
    speed = "?" if now.speed is None else f"{now.speed:.0f}"
    expected = "?" if now.predicted_speed is None else f"{now.predicted_speed:.0f}"
    progress = 0.0 if now.progress is None else now.progress
    return (
        f"{now.phase}: {progress:.0f} %, workers {dict(now.by_pool)}, {speed} samples/s ({expected} planned), "
        f"finish {finish}, confidence {now.confidence}, cost {now.cost:.3f}"
    )


def _profile(watcher: Watcher) -> SpeedProfile:
    """The profile that the first job taught."""
    found = json.loads(watcher.kubectl("get", "speedprofiles", "-o", "json"))["items"]
    if not found:
        raise DevError("The job taught no SpeedProfile: it was too short, or its workers changed too often.")
    return SpeedProfile.model_validate(found[0])


def _first_prediction(moments: list[Moment]) -> float | None:
    """The last speed that was predicted before any worker had pushed."""
    before = []
    for now in moments:
        if now.workers:
            break
        before.append(now)
    return next((m.predicted_speed for m in reversed(before) if m.predicted_speed is not None), None)
