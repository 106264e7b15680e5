"""docs/cli.md has the commands and exit codes that there are; tests/control_plane/test_documented_cli.py runs them."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re

from shoal.cli import _COMMANDS, main
from shoal.cli.cluster import EXIT_CODES
from shoal.client import Job
from shoal.client.manifest import Submission, manifests
from tests.unit.docs.pages import ROOT, code, read, rows, section

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
