"""`helm` on any page: commands and options are those of the real one, and the install of the chart's README renders."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import yaml

from dev.paths import ROOT
from tests.unit.docs.pages import PAGES, block
from tests.unit.docs.test_commands import commands

GROUPS = {"repo"}
"""Commands with commands of their own."""


def test_commands_and_options_exist(tools: Path) -> None:
    @cache
    def known(*command: str) -> str:
        """The help of a command, which names it and its options."""
        words = [str(tools / "helm"), *command, "--help"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    seen = 0
    for page in PAGES:
        for words in commands(page.read_text(encoding="utf-8")):
            if words[0] != "helm" or len(words) < 2:
                continue
            command = tuple(words[1 : 2 + (words[1] in GROUPS)])
            assert re.search(rf"^  helm {' '.join(command)}\b", known(*command), re.MULTILINE), words
            options = {word.partition("=")[0] for word in words if re.match("-+[a-z]", word)}
            assert {each for each in options if not re.search(rf"{each}\b", known(*command))} == set(), words
            seen += 1
    assert seen > 10


def test_the_install_of_the_readme_renders(tools: Path) -> None:
    [install] = block("charts/shoal/README.md", "helm install").commands
    helm, verb, *words = install.words
    assert (helm, verb) == ("helm", "install")
    done = subprocess.run(
        [str(tools / "helm"), "template", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    [deployment] = [each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example.com/team/shoal-operator:TAG"
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
