"""Seven nights play each case once, a day some of them."""

from __future__ import annotations

from itertools import product

import pytest

from dev.night import NIGHTS, again, by_day, examples, of_tonight


def test_a_week_plays_each_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    played = list[int]()
    for night in range(1, NIGHTS + 1):
        monkeypatch.setenv("SHOAL_NIGHT", str(night))
        played += of_tonight(range(100))
        assert len(of_tonight(range(100))) in {14, 15}
    assert sorted(played) == list(range(100))


@pytest.mark.parametrize("unset", [True, False])
def test_without_a_night_all_are_played(unset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_NIGHT", "")
    if unset:
        monkeypatch.delenv("SHOAL_NIGHT")
    assert list(of_tonight("abc")) == list("abc")


@pytest.mark.parametrize(
    ("number", "played"),
    [(1, "a"), (2, "ae"), (3, "acf"), (8, "abcdefgh"), (9, "abcdefgh")],
)
def test_a_day_plays_so_many_spread_evenly(number: int, played: str) -> None:
    assert "".join(by_day("abcdefgh", number, lambda case: {"letter": case})) == played


@pytest.mark.parametrize("number", range(2, 25))
@pytest.mark.parametrize("letters", [("ab", "xy"), ("abc", "xy"), ("ab", "wxyz", "kl", "pq")])
def test_a_day_plays_each_value_of_each_parameter(letters: tuple[str, ...], number: int) -> None:
    cases = ["".join(case) for case in product(*letters)]
    played = by_day(cases, number, lambda case: {str(at): letter for at, letter in enumerate(case)})
    assert played[0] == cases[0]
    assert len(set(played)) == len(played) == min(number, len(cases))
    for values, found in zip(letters, zip(*played, strict=True), strict=True):
        often = [found.count(value) for value in values]
        assert max(often) - min(often) <= 1


def test_a_night_makes_each_plan_again_and_a_day_a_third_but_not_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SHOAL_NIGHTLY", raising=False)
    assert [number for number in range(7) if again(number)] == [1, 4]
    monkeypatch.setenv("SHOAL_NIGHTLY", "1")
    assert all(map(again, range(7)))


def test_a_night_draws_four_times_as_many_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_NIGHTLY", raising=False)
    assert examples(100) == 25
    monkeypatch.setenv("SHOAL_NIGHTLY", "1")
    assert examples(100) == 100
