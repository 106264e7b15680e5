"""The pages about plans and speeds show what the commands print today."""

from __future__ import annotations

import re
import shlex

import pytest
from click.testing import CliRunner

from shoal.cli import main
from tests.unit.docs.pages import ROOT, read


@pytest.mark.parametrize(
    ("page", "command"), [("planning", "plan"), ("simulate", "simulate"), ("sizing", "predict")]
)
def test_the_output_is_that_of_the_command(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = next(
        each
        for each in re.findall(r"```console\n(.*?)```", read(f"docs/{page}.md"), re.DOTALL)
        if f"shoal {command}" in each
    )
    folder, words, shown = re.fullmatch(r"\$ cd (\S+)\n\$ shoal (.*?[^\\])\n(.*)", block, re.DOTALL).groups()  # type: ignore[union-attr]
    monkeypatch.chdir(ROOT / folder)
    arguments = shlex.split(re.sub(r" --plot \S+", "", words.replace("\\\n", "")))
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0
    assert done.output.startswith(shown), f"the page is to show:\n{done.output[:1200]}"
