"""Run the story of the pools: install, apply examples/pools.yaml, play the cloud, then a second job of the same model.

The fast spot machines are taken when a sixth of the work is done, and none is to be had until on-demand machines have
trained for a while.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

from dev.commands import command
from dev.console import console, say, step
from dev.demo.backend import choose
from dev.demo.local import Local
from dev.demo.pools.chart import draw
from dev.demo.pools.cloud import LABEL, Cloud, Offer
from dev.demo.pools.figures import figures, missed
from dev.demo.pools.record import Moment, moment
from dev.demo.run import VALUES, ended, install, interruptible
from dev.demo.watch import Picture, Watcher
from dev.errors import DevError
from dev.paths import ROOT
from shoal.api.speed_profile import SpeedProfile
from shoal.sizing.fleet.resources import profile_of
from shoal.sizing.speed.model import SpeedModel

MANIFEST = ROOT / "examples" / "pools.yaml"
RESULT = ROOT / "build" / "demo-pools.json"
CHART = ROOT / "build" / "demo-pools.png"
NAMESPACE = "default"
BASE = "base"
LOOK_SECONDS = 0.5
LIMIT_SECONDS = 420.0
TAKEN, ON_DEMAND = "spot-fast", "on-demand-fast"
TAKEN_AT_PERCENT = 16.0
BACK_AFTER_SECONDS = 15.0
"""The pool is in stock again when on-demand machines have trained for so long."""
SECOND_EPOCHS = 35
_ENV = {"SHOAL_PLAN_SECONDS": "3", "SHOAL_TELEMETRY_SECONDS": "2"}


def values() -> dict[str, str]:
    """The chart's values: everything on the base node, one replica, and a loop that is fast enough for a short job."""
    chosen = {name: value for name, value in VALUES.items() if not name.startswith("nodeSelector")}
    chosen |= {r"nodeSelector.example\.com/pool": BASE, "replicas": "1"}
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


def second_job(first: dict[str, Any], profile: str) -> dict[str, Any]:
    """A shorter job of the same model that knows its profile, on the workers that it names."""
    spec = first["spec"]
    workers = {**spec["workers"], "replicas": 2, "pools": [TAKEN]}
    workers.pop("maxReplicas")
    training = {**spec["training"], "stopAfter": {"epochs": SECOND_EPOCHS}}
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


def run() -> int:
    """Run the story. Exit code: 0 if the deadline was kept, 130 after Ctrl-C."""
    try:
        return _run()
    except KeyboardInterrupt:
        say("interrupted; the tools and images are kept for the next run")
        return 130


def _run() -> int:
    begin, seconds = time.monotonic(), dict[str, float]()
    backend = choose()
    if not isinstance(backend, Local):
        raise DevError("STORY=pools needs the local cluster: unset CLUSTER, and run it as root on Linux.")
    backend.check()
    manifests = documents()
    job = next(each for each in manifests if each["kind"] == "TrainingJob")
    with ended(backend, keep=os.environ.get("KEEP") == "1"), interruptible():
        backend.up([(BASE, False)])
        backend.cluster.plane.kubectl("label", "node", BASE, f"{LABEL}={BASE}")
        backend.cluster.node(BASE).limit(0)
        with step("helm install shoal"):
            install(backend, values())
        seconds["setUp"] = time.monotonic() - begin
        with _cloud(backend, manifests) as (cloud, clock):
            script = Script(cloud)
            _apply(backend, manifests)
            watcher = Watcher(backend, NAMESPACE, job["metadata"]["name"])
            moments, last = _follow(watcher, cloud, clock, script)
            seconds["firstJob"] = time.monotonic() - begin - seconds["setUp"]
            profile = _profile(watcher)
            cloud.offers.update(offers(manifests))
            watcher = Watcher(backend, NAMESPACE, "digits-again")
            _apply(backend, [second_job(job, profile.metadata.name)])
            again, _ = _follow(watcher, cloud, clock, None)
            seconds["secondJob"] = time.monotonic() - begin - sum(seconds.values())
        start, end = last.job.status.start_time, last.job.status.completion_time
        finished = (end - start).total_seconds() if start and end else None
        batch = int(job["spec"]["training"]["batchSize"])
        known = SpeedModel([found] if (found := profile_of(profile, datetime.now(UTC))) else [])
        deadline = float(job["spec"]["elasticity"]["objective"]["deadlineSeconds"])
        prices = {d["metadata"]["name"]: float(d["spec"]["price"]["perHour"]) for d in _pools(manifests)}
        result = figures(
            moments,
            deadline=deadline,
            finished=finished,
            samples=_samples(profile, job),
            learned={} if found is None else {
                name: known.worker(found.model, "CPU", 1, offer.cores, batch).seconds
                for name, offer in cloud.offers.items()
            },
            on_demand=(ON_DEMAND, prices[ON_DEMAND]),
            second=(_first_prediction(again), again),
            seconds=seconds,
        )  # fmt: skip
    result["seconds"]["total"] = round(time.monotonic() - begin, 1)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    draw(CHART, moments, list(prices), deadline, finished, script.events)
    console.print_json(data=result)
    for words in missed(result):
        say(words)
    say(f"written to {RESULT.relative_to(ROOT)} and {CHART.relative_to(ROOT)}")
    return 0 if result["deadlineKept"] else 1


@contextmanager
def _cloud(backend: Local, manifests: list[dict[str, Any]]) -> Iterator[tuple[Cloud, float]]:
    clock = time.monotonic()
    cloud = Cloud(
        backend.cluster, offers(manifests), lambda text: say(f"{time.monotonic() - clock:5.0f} s  {text}")
    )
    try:
        yield cloud, clock
    finally:
        cloud.close()


def _follow(
    watcher: Watcher, cloud: Cloud, clock: float, script: Script | None
) -> tuple[list[Moment], Picture]:
    """Watch a job to its end while the cloud is played.

    Raises:
        DevError: it failed, or took too long.
    """
    moments: list[Moment] = []
    pools: dict[str, str] = {}
    begin = spoken = time.monotonic()
    revision = 0
    while True:
        picture = watcher.look()
        pools |= {name: machine.pool for name, machine in cloud.machines.items()}
        now = moment(picture, datetime.now(UTC), pools)
        moments.append(now)
        if now.revision != revision:
            revision = now.revision
            say(f"{time.monotonic() - clock:5.0f} s  plan {revision}: {dict(now.plan)}: {now.reason}")
        if picture.job.status.finished:
            break
        workers = [p for p in picture.pods if p["metadata"]["labels"].get("shoal.dev/role") == "worker"]
        report = picture.report if picture.fresh else None
        trains = [w.node for w in report.workers if w.first_push_at is not None] if report else []
        cloud.advance(workers, trains)
        if script is not None:
            script.advance(now)
        if time.monotonic() - spoken >= 5:
            spoken = time.monotonic()
            say(f"{time.monotonic() - clock:5.0f} s  {_line(now)}")
        if time.monotonic() - begin > LIMIT_SECONDS:
            raise DevError(f"{watcher.name} had not ended after {LIMIT_SECONDS:.0f} s.\n{_state(watcher)}")
        time.sleep(LOOK_SECONDS)
    if picture.job.status.phase != "Succeeded":
        raise DevError(f"{watcher.name} ended as {picture.job.status.phase}.\n{_state(watcher)}")
    return moments, picture


def _line(now: Moment) -> str:
    finish = "?" if now.remaining is None else f"{now.at + now.remaining:.0f} s"
    speed = "?" if now.speed is None else f"{now.speed:.0f}"
    expected = "?" if now.predicted_speed is None else f"{now.predicted_speed:.0f}"
    progress = 0.0 if now.progress is None else now.progress
    return (
        f"{now.phase}: {progress:.0f} %, workers {dict(now.by_pool)}, {speed} samples/s ({expected} planned), "
        f"finish {finish}, confidence {now.confidence}, cost {now.cost:.3f}"
    )


def _state(watcher: Watcher) -> str:
    try:
        described = watcher.kubectl("describe", "trainingjob", watcher.name)[-4000:]
        return described + watcher.kubectl("get", "pods", "-o", "wide")
    except (DevError, OSError) as error:
        return str(error)


def _apply(backend: Local, manifests: list[dict[str, Any]]) -> None:
    path = ROOT / "build" / "demo-pools.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump_all(manifests))
    command("kubectl", "--namespace", NAMESPACE, "apply", "-f", str(path), env=backend.env)


def _profile(watcher: Watcher) -> SpeedProfile:
    """The profile that the first job taught."""
    found = json.loads(watcher.kubectl("get", "speedprofiles", "-o", "json"))["items"]
    if not found:
        raise DevError("The job taught no SpeedProfile: it was too short, or its workers changed too often.")
    return SpeedProfile.model_validate(found[0])


def _pools(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in manifests if each["kind"] == "CapacityPool"]


def _samples(profile: SpeedProfile, job: Mapping[str, Any]) -> float:
    per_epoch = (profile.status.model.samples_per_epoch if profile.status.model else None) or 0
    return float(per_epoch * job["spec"]["training"]["stopAfter"]["epochs"])


def _first_prediction(moments: list[Moment]) -> float | None:
    """The last speed that was predicted before any worker had pushed."""
    before = []
    for now in moments:
        if now.workers:
            break
        before.append(now)
    return next((m.predicted_speed for m in reversed(before) if m.predicted_speed is not None), None)
