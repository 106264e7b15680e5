"""Find the resource that limits a running job, and the gain from fixing it.

CM-DARE compares measured with predicted cluster speed after a warm-up and reports a gap. Here the capacity of every
resource is known or measured, so the verdict names the one that binds, and the gain follows from the next smallest
capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.speed.servers import soft_min

__all__ = ["Bottleneck", "Observation", "Verdict", "WorkerParts", "diagnose"]

STRAGGLER = 1.3  # a worker this many times slower than the median of its group is a straggler
BUSY = 0.85  # a resource with a higher utilization is saturated
WAITING = 0.15  # a worker that waits for a larger part of its step for input is starved


class Bottleneck(StrEnum):
    """The resource that limits a job."""

    NONE = "None"
    PS_CPU = "ParameterServerCPU"
    PS_NETWORK = "ParameterServerNetwork"
    INPUT = "InputPipeline"
    CPU_CORES = "WorkerCPU"
    STRAGGLER = "Straggler"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class WorkerParts:
    """The mean step of a worker: total seconds, and seconds of compute, exchange and input wait."""

    name: str
    group: str  # workers of one group (accelerator, batch size) should be equally fast
    step_seconds: float
    compute_seconds: float
    exchange_seconds: float = 0.0
    input_seconds: float = 0.0
    cpu_busy: float | None = None  # part of its CPU cores that is in use, 0 to 1
    cpu_cores: float | None = None


@dataclass(frozen=True)
class Observation:
    """A running job over a time window, after `warmed_up_seconds` since the last change of its workers.

    `predicted` is the predicted speed in steps/s; `ps_cpu_busy` and `ps_network_busy` are the utilization, 0 to 1, of
    the cores and of the bandwidth of the busiest parameter server.
    """

    workers: Sequence[WorkerParts]
    predicted: float
    relative_error: float  # half width of the prediction's 90 % interval, relative
    parameter_servers: int = 1
    ps_cpu_busy: float = 0.0
    ps_network_busy: float = 0.0
    warmed_up_seconds: float = 60.0


@dataclass(frozen=True)
class Verdict:
    """The bottleneck, what to do, and the steps/s now and (if known) afterwards."""

    bottleneck: Bottleneck
    measured: float
    after: float
    workers: tuple[str, ...]
    reason: str
    advice: str

    @property
    def gain(self) -> float:
        """The relative gain: 0.25 is 25 %."""
        return self.after / self.measured - 1 if self.measured > 0 else 0.0


def diagnose(seen: Observation, *, threshold: float = 0.067, warm_up: float = 30.0) -> Verdict:
    """Name the bottleneck.

    A job is slow if it is below the prediction by more than `threshold` (CM-DARE's 6.7 %) and by more than the
    interval of the prediction, or if a resource is saturated.
    """
    if not seen.workers:
        raise UsageError("no worker has reported a step: wait for the first report")
    for w in seen.workers:
        if not (np.isfinite(w.step_seconds) and w.step_seconds > 0):
            raise UsageError(
                f"worker {w.name} reports {w.step_seconds} s for a step: it must be a positive number"
            )
    measured = sum(1 / w.step_seconds for w in seen.workers)
    if seen.warmed_up_seconds < warm_up:
        wait = f"only {seen.warmed_up_seconds:.0f} s since the workers changed"
        return Verdict(
            Bottleneck.NONE, measured, measured, (), f"{wait}: too early to judge", f"wait {warm_up:.0f} s"
        )
    gap = 1 - measured / seen.predicted if seen.predicted > 0 else 0.0
    options = [
        v for v in (_servers(seen, measured), _input(seen, measured), _stragglers(seen, measured)) if v
    ]
    if options:
        return max(options, key=lambda v: v.after)
    if gap > max(threshold, seen.relative_error):
        return Verdict(
            Bottleneck.UNKNOWN,
            measured,
            seen.predicted,
            (),
            f"the job does {measured:.3g} steps/s where {seen.predicted:.3g} were predicted ({100 * gap:.0f} % less), "
            "and no parameter server, input pipeline or single worker explains it",
            "look at the nodes' clocks and neighbours, or let the predictor learn from this job",
        )
    return Verdict(
        Bottleneck.NONE,
        measured,
        measured,
        (),
        f"the job does {measured:.3g} steps/s of {seen.predicted:.3g} predicted, and no resource is short",
        "more workers will add speed in proportion",
    )


def _servers(seen: Observation, measured: float) -> Verdict | None:
    busy = {Bottleneck.PS_CPU: seen.ps_cpu_busy, Bottleneck.PS_NETWORK: seen.ps_network_busy}
    which, most = max(busy.items(), key=lambda item: item[1])
    if most < BUSY:
        return None
    n = seen.parameter_servers
    workers = sum(1 / max(w.compute_seconds + w.input_seconds, 1e-9) for w in seen.workers)
    capacity = measured / most
    after = float(soft_min(np.array([workers]), np.array([capacity * (n + 1) / n]), 4.0)[0])
    what = "CPU cores" if which is Bottleneck.PS_CPU else "network"
    cheaper = "" if which is Bottleneck.PS_CPU else ", or exchange parameters as bf16"
    return Verdict(
        which,
        measured,
        max(after, measured),
        (),
        f"the {what} of the busiest parameter server {'are' if which is Bottleneck.PS_CPU else 'is'} "
        f"in use {100 * most:.0f} % of the time: workers wait for it",
        f"run {n + 1} parameter servers in place of {n}{cheaper}",
    )


def _input(seen: Observation, measured: float) -> Verdict | None:
    starved = [w for w in seen.workers if w.input_seconds > WAITING * w.step_seconds]
    if not starved:
        return None
    after = sum(1 / (w.step_seconds - (w.input_seconds if w in starved else 0.0)) for w in seen.workers)
    share = float(np.mean([w.input_seconds / w.step_seconds for w in starved]))
    names = tuple(w.name for w in starved)
    saturated = [w for w in starved if w.cpu_busy is not None and w.cpu_busy >= BUSY]
    wait = (
        f"{len(starved)} of {len(seen.workers)} workers wait {100 * share:.0f} % of each step for their input"
    )
    if len(saturated) * 2 > len(starved):
        # SAD (Xiao et al., SoCC 2018): a faster accelerator needs more CPU cores to be fed.
        factor = float(
            np.mean([1 + w.input_seconds / max(w.step_seconds - w.input_seconds, 1e-9) for w in saturated])
        )
        cores = [w.cpu_cores for w in saturated if w.cpu_cores]
        much = f"{factor:.1f} times the CPU cores"
        if cores:
            much = f"about {int(np.ceil(np.mean(cores) * factor))} CPU cores a worker"
        return Verdict(
            Bottleneck.CPU_CORES,
            measured,
            after,
            names,
            f"{wait} while their CPU cores are all busy",
            f"give {much}",
        )
    return Verdict(
        Bottleneck.INPUT,
        measured,
        after,
        names,
        f"{wait} while their CPU cores are idle",
        "prefetch, read in parallel, or keep the data nearer to the workers",
    )


def _stragglers(seen: Observation, measured: float) -> Verdict | None:
    groups: dict[str, list[WorkerParts]] = {}
    for w in seen.workers:
        groups.setdefault(w.group, []).append(w)
    medians: Mapping[str, float] = {
        g: float(np.median([w.compute_seconds for w in ws])) for g, ws in groups.items()
    }
    slow = [
        w
        for w in seen.workers
        if len(groups[w.group]) > 2 and w.compute_seconds > STRAGGLER * medians[w.group]
    ]
    if not slow:
        return None
    saved = {w.name: w.compute_seconds - medians[w.group] for w in slow}
    after = sum(1 / (w.step_seconds - saved.get(w.name, 0.0)) for w in seen.workers)
    worst = max(slow, key=lambda w: w.compute_seconds / medians[w.group])
    times = worst.compute_seconds / medians[worst.group]
    return Verdict(
        Bottleneck.STRAGGLER,
        measured,
        after,
        tuple(w.name for w in slow),
        f"{', '.join(w.name for w in slow)} compute{'s' if len(slow) == 1 else ''} up to {times:.1f} times slower than "
        f"the other workers on {worst.group}",
        "replace " + ("it" if len(slow) == 1 else "them") + ", best on another node",
    )
