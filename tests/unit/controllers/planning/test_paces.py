"""The present speeds of a job's workers, from successive reports."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.controllers.planning.paces import Paces
from shoal.sizing.fleet import Watched
from shoal.sizing.fleet.pace import NOISE, NOISE_SECONDS, pace_of, samples_per_second
from shoal.sizing.plan.problem import Pool, Problem, Servers
from shoal.sizing.plan.work import StepWork
from shoal.sizing.speed.servers import PsModel
from shoal_trainer.contract import Phase, ShardReport, StatusReport, WorkerReport, WorkerState
from tests.unit.controllers.planning.world import training_job

SLOTS = [*({"index": i, "incarnation": 0, "pool": "spot"} for i in range(3)), {"role": "ps", "index": 0}]
JOB = training_job(status={"slots": SLOTS})


def report(
    *samples: int,
    state: WorkerState = WorkerState.ACTIVE,
    incarnation: int = 0,
    batch: int = 1,
    ago: float = 0.0,
) -> StatusReport:
    workers = (
        WorkerReport(
            slot=i,
            incarnation=incarnation,
            state=state,
            steps=n // batch,
            samples=n,
            last_push_seconds=ago,
        )
        for i, n in enumerate(samples)
    )
    return StatusReport(job_uid="u", phase=Phase.TRAINING, workers=tuple(workers))


def sigma(seconds: float) -> float:
    """Of the logarithm of a speed that was watched for so long, as the plan takes it."""
    return NOISE * math.sqrt(NOISE_SECONDS / seconds)


@given(
    st.lists(st.floats(0.5, 20), min_size=30, max_size=60),
    st.floats(20, 1000),
    st.floats(0.25, 4),
)
def test_rate_is_that_of_the_last_minute_and_a_half(gaps: list[float], rate: float, factor: float) -> None:
    paces, now, samples = Paces(), 0.0, 1.0
    for turn in (1.0, factor):
        for gap in gaps:
            now, samples = now + gap, samples + gap * rate * turn
            found = paces.observe(JOB, report(int(samples)), now)
            assert paces.observe(JOB, report(int(samples)), now) == found  # read twice
        if sum(gaps) > 130:
            assert found.speeds["spot"] == [pytest.approx(rate * turn, rel=0.02)]
            assert 70 <= found.seconds <= 111


def test_start_of_a_worker_tells_nothing_and_a_new_one_is_not_known() -> None:
    paces = Paces()
    for second in range(0, 60, 5):
        fast_start = 5000 if second >= 5 else 1
        found = paces.observe(JOB, report(fast_start + 100 * second), float(second))
        assert found.seconds == (second - 10 if second >= 20 else 0)
    assert found.speeds == {"spot": [pytest.approx(100.0)]}
    assert paces.observe(JOB, report(9, incarnation=1), 62.0) == Watched()
    assert paces.observe(JOB, None, 63.0) == Watched()


def test_silent_and_unknown_workers_and_a_restarted_coordinator_count_for_nothing() -> None:
    paces = Paces()
    for second in range(0, 120, 10):
        assert (
            paces.observe(JOB, report(1 + 50 * second, state=WorkerState.SILENT), float(second)) == Watched()
        )
        assert paces.observe(JOB, report(0, 0, 0, 1 + 50 * second), float(second)) == Watched()
    paces = Paces()
    for second in range(0, 60, 5):
        paces.observe(JOB, report(1 + 100 * second), float(second))
    assert paces.observe(JOB, report(7), 60.0) == Watched()  # never a negative rate


def test_counts_of_a_coordinator_that_began_anew_are_none_of_the_one_before_it() -> None:
    """They may be higher, where it had begun just before: 100 samples/s were 33, or thousands."""
    paces = Paces()
    for life, first, began in (("a", 1, 0), ("b", 9_000, 60)):
        for second in range(0, 40, 5):
            told = report(first + 100 * second).model_copy(update={"speed_epoch": life})
            found = paces.observe(JOB, told, float(began + second))
            assert found.seconds == (second - 10 if second >= 20 else 0)
        assert found.speeds == {"spot": [pytest.approx(100.0)]}


def test_time_in_tasks_slows_no_pace() -> None:
    """An evaluation of 200 s after each 100 s of training."""
    paces = Paces()
    now, trained, beside = 0.0, 1.0, 0.0
    for second in range(0, 900, 5):
        evaluates = second % 300 >= 100
        now += 5.0
        trained += 0.0 if evaluates else 500.0
        beside += 5.0 if evaluates else 0.0
        said = report(int(trained))
        worker = replace(said.workers[0], beside_seconds=beside)
        found = paces.observe(JOB, said.model_copy(update={"workers": (worker,)}), now)
    assert found.speeds == {"spot": [pytest.approx(100.0)]}


@pytest.mark.parametrize("step", [0.05, 0.5, 5.0, 20.0, 60.0, 150.0, 600.0])
@pytest.mark.parametrize("tells", [True, False])
def test_the_speed_is_from_push_to_push_however_long_a_step_takes(step: float, tells: bool) -> None:
    """Steps of 60 s were 1.5 times as fast in one look and stood in the next, each time give or take 2 %.

    Of a coordinator of an earlier version the times of pushes are known to be before its reports only.
    """
    chance = random.Random(step)
    paces, at, phase, looks = Paces(), 0.0, chance.random() * step, 0
    while at < 30 * step + 300:
        at += chance.choice([2.0, 5.0, 15.0, 25.0])
        pushes = int((at + phase) // step)
        ago = at + phase - pushes * step if tells else 0.0
        found = paces.observe(JOB, report(128 * pushes, batch=128, ago=ago), at)
        if at > 4 * step + 60:
            looks += 1
            (speed,) = found.speeds["spot"]
            off = abs(math.log(speed * step / 128))
            assert off < (0.01 if tells else 3 * sigma(found.seconds))
            assert found.seconds <= 0.5 * (12 + 115 / step), "few steps tell little"
    assert looks > 10


@pytest.mark.parametrize(("step", "several"), [(0.5, 32), (1.0, 8), (2.0, 32), (4.0, 16)])
def test_a_steady_worker_that_pushes_several_batches_at_once_is_not_slower_between_pushes(
    step: float, several: int
) -> None:
    """What is longer than a batch was taken for a stall: of batches of 2 s, 32 a push, up to a third of the speed."""
    paces, speeds = Paces(), []
    for at in range(0, 3600, 5):
        pushes, ago = divmod(at, step * several)
        batches = int(pushes) * several
        found = paces.observe(JOB, report(16 * batches, batch=16, ago=ago), float(at))
        speeds += found.speeds.get("spot", [])
    assert len(speeds) > 500
    assert speeds == [pytest.approx(16 / step)] * len(speeds)


def test_fewer_than_three_pushes_are_no_watch() -> None:
    paces = Paces()
    for number in range(1, 5):
        found = paces.observe(JOB, report(number, ago=1.0), 40.0 * number)
        assert bool(found.speeds) == (number == 4), "the first one marks the begin, and two more are one step"


def test_a_worker_that_stands_gets_slower_and_does_not_vanish() -> None:
    """It was left out once nothing of it was in the window: the others' speed was that of all."""
    paces, speeds = Paces(), []
    for second in range(0, 500, 5):
        moving, stands = 1 + 100 * second, 1 + 100 * min(second, 200)
        ago = 0.05
        said = report(moving, stands, batch=10, ago=ago)
        last = replace(said.workers[1], last_push_seconds=max(second - 200, 0) + ago)
        found = paces.observe(
            JOB, said.model_copy(update={"workers": (said.workers[0], last)}), float(second)
        )
        if second > 150:
            speeds.append(sorted(found.speeds["spot"]))
    assert speeds[5] == [pytest.approx(100, rel=0.02)] * 2
    assert speeds[-1] == [pytest.approx(100 * 90 / 390, rel=0.1), pytest.approx(100, rel=0.02)]
    slow = [each[0] for each in speeds]
    assert slow == sorted(slow, reverse=True)


def test_a_push_before_a_task_is_no_time_of_training_later() -> None:
    """Its time and the task's are on one clock, which does not run back."""
    paces, beside = Paces(), 0.0
    for number in range(1, 40):
        beside += 30.0
        now = 70.0 * number
        said = report(128 * number, batch=128, ago=5.0)
        worker = replace(said.workers[0], beside_seconds=beside)
        found = paces.observe(JOB, said.model_copy(update={"workers": (worker,)}), now)
    assert found.speeds == {"spot": [pytest.approx(128 / 40)]}


@given(
    st.integers(1, 40),
    st.integers(3, 12),
    st.integers(20, 90),
    st.sampled_from([20, 45, 60]),
    st.integers(0, 59),
)
def test_a_task_between_two_looks_dates_no_push(
    step: int, steps: int, evaluates: int, every: int, offset: int
) -> None:
    """What passed in it was taken from the time since the push, which is without it."""
    paces, speeds = Paces(), []
    for look in range(120):
        at = offset + every * look
        cycles, inside = divmod(at, steps * step + evaluates)
        trained = min(inside, steps * step)
        done = trained // step
        said = report(32 * (cycles * steps + done), batch=32, ago=float(trained - done * step))
        worker = replace(said.workers[0], beside_seconds=float(cycles * evaluates + inside - trained))
        found = paces.observe(JOB, said.model_copy(update={"workers": (worker,)}), float(at))
        speeds += found.speeds.get("spot", [])
    assert speeds == [pytest.approx(32 / step)] * len(speeds)
    assert len(speeds) > 50


def test_workers_that_have_just_begun_to_push_shared_the_servers_for_as_long() -> None:
    """Where servers bend the sum, three workers that were one are as slow as predicted, from the first push."""
    paces, one = Paces(), Problem(
        (Pool("spot", 3, 1.0, 1.0, 100, running=3),), StepWork(samples=1e6), servers=Servers((1,), model=PsModel(1.0))
    )  # fmt: skip
    errors, samples = [], [1.0, 0.0, 0.0]
    for second in range(0, 400, 5):
        pushing = 1 if second < 200 else 3
        pushed = [pushing > number for number in range(3)]
        each = samples_per_second(one, [pushing]) / pushing
        samples = [n + 5 * each * pushes for n, pushes in zip(samples, pushed, strict=True)]
        found = paces.observe(JOB, report(*(int(n) for n in samples)), float(second))
        if pace := pace_of(one, found):
            errors.append(pace.error)
        if second >= 300:
            assert found.company == {"spot": pytest.approx(3.0)}
    assert len(errors) > 70
    assert max(map(abs, errors)) < 0.15


@pytest.mark.parametrize("late", [(1e6, 1e6), (0.0, 1e6), (15.0, 15.0), (30.0, 30.0)])
def test_time_beside_steps_that_is_told_late_takes_no_worker_from_the_company(
    late: tuple[float, float],
) -> None:
    """A coordinator that begins again hears it at the first heartbeat: for so long the job was not planned."""
    paces, one = Paces(), Problem((Pool("spot", 3, 1.0, 1.0, 100, running=2),), StepWork(samples=1e6))
    for second in range(200):
        said = report(1 + second, 1 + second)
        beside = late if second >= 30 else (0.0, 0.0)
        workers = (replace(each, beside_seconds=b) for each, b in zip(said.workers, beside, strict=True))
        found = paces.observe(JOB, said.model_copy(update={"workers": tuple(workers)}), 1000.0 + second)
        assert all(0 <= count <= 2 for count in found.company.values())
        assert bool(found.speeds) == (pace_of(one, found) is not None)
    assert found.company == {"spot": pytest.approx(2.0, abs=0.2)}
    assert len(found.speeds["spot"]) == 2, "which are watched again"


def test_workers_that_wait_for_a_parameter_server_are_not_slow() -> None:
    """Within five minutes in which server 1 was replaced, eight workers were planned to be 28."""
    paces, rates = Paces(), []
    for second in range(0, 900, 5):
        away = 300 < second <= 600
        trained = min(second, 300) + max(0, second - 600)
        shards = (ShardReport(index=0, epoch=0), ShardReport(index=1, epoch=0, ready=not away))
        said = report(1 + 100 * trained, ago=second - 300.0 if away else 0.0)
        found = paces.observe(JOB, said.model_copy(update={"shards": shards}), float(second))
        assert not (away and found.speeds), "what was seen last holds"
        rates += found.speeds.get("spot", [])
    assert len(rates) > 100
    assert rates == [pytest.approx(100.0)] * len(rates)
