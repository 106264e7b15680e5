"""The numpy core: what a row, a cluster, a busy server and several devices teach, and how sure that is."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Basis, LogMean, Model, Profile, Row, ServerLoad
from shoal.sizing.speed.model import SpeedModel, chosen
from shoal.sizing.speed.servers import Load, ServerModel, soft_min
from shoal.sizing.speed.worker import Configuration, Observation

MODEL = Model("resnet32", 5.5e8, 1_857_722, 104)


def alone(device: str, seconds: float, batch: int = 128, **more: object) -> Row:
    return Row(device, batch_size=batch, step=LogMean.of(seconds, count=5), **more)  # type: ignore[arg-type]


def model(*rows: Row, load: dict[int, ServerLoad] | None = None) -> SpeedModel:
    return SpeedModel([Profile(MODEL, rows, load or {})])


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(1, 200))
def test_soft_minimum_is_below_both(demand: float, cap: float, sharpness: float) -> None:
    found = float(soft_min(np.array([demand]), cap, sharpness)[0])
    assert min(demand, cap) * 2 ** (-1 / sharpness) * (1 - 1e-12) <= found <= min(demand, cap) * (1 + 1e-12)


def test_infinite_sharpness_is_the_minimum_and_no_demand_no_speed() -> None:
    assert soft_min(np.array([30.0, 0.0]), 100.0, np.inf).tolist() == [30.0, 0.0]
    assert soft_min(np.array([0.0]), 100.0, 4.0).tolist() == [0.0]


def test_measured_worker_is_what_was_measured() -> None:
    found = model(alone("P100", 0.083)).worker(MODEL, "P100", 1, 0, 128)
    assert found.seconds == pytest.approx(0.083, rel=0.02)
    assert found.sigma < 0.08
    assert found.basis == "measured"


def test_what_was_measured_at_another_input_size_is_no_measurement_of_this_one() -> None:
    """Rows of two sizes of one model were one row to the predictor, of the size that was given last."""
    large = replace(MODEL, flops=49 * 5.5e8)
    known = SpeedModel(
        [Profile(MODEL, (alone("P100", 0.083),), {}), Profile(large, (alone("P100", 3.0, batch=64),), {})]
    )
    assert known.worker(MODEL, "P100", 1, 0, 128).seconds == pytest.approx(0.083, rel=0.02)
    found = known.worker(large, "P100", 1, 0, 64)
    assert (found.seconds, found.basis) == (pytest.approx(3.0, rel=0.02), "measured")
    assert known.worker(MODEL, "P100", 1, 0, 64).basis == "other batch sizes of the model on this accelerator"
    between = known.worker(replace(MODEL, flops=7 * 5.5e8), "P100", 1, 0, 128)
    assert between.basis == "other input sizes of the model on this accelerator"
    assert 0.2 < between.seconds < 2.0
    assert known.worker(replace(MODEL, flops=5.52e8), "P100", 1, 0, 128).basis == "measured", "of one class"


def test_what_was_measured_in_another_precision_is_another_models() -> None:
    mixed = replace(MODEL, precision="float16")
    known = SpeedModel(
        [Profile(MODEL, (alone("P100", 0.083),), {}), Profile(mixed, (alone("P100", 0.04),), {})]
    )
    for each, seconds in ((MODEL, 0.083), (mixed, 0.04)):
        assert known.worker(each, "P100", 1, 0, 128).seconds == pytest.approx(seconds, rel=0.05)


def test_nothing_measured_is_the_sheet_with_a_wide_interval() -> None:
    found = SpeedModel().worker(MODEL, "P100", 1, 0, 128)
    assert 0.4 < found.sigma < 0.8
    assert abs(math.log(found.seconds / 0.083)) < 2 * found.sigma
    assert found.basis == "data sheets"


def test_host_keeps_its_part_of_the_overheads_on_a_much_faster_accelerator() -> None:
    small = Model("small", 1e6, 100_000, 300)  # nearly all overhead
    slow, fast = (SpeedModel().worker(small, name, 1, 0, 32).seconds for name in ("P100", "B200"))
    assert 1.5 < slow / fast < 5  # the sheets say 24


def test_larger_kernels_fill_an_accelerator_better() -> None:
    few, many = (Model(name, 1e12, 10_000_000, tensors) for name, tensors in (("few", 20), ("many", 400)))
    thin, thick = (SpeedModel().worker(each, "P100", 1, 0, 64).seconds for each in (many, few))
    assert 1.1 < thin / thick < 2.0  # the work is the same, and far larger than any overhead


def test_a_pool_whose_cores_nobody_knows_waits_for_its_input_as_what_was_measured_there_did() -> None:
    found = model(alone("T4", 0.4, cores=4), alone("T4", 0.2, cores=8), alone("P100", 0.1, cores=16))
    assert 0.2 < found.worker(MODEL, "T4", 1, 0, 128).seconds < 0.4
    assert found.worker(MODEL, "T4", 1, 0, 128) == found.worker(MODEL, "T4", 1, 6, 128)
    other = Model("other", 5.5e8, 1_857_722, 104)
    assert found.worker(other, "T4", 2, 0, 128) == found.worker(other, "T4", 2, 12, 128)
    assert found.worker(other, "V100", 1, 0, 128).seconds < found.worker(other, "V100", 1, 4, 128).seconds


def test_one_namespace_does_not_decide_how_many_cores_the_workers_of_others_have() -> None:
    """64 configurations of one job, on a thousandth of a core, made a new model of another 20 times slower."""

    def of(owner: str, name: str, cores: float, batches: Sequence[int]) -> Profile:
        fed = [(batch, 5e-4 * batch + 0.01 + 1e-5 * batch / cores) for batch in batches]
        rows = tuple(alone("T4", seconds, batch, cores=cores) for batch, seconds in fed)
        return Profile(Model(name, 5.5e8, 1_857_722, 104, owner), rows)

    honest = [of(owner, f"of {owner}", 8.0, (32, 64, 128)) for owner in ("a", "b", "c")]
    odd = of("odd", "odd", 1e-3, range(100, 164))
    new = Model("new", 5.5e8, 1_857_722, 104, "mine")
    before, after = (SpeedModel(each).worker(new, "T4", 1, 0.0, 128) for each in (honest, [*honest, odd]))
    assert after.seconds == pytest.approx(before.seconds, rel=0.15)
    mine = of("mine", "other", 1e-3, (64, 128))
    assert SpeedModel([*honest, mine]).worker(new, "T4", 1, 0.0, 128).seconds > 10 * before.seconds, (
        "those of its own namespace say more of its nodes"
    )


@pytest.mark.parametrize("cores", [0.0, 4.0, 16.0])
@pytest.mark.parametrize("own", [(), (64,)])
def test_a_step_time_without_cores_is_what_it_is_whatever_the_input_of_other_models(
    cores: float, own: tuple[int, ...]
) -> None:
    """0.05 s were given, and with the input of the others 0.22 s were predicted. `own`: batches measured with cores."""
    given = Model("given", 1e9, 5_000_000, 60)
    rows = [alone("T4", 0.05), *(alone("T4", 0.025, batch, cores=6.0) for batch in own)]

    def other(number: int) -> Profile:
        step = [
            (0.02 * (1 + number) * batch / 128 + 0.01 + 5e-3 * batch / fed, batch, fed)
            for batch in (64, 128)
            for fed in (4.0, 8.0)
        ]
        rows = tuple(alone("T4", seconds, batch, cores=fed) for seconds, batch, fed in step)
        return Profile(Model(f"other {number}", 1e9 * (1 + number), 5_000_000, 60), rows)

    speeds = SpeedModel([Profile(given, tuple(rows)), *map(other, range(4))])
    asked = 6.0 if own else cores
    assert speeds.worker(given, "T4", 1, asked, 128.0).seconds == pytest.approx(0.05, rel=0.1)


def test_model_on_another_accelerator_is_between_the_two() -> None:
    measured = model(alone("K80", 0.218))
    found, sheet = measured.worker(MODEL, "P100", 1, 0, 128), SpeedModel().worker(MODEL, "P100", 1, 0, 128)
    assert found.sigma < sheet.sigma
    assert found.seconds == pytest.approx(0.083, rel=0.35)  # measured by CM-DARE
    assert found.basis == "the model on other accelerators"


def test_several_devices_are_not_free() -> None:
    """Before, 8 x T4 were predicted from 1 x T4 as 8 times as fast, give or take 7 %."""
    measured = model(alone("T4", 0.20), alone("T4", 0.38, batch=256))
    one, eight = measured.worker(MODEL, "T4", 1, 0, 128), measured.worker(MODEL, "T4", 8, 0, 1024)
    assert eight.seconds > 1.1 * one.seconds
    assert eight.sigma > 0.15


def test_two_batches_of_an_idle_device_do_not_bound_a_large_one() -> None:
    """Before, 64-fold the batch was 0.127 to 0.293 s; the truth may be 3 s."""
    measured = model(alone("T4", 0.05, batch=32), alone("T4", 0.05, batch=64))
    found = measured.worker(MODEL, "T4", 1, 0, 4096)
    assert found.sigma > 0.25
    assert found.seconds > 0.3


def test_worker_alone_is_learned_from_any_number_of_workers() -> None:
    row = Row(
        "P100", batch_size=128, workers=8, compute=LogMean.of(0.083, count=100), pull=LogMean.of(0.1, count=100),
        push=LogMean.of(0.1, count=100),
    )  # fmt: skip
    assert model(row).worker(MODEL, "P100", 1, 0, 128).seconds == pytest.approx(0.083, rel=0.02)


def test_one_measured_cluster_is_information() -> None:
    """Before, a saturated cluster was ignored, and a note said that none was measured."""
    slow = Row("P100", batch_size=128, workers=8, step=LogMean.of(0.60))
    capacity, sigma = model(alone("P100", 0.083), slow).servers.capacity(MODEL, 1)
    assert capacity == pytest.approx(8 / 0.6, rel=0.15)
    assert sigma < 0.2
    guess, wide = model(alone("P100", 0.083)).servers.capacity(MODEL, 1)
    assert guess > 3 * capacity
    assert wide > 0.5


def test_cluster_of_several_devices_is_information_too() -> None:
    slow = Row("P100", devices=4, batch_size=512, workers=8, step=LogMean.of(0.60))
    capacity, _ = model(alone("P100", 0.1, 512, devices=4), slow).servers.capacity(MODEL, 1)
    assert capacity == pytest.approx(8 / 0.6, rel=0.15)


def test_busy_seconds_give_the_capacity_at_any_number_of_workers() -> None:
    busy = model(alone("P100", 0.083), load={2: ServerLoad(busy_seconds=50.0, updates=10_000)})
    capacity, sigma = busy.servers.capacity(MODEL, 2)
    assert capacity == pytest.approx(200, rel=0.03)
    assert sigma < 0.1
    more, less_sure = busy.servers.capacity(MODEL, 4)
    assert 1.5 < more / capacity < 2.0
    assert less_sure > sigma


@pytest.mark.parametrize("batches", [(1, 1), (64, 1), (1, 64)])
def test_an_update_costs_what_it_costs_however_many_batches_it_is_of(batches: tuple[float, float]) -> None:
    """One of 64 batches on one server, and one of one on four: servers of other tenants' models did a 28th of it."""
    one, four = batches
    several = model(load={1: ServerLoad(1e3, 1e5, 1.0, one), 4: ServerLoad(1.5e3, 4e5, 1.0, four)}).servers
    same = model(load={1: ServerLoad(1e3, 1e5), 4: ServerLoad(1.5e3, 4e5)}).servers
    for each in (MODEL, replace(MODEL, fingerprint="other", owner="another")):
        for servers in (1, 4):
            assert several.capacity(each, servers) == same.capacity(each, servers)


def test_profiles_with_and_without_batches_of_updates_count_together() -> None:
    told = Profile(MODEL, (), {1: ServerLoad(100.0, 10_000, batches_per_update=10)})
    before = Profile(MODEL, (), {1: ServerLoad(50.0, 5_000)})
    both = SpeedModel([told, before])
    assert both.batches_per_update(MODEL.key) == 10
    assert both.servers.capacity(MODEL, 1)[0] == pytest.approx(100, rel=0.03)
    assert SpeedModel([before]).batches_per_update(MODEL.key) == SpeedModel().batches_per_update("") == 1


@pytest.mark.parametrize("batches", [-1.0, 0.5, math.nan, math.inf])
def test_an_update_is_of_one_batch_or_more(batches: float) -> None:
    with pytest.raises(UsageError, match="one batch or more"):
        ServerLoad(1.0, 100, batches_per_update=batches)


def test_old_measurements_give_way_to_new_ones() -> None:
    """Before, 100 old rows of 0.03 s and 10 new of 0.09 s gave 0.035 s."""
    year = 365 * 86400.0
    rows = [
        Row("T4", batch_size=128, compute=LogMean.of(0.03, 0.003, 100), age_seconds=year),
        Row("T4", batch_size=128, compute=LogMean.of(0.09, 0.009, 10)),
    ]
    assert model(*rows).worker(MODEL, "T4", 1, 0, 128).seconds == pytest.approx(0.09, rel=0.1)


def test_model_without_flops_is_predicted_less_surely() -> None:
    unknown = Model("m", None, 1_857_722, 104)
    assert (
        SpeedModel().worker(unknown, "P100", 1, 0, 128).sigma
        > SpeedModel().worker(MODEL, "P100", 1, 0, 128).sigma
    )


@pytest.mark.parametrize(
    ("seconds", "spread"), [(0.0, 0.0), (-1.0, 0.0), (math.inf, 0.0), (0.1, 5.0), (0.1, -5.0)]
)
def test_impossible_times_are_refused(seconds: float, spread: float) -> None:
    with pytest.raises(UsageError, match=r"seconds|spread"):
        LogMean.of(seconds, spread)


@pytest.mark.nightly
def test_six_hundred_configurations_are_fitted_in_a_second() -> None:
    rng = np.random.default_rng(0)
    profiles = [
        Profile(
            Model(f"m{i}", float(10 ** rng.uniform(8, 10)), 10**6, 100),
            tuple(
                Row(device, batch_size=batch, compute=LogMean.of(float(rng.uniform(0.05, 0.5)), count=50))
                for device in ("T4", "L4", "A100", "P100")
                for batch in (32, 64, 128)
            ),
        )
        for i in range(50)
    ]
    found = SpeedModel(profiles).worker(profiles[0].model, "T4", 1, 0, 64)
    assert math.isfinite(found.seconds)


def test_on_a_cpu_the_exchange_takes_time_from_the_step() -> None:
    """Means, not medians: a few long waits for the server are a large part of the time of all steps."""
    parts = {
        "compute": LogMean(math.log(0.05), 0.1, 600),
        "pull": LogMean(math.log(0.007), 2.6, 600),
        "push": LogMean(math.log(0.0005), 2.7, 600),
    }
    whole = 0.05 * math.exp(0.05) + 0.007 * math.exp(1.3) + 0.0005 * math.exp(1.35)
    small = Model("cd" * 32, 2.4e6, 29_066, 6)
    row = Row("CPU", cores=0.1, batch_size=32, workers=2, **parts)
    found = SpeedModel([Profile(small, (row,))]).worker(small, "CPU", 1, 0.1, 32)
    assert found.basis == "measured"
    assert found.seconds == pytest.approx(whole, rel=0.05)
    gpu = Row("T4", batch_size=32, workers=2, **parts)
    beside = SpeedModel([Profile(small, (gpu,))]).worker(small, "T4", 1, 0.0, 32)
    assert beside.seconds == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(("step", "learned"), [(0.0469, 0.0469), (0.09, 0.0505)])
def test_what_of_the_exchange_is_beside_the_compute_does_not_count_twice(step: float, learned: float) -> None:
    """Measured with a fifth of a core: parts of 37, 12 and 1 ms in steps of 47 ms. A step may wait for others, too."""
    parts = {
        name: LogMean.of(t, count=800)
        for name, t in {"compute": 0.0374, "pull": 0.0117, "push": 0.0014, "step": step}.items()
    }
    row = Row("CPU", cores=0.2, batch_size=32, workers=3, **parts)
    assert model(row).worker(MODEL, "CPU", 1, 0.2, 32).seconds == pytest.approx(learned, rel=0.03)


def _measured(steps: Sequence[float]) -> LogMean:
    logs = [math.log(each) for each in steps]
    mean = sum(logs) / len(logs)
    return LogMean(mean, sum((x - mean) ** 2 for x in logs) / len(logs), len(logs), sum(steps) / len(steps))


@pytest.mark.parametrize("stall", [100.0, 1000.0])
def test_a_single_stall_tells_little_of_a_speed(stall: float) -> None:
    """One of 1,000 s in 1,000 steps of 0.1 s made steps of 1.1 s of them, give or take 3 %."""
    found = _measured([0.1] * 1000 + [stall])
    assert 0.2 < found.doubt() < 1.3
    assert found.doubt(0.1) > found.doubt(), "of what is old the less"
    row = Row("P100", batch_size=128, compute=found)
    speed = model(row, alone("T4", 0.2)).worker(MODEL, "P100", 1, 0, 128)
    assert abs(math.log(speed.seconds / 0.1)) < 2 * speed.sigma


@pytest.mark.parametrize("every", [6, 20, 100])
def test_stalls_that_come_again_and_again_are_known(every: int) -> None:
    found = _measured(([0.008] * (every - 1) + [0.2]) * 500)
    assert found.doubt() < priors.CAMPAIGN**2 * 4


def test_exchange_on_the_same_cores_is_no_stall() -> None:
    compute, exchange = LogMean.of(0.1, 0.01, 2000), LogMean.of(0.05, count=2000)
    row = Row("CPU", cores=1, batch_size=32, compute=compute, pull=exchange, push=exchange)
    assert row.alone is not None
    assert (row.alone.seconds, row.alone.doubt()) == (pytest.approx(0.2), pytest.approx(compute.doubt()))


def test_steps_that_wait_for_their_share_of_a_core_count_with_their_whole_time() -> None:
    """Five steps of 8 ms and one of 100 ms, as a quota makes them, take 23 ms on average, their geometric mean: 12."""
    found = _measured([0.008] * 500 + [0.1] * 100)
    exchange = LogMean.of(1e-6, count=600)
    row = Row("CPU", cores=0.2, batch_size=32, workers=2, compute=found, pull=exchange, push=exchange)
    assert model(row).worker(MODEL, "CPU", 1, 0.2, 32).seconds == pytest.approx(0.0233, rel=0.05)


def _profile(name: str, owner: str, seconds: float, *, flops: float = 8e8, tensors: int = 60) -> Profile:
    """A model that was measured in a thousand steps on a T4, whose updates keep a server busy for 1 % of a step."""
    row = Row("T4", cores=8, batch_size=128, compute=LogMean.of(seconds, seconds / 10, 1000))
    model = Model(name, flops, 1_000_000, tensors, owner)
    return Profile(model, (row,), {1: ServerLoad(seconds / 100 * 10_000, 10_000)})


@pytest.mark.by_day(6)
@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 0.3, 1.0, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("others", [1, 2, 8])
def test_what_others_measured_cannot_move_what_was_measured_here(seconds: float, others: int) -> None:
    """However wrong it is, and however many rows say so: also of the same model."""
    ours = _profile("ours", "here", 0.1)
    wrong = [
        _profile("ours" if i == 0 else f"wrong-{i}", "there", seconds, flops=(8 + i) * 1e8, tensors=60 + i)
        for i in range(others)
    ]
    alone, beside = SpeedModel([ours]), SpeedModel([*wrong, ours])
    before, after = (each.worker(ours.model, "T4", 1, 8, 128) for each in (alone, beside))
    assert after.seconds == pytest.approx(before.seconds, rel=0.02)
    assert after.basis is Basis.MEASURED
    capacity, sigma = beside.servers.capacity(ours.model, 1)
    assert capacity == pytest.approx(alone.servers.capacity(ours.model, 1)[0], rel=0.05)
    assert sigma < 0.1


def test_one_wrong_model_does_not_move_the_prediction_of_a_new_one() -> None:
    right = [_profile(f"m{i}", "here", 0.1 * (1 + i / 10), flops=(8 + i) * 1e8) for i in range(3)]
    new = Model("new", 9e8, 1_000_000, 60, "here")
    before = SpeedModel(right).worker(new, "T4", 1, 8, 128)
    after = SpeedModel([*right, _profile("wrong", "there", 100.0)]).worker(new, "T4", 1, 8, 128)
    assert after.seconds == pytest.approx(before.seconds, rel=0.05)


def test_what_is_planned_is_never_evicted_by_what_others_wrote() -> None:
    """Two hostile profiles of 512 rows each, all of them surer than a job's own first minutes."""
    row = Row("T4", cores=8, batch_size=128, compute=LogMean.of(0.4, 0.1, 20))
    ours = Profile(Model("ours", 8e8, 1_000_000, 60, "here"), (row,))
    hostile = [
        Profile(
            Model(f"wrong-{n}", 9e8, 1_000_000, 60, "there"),
            tuple(
                Row("T4", cores=8, batch_size=b, compute=LogMean.of(10.0, 0.0, 1e6)) for b in range(1, 513)
            ),
        )
        for n in range(2)
    ]
    found = SpeedModel([*hostile, ours], planned={ours.model.key})
    speed = found.worker(ours.model, "T4", 1, 8, 128)
    assert speed.basis is Basis.MEASURED
    assert speed.seconds == pytest.approx(
        SpeedModel([ours]).worker(ours.model, "T4", 1, 8, 128).seconds, rel=0.025
    )
    assert found.left_out == 1025 - priors.MOST_ROWS


def test_of_clusters_owners_take_turns_and_too_many_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user's profiles of 512 rows each took everybody's plans 28 s."""
    monkeypatch.setattr(priors, "MOST_CLUSTERS", 20)
    monkeypatch.setattr(priors, "MOST_PLANNED_CLUSTERS", 30)

    def several(owner: str, models: int, rows: int) -> list[Profile]:
        made = tuple(
            Row("T4", batch_size=1 + n, workers=2 + n, step=LogMean.of(0.1, count=5)) for n in range(rows)
        )
        return [Profile(Model(f"m{n}", 5e8, 1_000_000, 60, owner), made, {}) for n in range(models)]

    profiles = [*several("evil", 3, 40), *several("team", 1, 4), *several("mine", 1, 7)]
    found = SpeedModel(profiles, planned={"mine/m0"})
    kept = Counter(one.owner for one, _ in found._clusters)
    assert kept == {"mine": 7, "team": 4, "evil": 9}
    assert found.left_out == 120 - 9
    busy = [
        Profile(
            Model(f"m{n}", 5e8, 1_000_000, 60, "evil"), (), {k: ServerLoad(1.0, 100.0) for k in range(1, 17)}
        )
        for n in range(3)
    ]
    assert len(SpeedModel(busy, planned=())._loads) == 20


def test_where_there_are_too_many_rows_owners_take_turns_and_then_their_models() -> None:
    def many(name: str, owner: str, rows: int, variance: float) -> list[Observation]:
        one = Model(name, 9e8, 1_000_000, 60, owner)
        return [Observation(Configuration(one, "T4", b, 1, 8), 0.0, variance) for b in range(1, rows + 1)]

    every = many("flood", "there", 2000, 1e-9) + many("b", "there", 50, 0.1) + many("a", "here", 200, 0.1)
    kept = Counter(each.configuration.model.key for each in chosen(every, ()))
    assert kept == {"there/flood": 350, "there/b": 50, "here/a": 200}


def test_two_profiles_of_one_model_count_together_and_what_both_say_once() -> None:
    first, second = _profile("ours", "here", 0.1), _profile("ours", "here", 0.1)
    second = replace(second, server_load={1: ServerLoad(400.0, 100_000)})
    once, twice = SpeedModel([first]), SpeedModel([first, first])
    one, two = (each.worker(first.model, "T4", 1, 8, 128) for each in (once, twice))
    assert two == one
    slow, forth, back, fast = (
        SpeedModel(each).servers.capacity(first.model, 1)[0]
        for each in ([second], [second, first], [first, second], [first])
    )
    assert slow < forth < fast
    assert forth == pytest.approx(back)


def test_the_fit_of_the_servers_is_linear_in_their_models() -> None:
    """It was cubic, in every plan: 400 profiles took 5 s of the processor, and anyone may make them."""
    loads = [
        Load(Model(f"m{i}", 1e8, 10_000 * (i + 1), 50 + i % 300), 1, 1e-4 * (1 + i % 7), 1000)
        for i in range(1000)
    ]

    def seconds(number: int) -> float:
        began = time.process_time()
        ServerModel(loads[:number])
        return time.process_time() - began

    few = min(seconds(100) for _ in range(3))
    assert seconds(1000) < 15 * few
    fit = ServerModel(loads)
    for load in loads[::333]:
        capacity, sigma = fit.capacity(load.model, 1)
        assert capacity == pytest.approx(1 / load.seconds, rel=0.15)
        assert sigma < 0.06


@pytest.mark.parametrize("factor", [0.2, 3.0])
@pytest.mark.parametrize("others", [1, 8, 30])
def test_a_namespace_of_many_slow_models_moves_nobody_elses_prediction(factor: float, others: int) -> None:
    """Thirty of one namespace tripled what a third one was told of its new model, give or take 8 %."""

    def profile(number: int, owner: str, devices: Sequence[str], times: float = 1.0) -> Profile:
        model = Model(f"{owner}-{number}", 4e8 * (1 + number % 7), 1_000_000, 40 + 13 * (number % 9), owner)
        seconds = {each: times * true(model, each) for each in devices}
        rows = [Row(d, batch_size=64, compute=LogMean.of(t, 0.1 * t, 1000)) for d, t in seconds.items()]
        return Profile(model, tuple(rows))

    def true(model: Model, device: str) -> float:
        overhead, rate = {"T4": (3e-3, 2.4e12), "V100": (2e-3, 6e12)}[device]
        return overhead + 3 * float(model.flops or 0) * 64 / rate + 1.4e-4 * model.tensors

    honest = [profile(number, "a", ("T4", "V100")) for number in range(5)]
    slow = [profile(number, "b", ("T4",), factor) for number in range(others)]
    new = Model("new", 1.5e9, 3_000_000, 90, "c")
    found = SpeedModel([*honest, *slow]).worker(new, "T4", 1, 0, 64)
    assert abs(math.log(found.seconds / true(new, "T4"))) < 1.645 * found.sigma
    assert found.seconds == pytest.approx(true(new, "T4"), rel=0.35)
    mine = SpeedModel([*honest, *slow]).worker(honest[0].model, "T4", 1, 0, 64)
    assert mine.seconds == pytest.approx(true(honest[0].model, "T4"), rel=0.02)


@pytest.mark.parametrize("factor", [0.01, 0.2, 100.0])
@pytest.mark.parametrize("others", [1, 50, 200])
def test_a_namespace_of_many_models_moves_nobody_elses_servers(factor: float, others: int) -> None:
    """Two hundred of one namespace told another one, of its new model, a capacity of a twentieth, give or take 24 %."""

    def load(owner: str, number: int, times: float = 1.0) -> Load:
        one = Model(f"{owner}-{number}", 5e8, 500_000 * (1 + number % 9), 60 + 20 * (number % 5), owner)
        return Load(one, 1, times * (1e-5 * one.tensors + 1e-9 * one.parameters), 6000)

    honest = [load("a", number) for number in range(5)]
    wrong = [load("b", number, factor) for number in range(others)]
    new = Model("new", 5e8, 4_000_000, 100, "a")
    alone, beside = ServerModel(honest), ServerModel([*honest, *wrong])
    capacity, sigma = beside.capacity(new, 1)
    assert capacity == pytest.approx(alone.capacity(new, 1)[0], rel=0.05)
    assert sigma == pytest.approx(alone.capacity(new, 1)[1], rel=0.1)
    for each in (honest[0], wrong[-1]):  # what was measured is what was measured
        assert beside.capacity(each.model, 1)[0] == pytest.approx(1 / each.seconds, rel=0.1)


def test_models_of_one_table_or_of_the_only_owner_count_each() -> None:
    def loads(owner: str) -> list[Load]:
        every = (Model(f"m{n}", 5e8, 500_000 * (1 + n % 9), 60 + 20 * (n % 5), owner) for n in range(50))
        return [Load(one, 1, 1e-5 * one.tensors + 1e-9 * one.parameters, 6000) for one in every]

    new = Model("new", 5e8, 4_000_000, 100, "b")
    several = Load(Model("other", 5e8, 1_000_000, 80, "b"), 1, 1.8e-3, 6000)
    table, only = ServerModel(loads("")).capacity(new, 1), ServerModel(loads("a")).capacity(new, 1)
    assert table == only
    assert ServerModel([*loads(""), several]).capacity(new, 1)[1] == pytest.approx(table[1], rel=0.01)
    assert ServerModel([*loads("a"), several]).capacity(new, 1)[1] > table[1]


@given(
    mean_log=st.floats(-6, 6),
    variance=st.sampled_from([0.0, 1e-300, 1e-9, 0.04, 9.0, 1e4]),
    count=st.sampled_from([1e-3, 1.0, 100.0, 1e6]),
    more=st.floats(0.5, 1e3),
    weight=st.floats(0.0, 1.0),
)
def test_the_doubt_of_a_mean_that_steps_do_not_explain_is_a_number(
    mean_log: float, variance: float, count: float, more: float, weight: float
) -> None:
    """A report may say that all steps were alike, and that their mean was another: it must end no plan."""
    told = LogMean(mean_log, variance, count, math.exp(mean_log) * more)
    assert 0 <= told.doubt(weight) < math.inf
