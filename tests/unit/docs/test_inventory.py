"""Every block of commands on a page is run by a test, which takes it from the page, or named here with the reason.

So is every block of what commands print. A test takes one by `block(PAGE, FIRST WORDS)`, runs all of it, and compares
what is shown; those calls are the inventory.
"""

from __future__ import annotations

import ast
from functools import cache

from tests.unit.docs.pages import ROOT, Block, all_blocks, begin

Named = tuple[str, str]
"""A page, and the first words of a block; of each of its blocks, if there are none."""

AWS = "an account with AWS; test_guides.py runs it with the programs played"
GOOGLE = "an account with Google; test_guides.py runs it with the programs played"
DOCKER = "a Docker engine; test_readme.py compares its node with kind-config.yaml"
REGISTRY = "a registry to push to; test_readme.py reads what it would build and push"
NOT_RUN: dict[Named, str] = {
    ("docs/eks.md", ""): AWS,
    ("docs/karpenter.md", ""): AWS,
    ("docs/gke.md", ""): GOOGLE,
    ("docs/kind.md", "docker stop"): DOCKER,
    ("README.md", "make images"): REGISTRY,
    ("docs/install.md", "make images"): REGISTRY,
    ("CONTRIBUTING.md", "make install"): "what runs these tests; test_commands.py knows its targets",
}
"""Of the commands that need something that is not here. test_commands.py, test_documented_kubectl.py and
test_documented_helm.py look up their names and options all the same."""


@cache
def taken() -> frozenset[Named]:
    """What tests take."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "docs.pages import" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "block":
                page, words = map(ast.literal_eval, node.args)
                found.add((page, words))
    return frozenset(found)


def is_one(each: Block, names: Named) -> bool:
    page, words = names
    return each.page == page and begin(each).startswith(words)


def test_every_block_is_run_or_named_with_the_reason() -> None:
    known = taken() | NOT_RUN.keys()
    assert [each[::2] for each in all_blocks() if not any(is_one(each, names) for names in known)] == []


def test_nothing_is_named_that_is_run_or_gone() -> None:
    for names in NOT_RUN:
        named = [each for each in all_blocks() if is_one(each, names)]
        assert named, names
        assert not [each for each in named if any(is_one(each, other) for other in taken())], names


def test_a_command_ends_where_a_shell_ends_it() -> None:
    """Each is a command of its own: what follows in a here-document or after a backslash belongs to it."""
    for each in all_blocks():
        if each.kind == "sh":
            assert "\n".join(command.line for command in each.commands) + "\n" == each.text
        if each.kind == "console":
            parts = (f"$ {line}\n{shown}" for line, shown in each.commands)
            assert "".join(parts) == each.text
