"""Packages that a script finds on this machine and not in Shoal's worker image, which has `shoal[trainer]` alone."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shoal_trainer.script import beside, imports, python_files

OURS = {"shoal", "shoal_trainer"}


def beside_the_image(script: Path) -> list[str]:
    """The distributions that the script, or what it imports from beside it, needs and the image lacks.

    The list is empty if Shoal itself is not installed: nothing says then what the image has.
    """
    if script.suffix != ".py" or not script.is_file():  # compiled, or in an archive
        return []
    try:
        there = _required("shoal", "trainer", {})
    except PackageNotFoundError:
        return []
    files = [script, *(file for each in beside(script) for file in python_files(each))]
    modules = set[str]().union(*(imports(ast.parse(file.read_bytes())) for file in files))
    # To look through all that is installed takes a second: not for what is named as its distribution, as most are.
    modules -= sys.stdlib_module_names | OURS
    modules = {module for module in modules if canonicalize_name(module) not in there}
    found, known = set[str](), packages_distributions() if modules else {}
    for module in modules:
        names = {canonicalize_name(name) for name in known.get(module, ())}
        if names and not names & there.keys():
            found.update(names)
    return sorted(found)


def _required(name: str, extra: str, seen: dict[str, set[str]]) -> dict[str, set[str]]:
    """The distribution and all that it needs with this extra, with the extras of each."""
    extras = seen.setdefault(canonicalize_name(name), set())
    if extra in extras:
        return seen
    extras.add(extra)
    for text in distribution(name).requires or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            for each in wanted.extras or {""}:
                try:
                    _required(wanted.name, each, seen)
                except PackageNotFoundError:  # of another platform, or optional
                    continue
    return seen
