"""The install key: made once, the same for all, and never replaced."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.controllers.trainingjob.credentials import InstallKey
from shoal.errors import Unavailable, UsageError
from shoal.process.install_key import NoKey, install_key, write
from shoal.process.main import main
from shoal.process.settings import Settings


@pytest.mark.parametrize(
    ("raised", "code"), [(Unavailable("no answer"), 1), (NoKey("forbidden"), 2), (UsageError("no config"), 2)]
)
def test_only_what_a_restart_does_not_mend_ends_with_2(
    raised: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def connect() -> None:
        raise raised

    monkeypatch.setattr("shoal.process.main.connect", connect)
    monkeypatch.setattr("sys.argv", ["shoal-operator", "install-key", "--secret", "a", "--file", "b"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert capsys.readouterr().err == f"shoal-operator: {raised}\n"


class Secrets:
    """An API server with one Secret. `race`: others create it between our GET and our POST."""

    def __init__(self, data: dict[str, str] | None = None, *, race: bool = False, refuse: int = 0) -> None:
        self.data, self._race, self._refuse = data, race, refuse
        self.created = 0

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Answer:
        if self._refuse:
            return Answer(self._refuse, json.dumps({"message": "no"}).encode())
        if method == "GET":
            found = self.data
            if self._race and found is None:
                self.data = {"key": base64.b64encode(b"o" * 32).decode()}
            return self._answer(200, found) if found is not None else self._answer(404, {})
        if self.data is not None:
            return self._answer(409, {})
        self.created += 1
        self.data = body["data"]
        return self._answer(201, self.data)

    def _answer(self, status: int, data: dict[str, str] | None) -> Answer:
        return Answer(status, json.dumps({"data": data, "message": "no"}).encode())


async def test_key_is_made_once_and_stays() -> None:
    cluster: Any = Secrets()
    first = await install_key(cluster, "shoal-system", "shoal-install-key")
    assert len(first["key"]) == 32
    assert await install_key(cluster, "shoal-system", "shoal-install-key") == first
    assert cluster.created == 1
    assert await install_key(Secrets(), "shoal-system", "shoal-install-key") != first  # type: ignore[arg-type]


async def test_of_two_that_start_together_both_take_the_first_one() -> None:
    cluster: Any = Secrets(race=True)
    assert await install_key(cluster, "ns", "name") == {"key": b"o" * 32}
    assert cluster.created == 0


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (Secrets({}), "has no field key: add it"),
        (Secrets({"key": base64.b64encode(b"short").decode()}), "has 5 bytes: it needs at least 32"),
        (Secrets(refuse=403), "cannot read the Secret name with the install key: no"),
    ],
)
async def test_what_is_wrong_is_said(cluster: Any, words: str) -> None:
    with pytest.raises(NoKey, match=words):
        await install_key(cluster, "ns", "name")


async def test_file_is_for_this_user_only(tmp_path: Path) -> None:
    cluster: Any = Secrets()
    await write(cluster, "ns", "name", tmp_path / "key")
    assert len((tmp_path / "key").read_bytes()) == 32
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


async def test_both_keys_of_a_rotation_are_written_and_the_previous_one_is_removed_after_it(
    tmp_path: Path,
) -> None:
    fields = {"key": b"n" * 32, "key-id": b"2", "previous-key": b"o" * 32, "previous-key-id": b"1"}
    cluster: Any = Secrets({name: base64.b64encode(value).decode() for name, value in fields.items()})
    environment = {
        "SHOAL_INSTALL_KEY_FILE": str(tmp_path / "key"),
        "SHOAL_IMAGE_PS": "ps:1",
        "SHOAL_IMAGE_WORKER": "worker:1",
    }
    await write(cluster, "ns", "name", tmp_path / "key")
    key = Settings.from_environment(environment).install_key
    assert key == InstallKey(b"n" * 32, "2", InstallKey(b"o" * 32, "1"))
    assert "nnn" not in repr(key)
    assert "ooo" not in repr(key)
    del cluster.data["previous-key"], cluster.data["previous-key-id"]
    await write(cluster, "ns", "name", tmp_path / "key")
    assert Settings.from_environment(environment).install_key == InstallKey(b"n" * 32, "2")


async def test_a_short_previous_key_is_refused() -> None:
    data = {
        name: base64.b64encode(value).decode()
        for name, value in {"key": b"n" * 32, "previous-key": b"o"}.items()
    }
    with pytest.raises(NoKey, match="the previous-key in the Secret name has 1 bytes"):
        await install_key(Secrets(data), "ns", "name")  # type: ignore[arg-type]
