"""Each process gives its Lease a connection and a thread of its own: what fills the others delays no renewal."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from shoal.cluster.own_thread import OwnThread
from shoal.controllers.trainingjob.credentials import InstallKey
from shoal.policy.model import Images
from shoal.process import main, pools
from shoal.process.pools import PoolSettings
from shoal.process.settings import Settings


class Connection:
    async def close(self) -> None:
        """It holds nothing."""


class MadeError(Exception):
    """The test has seen what it is about."""


@pytest.mark.parametrize(
    ("process", "made", "settings"),
    [
        (main, "Operator", Settings(install_key=InstallKey(b"k" * 32), images=Images(ps="p", worker="w"))),
        (pools, "NodePools", PoolSettings()),
    ],
    ids=["operator", "pools"],
)
async def test_lease_has_a_connection_and_a_thread_of_its_own(
    process: ModuleType, made: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def make(transport: Connection, *_: Any, **options: Any) -> None:
        given.update(options, transport=transport)
        raise MadeError

    async def connect(_connections: int = 0) -> Connection:
        return Connection()

    monkeypatch.setattr(process, made, make)
    monkeypatch.setattr(process, "connect", connect)
    for touched in ("start_log", "allow_open_files", "keep_tls_small", "exempt_what_is_loaded", "signalled"):
        monkeypatch.setattr(process, touched, lambda *_: None)
    with pytest.raises(MadeError):
        await process.run(settings)
    assert isinstance(given["lease_transport"], Connection)
    assert given["lease_transport"] is not given["transport"]
    assert isinstance(given["lease_runs"], OwnThread)
