"""The picture of the story: workers by pool, and the predicted finish with its band, up to the deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dev.demo.chart import finish
from dev.demo.pools.record import Moment


def draw(
    path: Path,
    moments: Sequence[Moment],
    pools: Sequence[str],
    deadline: float,
    finished: float | None,
    events: Mapping[float, str],
) -> None:
    """Write a PNG. `events`: what happened to the machines, by seconds after the job's start."""
    from matplotlib.figure import Figure  # heavy

    figure = Figure((9, 5.6), layout="constrained")
    who, when = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    times = [m.at for m in moments]
    counts = [[m.by_pool[pool] for m in moments] for pool in pools]
    who.stackplot(times, counts, labels=pools, step="post", colors=("C0", "C2", "C1"), alpha=0.75)
    who.set(ylim=(0, max(1, *(sum(c) for c in zip(*counts, strict=True))) + 0.6), ylabel="workers that train")
    who.yaxis.get_major_locator().set_params(integer=True)
    who.set_title("examples/pools.yaml: a deadline, a pool that is taken and comes back")
    who.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8)
    told = [m for m in moments if m.remaining is not None]
    at = [m.at for m in told]
    when.plot(at, [m.at + (m.remaining or 0.0) for m in told], color="C3", label="predicted finish")
    banded = [m for m in told if m.remaining_range is not None]
    low = [m.at + (m.remaining_range or (0.0, 0.0))[0] for m in banded]
    high = [m.at + (m.remaining_range or (0.0, 0.0))[1] for m in banded]
    label = "90 % of simulated runs"
    when.fill_between([m.at for m in banded], low, high, color="C3", alpha=0.2, linewidth=0, label=label)
    when.axhline(deadline, color="black", linewidth=1.2, label=f"deadline, {deadline:.0f} s")
    if finished is not None:
        when.plot([finished], [finished], "o", color="C3", label=f"finished, {finished:.0f} s")
    top = max([deadline, *(m.at + (m.remaining or 0.0) for m in told)])
    when.set(xlabel="seconds since the job's start", ylabel="finish (s since the start)")
    when.set_ylim(0, min(top, 2 * deadline) * 1.08)
    when.legend(frameon=False, loc="lower right", fontsize=8)
    finish(path, figure, when, events, width=16)
