"""The operator's benchmark, as far as it needs no cluster: its figures, and what its page says."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from benchmarks.harness import Measurement
from benchmarks.operator import page, planning, traced
from benchmarks.operator.bare import objects
from benchmarks.operator.sample import NOBODY, Sample, as_asked, sample
from benchmarks.operator.systems import job_set, tfjob
from benchmarks.operator.traced import Moment
from benchmarks.operator.world import rate
from dev.audit import Write
from dev.kube import Json
from shoal.api.training_job import TrainingJob
from shoal.cluster.http import HttpTransport
from shoal.cluster.transport import Answer
from shoal.controllers.trainingjob.apply import Applier
from shoal.policy.actions import CreatePod
from shoal.policy.plan import plan
from tests.unit.policy import build

START = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = [
    Measurement("many jobs: objects a second, ratio", 0.8, "x", "a bare client", 0.7),
    Measurement("many jobs: CPU of the operator for each object", 2.0, "ms", ""),
    Measurement("many jobs: CPU of kube-apiserver for each object", 6.0, "ms", ""),
    Measurement("loop held, ratio", 3.0, "x", "json.loads of the job's pods"),
]


def test_page_says_where_the_time_goes() -> None:
    said = page.text(ROWS)
    assert "takes 8 ms of processor time in all: kube-apiserver 6 ms, the operator 2 ms" in said
    assert "The operator's own part is 25%, and one process of it could make 500 objects a second" in said
    assert "Where the time goes" not in page.text(ROWS[:1])


def test_plot_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PLOT", tmp_path / "build" / "operator.png")
    page.draw(ROWS)
    assert page.PLOT.read_bytes().startswith(b"\x89PNG")


def test_bare_client_makes_what_the_operator_makes_of_a_job() -> None:
    made = list(objects("team", "job-1", 4))
    assert sorted(kind for kind, _ in made) == ["poddisruptionbudgets", *["pods"] * 5, "secrets", "services"]
    assert not any("ownerReferences" in body["metadata"] for _, body in made)  # the owner does not exist


def test_bare_client_makes_all_pods_of_a_large_job() -> None:
    """The operator begins them in several plans."""
    made = [body["metadata"]["name"] for kind, body in objects("team", "job-1", 600) if kind == "pods"]
    assert sorted(made) == sorted(["job-1-ps-0-0", *(f"job-1-worker-{index}-0" for index in range(600))])


async def test_replacement_is_traced_though_its_body_is_made_when_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[tuple[str, str]]()
    job = TrainingJob.model_validate(build.job_manifest())
    [*_, pod] = (each for each in plan(build.observe(job)).actions if isinstance(each, CreatePod))

    async def sent(_transport: object, _method: str, _path: str, **_options: object) -> Answer:
        return Answer(201, b"{}")

    async def carried_out(_applier: object, _job: object, action: CreatePod) -> bool:
        await HttpTransport.request(cast("HttpTransport", None), "POST", "/pods", body=action.make)
        return True

    monkeypatch.setattr(HttpTransport, "request", sent)
    monkeypatch.setattr(Applier, "carry_out", carried_out)
    monkeypatch.setattr(aiohttp.ClientRequest, "write_bytes", aiohttp.ClientRequest.write_bytes)
    traced._trace_requests(lambda what, name: told.append((what, name)))
    await Applier.carry_out(cast("Applier", None), job, pod)
    await HttpTransport.request(cast("HttpTransport", None), "PUT", "/status")
    assert told == [(traced.ASKED, pod.name), (traced.PLACED, pod.name)]


def test_rate_is_from_the_first_request_to_the_last_answer() -> None:
    made = []
    for number in range(4):
        at = START + timedelta(seconds=number)
        write = Write(
            *("create", "pods", "", "ns", f"pod-{number}", "user", "agent", 201, ""),
            received=at,
            answered=at + timedelta(seconds=1),
        )
        made.append(write)
    assert rate(made) == pytest.approx(1.0)


@pytest.mark.nightly
def test_one_change_of_a_job_is_measured() -> None:
    rows = {row.name: row for row in planning.measure(quick=True)}
    assert rows["loop held by one change of 100 workers"].value > 0
    assert 1 < rows["status of 100 workers"].value < 20
    assert rows["loop held by one look at one of ten pools of 100 jobs on 500 nodes"].value > 0


def test_time_of_a_replacement_is_told_in_parts(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    began = START.timestamp()
    told = (
        Moment(began + 0.010, traced.SEEN, "one-worker-3-0"),
        Moment(began + 0.013, traced.TAKEN, "one-worker-3-1"),
        Moment(began + 0.015, traced.PLANNED, "one-worker-3-1"),
        Moment(began + 0.016, traced.ASKED, "one-worker-3-1"),
        Moment(began + 0.030, traced.SEEN, "one-worker-3-0"),  # its last event
        Moment(began + 0.066, traced.PLACED, "one-worker-3-1"),
        Moment(began + 0.070, traced.SENT, "one-worker-3-1"),
        Moment(began + 0.080, traced.SENT, "one-worker-4-1"),
    )
    file.write_text("".join(json.dumps(asdict(each)) + "\n" for each in told))
    received = START + timedelta(milliseconds=76)
    found = traced.parts(list(traced.read(file)), "one-worker-3-0", "one-worker-3-1", START, received)
    assert list(found.values()) == pytest.approx([10, 3, 2, 1, 50, 4, 6], abs=0.01)
    assert list(found)[4] == "until there was a place"


def test_page_beside_peers_has_a_column_for_each_system() -> None:
    rows = [
        Measurement("Shoal: 10 jobs: pods a second", 81.26, "", ""),
        Measurement("Shoal: worker deleted to CREATE: median", 11.2, "ms", ""),
        Measurement("TFJob: 10 jobs: pods a second", 9.5, "", ""),
    ]
    assert page.beside(rows, "training-operator v1", "noon").splitlines() == [
        "Against training-operator v1; measured at noon.",
        "",
        "| what | Shoal | TFJob |",
        "|---|---|---|",
        "| 10 jobs: pods a second | 81.3 | 9.5 |",
        "| worker deleted to CREATE: median | 11.2 ms | – |",
    ]


def made(name: str, spec: Json, **metadata: Any) -> Json:
    """An object as the API server has it."""
    owner = {"ownerReferences": [{"uid": "u"}], "finalizers": ["f"], "resourceVersion": "7", "uid": "v"}
    return {
        "metadata": {"name": name, "namespace": "n", **owner, **metadata},
        "spec": spec,
        "status": {"a": 1},
    }


def test_bare_client_makes_what_a_system_was_seen_to_make() -> None:
    token = {"name": "kube-api-access-x7k2p"}
    container = {"name": "tf", "env": [{"name": "PEER", "value": "job-0-ps-0"}], "volumeMounts": [token]}
    pod = {"nodeName": "node", "containers": [container], "volumes": [token, {"name": "data"}]}
    found = [
        ("pods", made("job-0-ps-0", pod, labels={"role": "ps"})),
        ("pods", made("job-0-worker-0", pod, labels={"role": "worker"}, generateName="job-0-worker-")),
    ]
    seen = sample("job-0", found, "role=worker")
    assert seen.worker["metadata"] == {"labels": {"role": "worker"}, "name": "job-0-worker-0"}
    [(_, first), _] = seen.renamed("bare-3")
    asked = {**container, "volumeMounts": [], "env": [{"name": "PEER", "value": "bare-3-ps-0"}]}
    assert first == {
        "metadata": {"labels": {"role": "ps"}, "name": "bare-3-ps-0"},
        "spec": {"containers": [asked], "volumes": [{"name": "data"}]},
    }


def test_sample_is_kept_in_a_file(tmp_path: Path) -> None:
    seen = sample("job-0", [("pods", made("job-0-w", {"containers": []}, labels={"role": "w"}))], "role=w")
    again = Sample.read(seen.write(tmp_path / "sample"))
    assert list(map(tuple, again.objects)) == seen.objects
    assert again.worker == seen.worker


def test_bare_client_asks_for_no_address_that_another_service_has() -> None:
    ports = [{"port": 1}]
    served = made("s", {"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"], "ports": ports})
    assert as_asked("services", served)["spec"] == {"ports": ports}
    headless = made("s", {"clusterIP": "None", "clusterIPs": ["None"], "ports": ports})
    assert as_asked("services", headless)["spec"] == {"ports": ports, "clusterIP": "None"}


def test_no_controller_makes_the_pods_of_a_bare_job() -> None:
    labels = {"batch.kubernetes.io/controller-uid": "u", "controller-uid": "u", "job": "a"}
    spec = {"selector": {"matchLabels": {"u": "u"}}, "template": {"metadata": {"labels": labels}, "spec": {}}}
    asked = as_asked("jobs", made("j", spec))["spec"]
    assert asked == {"template": {"metadata": {"labels": {"job": "a"}}, "spec": {}}, "managedBy": NOBODY}


def test_jobs_of_peers_have_as_many_pods() -> None:
    replicas = tfjob("team", "one", 4)["spec"]["tfReplicaSpecs"]
    assert {role: each["replicas"] for role, each in replicas.items()} == {"PS": 1, "Worker": 4}
    jobs = job_set("team", "one", 4)["spec"]["replicatedJobs"]
    counts = [each["template"]["spec"]["parallelism"] * each["replicas"] for each in jobs]
    assert counts == [1, 4]
