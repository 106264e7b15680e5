"""`kubectl` on any page: verbs and options are those of the real one, kinds those of the API server or a neighbour."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache

from dev.cluster import ControlPlane
from tests.unit.docs.pages import PAGES
from tests.unit.docs.test_commands import commands

KINDS = {"get", "describe", "patch", "scale", "delete", "explain", "label", "annotate", "edit"}
"""Verbs that name a kind first, or KIND/NAME."""
PARTS = {"create", "rollout"}
"""Verbs with commands of their own, such as `create secret generic`."""
NEIGHBOURS = {
    "nodepool", "nodeclaims", "ec2nodeclass",  # Karpenter
    "workloads", "localqueue", "clusterqueue", "podgroups",  # Kueue and scheduler-plugins
}  # fmt: skip


def used() -> Iterator[tuple[str, list[str]]]:
    """The page, and what follows `kubectl`."""
    for page in PAGES:
        for line in commands(page.read_text(encoding="utf-8")):
            words = [word.removeprefix("$(").rstrip(")") for word in line]
            if "kubectl" in words and (rest := words[words.index("kubectl") + 1 :]) and rest[0] != "shoal":
                yield page.name, rest


def verb_of(words: list[str]) -> tuple[str, list[str]]:
    """The verb, and what follows it; `-n NAMESPACE` may come before."""
    while words and words[0] in {"-n", "--namespace"}:
        words = words[2:]
    return words[0], words[1:]


def test_they_exist(control_plane: ControlPlane, crds: None) -> None:
    def kubectl(*words: str) -> str:
        return subprocess.run(
            ["kubectl", *words], env=control_plane.env, capture_output=True, text=True, check=True
        ).stdout

    @cache
    def options(*verb: str) -> set[str]:
        return set(re.findall(r"--[a-z][a-z-]+", kubectl(*verb, "--help") + kubectl("options")))

    verbs = set(re.findall(r"^  ([a-z-]+) ", kubectl("--help"), re.MULTILINE))
    kinds: set[str] = set()
    for line in kubectl("api-resources", "--no-headers").splitlines():
        name, *short, version, _, kind = line.split()
        group = version.partition("/")[0]
        kinds |= {
            name,
            kind.lower(),
            f"{name}.{group}",
            *(each for part in short for each in part.split(",")),
        }
    wrong: list[tuple[str, list[str], set[str]]] = []
    seen = 0
    for page, words in used():
        seen += 1
        verb, rest = verb_of(words)
        if verb not in verbs:
            wrong.append((page, words, {verb}))
            continue
        of = options(verb, *(each for each in rest[:2] if verb in PARTS and each.islower()))
        if unknown := {word.partition("=")[0] for word in rest if word.startswith("--")} - of:
            wrong.append((page, words, unknown))
        if verb in KINDS and rest and not rest[0].startswith("-"):
            named = {each.partition("/")[0].partition(".spec")[0] for each in rest[0].split(",")}
            if named - kinds - NEIGHBOURS:
                wrong.append((page, words, named))
    assert seen > 40
    assert wrong == []
