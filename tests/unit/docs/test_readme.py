"""README.md and docs/kind.md: their code is that of examples/, and their commands are ones that exist.

What needs Docker or a cloud is compared word by word with the code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
import yaml

from dev.demo.kind import CONFIG
from dev.images import DEMO, IMAGES
from dev.paths import ROOT
from dev.publish import commands, install_command, reference, values
from shoal.api.training_job import TrainingJob
from shoal.cli import main as shoal
from tests.unit.docs.pages import read


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)
    return [block for kind, block in found if kind == language]


def lines(page: str) -> Iterator[list[str]]:
    """The commands of a page, split into words."""
    for block in blocks(page, "sh"):
        yield from (shlex.split(line) for line in block.splitlines())


def test_python_equals_the_example() -> None:
    [block] = blocks("README.md", "python")
    assert block == read("examples/quickstart/quickstart.py")


@pytest.mark.parametrize("page", ["README.md", "docs/kind.md"])
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    used = {words[1] for words in lines(page) if words[0] == "make"}
    assert used <= targets


@pytest.mark.parametrize("page", ["README.md", "docs/kind.md"])
def test_header_of_kubectl_get_is_that_of_the_crd(page: str) -> None:
    expected = ["NAME", *(column.name.upper() for column in TrainingJob.COLUMNS if not column.wide)]
    shown = [line.split() for block in blocks(page, "") for line in block.splitlines() if "NAME" in line]
    assert shown == [expected]


def test_example_image_is_the_one_that_is_replaced() -> None:
    [words] = [words for words in lines("README.md") if words[0] == "sed"]
    _, old, new, _ = words[2].split("#")
    assert old in read("examples/digits.yaml")
    assert new == reference(IMAGES["digits"], "registry.example.com/team", "TAG")


def test_kind_builds_and_loads_every_image_of_the_job() -> None:
    words = list(lines("docs/kind.md"))
    built = {each[each.index("-t") + 1]: each for each in words if each[:2] == ["docker", "build"]}
    assert set(built) == {image.reference for image in IMAGES.values()}
    for image in IMAGES.values():
        line = built[image.reference]
        assert (ROOT / line[line.index("-f") + 1]).samefile(ROOT / image.context / image.dockerfile)
        assert (ROOT / line[-1]).samefile(ROOT / image.context)
        assert ("--target" in line) == bool(image.target)
    [load] = [each for each in words if each[:2] == ["kind", "load"]]
    assert set(load[5:]) == {IMAGES[name].reference for name in DEMO}
    name = yaml.safe_load(CONFIG.read_text())["name"]
    assert load[load.index("--name") + 1] == name
    [stop] = [each for each in words if each[:2] == ["docker", "stop"]]
    assert stop[2] == f"{name}-worker3"  # kind names them worker, worker2, …: the first is on-demand


def test_images_are_built_before_those_that_are_made_from_them() -> None:
    order = [
        words[words.index("-t") + 1] for words in commands("docker", "r.io/t", "1") if words[1] == "build"
    ]
    bases = [
        word.partition("=")[2]
        for words in commands("docker", "r.io/t", "1")
        for word in words
        if word.startswith("BASE=")
    ]
    assert bases == ["r.io/t/shoal-worker:1"]
    assert order.index(bases[0]) < order.index("r.io/t/shoal-digits:1")
    pushed = [words[2] for words in commands("docker", "r.io/t/", "1") if words[1] == "push"]
    assert pushed == order
    assert set(values("r.io/t", "1").values()) - {"1"} <= {*pushed, "r.io/t/shoal-operator"}
    assert "--set-string trainer.psImage=r.io/t/shoal-ps:1" in install_command("r.io/t", "1")


def test_commands_of_shoal_and_their_options_exist() -> None:
    context = shoal.make_context("shoal", [], resilient_parsing=True)
    used = [words for words in lines("README.md") if words[0] == "shoal"]
    assert used
    for words in used:
        command = shoal.get_command(context, words[1])
        assert command is not None
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
        for word in words:
            assert ".py:" not in word or (ROOT / word.partition(":")[0]).exists()
