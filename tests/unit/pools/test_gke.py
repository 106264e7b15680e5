"""Node pools of GKE, with Google's client and a fake of its gRPC server in this process."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.api.capacity_pool_scaling import GkeNodePool
from shoal.errors import Busy, LeaseLost, ScalingError, Unavailable
from shoal.pools.driver import Fence
from shoal.pools.gke import Gke, GkeDriver, compute, gke_clients
from shoal.pools.rules import Pace, Target

pytest.importorskip("google.cloud.container_v1", reason="the extra `pools` is not installed")

import grpc
import requests
from google.auth.exceptions import RefreshError
from google.cloud import container_v1
from google.cloud.container_v1.services.cluster_manager.transports import (
    ClusterManagerGrpcTransport,
)

POOL = GkeNodePool(project="acme", location="europe-west4", cluster="training", node_pool="spot-l4")
NAME = "projects/acme/locations/europe-west4/clusters/training/nodePools/spot-l4"


class Cloud:
    """One regional node pool: a managed instance group in each of three zones."""

    def __init__(self) -> None:
        self.sizes = {"a": 1, "b": 1, "c": 1}
        self.autoscaling = False
        self.status = container_v1.NodePool.Status.RUNNING
        self.refuse: grpc.StatusCode | None = None
        self.url = ""

    def get(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.refuse is not None:
            context.abort(self.refuse, "no")
        if request.name != NAME:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Not found: {request.name}.")
        urls = [f"{self.url}/zones/{zone}/instanceGroupManagers/pool" for zone in self.sizes]
        return container_v1.NodePool(
            name="spot-l4",
            instance_group_urls=urls,
            status=self.status,
            autoscaling={"enabled": self.autoscaling},
        )

    def resize(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.refuse is not None:
            context.abort(self.refuse, "Cluster is running incompatible operation.")
        self.sizes = dict.fromkeys(self.sizes, request.node_count)
        return container_v1.Operation(name="operation-1")


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    """The fake and, as `clients`, Google's clients that reach it."""
    cloud = Cloud()

    class Compute(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"targetSize": cloud.sizes[self.path.split("/")[2]]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Compute)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    cloud.url = f"http://127.0.0.1:{web.server_address[1]}"
    methods = {
        "GetNodePool": (cloud.get, container_v1.GetNodePoolRequest, container_v1.NodePool),
        "SetNodePoolSize": (cloud.resize, container_v1.SetNodePoolSizeRequest, container_v1.Operation),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            call, request_deserializer=takes.deserialize, response_serializer=gives.serialize
        )
        for name, (call, takes, gives) in methods.items()
    }
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("google.container.v1.ClusterManager", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    clusters = container_v1.ClusterManagerClient(transport=ClusterManagerGrpcTransport(channel=channel))
    cloud.clients = Gke(clusters, compute(requests.Session))  # type: ignore[attr-defined]
    yield cloud
    channel.close()
    server.stop(0).wait()
    web.shutdown()
    web.server_close()
    thread.join()


def driver(cloud: Any, pool: GkeNodePool = POOL, fence: Fence = lambda: None) -> GkeDriver:
    return GkeDriver(pool, Pace(), lambda: cloud.clients, fence)


async def test_a_leader_that_was_stopped_sets_no_size(cloud: Any) -> None:
    def lost() -> None:
        raise LeaseLost("another leads")

    with pytest.raises(LeaseLost):
        await driver(cloud, fence=lost).resize(6, Target(3, step=3))
    assert cloud.sizes == {"a": 1, "b": 1, "c": 1}


async def test_without_its_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("google.auth", "google.cloud.container_v1", "google.api_core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ScalingError, match=r"pip install '\.\[pools\]'") as error:
        await GkeDriver(POOL, Pace(), gke_clients, lambda: None).read()
    assert error.value.reason == "NotInstalled"


async def test_a_regional_pool_is_sized_in_steps_of_its_zones(cloud: Cloud) -> None:
    target = await driver(cloud).read()
    assert target == Target(nodes=3, step=3)
    await driver(cloud).resize(6, target)
    assert cloud.sizes == {"a": 2, "b": 2, "c": 2}
    assert (await driver(cloud).read()).nodes == 6


class Proxy(requests.Session):
    """Answers for Compute Engine."""

    def get(self, *_: Any, **__: Any) -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer._content = 200, b"<html>log in</html>"
        return answer


class Expired(requests.Session):
    def get(self, *_: Any, **__: Any) -> requests.Response:
        raise RefreshError("the token is expired")


@pytest.mark.parametrize("session", [requests.Session, Proxy, Expired], ids=["refused", "proxy", "token"])
async def test_without_compute_engine_it_says_so_and_tries_again(session: type[requests.Session]) -> None:
    """Errors of that request were no errors of a driver, as those of the container API are."""
    nowhere = Cloud()
    nowhere.url = "http://127.0.0.1:9"
    found = nowhere.get(container_v1.GetNodePoolRequest(name=NAME), None)
    clients = Gke(SimpleNamespace(get_node_pool=lambda **_: found), compute(session))
    with pytest.raises(Unavailable, match="spot-l4"):
        await GkeDriver(POOL, Pace(), lambda: clients, lambda: None).read()


async def test_autoscaling_is_a_conflict(cloud: Cloud) -> None:
    cloud.autoscaling = True
    sized_by = (await driver(cloud).read()).sized_by
    assert sized_by is not None
    assert sized_by.reason == "AutoscalerActive"


async def test_a_pool_that_is_being_changed_is_busy(cloud: Cloud) -> None:
    cloud.status = container_v1.NodePool.Status.RECONCILING
    assert (await driver(cloud).read()).busy == f"{NAME} is RECONCILING"
    cloud.refuse = grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(Busy, match="incompatible operation"):
        await driver(cloud).resize(6, Target(3, step=3))


@pytest.mark.parametrize(
    ("code", "reason"),
    [(grpc.StatusCode.PERMISSION_DENIED, "Forbidden"), (grpc.StatusCode.INVALID_ARGUMENT, "Refused")],
)
async def test_refusals_say_what_to_do(cloud: Cloud, code: grpc.StatusCode, reason: str) -> None:
    cloud.refuse = code
    with pytest.raises(ScalingError) as error:
        await driver(cloud).read()
    assert error.value.reason == reason


async def test_a_pool_that_does_not_exist_is_named(cloud: Cloud) -> None:
    with pytest.raises(ScalingError, match=r"Correct spec.scaling.cloud.gke") as error:
        await driver(cloud, POOL.model_copy(update={"node_pool": "other"})).read()
    assert error.value.reason == "TargetNotFound"
