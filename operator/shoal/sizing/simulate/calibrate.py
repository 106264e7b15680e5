"""Whether promises are kept: plans from one part of a trace, replayed on the windows of the part that was left out.

A trace is cut into blocks. For each block the availability of the pool is learned from the others, as `shoal plan
--trace` learns it, and a fixed plan is promised to keep its deadline with the confidence asked for: the work is the
most for which the simulated runs say so. Then every window of the left-out block is replayed with that plan. A cell is
a trace, a number of workers (the pool holds as many) and a time to the deadline; its slack is that time over the time
with all nodes there. Speeds are exact here: what is tested is the availability, and the engine that promises, against
a replay that knows nothing of it (`replay.py`). A plan that is late by less than a step of that replay is in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.sizing.availability import Floats, Windows, rebinned
from shoal.sizing.plan.engine import Engine
from shoal.sizing.plan.problem import Objective, Pool, Problem, Servers
from shoal.sizing.plan.work import StepWork
from shoal.sizing.simulate.policies import View
from shoal.sizing.simulate.replay import Supply, replay, step_of
from shoal.sizing.simulate.scenario import Scenario
from shoal.sizing.simulate.traces import Trace
from shoal.sizing.speed.servers import PsModel

__all__ = ["Calibration", "Cell", "calibrate"]

BLOCKS = 6
WORKERS = (4, 8, 16, 32)
HOURS = (0.5, 1.0, 1.5)
SHARES = (0.0, 0.25, 0.5)  # parts of the workers that are on-demand
STRIDE = 8  # windows begin this many times in their own length
RUNS = 1000
STEP = 60.0
DRAWS = 1000


@dataclass(frozen=True)
class Cell:
    """One kind of plan on one trace: how often it was kept in the `n` windows of all left-out blocks."""

    trace: str
    workers: int
    on_demand: int
    seconds: float
    slack: float
    promised: float
    kept: float
    n: int
    by_block: tuple[tuple[int, float, int], ...]
    """The blocks that were left out, with what was kept of how many windows."""

    def as_json(self) -> dict[str, Any]:
        """The cell of `shoal calibrate --json`."""
        return {
            "trace": self.trace,
            "workers": self.workers,
            "onDemand": self.on_demand,
            "deadlineSeconds": self.seconds,
            "slack": self.slack,
            "promised": self.promised,
            "kept": self.kept,
            "n": self.n,
        }


@dataclass(frozen=True)
class Calibration:
    """All cells; `low` and `high` are the 95 % interval of `kept`, from drawing the blocks of the traces anew."""

    promised: float
    kept: float
    low: float
    high: float
    cells: tuple[Cell, ...]

    def as_json(self) -> dict[str, Any]:
        """The answer of `shoal calibrate --json`."""
        return {
            "promised": self.promised,
            "kept": self.kept,
            "low": self.low,
            "high": self.high,
            "cells": [cell.as_json() for cell in self.cells],
        }


def calibrate(
    spot: Pool,
    on_demand: Pool,
    traces: Sequence[Trace],
    *,
    confidence: float = 0.95,
    seed: int = 0,
    hours: Sequence[float] = HOURS,
    numbers: Sequence[int] = WORKERS,
) -> Calibration:
    """Promise and replay plans of workers of a spot and an on-demand pool on traces of the spot pool.

    Args:
        spot: the pool of the traces.
        on_demand: where the other workers of a plan are.
        traces: recorded nodes.
        confidence: what every plan is promised.
        seed: of the simulated runs.
        hours: times to the deadline.
        numbers: workers of a plan.

    """
    cells = []
    for number, trace in enumerate(traces):
        nodes, lost = trace.bins(STEP)
        lost[0] = 0
        if len(nodes) < 2 * BLOCKS:
            raise UsageError(
                f"the trace {trace.name} is {trace.span:.0f} s long: give one of at least {2 * BLOCKS * STEP:.0f} s, "
                "to leave parts of it out"
            )
        recorded = nodes.astype(np.float64), lost.astype(np.float64)
        for length in hours:
            for workers in numbers:
                for share in SHARES:
                    cell = _cell(
                        trace.name, recorded, spot, on_demand, workers, round(share * workers), 3600 * length,
                        confidence, seed + number,
                    )  # fmt: skip
                    if cell is not None:
                        cells.append(cell)
    if not cells:
        raise UsageError("the traces are too short for any plan: give longer ones")
    kept = float(np.mean([cell.kept for cell in cells]))
    low, high = _interval(cells, seed)
    return Calibration(confidence, kept, low, high, tuple(cells))


def _cell(
    name: str,
    recorded: tuple[Floats, Floats],
    spot: Pool,
    on_demand: Pool,
    workers: int,
    steady: int,
    seconds: float,
    confidence: float,
    seed: int,
) -> Cell | None:
    """One cell; None if no block holds a window, or if no work can be promised."""
    nodes, lost = recorded
    counts = workers - steady, steady
    edges = np.linspace(0, len(nodes), BLOCKS + 1).astype(int)
    by_block, slacks = [], []
    for block, (first, last) in enumerate(pairwise(edges)):
        size = max(float(np.delete(nodes, np.s_[first:last]).max()), 1.0)
        rest = tuple((nodes[a:b], lost[a:b], STEP) for a, b in ((0, first), (last, len(nodes))) if b - a > 1)
        learned = Windows(rest, size, spot.running_out())
        promise = _promised(spot, on_demand, counts, learned, seconds, seed)
        work = float(np.quantile(promise, 1 - confidence))
        if work <= 0:
            continue
        scenario = _scenario(spot, on_demand, counts, work, seconds)
        windows = _windows(nodes[first:last] / size, lost[first:last] / size, scenario, seed)
        if not len(windows.offset):
            continue
        late = replay(scenario, _Fixed(counts), windows, seed).finish - seconds
        by_block.append((block, float(np.mean(late <= step_of(scenario))), len(late)))
        slacks.append(seconds * workers / spot.step_seconds / work)
    if not by_block:
        return None
    total = sum(n for _, _, n in by_block)
    kept = sum(kept * n for _, kept, n in by_block) / total
    return Cell(
        name, workers, steady, seconds, float(np.mean(slacks)), confidence, kept, total, tuple(by_block)
    )


def _promised(
    spot: Pool, on_demand: Pool, counts: tuple[int, int], nodes: Windows, seconds: float, seed: int
) -> Floats:
    """(runs,) steps that a plan makes: uncertain are only the nodes of the spot pool, which holds its workers."""
    problem = _scenario(replace(spot, availability=nodes), on_demand, counts, 1.0, seconds).problem
    return Engine(problem, seconds, runs=RUNS, seed=seed).done(counts, 1)


def _scenario(spot: Pool, on_demand: Pool, counts: tuple[int, int], work: float, seconds: float) -> Scenario:
    """The plan's workers, exact speeds, and servers that neither fail nor limit them."""
    first, other = (
        replace(pool, limit=max(n, 1), step_seconds=spot.step_seconds, step_sigma=0.0, running=0)
        for pool, n in zip((spot, on_demand), counts, strict=True)
    )
    quiet = Servers(model=PsModel(0.0), interruptions_per_hour=0.0)
    problem = Problem((first, other), StepWork(steps=max(work, 1.0)), quiet, Objective(deadline=seconds))
    return Scenario(problem, first, other, sum(counts), 1, work, seconds)


@dataclass(frozen=True)
class _Fixed:
    """A policy that asks for the same workers at all times: a plan."""

    counts: tuple[int, int]

    def __call__(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        spot, on_demand = (np.full(len(view.remaining), n) for n in self.counts)
        return spot, on_demand


def _windows(there: Floats, lost: Floats, scenario: Scenario, seed: int) -> Supply:
    """All windows of a block, `STRIDE` in their length: parts of the nodes that are there, and that are lost."""
    step, limit = step_of(scenario), scenario.most_spot
    there, lost = rebinned(there, lost, STEP, step)
    nodes = np.floor(np.minimum(there, 1.0) * limit + 1e-9).astype(np.int64)
    before = np.concatenate([nodes[:1], nodes[:-1]])
    drawn = np.floor(lost * limit + np.random.default_rng(seed).random(len(lost))).astype(np.int64)
    gone = np.clip(np.maximum(drawn, before - nodes), 0, before)
    length = int(scenario.deadline / step)
    starts = np.arange(0, len(nodes) - length + 1, max(length // STRIDE, 1))
    return Supply(nodes[None], gone[None], np.array([len(nodes)]), np.zeros_like(starts), starts)


def _interval(cells: Sequence[Cell], seed: int) -> tuple[float, float]:
    """The 95 % interval of the mean of `kept`: windows of one block are not independent, blocks nearly are."""
    rng = np.random.default_rng(seed)
    names = sorted({cell.trace for cell in cells})
    means = np.empty(DRAWS)
    for draw in range(DRAWS):
        weights = {name: rng.multinomial(BLOCKS, np.full(BLOCKS, 1 / BLOCKS)) for name in names}
        kept = []
        for cell in cells:
            blocks, parts, numbers = (np.array(each) for each in zip(*cell.by_block, strict=True))
            weight = weights[cell.trace][blocks] * numbers
            if weight.sum():
                kept.append(float(weight @ parts / weight.sum()))
        means[draw] = np.mean(kept) if kept else np.nan
    low, high = np.nanquantile(means, (0.025, 0.975))
    return float(low), float(high)
