"""The input and the output of `plan_fleet`: frozen, picklable values. Times are in seconds, money in one currency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shoal.api.capacity_pool_status import LACKS_ACCELERATOR
from shoal.sizing.beside import Beside
from shoal.sizing.speed.measurements import Basis, LeftOut, Model

if TYPE_CHECKING:  # numpy
    from shoal.sizing.plan.work import LossWork
    from shoal.sizing.speed.efficiency import Efficiency

__all__ = ["FleetJob", "FleetPlan", "FleetPool", "JobPlan", "Pace", "Watched"]


@dataclass(frozen=True)
class FleetPool:
    """A capacity pool: what its spec says, and what was measured. One worker uses one node.

    `accelerator` None: nodes without one, whose workers compute on `cores` CPU cores. `limit`: nodes that Shoal
    may use, all jobs together. `price_per_hour` None: no offer, nothing is planned there. `startup_seen` and
    `interruptions_seen` (in `node_hours`) are how often these were measured; the rest is the prior.
    In `watched_seconds` jobs would have noticed that there are no more nodes, in `out_seconds` of them there were none,
    and `outs` times it ran out. `lost_in_shocks` of the interruptions came several at once, of `there_in_shocks` nodes.
    `exhausted`: there are no nodes now, for `exhausted_seconds`; `doubted`: it was, is tried again, and has none yet.
    `ending`: it is being deleted, and no worker begins there. `unready`: why it is not Ready, and no worker begins.
    `batch_size`: of workers of this pool; None: the job's.
    `idle_seconds`: how long a node is paid after its worker has left.
    """

    name: str
    accelerator: str | None
    devices: int = 1
    cores: float = 0.0
    spot: bool = False
    zone: str = ""
    limit: int = 0
    price_per_hour: float | None = None
    startup_seconds: float = 180.0
    startup_seen: float = 0.0
    interruptions_per_hour: float = 0.0
    interruptions_seen: float = 0.0
    node_hours: float = 0.0
    watched_seconds: float = 0.0
    out_seconds: float = 0.0
    outs: float = 0.0
    lost_in_shocks: float = 0.0
    there_in_shocks: float = 0.0
    exhausted: bool = False
    exhausted_seconds: float = 0.0
    doubted: bool = False
    ending: bool = False
    unready: str = ""
    measured_startup_seconds: float | None = None
    transfer_per_gib: float = 0.0
    batch_size: int | None = None
    idle_seconds: float = 600.0

    @property
    def nodes(self) -> int:
        """How many there may be with workers, all jobs together; none where no worker could run."""
        return 0 if self.unready == LACKS_ACCELERATOR else self.limit

    def room(self, running: int) -> int:
        """How many workers a job may have that has so many there: what others have is not to be had by it."""
        return min(running, self.nodes) if self.unready else self.nodes


@dataclass(frozen=True)
class Watched:
    """Samples/s of single workers now, by pool, and for how many seconds each was watched, in the mean.

    `company`: how many workers pushed meanwhile in the mean, by pool, and so shared the servers. Those that start do
    not; empty: those that were watched.
    """

    speeds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    seconds: float = 0.0
    company: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pace:
    """How a job's speed differs from what its profile says: predicted over present speed, less 1.

    `seconds`: how long it was watched.
    """

    error: float
    seconds: float


@dataclass(frozen=True)
class FleetJob:
    """A job: the work that is left, what it may use, and what it is wanted for.

    `created`: when it was made, as the API server writes it; empty: it is not made yet.
    `model` None: not reported yet. The work is `samples_left` or `steps_left` of a worker, whichever is done first, or
    else a `loss`; where all are None, it is not known, and `work_note` says why. Where the job ends by a metric, the
    samples are uncertain by `samples_sigma` (of their logarithm), and depend on the workers by `efficiency`. `beside`:
    what is to be done beside training steps; None: not known. `bytes_per_sample`: of an accelerator's memory; None: it
    is not checked. `cpu_limit` and `gpu_limit`: CPU cores and GPUs that a worker has at most; 0 and None: all of its
    node. `batches_per_update`: how many are in a push, as its servers count them; 0: not known. `gpu_image`: whether
    its workers have an image for nodes with GPUs. `servers_zone`: where its parameter servers are; empty: not known, or
    in none that is named. `server_price`: of each, per hour; 0: not known. `snapshot_every`: seconds between snapshots.
    `deadline_seconds` and `budget_left` are what is left from now; None: no limit. `running` workers need no start-up;
    `planned` are those of the plan that is being carried out or, of a job that follows none, those with a pod, whether
    it has a node or waits for one. While its pods cannot be made, it has the nodes of those that it is `kept_to`, by
    pool, whatever it plans; and it has none for those that wait `in_vain`. In the pools of `asked` it waits for nodes,
    for so many seconds. `now`: what its workers do; where none can be watched, `pace_before` is what was found last.
    `silent`: nobody has heard of it for minutes. `fault`: why it cannot be planned, which is the operator's own fault.
    `least`: the workers that it keeps, whoever wants their nodes, and below which it begins none; `min_workers` are
    more until there is something to plan. `keeps`: the workers that it has whatever is planned for it, as in all modes
    but Auto; None: it follows its plan.
    """

    name: str
    pools: tuple[str, ...]
    created: str = ""
    priority: int = 0
    model: Model | None = None
    samples_left: float | None = None
    steps_left: float | None = None
    loss: LossWork | None = None
    samples_sigma: float = 0.0
    efficiency: Efficiency | None = None
    beside: Beside | None = None
    work_note: str = ""
    bytes_per_sample: float | None = None
    cpu_limit: float = 0.0
    gpu_limit: int | None = None
    gpu_image: bool = True
    batch_size: int = 1
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    min_workers: int = 1
    max_workers: int = 1
    least: int = 1
    keeps: int | None = None
    on_demand_base: int = 0
    zone_policy: Literal["Same", "Preferred", "Any"] = "Same"
    parameter_servers: int = 1
    batches_per_update: float = 0.0
    servers_zone: str = ""
    server_price: float = 0.0
    snapshot_every: float = 60.0
    running: Mapping[str, int] = field(default_factory=dict)
    planned: Mapping[str, int] = field(default_factory=dict)
    kept_to: Mapping[str, int] = field(default_factory=dict)
    in_vain: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, float] = field(default_factory=dict)
    deadline_seconds: float | None = None
    budget_left: float | None = None
    prefer: Literal["MinCost", "MinTime"] = "MinCost"
    confidence: float = 0.95
    spent: float = 0.0
    now: Watched = field(default_factory=Watched)
    pace_before: Pace | None = None
    silent: bool = False
    fault: str = ""

    def holds(self, counts: Mapping[str, int]) -> dict[str, int]:
        """What others leave to the job, if it is to run these workers."""
        if self.keeps is not None:
            counts = self._stays(self.kept_to or counts, self.keeps)
        return {pool: self._has_nodes_of(pool, count) for pool, count in counts.items()}

    def _has_nodes_of(self, pool: str, count: int) -> int:
        """Of how many of so many workers: where they are fewer than now, those in vain end first."""
        most = self.kept_to.get(pool)
        now = self.under_way.get(pool, 0)
        if most is not None:
            count, now = min(count, most), min(now, most)
        return max(0, min(count, max(count, now) - self.in_vain.get(pool, 0)))

    def _stays(self, counts: Mapping[str, int], workers: int) -> Mapping[str, int]:
        """What it has, and what is lacking of so many workers, where they are advised, or it is kept to more."""
        has = Counter(self.under_way)
        for pool, count in counts.items():
            has[pool] += max(0, min(count - has[pool], workers - has.total()))
        return has

    @property
    def is_held(self) -> bool:
        """Whether it has the nodes that it `holds`, whatever is planned for it."""
        return self.keeps is not None or bool(self.kept_to)

    @property
    def under_way(self) -> Mapping[str, int]:
        """The workers by pool that it has, or is on its way to."""
        return self.planned or self.running

    @property
    def floor(self) -> int:
        """How many of the workers that it has, or is on its way to, it keeps whoever wants their nodes."""
        return min(self.least if self.keeps is None else self.keeps, sum(self.under_way.values()))

    def accepts(self, counts: Mapping[str, int]) -> bool:
        """Whether it carries a plan out, as the policies see it: with fewer than its least it stays as it is."""
        return sum(counts.values()) >= self.least or +Counter(counts) == +Counter(self.under_way)

    @property
    def has_work(self) -> bool:
        """Whether the work that is left is known."""
        return any(each is not None for each in (self.samples_left, self.steps_left, self.loss))


@dataclass(frozen=True)
class JobPlan:
    """What a job should run, and what is expected of it.

    `feasible`: deadline and budget are met with the confidence asked for. `binding`: the limit that cannot be met, or
    that makes the plan what it is. `finish_low` and `finish_high` enclose the finish in 90 % of simulated runs.
    `pace`: how fast what runs is now; None: that was never seen. `measured`: whether the model was, in any of the job's
    pools. `spent`: what the job cost before. `fault`: what failed in the planner itself.
    """

    counts: Mapping[str, int]
    parameter_servers: int
    finish_seconds: float | None
    finish_low: float | None
    finish_high: float | None
    cost: float | None
    confidence: float | None
    feasible: bool
    binding: str | None
    reason: str
    samples_per_second: float | None
    pace: Pace | None
    basis: Mapping[str, Basis] = field(default_factory=dict)
    """What the speed of its workers rests on, by pool."""
    measured: bool = False
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Samples per second of one worker alone, by pool."""
    spent: float = 0.0
    fault: str = ""


@dataclass(frozen=True)
class FleetPlan:
    """The plans of all jobs, by name. `left_out`: profiles on which none of them rests.

    `rows_left_out`: configurations of other models that were too many to learn from.
    """

    jobs: dict[str, JobPlan]
    left_out: tuple[LeftOut, ...] = ()
    rows_left_out: int = 0
