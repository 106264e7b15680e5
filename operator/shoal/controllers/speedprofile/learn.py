"""Merges a job's report into a SpeedProfile: pure, and each measured step counts once.

A coordinator reports cumulative sums, so a report that was missed loses nothing: the profile remembers, for each job,
the sums that it has merged (`status.sources`), in the same write as the rows. Old measurements count less: their weight
halves every half-life (`priors.weight`), since drivers, images and node types change under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from shoal.api.speed_profile import (
    MOST_LENGTHS,
    MOST_ROWS,
    MOST_SOURCES,
    BesideSteps,
    LogMoments,
    MeasuredModel,
    MeasuredRow,
    ServerLoad,
    SpeedProfile,
    SpeedProfileSpec,
    SpeedProfileStatus,
    SpeedSource,
)
from shoal.errors import UsageError
from shoal.sizing.fleet.resources import decimal, nearest
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Kind, of_an_update
from shoal.words import stamp
from shoal_trainer.contract import (
    LARGEST,
    BesideSums,
    LogSums,
    ModelReport,
    ShardReport,
    SpeedSums,
    StatusReport,
)

_BESIDE, _SHARD = "beside", "shard/"
FORGOTTEN = 6
"""After so many half-lives a measurement counts for nothing."""
MEASURED_AGAIN, CONTINUED = timedelta(hours=4), timedelta(minutes=10)
"""While a row is measured again, what it had weighs half after so long: else, after a change of image or driver, the
steps of months would hide those of days. Of a longer gap between two reports only so much is time of measuring."""
FROM_JOB_TO_JOB = timedelta(days=1)
"""After a gap, what it had weighs half of what it did so long before, however long the gap: a job of minutes in each
night would take weeks to measure for hours."""
MOST_STEPS = 200_000.0
"""Steps for which a report counts in a row at most: they tell its mean better than days differ, and with more of them
one report would hide the others for days."""
MOST_OF_TIME, CLOCKS_SECONDS = 1.1, 600.0
"""The steps of a team, one after the other, take no longer than its job exists; clocks differ by some minutes."""
MOST_SERVER_LOADS = 16
MOST_SUMS = 3000
"""Sums that are remembered, of all jobs: they take up to 250 bytes, and etcd takes 1.5 MB."""
ALIKE = 1.25
"""Epochs whose lengths differ by less than this factor are of one length: data that grow by the day are the same."""


def learn(
    status: SpeedProfileStatus,
    uid: str,
    report: StatusReport,
    now: datetime,
    began: datetime | None = None,
) -> SpeedProfileStatus:
    """The status with what the report of the job `uid` adds to it; the same object if it adds nothing.

    A report of another kind adds nothing: of two that begin a profile together, it is the first one's.
    What cannot be remembered is not learned, or it would be learned again and again: nothing of more than
    `MOST_SOURCES` jobs at once, or of more than `MOST_SUMS` configurations of all of them, until others have ended.
    `began`: since when the job may have measured; None: not known.

    Raises:
        UsageError: it cannot have measured for so long, or between two reports what they differ by.
    """
    if not kind_of(status.model).alike(kind_of(report.model)):
        return status
    model = _model(status.model, report)
    source = next((each for each in status.sources if each.uid == uid), None)
    if source is None:
        if len(status.sources) >= MOST_SOURCES:
            return status
        source = SpeedSource(uid=uid)
    room = max(0, MOST_SUMS - sum(len(each.counts) for each in status.sources))
    reported = [*map(_name, report.speed), *map(_shard, report.shards)]
    known = {*source.counts, *[name for name in reported if name not in source.counts][:room]}
    rows = {_key(row): row for row in status.rows}
    counts: dict[str, str] = {}
    news, seconds = False, _number(source.seconds)
    for sums in report.speed:
        name = _name(sums)
        if name not in known:
            continue
        seen = _parse(source.counts.get(name, "")) if source.report == report.speed_epoch else _NOTHING
        counts[name] = _format(_parts(sums))
        fresh = _fresh(name, _parse(counts[name]), seen)
        seconds += max(map(_seconds, fresh)) / sums.workers
        if fresh[0].count > 0:
            rows[sums.key] = _merged(rows.get(sums.key), sums, fresh, now)
            news = True
    exists = math.inf if began is None else max((now - began).total_seconds(), 0.0)
    if seconds > MOST_OF_TIME * exists + CLOCKS_SECONDS:
        raise UsageError(
            f"a job has measured steps of {seconds:,.0f} s, one after the other, in {exists:,.0f} s: correct its clock,"
            " or its image"
        )
    loads = {load.parameter_servers: load for load in status.server_load}
    shards = report.shards if all(_shard(each) in known for each in report.shards) else ()
    counts |= _add_loads(loads, source.counts, shards, now)
    news = news or loads != {load.parameter_servers: load for load in status.server_load}
    beside, merged = status.beside_steps, _parse_beside(source.counts.get(_BESIDE, ""))
    if source.report != report.speed_epoch:
        merged = BesideSums()
    passed, length = report.beside.since(merged), report.data.total
    if passed.epochs > 0 and length:  # whole epochs: their tasks come after their end
        beside, merged, news = _passed(_of_lengths(status), length, passed, now), report.beside, True
    if merged.epochs:
        counts[_BESIDE] = " ".join(f"{each:.10g}" for each in _amounts(merged))
    most = max(beside, key=lambda each: _trained(each, now), default=status.beside)
    if model is not None and beside and most is not None:
        model = model.model_copy(
            update={"samples_per_epoch": most.samples_per_epoch or model.samples_per_epoch}
        )
    if not news and model == status.model:
        return status
    at = stamp(now)
    kept = sorted(rows.values(), key=lambda row: row.last_seen)[-MOST_ROWS:]
    others = [each for each in status.sources if each.uid != uid]
    ours = SpeedSource(uid=uid, report=report.speed_epoch, counts=counts, seconds=f"{seconds:.10g}", at=at)
    return status.model_copy(
        update={
            "model": model,
            "rows": tuple(sorted(kept, key=_key)),
            "row_count": len(kept),
            "devices": ", ".join(sorted({row.device for row in kept})),
            "beside": most,
            "beside_steps": beside,
            "server_load": tuple(loads[number] for number in sorted(loads))[-MOST_SERVER_LOADS:],
            "sources": (*others, ours),
            "last_updated": at if news else status.last_updated,
        }
    )


def kind_of(model: MeasuredModel | ModelReport | None) -> Kind:
    """What is measured, as a profile stores it or a report says it; None: nothing is known of it."""
    if model is None:
        return Kind()
    return Kind(model.fingerprint, decimal(model.flops_per_sample), model.precision)


def forget(status: SpeedProfileStatus, uids: Collection[str]) -> SpeedProfileStatus:
    """The status without the sums of jobs that will not report again."""
    kept = tuple(each for each in status.sources if each.uid not in uids)
    return status if len(kept) == len(status.sources) else status.model_copy(update={"sources": kept})


def is_forgotten(profile: SpeedProfile, now: datetime) -> bool:
    """Whether nobody says anything in the profile that still counts, neither a user nor a job."""
    return profile.spec == SpeedProfileSpec() and _weight(newest(profile), now) < 0.5**FORGOTTEN


def newest(profile: SpeedProfile) -> str:
    """When it was measured last, or made."""
    return profile.status.last_updated or profile.metadata.creation_timestamp or ""


def moved(old: SpeedProfileStatus, new: SpeedProfileStatus) -> bool:
    """Whether an estimate is new, or differs by more than a standard error of its mean: worth a write."""
    before = {_key(row): row for row in old.rows}
    for row in new.rows:
        was = before.get(_key(row))
        if was is None:
            return True
        mean, old_mean = _number(row.compute.mean_log), _number(was.compute.mean_log)
        count = max(1.0, _number(was.compute.count))
        if abs(mean - old_mean) > max(0.02, (_number(was.compute.variance_log) / count) ** 0.5):
            return True
    if len(old.beside_steps) != len(new.beside_steps):
        return True
    loads = {load.parameter_servers for load in new.server_load}
    return old.model != new.model or loads != {load.parameter_servers for load in old.server_load}


def _key(row: MeasuredRow) -> tuple[str, int, float, int, int, int]:
    return row.device, row.devices, _number(row.cores), row.batch_size, row.workers, row.parameter_servers


def _number(text: str) -> float:
    """A decimal of the status."""
    return _numbers(text, 1)[0]


def _numbers(text: str, count: int) -> list[float]:
    """So many decimals of the status; zeros for what none of our writers wrote, since anyone may edit it."""
    try:
        found = [float(part) for part in text.split()]
    except ValueError:
        return [0.0] * count
    usable = len(found) == count and all(abs(each) <= LARGEST for each in found)
    return found if usable else [0.0] * count


def _name(sums: SpeedSums) -> str:
    return "/".join(part if isinstance(part, str) else f"{part:g}" for part in sums.key)


def _shard(shard: ShardReport) -> str:
    return f"{_SHARD}{shard.index}/{shard.boot}"


def _parts(sums: SpeedSums) -> tuple[LogSums, ...]:
    return sums.compute, sums.pull, sums.push, sums.step


_NOTHING = 4 * (LogSums(),)


def _fresh(name: str, said: Sequence[LogSums], seen: Sequence[LogSums]) -> tuple[LogSums, ...]:
    """What is new in the sums of a row. Both are as they are remembered: rounded alike, what only grows never shrinks.

    Raises:
        UsageError: each may be, and their difference not.
    """
    fresh = tuple(part.since(old) for part, old in zip(said, seen, strict=True))
    if any(part.count < 0 for part in fresh):
        return tuple(said)  # the coordinator dropped this row and began again
    if not all(part.possible for part in fresh):
        raise UsageError(
            f"no steps of 1e-7 to 1e7 s have what two reports of {name} differ by: correct the job's image"
        )
    return fresh


def _merged(row: MeasuredRow | None, sums: SpeedSums, fresh: Iterable[LogSums], now: datetime) -> MeasuredRow:
    device, devices, cores, batch, workers, servers = sums.key
    old = row or MeasuredRow(
        device=device,
        devices=devices,
        cores=f"{cores:g}",
        batch_size=batch,
        workers=workers,
        parameter_servers=servers,
    )
    keep = _kept(old.last_seen, now)
    before = {"compute": old.compute, "pull": old.pull, "push": old.push, "step": old.step}
    after = {name: _pooled(was, part, keep) for (name, was), part in zip(before.items(), fresh, strict=True)}
    return old.model_copy(update={**after, "last_seen": stamp(now)})


def _pooled(old: LogMoments, fresh: LogSums, keep: float) -> LogMoments:
    """Mean and variance of both together (Chan, Golub, LeVeque 1979), the old ones with the weight that they keep."""
    if fresh.count <= 0:
        return old
    n, m = _number(old.count) * keep, min(float(fresh.count), MOST_STEPS)
    mean, other = _number(old.mean_log), fresh.mean
    total = n + m
    gap = other - mean
    variance = (n * _number(old.variance_log) + m * fresh.variance + gap * gap * n * m / total) / total
    was = _number(old.mean_seconds) or _lognormal(mean, _number(old.variance_log))
    seconds = (n * was + m * _seconds(fresh) / fresh.count) / total
    return LogMoments(
        mean_seconds=f"{seconds:.6g}",
        mean_log=f"{mean + gap * m / total:.6g}",
        variance_log=f"{variance:.6g}",
        count=f"{total:.6g}",
    )


def _seconds(sums: LogSums) -> float:
    """What the steps of the sums take together. An earlier trainer summed logarithms only."""
    return sums.seconds or sums.count * _lognormal(sums.mean, sums.variance)


def _lognormal(mean_log: float, variance: float) -> float:
    """The mean of the seconds where only their logarithms were summed."""
    return math.exp(min(mean_log, 50.0) + min(variance, 4.0) / 2)


def _add_loads(
    loads: dict[int, ServerLoad], merged: Mapping[str, str], shards: Sequence[ShardReport], now: datetime
) -> dict[str, str]:
    """Add to the loads what is new of all servers of a job; returns the sums that are merged then.

    Of a report without servers, which may lack one, they are those that were.
    """
    if not shards:
        return {name: text for name, text in merged.items() if name.startswith(_SHARD)}
    counts, number = dict[str, str](), len(shards)
    for shard in shards:
        name = _shard(shard)
        before = _numbers(merged.get(name, ""), 3)
        busy, updates, received = (
            max(0.0, value - old) for value, old in zip(_work(shard), before, strict=True)
        )
        counts[name] = " ".join(f"{value:.10g}" for value in _work(shard))
        if updates > 0:
            batches = shard.batches / shard.updates
            loads[number] = _loaded(loads.get(number), number, (busy, updates, received), batches, now)
    return counts


def _loaded(
    old: ServerLoad | None, number: int, fresh: tuple[float, float, float], batches: float, now: datetime
) -> ServerLoad:
    """The load with what is new of it, whose updates are of so many `batches` each; 0: its job does not tell."""
    known = old or ServerLoad(parameter_servers=number)
    before = _number(known.busy_seconds), _number(known.updates), _number(known.bytes)
    kept = [was * _kept(known.last_seen, now) for was in before]
    busy, updates, received = (was + more for was, more in zip(kept, fresh, strict=True))
    each = of_an_update([(kept[1], _number(known.batches_per_update)), (fresh[1], batches)])
    return ServerLoad(
        parameter_servers=number,
        busy_seconds=f"{busy:.6g}",
        updates=f"{updates:.6g}",
        bytes=f"{received:.6g}",
        batches_per_update=f"{each:.6g}",
        last_seen=stamp(now),
    )


def _of_lengths(status: SpeedProfileStatus) -> tuple[BesideSteps, ...]:
    """What passes beside steps by the length of epochs; all that an earlier version wrote is of the one it knew."""
    if status.beside_steps or status.beside is None:
        return status.beside_steps
    length = (status.model.samples_per_epoch if status.model else None) or 0
    return (status.beside.model_copy(update={"samples_per_epoch": length}),)


def _trained(of_length: BesideSteps, now: datetime) -> float:
    """Samples that were trained in epochs of this length, old ones with less weight."""
    return of_length.samples_per_epoch * _number(of_length.epochs) * _weight(of_length.last_seen, now)


def _passed(
    known: tuple[BesideSteps, ...], length: int, fresh: BesideSums, now: datetime
) -> tuple[BesideSteps, ...]:
    """What passes beside steps, with what is new of it in epochs of this length."""
    near = nearest(known, length)
    if near is not None and not length / ALIKE <= near.samples_per_epoch <= length * ALIKE:
        near = None
    others = sorted((each for each in known if each is not near), key=lambda each: each.last_seen)
    of_all = (*others[-MOST_LENGTHS + 1 :], _added(near, length, fresh, now))
    return tuple(sorted(of_all, key=lambda each: each.samples_per_epoch))


def _added(old: BesideSteps | None, length: int, fresh: BesideSums, now: datetime) -> BesideSteps:
    """What passes beside the steps of epochs of one length, with what is new of it."""
    keep = _weight(old.last_seen, now) if old else 0.0
    new = {
        "epochs": fresh.epochs,
        "others": fresh.others,
        "task_samples": fresh.tasks,
        "task_squares": fresh.tasks**2 / fresh.epochs,  # of several epochs, the mean is known
        "wait_samples": fresh.waits,
    }
    before = old or BesideSteps()
    sums = {name: f"{_number(getattr(before, name)) * keep + more:.6g}" for name, more in new.items()}
    return BesideSteps(samples_per_epoch=length, last_seen=stamp(now), **sums)


def _amounts(sums: BesideSums) -> tuple[float, float, float, float]:
    return float(sums.epochs), float(sums.others), sums.tasks, sums.waits


def _parse_beside(text: str) -> BesideSums:
    """The sums that were merged."""
    epochs, others, tasks, waits = _numbers(text, 4)
    return BesideSums(epochs=int(epochs), others=int(others), tasks=tasks, waits=waits)


def _model(known: MeasuredModel | None, report: StatusReport) -> MeasuredModel | None:
    if report.model is None:
        return known
    flops = report.model.flops_per_sample
    return MeasuredModel(
        fingerprint=report.model.fingerprint,
        flops_per_sample=(known.flops_per_sample if known else None) or (f"{flops:.6g}" if flops else None),
        precision=(known.precision if known else "") or report.model.precision,
        parameters=report.model.parameters,
        tensors=report.model.tensors or (known.tensors if known else 0),
        samples_per_epoch=report.data.total or (known.samples_per_epoch if known else None),
    )


def _work(shard: ShardReport) -> tuple[float, float, float]:
    return shard.busy_seconds, float(shard.updates), float(shard.bytes_received)


def _format(parts: Iterable[LogSums]) -> str:
    return " ".join(
        f"{part.count} {part.total:.10g} {part.squares:.10g} {part.seconds:.10g}" for part in parts
    )


def _parse(text: str) -> tuple[LogSums, ...]:
    """What `_format` wrote; of an operator before there was `step`, three parts."""
    numbers = _numbers(text + 4 * " 0" if len(text.split()) == 12 else text, 16)
    return tuple(
        LogSums(count=int(n), total=total, squares=squares, seconds=seconds)
        for n, total, squares, seconds in zip(*[iter(numbers)] * 4, strict=True)
    )


def _age(last_seen: str, now: datetime) -> timedelta:
    """How old a measurement is; 0 if its time is not known."""
    try:
        return max(now - datetime.fromisoformat(last_seen), timedelta())
    except (ValueError, TypeError):
        return timedelta()


def _kept(last_seen: str, now: datetime) -> float:
    """What a measurement of that time counts beside one that is made again, 0 to 1."""
    age = _age(last_seen, now)
    halves = max(min(age, CONTINUED) / MEASURED_AGAIN, min(age / FROM_JOB_TO_JOB, 1.0))
    return float(_weight(last_seen, now) * 0.5**halves)


def _weight(last_seen: str, now: datetime) -> float:
    """What a measurement of that time still counts, 0 to 1."""
    return priors.weight(_age(last_seen, now).total_seconds())
