"""docs/python-api.md names every parameter of the public API, docs/laptop.md every option of `shoal-trainer run`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import shoal_trainer
from shoal_trainer.cli import main
from tests.unit.docs.pages import code, read, rows, section

PAGE = read("docs/python-api.md")


def test_every_exported_name_is_documented() -> None:
    assert [name for name in shoal_trainer.__all__ if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("Training", shoal_trainer.Training),
        ("Indexed", shoal_trainer.Indexed),
        ("Indexed.from_arrays", shoal_trainer.Indexed.from_arrays),
        ("Indexed.from_items", shoal_trainer.Indexed.from_items),
        ("Stream", shoal_trainer.Stream),
        ("Files", shoal_trainer.Files),
        ("Files.tfrecord", shoal_trainer.Files.tfrecord),
        ("Files.parquet", shoal_trainer.Files.parquet),
        ("Files.csv", shoal_trainer.Files.csv),
    ],
)
def test_signatures_match(name: str, function: Callable[..., Any]) -> None:
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    signature = str(inspect.Signature(parameters)).replace("'", '"')
    assert f"\n{name}{signature}\n" in PAGE


def test_fit_signature_matches() -> None:
    parameters = inspect.signature(shoal_trainer.Training.fit).parameters
    defaults = [f"{name}={p.default!r}" for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert f"fit(*, {', '.join(defaults)})".replace("'", '"') in PAGE


def test_every_option_of_run_is_documented() -> None:
    options = {option for parameter in main.commands["run"].params for option in parameter.opts} - {
        "entrypoint"
    }
    documented = " ".join(
        cell for row in rows(section(read("docs/laptop.md"), "Run")) for cell in code(row[0])
    )
    assert options <= set(documented.split())
