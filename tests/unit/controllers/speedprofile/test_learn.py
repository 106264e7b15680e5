"""What a SpeedProfile learns: each step once, however the reports arrive, and old ones less."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api.speed_profile import (
    MOST_LENGTHS,
    MOST_ROWS,
    MOST_SOURCES,
    LogMoments,
    SpeedProfile,
    SpeedProfileStatus,
)
from shoal.controllers.speedprofile.learn import forget, learn, moved
from shoal.errors import UsageError
from shoal.sizing.fleet.resources import beside_of, profile_of
from shoal.sizing.speed import measurements, priors
from shoal.sizing.speed.model import SpeedModel
from shoal_trainer.contract import (
    MAX_SPEEDS,
    BesideSums,
    DataReport,
    LogSums,
    ModelReport,
    Phase,
    ShardReport,
    SpeedSums,
    StatusReport,
)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MODEL = ModelReport(fingerprint="f" * 64, parameters=1000, tensors=4, flops_per_sample=1e6)


def sums(*seconds: float) -> LogSums:
    logs = [math.log(each) for each in seconds]
    return LogSums(
        count=len(logs), total=sum(logs), squares=sum(each * each for each in logs), seconds=sum(seconds)
    )


def report(
    *compute: float, life: str = "a", workers: int = 2, batch: int = 16, boot: int = 1
) -> StatusReport:
    speed = SpeedSums(
        device="T4",
        devices=1,
        cores=4,
        batch_size=batch,
        workers=workers,
        servers=1,
        compute=sums(*compute),
        pull=sums(*(0.1 * each for each in compute)),
        push=sums(*(0.2 * each for each in compute)),
        step=sums(*(1.2 * each for each in compute)),
    )
    shard = ShardReport(
        index=0, epoch=0, boot=boot, busy_seconds=0.01 * len(compute), updates=len(compute), bytes_received=7
    )
    return StatusReport(
        job_uid="u", phase=Phase.TRAINING, model=MODEL, speed=(speed,), speed_epoch=life, shards=(shard,)
    )


def pushed(updates: int, batches: int = 0, boot: int = 1) -> StatusReport:
    """What a server reports that was busy for 10 ms with each update; without `batches`, as an earlier version."""
    shard = ShardReport(
        index=0, epoch=0, boot=boot, busy_seconds=updates / 100, updates=updates, batches=batches
    )
    return StatusReport(job_uid="u", phase=Phase.TRAINING, model=MODEL, speed_epoch="a", shards=(shard,))


times = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)


def test_batches_of_an_update_are_learned_beside_what_it_costs() -> None:
    status = SpeedProfileStatus()
    for updates in (100, 300):
        status = learn(status, "one", pushed(updates, 10 * updates), NOW)
    (load,) = status.server_load
    assert (load.busy_seconds, load.updates, load.batches_per_update) == ("3", "300", "10")
    profile = profile_of(SpeedProfile(metadata={"name": "p"}, status=status), NOW)
    assert profile is not None
    assert profile.server_load[1] == measurements.ServerLoad(3, 300, 0, 10)


def test_updates_before_an_upgrade_are_of_as_many_batches_as_those_after_it() -> None:
    """They were taken for one each: after a month, servers were planned with a tenth of what they do for weeks."""
    status = learn(SpeedProfileStatus(), "one", pushed(2_000_000), NOW)
    assert status.server_load[0].batches_per_update == "0"
    (load,) = learn(status, "two", pushed(100, 1000, boot=2), NOW).server_load
    assert (load.busy_seconds, load.updates, load.batches_per_update) == ("20001", "2.0001e+06", "10")
    (load,) = learn(status, "one", pushed(2_000_100, 20_001_000), NOW).server_load
    assert load.batches_per_update == "10", "its servers have told all along, and the operator is new"


def test_few_jobs_of_many_batches_an_update_do_not_say_what_one_is_of() -> None:
    """One with a hundred beside one with one made 50 of both."""
    status = learn(SpeedProfileStatus(), "one", pushed(1000, 100_000), NOW)
    (load,) = learn(status, "two", pushed(1000, 1000, boot=2), NOW).server_load
    assert float(load.batches_per_update) == pytest.approx(2, rel=0.02)


@given(times, st.data())
def test_it_does_not_matter_which_reports_were_read(seconds: list[float], data: st.DataObject) -> None:
    """Reports are cumulative: all of them, some, or the last alone give the same profile."""
    read = data.draw(st.sets(st.integers(1, len(seconds))))
    status = SpeedProfileStatus()
    for number in sorted(read | {len(seconds)}):
        status = learn(status, "job", report(*seconds[:number]), NOW)
        status = learn(status, "job", report(*seconds[:number]), NOW)  # read twice
    [row] = status.rows
    logs = np.log(seconds)
    assert float(row.compute.count) == len(seconds)
    assert float(row.compute.mean_log) == pytest.approx(logs.mean(), abs=1e-3)
    assert float(row.compute.variance_log) == pytest.approx(logs.var(), rel=1e-2, abs=1e-3)
    assert float(row.push.mean_log) == pytest.approx(logs.mean() + math.log(0.2), abs=1e-3)
    assert float(row.compute.mean_seconds) == pytest.approx(np.mean(seconds), rel=1e-4)
    [load] = status.server_load
    assert float(load.updates) == len(seconds)


@given(times, st.booleans())
def test_sums_without_seconds_have_the_mean_of_their_logarithms(seconds: list[float], known: bool) -> None:
    """Of an earlier trainer, or a row that an earlier operator wrote."""
    old = report(*seconds)
    bare = sums(*seconds).model_copy(update={"seconds": 0.0})
    old = old.model_copy(update={"speed": tuple(s.model_copy(update={"compute": bare}) for s in old.speed)})
    status = learn(SpeedProfileStatus(), "old", old, NOW)
    if known:
        status = learn(status, "new", report(1.0), NOW)
    found = float(status.rows[0].compute.mean_seconds)
    logs = np.log(seconds)
    lognormal = float(np.exp(logs.mean() + min(logs.var(), 4.0) / 2))
    expected = (lognormal * len(seconds) + 1.0) / (len(seconds) + 1) if known else lognormal
    assert found == pytest.approx(expected, rel=1e-3)


@given(times, times)
def test_coordinator_that_begins_again_is_added(before: list[float], after: list[float]) -> None:
    status = learn(SpeedProfileStatus(), "job", report(*before), NOW)
    status = learn(status, "job", report(*after, life="b", boot=2), NOW)
    assert float(status.rows[0].compute.count) == len(before) + len(after)
    assert float(status.server_load[0].updates) == len(before) + len(after)


def test_jobs_of_one_model_are_merged_and_configurations_are_kept_apart() -> None:
    status = learn(SpeedProfileStatus(), "one", report(1.0, 1.0), NOW)
    status = learn(status, "two", report(2.0, 2.0), NOW)
    assert [float(row.compute.count) for row in status.rows] == [4]
    status = learn(status, "two", report(2.0, workers=8), NOW)
    assert [(row.workers, float(row.compute.count)) for row in status.rows] == [(2, 4), (8, 1)]
    assert (status.row_count, status.devices) == (2, "T4")


def test_old_measurements_count_half_after_the_half_life_and_half_of_it_beside_new_ones() -> None:
    status = learn(SpeedProfileStatus(), "one", report(*[1.0] * 100), NOW)
    status = learn(status, "two", report(*[math.e] * 50), NOW + timedelta(seconds=priors.HALF_LIFE))
    [row] = status.rows
    assert float(row.compute.count) == pytest.approx(75)
    assert float(row.compute.mean_log) == pytest.approx(2 / 3, abs=1e-4)


def test_a_row_follows_a_change_within_a_day_however_many_steps_it_has_seen() -> None:
    """A month of 0.1 s and a day of 0.2 s, since the image changed, were 0.1016 s, give or take 3 %."""
    status, total, now, seen = SpeedProfileStatus(), LogSums(), NOW, dict[float, float]()
    [row] = report(1.0, workers=8).speed
    for minute in range(0, 8 * 24 * 60, 10):
        seconds = 0.1 if minute < 7 * 24 * 60 else 0.2
        count, log = round(8 * 600 / seconds), math.log(seconds)
        total = LogSums(
            count=total.count + count,
            total=total.total + count * log,
            squares=total.squares + count * log**2,
            seconds=total.seconds + count * seconds,
        )
        speed = row.model_copy(update={"compute": total, "pull": LogSums(), "push": LogSums(), "step": total})
        now += timedelta(minutes=10)
        status = learn(status, "job", report(1.0).model_copy(update={"speed": (speed,)}), now)
        seen[minute / 60 - 7 * 24] = math.exp(float(status.rows[0].step.mean_log))
    assert seen[-1] == pytest.approx(0.1, rel=1e-4)
    assert seen[4] == pytest.approx(0.126, rel=0.05)
    assert max(seen.values()) == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize(("minutes", "hours"), [(10, 24), (20, 24), (60, 24), (20, 3)])
def test_a_row_and_the_load_of_servers_follow_short_jobs_in_days_too(minutes: int, hours: int) -> None:
    """After a new image in the 61st night, jobs of 20 minutes were half of the old one after two weeks."""
    status, days = SpeedProfileStatus(), dict[int, tuple[float, float]]()
    for job in range(70 * 24 // hours):
        day = job * hours // 24 - 60
        seconds = 0.1 if day < 0 else 0.2
        for minute in range(10, minutes + 1, 10):
            count = round(60 * minute / seconds)
            steps = LogSums(
                count=count,
                total=count * math.log(seconds),
                squares=count * math.log(seconds) ** 2,
                seconds=count * seconds,
            )
            said = report(1.0, life=f"{job}", boot=job)
            (row,), (shard,) = said.speed, said.shards
            row = row.model_copy(update=dict.fromkeys(("compute", "pull", "push", "step"), steps))
            shard = shard.model_copy(update={"busy_seconds": count * seconds, "updates": count})
            said = said.model_copy(update={"speed": (row,), "shards": (shard,)})
            status = learn(status, f"{job}", said, NOW + timedelta(hours=hours * job, minutes=minute))
        status = forget(status, [f"{job}"])
        (load,) = status.server_load
        days[day] = float(status.rows[0].step.mean_seconds), float(load.busy_seconds) / float(load.updates)
    assert days[-1] == pytest.approx((0.1, 0.1), rel=1e-4)
    assert min(days[0]) > 0.13
    assert min(days[3]) > 0.18
    assert min(days[7]) == pytest.approx(0.2, rel=0.02)


def test_what_was_measured_counts_no_more_after_a_longer_gap() -> None:
    """After eleven minutes it counted more than after ten."""
    counts = list[float]()
    for minutes in (1, 5, 10, 11, 30, 60, 61, 600, 1440, 7 * 1440):
        status = learn(SpeedProfileStatus(), "one", report(*[1.0] * 1000), NOW)
        status = learn(status, "two", report(1.0), NOW + timedelta(minutes=minutes))
        counts.append(float(status.rows[0].compute.count))
    assert counts == sorted(counts, reverse=True)


def test_nothing_new_is_the_same_status() -> None:
    status = learn(SpeedProfileStatus(), "one", report(1.0), NOW)
    assert learn(status, "one", report(1.0), NOW + timedelta(hours=1)) is status


def test_rows_are_bounded_and_the_oldest_goes() -> None:
    status = SpeedProfileStatus()
    for number in range(MOST_ROWS + 3):
        at = NOW + timedelta(seconds=number)
        status = learn(
            forget(status, {f"job-{number - 100}"}), f"job-{number}", report(1.0, batch=number + 1), at
        )
    assert status.row_count == len(status.rows) == MOST_ROWS
    assert len(status.sources) == 100
    assert {1, 2, 3}.isdisjoint(row.batch_size for row in status.rows)
    assert len(forget(status, {status.sources[0].uid}).sources) == 99


def test_only_an_estimate_that_moved_is_worth_a_write() -> None:
    old = learn(SpeedProfileStatus(), "one", report(*[1.0, 1.1] * 200), NOW)
    same = learn(old, "one", report(*[1.0, 1.1] * 201), NOW)
    assert moved(SpeedProfileStatus(), old)
    assert same != old
    assert not moved(old, same)
    assert moved(old, learn(old, "two", report(*[1.5] * 100), NOW))


def test_edited_source_is_not_an_error() -> None:
    """Someone may edit the status by hand."""
    status = learn(SpeedProfileStatus(), "one", report(1.0), NOW)
    broken = status.sources[0].model_copy(update={"counts": {"T4/1/4/16/2/1": "garbage"}})
    status = learn(status.model_copy(update={"sources": (broken,)}), "one", report(1.0, 1.0), NOW)
    assert float(status.rows[0].compute.count) == 3


@pytest.mark.parametrize(
    "text", ["", "garbage", "1 2", *(" ".join([word] * n) for word in ("nan", "inf") for n in (3, 4, 12))]
)
def test_whatever_was_edited_the_next_report_is_learned(text: str) -> None:
    status = learn(SpeedProfileStatus(), "one", beside_report(1), NOW)
    counts = dict.fromkeys(status.sources[0].counts, text)
    source = status.sources[0].model_copy(update={"counts": counts})
    (beside,) = status.beside_steps
    beside = beside.model_copy(update={"task_samples": text, "wait_samples": text})
    moments = LogMoments(count=text, mean_log=text, variance_log=text, mean_seconds=text)
    rows = (status.rows[0].model_copy(update={"compute": moments}),)
    load = status.server_load[0].model_copy(update={"busy_seconds": text, "updates": text, "bytes": text})
    edited = status.model_copy(
        update={"sources": (source,), "beside_steps": (beside,), "rows": rows, "server_load": (load,)}
    )
    learned = learn(edited, "one", beside_report(2), NOW)
    assert moved(edited, learned)
    assert float(learned.rows[0].compute.mean_log) == pytest.approx(math.log(0.1), abs=1e-5)
    assert float(learned.server_load[0].updates) == 1
    (beside,) = learned.beside_steps
    assert (float(beside.task_samples), float(beside.wait_samples)) == (60.0, 40.0)


def test_shares_of_a_core_are_rows_of_their_own() -> None:
    def at(cores: float, seconds: float) -> StatusReport:
        found = report(seconds, seconds)
        return found.model_copy(update={"speed": (found.speed[0].model_copy(update={"cores": cores}),)})

    status = learn(SpeedProfileStatus(), "fast", at(0.3, 0.1), NOW)
    status = learn(status, "slow", at(0.15, 0.2), NOW)
    assert [(row.cores, float(row.compute.mean_log)) for row in status.rows] == [
        ("0.15", pytest.approx(math.log(0.2), abs=1e-4)),
        ("0.3", pytest.approx(math.log(0.1), abs=1e-4)),
    ]
    again = SpeedProfileStatus.model_validate_json(status.model_dump_json(by_alias=True))
    assert learn(again, "slow", at(0.15, 0.2), NOW) is again


def test_whole_cores_of_an_earlier_version_are_read() -> None:
    stored = {"device": "T4", "cores": 4, "batchSize": 16, "workers": 2, "parameterServers": 1}
    status = learn(SpeedProfileStatus.model_validate({"rows": [stored]}), "job", report(0.1), NOW)
    assert [row.cores for row in status.rows] == ["4"]


def test_one_odd_step_of_a_rare_configuration_moves_no_estimate() -> None:
    """With two workers 1,000 steps of about 0.1 s, and a single one of 0.2 s while there were three."""
    steps = [0.08, 0.1, 0.12] * 333
    status = learn(SpeedProfileStatus(), "a", report(*steps), NOW)
    [before, after] = [
        SpeedModel([profile]).worker(profile.model, "T4", 1, 4, 16).seconds
        for each in (status, learn(status, "b", report(0.2, workers=3), NOW))
        if (
            profile := profile_of(
                SpeedProfile.model_validate({"metadata": {"name": "m"}}).model_copy(update={"status": each}),
                NOW,
            )
        )
        is not None
    ]
    assert after == pytest.approx(before, rel=0.02)


def test_sums_of_an_operator_that_knew_no_whole_steps_count_once() -> None:
    first = learn(SpeedProfileStatus(), "job", report(0.1, 0.2), NOW)
    (source,) = first.sources
    counts = {
        name: text if name.startswith("shard/") else " ".join(text.split()[:12])
        for name, text in source.counts.items()
    }
    old = first.model_copy(update={"sources": (source.model_copy(update={"counts": counts}),)})
    (row,) = learn(old, "job", report(0.1, 0.2, 0.3), NOW).rows
    assert row.compute.count == "3"


def test_what_was_learned_of_a_large_model_is_read_by_the_planner() -> None:
    """`%g` writes 2.41664e+06: the sign is part of a decimal."""
    model = MODEL.model_copy(update={"flops_per_sample": 2_416_640.0})
    said = report(0.1, 0.2).model_copy(update={"model": model})
    status = learn(SpeedProfileStatus(), "job", said, NOW)
    assert status.model is not None
    assert status.model.flops_per_sample == "2.41664e+06"
    found = profile_of(
        SpeedProfile.model_validate({"metadata": {"name": "m"}}).model_copy(update={"status": status}), NOW
    )
    assert found is not None
    assert found.model.flops == 2_416_640.0
    assert len(found.rows) == 1


def beside_report(epochs: int, life: str = "a", length: int = 1000) -> StatusReport:
    """A report after so many epochs of two workers: tasks of 30 samples and waits of 20 in each."""
    told = BesideSums(epochs=epochs, others=epochs, tasks=30.0 * epochs, waits=20.0 * epochs)
    return report(0.1, life=life).model_copy(update={"beside": told, "data": DataReport(total=length)})


def beside_in(status: SpeedProfileStatus) -> list[tuple[int, float, float]]:
    """Length, number and tasks of the epochs that were measured."""
    return [
        (each.samples_per_epoch, float(each.epochs), float(each.task_samples)) for each in status.beside_steps
    ]


def test_jobs_of_one_model_on_other_data_learn_apart() -> None:
    """A smoke run on 2,000 samples made the epochs of a job on a million 500 times shorter, for all of its plans."""
    status = learn(SpeedProfileStatus(), "whole", beside_report(4, length=1_000_000), NOW)
    for _ in range(2):
        status = learn(status, "smoke", beside_report(9, length=2_000), NOW)
        assert beside_in(status) == [(2_000, 9, 270), (1_000_000, 4, 120)]
        assert status.model is not None
        assert status.model.samples_per_epoch == 1_000_000, "most was trained in these"
    grown = learn(status, "next day", beside_report(1, length=1_010_000), NOW)
    assert beside_in(grown) == [(2_000, 9, 270), (1_010_000, 5, 150)]
    for length in (1_500, 900_000):
        found = beside_of(status, length)
        assert found is not None
        assert (found.per_epoch, found.tasks, found.seen) == (length, 30, 9 if length == 1_500 else 4)


def test_epochs_that_were_learned_without_their_length_are_read_and_are_of_the_length_that_was_known() -> (
    None
):
    earlier = {"model": {"samplesPerEpoch": 1_000}, "beside": {"epochs": "4", "taskSamples": "120"}}
    status = SpeedProfileStatus.model_validate(earlier)
    found = beside_of(status, 2_000)
    assert found is not None
    assert (found.tasks, found.seen) == (30, 4)
    status = learn(status, "job", beside_report(1, length=1_000), NOW)
    assert beside_in(status) == [(1_000, 5, 150)]


def test_an_earlier_version_or_crd_finds_what_passed_beside_steps_in_the_form_that_it_knows() -> None:
    """After a rollback nothing was known of tasks and waits; beside an older CRD, after each start."""
    status = SpeedProfileStatus()
    for job, epochs, length in (("smoke", 9, 2_000), ("whole", 4, 1_000_000), ("whole", 5, 1_000_000)):
        status = learn(status, job, beside_report(epochs, length=length), NOW)
    assert beside_in(status) == [(2_000, 9, 270), (1_000_000, 5, 150)]
    assert status.beside == status.beside_steps[1], "most was trained in these"
    pruned = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    del pruned["besideSteps"], pruned["beside"]["samplesPerEpoch"]
    back = SpeedProfileStatus.model_validate(pruned)
    found = beside_of(back, 1_000_000)
    assert found is not None
    assert (found.tasks, found.seen) == (30, 5)
    again = learn(back, "whole", beside_report(6, length=1_000_000), NOW)
    assert beside_in(again) == [(1_000_000, 6, 180)], "once more, and each once"


def test_lengths_of_epochs_are_bounded_and_the_one_that_was_not_seen_for_longest_goes() -> None:
    status = SpeedProfileStatus()
    for number in range(MOST_LENGTHS + 2):
        now = NOW + timedelta(seconds=number)
        status = learn(status, f"{number}", beside_report(1, length=1_000 * 2**number), now)
    assert [length for length, *_ in beside_in(status)] == [1_000 * 2**n for n in range(2, MOST_LENGTHS + 2)]


@given(st.sets(st.integers(1, 9)))
def test_what_passes_beside_steps_counts_once_whichever_reports_were_read(read: set[int]) -> None:
    status = SpeedProfileStatus()
    for epochs in [*sorted(read | {9}), 9]:
        status = learn(status, "job", beside_report(epochs), NOW)
    again = learn(status, "job", beside_report(1, life="b"), NOW)
    for found, epochs in ((status, 9), (again, 10)):
        (beside,) = found.beside_steps
        assert float(beside.epochs) == float(beside.others) == epochs
        assert (float(beside.task_samples), float(beside.wait_samples)) == (
            30.0 * epochs,
            20.0 * epochs,
        )


def test_a_task_counts_with_the_next_epoch_and_old_epochs_count_less() -> None:
    status = learn(SpeedProfileStatus(), "job", beside_report(2), NOW)
    midway = beside_report(2).model_copy(
        update={"beside": BesideSums(epochs=2, others=2, tasks=85.0, waits=40.0)}
    )
    assert learn(status, "job", midway, NOW) == status
    later = learn(status, "other", beside_report(1), NOW + timedelta(seconds=priors.HALF_LIFE))
    (beside,) = later.beside_steps
    assert float(beside.epochs) == pytest.approx(2.0)
    assert float(beside.task_samples) == pytest.approx(60.0)


def test_epochs_that_differ_are_told_from_those_that_are_alike() -> None:
    """Whether a report has one epoch more, or two."""
    per_epoch = (20.0, 40.0, 30.0, 10.0, 50.0, 30.0)
    for steps in ((1, 2, 3, 4, 5, 6), (1, 3, 4, 6)):
        status = SpeedProfileStatus()
        for epochs in steps:
            told = BesideSums(epochs=epochs, others=epochs, tasks=sum(per_epoch[:epochs]))
            said = report(0.1).model_copy(update={"beside": told, "data": DataReport(total=1000)})
            status = learn(status, "job", said, NOW)
        differing = beside_of(status, 1000)
        assert differing is not None
        assert 0.25 < differing.sigma < 0.45
    alike = beside_of(learn(SpeedProfileStatus(), "job", beside_report(60), NOW), 1000)
    assert alike is not None
    assert alike.sigma < 0.05


def test_of_more_jobs_than_can_be_remembered_nothing_counts_twice() -> None:
    status = SpeedProfileStatus()
    for _ in range(3):
        for job in range(MOST_SOURCES + 2):
            status = learn(status, f"job-{job}", report(0.1, 0.2), NOW)
    (row,) = status.rows
    assert float(row.compute.count) == 2 * MOST_SOURCES
    status = learn(forget(status, {"job-0"}), f"job-{MOST_SOURCES}", report(0.1, 0.2), NOW)
    assert float(status.rows[0].compute.count) == 2 * (MOST_SOURCES + 1), "there is room again"


def test_a_profile_of_many_jobs_fits_into_etcd() -> None:
    sums = LogSums(count=123_456, total=-284_123.456789, squares=653_123.456789, seconds=12_345.6789)
    status, whole = SpeedProfileStatus(), report(0.1)
    speed = tuple(
        whole.speed[0].model_copy(
            update={
                "workers": n + 1,
                "cores": 7.91,
                "compute": sums,
                "pull": sums,
                "push": sums,
                "step": sums,
            }
        )
        for n in range(MAX_SPEEDS)
    )
    for _ in range(2):
        for job in range(MOST_SOURCES):
            said = whole.model_copy(update={"speed": speed})
            status = learn(status, f"0a1b2c3d-1111-2222-3333-{job:012d}", said, NOW)
    assert len(status.model_dump_json(by_alias=True)) < 1.2e6
    assert sum(len(source.counts) for source in status.sources) >= 3000 - MAX_SPEEDS
    row = status.rows[0]
    learned = sum(any(f"/{row.workers}/" in name for name in source.counts) for source in status.sources)
    assert float(row.compute.count) == pytest.approx(123_456 * learned, rel=1e-3)


def many(seconds: float, count: int, life: str = "a", workers: int = 2) -> StatusReport:
    """So many steps of the same time."""
    said, log = report(seconds, life=life, workers=workers), math.log(seconds)
    part = LogSums(count=count, total=count * log, squares=count * log**2, seconds=count * seconds)
    parts = dict.fromkeys(("compute", "pull", "push", "step"), part)
    return said.model_copy(update={"speed": (said.speed[0].model_copy(update=parts),)})


HOUR = timedelta(hours=1)


def test_steps_that_take_longer_than_the_job_exists_are_refused_and_nothing_of_the_report_counts() -> None:
    """A million years of steps outweighed days of honest measuring."""
    status = learn(SpeedProfileStatus(), "honest", many(0.1, 36_000), NOW, NOW - HOUR)
    with pytest.raises(
        UsageError, match="measured steps of 30,000,000,000,000 s, one after the other, in 3,600 s"
    ):
        learn(status, "absurd", many(60.0, 10**12), NOW, NOW - HOUR)
    again = learn(status, "honest", many(0.1, 72_000), NOW + HOUR, NOW - HOUR)
    assert float(again.rows[0].compute.count) == pytest.approx(71_000, rel=0.02)
    assert learn(status, "unknown", many(60.0, 10**12), NOW) != status, (
        "where nobody knows since when it runs"
    )


@pytest.mark.parametrize("log", [16.0, -16.0])
def test_two_reports_that_differ_by_no_time_are_refused_and_nothing_of_the_second_counts(log: float) -> None:
    """Each was within its bounds: one step of e^(3*10^7) s between them spoilt a row for days of honest measuring."""

    def sums_of(count: int, log: float) -> StatusReport:
        part = LogSums(count=count, total=log * count, squares=log * log * count, seconds=0.1 * count)
        row = report(0.1).speed[0].model_copy(update=dict.fromkeys(("compute", "pull", "push", "step"), part))
        return report(0.1).model_copy(update={"speed": (row,)})

    status = learn(SpeedProfileStatus(), "honest", many(0.1, 70_000), NOW)
    status = learn(status, "odd", sums_of(10**6, -log), NOW)
    with pytest.raises(
        UsageError, match="no steps of 1e-7 to 1e7 s have what two reports of T4/1/4/16/2/1 differ by"
    ):
        learn(status, "odd", sums_of(10**6 + 1, log), NOW)
    assert learn(status, "odd", sums_of(10**6 + 1, -log), NOW) != status, "what it says next counts"


def test_a_row_that_is_measured_for_years_is_learned_at_each_look() -> None:
    """What is remembered of its sums has ten digits, and so their difference an error, of no steps as well."""
    status = SpeedProfileStatus()
    for steps in range(10**8 + 3, 10**8 + 9):
        status = learn(status, "job", many(0.987654321, steps), NOW)
        assert learn(status, "job", many(0.987654321, steps), NOW) is status
    assert status.sources[0].counts["T4/1/4/16/2/1"].startswith(f"{10**8 + 8} ")


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_many_processes_of_a_job_measure_no_longer_than_the_job_exists(lives: list[str]) -> None:
    """A coordinator that says that it began again with each report is refused like one that does not."""
    status, taken, claimed, before = SpeedProfileStatus(), 0, 0, ("", 0)
    for number, life in enumerate(lives):
        count = 100 + number
        more = count - before[1] if life == before[0] else count
        claimed += more
        try:
            status = learn(status, "job", many(10.0, count, life), NOW, NOW - HOUR)
        except UsageError:
            continue
        before, taken = (life, count), taken + more
        assert float(status.rows[0].step.count) == pytest.approx(taken, rel=1e-4)
    most = (1.1 * 3600 + 600) * 2 / 10
    assert taken <= most
    assert taken == claimed or claimed > most


def test_no_report_weighs_more_than_hours_of_steps() -> None:
    """Steps of a microsecond are possible by the clock: seven billion of them were the profile for days."""
    status = learn(SpeedProfileStatus(), "honest", many(0.1, 72_000), NOW, NOW - HOUR)
    status = learn(status, "tiny", many(1e-6, 7 * 10**9), NOW, NOW - HOUR)
    assert float(status.rows[0].step.count) < 300_000
    assert float(status.rows[0].step.mean_seconds) == pytest.approx(0.1 * 72_000 / 272_000, rel=0.01)
    for number in range(1, 24 * 6 + 1):
        said = many(0.1, 72_000 + 12_000 * number)
        status = learn(status, "honest", said, NOW + number * timedelta(minutes=10), NOW - HOUR)
    assert float(status.rows[0].step.mean_seconds) == pytest.approx(0.1, rel=0.05)


def test_what_a_user_guessed_gives_way_to_what_was_measured() -> None:
    """One row of the spec weighed as much as a million steps, for ever: a new job began 29 % too fast."""
    status = learn(SpeedProfileStatus(), "a", report(*[0.2] * 1000), NOW)
    (row,) = status.rows
    guess = {"accelerator": "t4", "batchSize": row.batch_size, "stepSeconds": "0.1"}
    other = guess | {"batchSize": 2 * row.batch_size, "stepSeconds": "0.3"}
    made = SpeedProfile.model_validate({"metadata": {"name": "m"}, "spec": {"rows": [guess, other]}})
    found = profile_of(made.model_copy(update={"status": status}), NOW)
    assert found is not None
    assert sorted(each.batch_size for each in found.rows) == [row.batch_size, 2 * row.batch_size]
    speed = SpeedModel([found]).worker(found.model, row.device, row.devices, float(row.cores), row.batch_size)
    assert speed.seconds == pytest.approx(0.2, rel=0.04)


def test_what_a_user_says_of_cpus_is_that_of_so_many_cores() -> None:
    """0.5 s on eight cores were taken for those of one, and a pool of eight predicted seven times too fast."""
    said = {"accelerator": "CPU", "batchSize": 16, "stepSeconds": "0.5"}
    rows = [said | {"cores": "8"}, said | {"cores": "0.5", "stepSeconds": "4"}, said]
    made = SpeedProfile.model_validate({"metadata": {"name": "m"}, "spec": {"rows": rows}})
    with pytest.raises(UsageError, match=r"spec.rows\[2\]: it does not say on how many CPU cores"):
        profile_of(
            made.model_copy(update={"status": learn(SpeedProfileStatus(), "a", report(1.0), NOW)}), NOW
        )
    many = report(0.6).speed[0].model_copy(update={"device": "CPU", "cores": 8.0})
    status = learn(SpeedProfileStatus(), "a", report(0.6).model_copy(update={"speed": (many,)}), NOW)
    found = profile_of(made.model_copy(update={"status": status}), NOW, strict=False)
    assert found is not None
    assert [each.cores for each in found.rows] == [0.5, 8.0], (
        "what is measured on eight says it of these alone"
    )
    alone = profile_of(
        made.model_copy(update={"status": status.model_copy(update={"rows": ()})}), NOW, strict=False
    )
    assert alone is not None
    speed = SpeedModel([alone]).worker(alone.model, "CPU", 1, 8.0, 16)
    assert (speed.seconds, speed.basis) == (pytest.approx(0.5, rel=0.05), "measured")
