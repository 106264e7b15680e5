"""The predictor: everything that was measured of all models and accelerators in one place, and what follows from it."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, TypeVar
from zlib import crc32

from shoal.sizing.accelerators import Catalogue, catalogue
from shoal.sizing.speed import priors
from shoal.sizing.speed.exchange import Links, limits
from shoal.sizing.speed.measurements import (
    Basis,
    LeftOut,
    LogMean,
    Model,
    Profile,
    Row,
    ServerLoad,
    of_an_update,
)
from shoal.sizing.speed.servers import Cluster, Load, ServerModel
from shoal.sizing.speed.worker import Configuration, Observation, WorkerModel

__all__ = ["SpeedModel", "WorkerSpeed", "fitted", "merged"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_LOG = 30.0
"""Of the seconds of a step: what is predicted beyond is computed with as this."""


@dataclass(frozen=True)
class WorkerSpeed:
    """Seconds of a worker's step alone, the standard deviation of its logarithm, and what it is based on."""

    seconds: float
    sigma: float
    basis: Basis


class SpeedModel:
    """The posterior of step times and of servers, from profiles (none: the data sheets).

    `planned`: the models that are asked for, by key, whose measurements stay where there are too many; None: all.
    `left_out`: the configurations on which nothing rests.
    """

    def __init__(
        self,
        profiles: Sequence[Profile] = (),
        sheets: Catalogue | None = None,
        *,
        planned: Collection[str] | None = None,
    ) -> None:
        self._sheets = sheets or catalogue()
        self._profiles = _by_model(profiles)
        known: list[Observation] = []
        for profile in self._profiles:
            for row in profile.rows:
                alone = row.alone
                if alone is not None and self._sheets.knows(row.device):
                    known.append(_observation(profile.model, row, alone))
        every = merged(known)
        self._observations = chosen(every, planned)
        self.left_out = len(every) - len(self._observations)
        self._loads, self._clusters = self._of_servers(planned)
        self._links = Links(self._profiles, self._sheets)
        keys = dict.fromkeys(load.model.key for load in self._loads)
        counted = [key for key in keys if planned is None or key in planned]
        self._sharing = [one for key in counted for one in self._links.sharing(key)]
        self.workers = WorkerModel(self._observations, self._sheets)
        self._speeds: dict[Configuration, WorkerSpeed] = {}

    @cached_property
    def servers(self) -> ServerModel:
        """The posterior of the parameter servers."""
        found = (self._cluster(model, row) for model, row in self._clusters)
        clusters = [*self._sharing, *(cluster for cluster in found if cluster is not None)]
        return ServerModel(*limits(self._loads, clusters))

    def batches_per_update(self, key: str) -> float:
        """How many batches an update of this model is of, over all of its jobs: 1 where nobody measured it."""
        return self._links.batches_per_update(key)

    def _of_servers(self, planned: Collection[str] | None) -> tuple[list[Load], list[tuple[Model, Row]]]:
        """What tells of the servers: their loads, and of models without any the rows of several workers."""
        loads = [
            Load(profile.model, count, load.busy_seconds / load.updates, load.updates)
            for profile in self._profiles
            for count, load in profile.server_load.items()
            if load.updates > 0 and load.busy_seconds > 0
        ]
        counted = {load.model.key for load in loads}
        rows = [
            (profile.model, row)
            for profile in self._profiles
            if profile.model.key not in counted
            for row in profile.rows
            if row.workers > 1 and row.step_seconds is not None and self._sheets.knows(row.device)
        ]
        most = priors.MOST_PLANNED_CLUSTERS, priors.MOST_CLUSTERS
        kept = _chosen(rows, planned, lambda each: each[0], _rank, *most)
        self.left_out += sum(row.alone is None for _, row in rows) - sum(row.alone is None for _, row in kept)
        return _chosen(loads, planned, lambda load: load.model, lambda load: -load.updates, *most), kept

    def worker(self, model: Model, device: str, devices: int, cores: float, batch: float) -> WorkerSpeed:
        """The step time of one worker without contention."""
        one = Configuration(model, device, batch, devices, cores)
        if one not in self._speeds:
            self._speeds[one] = self._predicted(one)
        return self._speeds[one]

    def _predicted(self, one: Configuration) -> WorkerSpeed:
        mean, sigma = self.workers.predict([one])
        return WorkerSpeed(
            max(
                math.exp(min(max(float(mean[0]), -MOST_LOG), MOST_LOG)),
                self._links.floor(one.model, one.device, one.devices),
            ),
            max(float(sigma[0]), priors.LEAST_SIGMA),
            self._basis(one),
        )

    def _basis(self, one: Configuration) -> Basis:
        """What a prediction rests on."""
        name = self._sheets.sheet(one.device, one.cores).name
        rows = [o.configuration for o in self._observations]
        same = [c for c in rows if c.model.key == one.model.key]
        here = [
            c
            for c in same
            if self._sheets.sheet(c.device, c.cores).name == name
            and c.devices == one.devices
            and (name != "CPU" or abs(math.log(max(c.cores, 1e-3) / max(one.cores, 1e-3))) < 0.05)
        ]
        alike = [c for c in here if c.model.kind.alike(one.model.kind)]
        if any(abs(math.log(c.batch / one.batch)) < 0.01 for c in alike):
            return Basis.MEASURED
        if here:
            return Basis.OTHER_BATCHES if alike else Basis.OTHER_SIZES
        if same:
            return Basis.OTHER_ACCELERATORS
        return Basis.OTHER_MODELS if rows else Basis.DATA_SHEETS

    def _cluster(self, model: Model, row: Row) -> Cluster | None:
        step = row.step_seconds
        if step is None:
            return None
        one = self.worker(model, row.device, row.devices, row.cores, row.batch_size)
        return Cluster(
            model,
            row.workers,
            row.parameter_servers,
            row.workers / one.seconds,
            row.workers / step,
            one.sigma,
            f"{model.key} {row.device} {row.devices} {row.batch_size}",
        )


def fitted(
    profiles: Sequence[Profile], planned: Collection[str] | None = None
) -> tuple[SpeedModel, list[LeftOut]]:
    """The predictor of all profiles with which it can be made, and the others: one bad profile stops only itself.

    Which they are is found by halves: of n profiles, each bad one costs about 2 log2(n) fits.
    """
    speeds, known, left_out, parts = SpeedModel(), list[Profile](), list[LeftOut](), [list(profiles)]
    while parts:
        part = parts.pop()
        try:
            tried = SpeedModel([*known, *part], planned=planned)
            _ = tried.servers  # fitted at their first use, where they must not fail
        except Exception as error:  # broad: whatever fails here fails for every job
            if len(part) == 1:
                logger.exception("a profile is left out of the predictor: %.200r", part[0].model)
                left_out.append(LeftOut(part[0], f"{type(error).__name__}: {error}"))
            else:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
        else:
            speeds, known = tried, [*known, *part]
    return speeds, left_out


def _observation(model: Model, row: Row, alone: LogMean) -> Observation:
    """A row as an observation: what is old weighs less."""
    variance = alone.doubt(priors.weight(row.age_seconds))
    drift = priors.DRIFT**2 * max(row.age_seconds, 0.0) / priors.HALF_LIFE
    one = Configuration(model, row.device, row.batch_size, row.devices, row.cores)
    return Observation(one, math.log(alone.seconds), variance + drift)


def merged(known: Sequence[Observation]) -> list[Observation]:
    """One observation for each configuration, weighted by precision."""
    groups: dict[Configuration, list[Observation]] = {}
    for each in known:
        groups.setdefault(each.configuration, []).append(each)
    merged = []
    for configuration, members in groups.items():
        weights = [1 / (each.variance + priors.CAMPAIGN**2) for each in members]
        total = sum(weights)
        mean = sum(w * each.log_seconds for w, each in zip(weights, members, strict=True)) / total
        merged.append(Observation(configuration, mean, max(1 / total - priors.CAMPAIGN**2, 0.0)))
    return merged


def chosen(every: Sequence[Observation], planned: Collection[str] | None = None) -> list[Observation]:
    """Those that the predictor is fitted to: of the planned models, then, in the room left, of the others.

    Where there are too many, owners take turns, in the turn of an owner its models, and of a model the most certain
    comes first: nobody has less room for what somebody else wrote than an equal part.
    """
    return _chosen(
        every,
        planned,
        lambda each: each.configuration.model,
        lambda each: (each.variance, _mixed(each.configuration)),
        priors.MOST_PLANNED_ROWS,
        priors.MOST_ROWS,
    )


def _rank(each: tuple[Model, Row]) -> tuple[float, int]:
    """Of the rows of a model: what was measured often and lately is first."""
    row = each[1]
    measured = row.step or row.compute
    return -priors.weight(row.age_seconds) * (measured.count if measured else 0.0), _mixed(row)


def _mixed(value: object) -> int:
    """An order of what is as certain that is its own, whoever wrote it first, and spread over batches and devices."""
    return crc32(repr(value).encode())


def _chosen(
    every: Iterable[T],
    planned: Collection[str] | None,
    model_of: Callable[[T], Model],
    rank: Callable[[T], Any],
    most_planned: int,
    most: int,
) -> list[T]:
    """As `chosen`, of anything about a model. `rank`: of the most certain of a model it is the least."""
    first, rest = list[T](), list[T]()
    for each in every:
        (first if planned is None or model_of(each).key in planned else rest).append(each)
    kept = _in_turn(first, model_of, rank)[:most_planned]
    return kept + _in_turn(rest, model_of, rank)[: max(most - len(kept), 0)]


def _in_turn(every: Iterable[T], model_of: Callable[[T], Model], rank: Callable[[T], Any]) -> list[T]:
    """Owners in turn, and of each its models in turn; the most certain of a model first."""
    owners: dict[str, dict[str, list[T]]] = defaultdict(lambda: defaultdict(list))
    for each in sorted(every, key=rank):
        model = model_of(each)
        owners[model.owner][model.key].append(each)
    return _alternating([_alternating(list(models.values())) for models in owners.values()])


def _alternating(lists: Sequence[Sequence[T]]) -> list[T]:
    return [each for each in chain.from_iterable(zip_longest(*lists)) if each is not None]


def _by_model(profiles: Iterable[Profile]) -> list[Profile]:
    """One profile for each kind: what several profiles say of it counts together, and what both say once."""
    models: dict[str, list[list[Profile]]] = defaultdict(list)
    for profile in profiles:
        kinds, one = models[profile.model.key], profile.model.kind
        same = next((members for members in kinds if members[0].model.kind.alike(one)), None)
        if same is None:
            kinds.append([profile])
        else:
            same.append(profile)
    every = chain.from_iterable(models.values())
    return [members[0] if len(members) == 1 else _together(members) for members in every]


def _together(profiles: Sequence[Profile]) -> Profile:
    """Of the model as the last of them has it."""
    rows = tuple(dict.fromkeys(row for profile in profiles for row in profile.rows))
    loads: dict[int, set[ServerLoad]] = defaultdict(set)
    for profile in profiles:
        for count, load in profile.server_load.items():
            loads[count].add(load)
    return Profile(profiles[-1].model, rows, {count: _sum(each) for count, each in loads.items()})


def _sum(loads: Collection[ServerLoad]) -> ServerLoad:
    return ServerLoad(
        sum(each.busy_seconds for each in loads),
        sum(each.updates for each in loads),
        sum(each.bytes for each in loads),
        of_an_update((each.updates, each.batches_per_update) for each in loads),
    )
