"""What planning all jobs of a cluster costs, minute after minute, while they train. Needs no cluster.

`python -m benchmarks.minutes` prints it for 1,000 jobs, with what is kept from a minute to the next and without.

Jobs of twenty models share six pools of three accelerators. From one minute to the next each does what its workers do
in a minute, give or take a few percent; what its plan wants runs in the next minute; pools count their node hours, and
spot nodes are lost now and then.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.harness import Measurement, summary, table
from shoal.sizing.fleet import (
    FleetJob,
    FleetPlan,
    FleetPool,
    LogMean,
    Model,
    Profile,
    Row,
    ServerLoad,
    Watched,
)
from shoal.sizing.fleet.kept import Kept
from shoal.sizing.fleet.planner import plan_fleet

ACCELERATORS = {"T4": (0.24, 0.35, 0.9), "V100": (0.055, 0.9, 2.5), "A100": (0.028, 1.3, 3.7)}
"""Seconds of a step of 1 GFLOP, and prices per hour on spot and on demand."""
MODELS, BATCH = 20, 128
MINUTE = 60.0
JITTER = 0.025
"""Standard deviation of a job's speed from minute to minute."""


@dataclass
class World:
    """So many jobs and what they do."""

    number: int
    seed: int = 0
    pools: list[FleetPool] = field(init=False)
    profiles: list[Profile] = field(init=False)
    jobs: list[FleetJob] = field(init=False)

    def __post_init__(self) -> None:
        self._rng = rng = np.random.default_rng(self.seed)
        limit = 3 * self.number
        self.pools = [
            FleetPool(
                f"{kind}-{name}".lower(), name, spot=kind == "spot", limit=limit, price_per_hour=price,
                interruptions_per_hour=0.1 if kind == "spot" else 0.0, node_hours=1e5, interruptions_seen=8000,
                lost_in_shocks=2000, there_in_shocks=6000, watched_seconds=1e6,
            )
            for name, (_, *prices) in ACCELERATORS.items()
            for kind, price in zip(("spot", "on-demand"), prices, strict=True)
        ]  # fmt: skip
        flops = rng.uniform(0.3, 4.0, MODELS)
        models = [Model(f"model-{n}", 1e9 * f, 2_000_000, 60, f"team-{n % 5}") for n, f in enumerate(flops)]
        self._speeds = {
            model.fingerprint: {name: BATCH / (one[0] * f) for name, one in ACCELERATORS.items()}
            for model, f in zip(models, flops, strict=True)
        }
        self.profiles = [
            Profile(
                model,
                tuple(
                    Row(
                        name,
                        batch_size=BATCH,
                        compute=LogMean.of(BATCH / speed, 0.05 * BATCH / speed, 2000.0),
                    )
                    for name, speed in self._speeds[model.fingerprint].items()
                ),
                {1: ServerLoad(60.0, 60_000)},
            )
            for model in models
        ]
        self.jobs = [self._job(n, models[n % MODELS]) for n in range(self.number)]

    def _job(self, number: int, model: Model) -> FleetJob:
        rng, names = self._rng, list(ACCELERATORS)
        first, second = rng.choice(len(names), 2, replace=False)
        hours, workers = float(rng.uniform(0.5, 12)), int(rng.integers(2, 9))
        work = hours * 3600 * workers * self._speeds[model.fingerprint][names[first]]
        return FleetJob(
            f"team-{number % 5}/job-{number}",
            tuple(f"{kind}-{names[i]}".lower() for i in (first, second) for kind in ("spot", "on-demand")),
            model=model, samples_left=work, batch_size=BATCH, max_workers=16,
            deadline_seconds=float(rng.uniform(1.3, 2.5)) * hours * 3600 if number % 5 else None,
            budget_left=1000.0 if number % 7 == 0 else None,
        )  # fmt: skip

    def plan(self, kept: Kept | None = None) -> FleetPlan:
        """Plan them all."""
        return plan_fleet(self.pools, self.profiles, self.jobs, kept=kept)

    def pass_minute(self, plan: FleetPlan) -> None:
        """What the jobs do until they are planned again."""
        used = dict.fromkeys((pool.name for pool in self.pools), 0)
        self.jobs = [self._after(job, plan.jobs[job.name].counts, used) for job in self.jobs]
        self.pools = [
            replace(
                pool,
                node_hours=pool.node_hours + used[pool.name] * MINUTE / 3600,
                interruptions_seen=pool.interruptions_seen
                + int(self._rng.poisson(used[pool.name] * MINUTE / 3600 * pool.interruptions_per_hour)),
                watched_seconds=pool.watched_seconds + MINUTE,
            )
            for pool in self.pools
        ]

    def _after(self, job: FleetJob, counts: Mapping[str, int], used: dict[str, int]) -> FleetJob:
        assert job.model is not None
        assert job.samples_left is not None
        by_name = {pool.name: pool for pool in self.pools}
        noise = float(np.exp(JITTER * self._rng.standard_normal()))
        now = {
            name: [self._speeds[job.model.fingerprint][by_name[name].accelerator or ""] * noise] * n
            for name, n in counts.items() if n
        }  # fmt: skip
        done, cost = MINUTE * sum(map(sum, now.values())), 0.0
        for name, n in counts.items():
            used[name] += n
            cost += n * (by_name[name].price_per_hour or 0.0) * MINUTE / 3600
        running = {name: n for name, n in counts.items() if n}
        return replace(
            job, samples_left=max(job.samples_left - done, 1.0), running=running, planned=running,
            now=Watched(now, 80.0), spent=job.spent + cost,
            deadline_seconds=None if job.deadline_seconds is None else job.deadline_seconds - MINUTE,
            budget_left=None if job.budget_left is None else job.budget_left - cost,
        )  # fmt: skip


def minutes(world: World, number: int, *, keeps: bool) -> Sequence[float]:
    """Processor time of each minute's plan, after two in which the jobs begin. `keeps`: choices of the one before."""
    found, kept = list[float](), Kept()
    for _ in range(number + 2):
        began = time.process_time()
        plan = world.plan(kept if keeps else None)
        found.append(time.process_time() - began)
        world.pass_minute(plan)
    return found[2:]


def measure(jobs: int, number: int) -> Iterator[Measurement]:
    """The rows."""
    name = f"a minute's plan of {jobs} jobs, processor time"
    yield summary(name, list(minutes(World(jobs), number, keeps=True)), "s", "")
    yield summary(f"{name}, nothing kept", list(minutes(World(jobs), number, keeps=False)), "s", "")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.minutes", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--minutes", type=int, default=2)
    options = parser.parse_args()
    print(table(list(measure(options.jobs, options.minutes))))


if __name__ == "__main__":
    main()
