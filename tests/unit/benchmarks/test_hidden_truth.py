"""The command that plays hidden truths: its seeds, what it keeps, and its table, without playing any."""

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.hidden_truth import kept, seeds, table
from tests.virtual.figures import Figures, Summary

ONE = Figures(
    seed=3,
    jobs=2,
    cost=1.2,
    hindsight=1.0,
    uniform=2.0,
    promised=2,
    late=1,
    errors=(0.15, -0.2),
    changes=5,
    back=1,
    broken=(),
)
OTHER = replace(
    ONE, seed=4, cost=1.0, hindsight=1.0, uniform=0.5, late=0, errors=(-0.01,), broken=("a limit",)
)


def test_seeds_are_numbers_and_ranges_each_once() -> None:
    assert seeds(["0-3", "7", "2-4"]) == [0, 1, 2, 3, 7, 4]
    with pytest.raises(ValueError, match="abc"):
        seeds(["abc"])


def test_what_other_code_did_is_not_kept() -> None:
    lines = [json.dumps({"code": code, **asdict(each)}) for code, each in (("new", ONE), ("old", OTHER))]
    assert kept(lines, "new") == {3: ONE}


def test_table_sums_up() -> None:
    found = dict(row.strip("| ").rsplit(" | ", 1) for row in table([ONE, OTHER]).splitlines()[2:])
    assert list(found.values()) == ["1.10", "0.88", "1 of 4", "67 %", "1", "2 of 10"]


def test_more_late_jobs_are_less_likely_where_promises_are_true() -> None:
    none, one, two = (Summary([replace(ONE, promised=2, late=n)]).chance_of_so_many_late() for n in range(3))
    assert none == pytest.approx(1.0)
    assert one == pytest.approx(1 - 0.95**2)
    assert two == pytest.approx(0.05**2)
