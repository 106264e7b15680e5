"""The figures of the story, each from what was seen; None for what was not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dev.demo.pools.pace import alike, over_time, passed, slower
from dev.demo.pools.record import SETTLED_SECONDS, Moment

START_SECONDS = 6.0
WINDOW_SECONDS = 8.0
"""The speed of a job is measured over at least this long, with the same workers."""


def plan_changes(moments: Sequence[Moment]) -> list[dict[str, Any]]:
    """Each change of the counts that was decided, with its reason."""
    found, before = [], None
    for now in moments:
        if now.plan and now.plan != before:
            words = {"at": round(now.at, 1), "from": dict(before or ()), "to": dict(now.plan)}
            found.append({**words, "reason": now.reason})
            before = now.plan
    return found


def predicted_at_half(moments: Sequence[Moment]) -> float | None:
    """The finish that was predicted when half of the work was done, in seconds after the start."""
    half = (m for m in moments if m.progress is not None and m.progress >= 50 and m.remaining is not None)
    found = next(half, None)
    return None if found is None or found.remaining is None else found.at + found.remaining


def step_seconds(moments: Sequence[Moment]) -> dict[str, float]:
    """The mean time of a step by pool: what workers needed for their steps, without tasks and their waits.

    Of the times in which no worker came or went for a while, as the coordinator has it (`coordinator/speeds.py`): what
    a start takes of the machine that all share is not the speed of a pool.
    """
    seconds, steps = defaultdict[str, float](float), Counter[str]()
    for old, new, took in passed(_settled(moments)):
        seconds[new.pool] += took - (new.beside - old.beside)
        steps[new.pool] += new.steps - old.steps
    return {pool: seconds[pool] / n for pool, n in steps.items() if n and seconds[pool] >= WINDOW_SECONDS}


def throughput(moments: Sequence[Moment]) -> dict[str, float]:
    """Samples a second of one worker of each pool, over all the time that it trained."""
    seconds, samples = defaultdict[str, float](float), Counter[str]()
    for old, new, took in passed(moments):
        seconds[new.pool] += took
        samples[new.pool] += new.samples - old.samples
    return {pool: n / seconds[pool] for pool, n in samples.items() if seconds[pool] >= WINDOW_SECONDS}


def _settled(moments: Sequence[Moment]) -> Iterator[Moment]:
    """The moments since whose workers are the same as `SETTLED_SECONDS` ago; of the others, none of the workers."""
    since, team = 0.0, frozenset[tuple[int, int]]()
    for now in moments:
        if (workers := frozenset(worker.key for worker in now.workers)) != team:
            since, team = now.at, workers
        yield now if now.at - since >= SETTLED_SECONDS else replace(now, workers=())


def job_speed(moments: Sequence[Moment]) -> float | None:
    """Samples a second of the whole job while all its workers trained, after their start (a boot is faster).

    Not of the evaluation after the last step and the export.
    """
    training = [m for m in moments if m.progress is None or m.progress < 100]
    settled = [m for m in training if m.workers and all(w.settled for w in m.workers)]
    most = max((len(m.workers) for m in settled), default=0)
    full = [m for m in settled if len(m.workers) == most]
    full = [m for m in full if m.at >= full[0].at + START_SECONDS]
    if len(full) < 2 or full[-1].at - full[0].at < WINDOW_SECONDS:
        return None
    gained = sum(w.samples for w in full[-1].workers) - sum(w.samples for w in full[0].workers)
    return gained / (full[-1].at - full[0].at)


def errors(learned: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Learned over measured, less 1."""
    return {pool: round(learned[pool] / measured[pool] - 1, 3) for pool in measured if pool in learned}


def figures(
    moments: Sequence[Moment],
    *,
    deadline: float,
    finished: float | None,
    samples: float,
    learned: Mapping[str, float],
    cores: Mapping[str, float],
    on_demand: tuple[str, float],
    second: tuple[float | None, Sequence[Moment]],
) -> dict[str, Any]:
    """The content of build/demo-pools.json but for the seconds.

    What is of different minutes is compared at one pace of the machine (`pace.py`), and `asSeen` as it was.

    Args:
        moments: of the first job.
        deadline: seconds after its start.
        finished: when it was complete, in seconds after its start.
        samples: that it trained on.
        learned: seconds of a step of a worker alone, by pool, as predicted from the SpeedProfile.
        cores: of the machines of each pool.
        on_demand: the pool of on-demand machines, and their price per hour.
        second: the speed predicted for the second job before its first step, and its moments.

    """
    speeds, half = throughput(moments), predicted_at_half(moments)
    pool, price = on_demand
    rate = speeds.get(pool)
    cost = moments[-1].cost if moments else 0.0
    predicted, measured = second[0], job_speed(second[1])
    truth, paces = step_seconds(moments), dict[str, float]()
    steady, kind = list(_settled(moments)), alike(pool, cores)
    for name in truth:
        paces[name] = slower((steady, {name}), (steady, alike(name, cores)))
    at_pace = {name: seconds * paces[name] for name, seconds in truth.items()}
    job_pace = slower((moments, {pool}), (moments, kind))
    later = slower((steady, cores), (second[1], cores)) if predicted else 1.0
    only = None if rate is None else samples / rate * price / 3600
    only_at_pace = None if only is None else only * job_pace
    return {
        "deadlineSeconds": deadline,
        "deadlineKept": finished is not None and finished <= deadline,
        "finishPredictedAtHalf": None if half is None else round(half, 1),
        "finishActual": None if finished is None else round(finished, 1),
        "finishError": None if half is None or not finished else round(half / finished - 1, 3),
        "speedErrorByPool": errors(learned, at_pace),
        "samplesPerSecondByPool": {pool: round(found, 1) for pool, found in speeds.items()},
        "cost": round(cost, 4),
        "onDemandOnlyCost": None if only_at_pace is None else round(only_at_pace, 4),
        "costRatio": _ratio(cost, only_at_pace),
        "planChanges": plan_changes(moments),
        "secondJobPredicted": predicted,
        "secondJobMeasured": None if measured is None else round(measured, 1),
        "secondJobFirstPredictionError": _apart(predicted and predicted / later, measured),
        "asSeen": {
            "speedErrorByPool": errors(learned, truth),
            "costRatio": _ratio(cost, only),
            "secondJobFirstPredictionError": _apart(predicted, measured),
        },
        "machine": {"msOfAStep": over_time(moments), "ofTheSecondJob": over_time(second[1])},
    }


def _ratio(cost: float, only: float | None) -> float | None:
    return None if not only else round(cost / only, 3)


def _apart(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else round(abs(predicted / measured - 1), 3)


GOALS = (
    ("deadlineKept", "the deadline is kept", lambda f: f["deadlineKept"]),
    ("finishError", "the finish predicted at half is within 15 %", lambda f: _within(f["finishError"], 0.15)),
    (
        "speedErrorByPool",
        "learned speeds are within 10 % of those measured",
        lambda f: (
            bool(f["speedErrorByPool"]) and all(_within(e, 0.1) for e in f["speedErrorByPool"].values())
        ),
    ),
    ("costRatio", "the cost is at most 0.7 of on-demand alone", lambda f: _within(f["costRatio"], 0.7)),
    (
        "secondJobFirstPredictionError",
        "the second job is predicted within 15 % before its first step",
        lambda f: _within(f["secondJobFirstPredictionError"], 0.15),
    ),
)


def missed(found: Mapping[str, Any]) -> list[str]:
    """The goals that were not reached, in words."""
    return [f"missed: {words} ({name} is {found[name]})" for name, words, kept in GOALS if not kept(found)]


def _within(value: float | None, most: float) -> bool:
    return value is not None and abs(value) <= most
