"""Node groups of EKS, on a server that speaks AWS's protocol."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from shoal.api.capacity_pool import EksNodegroup
from shoal.errors import ScalingError
from shoal.pools.eks import AUTOSCALER_TAG, EksDriver
from shoal.pools.rules import Pace, Target

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


def create(client: Any, tags: dict[str, str] | None = None) -> None:
    client.create_nodegroup(
        clusterName="training",
        nodegroupName="spot-l4",
        scalingConfig={"minSize": 1, "maxSize": 9, "desiredSize": 2},
        subnets=["subnet-1"],
        nodeRole="arn:aws:iam::123456789012:role/node",
        capacityType="SPOT",
        tags=tags or {},
    )


@pytest.fixture
def driver() -> EksDriver:
    return EksDriver(GROUP, Pace())


async def test_size_and_limits_are_read(eks: Any, driver: EksDriver) -> None:
    create(eks)
    assert await driver.read() == Target(nodes=2, minimum=1, maximum=9)


async def test_only_the_desired_size_is_set(eks: Any, driver: EksDriver) -> None:
    create(eks)
    await driver.resize(5, await driver.read())
    group = eks.describe_nodegroup(clusterName="training", nodegroupName="spot-l4")["nodegroup"]
    assert group["scalingConfig"] == {"minSize": 1, "maxSize": 9, "desiredSize": 5}


@pytest.mark.parametrize(("value", "reason"), [("true", "AutoscalerActive"), ("false", None)])
async def test_the_autoscalers_tag_is_a_conflict(
    eks: Any, driver: EksDriver, value: str, reason: str | None
) -> None:
    create(eks, {AUTOSCALER_TAG: value})
    sized_by = (await driver.read()).sized_by
    assert (sized_by.reason if sized_by else None) == reason


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
        raise ClientError({"Error": {"Code": code, "Message": "it is in use"}}, method)

    class Client:
        update_nodegroup_config = functools.partial(refuse, "UpdateNodegroupConfig")

    driver = EksDriver(GROUP, Pace(), lambda _region: Client())
    with pytest.raises(ScalingError, match=words) as error:
        await driver.resize(3, Target(2))
    assert error.value.reason == reason
