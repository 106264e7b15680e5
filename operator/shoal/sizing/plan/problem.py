"""The input of the planner: pools, work, parameter servers, objective, as validated frozen values.

A *worker* is one client of the parameter servers: one pod on one node of a pool, with all its GPUs. Speeds, batch
sizes, prices and limits are per worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Literal

from shoal.errors import UsageError
from shoal.sizing.availability import Availability, Calm, Markov, Stock
from shoal.sizing.plan.work import Work
from shoal.sizing.speed import priors
from shoal.sizing.speed.servers import PsModel

__all__ = [
    "Objective",
    "Pool",
    "Prefer",
    "Problem",
    "Servers",
]

Prefer = Literal["MinCost", "MinTime", "BestValue"]
ZonePolicy = Literal["Same", "Preferred", "Any"]

CONFIDENCE = 0.95
"""Default probability of meeting the deadline."""
MOST_CONFIDENCE = 0.999
"""One late run of the 1,000 that a plan is tried in; what is promised beyond, they cannot show."""
PASSED, SPENT = 0.5, 1e-9
"""The deadline in s of a job whose deadline has passed, and the budget of one that has spent it: no plan keeps them."""
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
    `limit`: how many nodes it may have, as somebody wrote; `room`: how many there are for this job, whatever takes the
    others (other jobs, a stock-out, its end).
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
    room: float = math.inf
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
    def nodes(self) -> int:
        """The most that the job may have."""
        return int(min(self.limit, self.room))

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
        if not 0.5 <= self.confidence <= MOST_CONFIDENCE:
            raise UsageError(
                f"the confidence must be at least 0.5 and at most {MOST_CONFIDENCE:g}, which is the most that the "
                f"simulated runs of a plan can show, not {self.confidence:.9g}"
            )
        if self.prefer not in ("MinCost", "MinTime", "BestValue"):
            raise UsageError(f"prefer MinCost, MinTime or BestValue, not {self.prefer}")

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self.deadline is not None or self.budget is not None

    @property
    def margin(self) -> float:
        """Standard deviations between the mean and what is kept with the confidence asked for; 0 without a limit."""
        return NormalDist().inv_cdf(self.confidence) if self.limited else 0.0

    @property
    def is_lost(self) -> bool:
        """Whether a limit is one that nothing can keep any more."""
        return self.deadline == PASSED or self.budget == SPENT

    @property
    def in_order(self) -> tuple[Objective, ...]:
        """This, and what counts instead where no plan keeps all of its limits, and so on: the last one has none.

        What may be spent at most goes before the time: late, a job is as fast as the budget lets it, and where nothing
        keeps that either, it costs as little as it can.
        """
        aims = [self]
        if self.deadline is not None:
            aims.append(replace(self, deadline=None, prefer="MinTime"))
        if self.budget is not None:
            aims.append(replace(self, deadline=None, budget=None, prefer="MinCost"))
        return tuple(aims)

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
    shared: bool = False
    """Other jobs have nodes of its pools that it could use."""

    def __post_init__(self) -> None:
        if not self.pools:
            raise UsageError("the planner needs at least one pool")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise UsageError("two pools have the same name: rename one")
        if sum(pool.nodes for pool in self.pools) == 0:
            raise UsageError(
                "no pool has a node for the job: raise the limit of at least one, or wait for nodes"
            )
        if self.max_workers is not None and self.max_workers < max(self.min_workers, 1):
            raise UsageError(
                f"at most {self.max_workers} and at least {self.min_workers} workers contradict each other: "
                "raise the maximum or lower the minimum"
            )
        if sum(pool.nodes for pool in self.pools) < self.min_workers:
            raise UsageError(
                f"the pools hold {sum(pool.nodes for pool in self.pools)} workers together, but at least "
                f"{self.min_workers} are required: raise a limit or lower minReplicas"
            )

        if sum(pool.nodes for pool in self.pools if not pool.spot) < self.min_on_demand:
            raise UsageError(
                f"{self.min_on_demand} workers must be on-demand, but the on-demand pools hold fewer: lower "
                "onDemandBase or add on-demand pools"
            )

    def within(self, left: Mapping[str, float]) -> Problem:
        """The same in the nodes that other jobs leave, by pool."""
        pools = tuple(replace(pool, room=min(pool.room, left[pool.name])) for pool in self.pools)
        rest = replace(self, pools=pools)
        return replace(rest, shared=self.shared or rest.limits != self.limits)

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
        return next((own for own in self.pools if own.name == self.fallback and own.nodes >= most), None)

    @property
    def limits(self) -> tuple[int, ...]:
        """The most workers of each pool; never more than `max_workers`."""
        most = math.inf if self.max_workers is None else self.max_workers
        return tuple(int(min(pool.nodes, most)) for pool in self.pools)


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
