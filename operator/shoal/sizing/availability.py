"""How many nodes a pool has over time: drawn from priors and counts, or from windows of a recorded trace.

A pool is in one of two states. While it is *stocked*, a lost node is replaced after its start-up; nodes are lost one by
one and, in shocks, several together. When it is *out of stock*, a part of the nodes is lost at once and nothing is
replaced until it ends. The times in both states are exponential; rates and the part of the time that is out of stock
are drawn for each run from what was counted leaves open (Gamma and Beta posteriors), so that a pool that was hardly
watched is promised little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.speed import priors

__all__ = [
    "NEVER_OUT",
    "Availability",
    "Calm",
    "Floats",
    "Losses",
    "Markov",
    "Stock",
    "Supply",
    "Windows",
    "rebinned",
]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

MOST_PARTS = 4
"""Into which a long interval is cut: 120 of them tell how much of years is out of stock, and all plans wait for it."""
BLOCK_SECONDS = 7200.0
"""Availability of times further apart than this is taken to be independent."""


@dataclass(frozen=True)
class Supply:
    """For every run and interval, as parts of the pool's limit: nodes that there are, and nodes lost in it.

    All are (runs, steps), or (1, steps) where all runs are the same. In a long interval more than 1 may be lost: what
    replaces a lost node is lost again. `lost` strikes any nodes, `together` different ones. `shared`: a job's part of
    the pool fares like the whole, whatever the limit, and what is lost is what is replaced; else (in a trace) what is
    there is there for any job, and what goes for good is lost as well. `stays`: the part that is there of nodes that a
    job has at the beginning, where that differs: a pool that is out of stock then does not take them.
    """

    there: Floats
    lost: Floats
    together: Floats
    shared: bool = False
    stays: Floats | None = None


class Availability(Protocol):
    """A source of supplies."""

    @property
    def mean(self) -> float:
        """The mean part of the limit that is there."""
        ...

    def supply(self, rng: np.random.Generator, runs: int, steps: int, step: float, limit: int) -> Supply:
        """Draw `runs` runs of `steps` intervals of `step` seconds of a pool of `limit` nodes."""
        ...


@dataclass(frozen=True)
class Calm:
    """Nodes that are always there: on-demand."""

    mean: float = 1.0

    def supply(self, rng: np.random.Generator, runs: int, steps: int, step: float, limit: int) -> Supply:  # noqa: ARG002
        """All nodes, in every run."""
        return Supply(np.ones((1, steps)), np.zeros((1, steps)), np.zeros((1, steps)))


@dataclass(frozen=True)
class Stock:
    """How often a spot pool is out of stock, and for how long.

    Args:
        out_share: part of the time in which it is.
        out_seconds: mean seconds until there are nodes again.
        looks: what the share rests on, in independent looks at the pool; infinite: it is exact.

    """

    out_share: float = priors.OUT_SHARE
    out_seconds: float = priors.OUT_SECONDS
    looks: float = priors.LOOKS

    @classmethod
    def watched(cls, seconds: float, out: float, outs: float) -> Stock:
        """What is known of a pool that was watched for so many seconds, and was out of stock in `out` of them.

        It ran out `outs` times. A process of two states, watched for long, says as much of its share as independent
        looks at intervals of twice the mean time in the shorter state.
        """
        mean = (priors.OUT_SECONDS * priors.OUTS + out) / (priors.OUTS + outs)
        looks = priors.LOOKS + seconds / (2 * mean)
        return cls((priors.OUT_SHARE * priors.LOOKS + min(out, seconds) / (2 * mean)) / looks, mean, looks)

    @property
    def is_known(self) -> bool:
        """Whether what was watched outweighs what was assumed."""
        return self.looks >= 2 * priors.LOOKS


NEVER_OUT = Stock(out_share=0.0, looks=math.inf)


class Losses:
    """The losses of a pool of `limit` nodes in whole numbers, and those that strike the first n of its nodes.

    The nodes are halved until they end at n, and each half has its own draws: of more nodes, at least as many are
    struck, whatever else is asked for. A node is struck by each loss alike, of those `together` by one.
    """

    def __init__(self, supply: Supply, limit: int, rounding: Floats, seed: int) -> None:
        self.shape, self._seed, self._limit = supply.lost.shape, seed, limit
        self._first = {
            (limit, together): _some(
                np.floor(part * limit + rounding[: self.shape[0]]).ravel().astype(np.int64)
            )
            for part, together in ((supply.lost, False), (supply.together, True))
        }

    def strike(self, n: int) -> Floats:
        """(runs, steps) losses that strike n of the nodes."""
        struck, n = np.zeros(self.shape), min(n, self._limit)
        for together in (False, True):
            low, high = 0, min(size for size, kind in self._first if kind == together and size >= n)
            where, lost = self._first[high, together]
            while low < n < high:
                middle = (low + high) // 2
                below = self._below(lost, low, middle, high, together=together)
                if low == 0:
                    self._first[middle, together] = _some(below, where)
                if n < middle:
                    (where, lost), high = _some(below, where), middle
                else:
                    struck.flat[where] += below
                    (where, lost), low = _some(lost - below, where), middle
            if n == high:
                struck.flat[where] += lost
        return struck

    def _below(self, lost: Counts, low: int, middle: int, high: int, *, together: bool) -> Counts:
        """Of losses among the nodes from `low` to `high`, those below `middle`."""
        rng = np.random.default_rng((self._seed, low, high, together))
        if not together:
            return rng.binomial(lost, (middle - low) / (high - low))
        turns = -(-lost // (high - low))  # where more are lost than there are: so often is each struck
        return rng.hypergeometric(turns * (middle - low), turns * (high - middle), lost)


@dataclass(frozen=True)
class Markov:
    """Losses and stock-outs from rates and how well they are known.

    Args:
        losses_per_hour: interruptions of one node and hour.
        losses_seen: what this rate rests on, in interruptions; infinite: it is exact.
        shock_share: part of the interruptions that come as shocks, in which a part `shock_size` of the nodes is lost.
        shock_size: also the part of the nodes that is lost when the pool runs out of stock.
        stock: how often and for how long it is.
        out_now: how likely the pool is out of stock at the beginning: then the nodes that a job has stay, as far as
            they are not lost. None: as likely as `stock` says.
        coming: the part of the others that come even then. None: those that no shock takes.
        horizon: seconds over which the mean is taken where it is out at the beginning.

    """

    losses_per_hour: float = 0.0
    losses_seen: float = math.inf
    shock_share: float = priors.SHOCK_SHARE
    shock_size: float = priors.SHOCK_SIZE
    stock: Stock = NEVER_OUT
    out_now: float | None = None
    coming: float | None = None
    horizon: float = math.inf

    def waited(self, unmet: float) -> Markov:
        """The pool once nodes have not come which, with `unmet` as likelihood, would not have yet if it had any."""
        share, come = self.stock.out_share, 1.0 - self.shock_size
        not_come = come * unmet + self.shock_size
        out, stocked = share * not_come, (1.0 - share) * unmet
        known = out / (out + stocked) if out > 0 else 0.0
        return replace(self, out_now=known, coming=come * unmet / not_come if not_come > 0 else 0.0)

    @property
    def mean(self) -> float:
        """The mean part of the limit that is there: out of stock, a part is lost at once, and the rest one by one."""
        alone = 1.0 / (1.0 + self.losses_per_hour * self.stock.out_seconds / 3600)
        mean = 1.0 - self.stock.out_share * (1.0 - (1.0 - self.shock_size) * alone)
        if not self.out_now or math.isinf(self.horizon):
            return mean
        # Until it ends there is what survived, ever less; then it is as it is at any time.
        times = self.horizon / self.stock.out_seconds
        out = _part(times / alone) + (1.0 - _part(times)) * mean
        return self.out_now * out + (1.0 - self.out_now) * mean

    def supply(self, rng: np.random.Generator, runs: int, steps: int, step: float, limit: int) -> Supply:
        """Draw runs; see the module. Intervals are drawn in parts where stock-outs are shorter."""
        if self.stock.out_share <= 0 and not self.out_now:
            return self._drawn(rng, runs, steps, step, limit)
        parts = min(math.ceil(2 * step / self.stock.out_seconds), MOST_PARTS)
        fine = self._drawn(rng, runs, steps * parts, step / parts, limit)
        if parts == 1:
            return fine
        rounding = rng.random((runs, steps))

        def whole(part: Floats | None) -> Any:
            if part is None:
                return None
            mean = part.reshape(runs, steps, parts).mean(axis=2)
            return np.floor(mean * limit + rounding) / max(limit, 1)

        lost, together = (part.reshape(runs, steps, parts).sum(axis=2) for part in (fine.lost, fine.together))
        return Supply(whole(fine.there), lost, together, shared=True, stays=whole(fine.stays))

    def _drawn(self, rng: np.random.Generator, runs: int, steps: int, step: float, limit: int) -> Supply:
        hours = step / 3600
        rate = np.full(runs, self.losses_per_hour)
        if self.losses_per_hour > 0 and math.isfinite(self.losses_seen):
            rate = rate * rng.gamma(max(self.losses_seen, 0.1), 1 / max(self.losses_seen, 0.1), runs)
        out, begins = self._out(rng, runs, steps, step)
        single = (rate * (1 - self.shock_share) * hours)[:, None]
        lost = rng.poisson(np.broadcast_to(single * limit, (runs, steps))) / max(limit, 1)
        together = np.zeros((runs, steps))
        if self.shock_share > 0 and self.shock_size > 0 and self.losses_per_hour > 0:
            shocks = rng.poisson(
                np.broadcast_to((rate * self.shock_share / self.shock_size * hours)[:, None], (runs, steps))
            )
            together = rng.binomial(limit * shocks, self.shock_size) / max(limit, 1)
        there = np.ones((runs, steps))
        if not out.any():
            return Supply(there, lost, together, shared=True)
        # What is lost in an interval after a stock-out that is shorter is replaced.
        taken = (lost + together) * min(self.stock.out_seconds / step, 1.0)
        if begins.any():
            first = rng.binomial(limit, self.shock_size, (runs, steps)) / max(limit, 1)
            taken = np.where(begins, np.maximum(taken, first), taken)
        # Out of stock, what is lost is not replaced: only what survived is there.
        stays = there.copy()
        coming = 1 - self.shock_size if self.coming is None else self.coming
        came = rng.binomial(limit, coming, runs) / max(limit, 1)
        left, old = np.where(out[:, 0], came, 1.0), np.ones(runs)
        for i in range(steps):
            survive = np.maximum(1 - taken[:, i], 0.0)
            left, old = (np.where(out[:, i], each * survive, 1.0) for each in (left, old))
            there[:, i], stays[:, i] = left, old
        return Supply(there, np.where(out, 0.0, lost), np.where(out, 0.0, together), shared=True, stays=stays)

    def _out(
        self, rng: np.random.Generator, runs: int, steps: int, step: float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(runs, steps) whether the pool is out of stock, and whether that begins here."""
        out = np.zeros((runs, steps), dtype=bool)
        begins = np.zeros((runs, steps), dtype=bool)
        if self.stock.out_share <= 0 and not self.out_now:
            return out, begins
        stock = self.stock
        now = rng.random(runs) < (stock.out_share if self.out_now is None else self.out_now)
        share = np.full(runs, min(stock.out_share, 0.999))
        if math.isfinite(stock.looks) and 0 < stock.out_share < 1:  # what there is now is one more look
            looks = max(stock.looks, 1.0)
            share = rng.beta(looks * stock.out_share + now, looks * (1 - stock.out_share) + ~now)
        turns = 1 - np.exp(-step / stock.out_seconds / np.maximum(1 - share, 1e-3))
        ends, starts = (1 - share) * turns, share * turns
        chance = rng.random((runs, steps))
        for i in range(steps):
            before = now
            if i:
                now = np.where(before, chance[:, i] >= ends, chance[:, i] < starts)
                begins[:, i] = now & ~before
            out[:, i] = now
        return out, begins


@dataclass(frozen=True)
class Windows:
    """Windows of recorded traces, and with a small weight what the prior says.

    A trace is (nodes, lost, step): nodes at the end of each interval of `step` seconds and those lost in it, for a
    pool whose size is `size` nodes. A window that crosses the end of a trace goes on at its beginning, so that every
    time counts alike. The prior's weight is that of `prior_windows` windows among the independent ones in the traces.
    """

    traces: Sequence[tuple[Floats, Floats, float]]
    size: float
    prior: Markov = Markov(stock=Stock())
    prior_windows: float = 0.25
    smoothing: float = 1.06  # Silverman's rule

    @property
    def mean(self) -> float:
        """The mean part of the size that was there."""
        total = sum(float(nodes.sum()) * step for nodes, _, step in self.traces)
        seconds = sum(len(nodes) * step for nodes, _, step in self.traces)
        return min(total / max(seconds, 1e-9) / self.size, 1.0)

    def supply(self, rng: np.random.Generator, runs: int, steps: int, step: float, limit: int) -> Supply:
        """Draw windows of the traces, at random times."""
        binned = [rebinned(nodes, lost, own, step) for nodes, lost, own in self.traces]
        room = np.array([float(len(nodes)) for nodes, _ in binned])
        independent = sum(len(nodes) for nodes, _ in binned) / steps
        from_prior = rng.random(runs) < self.prior_windows / (self.prior_windows + independent)
        which = rng.choice(len(binned), runs, p=room / room.sum())
        offset = (rng.random(runs) * room[which]).astype(np.int64)
        there, lost = np.ones((runs, steps)), np.zeros((runs, steps))
        ahead = np.arange(steps)
        for number, (nodes, gone) in enumerate(binned):
            at = np.flatnonzero(which == number)
            where = (offset[at][:, None] + ahead) % len(nodes)
            there[at] = np.minimum(nodes[where] / self.size, 1.0)
            lost[at] = gone[where] / self.size
        shift = self._shift(rng, runs)
        there = np.clip(there + shift[:, None], 0.0, 1.0)
        if from_prior.any():
            drawn = self.prior.supply(rng, int(from_prior.sum()), steps, step, limit)
            there[from_prior], lost[from_prior] = drawn.there, drawn.lost + drawn.together
        return Supply(there, lost, np.zeros_like(lost))

    def _shift(self, rng: np.random.Generator, runs: int) -> Floats:
        """(runs,) how much the part that is there differs from what any block of the traces had.

        Availability drifts over hours: what comes is another block. A few blocks say little of how far blocks differ,
        so their distribution is smoothed with Student's t, a kernel density in place of a histogram. Only downwards:
        nodes that were never seen are not promised.
        """
        means = [
            float(part.mean()) / self.size
            for nodes, _, step in self.traces
            for part in np.array_split(nodes, max(round(len(nodes) * step / BLOCK_SECONDS), 1))
        ]
        blocks = len(means)
        if blocks < 2:
            return np.zeros(runs)
        width = self.smoothing * float(np.std(means, ddof=1)) * blocks ** (-1 / 5)
        return np.asarray(np.minimum(width * rng.standard_t(max(blocks - 1, 2), runs), 0.0))


def _some(lost: Counts, where: Counts | None = None) -> tuple[Counts, Counts]:
    """The places where something is lost, and how much."""
    some = np.flatnonzero(lost)
    return some if where is None else where[some], lost[some]


def _part(times: float) -> float:
    """The mean of exp(-t) from 0 to `times`."""
    return -math.expm1(-times) / times if times > 0 else 1.0


def rebinned(nodes: Floats, lost: Floats, own: float, step: float) -> tuple[Floats, Floats]:
    """Nodes (the mean) and losses (the sum) in intervals of `step` s, from intervals of `own` s."""
    edges = np.arange(0.0, len(nodes) * own + 1e-9, step) / own
    if len(edges) < 2:
        return nodes.mean(keepdims=True), lost.sum(keepdims=True)
    at = np.arange(len(nodes) + 1.0)
    there = np.diff(np.interp(edges, at, np.concatenate([[0.0], np.cumsum(nodes)]))) * own / step
    gone = np.diff(np.interp(edges, at, np.concatenate([[0.0], np.cumsum(lost)])))
    return there, gone
