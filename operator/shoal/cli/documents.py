"""Manifests as YAML that people read, and keep in a repository: code is a block, not a string in quotes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
import yaml


def print_manifests(*manifests: dict[str, Any] | None) -> None:
    """Print those that there are as documents of one file."""
    documents: Iterable[dict[str, Any]] = (each for each in manifests if each)
    # As bytes: the encoding of a terminal may have no place for a letter of somebody's code.
    text = yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, allow_unicode=True, encoding="utf-8")
    click.echo(text, nl=False)


class _Readable(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # In a block, parsers of YAML 1.1 such as kubectl's read U+0085 as a new line; in quotes it is escaped.
    style = '"' if "\x85" in value else "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Readable.add_representer(str, _text)
