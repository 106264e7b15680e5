"""A chart of the demo: the progress of the job while its machines are lost."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dev.demo.faults import Fault
from dev.demo.watch import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOW = 5.0
"""Seconds over which the speed is averaged."""


@dataclass(frozen=True)
class Moment:
    """One observation: UTC, steps so far (None while the coordinator is unreachable), running processes."""

    at: datetime
    step: int | None
    workers: int
    servers: int


def moment(picture: Picture, at: datetime) -> Moment:
    """The observation in a picture. A worker counts from its first push."""
    report = picture.report if picture.fresh else None
    return Moment(at, report.step if report else None, len(picture.pushing), len(picture.role("ps")))


def speeds(moments: Sequence[Moment]) -> list[float | None]:
    """Steps/s over the last `WINDOW` at each moment; None if unknown."""
    found: list[float | None] = []
    first = 0
    for now in moments:
        while (now.at - moments[first].at).total_seconds() > WINDOW:
            first += 1
        then = moments[first]
        seconds = (now.at - then.at).total_seconds()
        if now.step is None or then.step is None or seconds <= 0:
            found.append(None)
        else:  # a restored parameter server can begin a few steps earlier: the speed is not negative
            found.append(max(0.0, (now.step - then.step) / seconds))
    return found


def draw(path: Path, moments: Sequence[Moment], faults: Sequence[Fault]) -> None:
    """Write a PNG: steps/s, and the running workers and parameter servers, with a line at each fault."""
    from matplotlib.figure import Figure  # heavy

    begin = moments[0].at if moments else datetime.now(UTC)
    times = [(m.at - begin).total_seconds() for m in moments]
    figure = Figure((9, 4.2), layout="constrained")
    speed, who = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    values = [float("nan") if v is None else v for v in speeds(moments)]
    speed.plot(times, values, color="C0")
    speed.set(ylabel="steps/s", ylim=(0, None), title="examples/digits.yaml while its machines are lost")
    who.step(times, [m.workers for m in moments], where="post", color="C0", label="workers that push")
    who.step(times, [m.servers for m in moments], where="post", color="C1", label="parameter servers")
    who.set(ylim=(0, None), xlabel="seconds since kubectl apply")
    who.yaxis.get_major_locator().set_params(integer=True)
    who.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=2, fontsize=8)
    events = {(fault.at - begin).total_seconds(): fault.kind for fault in faults}
    finish(path, figure, speed, events, width=12)  # two faults can be a few seconds apart


def finish(path: Path, figure: Figure, told: Axes, events: Mapping[float, str], *, width: int) -> None:
    """Write a figure whose axes share the time, with a line at each event and its words, `width` wide, in `told`."""
    for at, words in events.items():
        for axes in figure.axes:
            axes.axvline(at, color="0.5", linestyle="--", linewidth=1)
        told.annotate(textwrap.fill(words, width), (at, 0.03), xycoords=("data", "axes fraction"), xytext=(3, 0),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
