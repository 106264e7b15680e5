"""`shoal plan` and `shoal simulate`: files in, an explanation, a table and plots out. No cluster is asked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from shoal.errors import UsageError

__all__ = ["NO_PLAN", "plan", "simulate"]

NO_PLAN = 3
"""Exit code of `shoal plan` where no plan keeps the limits: a pipeline must not go on with the one that is shown."""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, path_type=Path)


class _Numbers(click.ParamType[list[float]]):
    """Numbers with commas between them."""

    name = "N,N,…"

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        """Give the numbers, or say which one is none."""
        try:
            return [(int if self.whole else float)(part) for part in str(value).split(",")]
        except ValueError:
            kind = "whole numbers" if self.whole else "numbers"
            self.fail(f"give {kind} with commas between them, one for each pool, not {value!r}", param, ctx)


@click.command()
@click.option("-f", "job_file", type=_FILE, help="A TrainingJob (YAML).")
@click.option(
    "--pools",
    required=True,
    type=_FILE,
    help="CapacityPools (YAML), or instance types (CSV) with --workload.",
)
@click.option("--profiles", type=_FILE, help="SpeedProfiles (YAML), with -f.")
@click.option("--workload", type=_FILE, help="A workload in spotDNN's form (JSON), instead of -f.")
@click.option(
    "--model",
    type=click.Choice(["shoal", "spotdnn"]),
    default="shoal",
    show_default=True,
    help="Model of time and cost: Shoal's own, or that of spotDNN's published code (with --workload).",
)
@click.option("--deadline", type=float, help="Seconds from now. With -f it wins over the job's.")
@click.option("--budget", type=float, help="Most that the run may cost. With -f it wins over the job's.")
@click.option("--loss", type=float, help="Train until the loss is this, with --workload.")
@click.option(
    "--prefer",
    type=click.Choice(["MinCost", "MinTime", "BestValue"]),
    help="Cheapest in time, fastest for the money, or the most speed for the cost.",
)
@click.option(
    "--confidence", type=float, help="Probability with which to keep the deadline.  [default: 0.95]"
)
@click.option("--limits", type=_Numbers(whole=True), help="The most workers of each pool, with --workload.")
@click.option(
    "--prices", type=_Numbers(whole=False), help="The price per hour of each pool, with --workload."
)
@click.option(
    "--max-servers",
    type=click.IntRange(1, 64),
    help="The most parameter servers.  [default: 1 with --workload; with -f the limit of their pool, 8 at most]",
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    metavar="POOL=FILE",
    help="Revocations measured in a pool, in the place of its prior rate. Repeat it for several pools.",
)
@click.option("--plot", type=_OUT, help="Write the Pareto front of time and cost to this PNG file.")
@click.option("--currency", default="$", show_default=True, help="What prices are in.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    job_file: Path | None,
    pools: Path,
    profiles: Path | None,
    workload: Path | None,
    model: str,
    deadline: float | None,
    budget: float | None,
    loss: float | None,
    prefer: str | None,
    confidence: float | None,
    limits: list[int] | None,
    prices: list[float] | None,
    max_servers: int | None,
    traces: Sequence[str],
    plot: Path | None,
    currency: str,
    as_json: bool,
) -> None:
    """The cheapest node pools that meet a deadline (or the fastest for a budget), and why.

    Either from a TrainingJob, CapacityPools and SpeedProfiles (-f, --pools, --profiles), or from a workload in
    spotDNN's form (--workload, --pools, --deadline, --loss). docs/planning.md explains the files and the formulas.

    Exit code: 0 with a plan; 3 if no plan keeps deadline and budget, then the fastest one is shown; 2 for input that is
    not understood.
    """
    if (job_file is None) == (workload is None):
        raise UsageError("give either -f with a TrainingJob or --workload, not both and not neither")
    from shoal.sizing.plan import planner
    from shoal.sizing.plan.explain import explain

    wishes = {"deadline": deadline, "budget": budget, "prefer": prefer, "confidence": confidence}
    if workload is not None:
        _refuse("with --workload", {"--profiles": profiles})
        answer = _plan_workload(
            workload, pools, model, wishes, loss, limits, prices, max_servers or 1, traces
        )
    else:
        _refuse(
            "with -f",
            {
                "--loss": loss,
                "--limits": limits,
                "--prices": prices,
                "--model spotdnn": model if model == "spotdnn" else None,
            },
        )
        assert job_file is not None
        problem = _with_traces(_problem(job_file, pools, profiles, wishes, max_servers=max_servers), traces)
        answer = planner.plan(problem)
    reason = explain(answer, currency)
    if plot is not None:
        from shoal.cli import plots

        plots.write_front(answer, plot, currency)
    if as_json:
        click.echo(json.dumps(answer.as_json(reason), indent=1, allow_nan=False))
    else:
        from shoal.cli import views

        views.show_plan(answer, reason, currency)
    if not answer.feasible:
        click.get_current_context().exit(NO_PLAN)


@click.command()
@click.option("-f", "job_file", required=True, type=_FILE, help="A TrainingJob (YAML).")
@click.option(
    "--pools", required=True, type=_FILE, help="CapacityPools (YAML): one spot and one on-demand at least."
)
@click.option("--profiles", type=_FILE, help="SpeedProfiles (YAML).")
@click.option(
    "--trace",
    "traces",
    required=True,
    multiple=True,
    type=_FILE,
    help="A revocation trace (CSV or JSON, docs/planning.md). Several: the runs are shared among them.",
)
@click.argument("more_traces", nargs=-1, type=_FILE, metavar="[TRACE]...")
@click.option(
    "--runs", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Simulated runs."
)
@click.option("--slack", type=float, help="Deadline as a multiple of the time on on-demand nodes only.")
@click.option("--deadline", type=float, help="Deadline in seconds; wins over the job's.")
@click.option(
    "--workers", type=click.IntRange(1, 10_000), help="Workers at a time; wins over the job's maxReplicas."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the random offsets into the traces."
)
@click.option("--plot", type=_OUT, help="Write workers over time, finish times and costs to this PNG file.")
@click.option("--currency", default="$", show_default=True, help="What prices are in.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(
    job_file: Path,
    pools: Path,
    profiles: Path | None,
    traces: tuple[Path, ...],
    more_traces: tuple[Path, ...],
    runs: int,
    slack: float | None,
    deadline: float | None,
    workers: int | None,
    seed: int,
    plot: Path | None,
    currency: str,
    as_json: bool,
) -> None:
    """Replay revocation traces from random offsets: policies side by side, by finish time and cost."""
    from shoal.sizing.simulate import summary
    from shoal.sizing.simulate.scenario import scenario_of
    from shoal.sizing.simulate.traces import read_trace

    if slack is not None and deadline is not None:
        raise UsageError("give --slack or --deadline, not both")
    problem = _problem(job_file, pools, profiles, {"deadline": deadline}, jobs_deadline=slack is None)
    scenario = scenario_of(problem, workers=workers, slack=slack)
    result = summary.run(
        scenario, [read_trace(path) for path in (*traces, *more_traces)], runs=runs, seed=seed
    )
    reason = summary.explain(result, currency)
    if plot is not None:
        from shoal.cli import plots

        plots.write_simulation(result, plot, currency)
    if as_json:
        click.echo(json.dumps(result.as_json(reason), indent=1, allow_nan=False))
        return
    from shoal.cli import views

    views.show_simulation(result, reason, currency)


def _refuse(when: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} has no meaning {when}: leave it out")


def _plan_workload(
    workload: Path,
    pools: Path,
    model: str,
    wishes: dict[str, Any],
    loss: float | None,
    limits: list[int] | None,
    prices: list[float] | None,
    max_servers: int,
    traces: Sequence[str],
) -> Any:
    from shoal.sizing.plan import planner, spotdnn_files
    from shoal.sizing.plan.problem import Objective

    if loss is None:
        raise UsageError("say with --loss to which loss to train")
    described = spotdnn_files.read_workload(workload)
    options = spotdnn_files.read_pools(pools, limits, prices)
    if sum(pool.limit for pool in options) == 0:
        raise UsageError("the limits of all pools are 0: raise the limit of at least one")
    objective = Objective(**{name: value for name, value in wishes.items() if value is not None})
    if model == "spotdnn":
        if traces or max_servers > 1 or wishes["confidence"] is not None:
            raise UsageError(
                "spotDNN's formulas know one parameter server and no revocations: leave out --trace, --max-servers and "
                "--confidence, or use --model shoal"
            )
        published = described.spotdnn(options, loss, objective)
        return planner.plan_with(published, published.work)
    problem = described.problem(options, loss, objective, servers=range(1, max_servers + 1))
    return planner.plan(_with_traces(problem, traces))


def _problem(
    job: Path,
    pools: Path,
    profiles: Path | None,
    wishes: dict[str, Any],
    *,
    jobs_deadline: bool = True,
    max_servers: int | None = None,
) -> Any:
    """The problem of three files, with the command line's wishes in place of the job's."""
    from shoal.sizing.plan.assemble import problem_of, seconds_left
    from shoal.sizing.plan.manifests import read_job, read_pools, read_profile

    if profiles is None:
        raise UsageError("say with --profiles how fast the model was measured to be (SpeedProfiles, YAML)")
    described = read_job(job)
    deadline = wishes["deadline"]
    if deadline is None and jobs_deadline:
        deadline = seconds_left(described, datetime.now(UTC))
    problem = problem_of(
        described,
        read_pools(pools),
        read_profile(profiles, described),
        deadline=deadline,
        max_servers=max_servers,
    )
    given = {name: value for name, value in wishes.items() if value is not None}
    return dataclasses.replace(problem, objective=dataclasses.replace(problem.objective, **given))


def _with_traces(problem: Any, traces: Sequence[str]) -> Any:
    from shoal.sizing.simulate.measured import with_trace
    from shoal.sizing.simulate.traces import read_trace

    for given in traces:
        name, found, path = given.partition("=")
        if not found or not Path(path).is_file():
            raise UsageError(f"--trace must be POOL=FILE with a file that exists, not {given!r}")
        problem = with_trace(problem, name, read_trace(Path(path)))
    return problem
