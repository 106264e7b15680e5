"""Scenarios of a hidden truth: speeds, losses and stock-outs that the operator has to find out, drawn from a seed.

The catalogue's data sheets are a prior for the operator; what a device achieves here is drawn anew for each scenario.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from shoal.sizing.accelerators import catalogue
from shoal_trainer.contract import ModelReport
from tests.virtual.cluster import Shop
from tests.virtual.trainer import Truth

PRICES = {"T4": 0.53, "L4": 0.80, "P100": 1.46, "V100": 2.48, "A10G": 1.21}
"""An on-demand node's price per hour."""
LABEL = "example.com/pool"
HORIZON = 4 * 3600.0


@dataclass(frozen=True)
class HiddenPool:
    """A pool as it is. `stock`: how many nodes there are from a time on; `losses`: when which of its places goes."""

    name: str
    accelerator: str
    spot: bool
    limit: int
    price: float
    boot: float
    """Seconds from a request to the node, which are not paid."""
    pull: float
    """Seconds from the node to the first step."""
    stock: tuple[tuple[float, int], ...] = ()
    losses: tuple[tuple[float, float], ...] = ()

    def nodes_at(self, at: float) -> int:
        """What there is to be had."""
        there = self.limit
        for since, nodes in self.stock:
            if since <= at:
                there = nodes
        return there

    def shop(self) -> Shop:
        """What the cloud sells: more than the pool's limit, which it is Shoal's to keep."""
        labels = {LABEL: self.name, "accelerator": self.accelerator}
        return Shop(
            self.name,
            labels,
            limit=self.limit + 8,
            startup=self.boot,
            price=self.price,
            taints=({"key": LABEL, "value": self.name, "effect": "NoSchedule"},),
            stock=lambda at: self.nodes_at(at) if self.nodes_at(at) < self.limit else self.limit + 8,
        )

    def manifest(self, believed_rate: float, believed_startup: int) -> dict[str, Any]:
        """The CapacityPool that the platform team wrote, with their guesses."""
        return {
            "accelerator": {"name": self.accelerator},
            "capacityType": "Spot" if self.spot else "OnDemand",
            "nodeSelector": {LABEL: self.name},
            "tolerations": [{"key": LABEL, "operator": "Exists"}],
            "limits": {"nodes": self.limit},
            "price": {"perHour": round(self.price, 4)},
            "startupSeconds": believed_startup,
            "interruptionsPerHour": round(believed_rate, 3) if self.spot else 0,
            "scaling": {"mode": "Pods", "shrinkAfterSeconds": 60},
        }


@dataclass(frozen=True)
class HiddenJob:
    """A job as it is: its length, and a worker's seconds for a step by accelerator."""

    name: str
    begins_at: float
    model: ModelReport
    batch: int
    samples: float
    workers: int
    deadline: int
    seconds: dict[str, float]

    def truth(self) -> Truth:
        """What its trainer reports from."""
        return Truth(
            samples=self.samples,
            compute=lambda device: self.seconds[device],
            update=2e-4,
            batch=self.batch,
            model=self.model,
        )


@dataclass(frozen=True)
class Scenario:
    """What nobody in the cluster knows."""

    seed: int
    pools: tuple[HiddenPool, ...]
    jobs: tuple[HiddenJob, ...]
    kills: tuple[tuple[int, bool], ...]
    """The operator is killed at its writes of these numbers, before or after they take effect."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(seed)
    names = chance.sample(sorted(PRICES), 2)
    number = chance.choice([1, 1, 2, 2, 3, 4])
    most = [chance.randint(3, 6) for _ in range(number)]
    steady = _pool(chance, names[0], spot=False, limit=sum(most))
    spots = [
        _pool(chance, name, spot=True, limit=chance.randint(3, 4 + 2 * number))
        for name in names[: chance.choice([1, 2, 2])]
    ]
    # The user's order of preference, by data sheets and prices.
    spots.sort(key=lambda pool: pool.price / catalogue().find(pool.accelerator).arithmetic_tflops)
    jobs = tuple(_job(chance, index, workers, steady, names) for index, workers in enumerate(most))
    kills = tuple(sorted((chance.randint(8, 60 * number), chance.random() < 0.5) for _ in range(3)))
    return Scenario(seed, (*spots, steady), jobs, kills)


def _pool(chance: random.Random, accelerator: str, *, spot: bool, limit: int) -> HiddenPool:
    price = PRICES[accelerator] * (chance.uniform(0.28, 0.45) if spot else 1.0)
    stock: list[tuple[float, int]] = []
    losses: list[tuple[float, float]] = []
    if spot:
        at = chance.expovariate(1 / 4000.0)
        while at < HORIZON:
            stock.append((at, math.floor(limit * chance.choice([0.0, 0.0, 0.3, 0.6]))))
            at += 300.0 + chance.expovariate(1 / 1200.0)
            stock.append((at, limit))
            at += 600.0 + chance.expovariate(1 / 4000.0)
        rate = limit * chance.choice([0.05, 0.2, 0.8]) / 3600.0
        at = chance.expovariate(rate)
        while at < HORIZON:
            losses.append((at, chance.random()))
            at += chance.expovariate(rate)
    return HiddenPool(
        f"{'spot' if spot else 'steady'}-{accelerator.lower()}",
        accelerator,
        spot,
        limit,
        price,
        boot=chance.uniform(15.0, 60.0),
        pull=chance.uniform(10.0, 40.0),
        stock=tuple(stock),
        losses=tuple(losses),
    )


def _job(
    chance: random.Random, index: int, workers: int, steady: HiddenPool, accelerators: list[str]
) -> HiddenJob:
    flops = 10 ** chance.uniform(7.7, 9.5)
    batch = chance.choice([64, 128, 256])
    model = ModelReport(
        fingerprint=f"{chance.getrandbits(256):064x}",
        parameters=int(10 ** chance.uniform(5.5, 7.5)),
        tensors=chance.randint(20, 200),
        flops_per_sample=flops,
    )
    launches = 10e-6 * chance.uniform(5, 15) * model.tensors
    share = chance.uniform(0.25, 0.55)
    seconds = {
        name: launches
        + 3
        * flops
        * batch
        / (catalogue().find(name).arithmetic_tflops * 1e12 * share)
        * math.exp(chance.gauss(0.0, 0.2))
        for name in accelerators
    }
    length = chance.uniform(900.0, 2100.0)
    startup = steady.boot + steady.pull
    return HiddenJob(
        f"job-{index}",
        begins_at=0.0 if index == 0 else chance.uniform(0.0, 600.0),
        model=model,
        batch=batch,
        samples=length * workers * batch / seconds[steady.accelerator],
        workers=workers,
        deadline=int(chance.choice([1.3, 1.6, 2.0, 2.6]) * (length + startup)),
        seconds=seconds,
    )
