"""Node groups of EKS, on a server that speaks AWS's protocol."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_scaling import EksNodegroup
from shoal.cluster.transport import Wrapper
from shoal.errors import LeaseLost, ScalingError, Unavailable
from shoal.manifests.platforms import GENERIC
from shoal.pools.eks import EksDriver, eks_client
from shoal.pools.rules import Pace, Target
from shoal.pools.subject import drivers, subject_of

GROUP = EksNodegroup(region="eu-west-1", cluster="training", nodegroup="spot-l4")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def eks(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("eks", region_name=GROUP.region)
    for name in client.list_clusters()["clusters"]:
        for group in client.list_nodegroups(clusterName=name)["nodegroups"]:
            client.delete_nodegroup(clusterName=name, nodegroupName=group)
        client.delete_cluster(name=name)
    client.create_cluster(
        name="training", roleArn="arn:aws:iam::123456789012:role/eks", resourcesVpcConfig={}
    )
    return client


def create(client: Any) -> None:
    client.create_nodegroup(
        clusterName="training",
        nodegroupName="spot-l4",
        scalingConfig={"minSize": 1, "maxSize": 9, "desiredSize": 2},
        subnets=["subnet-1"],
        nodeRole="arn:aws:iam::123456789012:role/node",
        capacityType="SPOT",
    )


@pytest.fixture
def driver() -> EksDriver:
    return EksDriver(GROUP, Pace(), functools.partial(eks_client, fence=lambda: None))


async def test_without_its_client_it_says_what_to_install(
    driver: EksDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("boto3", "botocore.config", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ScalingError, match=r"pip install '\.\[pools\]'") as error:
        await driver.read()
    assert error.value.reason == "NotInstalled"


async def test_without_credentials_it_says_where_they_come_from(
    driver: EksDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ScalingError, match="IRSA") as error:
        await driver.read()
    assert error.value.reason == "Forbidden"


@pytest.mark.nightly
async def test_all_groups_of_a_region_share_one_client(eks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was made for each call, in four threads at once, of boto3's default session."""
    create(eks)
    made: list[str] = []
    monkeypatch.setattr(
        "shoal.pools.subject.eks_client",
        lambda region, fence: made.append(region) or eks_client(region, fence),
    )
    make = drivers(Wrapper(None), GENERIC, {}, lambda: None)  # type: ignore[arg-type]
    spec = {
        "capacityType": "Spot",
        "limits": {"nodes": 9},
        "accelerator": {"name": "nvidia-l4", "count": 1},
        "scaling": {"mode": "Cloud", "cloud": {"eks": GROUP.model_dump(by_alias=True)}},
    }
    pool = CapacityPool.model_validate({"metadata": {"name": "l4"}, "spec": spec})
    subject = subject_of(pool.spec.scaling)
    assert subject is not None
    for _ in range(3):
        assert (await make(pool, subject).read()).nodes == 2
    assert made == [GROUP.region]


async def test_size_and_limits_are_read(eks: Any, driver: EksDriver) -> None:
    create(eks)
    assert await driver.read() == Target(nodes=2, minimum=1, maximum=9)


async def test_only_the_desired_size_is_set(eks: Any, driver: EksDriver) -> None:
    create(eks)
    await driver.resize(5, await driver.read())
    group = eks.describe_nodegroup(clusterName="training", nodegroupName="spot-l4")["nodegroup"]
    assert group["scalingConfig"] == {"minSize": 1, "maxSize": 9, "desiredSize": 5}


async def test_a_leader_that_was_stopped_sets_no_size(eks: Any) -> None:
    """Another one had set the size meanwhile, and took that of the first for somebody else's."""
    create(eks)

    def lost() -> None:
        raise LeaseLost("another leads")

    driver = EksDriver(GROUP, Pace(), functools.partial(eks_client, fence=lost))
    seen = await driver.read()
    with pytest.raises(LeaseLost):
        await driver.resize(5, seen)
    assert await driver.read() == seen


async def test_a_group_that_does_not_exist_is_named(eks: Any, driver: EksDriver) -> None:
    with pytest.raises(ScalingError, match=r"training/spot-l4 in eu-west-1: .*Correct spec.scaling") as error:
        await driver.read()
    assert error.value.reason == "TargetNotFound"


async def test_a_group_that_is_being_updated_is_busy() -> None:
    found = {"scalingConfig": {"minSize": 0, "maxSize": 9, "desiredSize": 2}, "status": "UPDATING"}

    class Client:
        def describe_nodegroup(self, **names: str) -> Any:
            assert names == {"clusterName": "training", "nodegroupName": "spot-l4"}
            return {"nodegroup": found}

    driver = EksDriver(GROUP, Pace(), lambda _region: Client())
    assert (await driver.read()).busy == "EKS node group training/spot-l4 in eu-west-1 is UPDATING"


@pytest.mark.parametrize(
    ("code", "reason", "words"),
    [
        ("AccessDeniedException", "Forbidden", "eks:UpdateNodegroupConfig"),
        ("ResourceInUseException", "Busy", "in use"),
        ("InvalidParameterException", "Refused", "InvalidParameterException"),
    ],
)
async def test_refusals_say_what_to_do(code: str, reason: str, words: str) -> None:
    from botocore.exceptions import ClientError

    def refuse(method: str, **_: Any) -> Any:
        error = {"Code": code, "Message": "it is in use"}
        raise ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": 409}}, method)

    class Client:
        update_nodegroup_config = functools.partial(refuse, "UpdateNodegroupConfig")

    driver = EksDriver(GROUP, Pace(), lambda _region: Client())
    with pytest.raises(ScalingError, match=words) as error:
        await driver.resize(3, Target(2))
    assert error.value.reason == reason


class Gateway(BaseHTTPRequestHandler):
    """EKS, whose answer to the first update is lost after it was made; it refuses a second one meanwhile."""

    lost = b""
    """What comes instead of the answer."""
    updates = 0

    def do_POST(self) -> None:
        type(self).updates += 1
        in_use = b'{"message": "it is not in Active State"}'
        head = f"HTTP/1.1 409 Conflict\r\nx-amzn-errortype: ResourceInUseException\r\nContent-Length: {len(in_use)}"
        self.wfile.write(self.lost if self.updates == 1 else f"{head}\r\n\r\n".encode() + in_use)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    "lost", [b"", b"HTTP/1.1 504 Gateway Time-out\r\nContent-Length: 0\r\n\r\n"], ids=["nothing", "504"]
)
async def test_an_update_whose_answer_was_lost_may_have_been_made(
    driver: EksDriver, monkeypatch: pytest.MonkeyPatch, lost: bytes
) -> None:
    """It counted as refused: by a gateway, or since botocore's own second attempt met the update of the first."""
    handler = type("Handler", (Gateway,), {"lost": lost})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(Unavailable):
            await driver.resize(5, Target(2))
        server.shutdown()
