"""A job's plan in words and figures: what `status.plan` and `shoal explain` say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.sizing.fleet.pace import samples_per_second
from shoal.sizing.fleet.problems import JobProblem, unusable
from shoal.sizing.fleet.values import FleetJob, FleetPool, JobPlan
from shoal.sizing.plan.answer import Plan, finite
from shoal.sizing.plan.explain import explain, fleet, sentence
from shoal.sizing.plan.problem import Problem
from shoal.sizing.speed import priors

__all__ = ["answer_of", "unplanned"]

WORTH_A_SERVER = 0.1
"""One more parameter server is worth a word if it makes the job faster by this part."""

SILENT = "Its coordinator was not heard for minutes: the work left and the speed are those of before."


def answer_of(job: FleetJob, one: JobProblem, found: Plan) -> JobPlan:
    """What is told of a plan that was found for a job."""
    problem = one.problem
    low, high = found.finish or (found.seconds, found.seconds)
    used = [(pool.name, n) for pool, n in zip(problem.pools, found.counts, strict=True)]
    expected = samples_per_second(problem, found.counts)
    if job.beside is not None:
        expected *= job.beside.share_of_steps(max(sum(found.counts), 1))
    return JobPlan(
        counts=dict(used),
        parameter_servers=found.servers,
        finish_seconds=finite(found.seconds),
        finish_low=finite(min(low, found.seconds)),
        finish_high=finite(max(high, found.seconds)),
        cost=found.cost,
        spent=job.spent,
        confidence=found.kept,
        feasible=found.feasible,
        binding=found.binding,
        reason=" ".join(
            [
                explain(found, ""),
                *one.notes,
                *([SILENT] if job.silent else []),
                *_efficiency(job, sum(found.counts)),
                *_servers(problem, found),
            ]
        ),
        samples_per_second=expected,
        pace=one.pace,
        basis={name: one.basis[name] for name, n in used if n},
        measured=one.measured,
        speeds={pool.name: pool.samples_per_second for pool in problem.pools},
    )


def _servers(problem: Problem, found: Plan) -> list[str]:
    """A sentence where the parameter servers hold the workers of a plan back, and what one more would bring."""
    now, more = (samples_per_second(problem, found.counts, found.servers + extra) for extra in (0, 1))
    if more < (1 + WORTH_A_SERVER) * now:
        return []
    return [
        f"The parameter servers are the limit: {found.servers + 1} in place of {found.servers} would make "
        f"{more:,.0f} samples/s of {now:,.0f}; set parameterServers.replicas."
    ]


def _efficiency(job: FleetJob, workers: int) -> list[str]:
    """Sentences on a job that ends by a metric: what is left, and what its workers cost in samples."""
    if not job.work_note:
        return []
    said = [sentence(job.work_note)]
    if job.efficiency is not None and workers > 1:
        alone = replace(job.efficiency, reference=1.0)
        low, middle, high = (float(alone.factor(workers, z)) for z in (-priors.Z90, 0.0, priors.Z90))
        said.append(
            f"To the same value {workers} workers need {middle:.1f} times the samples of one ({low:.1f} to {high:.1f})."
        )
    return said


def unplanned(job: FleetJob, pools: Sequence[FleetPool], left: Mapping[str, int], reason: str) -> JobPlan:
    """What runs, and at least the workers that the job requires, in its order of preference."""
    by_name = {pool.name: pool for pool in pools}
    usable = [name for name in job.pools if name in by_name and unusable(by_name[name], job) is None]
    named = usable or [name for name in job.pools if name in by_name]
    running = {name: job.running.get(name, 0) for name in named}
    most = {name: min(left[name], by_name[name].room(running[name])) for name in named}
    counts = {name: min(running[name], most[name]) for name in named}
    for name in named:
        room = 0 if by_name[name].exhausted or by_name[name].ending else most[name] - counts[name]
        counts[name] += max(0, min(job.min_workers - sum(counts.values()), room))
    if not job.accepts(counts):
        counts = {name: min(job.under_way.get(name, 0), most[name]) for name in named}
    return JobPlan(
        counts=counts,
        parameter_servers=job.parameter_servers,
        finish_seconds=None,
        finish_low=None,
        finish_high=None,
        cost=None,
        confidence=None,
        feasible=False,
        binding=None,
        reason=f"{reason} Run {fleet([by_name[name] for name in counts], list(counts.values()))}.",
        samples_per_second=None,
        pace=job.pace_before,
    )
