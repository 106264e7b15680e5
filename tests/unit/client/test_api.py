"""Requests to an API server that has too much to do, and its clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.client.api import LONGEST_WAIT, MOST_TRIES, Api
from shoal.errors import Unavailable

BUSY = (429, {"Retry-After": "3"}, b'{"message": "too many requests"}')


@dataclass
class Answering:
    """The official client before a server that gives these answers, one after the other."""

    answers: list[tuple[int, dict[str, str], bytes]]

    def param_serialize(self, *words: Any, **more: Any) -> Sequence[Any]:
        return ()

    def call_api(self, **more: Any) -> Any:
        status, headers, body = self.answers.pop(0)
        return SimpleNamespace(status=status, response=SimpleNamespace(headers=headers), read=lambda: body)


def test_who_is_sent_away_comes_back_when_the_server_says() -> None:
    """As kubectl does: a busy cluster must not end a command that a script runs."""
    waited: list[float] = []
    busy = [BUSY, (429, {}, b""), (429, {"Retry-After": "3600"}, b"")]
    api = Api(Answering([*busy, (200, {}, b'{"a": 1}')]), "team", sleep=waited.append)  # type: ignore[arg-type]
    assert api.get("/version") == {"a": 1}
    assert waited == [3.0, 1.0, LONGEST_WAIT]
    assert sum(waited) < 30  # no command is silent for long


def test_who_is_always_sent_away_gives_up() -> None:
    waited: list[float] = []
    server = Answering([BUSY] * (MOST_TRIES + 1))
    with pytest.raises(Unavailable, match="too many requests"):
        Api(server, "team", sleep=waited.append).get("/version")  # type: ignore[arg-type]
    assert len(waited) == MOST_TRIES - 1
    assert len(server.answers) == 1


@pytest.mark.parametrize("minutes", [-10, 0, 5])
def test_the_time_is_the_clusters(minutes: int) -> None:
    """A laptop that slept is minutes behind: a healthy job would look as if it stood."""
    there = datetime.now(UTC) + timedelta(minutes=minutes)
    answer = (200, {"Date": format_datetime(there, usegmt=True)}, json.dumps({}).encode())
    api = Api(Answering([answer]), "team")  # type: ignore[arg-type]
    api.get("/version")
    assert abs(api.now() - there) < timedelta(seconds=5)


@pytest.mark.parametrize("date", ["yesterday", "", "Mon, 30 Nov"])
def test_a_date_that_is_none_is_not_believed(date: str) -> None:
    api = Api(Answering([(200, {"Date": date}, b"{}")]), "team")  # type: ignore[arg-type]
    api.get("/version")
    assert abs(api.now() - datetime.now(UTC)) < timedelta(seconds=5)


def test_a_date_without_a_zone_is_of_utc() -> None:
    there = datetime.now(UTC) + timedelta(minutes=3)
    answer = (200, {"Date": f"{there:%a, %d %b %Y %H:%M:%S} -0000"}, b"{}")
    api = Api(Answering([answer]), "team")  # type: ignore[arg-type]
    api.get("/version")
    assert abs(api.now() - there) < timedelta(seconds=5)
