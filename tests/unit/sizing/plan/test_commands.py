"""`shoal plan` and `simulate`: files in, JSON and sentences out, exit code 2 for invalid input."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from shoal.api.speed_profile import BesideSteps
from shoal.api.training_job import TrainingJob
from shoal.cli import main
from shoal.errors import Unavailable, UsageError
from shoal.sizing.availability import Markov, Stock
from shoal.sizing.fleet.jobs import END_SECONDS
from shoal.sizing.plan.assemble import assembled
from shoal.sizing.plan.manifests import profile_for, read_job, read_pools, read_profiles
from shoal.sizing.plan.planner import plan
from shoal.sizing.plan.problem import Objective, Pool, Problem
from shoal.sizing.plan.work import StepWork

ROOT = Path(__file__).parents[4]
DATA, EXAMPLES = ROOT / "tests" / "data", ROOT / "examples" / "sizing"
RESOURCES = [
    "-f", str(EXAMPLES / "job.yaml"),
    "--pools", str(EXAMPLES / "pools.yaml"), "--profiles", str(EXAMPLES / "profiles.yaml"),
]  # fmt: skip
TRACE = str(DATA / "traces/aws-p3-2xlarge-32-nodes.csv")


def shoal(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.by_day(2)
@pytest.mark.parametrize("deadline", ["1", "10", "60", "120"])
def test_deadline_before_which_no_worker_can_start_is_answered_in_words(deadline: str) -> None:
    result = shoal("plan", *RESOURCES, "--deadline", deadline)
    assert result.exit_code == 3, result.output
    assert "No plan ends within" in result.output
    answer = json.loads(shoal("plan", *RESOURCES, "--deadline", deadline, "--json").output)
    assert answer["deadlineKept"] == 0
    assert 120 < answer["finishSeconds"]["p5"] <= answer["timeSeconds"] <= answer["finishSeconds"]["p95"]


def test_plan_is_explained_and_plotted(tmp_path: Path) -> None:
    picture = tmp_path / "front.png"
    result = shoal("plan", *RESOURCES, "--plot", str(picture), "--trace", f"spot-p100={TRACE}")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Run ")
    assert "from spot-p100" in result.output
    assert "cheapest plan that ends within the deadline of 39 min 50 s" in result.output
    assert "node-hours" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["front.png"]


@pytest.mark.nightly
def test_a_plot_is_written_through_a_link_and_does_not_take_its_place(tmp_path: Path) -> None:
    """Nor that of a device, which it did: `--plot /dev/full` as root left a picture there for all programs."""
    picture, link, device = (tmp_path / name for name in ("front.png", "link", "device"))
    link.symlink_to(picture)
    device.symlink_to(os.devnull)
    for each in (link, device):
        result = shoal("plan", *RESOURCES, "--plot", str(each))
        assert result.exit_code == 0, result.output
        assert each.is_symlink()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_simulate_compares_all_policies(tmp_path: Path) -> None:
    picture = tmp_path / "runs.png"
    arguments = ["simulate", *RESOURCES, "--trace", TRACE, "--runs", "50", "--slack", "1.3"]
    shown = shoal(*arguments, "--plot", str(picture))
    assert shown.exit_code == 0, shown.output
    assert "uniform progress" in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    answer = json.loads(shoal(*arguments, "--json").output)
    assert set(answer["policies"]) == {
        "shoal", "spot only", "on-demand only", "greedy with safety net", "uniform progress", "oracle",
    }  # fmt: skip
    ours = answer["policies"]["shoal"]
    assert ours["deadlinesKept"] == 1
    assert len(ours["workersOverTime"]) == len(answer["timesSeconds"])


def _edited(tmp_path: Path, name: str, old: str, new: str) -> list[str]:
    text = (EXAMPLES / name).read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    return [str(path) if argument.endswith(name) else argument for argument in RESOURCES]


@pytest.mark.by_day(8)
@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("job.yaml", "spot-k80, ", "spot-k90, ", "names spot-k90"),
        ("job.yaml", "[ps]", "[ps2]", "names ps2"),
        ("job.yaml", "spot-k80, ", "ps, ", "ps, which has no accelerator"),
        ("job.yaml", "deadlineSeconds", "deadline", "objective.deadline: there is no such field"),
        (
            "job.yaml",
            "    pools: [spot-k80, spot-p100, on-demand-p100]",
            "    pool: [spot-k80]",
            "workers.pool: there is no such field",
        ),
        (
            "job.yaml",
            "stopAfter: {epochs: 400}",
            "stopAfter: {metric: accuracy, value: '0.9'}",
            "steps or epochs",
        ),
        ("job.yaml", "kind: TrainingJob", "kind: Job", "0 TrainingJobs"),
        ("job.yaml", "epochs: 400", "epochs: -1", "spec.training.stopAfter.epochs"),
        (
            "job.yaml",
            "spec:",
            "status: {startTime: '2026-01-01T00:00:00Z'}\nspec:",
            "has passed: set --deadline",
        ),
        ("job.yaml", "spec:", "status: {startTime: '2026-01-01T00:00:00'}\nspec:", "has no time zone"),
        ("pools.yaml", "apiVersion: shoal.dev", "apiVersion: plan.shoal.dev", "must be shoal.dev/v1alpha1"),
        (
            "pools.yaml",
            "perHour: 0.23",
            "perHour: cheap",
            "spec.price.perHour: input should be a valid number",
        ),
        ("pools.yaml", "perHour: 0.23", "perHour: -0.23", "spec.price.perHour: input should be greater than"),
        ("job.yaml", "epochs: 400", "epochs: 2.5", "input should be a valid integer"),
        ("pools.yaml", "name: K80", "name: K81", "not in the catalogue"),
        ("pools.yaml", "startupSeconds: 160", "startSeconds: 160", "check its spelling"),
        ("pools.yaml", "metadata: {name: spot-k80}", "metadata: {name: spot-p100}", "two CapacityPools"),
        ("pools.yaml", "spec:", "spec: [", "is not YAML"),
        ("profiles.yaml", "stepSeconds: 0.218", "stepSeconds: 0", "greater than 0"),
        ("profiles.yaml", "samplesPerEpoch: 50000", "# none", "samplesPerEpoch"),
        (
            "job.yaml",
            "stopAfter: {epochs: 400}",
            "stopAfter: {}",
            "set at least one of epochs, steps, or metric",
        ),
        # As the API server has it: no text for a number, no yes for either.
        (
            "job.yaml",
            "deadlineSeconds: 2400",
            "maxCost: yes",
            "maxCost: input should be a valid number, not True",
        ),
        (
            "job.yaml",
            "deadlineSeconds: 2400",
            "deadlineSeconds: '2400'",
            "should be a valid integer, not '2400'",
        ),
        (
            "job.yaml",
            "spec:",
            "spec:\n  suspend: 'yes'",
            "spec.suspend: input should be a valid boolean, not 'yes'",
        ),
        (
            "pools.yaml",
            "interruptionsPerHour: 0.08",
            "interruptionsPerHour: 1.0e+300",
            "less than or equal to 1000",
        ),
        ("job.yaml", "spec:", "annotations: &a {a: *a}\nspec:", "contains itself"),
    ],
)
def test_invalid_file_raises_error_with_advice(
    tmp_path: Path, name: str, old: str, new: str, says: str
) -> None:
    result = shoal("plan", *_edited(tmp_path, name, old, new), "--plot", str(tmp_path / "never.png"))
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())
    assert not (tmp_path / "never.png").exists()


def test_numbers_in_quotes_and_times_without_are_read_as_kubectl_reads_them(tmp_path: Path) -> None:
    job, pools = tmp_path / "job.yaml", tmp_path / "pools.yaml"
    text = (EXAMPLES / "job.yaml").read_text()
    began = text.replace(
        "{name: resnet32-cifar10}",
        "{name: a, creationTimestamp: 2026-01-01T00:00:00Z, annotations: {2026-01-01: x}}",
    )
    begun = began.replace("stopAfter: {epochs: 400}", "stopAfter: {epochs: 4.0e+2}")
    job.write_text(begun.replace("deadlineSeconds: 2400", "maxCost: '5e0'"))
    text = (EXAMPLES / "pools.yaml").read_text()
    pools.write_text(text.replace("perHour: 0.23", "perHour: '.23'"))
    read = read_job(job)
    assert read.metadata.creation_timestamp == "2026-01-01 00:00:00+00:00"
    assert read.spec.elasticity.objective.max_cost == 5.0
    assert read.spec.training.stop_after.epochs == 400
    [price] = {pool.spec.price.per_hour for pool in read_pools(pools)[:1] if pool.spec.price}
    assert price == 0.23


def test_deadline_option_replaces_one_that_has_passed(tmp_path: Path) -> None:
    started = _edited(tmp_path, "job.yaml", "spec:", "status: {startTime: '2026-01-01T00:00:00Z'}\nspec:")
    planned = shoal("plan", *started, "--deadline", "2400", "--json")
    assert planned.exit_code == 0, planned.output
    simulated = shoal("simulate", *started, "--trace", TRACE, "--runs", "5", "--slack", "1.3", "--json")
    assert simulated.exit_code == 0, simulated.output


def _problem(job: TrainingJob, pools: Path, now: datetime | None = None) -> Problem:
    profiles = read_profiles(EXAMPLES / "profiles.yaml")
    profile = profile_for(job, profiles, "profiles.yaml")
    return assembled(job, read_pools(pools), profile, profiles, now=now or datetime.now(UTC))[1].problem


def _job(tmp_path: Path, stop: str, status: str = "{}") -> TrainingJob:
    path = tmp_path / "job.yaml"
    text = (EXAMPLES / "job.yaml").read_text().replace("{epochs: 400}", stop)
    path.write_text(text.replace("spec:", f"status: {status}\nspec:"))
    return read_job(path)


def test_deadline_of_running_job_counts_from_its_start(tmp_path: Path) -> None:
    start = datetime(2026, 11, 21, 12, tzinfo=UTC)
    job = _job(tmp_path, "{epochs: 400}", "{startTime: '2026-11-21T12:00:00Z'}")
    waits = _job(tmp_path, "{epochs: 400}")

    def left(job: TrainingJob, seconds: float) -> float | None:
        return _problem(
            job, EXAMPLES / "pools.yaml", now=start + timedelta(seconds=seconds)
        ).objective.deadline

    assert left(job, 400) == 2000 - END_SECONDS
    assert left(job, -9) == 2400 - END_SECONDS  # clocks differ
    assert left(waits, 0) == 2400 - END_SECONDS
    with pytest.raises(UsageError, match=r"2026-11-21 12:00:00 UTC\) has passed"):
        left(job, 2400)


def test_what_a_pool_counted_of_its_stock_and_shocks_is_planned_with(tmp_path: Path) -> None:
    """By the command as by the operator; without on-demand nodes in reserve, stock-outs are part of the plan."""
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    stock = (
        "{watchedSeconds: '720000', outSeconds: '360000', outs: '100', countedUntil: '2026-10-22T12:00:00Z'}"
    )
    lost = "{seen: 40, nodeHours: '400', inShocks: 30, atShocks: 50}"
    text = (EXAMPLES / "pools.yaml").read_text()
    spot, rest = text.split("metadata: {name: spot-p100}")
    status = f"metadata: {{name: spot-p100}}\nstatus: {{stock: {stock}, interruptions: {lost}}}"
    pools = tmp_path / "pools.yaml"
    pools.write_text((spot + status + rest).replace("limits: {nodes: 16}", "limits: {nodes: 4}"))
    k80, known, _ = _problem(_job(tmp_path, "{epochs: 400}"), pools, now).pools
    assert known.stock == Stock.watched(360_000, 180_000, 50)  # half of it, after 30 days
    assert known.shock_share == pytest.approx((5 + 15) / (10 + 20))  # what was counted of losses, too
    assert known.shock_size == pytest.approx((5 + 15) / (10 + 25))
    assert isinstance(known.availability, Markov)
    assert known.availability.stock == known.stock
    assert isinstance(k80.availability, Markov)
    assert k80.availability.stock == Stock()


def test_a_deadline_on_the_command_line_is_that_of_the_job(tmp_path: Path) -> None:
    """The last snapshot and the export need their time before both."""
    without = _edited(tmp_path, "job.yaml", "deadlineSeconds: 2400, ", "")
    asked = json.loads(shoal("plan", *without, "--deadline", "40m", "--json").output)
    assert asked == json.loads(shoal("plan", *RESOURCES, "--json").output)


def test_a_job_that_has_not_started_and_cannot_be_in_time_is_answered_in_words(tmp_path: Path) -> None:
    files = _edited(tmp_path, "job.yaml", "deadlineSeconds: 2400", "deadlineSeconds: 5")
    result = shoal("plan", *files)
    assert result.exit_code == 3, result.output
    assert "No plan ends within" in result.output


def test_what_is_used_up_is_what_binds(tmp_path: Path) -> None:
    """Sixteen on-demand nodes are used up, and so are the job's sixteen workers."""
    fastest = "--deadline", "20m", "--prefer", "MinTime"
    said = " ".join(shoal("plan", *RESOURCES, *fastest).output.split())
    assert "or raise what is used up: workers.maxReplicas and the limit of on-demand-p100." in said
    more = _edited(tmp_path, "pools.yaml", "nodes: 16", "nodes: 32")
    said = " ".join(shoal("plan", *more, *fastest).output.split())
    assert "or raise what is used up: workers.maxReplicas." in said


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("options", "said"), [([], "(asked for: 80%)"), (["--confidence", "0.995"], "(asked for: 99.5%)")]
)
def test_confidence_is_the_jobs_unless_an_option_says_another(
    options: list[str], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    text = (EXAMPLES / "job.yaml").read_text()
    path.write_text(text.replace("deadlineSeconds: 2400", 'deadlineSeconds: 2400, confidence: "0.8"'))
    assert said in shoal("plan", "-f", str(path), *RESOURCES[2:], *options).output.replace("\n", " ")


def test_budget_of_a_running_job_is_what_it_has_not_spent(tmp_path: Path) -> None:
    """Twenty were allowed and 19.50 paid, and a plan of 2.27 was feasible."""
    path = tmp_path / "job.yaml"
    text = (EXAMPLES / "job.yaml").read_text()
    assert "deadlineSeconds: 2400" in text
    text = text.replace("deadlineSeconds: 2400", "maxCost: 20")
    files = [str(path), *RESOURCES[2:]]
    for spent, code, words in (
        ("19.50", 3, "budget of $0.50"),
        ("20.5", 2, "the budget of 20 is spent (20.50)"),
    ):
        path.write_text(text.replace("spec:", f"status: {{cost: {{accumulated: '{spent}'}}}}\nspec:", 1))
        result = shoal("plan", "-f", *files)
        assert result.exit_code == code, result.output
        assert words in " ".join(result.output.split())
    path.write_text(text.replace("spec:", "status: {cost: {accumulated: '10'}}\nspec:", 1))
    assert shoal("plan", "-f", *files).exit_code == 0
    assert shoal("plan", "-f", *files, "--max-cost", "0.5").exit_code == 3


@pytest.mark.parametrize(
    ("stop", "status", "steps"),
    [
        ("{epochs: 2, steps: 1000}", "{}", 100_000 / 128),
        ("{epochs: 2, steps: 700}", "{}", 700),
        ("{epochs: 2, steps: 1000}", "{training: {step: 500, epoch: 1}}", 50_000 / 128),
        ("{epochs: 2, steps: 800}", "{training: {step: 500, epoch: 1}}", 300),
        ("{epochs: 2}", "{}", 100_000 / 128),
        ("{epochs: 2}", "{training: {epoch: 1}, data: {done: 12500, total: 50000}}", 37_500 / 128),
        ("{epochs: 2}", "{training: {epoch: 0}, data: {done: 12500}}", 87_500 / 128),
        ("{steps: 700, metric: accuracy, value: '0.9'}", "{}", 700),
    ],
)
def test_first_of_epochs_and_steps_ends_job(tmp_path: Path, stop: str, status: str, steps: float) -> None:
    job = _job(tmp_path, stop, status)
    problem = _problem(job, EXAMPLES / "pools.yaml")
    made = problem.work.iterations(np.array([128.0, 128.0]), np.array([1.0, 4.0]))
    assert made == pytest.approx([steps, steps])
    assert any("may end earlier, when accuracy" in note for note in problem.notes) == ("metric" in stop)


def test_evaluation_that_the_profile_measured_is_part_of_the_work(tmp_path: Path) -> None:
    job = _job(tmp_path, "{epochs: 2}")
    (profile,) = read_profiles(EXAMPLES / "profiles.yaml")
    beside = BesideSteps(epochs="3", others="6", task_samples="30000", wait_samples="60000")
    seen = profile.model_copy(update={"status": profile.status.model_copy(update={"beside": beside})})
    pools = read_pools(EXAMPLES / "pools.yaml")
    problem = assembled(job, pools, seen, [seen], now=datetime.now(UTC))[1].problem
    made = problem.work.iterations(np.array([128.0, 128.0]), np.array([1.0, 4.0]))
    # Two epochs, each with a task of 10,000 samples, while which each of the other workers waits.
    assert made == pytest.approx([(100_000 + 2 * 10_000) / 128, (100_000 + 2 * 4 * 10_000) / 128])


def test_a_step_that_was_not_measured_is_told_once_for_two_pools_of_an_accelerator(tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    pools.write_text((EXAMPLES / "pools.yaml").read_text().replace("name: P100", "name: L4"))
    problem = _problem(_job(tmp_path, "{epochs: 400}"), pools)
    assert sum(pool.accelerator.startswith("L4") for pool in problem.pools) == 2
    assert sum("was measured on L4" in note for note in problem.notes) == 1


def test_running_workers_and_servers_need_no_startup(tmp_path: Path) -> None:
    slots = ", ".join(
        f"{{role: worker, index: 0, incarnation: 0, state: {state}, pool: {pool}, node: n}}"
        for state, pool in (
            ("Running", "spot-k80"),
            ("Running", "spot-p100"),
            ("Starting", "spot-p100"),
            ("Draining", "spot-p100"),
            ("Running", "elsewhere"),
            ("Running", "''"),
        )
    )
    job = _job(tmp_path, "{epochs: 400}", f"{{parameterServers: {{ready: 2}}, slots: [{slots}]}}")
    problem = _problem(job, EXAMPLES / "pools.yaml")
    assert {p.name: p.running for p in problem.pools} == {"spot-k80": 1, "spot-p100": 2, "on-demand-p100": 0}
    assert problem.servers.running == 2
    assert problem.servers.wait(2) == 0 < problem.servers.wait(3)
    notes = " ".join(problem.notes)
    assert "2 workers run in elsewhere, no pool" in notes
    assert "name it in workers.pools" in notes


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("images", "code"),
    [(None, 0), ({"ps": "a", "worker": "b", "workerGpu": "c"}, 0), ({"ps": "a", "worker": "b"}, 2)],
)
def test_pools_with_gpus_are_left_out_of_a_job_that_has_begun_without_an_image_for_them(
    tmp_path: Path, images: dict[str, str] | None, code: int
) -> None:
    """What the operator leaves out was planned."""
    job = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job | ({} if images is None else {"status": {"images": images}})))
    result = shoal("plan", "-f", str(path), *RESOURCES[2:])
    assert result.exit_code == code, result.output
    assert ("Shoal has no worker image with CUDA" in result.output) == (code == 2)


def test_max_servers_limits_plan(tmp_path: Path) -> None:
    few = json.loads(shoal("plan", *RESOURCES, "--max-servers", "1", "--prefer", "MinTime", "--json").output)
    many = json.loads(shoal("plan", *RESOURCES, "--prefer", "MinTime", "--json").output)
    assert few["parameterServers"] == 1 < many["parameterServers"]
    assert "not measured" in many["reason"]
    assert "not measured" not in few["reason"]
    _edited(tmp_path, "job.yaml", "parameterServers: {pools: [ps]}", "parameterServers: {replicas: 3}")
    (tmp_path / "pools.yaml").write_text((EXAMPLES / "pools.yaml").read_text().rsplit("---", 1)[0])
    changed = [a.replace(str(EXAMPLES), str(tmp_path)) for a in RESOURCES[:-1]]
    refused = shoal("plan", *changed, RESOURCES[-1], "--max-servers", "2")
    assert refused.exit_code == 2
    assert "--max-servers 2 is less than" in " ".join(refused.output.split())


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_infeasible_plan_exits_with_3(arguments: list[str]) -> None:
    result = shoal("plan", *RESOURCES, "--deadline", "300", *arguments)
    assert result.exit_code == 3
    assert "No plan ends within 4 min 50 s" in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert shoal("plan", *RESOURCES, *arguments).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "--pools", str(EXAMPLES / "pools.yaml")], "Missing option '-f'"),
        (["plan", *RESOURCES, "--max-cost", "0"], "0.0 is not in the range x>0"),
        (["plan", *RESOURCES, "--max-cost", "-1"], "-1.0 is not in the range x>0"),
        (["plan", *RESOURCES, "--max-cost", "nan"], "the budget must be above 0, not nan"),
        (["plan", *RESOURCES, "--loss", "0.8"], "No such option"),
        (["plan", *RESOURCES, "--trace", "nothing"], "POOL=FILE"),
        (["simulate", *RESOURCES, "--trace", TRACE, "--slack", "1.2", "--deadline", "9"], "not both"),
        (
            ["simulate", *RESOURCES, "--trace", TRACE, "--slack", "10000"],
            "more than 100 days are not simulated",
        ),
        (["simulate", *RESOURCES, "--trace", TRACE, "--deadline", "101d"], "more than 100 days are not"),
    ],
)
def test_invalid_option_raises_error_with_advice(arguments: list[str], says: str) -> None:
    result = shoal(*arguments)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())


def test_parameter_servers_are_in_a_zone_of_the_workers(tmp_path: Path) -> None:
    text = (EXAMPLES / "pools.yaml").read_text()
    server = text[
        text.index("---\napiVersion: shoal.dev/v1alpha1\nkind: CapacityPool\nmetadata: {name: ps}") :
    ]
    cheaper = (
        server.replace("name: ps}", "name: far}").replace("us-east1-c", "us-east1-b").replace("0.19", "0.18")
    )
    (tmp_path / "pools.yaml").write_text(text.rstrip() + "\n" + cheaper)
    text = (
        (EXAMPLES / "job.yaml").read_text().replace("parameterServers: {pools: [ps]}", "parameterServers: {}")
    )
    (tmp_path / "job.yaml").write_text(text)
    found = _problem(read_job(tmp_path / "job.yaml"), tmp_path / "pools.yaml")
    assert (found.servers.price, found.servers.zone) == (0.19, "us-east1-c")


def _with_profile(tmp_path: Path, old: str, new: str) -> dict[str, object]:
    result = shoal("plan", *_edited(tmp_path, "profiles.yaml", old, new), "--json")
    assert result.exit_code in (0, 3), result.output
    answer: dict[str, object] = json.loads(result.output)
    return answer


def test_one_saturated_cluster_changes_the_plan(tmp_path: Path) -> None:
    """Before, the row was ignored, and the plan promised 30 minutes with 8 workers where it takes about 98."""
    text = (EXAMPLES / "profiles.yaml").read_text()
    rows = text[text.index("    - {accelerator: P100, batchSize: 128, workers: 4") :]
    one = "    - {accelerator: P100, batchSize: 128, workers: 8, stepSeconds: 0.60, count: 2}\n"
    arguments = _edited(tmp_path, "profiles.yaml", rows, one)
    found = json.loads(shoal("plan", *arguments, "--max-servers", "1", "--json").output)
    assert not found["feasible"]
    assert found["timeSeconds"] > 90 * 60
    assert "not measured together" not in found["reason"]


def test_batch_sizes_of_accelerators_are_planned_with(tmp_path: Path) -> None:
    sized = "batchSize: 128\n    batchSizes: [{accelerator: K80, batchSize: 32}]"
    job = read_job(Path(_edited(tmp_path, "job.yaml", "batchSize: 128", sized)[1]))
    batches = {pool.name: pool.batch for pool in _problem(job, EXAMPLES / "pools.yaml").pools}
    assert batches == {"spot-k80": 32, "spot-p100": 128, "on-demand-p100": 128}


@pytest.mark.parametrize("spread", ["5", "-5"])
def test_impossible_spread_is_refused_without_traceback(tmp_path: Path, spread: str) -> None:
    arguments = _edited(tmp_path, "profiles.yaml", "spread: 0.004", f"spread: {spread}")
    result = shoal("plan", *arguments)
    assert result.exit_code == 2, result.output
    assert "spread" in result.output


def test_tiny_step_time_has_no_traceback(tmp_path: Path) -> None:
    result = shoal("plan", *_edited(tmp_path, "profiles.yaml", "stepSeconds: 0.218", "stepSeconds: 1e-99"))
    assert result.exit_code in (0, 2, 3), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_budget_is_kept_with_the_confidence_and_not_on_average() -> None:
    """Before, MinTime with a budget of $2.40 cost more in 52 % of the runs."""
    found = json.loads(
        shoal(
            "plan", *RESOURCES, "--prefer", "MinTime", "--deadline", "9000", "--budget", "2.8", "--json"
        ).output
    )
    assert found["feasible"]
    assert found["budgetKept"] >= 0.95


def test_fastest_plan_is_the_fastest() -> None:
    """Before, the plan with the least spread was called the fastest."""
    fast = Pool("fast", 16, 1.5, 0.083, 128, spot=False, step_sigma=1.5)
    slow = Pool("slow", 8, 0.2, 0.218, 128, spot=False)
    answer = plan(Problem((fast, slow), StepWork(steps=150_000), objective=Objective(deadline=600)))
    assert not answer.feasible
    assert answer.counts == (16, 8)


def test_other_models_predict_one_without_rows(tmp_path: Path) -> None:
    text = (EXAMPLES / "profiles.yaml").read_text()
    other = text.replace("name: resnet32-cifar10", "name: other").replace(
        "fingerprint: resnet32", "fingerprint: other"
    )
    bare = text[: text.index("  rows:")]
    (tmp_path / "profiles.yaml").write_text(f"{bare}---\n{other}")
    arguments = [str(tmp_path / "profiles.yaml") if a.endswith("profiles.yaml") else a for a in RESOURCES]
    found = json.loads(shoal("plan", *arguments, "--json").output)
    assert "predicted from other models" in found["reason"]


def test_without_files_pools_and_profiles_come_from_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Cluster:
        namespace = "default"

        def list(self, path: str, **_: str) -> list[dict[str, object]]:
            asked.append(path)
            name = "pools" if path.endswith("capacitypools") else "profiles"
            found: list[dict[str, object]] = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
            return found

    monkeypatch.setattr("shoal.client.api.Api.connect", lambda *_: Cluster())
    there = json.loads(shoal("plan", "-f", str(EXAMPLES / "job.yaml"), "--json").output)
    files = json.loads(shoal("plan", *RESOURCES, "--json").output)
    assert there["counts"] == files["counts"]
    assert asked == [
        "/apis/shoal.dev/v1alpha1/namespaces/default/speedprofiles",
        "/apis/shoal.dev/v1alpha1/capacitypools",
    ]


def test_without_files_and_cluster_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object) -> None:
        raise Unavailable("no cluster to talk to: set KUBECONFIG.")

    monkeypatch.setattr("shoal.client.api.Api.connect", nowhere)
    result = shoal("plan", "-f", str(EXAMPLES / "job.yaml"))
    assert result.exit_code == 4
    assert "KUBECONFIG; or give files with --pools and --profiles" in " ".join(result.output.split())
