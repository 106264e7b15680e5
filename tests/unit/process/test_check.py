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


ROLES: list[dict[str, Any]] = [
    {
        "namespace": "team",
        "rules": [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "create", "delete"]},
            {"apiGroups": ["shoal.dev"], "resources": ["trainingjobs/status"], "verbs": ["update"]},
        ],
    },
    {"namespace": "", "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["watch"]}]},
    {
        "namespace": "home",
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["key"], "verbs": ["get"]}],
    },
]


class Server:
    """An API server. `renewed`: the Lease changes at each look; `refused`: a path that ends so is not answered well.

    `denied`: the account may not do that, as `verb resource`.
    """

    def __init__(
        self,
        holder: str = "a",
        *,
        renewed: bool = True,
        refused: str = "nothing",
        status: int = 403,
        denied: tuple[str, ...] = (),
    ) -> None:
        self._holder, self._renewed, self._refused, self._status = holder, renewed, refused, status
        self._denied = denied
        self._looks = itertools.count()

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Answer:
        if path.endswith(self._refused):
            return Answer(self._status, json.dumps({"message": "no"}).encode())
        if method == "POST":
            asked = body["spec"]["resourceAttributes"]
            allowed = f"{asked['verb']} {asked['resource']}" not in self._denied
            return Answer(201, json.dumps({"status": {"allowed": allowed}}).encode())
        look = next(self._looks) if self._renewed else 0
        spec = {"holderIdentity": self._holder, "renewTime": str(look)}
        return Answer(200, json.dumps({"spec": spec}).encode())


async def fetch(address: str) -> str:
    if address == "http://gone":
        raise Unavailable("refused")
    return "shoal_leading 0.0" if address == "http://operator" else "<html>"


async def found(server: Server, metrics: str = "http://operator", watched: str = "") -> list[str]:
    return await problems(
        server, fetch, watched=watched, roles=ROLES, lease=LEASE, metrics=metrics, seconds=5.0
    )  # type: ignore[arg-type]


@pytest.mark.looptime
async def test_a_working_installation() -> None:
    assert await found(Server()) == []


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("server", "words"),
    [
        (Server(refused="/trainingjobs", status=404), "trainingjobs cannot be listed: 404 no"),
        (
            Server(denied=("create pods", "delete pods")),
            "the operator's account may not create, delete pods in the namespace team",
        ),
        (
            Server(refused="/team/pods", denied=("list pods",)),
            "the operator's account may not list pods in the namespace team",
        ),
        (
            Server(denied=("update trainingjobs",)),
            "the operator's account may not update trainingjobs/status.shoal.dev in the namespace team",
        ),
        (Server(denied=("watch nodes",)), "the operator's account may not watch nodes in the whole cluster"),
        (
            Server(denied=("get secrets",)),
            "the operator's account may not get secrets key in the namespace home",
        ),
        (
            Server(refused="/selfsubjectaccessreviews"),
            "what the account may do cannot be asked: 403: no",
        ),
        (Server(refused="/leases/shoal"), "the Lease cannot be read: 403 no"),
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
