"""What the exchange with the parameter servers makes of a step: of one worker, and of all that share the servers.

With one push in flight a step is the longer of compute and exchange. What is measured of an exchange has waits in it:
for servers with much to do and, from a trainer of before, for slower workers. So the least of a model on a device is
what a worker's own takes at most; and only where one was without others, which waits for nobody, it is what a step
takes at least. It depends on no batch, and is no compute: it tells nothing of other devices and models.

Where several workers are slower than that and the servers' arithmetic explain, they share something else, as the
servers' link: it is the limit, and no longer the arithmetic. A few steps show none, and neither do those of a bad hour
where more came through in a longer time. On a CPU the exchange is a part of what a worker computes (`Row.alone`), and
tells nothing of that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from shoal.sizing.accelerators import CPU, Catalogue
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import (
    MOST_SECONDS,
    LogMean,
    Model,
    Profile,
    Row,
    ServerLoad,
    of_an_update,
)
from shoal.sizing.speed.servers import Cluster, Load, soft_min

__all__ = ["Links", "limits"]

SHARPNESS = 1 + math.exp(priors.SERVER_MEAN[2])
SURE = 3.0
"""Standard deviations by which several workers are slower than what the servers' arithmetic explains."""
ONE_BATCH = 1.05
"""Batches of an update, by the mean over all jobs, which are one of each but for a few."""
LASTING = 2.0
"""Times the noise of any cluster: what is as sure as that was no bad hour."""
BURST = 100.0
"""Steps that say as much as one: a server's restart, or a burst of others' traffic, is in the exchange of so many."""
BURSTS_DIFFER, PRIOR_BURSTS = 0.3, 3.0
"""By how much bursts are taken to differ, as the standard deviation of a logarithm, and its weight in bursts."""


class Links:
    """How long a worker's own exchange takes, by what was measured lately of its model on its device."""

    def __init__(self, profiles: Iterable[Profile], sheets: Catalogue) -> None:
        self._sheets = sheets
        self._models: dict[str, list[tuple[Model, Row]]] = defaultdict(list)
        self._loads = defaultdict[str, list[ServerLoad]](list)
        places: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
        for profile in profiles:
            self._loads[profile.model.key] += profile.server_load.values()
            for row in profile.rows:
                if sheets.knows(row.device):
                    self._models[profile.model.key].append((profile.model, row))
                    if _exchange(row) is not None:
                        places[self._place(profile.model, row.device, row.devices)].append(row)
        self._rows = {place: _lately(rows) for place, rows in places.items()}

    def batches_per_update(self, key: str) -> float:
        """How many batches an update of this model is of, over all of its jobs: 1 where nobody measured it."""
        return of_an_update((load.updates, load.batches_per_update) for load in self._loads[key]) or 1.0

    def floor(self, model: Model, device: str, devices: int) -> float:
        """Seconds that a worker's step takes at least; 0: nobody knows, as none was without others long enough lately.

        A few steps of the first worker of a model may have been slow once.
        """
        rows = self._rows.get(self._place(model, device, devices), ())
        alone = (_exchange(row) for row in rows if row.workers == 1)
        return _least(rows) if any(each.longer.count >= BURST for each in alone if each is not None) else 0.0

    def sharing(self, key: str) -> list[Cluster]:
        """What several workers of a model did lately by their exchange, beside what each does alone at least.

        None where jobs of the model push several batches at once: rows do not say how many theirs were of, and the
        servers' arithmetic is in updates.
        """
        if self.batches_per_update(key) > ONE_BATCH:
            return []
        measured = self._models.get(key, [])
        recent = set(_lately([row for _, row in measured]))
        found = list[Cluster]()
        for model, row in measured:
            exchange, compute = _exchange(row), row.compute
            if row.workers == 1 or exchange is None or compute is None or row not in recent:
                continue
            own = _least(self._rows[self._place(model, row.device, row.devices)])
            found.append(
                Cluster(
                    model,
                    row.workers,
                    row.parameter_servers,
                    row.workers / max(compute.seconds, own),
                    row.workers / max(compute.seconds, exchange.seconds),
                    math.sqrt(compute.doubt()),
                    f"{key} {row.device} {row.devices} {row.batch_size}",
                    priors.weight(row.age_seconds),
                    _doubt(exchange.longer if exchange.seconds > compute.seconds else compute, row.workers),
                )
            )
        return found

    def _place(self, model: Model, device: str, devices: int) -> tuple[str, str, int]:
        return model.key, self._sheets.sheet(device).name, devices


def limits(loads: Sequence[Load], clusters: Sequence[Cluster]) -> tuple[list[Load], list[Cluster]]:
    """What tells how much the servers of each model can do: their loads or, where it is less, its clusters."""
    by_model = defaultdict[str, list[Load]](list)
    for load in loads:
        by_model[load.model.key].append(load)
    measured = defaultdict[str, list[Cluster]](list)
    for cluster in clusters:
        measured[cluster.model.key].append(cluster)

    def slower(one: Cluster) -> bool:
        near = min(by_model[one.model.key], key=lambda load: abs(math.log(load.servers / one.servers)))
        capacity = (one.servers / near.servers) ** priors.SERVER_MEAN[3] / near.seconds
        explained = float(soft_min(np.array([one.alone]), capacity, SHARPNESS)[0])
        doubt = math.hypot(one.noise, one.alone_sigma)
        return math.log(explained / one.speed) * math.sqrt(one.weight) > SURE * doubt and not any(
            _refutes(other, one) for other in measured[one.model.key]
        )

    less = {key for key in by_model if any(map(slower, measured[key]))}
    return (
        [load for load in loads if load.model.key not in less],
        [one for one in clusters if one.model.key in less or one.model.key not in by_model],
    )


def _refutes(other: Cluster, one: Cluster) -> bool:
    """Whether of another cluster, measured as surely, more came through than the limit of this slow one would let.

    More workers may bring less, and a full link differs more from step to step than a free one: a smaller cluster
    refutes only what may be a bad hour.
    """
    lasting = one.noise < LASTING * priors.CLUSTER_NOISE
    if other.weight / other.noise**2 < one.weight / one.noise**2 or (lasting and other.alone < one.alone):
        return False
    limit = one.speed * (1 - (one.speed / one.alone) ** SHARPNESS) ** (-1 / SHARPNESS)
    limit *= (other.servers / one.servers) ** priors.SERVER_MEAN[3]
    return math.log(other.speed / limit) > SURE * other.noise


def _lately(rows: Sequence[Row]) -> list[Row]:
    newest = min((row.age_seconds for row in rows), default=0.0)
    return [row for row in rows if row.age_seconds <= newest + priors.HALF_LIFE]


def _least(rows: Iterable[Row]) -> float:
    return min(each.seconds for row in rows if (each := _exchange(row)) is not None)


class _Exchange(NamedTuple):
    """The seconds of a pull and a push, and what was measured of the longer of both."""

    seconds: float
    longer: LogMean


def _exchange(row: Row) -> _Exchange | None:
    """The time of an exchange; None: it was not measured beside the compute. With a push in flight, a step at most."""
    seconds, pull, push = row.exchange_seconds, row.pull, row.push
    if seconds is None or pull is None or push is None or row.compute is None or row.device == CPU:
        return None
    seconds = min(seconds, MOST_SECONDS if row.step is None else row.step.seconds)
    return _Exchange(seconds, max(pull, push, key=attrgetter("seconds")))


def _doubt(time: LogMean, workers: int) -> float:
    """The standard deviation of the logarithm of a mean time: few steps are less sure than they differ.

    A server that stands still is in a step of each of its workers.
    """
    bursts = time.count / BURST
    differ = (BURSTS_DIFFER**2 * PRIOR_BURSTS + time.variance_log * bursts) / (PRIOR_BURSTS + bursts)
    return math.sqrt(differ / bursts + time.stalled(1 / workers))
