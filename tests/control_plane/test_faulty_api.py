"""The proxy plays each fault as a client would meet it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from dev.audit import creates
from dev.cluster import ControlPlane
from dev.kube import Kube
from tests.control_plane.operators import eventually
from tests.doubles.faulty_api import Fault, FaultyApi, Trouble, Weather


class Chosen(Weather):
    """Weather of one fault."""

    fault: Fault | None = None

    def strikes(self, method: str, *, watch: bool) -> Fault | None:
        return self.fault


class Client:
    """What a client sees through its door."""

    def __init__(self, api: FaultyApi, server: str, weather: Chosen, namespace: str) -> None:
        self.api, self.weather = api, weather
        self.path = f"{server}/api/v1/namespaces/{namespace}/configmaps"

    async def ask(self, method: str, name: str = "", body: object = None) -> tuple[int, str]:
        """The status and the header Retry-After."""
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.path}{name}", json=body) as answer,
        ):
            await answer.read()
            return answer.status, answer.headers.get("Retry-After", "")


@pytest.fixture
async def client(
    control_plane: ControlPlane, kube: Kube, namespace: str, tmp_path: Path
) -> AsyncIterator[Client]:
    weather = Chosen(random.Random(1))
    async with FaultyApi(control_plane.kubeconfig, weather) as api:
        door = await api.door("a-client", "somebody", tmp_path)
        bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "somebody"}
        await kube.create(
            bindings, {"metadata": {"name": "somebody"}, "roleRef": role, "subjects": [subject]}
        )
        server = json.loads(door.read_text())["clusters"][0]["cluster"]["server"]
        yield Client(api, server, weather, namespace)


MAP = {"metadata": {"name": "a"}}


async def test_a_write_is_done_and_its_answer_waits(client: Client) -> None:
    held = client.api.hold("a-client")
    assert (await client.ask("GET"))[0] == 200
    writing = asyncio.create_task(client.ask("POST", body=MAP))

    async def done() -> bool:
        return held.done

    await eventually(done)
    assert (await client.ask("GET", "/a"))[0] == 200
    assert not writing.done()
    held.answer.set()
    assert (await writing)[0] == 201


async def test_requests(client: Client, control_plane: ControlPlane, namespace: str) -> None:
    for fault, answer in (
        (Fault.TOO_MANY, (429, "1")),
        (Fault.BROKEN, (500, "")),
        (Fault.CONFLICT, (409, "")),
        (Fault.EXPIRED, (410, "")),
        (None, (200, "")),
        (Fault.LATE, (200, "")),
    ):
        client.weather.fault = fault
        assert await client.ask("GET") == answer
    client.weather.fault = Fault.TWICE
    assert (await client.ask("POST", body=MAP))[0] == 409
    client.weather.fault = Fault.ANSWER_LOST
    with pytest.raises(aiohttp.ClientError):
        await client.ask("DELETE", "/a")
    client.weather.fault = None
    assert (await client.ask("GET", "/a"))[0] == 404
    assert client.weather.met["fault twice"] == 1
    client.api.cut()
    with pytest.raises(aiohttp.ClientError):
        await client.ask("GET")
    client.api.restore()
    assert (await client.ask("GET"))[0] == 200
    (made,) = creates(control_plane.audit_log, "configmaps", namespace=namespace)[-1:]
    assert made.agent == "a-client"


@pytest.mark.parametrize("trouble", [Trouble.ENDED, Trouble.TRUNCATED, Trouble.EXPIRED, Trouble.RESET])
async def test_watches(client: Client, kube: Kube, namespace: str, trouble: Trouble) -> None:
    client.weather.repeated = 1.0
    path = f"{client.path}?watch=1&resourceVersion=0"
    async with aiohttp.ClientSession() as session, session.get(path) as answer:
        await kube.create(f"/api/v1/namespaces/{namespace}/configmaps", MAP)
        while b'"name":"a"' not in (first := await answer.content.readline()):
            assert first
        assert await answer.content.readline() == first  # it comes twice
        client.api.disturb(1.0, trouble)
        if trouble is Trouble.RESET:
            with pytest.raises(aiohttp.ClientError):
                await answer.content.read()
            return
        rest = (await answer.content.read()).splitlines()
    match trouble:
        case Trouble.ENDED:
            assert rest == []
        case Trouble.TRUNCATED:
            with pytest.raises(json.JSONDecodeError):
                json.loads(rest[-1])
        case Trouble.EXPIRED:
            event = json.loads(rest[-1])
            assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
