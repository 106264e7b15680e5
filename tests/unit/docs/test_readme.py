"""README.md and docs/kind.md: their code is that of examples/, and their commands are ones that exist.

What needs Docker or a cloud is compared word by word with the code.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from dev.demo.kind import CONFIG
from dev.images import DEMO, IMAGES
from dev.paths import ROOT
from dev.publish import commands, install_command, reference, values
from shoal.api.training_job import TrainingJob
from shoal.cli import main as shoal
from shoal_trainer.cli import main as trainer
from shoal_trainer.contract import Ranges
from tests.unit.docs.pages import blocks, lines, read

PROGRAMS: dict[str, click.Group] = {"shoal": shoal, "shoal-trainer": trainer}


def test_python_equals_the_example() -> None:
    [block] = blocks("README.md", "python")
    assert block == read("examples/quickstart/quickstart.py")


@pytest.mark.parametrize("page", ["README.md", "docs/kind.md"])
def test_header_of_kubectl_get_is_that_of_the_crd(page: str) -> None:
    expected = ["NAME", *(column.name.upper() for column in TrainingJob.COLUMNS if not column.wide)]
    shown = [line.split() for block in blocks(page, "") for line in block.splitlines() if "NAME" in line]
    assert shown == [expected]


def test_figures_of_the_demo_are_named_as_it_prints_them() -> None:
    """It counts ranges of samples, in each epoch: 9,000 of 1,437 samples looked like a fault."""
    counted = set(Ranges.model_fields)
    [words] = re.findall(r"counts of its ranges of samples (\([^)]*\))", " ".join(read("README.md").split()))
    assert set(re.findall(r"`(\w+)`", words)) == counted


def test_who_mends_a_script_reads_how_to_apply_it_again() -> None:
    assert "kubectl delete etj quickstart" in read("README.md")


def test_example_image_is_the_one_that_is_replaced() -> None:
    [words] = [words for words in lines("README.md") if words[0] == "sed"]
    _, old, new, _ = words[1].split("#")  # no -i: images of an edited clone have another tag (dev/publish.py)
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


@pytest.mark.parametrize("words", [w for w in lines("README.md") if w[0] in PROGRAMS], ids=shlex.join)
def test_its_commands_are_accepted_as_they_stand(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, options, values and files; tests of the control plane and of the examples run them."""
    monkeypatch.chdir(ROOT / "examples/quickstart" if words[0] == "shoal-trainer" else ROOT)
    group = PROGRAMS[words[0]]
    name, command, rest = group.resolve_command(click.Context(group), words[1:])
    assert command is not None
    command.make_context(name, rest)
    assert all(Path(word.partition(":")[0]).exists() for word in rest if ".py" in word)


def test_the_one_number_is_the_measured_one() -> None:
    """docs/benchmarks/README.md has it, with the spread and how often it was measured."""
    table = read("docs/benchmarks/README.md")
    told = re.search(r"pass \*\*([\d.]+ s)\*\* \(median of (\d+) demos\)", read("README.md"))
    assert told
    assert re.search(rf"\| notice to the replacement's CREATE \| {told[1]} \(.*?\) \| {told[2]} \|", table)
    shown = re.search(r"first gradient \*\*(\d+) to (\d+) s\*\*", read("README.md"))
    least, most = re.findall(r"\| replacement's CREATE to its first push \| .*?\((.*?) to (.*?)\)", table)[0]
    assert shown
    assert (int(shown[1]), int(shown[2])) == (int(float(least)), int(float(most)))
