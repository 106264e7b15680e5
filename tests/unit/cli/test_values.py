"""What options take, and what is said of anything else."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from shoal.cli import main
from shoal.cli.values import SECONDS


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129_600), (" 5 ", 5), ("1.4", 1)],
)
def test_a_time(text: str, seconds: int) -> None:
    assert SECONDS.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0", "-3", "10 minutes", "1h30m", "0.2", "nan", "h", "1,5h"])
def test_no_time(text: str) -> None:
    with pytest.raises(
        click.BadParameter, match="must be seconds, or a number and s, m, h or d: 90, 30m, 2h"
    ):
        SECONDS.convert(text, None, None)


@pytest.mark.parametrize("text", ["2147483648", "24856d", f"{10**400}h"])
def test_a_time_that_no_job_can_have(text: str) -> None:
    assert SECONDS.convert("2147483647", None, None) == 2**31 - 1
    with pytest.raises(click.BadParameter, match="is more than 2147483647 seconds, 68 years: give less"):
        SECONDS.convert(text, None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["submit", "a.py", "--workers", "two"], "'two' is not a valid whole number."),
        (["submit", "a.py", "--deadline", "soon"], "'soon' must be seconds, or a number and s, m, h or d"),
        (["wait", "digits", "--timeout", "0"], "'0' must be seconds"),
        (["plan", "-f", __file__, "--deadline", "1 hour"], "'1 hour' must be seconds"),
        (["simulate", "-f", __file__, "--trace", __file__, "--seed", "-1"], "-1 is not in the range x>=0"),
        (["calibrate", "-f", __file__, "--trace", __file__, "--seed", "-1"], "-1 is not in the range x>=0"),
    ],
)
def test_a_wrong_value_says_what_to_write(words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize("words", [["-h"], ["submit", "-h"]])
def test_help_has_its_short_name(words: list[str]) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0
    assert "Usage:" in done.output
