"""The code in README.md is that of examples/."""

import re

from tests.unit.docs.pages import read


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", read("README.md"), re.DOTALL)
    assert found
    return found[1]


def test_readme_python_equals_the_example() -> None:
    assert block("python") == read("examples/digits/digits.py")


def test_readme_manifest_is_an_excerpt_of_the_example() -> None:
    lines = iter(read("examples/digits.yaml").splitlines())
    missing = [
        line for line in block("yaml").splitlines() if line not in lines
    ]  # consumes `lines`: order counts
    assert not missing
