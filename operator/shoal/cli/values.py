"""What options take, with errors that say what to write."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Count(click.IntRange):
    """A whole number in a range."""

    name = "whole number"


class Seconds(click.ParamType[int]):
    """A time above 0 that the CRD takes, as whole seconds: `90`, `90s`, `30m`, `2h`, `1.5d`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The seconds."""
        if isinstance(value, int):
            return value
        from shoal.api.rules import MOST

        found = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?)([smhd]?)", value.strip())
        seconds = round(min(float(found[1]) * _UNITS[found[2]], MOST + 1)) if found else 0
        if seconds < 1:
            self.fail(f"{value!r} must be seconds, or a number and s, m, h or d: 90, 30m, 2h", param, ctx)
        if seconds > MOST:
            self.fail(f"{value!r} is more than {MOST} seconds, 68 years: give less", param, ctx)
        return seconds


COUNT = Count(1)
SECONDS = Seconds()
