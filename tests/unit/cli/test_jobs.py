"""The commands on jobs, with an API server in memory: what they ask, print, and end with."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from shoal.cli import main
from shoal.cli.cluster import complete_job
from shoal.cli.documents import print_manifests
from shoal.errors import Forbidden
from tests.unit.client.fake_api import FakeApi
from tests.unit.policy.build import job_manifest, pod_manifest

JOBS = "/apis/shoal.dev/v1alpha1/namespaces/team/trainingjobs"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    made = FakeApi()
    made.objects[f"{JOBS}/digits"] = job_manifest() | {
        "status": {"phase": "Pending", "observedGeneration": 1}
    }
    monkeypatch.setattr("shoal.client.client.Api.connect", lambda *_: made)
    return made


@pytest.fixture
def shoal(api: FakeApi) -> Callable[..., Result]:
    del api
    return lambda *words: CliRunner().invoke(main, words, env={"COLUMNS": None})


def unreadable() -> dict[str, Any]:
    newer = job_manifest() | {"status": {"phase": "Running"}}
    newer["metadata"] = {**newer["metadata"], "name": "other"}
    newer["spec"]["workers"] = {"replicas": 3, "capacity": "Reserved"}
    return newer


def test_pods_are_told_where_events_are_refused(api: FakeApi, shoal: Callable[..., Result]) -> None:
    api.objects["/api/v1/namespaces/team/pods/digits-worker-0-0"] = pod_manifest()
    api.fails["GET", "events"] = Forbidden("you may not list events")
    assert "worker 0-0" in shoal("status", "digits").output.partition("ago")[2]


def test_a_job_whose_pods_may_not_be_read_is_not_said_to_be_well(
    api: FakeApi, shoal: Callable[..., Result]
) -> None:
    api.fails["GET", "pods"] = Forbidden("you may not list pods")
    said = shoal("explain", "digits").output
    assert "its pods cannot be read, which would say why it waits: you may not list pods" in " ".join(
        said.split()
    )
    assert "nothing about it needs an explanation" not in said


def test_a_table_that_is_interrupted_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, shoal: Callable[..., Result]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.client.job.Job.follow", interrupted)
    assert shoal("follow", "digits").exit_code == 130


@pytest.mark.parametrize("words", [["list"], ["top"]])
def test_one_job_that_cannot_be_read_is_one_line_beside_the_others(
    api: FakeApi, shoal: Callable[..., Result], words: list[str]
) -> None:
    api.objects[f"{JOBS}/other"] = unreadable()
    found = shoal(*words)
    assert found.exit_code == 0
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["NAME", "digits"]


def job(name: str, speed: str) -> dict[str, Any]:
    made = job_manifest() | {
        "status": {"phase": "Running", "training": {"step": 1, "samplesPerSecond": speed}}
    }
    made["metadata"] = {**made["metadata"], "name": name}
    return made


@pytest.mark.parametrize(
    ("words", "order"),
    [
        (["list"], ["a", "b"]),
        (["list", "--watch"], ["a", "b"]),
        (["top"], ["b", "a"]),
        (["top", "--once"], ["b", "a"]),
    ],
)
def test_a_list_is_by_name_and_top_has_the_fastest_first(
    api: FakeApi, shoal: Callable[..., Result], words: list[str], order: list[str]
) -> None:
    api.objects = {f"{JOBS}/{name}": job(name, speed) for name, speed in (("a", "1"), ("b", "9"))}
    assert [line.split()[0] for line in shoal(*words).stdout.splitlines()] == ["NAME", *order]
    api.objects = {}
    assert shoal(*words).stderr == "no jobs in the namespace team\n"


@pytest.mark.parametrize("words", [["list", "--watch"], ["top"]])
def test_a_live_table_is_read_again_until_it_is_interrupted(
    api: FakeApi, shoal: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=150)
    monkeypatch.setattr("shoal.cli.lists.console", lambda: screen)
    paused: list[float] = []

    def sleep(seconds: float) -> None:
        paused.append(seconds)
        api.objects = {f"{JOBS}/later": job("later", "9")}
        if len(paused) == 3:
            raise KeyboardInterrupt

    api.away = [False, True]  # while nobody answers, the table stays
    monkeypatch.setattr("shoal.cli.lists.time.sleep", sleep)
    assert shoal(*words).exit_code == 130
    assert paused == [2.0] * 3
    assert isinstance(screen.file, io.StringIO)
    said = screen.file.getvalue()
    assert said.index("digits") < said.index("later")


def test_completion_asks_little_and_prints_no_warning(
    api: FakeApi, shoal: Callable[..., Result], caplog: pytest.LogCaptureFixture
) -> None:
    api.objects[f"{JOBS}/other"] = unreadable()
    with main.make_context("shoal", [], resilient_parsing=True) as context:
        assert complete_job(context, context.command.params[0], "di") == ["digits"]
    assert caplog.records == []
    assert api.queries[-1]["resourceVersion"] == "0"
    shoal("top")
    assert api.queries[-1]["resourceVersion"] == "0"


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("options", "claim"),
    [([], "my-script-runs"), (["--name", "a"], "a-runs"), (["--storage", "claim:b"], "b")],
)
def test_a_first_manifest_has_a_claim_of_its_own_where_there_is_none(
    api: FakeApi, shoal: Callable[..., Result], options: list[str], claim: str, there: bool, tmp_path: Path
) -> None:
    """A claim that is ReadWriteOnce serves one job at a time: two first jobs must not wait for each other."""
    if there:
        api.objects[f"/api/v1/namespaces/team/persistentvolumeclaims/{claim}"] = {"metadata": {"name": claim}}
    (tmp_path / "my_script.py").write_text("job = 1\n")
    found = shoal("init", f"{tmp_path}/my_script.py:job", *options)
    assert found.exit_code == 0, found.output
    objects = {each["kind"]: each for each in yaml.safe_load_all(found.stdout)}
    assert objects["TrainingJob"]["spec"]["storage"] == {"volumeClaim": {"name": claim}}
    assert ("PersistentVolumeClaim" in objects) is not there
    if not there:
        assert objects["PersistentVolumeClaim"]["metadata"] == {"name": claim}


@pytest.mark.parametrize("words", [["init"], ["submit", "--dry-run", "--storage", "ephemeral"]])
def test_a_printed_manifest_says_how_its_code_goes(
    api: FakeApi, shoal: Callable[..., Result], words: list[str], tmp_path: Path
) -> None:
    """`submit` makes the job its owner, whose uid nobody knows before: of `init`, it stayed for ever."""
    (tmp_path / "my_script.py").write_text("job = 1\n")
    found = shoal(*words, f"{tmp_path}/my_script.py:job", "--name", "mine")
    assert found.exit_code == 0, found.output
    first, *_ = found.stdout.splitlines()
    assert first.startswith("# ")
    assert first.endswith("kubectl delete configmap -l shoal.dev/job=mine")
    code = next(each for each in yaml.safe_load_all(found.stdout) if each["kind"] == "ConfigMap")
    assert code["metadata"]["labels"] == {"shoal.dev/job": "mine"}


def test_what_nobody_answers_has_an_exit_code_of_its_own(api: FakeApi, shoal: Callable[..., Result]) -> None:
    """Not that of `plan`, which says that no plan keeps the limits."""
    api.away = [True]
    assert shoal("status", "digits").exit_code == 4


def test_logs_of_the_pod_before(api: FakeApi, shoal: Callable[..., Result]) -> None:
    for incarnation in (0, 1):
        pod = pod_manifest("worker", 3, incarnation)
        api.objects[f"/api/v1/namespaces/team/pods/{pod['metadata']['name']}"] = pod
    api.logs["digits-worker-3-0", False] = ["step 5", "taken"]
    found = shoal("logs", "digits", "--slot", "3", "--previous", "--tail", "2")
    assert (found.exit_code, found.output) == (0, "step 5\ntaken\n")
    assert api.queries[-1]["tailLines"] == "2"
    del api.objects["/api/v1/namespaces/team/pods/digits-worker-3-0"]
    found = shoal("logs", "digits", "--slot", "3", "--previous")
    assert found.exit_code != 0
    assert "pods of lost nodes take their logs along" in found.output


EVIL = "\x1b]0;pwned\x07\x1b[2J"


def test_words_of_others_reach_no_terminal_as_commands(
    api: FakeApi, shoal: Callable[..., Result], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    waits = {"type": "Degraded", "status": "True", "reason": "ImagePullFailed", "message": f"no image {EVIL}"}
    waiting = {"phase": "Starting", "conditions": [waits | {"lastTransitionTime": "2026-11-30T00:00:00Z"}]}
    api.objects[f"{JOBS}/digits"]["status"] = waiting
    complete = waits | {"type": "Complete", "lastTransitionTime": "2026-11-30T00:00:00Z"}
    output = {"uri": f"s3://runs/{EVIL}", "digest": "d"}
    done = {"phase": "Succeeded", "output": output, "conditions": [complete]}
    api.changes = [job_manifest() | {"status": done}]
    said = shoal("wait", "digits").output
    api.objects[f"{JOBS}/digits"]["status"] = done
    said += shoal("follow", "digits").output
    (tmp_path / "a.py").write_text(
        "from shoal_trainer import Training\njob = Training(model=None, data=None)\n"
    )
    api.fails["dry-run", "trainingjobs"] = Forbidden(f"the webhook says {EVIL}")
    said += shoal("submit", f"{tmp_path}/a.py", "--storage", "ephemeral", "--dry-run").output
    assert "the model is in s3://runs/" in said
    assert "the webhook says" in said
    assert "no image" in caplog.text
    assert "\x1b" not in said + caplog.text


def test_printed_code_is_a_block_in_every_language(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Also where the encoding of the terminal has no such letter."""
    print_manifests({"data": {"a.py": "# Größe → 3\nimport keras\n"}})
    words = "data:\n  a.py: |\n    # Größe → 3\n    import keras\n"
    assert capsysbinary.readouterr().out == words.encode()


@pytest.mark.parametrize("text", ["x = '\x85'\ny = 2\n", "\x85", "x = '\u2028\u2029'\ny = 2\n"])
def test_printed_code_keeps_what_only_yaml_takes_for_the_end_of_a_line(
    capsysbinary: pytest.CaptureFixture[bytes], text: str
) -> None:
    """An ellipsis of Windows, read as Latin-1, is one; kubectl reads it in a block as a new line."""
    print_manifests({"data": {"a.py": text}})
    printed = capsysbinary.readouterr().out.decode()
    assert yaml.safe_load(printed) == {"data": {"a.py": text}}
    assert "\x85" not in printed
