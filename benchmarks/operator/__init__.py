"""Operator: reaction and scale on a real control plane with fake nodes, beside a bare client in the same run."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from benchmarks.harness import Measurement
from benchmarks.operator import fleet, leaders, peers, planning, reaction, throughput
from benchmarks.operator.page import draw, text
from benchmarks.operator.world import World, until
from dev.cluster import ControlPlane
from dev.kube import Kube

__all__ = ["SCENARIOS", "beside_peers", "measure", "one", "text"]

CRDS = Path(__file__).parents[2] / "crds"

Rows = Callable[[World, bool], AsyncIterator[Measurement]]
SCENARIOS: dict[str, Rows] = {
    "started": throughput.started,
    "reaction": reaction.measure,
    "lone": reaction.measure_lone,
    "lost-of-one": throughput.lost_of_one,
    "lost-of-two": throughput.lost_of_two,
    "leaders": leaders.measure,
    "fleet": fleet.measure,
}


def measure(quick: bool) -> Iterator[Measurement]:
    """All figures, each scenario on a control plane of its own: what one leaves behind does not slow the next."""
    rows = []
    scenarios = (one(name, quick) for name in SCENARIOS)
    for row in itertools.chain(planning.measure(quick), itertools.chain.from_iterable(scenarios)):
        rows.append(row)
        yield row
    draw(rows)


def one(name: str, quick: bool) -> Iterator[Measurement]:
    """The rows of one scenario, each as soon as it is known."""
    yield from _rows(SCENARIOS[name], quick)


def beside_peers(quick: bool) -> Iterator[Measurement]:
    """The rows of `peers`: of each system in turn."""
    for turn in peers.turns():
        yield from _rows(turn, quick)


def _rows(scenario: Rows, quick: bool) -> Iterator[Measurement]:
    with asyncio.Runner() as runner:
        rows = _on_a_control_plane(scenario, quick)

        async def following() -> Measurement | None:
            return await anext(rows, None)

        while (row := runner.run(following())) is not None:
            yield row


async def _on_a_control_plane(scenario: Rows, quick: bool) -> AsyncIterator[Measurement]:
    with ControlPlane.start() as plane, tempfile.TemporaryDirectory() as folder:
        plane.kubectl("apply", "--server-side", "-f", str(CRDS))
        async with Kube(plane.kubeconfig) as kube:
            await until(lambda: kube.get("/apis/shoal.dev/v1alpha1/trainingjobs"))
            async for row in scenario(World(plane, kube, Path(folder)), quick):
                yield row
