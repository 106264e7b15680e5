"""The alerts and the dashboard of the chart: valid, on series that there are, with runbooks that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.paths import ROOT
from dev.tools.prometheus import prometheus_command
from shoal.api.training_job import TrainingJob
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.runtime.metrics import Metrics
from shoal_trainer.contract import (
    MAX_SPEEDS,
    MAX_WORKERS,
    MOST_METRICS,
    LogSums,
    Phase,
    ShardReport,
    SpeedSums,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from shoal_trainer.coordinator.metrics import StatusCollector
from tests.chart.rendered import of_kind, render
from tests.unit.docs.pages import code, read, rows, section
from tests.unit.policy import build

FILES = ROOT / "charts" / "shoal" / "files"
ALERTS = yaml.safe_load((FILES / "alerts.yaml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((FILES / "dashboard.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
HISTOGRAM = ("_bucket", "_count", "_sum")


def series() -> dict[str, set[str]]:
    """The labels of each series. tests/unit/docs compares these tables with the code."""
    found: dict[str, set[str]] = {}
    for heading in ("Operator", "Node pools", "Coordinator"):
        for name, kind, labels, _ in rows(section(read("docs/metrics.md"), heading)):
            names = [code(name)[0] + each for each in HISTOGRAM] if kind == "histogram" else [code(name)[0]]
            found |= {
                each: set(code(labels)) | ({"le"} if each.endswith("_bucket") else set()) for each in names
            }
    return found


SCRAPED = {"namespace", "pod", "job", "instance", "shoal_dev_job"}
"""Labels that Prometheus adds."""


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_query_is_about_series_and_labels_that_there_are(query: str) -> None:
    known = series()
    names = re.findall(r"\bshoal_(?!dev_job)[a-z_]+", query)
    assert names
    assert [name for name in names if name not in known] == []
    labels = set().union(*(known[name] for name in names)) | SCRAPED
    for matchers in re.findall(r"\{([^}]*)\}", query):
        assert {each.strip() for each in re.findall(r"([a-z_]+)\s*[=!]", matchers)} <= labels
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        assert {each.strip() for each in grouped.split(",")} <= labels


def promtool(folder: Path, *words: str) -> str:
    """What it says with the rules, without their descriptions, in this folder; nothing if it finds no fault."""
    plain = re.sub(r"\n *description: .*", "", (FILES / "alerts.yaml").read_text(encoding="utf-8"))
    (folder / "alerts.yaml").write_text(plain)
    command = [str(prometheus_command("promtool")), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_their_tests(tmp_path: Path) -> None:
    """Descriptions are compared with the runbooks below."""
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)
    assert promtool(tmp_path, "test", "rules", "alerts_test.yaml") == ""
    assert promtool(tmp_path, "check", "rules", "alerts.yaml") == ""


def test_nothing_fires_in_a_cluster_where_jobs_come_and_go(tmp_path: Path) -> None:
    """Six hours: a job is applied every 3 minutes and trains after 4; others are suspended and resumed, queued, and
    managed elsewhere. What Prometheus reads of them is what `JobMetrics` says."""
    every, hours = timedelta(seconds=30), 6
    moments = [build.NOW + number * every for number in range(hours * 120)]
    now, jobs = build.NOW, list[TrainingJob]()
    metrics = JobMetrics(process := Metrics(), wall=lambda: now)
    metrics.count_jobs(lambda: jobs)
    samples = defaultdict[str, dict[int, float]](dict)
    for number, now in enumerate(moments):
        past = now - build.NOW
        begun = [build.NOW + timedelta(minutes=at) for at in range(0, hours * 60, 3)]
        starting = [job_since(at, at) for at in begun if at <= now < at + timedelta(minutes=4)]
        held, resumed = ("Suspended", "Suspended"), build.NOW + timedelta(hours=3)
        waits = past >= timedelta(hours=3) and past < timedelta(hours=3, minutes=5)
        again = job_since(build.NOW, resumed) if waits else job_since(build.NOW, build.NOW, *held)
        queued = job_since(build.NOW, build.NOW, "Pending", "Queued")
        remote = job_since(build.NOW, build.NOW, "", "", managedBy="kueue.x-k8s.io/multikueue")
        jobs[:] = [*starting, again, queued, remote]
        for family in process.registry.collect():
            for sample in family.samples:
                if sample.name.startswith("shoal_jobs"):
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    samples[f'{sample.name}{{namespace="shoal-system",{labels}}}'][number] = sample.value
    read = [
        {"series": series, "values": " ".join(str(found.get(each, "_")) for each in range(len(moments)))}
        for series, found in samples.items()
    ]
    last, suspended = len(moments) - 1, 240
    within = 'namespace="t",pod="{0}-ps-0-{1}",shoal_dev_job="{0}"'
    resumes = {
        "shoal_steps_total": "0+9x{0} _x{1} 2160+9x{2}",
        "shoal_samples_lost_total": "32x{0} _x{1} 32x{2}",
        "shoal_restarts_from_nothing_total": "1x{0} _x{1} 1x{2}",
        "shoal_snapshots_failing_seconds": "0x{0} _x{1} 0x{2}",
    }
    read += [
        {"series": f"{name}{{{within.format('a', 0)}}}", "values": values.format(239, suspended, last - 480)}
        for name, values in resumes.items()
    ]
    always = {
        'shoal_leading{namespace="shoal-system",pod="a"}': f"1x{last}",
        'shoal_leading{namespace="shoal-system",pod="b"}': f"0x{last}",
        'shoal_watch_restarts_total{namespace="shoal-system",resource="pods",reason="expired"}': f"0+1x{last}",
        'shoal_coordinator_polls_total{namespace="shoal-system",result="read"}': f"0+20x{last}",
        'shoal_coordinator_polls_total{namespace="shoal-system",result="unreachable"}': f"0+2x{last}",
        'shoal_reconcile_seconds_count{namespace="shoal-system",controller="trainingjob",result="done"}': f"0+5x{last}",
        f'shoal_workers{{{within.format("a", 0)},state="Active"}}': f"4x239 _x{suspended} 4x{last - 480}",
    }
    read += [{"series": series, "values": values} for series, values in always.items()]
    # What was lost before the first scrape is told once, in the first hour.
    told = ("ShoalDataLost", "ShoalRestartedFromNothing")
    silent = [
        {"eval_time": f"{minutes}m", "alertname": rule["alert"], "exp_alerts": []}
        for minutes in range(15, hours * 60, 15)
        for rule in RULES
        if minutes > 70 or rule["alert"] not in told
    ]
    test = {"interval": "30s", "input_series": read, "alert_rule_test": silent}
    file = tmp_path / "healthy.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    assert promtool(tmp_path, "test", "rules", file.name) == ""


def job_since(
    created: datetime, changed: datetime, phase: str = "Starting", reason: str = "", **spec: str
) -> TrainingJob:
    """A job that does not train, made then, whose condition Suspended is as it is since `changed`."""
    manifest = build.job_manifest(**spec)
    manifest["metadata"]["creationTimestamp"] = build.stamp(created)
    since = {"lastTransitionTime": build.stamp(changed), "reason": "X"}
    conditions = [{"type": "Suspended", "status": str(phase == "Suspended"), **since}]
    manifest["status"] = {"phase": phase, "reason": reason, "conditions": conditions if phase else []}
    return TrainingJob.model_validate(manifest)


def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"q{number}", "expr": re.sub(r"\$\w+", ".*", query)}
        for number, query in enumerate(QUERIES)
    ]
    (tmp_path / "queries.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    words = [
        str(prometheus_command("promtool")),
        "check",
        "rules",
        "--lint=none",
        str(tmp_path / "queries.yaml"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_hold_releases_and_jobs_of_one_name_apart() -> None:
    """Each release has its dashboard, which would else add up all of them; a job's name is one of its namespace."""
    for query in QUERIES:
        selected = re.findall(r"shoal_\w+(?:\{([^}]*)\})?", re.sub(r"by \([^)]*\)", "", query))
        assert selected, query
        assert {each.partition(",")[0] for each in selected} <= {
            'namespace="shoal-system"',
            'namespace=~"$namespace"',
        }, query
        for grouped in re.findall(r"by \(([^)]*shoal_dev_job[^)]*)\)", query):
            assert grouped.startswith("namespace, "), query


def test_every_alert_has_a_severity_a_runbook_and_a_test() -> None:
    runbooks = dict(re.findall(r"^## (\w+)\n\n(\w+)\.", read("docs/runbooks.md"), re.MULTILINE))
    assert {rule["alert"]: rule["labels"]["severity"] for rule in RULES} == {
        alert: severity.lower() for alert, severity in runbooks.items()
    }
    assert all(rule["annotations"]["runbook_url"] == f"RUNBOOK#{rule['alert'].lower()}" for rule in RULES)
    tests = yaml.safe_load(Path(__file__).with_name("alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert {rule["alert"] for rule in RULES} == fired


def test_an_alert_begins_with_the_first_sentence_of_its_runbook() -> None:
    for rule in RULES:
        text = section(read("docs/runbooks.md"), rule["alert"]).strip().split("\n\n")[0]
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
        description = rule["annotations"]["description"]
        assert text.split(". ", 1)[1].startswith(description), rule["alert"]
        assert description.endswith(".")


def test_panels_are_distinct_and_do_not_overlap() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__all"}
    assert used <= variables


def test_the_chart_ships_them_as_they_are(tools: Path) -> None:
    documents = render(
        tools, "metrics.rules.enabled=true", "metrics.dashboard.enabled=true", "metrics.rules.runbookUrl=https://x/r",
        "metrics.rules.labels.release=prom", namespace="team-a",
    )  # fmt: skip
    [rule] = of_kind(documents, "PrometheusRule")
    text = (FILES / "alerts.yaml").read_text(encoding="utf-8").replace("RUNBOOK", "https://x/r")
    text = text.replace("shoal-system", "team-a")
    assert rule["spec"] == yaml.safe_load(text)
    assert rule["metadata"]["labels"]["release"] == "prom"
    name, dashboard = the_dashboard(documents)
    assert name == "team-a_shoal.json"
    of_release = {each: dashboard[each] for each in ("title", "uid")}
    assert dashboard == json.loads(json.dumps(DASHBOARD).replace("shoal-system", "team-a")) | of_release
    assert dashboard["title"] == "Shoal (team-a/shoal)"


def the_dashboard(documents: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The name of its file, and what is in it."""
    [found] = [d for d in of_kind(documents, "ConfigMap") if "grafana_dashboard" in d["metadata"]["labels"]]
    [(name, text)] = found["data"].items()
    return name, json.loads(text)


def test_dashboards_of_two_releases_are_two_and_stay_what_they_are(tools: Path) -> None:
    """Grafana's sidecar puts the files into one folder, and Grafana keeps one dashboard of each uid and title."""
    sets = ("metrics.dashboard.enabled=true",)
    first, again, second, other = (
        the_dashboard(render(tools, *sets, *more, namespace=namespace))
        for namespace, more in (
            ("team-a", ()), ("team-a", ("image.tag=v2",)), ("team", ("nameOverride=a-shoal",)),
            ("team-a", ("nameOverride=b",)),
        )
    )  # fmt: skip
    assert first == again
    made = [(name, each["uid"], each["title"]) for name, each in (first, second, other)]
    assert [len(set(which)) for which in zip(*made, strict=True)] == [3, 3, 3]
    assert re.fullmatch("[a-z0-9-]{1,40}", first[1]["uid"]), "Grafana takes no longer one"


def test_who_has_no_pools_of_its_own_is_not_told_that_they_are_down(tools: Path) -> None:
    """Where each namespace has an operator, one shoal-pools sizes the pools of all."""
    for sets, told in (
        ((), True),
        (("scope.namespace=team-a",), False),
        (("scope.namespace=team-a", "pools.enabled=true"), True),
    ):
        [rule] = of_kind(render(tools, "metrics.rules.enabled=true", *sets), "PrometheusRule")
        alerts = [each["alert"] for group in rule["spec"]["groups"] for each in group["rules"]]
        assert ("ShoalPoolsDown" in alerts) == told
        assert len(alerts) == len(RULES) - (not told)


def test_of_a_job_no_series_is_taken_that_its_coordinator_does_not_have(tools: Path) -> None:
    """A tenant's image wrote the operator's: the costs on the dashboard, and how many nodes a pool is to have."""
    [monitor] = of_kind(render(tools, "metrics.podMonitor.enabled=true"), "PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    [keep] = endpoint["metricRelabelings"]
    # tests/unit/docs compares this table with the trainer.
    coordinators, *others = (
        {code(name)[0] for name, *_ in rows(section(read("docs/metrics.md"), heading))}
        for heading in ("Coordinator", "Operator", "Node pools")
    )
    assert keep == {"action": "keep", "sourceLabels": ["__name__"], "regex": "|".join(sorted(coordinators))}
    assert coordinators.isdisjoint(set().union(*others))


def test_the_largest_job_is_scraped_and_a_hostile_one_is_not(tools: Path) -> None:
    [monitor] = of_kind(render(tools, "metrics.podMonitor.enabled=true"), "PodMonitor")
    worker = WorkerReport(
        slot=0, incarnation=0, state=WorkerState.ACTIVE,
        step_seconds=0.1, compute_seconds=0.1, pull_seconds=0.1, push_seconds=0.1, input_seconds=0.1,
        wait_seconds=0.1,
    )  # fmt: skip
    measured = LogSums(count=1, seconds=1.0)
    configuration = SpeedSums(
        device="T4", devices=1, cores=1, batch_size=1, workers=1, servers=1,
        compute=measured, pull=measured, push=measured,
    )  # fmt: skip
    report = StatusReport(
        job_uid="u",
        phase=Phase.TRAINING,
        metrics={f"metric {number}": 1.0 for number in range(2 * MOST_METRICS)},
        workers=tuple(replace(worker, slot=slot) for slot in range(MAX_WORKERS)),
        shards=tuple(ShardReport(index=index, epoch=0) for index in range(16)),
        speed=(configuration,) * MAX_SPEEDS,
    )
    samples = [sample for family in StatusCollector(lambda: report).collect() for sample in family.samples]
    assert sum(sample.name == "shoal_metric" for sample in samples) == MOST_METRICS
    assert 5 * MAX_WORKERS < len(samples) < monitor["spec"]["sampleLimit"] <= 2 * len(samples)
    longest = max(len(sample.labels) for sample in samples) + len(SCRAPED) + len(("container", "endpoint"))
    assert longest < monitor["spec"]["labelLimit"]
    assert monitor["spec"]["labelValueLengthLimit"] > 128


def test_without_an_address_no_alert_has_a_link(tools: Path) -> None:
    [rule] = of_kind(render(tools, "metrics.rules.enabled=true"), "PrometheusRule")
    rules = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert [each["alert"] for each in rules] == [each["alert"] for each in RULES]
    assert all(set(each["annotations"]) == {"summary", "description"} for each in rules)
