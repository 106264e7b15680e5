"""docs/cli.md has the commands and exit codes that there are."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from shoal.api.training_job import TrainingJob
from shoal.cli import _COMMANDS, main
from shoal.cli.cluster import EXIT_CODES
from shoal.client import Job
from shoal.client.manifest import Submission, manifests
from shoal.client.view import follow_view, job_table
from shoal.errors import UsageError
from tests.unit.client.fake_api import FakeApi, client_of
from tests.unit.docs.pages import ROOT, code, read, rows, section
from tests.unit.policy import build

PAGE = read("docs/cli.md")


def test_exit_codes() -> None:
    assert {int(code(row[0])[0]): row[1] for row in rows(section(PAGE, "Exit codes"))} == EXIT_CODES


def test_every_command_is_documented_and_exists() -> None:
    text = section(PAGE, "Commands")
    [alike] = re.findall(r"`shoal ([a-z]+\|[a-z|]+)`", text)
    named = {*re.findall(r"shoal ([a-z-]+)", text), *alike.split("|")}
    assert named <= set(_COMMANDS)
    assert set(_COMMANDS) - named <= {"predict", "calibrate"}, "those of the sizing pages"
    context = main.make_context("shoal", [], resilient_parsing=True)
    for name, (_, _, line) in _COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert line.endswith(".")


def test_the_notebook_uses_arguments_and_methods_that_exist() -> None:
    notebook = section(PAGE, "From a notebook")
    options = set(re.findall(r"(\w+)=", notebook.split("```")[1])) - {"storage"}
    assert options <= set(inspect.signature(Submission).parameters)
    [call] = [
        node
        for node in ast.walk(ast.parse(notebook.split("```")[1].removeprefix("python")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "submit"
    ]
    given = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
    with contextlib.chdir(ROOT / "examples" / "digits"):
        made = manifests(Submission(entrypoint=ast.literal_eval(call.args[0]), **given))
    assert made.job["spec"]["training"]["entrypoint"] == "digits:job"
    methods = set(re.findall(r"job\.(\w+)\(", notebook)) | set(
        re.findall(r"\.(\w+)\(", "".join(code(row[0])[0] for row in rows(notebook) if "Job." in row[0]))
    )
    assert methods <= set(dir(Job))
    for row in rows(notebook):
        for name, named in re.findall(r"\.(\w+)\((?:\w+, )?(\w+)=", "".join(code(row[0]))):
            assert named in inspect.signature(getattr(Job, name)).parameters


def answers(heading: str) -> dict[str, str]:
    """What the page shows below each command of a console."""
    [block] = re.findall(r"^```console\n(.*?)^```$", section(PAGE, heading), re.MULTILINE | re.DOTALL)
    shown = (part.partition("\n") for part in block.split("$ ")[1:])
    return {command: rest.rstrip("\n") for command, _, rest in shown}


def printed(what: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_tables_are_shown_as_they_are_printed() -> None:
    training = {
        "step": 1204,
        "epoch": 3,
        "loss": "0.2113",
        "samplesPerSecond": "856.2",
        "progressPercent": 62,
    }
    status = {
        "phase": "Running", "workers": {"ready": 2, "desired": 2}, "restarts": {"disruptions": 1},
        "training": {**training, "phase": "Training", "remainingSeconds": 100},
    }  # fmt: skip
    manifest = build.job_manifest(workers={"replicas": 2})
    manifest["metadata"]["creationTimestamp"] = build.stamp(build.NOW - timedelta(seconds=7))
    job = TrainingJob.model_validate({**manifest, "status": status})
    shown = answers("Commands")
    assert printed(job_table([job], now=build.NOW)) == shown["shoal list"].splitlines()
    head, *_ = shown["shoal status digits"].splitlines()
    assert printed(follow_view(job, now=build.NOW))[0] == head


def test_an_error_is_shown_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api, claim = FakeApi(), {"kind": "PersistentVolumeClaim", "metadata": {"name": "digits-runs"}}
    api.objects[f"/api/v1/namespaces/{api.namespace}/persistentvolumeclaims/digits-runs"] = claim
    (tmp_path / "digits.py").write_text("job = None\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as told:
        client_of(api).submit("digits.py:job", storage="claim:runs")
    shown = answers("Exit codes")["shoal submit digits.py:job --storage claim:runs"]
    assert shown == f"Error: {told.value}".replace(f"namespace {api.namespace}", "namespace default")
