"""From CapacityPools and SpeedProfiles, as files or the cluster hold them, to the planner's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter

from shoal.api.capacity_pool import CapacityPool
from shoal.api.speed_profile import (
    BesideSteps,
    LogMoments,
    MeasuredRow,
    SpeedProfile,
    SpeedProfileStatus,
    SpeedRow,
)
from shoal.api.speed_profile import ServerLoad as Load
from shoal.errors import UsageError
from shoal.sizing.accelerators import CPU, catalogue
from shoal.sizing.beside import Beside
from shoal.sizing.fleet.values import FleetPool
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import LogMean, Model, Profile, Row, ServerLoad

__all__ = ["beside_of", "decimal", "fleet_pool", "model_of", "nearest", "profile_of", "unusable_rows"]

EPOCHS_DIFFER, PRIOR_EPOCHS = 0.2, 3.0
"""By how much the tasks of epochs are taken to differ, as a part of them, and its weight in epochs."""
STEPS_DIFFER, PRIOR_STEPS = 0.3, 3.0
"""Likewise of the logarithms of steps' times: a single step, which differs from none, is no certainty."""


def fleet_pool(pool: CapacityPool, now: datetime | None = None) -> FleetPool:
    """A pool as the planner sees it: priors of its spec and measurements of its status."""
    spec, status = pool.spec, pool.status
    wrong = (
        c.reason
        for c in status.conditions
        if c.type == "Ready" and c.status == "False" and c.reason != "NoPrice"
    )
    starts = status.startup
    start, starts_seen = (
        (starts.seconds, starts.seen) if starts.seen else (starts.warm_seconds, starts.warm_seen)
    )
    out = status.exhausted
    since = status.out_since or out.last_transition_time if out is not None else None
    weight = _weight(status.stock.counted_until, now)
    return FleetPool(
        name=pool.metadata.name,
        accelerator=spec.accelerator.name if spec.accelerator else None,
        devices=spec.accelerator.count if spec.accelerator else 1,
        cores=spec.core_count,
        spot=spec.capacity_type == "Spot",
        zone=spec.zone,
        limit=pool.room,
        price_per_hour=spec.price.per_hour if spec.price else None,
        startup_seconds=float(spec.startup_seconds),
        startup_seen=weight * starts_seen,
        measured_startup_seconds=float(start) if starts_seen else None,
        interruptions_per_hour=spec.interruptions_per_hour,
        interruptions_seen=weight * status.interruptions.seen,
        node_hours=weight * decimal(status.interruptions.node_hours),
        watched_seconds=weight * decimal(status.stock.watched_seconds),
        out_seconds=weight * decimal(status.stock.out_seconds),
        outs=weight * decimal(status.stock.outs),
        lost_in_shocks=weight * status.interruptions.in_shocks,
        there_in_shocks=weight * status.interruptions.at_shocks,
        exhausted=out is not None,
        doubted=out is None and status.out_since is not None and not status.nodes,
        exhausted_seconds=max((now - since).total_seconds(), 0.0) if now and since else 0.0,
        ending=pool.is_ending,
        unready=next(wrong, ""),
        transfer_per_gib=spec.transfer_per_gib,
        batch_size=spec.batch_size,
        idle_seconds=float(spec.scaling.shrink_after_seconds),
    )


def profile_of(profile: SpeedProfile, now: datetime, *, strict: bool = True) -> Profile | None:
    """The measurements of a model: those of jobs, and the user's where they have none. None: the model is not known.

    `strict`: a row that cannot be a measurement is an error. The operator leaves such rows out: anyone may have edited
    them, and the others' plans must not stop for it.

    Raises:
        UsageError: a row cannot be a measurement; the message names it.

    """
    name = profile.metadata.name or "?"
    model = model_of(profile)
    if model is None:
        return None
    rows: list[Row] = []
    measured = {
        _configuration(row.device, row.devices, row.batch_size, decimal(row.cores))
        for row in profile.status.rows
    }
    made = [
        *(
            (f"spec.rows[{n}]", partial(_prior, row, now))
            for n, row in enumerate(profile.spec.rows)
            if _configuration(row.accelerator, row.accelerator_count, row.batch_size, row.cores or 0.0)
            not in measured
        ),
        *((f"status.rows[{n}]", partial(_measured, row, now)) for n, row in enumerate(profile.status.rows)),
    ]
    for where, make in made:
        try:
            rows.append(make())
        except ValueError as error:  # a UsageError is one
            if strict:
                raise UsageError(f"SpeedProfile {name}, {where}: {error}") from error
    loads = dict[int, ServerLoad]()
    for load in profile.status.server_load:
        with suppress(UsageError):
            loads[load.parameter_servers] = _load(load)
    return Profile(model, tuple(rows), loads)


def unusable_rows(profile: SpeedProfile, now: datetime) -> list[str]:
    """Which rows of the spec no plan uses, and what is wrong with them."""
    found = []
    for n, row in enumerate(profile.spec.rows):
        try:
            if not catalogue().knows(row.accelerator):
                names = ", ".join(catalogue().names)
                raise UsageError(f"{row.accelerator} is none of the known accelerators, {names}")
            _prior(row, now)
        except ValueError as error:  # a UsageError is one
            found.append(f"spec.rows[{n}]: {error}")
    return found


def model_of(profile: SpeedProfile) -> Model | None:
    """The model, as jobs report it or else as the user describes it; None where neither is usable."""
    measured, prior = profile.status.model, profile.spec.model
    known = measured if measured is not None and measured.parameters else prior
    if known is None:
        return None
    flops = decimal(measured.flops_per_sample) if measured is not None else 0.0
    flops = flops or (prior.flops_per_sample if prior is not None else 0.0)
    name = known.fingerprint or profile.metadata.name or "?"
    try:
        return Model(
            name,
            flops if flops > 0 else None,
            known.parameters,
            max(1, known.tensors),
            profile.metadata.namespace or "",
            measured.precision if measured is not None else "",
        )
    except UsageError:
        return None


def beside_of(status: SpeedProfileStatus, per_epoch: float | None, behind: int = 0) -> Beside | None:
    """What a job does beside training steps, as jobs of its model did; None: not measured, or no length of an epoch.

    It is that of epochs whose length is nearest to that of its own (`per_epoch`): of other data, the evaluation and
    the callbacks are as much work as their own, as a rule, and not a part of what is trained.
    """
    seen = nearest(status.beside_steps, per_epoch or 0) or status.beside
    epochs = decimal(seen.epochs) if seen is not None else 0.0
    if seen is None or not epochs > 0 or not per_epoch:
        return None
    others = decimal(seen.others)
    tasks, waits = max(decimal(seen.task_samples), 0.0), max(decimal(seen.wait_samples), 0.0)
    return Beside(
        per_epoch,
        tasks / epochs,
        waits / others if others > 0 else 0.0,
        behind,
        _differs(tasks / epochs, decimal(seen.task_squares) / epochs, epochs),
        epochs,
    )


def nearest(measured: Sequence[BesideSteps], length: float) -> BesideSteps | None:
    """What was measured in epochs whose length is nearest to this one, as a ratio; None: nothing was."""
    by_ratio = ((abs(math.log(max(each.samples_per_epoch, 1) / max(length, 1.0))), each) for each in measured)
    return min(by_ratio, key=itemgetter(0), default=(0.0, None))[1]


def _differs(mean: float, square: float, seen: float) -> float:
    """Relative standard deviation of an epoch's tasks: as seen, and as is likely where few epochs were."""
    known = 0 < mean < math.inf and 0 < square < math.inf
    own = max(square / mean**2 - 1, 0.0) if known else EPOCHS_DIFFER**2
    return math.sqrt((EPOCHS_DIFFER**2 * PRIOR_EPOCHS + own * seen) / (PRIOR_EPOCHS + seen))


def decimal(text: str | float | None) -> float:
    """A decimal of a status; 0 for what is none, since anyone may have edited it."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _configuration(device: str, devices: int, batch: int, cores: float) -> tuple[str, int, int, float]:
    """What of the user's rows is known better once it was measured."""
    name = catalogue().sheet(device).name if catalogue().knows(device) else device.lower()
    return name, devices, batch, cores if name == CPU else 0.0


def _prior(row: SpeedRow, now: datetime) -> Row:
    """A row that a user wrote: the whole step, and its compute part if given."""
    if not row.cores and row.accelerator.upper() == CPU:
        raise UsageError("it does not say on how many CPU cores: add cores")
    step = LogMean.of(row.step_seconds, row.spread, row.count)

    def part(seconds: float | None) -> LogMean | None:
        return LogMean.of(seconds, 0.0, row.count) if seconds else None

    return Row(
        row.accelerator,
        devices=row.accelerator_count,
        cores=row.cores or 0.0,
        batch_size=row.batch_size,
        workers=row.workers,
        parameter_servers=row.parameter_servers,
        compute=part(row.compute_seconds),
        pull=part(row.pull_seconds),
        push=part(row.push_seconds),
        step=step,
        age_seconds=_age(row.last_seen, now),
    )


def _measured(row: MeasuredRow, now: datetime) -> Row:
    return Row(
        row.device,
        devices=row.devices,
        cores=float(row.cores),
        batch_size=row.batch_size,
        workers=row.workers,
        parameter_servers=row.parameter_servers,
        compute=_moments(row.compute),
        pull=_moments(row.pull),
        push=_moments(row.push),
        step=_moments(row.step),
        age_seconds=_age(row.last_seen, now),
    )


def _load(load: Load) -> ServerLoad:
    if not 1 <= load.parameter_servers <= 10**6:
        raise UsageError(f"there were {load.parameter_servers} parameter servers")
    seconds, updates, received = decimal(load.busy_seconds), decimal(load.updates), decimal(load.bytes)
    return ServerLoad(seconds, updates, received, decimal(load.batches_per_update))


def _moments(found: LogMoments) -> LogMean | None:
    count = float(found.count)
    if count <= 0:
        return None
    own = max(float(found.variance_log), 0.0)
    variance = (STEPS_DIFFER**2 * PRIOR_STEPS + own * count) / (PRIOR_STEPS + count)
    return LogMean(float(found.mean_log), variance, count, decimal(found.mean_seconds) or None)


def _weight(counted_until: datetime | None, now: datetime | None) -> float:
    """What was counted until then still weighs, 0 to 1."""
    if counted_until is None or now is None or counted_until.tzinfo is None:
        return 1.0
    return priors.weight((now - counted_until).total_seconds())


def _age(seen: str | None, now: datetime) -> float:
    """Seconds since a measurement; 0 if its time is not known."""
    if not seen:
        return 0.0
    try:
        at = datetime.fromisoformat(seen)
    except ValueError as error:
        raise UsageError(f"lastSeen must be a time such as 2026-11-24T12:00:00Z, not {seen!r}") from error
    return max((now - (at if at.tzinfo else at.replace(tzinfo=UTC))).total_seconds(), 0.0)
