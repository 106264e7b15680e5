"""What the page remembers of jobs: spans never overlap or run backwards, and memory is bounded."""

from __future__ import annotations

import tracemalloc
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api.training_job import TrainingJob
from shoal.page.memory import FINISHED_SAMPLES, METRICS, POINTS, SAMPLES, Memory
from shoal.page.view import detail, overview
from tests.unit.policy.build import NOW, job, stamp


def slots(*states: tuple[int, str]) -> dict[str, Any]:
    found = [{"index": index, "incarnation": 0, "state": state} for index, state in states]
    return {"phase": "Running", "startTime": stamp(NOW), "slots": found}


def test_a_replacement_ends_the_span_before_it() -> None:
    memory = Memory()
    old = {"index": 0, "incarnation": 0, "pool": "t4", "node": "spot-1"}
    lost = old | {"state": "Ended", "cause": "NodeShutdown", "endedAt": stamp(NOW + timedelta(seconds=50))}
    new = {"index": 0, "incarnation": 1, "state": "Starting", "createdAt": stamp(NOW + timedelta(seconds=51))}
    for seconds, seen in ((0, [old]), (60, [lost, new]), (70, [new | {"state": "Running"}])):
        memory.see([job(slots() | {"slots": seen})], NOW + timedelta(seconds=seconds))
    spans = detail(job(slots()), memory.of("team", "digits"), NOW)["spans"]
    assert [(s["incarnation"], s["state"], s["cause"], s["end"]) for s in spans] == [
        (0, "Ended", "NodeShutdown", (NOW + timedelta(seconds=50)).timestamp()),
        (1, "Running", "", None),
    ]
    assert spans[0]["pool"] == "t4"
    assert spans[1]["start"] == (NOW + timedelta(seconds=51)).timestamp()


def test_an_end_between_two_looks_has_the_reason_that_the_status_has() -> None:
    memory = Memory()
    memory.see([job(slots((0, "Running"), (1, "Running")))], NOW)
    last = {"pod": "digits-worker-0-0", "reason": "NodeShutdown", "time": stamp(NOW)}
    memory.see([job(slots() | {"lastDisruption": last})], NOW + timedelta(seconds=2))
    spans = detail(job(slots()), memory.of("team", "digits"), NOW)["spans"]
    assert [span["cause"] for span in spans] == ["NodeShutdown", "Replaced"]


def test_a_new_operator_says_that_it_did_not_see_the_start() -> None:
    memory = Memory()
    memory.see([job(slots((0, "Running")))], NOW + timedelta(hours=1))
    memory.see([job(slots((0, "Running"), (1, "Running")))], NOW + timedelta(hours=2))
    first, second = detail(job(slots()), memory.of("team", "digits"), NOW)["spans"]
    assert (first["known"], first["start"]) == (False, NOW.timestamp())
    assert (second["known"], second["start"]) == (True, (NOW + timedelta(hours=2)).timestamp())


def test_another_run_of_the_same_name_begins_anew() -> None:
    memory = Memory()
    memory.see([job(slots((0, "Running")))], NOW)
    again = job(slots())
    again = again.model_copy(update={"metadata": again.metadata.model_copy(update={"uid": "another"})})
    memory.see([again], NOW)
    found = memory.of("team", "digits")
    assert found is not None
    assert found.spans == {}
    memory.see([], NOW)
    assert memory.of("team", "digits") is None


STATES = st.sampled_from(["Starting", "Running", "Silent", "Draining", "Ended"])


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), STATES), max_size=5), max_size=20))
def test_spans_are_sound_whatever_the_status_says(history: list[list[tuple[int, int, str]]]) -> None:
    memory = Memory()
    for minute, seen in enumerate(history):
        found = [{"index": i, "incarnation": n, "state": s} for i, n, s in seen]
        memory.see([job(slots() | {"slots": found})], NOW + timedelta(minutes=minute))
    remembered = memory.of("team", "digits")
    for span in remembered.spans.values() if remembered else ():
        assert span.end is None or span.end >= span.start
        assert (span.state == "Ended") == (span.end is not None) or span.end is not None


def test_curves_keep_the_whole_life_in_bounded_memory() -> None:
    memory = Memory()
    status = slots((0, "Running")) | {"training": {"loss": "1.5", "samplesPerSecond": "10"}}
    for second in range(3 * SAMPLES):
        memory.see([job(status)], NOW + timedelta(seconds=second))
    samples = detail(job(status), memory.of("team", "digits"), NOW)["samples"]
    assert SAMPLES / 4 <= len(samples) < SAMPLES
    assert samples[0][0] == NOW.timestamp()
    assert samples[-1][0] >= (NOW + timedelta(seconds=2.9 * SAMPLES)).timestamp()


def training(metrics: dict[str, str]) -> dict[str, Any]:
    return slots((0, "Running")) | {"training": {"loss": "1.5", "metrics": metrics}}


def test_metrics_have_curves_from_when_they_are_told() -> None:
    """Those of an evaluation come later, and one may be missing for a while."""
    memory = Memory()
    told = (
        {}, {"auc": "0.7", "accuracy": "0.5"}, {"val_accuracy": "0.4", "auc": "0.8", "accuracy": "0.6"},
        {"accuracy": "0.7", "val_accuracy": "0.4"},
    )  # fmt: skip
    for minute, metrics in enumerate(told):
        memory.see([job(training(metrics))], NOW + timedelta(minutes=minute))
    shown = detail(job(slots()), memory.of("team", "digits"), NOW)
    assert shown["curves"] == ("accuracy", "auc", "val_accuracy")
    assert [point[3:] for point in shown["samples"]] == [
        [1.5], [1.5, 0.5, 0.7], [1.5, 0.6, 0.8, 0.4], [1.5, 0.7, None, 0.4]
    ]  # fmt: skip


def test_so_many_metrics_have_a_curve_and_an_evaluation_is_beside_its_metric() -> None:
    memory = Memory()
    many = {f"{kind}{name}": "1" for kind in ("", "val_") for name in "fedcba"}
    memory.see([job(training(many))], NOW)
    found = memory.of("team", "digits")
    assert found is not None
    assert found.metrics == ("a", "val_a", "b", "val_b", "c", "val_c", "d", "val_d")
    assert len(found.samples[0].metrics) == METRICS


def test_what_does_not_change_is_kept_once() -> None:
    memory = Memory()
    for minute in range(3):
        memory.see([job(training({"auc": "0.7"}))], NOW + timedelta(minutes=minute))
    found = memory.of("team", "digits")
    assert found is not None
    assert len({id(sample.metrics) for sample in found.samples}) == 1


def succeeded(status: dict[str, Any]) -> TrainingJob:
    complete = {"type": "Complete", "status": "True", "reason": "Complete", "lastTransitionTime": stamp(NOW)}
    return job(status | {"conditions": [complete], "phase": "Succeeded"})


def named(number: int, status: dict[str, Any]) -> TrainingJob:
    one = job(status)
    identity = {"name": f"job-{number}", "uid": f"uid-{number}"}
    return one.model_copy(update={"metadata": one.metadata.model_copy(update=identity)})


def test_a_job_that_has_ended_keeps_a_rough_curve() -> None:
    memory = Memory()
    for second in range(SAMPLES - 1):
        memory.see([job(slots((0, "Running")))], NOW + timedelta(seconds=second))
    ended = succeeded(slots((0, "Ended")))
    memory.see([ended], NOW + timedelta(seconds=SAMPLES))
    samples = detail(ended, memory.of("team", "digits"), NOW)["samples"]
    assert FINISHED_SAMPLES / 2 <= len(samples) <= FINISHED_SAMPLES
    assert samples[0][0] == NOW.timestamp()


@pytest.mark.parametrize("looks", [2, SAMPLES - 1])
def test_the_last_point_is_what_the_job_ended_with(looks: int) -> None:
    """The last evaluation is told together with the end."""
    memory = Memory()
    for second in range(looks):
        memory.see([job(training({"auc": "0.7"}))], NOW + timedelta(seconds=second))
    ended = succeeded(training({"auc": "0.8", "val_auc": "0.9"}))
    for second in range(3):
        memory.see([ended], NOW + timedelta(seconds=looks + second))
    shown = detail(ended, memory.of("team", "digits"), NOW)
    assert shown["curves"] == ("auc", "val_auc")
    assert [point[4:] for point in shown["samples"]][-2:] == [[0.7], [0.8, 0.9]]
    assert shown["samples"][-1][0] == (NOW + timedelta(seconds=looks)).timestamp()


def test_of_a_job_that_had_ended_before_there_is_no_curve() -> None:
    ended = succeeded(training({"auc": "0.8"}))
    memory = Memory()
    memory.see([ended], NOW)
    assert detail(ended, memory.of("team", "digits"), NOW)["samples"] == []


def test_all_jobs_together_have_bounded_memory() -> None:
    """2,000 jobs were half a gigabyte, in the process that replaces pods."""
    memory, jobs = Memory(), [named(number, slots((0, "Running"))) for number in range(1000)]
    for minute in range(250):
        memory.see(jobs, NOW + timedelta(minutes=minute))
        remembered = [memory.of("team", each.metadata.name) for each in jobs]
        assert sum(each.size for each in remembered if each) <= POINTS
    assert all(each is not None and each.size > 30 for each in remembered)


@pytest.mark.nightly
def test_500_jobs_with_all_their_metrics_need_no_more_memory() -> None:
    """As many bytes as POINTS says, though a point with eight metrics, all of which change, is a large one."""
    names = [f"metric-{each}" for each in range(METRICS + 2)]
    changing = [
        [named(number, training(dict.fromkeys(names, value))) for number in range(500)]
        for value in ("0.123", "0.456")
    ]
    tracemalloc.start()
    try:
        memory = Memory()
        for minute in range(65):  # the next look would make it half as much
            memory.see(changing[minute % 2], NOW + timedelta(minutes=minute))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sizes = [found.size for each in changing[0] if (found := memory.of("team", each.metadata.name))]
    assert POINTS * 0.9 < sum(sizes) <= POINTS
    assert held < 20 << 20


@pytest.mark.nightly
def test_a_job_of_many_losses_gives_way_to_the_others() -> None:
    memory = Memory()
    few = [named(number, slots((0, "Running"))) for number in range(1, 100)]
    lost = [
        {"index": i % 50, "incarnation": i // 50, "state": "Ended", "endedAt": stamp(NOW)}
        for i in range(3000)
    ]
    many = [named(-number, slots() | {"slots": lost}) for number in range(50)]
    memory.see([*few, *many], NOW)
    sizes = {each.metadata.name: found.size for each in [*few, *many]
             if (found := memory.of("team", each.metadata.name)) is not None}  # fmt: skip
    assert sum(sizes.values()) <= POINTS
    assert {sizes[each.metadata.name] for each in few} == {2}


def test_finish_has_a_band_as_wide_as_the_error_so_far() -> None:
    training = {"training": {"remainingSeconds": 1000}, "prediction": {"relativeError": "-0.1"}}
    finish = detail(job(slots() | training), None, NOW)["finish"]
    assert finish["at"] == NOW.timestamp() + 1000
    assert finish["band"] == [NOW.timestamp() + 900, NOW.timestamp() + 1100]
    assert detail(job(slots() | {"training": {"remainingSeconds": 5}}), None, NOW)["finish"]["band"] is None


def test_nothing_but_what_a_reader_of_jobs_may_see() -> None:
    whole = str(overview([job(slots())], [], NOW)) + str(detail(job(slots()), None, NOW))
    assert "template" not in whole
    assert "env" not in whole.split("event")[0]
