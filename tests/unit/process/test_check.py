"""`shoal-operator check`: each thing that may be wrong with an installation is named, in virtual time."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.process.check import problems

LEASE = "/apis/coordination.k8s.io/v1/namespaces/shoal-system/leases/shoal"


class Server:
    """An API server. `renewed`: the Lease changes at each look; `refused`: a path that ends so is forbidden."""

    def __init__(self, holder: str = "a", *, renewed: bool = True, refused: str = "nothing") -> None:
        self._holder, self._renewed, self._refused = holder, renewed, refused
        self._looks = itertools.count()

    async def request(self, method: str, path: str, **_: Any) -> Answer:
        if path.endswith(self._refused):
            return Answer(403, json.dumps({"message": "forbidden"}).encode())
        look = next(self._looks) if self._renewed else 0
        spec = {"holderIdentity": self._holder, "renewTime": str(look)}
        return Answer(200, json.dumps({"spec": spec}).encode())


async def fetch(address: str) -> str:
    if address == "http://gone":
        raise Unavailable("refused")
    return "shoal_leading 0.0" if address == "http://operator" else "<html>"


async def found(server: Server, metrics: str = "http://operator", watched: str = "") -> list[str]:
    return await problems(server, fetch, watched=watched, lease=LEASE, metrics=metrics, seconds=5.0)  # type: ignore[arg-type]


@pytest.mark.looptime
async def test_a_working_installation() -> None:
    assert await found(Server()) == []


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("server", "words"),
    [
        (Server(refused="/trainingjobs"), "trainingjobs cannot be listed: 403 forbidden"),
        (Server(refused="/team/pods"), "pods cannot be listed: 403 forbidden"),
        (Server(refused="/leases/shoal"), "the Lease cannot be read: 403 forbidden"),
        (Server(renewed=False), "a does not renew the Lease"),
        (Server(holder=""), "nobody holds the Lease"),
    ],
)
async def test_each_fault_is_named(server: Server, words: str) -> None:
    assert await found(server, watched="team") == [words]


@pytest.mark.looptime
async def test_metrics_that_do_not_answer_or_are_of_something_else() -> None:
    assert await found(Server(), "http://gone") == ["no operator answers at http://gone: refused"]
    assert await found(Server(), "http://other") == ["http://other is not the operator's"]
