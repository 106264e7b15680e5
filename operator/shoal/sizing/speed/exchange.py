"""What the exchange with the parameter servers makes of a step: of one worker, and of all that share the servers.

With one push in flight a step is the longer of compute and exchange. How long the exchange of one alone takes, the
fewest workers tell, without what they waited for the servers' arithmetic, which busy seconds tell. Where more are then
slower than both explain, they share something else, as the servers' link: it is the limit, and no longer the
arithmetic. On a CPU the exchange is a part of what a worker computes (`Row.alone`), and tells nothing of that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal.sizing.accelerators import CPU
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import MOST_SECONDS, LogMean, Profile, Row
from shoal.sizing.speed.servers import Cluster, Load, soft_min

__all__ = ["alone", "limits", "sharing"]

SHARPNESS = 1 + math.exp(priors.SERVER_MEAN[2])
SURE = 3.0
"""Standard deviations by which several workers are slower than what the servers' arithmetic explains."""


def alone(profile: Profile) -> list[tuple[Row, LogMean]]:
    """The rows that tell the time of a worker alone, each with it: the longer of its compute and its own exchange."""
    links: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in profile.rows:
        if _exchange(row) is not None:
            links[_configuration(row)].append(row)
    own = {key: _own(profile, rows) for key, rows in links.items()}
    return [
        (row, replace(time, mean=max(time.seconds, own.get(_configuration(row), 0.0))))
        for row in profile.rows
        if (time := row.alone) is not None
    ]


def sharing(profile: Profile) -> list[Cluster]:
    """What several workers of a model did by their exchange, without waits for others, beside what each does alone."""
    return [
        Cluster(
            profile.model,
            row.workers,
            row.parameter_servers,
            row.workers / time.seconds,
            row.workers / max(time.seconds, exchange),
            math.sqrt(time.variance_log / time.count),
            f"{profile.model.key} {row.device} {row.devices} {row.batch_size}",
        )
        for row, time in alone(profile)
        if row.workers > 1 and (exchange := _exchange(row)) is not None
    ]


def limits(loads: Sequence[Load], clusters: Sequence[Cluster]) -> tuple[list[Load], list[Cluster]]:
    """What tells how much the servers of each model can do: their loads or, where it is less, its clusters."""
    by_model = defaultdict[str, list[Load]](list)
    for load in loads:
        by_model[load.model.key].append(load)

    def slower(one: Cluster) -> bool:
        near = min(by_model[one.model.key], key=lambda load: abs(math.log(load.servers / one.servers)))
        capacity = _more_servers(1 / near.seconds, near.servers, one.servers)
        explained = float(soft_min(np.array([one.alone]), capacity, SHARPNESS)[0])
        return math.log(explained / one.speed) > SURE * math.hypot(priors.CLUSTER_NOISE, one.alone_sigma)

    less = {one.model.key for one in clusters if one.model.key in by_model and slower(one)}
    return (
        [load for load in loads if load.model.key not in less],
        [one for one in clusters if one.model.key in less or one.model.key not in by_model],
    )


def _own(profile: Profile, rows: Sequence[Row]) -> float:
    """Seconds of the exchange of one worker of a configuration; 0: nobody knows what of it is its own."""
    newest = min(row.age_seconds for row in rows)
    lately = [row for row in rows if row.age_seconds <= newest + priors.HALF_LIFE]
    row = min(lately, key=lambda each: (each.workers, -each.parameter_servers))
    whole, arithmetic = _exchange(row) or 0.0, _arithmetic(profile, row)
    if arithmetic is None:
        return whole if row.workers == 1 else 0.0
    part = min(row.workers * arithmetic / whole, 1.0)
    return float(whole * (1 - part**SHARPNESS) ** (1 / SHARPNESS))


def _arithmetic(profile: Profile, row: Row) -> float | None:
    """Seconds that an update keeps the servers of a row busy; None: not known."""
    known = {n: load for n, load in profile.server_load.items() if load.updates > 0 and load.busy_seconds > 0}
    if not known:
        return None
    near = min(known, key=lambda n: abs(math.log(n / row.parameter_servers)))
    return 1 / _more_servers(known[near].updates / known[near].busy_seconds, near, row.parameter_servers)


def _more_servers(capacity: float, servers: int, then: int) -> float:
    return float(capacity * (then / servers) ** priors.SERVER_MEAN[3])


def _exchange(row: Row) -> float | None:
    """Seconds of an exchange; None: it was not measured beside the compute. With a push in flight, a step at most."""
    seconds = row.exchange_seconds
    if seconds is None or row.compute is None or row.device == CPU:
        return None
    return min(seconds, MOST_SECONDS if row.step is None else row.step.seconds)


def _configuration(row: Row) -> tuple[object, ...]:
    return row.device, row.devices, row.cores, row.batch_size
