"""The input of the planner: pools, work, parameter servers, objective, as validated frozen values.

A *worker* is one client of the parameter servers: one pod on one node of a pool, with all its GPUs. Speeds, batch
sizes, prices and limits are per worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.sizing.availability import Availability, Calm, Markov, Stock
from shoal.sizing.beside import Beside
from shoal.sizing.speed import priors
from shoal.sizing.speed.efficiency import Efficiency
from shoal.sizing.speed.servers import PsModel

__all__ = [
    "Floats",
    "LossWork",
    "Objective",
    "Pool",
    "Prefer",
    "Problem",
    "Servers",
    "StepWork",
    "Work",
]

Floats = NDArray[np.float64]
Prefer = Literal["MinCost", "MinTime", "BestValue"]
ZonePolicy = Literal["Same", "Preferred", "Any"]

CONFIDENCE = 0.95
"""Default probability of meeting the deadline."""
_AMOUNTS = (
    *("transfer_per_gib", "startup_seconds", "interruptions_per_hour", "step_sigma", "running"),
    *("idle_seconds", "out_seconds"),
)
_AMOUNTS_OF_SERVERS = (
    "price",
    "bytes_per_step",
    "startup_seconds",
    "snapshot_seconds",
    "recovery_seconds",
    "sigma",
)
SCALING_SIGMA = priors.SERVER_SIGMA[3]
"""Standard deviation of s in the capacity k^s of k servers, beyond the number measured."""


@dataclass(frozen=True)
class Pool:
    """Interchangeable nodes, each with one worker.

    Units: prices in the cluster's currency per worker-hour, times in s, interruptions per worker-hour.
    `step_sigma` is the relative standard deviation of `step_seconds`. `shock_share` is the part of interruptions that
    are shocks, in which a part `shock_size` of the pool's nodes is lost together. `running` workers need no start-up.
    `idle_seconds`: how long a node is paid after its worker has left. `out_seconds`: for so long there are no nodes but
    those of the running workers.
    """

    name: str
    limit: int
    price: float
    step_seconds: float
    batch: int
    spot: bool = True
    accelerator: str = ""
    zone: str = ""
    transfer_per_gib: float = 0.0
    startup_seconds: float = 0.0
    interruptions_per_hour: float = 0.0
    shock_share: float = priors.SHOCK_SHARE
    shock_size: float = priors.SHOCK_SIZE
    step_sigma: float = 0.0
    running: int = 0
    idle_seconds: float = 600.0
    out_seconds: float = 0.0
    stock: Stock = Stock()
    """How often it runs out, where that is to be planned for."""
    availability: Availability | None = field(default=None, compare=False, repr=False)
    """Where its nodes come from and go; None: losses at the rates above, each replaced after a start-up."""

    def running_out(self, losses_seen: float | None = None, *, out_now: float | None = None) -> Markov:
        """Its nodes with losses at the rates above and stock-outs.

        `losses_seen`: what the rate rests on, in interruptions; None: no more than a prior does.
        """
        known = priors.NODE_HOURS * max(self.interruptions_per_hour, priors.LEAST_RATE)
        return Markov(
            self.interruptions_per_hour,
            known if losses_seen is None else losses_seen,
            self.shock_share,
            self.shock_size,
            self.stock,
            out_now,
        )

    @property
    def patience(self) -> float:
        """Seconds after which a node that has not come is looked for elsewhere."""
        return priors.PATIENCE * self.startup_seconds

    @property
    def samples_per_second(self) -> float:
        """Of one worker alone."""
        return self.batch / self.step_seconds

    @property
    def process(self) -> Availability:
        """The nodes of the pool over time."""
        if self.availability is not None:
            return self.availability
        if self.interruptions_per_hour <= 0:
            return Calm()
        return Markov(self.interruptions_per_hour, shock_share=self.shock_share, shock_size=self.shock_size)

    def __post_init__(self) -> None:
        pool = f"pool {self.name}"
        for value, what in ((self.step_seconds, "step time"), (self.batch, "batch size")):
            _number(value, f"the {what} of {pool}", above=0)
        for name in ("limit", "price"):
            _number(getattr(self, name), f"the {name} of {pool}", least=0)
        for name in _AMOUNTS:
            _number(getattr(self, name), f"{name} of {pool}", least=0)
        for name in ("shock_share", "shock_size"):
            _number(getattr(self, name), f"{name} of {pool}", least=0, most=1)


@dataclass(frozen=True)
class StepWork:
    """A number of steps (mini-batches of one worker) or of samples; with both, the first to be reached.

    `sigma`: standard deviation of the logarithm of the samples. `efficiency`: how the samples depend on the number of
    workers, where the job ends by a loss or metric; None: they do not. `beside`: what is to be done beside them.
    """

    steps: float | None = None
    samples: float | None = None
    sigma: float = 0.0
    efficiency: Efficiency | None = None
    beside: Beside | None = None

    def __post_init__(self) -> None:
        amounts = [amount for amount in (self.steps, self.samples) if amount is not None]
        if not amounts:
            raise UsageError("the work must be given as steps or as samples")
        for amount in amounts:
            if not (math.isfinite(amount) and amount >= 1):
                raise UsageError(f"there must be at least 1 step or sample of work left, not {amount}")

    def iterations(self, batch: Floats, workers: Floats) -> Floats:
        """(m,) steps for weighted batch sizes (m,) and numbers of workers (m,)."""
        steps = np.full(np.shape(workers), math.inf if self.steps is None else float(self.steps))
        if self.beside is not None and self.steps is not None:
            steps = steps + self.beside.samples(steps * batch, workers) / batch
        return steps if self.samples is None else np.minimum(steps, self.samples_of(workers) / batch)

    def samples_of(self, workers: Floats | float, z: Floats | float = 0.0) -> Any:
        """The samples that so many workers need, `z` standard deviations of the efficiency from the median.

        With those that they could train in the time of what is to be done beside.
        """
        if self.samples is None:
            return None
        needed = (
            self.samples if self.efficiency is None else self.samples * self.efficiency.factor(workers, z)
        )
        return needed if self.beside is None else needed + self.beside.samples(needed, workers)

    def spread(self, workers: Floats) -> Floats:
        """(m,) standard deviation of the logarithm of the work."""
        own = np.full(np.shape(workers), self.sigma)
        if self.efficiency is not None:
            own = np.hypot(own, self.efficiency.spread(workers))
        return np.asarray(np.hypot(own, self.beside_spread(workers)))

    def beside_spread(self, workers: Floats) -> Floats:
        """(m,) the part of it that what is beside has; of steps, as if it were for one epoch."""
        if self.beside is None:
            return np.zeros(np.shape(workers))
        left = self.beside.per_epoch if self.samples is None else self.samples
        return np.asarray(self.beside.spread(left, workers))

    @property
    def is_random(self) -> bool:
        """Whether the amount of work is uncertain."""
        parts = (self.efficiency, self.beside)
        return self.sigma > 0 or any(part is not None and part.sigma > 0 for part in parts)

    def counts_samples(self, batch: float) -> bool:
        """Whether the samples, rather than the steps, end the work for this batch size."""
        if self.samples is None:
            return False
        return self.steps is None or self.samples / batch <= self.steps


@dataclass(frozen=True)
class LossWork:
    """Train until the loss is `target`, along spotDNN's curve.

    loss(j) = (r2 b + r3) sqrt(N) / (j + r1) + r4 for N workers and the weighted batch size b. `batch_range` is the
    range of the fit: outside it the answer is nan. `done` is the loss reached so far.
    """

    target: float
    r1: float
    r2: float
    r3: float
    r4: float
    batch_range: tuple[float, float] | None = None
    done: float | None = None

    def __post_init__(self) -> None:
        for name in ("target", "r1", "r2", "r3", "r4"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise UsageError(f"{name} of the loss curve must be a finite number, not {value}")
        if self.target <= self.r4:
            raise UsageError(
                f"a loss of {self.target:g} is out of reach: the loss curve levels off at {self.r4:g}; "
                f"ask for a loss above {self.r4:g}"
            )
        if self.done is not None and self.done <= self.target:
            raise UsageError(
                f"a loss of {self.target:g} is reached already ({self.done:g}): nothing is left to plan"
            )

    def iterations(self, batch: Floats, workers: Floats) -> Floats:
        """(m,) steps; `nan` for fewer than one step, or outside the fitted range."""
        amplitude = self.r2 * batch + self.r3
        amplitude *= np.sqrt(workers)
        steps = amplitude / (self.target - self.r4)
        if self.done is not None:
            steps -= amplitude / (self.done - self.r4)
        else:
            steps -= self.r1
        bad = ~(steps >= 1.0)
        if self.batch_range is not None:
            low, high = self.batch_range
            bad |= (batch < low * (1 - 1e-9)) | (batch > high * (1 + 1e-9))
        steps[bad] = np.nan
        return np.asarray(steps)

    def spread(self, workers: Floats) -> Floats:
        """(m,) zero: the curve counts as exact."""
        return np.zeros(np.shape(workers))

    @property
    def is_random(self) -> bool:
        """The curve counts as exact."""
        return False


Work = StepWork | LossWork


@dataclass(frozen=True)
class Servers:
    """The parameter servers: possible numbers, cost and speed. They run on on-demand nodes.

    `bytes_per_step` are the bytes that one step moves, both ways. `interruptions_per_hour` is the rate at which one
    server is lost; then the work since the last snapshot is repeated after `recovery_seconds`. `snapshot_seconds` is
    how long training stops for one snapshot. `sigma` is the relative standard deviation of the servers' capacity, and
    `measured` the largest number of servers measured; None: `model` is exact.
    """

    counts: tuple[int, ...] = (1,)
    price: float = 0.0
    model: PsModel = field(default_factory=lambda: PsModel(0.0))
    bytes_per_step: float = 0.0
    startup_seconds: float = 0.0
    snapshot_every: float = 60.0
    snapshot_seconds: float = 0.0
    interruptions_per_hour: float = 0.001
    recovery_seconds: float = 60.0
    zone: str | None = None
    """None: the planner chooses one of the workers' zones."""
    running: int = 0
    sigma: float = 0.0
    measured: int | None = None

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise UsageError(f"the number of parameter servers must be at least 1, not {self.counts}")
        _number(self.snapshot_every, "the time between snapshots", above=0)
        for name in _AMOUNTS_OF_SERVERS:
            _number(getattr(self, name), f"{name} of the parameter servers", least=0)

    def capacity_sigma(self, number: int) -> float:
        """Relative standard deviation of the capacity of `number` servers."""
        if self.model.update_seconds == 0:
            return 0.0
        beyond = 1.0 if self.measured is None else max(number / max(self.measured, 1), 1.0)
        return math.hypot(self.sigma, SCALING_SIGMA * math.log(beyond))

    def wait(self, number: int) -> float:
        """Seconds until `number` servers run: none if they do. Others restore what those that run save at their end.

        A job changes the number of its servers only while it is suspended, so that all of its workers start again.
        """
        if self.running == number:
            return 0.0
        return self.startup_seconds + (self.recovery_seconds if self.running else 0.0)


@dataclass(frozen=True)
class Objective:
    """The limits, and what to minimize. `deadline` in s from now, `budget` in the currency; None: no limit.

    `spare`: what it is worth to end now rather than at the deadline, as a part of the cost of the whole job, of which
    `spent` was paid already, where that is to be least. What is done early leaves time to wait for nodes when they run
    out, and no plan knows when that is.
    """

    deadline: float | None = None
    budget: float | None = None
    prefer: Prefer = "MinCost"
    confidence: float = CONFIDENCE
    spare: float = 0.0
    spent: float = 0.0

    def __post_init__(self) -> None:
        _number(self.spare, "the worth of spare time", least=0)
        _number(self.spent, "what was spent", least=0)
        if self.deadline is not None:
            _number(self.deadline, "the deadline in seconds", above=0)
        if self.budget is not None:
            _number(self.budget, "the budget", above=0)
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"the confidence must be at least 0.5 and below 1, not {self.confidence}")
        if self.prefer not in ("MinCost", "MinTime", "BestValue"):
            raise UsageError(f"prefer MinCost, MinTime or BestValue, not {self.prefer}")

    def with_spare_time(self, cost: Any, seconds: Any) -> Any:
        """The cost, and what it is worth to end in less than these seconds; numbers or arrays."""
        if self.deadline is None or not self.spare:
            return cost
        return cost + self.spare * (cost + self.spent) * seconds / self.deadline


@dataclass(frozen=True)
class Problem:
    """The complete input of the planner."""

    pools: Sequence[Pool]
    work: Work
    servers: Servers = field(default_factory=Servers)
    objective: Objective = field(default_factory=Objective)
    min_workers: int = 1
    max_workers: int | None = None
    min_on_demand: int = 0
    zone_policy: ZonePolicy = "Any"
    notes: Sequence[str] = ()
    """Notes on the inputs for the explanation."""
    fallback: str = ""
    """The on-demand pool in which the operator buys what spot pools lack; empty: none, or nobody plans again."""

    def __post_init__(self) -> None:
        if not self.pools:
            raise UsageError("the planner needs at least one pool")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise UsageError("two pools have the same name: rename one")
        if sum(pool.limit for pool in self.pools) == 0:
            raise UsageError("the limits of all pools are 0: raise the limit of at least one")
        if self.max_workers is not None and self.max_workers < max(self.min_workers, 1):
            raise UsageError(
                f"at most {self.max_workers} and at least {self.min_workers} workers contradict each other: "
                "raise the maximum or lower the minimum"
            )
        if sum(pool.limit for pool in self.pools) < self.min_workers:
            raise UsageError(
                f"the pools hold {sum(pool.limit for pool in self.pools)} workers together, but at least "
                f"{self.min_workers} are required: raise a limit or lower minReplicas"
            )

        if sum(pool.limit for pool in self.pools if not pool.spot) < self.min_on_demand:
            raise UsageError(
                f"{self.min_on_demand} workers must be on-demand, but the on-demand pools hold fewer: lower "
                "onDemandBase or add on-demand pools"
            )

    def price_per_hour(self, counts: Sequence[int]) -> float:
        """Of these workers."""
        return sum(pool.price * n for pool, n in zip(self.pools, counts, strict=True))

    def instead_of(self, pool: Pool) -> Pool | None:
        """The pool of `fallback`, where it has room for all workers that the job may have; None: there is none.

        Of a spot pool whose stock-outs are known: how late a new one is seen to lack nodes, nobody can say.
        """
        if not (pool.spot and pool.stock.is_known):
            return None
        most = math.inf if self.max_workers is None else self.max_workers
        return next((own for own in self.pools if own.name == self.fallback and own.limit >= most), None)

    @property
    def limits(self) -> tuple[int, ...]:
        """The most workers of each pool; never more than `max_workers`."""
        most = math.inf if self.max_workers is None else self.max_workers
        return tuple(int(min(pool.limit, most)) for pool in self.pools)


def _number(
    value: float,
    what: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> None:
    """Raise UsageError if a number is not finite or out of range."""
    if not math.isfinite(value):
        raise UsageError(f"{what} must be a number, not {value}")
    if least is not None and value < least:
        raise UsageError(f"{what} must be {least:g} or more, not {value:g}")
    if above is not None and value <= above:
        raise UsageError(f"{what} must be greater than {above:g}, not {value:g}")
    if most is not None and value > most:
        raise UsageError(f"{what} must be {most:g} or less, not {value:g}")
