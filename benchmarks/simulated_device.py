"""The real worker loop on a simulated device: share of N x ideal, where a step sleeps and the cores are free.

On an accelerator behind a bus: share of the smaller of two limits, the steps alone and what a bare socket carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import compute_only
from benchmarks.harness import Measurement, summary
from benchmarks.runs import Run, run
from benchmarks.wire_peers import hot_rate

BF16 = 2
SECONDS = 12.0
REPEATS = 3
GOAL, GOAL_WORKERS = 0.97, 16


class Case(NamedTuple):
    """A simulated model; measured with each number of parameter servers."""

    name: str
    parameters: int
    milliseconds: int
    workers: int
    servers: tuple[int, ...]
    goal: float | None
    job: str = "sleeping"
    """Of `jobs`: the update is made on the host, or `on_accelerator`."""

    @property
    def place(self) -> str:
        """Where the update is made, in words."""
        return " on an accelerator" if self.job == "on_accelerator" else ""

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of `jobs.sleeping`."""
        return {"parameters": self.parameters, "milliseconds": self.milliseconds}


SMALL = [
    Case("1.73 M", 1_730_000, 100, workers, (1, 2), GOAL if workers <= GOAL_WORKERS else None)
    for workers in (1, 2, 4, 8, 16, 32)
]
LARGE = [Case("25.6 M", 25_600_000, 300, 2, (1,), 0.96, job) for job in ("sleeping", "on_accelerator")]

IN_ROUNDS = [
    Case("100,000", 100_000, milliseconds, workers, (1,), 0.97)
    for workers, milliseconds in ((2, 100), (4, 400), (8, 100))
]


class Accelerated(NamedTuple):
    """A model on a simulated accelerator, which takes 10 ms for a step; so many steps per push."""

    name: str
    parameters: int
    steps: int


ACCELERATED = [
    Accelerated(name, parameters, steps)
    for name, parameters in (("25.6 M", 25_600_000), ("110 M", 110_000_000))
    for steps in (1, 16)
]
ACCELERATED_GOAL, STEP_MILLISECONDS = 0.90, 10


def measure(quick: bool) -> Iterator[Measurement]:
    """One row for each number of workers and parameter servers."""
    # The large ones also briefly: what a step costs there hid behind the small one once.
    for case in [SMALL[0]._replace(servers=(1,)), *LARGE] if quick else [*SMALL, *LARGE]:
        found = _measured(case, 1 if quick else REPEATS, 5.0 if quick else SECONDS)
        for servers, pairs in found.items():
            title = (
                f"{case.name}, {case.milliseconds} ms{case.place}, {case.workers} workers, {servers} PS, bf16"
            )
            shares = [one.rate / ideal for one, ideal in pairs]
            yield summary(title, shares, "x", "workers x the same step with no PS", case.goal)
            cores = [(one.worker_cpu + one.ps_cpu) * ideal for one, ideal in pairs]
            name = f"{title}, cores that ideal would take"
            yield summary(name, cores, "cores", "processor time a step, workers and PS")
    for case in () if quick else IN_ROUNDS:
        yield _in_rounds(case)
    for each in () if quick else ACCELERATED:
        yield from _accelerated(each)


def _in_rounds(case: Case) -> Measurement:
    """The steps of workers that may take part in rounds, as a share of those of workers that never wait."""
    shares = []
    for _ in range(REPEATS):
        free, waiting = (
            run(
                "benchmarks.jobs:sleeping",
                workers=case.workers,
                args=case.args,
                batch=4,
                seconds=SECONDS,
                rounds=rounds,
            )[0].rate
            for rounds in (False, True)
        )
        shares.append(waiting / free)
    title = f"{case.name}, {case.milliseconds} ms, {case.workers} workers, 1 PS, bf16, with rounds"
    return summary(title, shares, "x", "the same without rounds", case.goal)


def _accelerated(case: Accelerated) -> Iterator[Measurement]:
    """Shares of one worker's steps on an accelerator."""
    shares, of_steps, of_socket = [], [], []
    for _ in range(REPEATS):
        socket = hot_rate(2.0, BF16 * case.parameters)[0] / (2 * BF16 * case.parameters) * case.steps
        arguments = {"parameters": case.parameters, "milliseconds": STEP_MILLISECONDS}
        ideal = compute_only.rate("on_accelerator", 4, 1, 3.0, **arguments)
        limit, found = (
            run(
                "benchmarks.jobs:on_accelerator",
                workers=1,
                args={**arguments, "milliseconds": milliseconds, "steps": case.steps},
                batch=4,
                seconds=6.0,
            )[0].rate
            for milliseconds in (0, STEP_MILLISECONDS)
        )
        shares.append(found / min(ideal, limit))
        of_steps.append(found / ideal)
        of_socket.append(found / min(ideal, socket))
    title = f"{case.name}, 10 ms on an accelerator, {case.steps} steps per push, 1 worker, 1 PS, bf16"
    against = "the steps alone, or what a bare socket would carry if that takes longer"
    yield summary(title, of_socket, "x", against, ACCELERATED_GOAL)
    against = "the steps alone, or the pushes alone if these take longer"
    yield summary(f"{title}, with Shoal's own pushes as the limit", shares, "x", against)
    yield summary(f"{title}, of the steps alone", of_steps, "x", "the same step with no PS")


def _measured(case: Case, repeats: int, seconds: float) -> dict[int, list[tuple[Run, float]]]:
    """By number of servers: the runs, and the ideal before each.

    The ideal is the same step in one process, without a parameter server. It is measured in each repeat, since the
    duration of a sleep varies on a shared host. Above `GOAL_WORKERS` the start takes most of the time, so the job is
    started once.
    """
    found: dict[int, list[tuple[Run, float]]] = {servers: [] for servers in case.servers}
    starts, spans = (1, repeats) if case.workers > GOAL_WORKERS else (repeats, 1)
    for _ in range(starts):
        ideal = case.workers * compute_only.rate(case.job, 4, 1, 5.0, **case.args)
        for servers, pairs in found.items():
            runs = run(
                f"benchmarks.jobs:{case.job}",
                workers=case.workers,
                args=case.args,
                batch=4,
                seconds=seconds,
                parameter_servers=servers,
                spans=spans,
            )
            pairs += [(one, ideal) for one in runs]
    return found
