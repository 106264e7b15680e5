"""A slice of the convergence benchmark: what many workers reach on the samples of one, and how soon."""

import math
import statistics

import numpy as np
import pytest

from benchmarks.convergence import SHOAL, TRIED, accuracy, course, seconds_to, share
from benchmarks.virtual_job import AllReduce, Job, VirtualJob

SEEDS = range(3)
MISSED = pytest.mark.xfail(
    reason="a goal that is missed: 2.2 points, docs/benchmarks/convergence.md", strict=True
)
CHURN = "Shoal, a worker lost and replaced every 20 updates"


def median(rule, task, workers, optimizer, seeds=SEEDS):
    return statistics.median(accuracy((rule, Job(task, workers, seed, optimizer))) for seed in seeds)


@pytest.mark.parametrize(
    ("task", "optimizer", "workers", "less"),
    [
        pytest.param("digits", "momentum", 8, 0.010),
        pytest.param("digits", "momentum", 16, 0.020, marks=[pytest.mark.nightly, MISSED]),
        pytest.param("digits", "Adam", 16, 0.020, marks=pytest.mark.nightly),
        pytest.param("MNIST", "momentum", 8, 0.007, marks=pytest.mark.nightly),
        pytest.param("MNIST", "momentum", 16, 0.015, marks=pytest.mark.nightly),
        pytest.param("MNIST", "Adam", 8, 0.007, marks=pytest.mark.nightly),
        pytest.param("MNIST", "Adam", 16, 0.015, marks=pytest.mark.nightly),
    ],
)
def test_workers_keep_the_accuracy_of_one_within_the_goals(task, optimizer, workers, less):
    """The goals of the sets on the page, missed in one row: medians of the same seeds."""
    seeds = range(500, 505)
    one = median(SHOAL, task, 1, optimizer, seeds)
    assert median(SHOAL, task, workers, optimizer, seeds) >= one - less


@pytest.mark.nightly
def test_one_worker_of_the_language_model_trains_as_keras_and_two_lose_little():
    (one, two), keras = (
        [accuracy((SHOAL, Job("language", number, 500, "AdamW, warm-up, cosine"))) for number in (1, 2)],
        accuracy(("all-reduce", Job("language", 1, 500, "AdamW, warm-up, cosine"))),
    )
    assert one == pytest.approx(keras, abs=1e-3)
    assert two >= one - 0.035


@pytest.mark.nightly
def test_eight_workers_are_at_least_five_times_as_fast_as_one_on_mnist():
    faster = []
    for seed in range(500, 505):
        one, eight = (
            seconds_to((SHOAL, Job("MNIST", number, seed, "momentum", speeds="equal"), 0.929))
            for number in (1, 8)
        )
        faster.append(one / eight)
    assert statistics.median(faster) >= 5.0


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
def test_eight_workers_are_about_as_accurate_as_one_on_the_same_samples(optimizer):
    one = median(SHOAL, "digits", 1, optimizer)
    assert median(SHOAL, "digits", 8, optimizer) >= one - 0.015
    assert median(CHURN, "digits", 8, optimizer) >= one - 0.02


@pytest.mark.nightly
def test_embeddings_with_adam_learn_with_eight_workers():
    """SGD's damping left Adam at 0.86, half of its power at 0.917; all-reduce at the rate of one worker is at 0.83."""
    found = median(SHOAL, "words", 8, "Adam", range(1))
    assert found >= 0.922
    assert found > median("all-reduce", "words", 8, "Adam", range(1)) + 0.05


def test_plain_asynchronous_momentum_diverges_where_shoal_learns():
    assert median("each gradient a step of Keras", "digits", 8, "momentum", range(1)) < 0.3
    assert median("Shoal, three times the rate", "digits", 8, "momentum", range(1)) > 0.9


def test_a_straggler_costs_all_reduce_half_its_speed_and_shoal_its_own():
    job = Job("digits", 8, 0, "Adam", speeds="straggler")
    mine, synchronous = (seconds_to((rule, job, 0.93)) for rule in (SHOAL, "all-reduce, rate × √W"))
    assert mine < synchronous < math.inf
    assert seconds_to((SHOAL, Job("digits", 1, 0, "Adam", speeds="equal"), 0.93)) > 2.5 * mine


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["rings", "table"])
def test_momentum_is_better_damped_by_how_far_gradients_agree_than_by_the_pace(task: str) -> None:
    """Of seeds 700 to 704 4.1 and 0.9 points; rings without rounds 8."""
    better = median(SHOAL, task, 16, "momentum", range(700, 705))
    assert better >= median("√pace", task, 16, "momentum", range(700, 705)) + 0.004


@pytest.mark.by_day(4)
@pytest.mark.parametrize("rule", TRIED)
def test_rules_that_were_tried_can_still_be_measured(rule: str) -> None:
    run = course(rule, Job("digits", 4, 0))
    before = run.loss()
    run.train(24)
    assert run.samples >= 24 * 32
    assert run.loss() < before


@pytest.mark.nightly
def test_rounds_keep_the_accuracy_of_sixteen_workers() -> None:
    without = median("Shoal, no rounds", "digits", 16, "momentum")
    assert median(SHOAL, "digits", 16, "momentum") >= without + 0.015


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("speeds", "of_all_reduce"), [("equal", 0.95), ("slower", 1.15), ("straggler", 1.5), ("mixed", 2.0)]
)
def test_rounds_cost_little_of_the_workers_speed(speeds, of_all_reduce) -> None:
    """They cost how much steps vary, here by a tenth; a straggler costs the others nothing."""
    job = Job("digits", 8, 0, speeds=speeds, exchange=0.0)
    assert share((SHOAL, job)) >= max(0.88, of_all_reduce * share(("all-reduce", job)))


@pytest.mark.nightly
def test_workers_leave_the_rounds_where_their_exchange_takes_too_much() -> None:
    """By the real rule of workers: more than 3 % of a step of 100 ms."""
    quick, slow = (share((SHOAL, Job("digits", 8, 0, exchange=seconds))) for seconds in (0.0005, 0.02))
    assert quick < 0.85
    assert slow > 0.95


@pytest.mark.parametrize(("shorter", "alike"), [(1000.0, True), (1.0, False)])
def test_adam_of_all_reduce_whose_moments_last_one_step_moves_by_the_sign(shorter, alike) -> None:
    run = AllReduce(Job("digits", 2, 0, "Adam", shorter=shorter))
    run.train(16)
    before = run.parameters().copy()
    run.train(2)
    moved = np.abs(run.parameters() - before)
    moved = moved[moved > 0.0015]
    assert moved.size > 1000
    assert (np.isclose(moved, 0.003, rtol=0.02).mean() > 0.9) == alike  # others are near epsilon


def test_optimizer_that_runs_on_workers_pushes_the_difference_of_its_step() -> None:
    """The first one of Adamax is its rate for each value that has a gradient beyond epsilon."""
    run = VirtualJob(Job("digits", 2, 0, "Adamax"))
    before = run.parameters().copy()
    run.train(1)
    moved = np.abs(run.parameters() - before)
    assert np.median(moved[moved > 0]) == pytest.approx(0.003, rel=1e-3)
