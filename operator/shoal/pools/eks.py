"""Mode Cloud, EKS: the desired size of a managed node group.

boto3 is not asynchronous: each call is in a thread, with time-outs. Only `desiredSize` is sent; the group's own
minimum and maximum are kept to. Whether the cluster's autoscaler sizes it, too, cannot be read: it finds groups by tags
of the Auto Scaling group, which EKS sets on every one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shoal.api.capacity_pool_scaling import EksNodegroup
from shoal.errors import Busy, ScalingError, Unavailable
from shoal.pools.driver import Fence
from shoal.pools.rules import Pace, Target

TIMEOUTS = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 2, "mode": "standard"}}
STEADY = {"ACTIVE", "DEGRADED"}
REFUSED = {400, 401, 403, 404, 409}
"""What EKS itself answers with. A gateway's answers, such as 504, do not say what EKS did."""


def eks_client(region: str, fence: Fence) -> Any:
    """A client of EKS with the credentials of the pod: to be kept, since it renews them, and serves all threads.

    It has a session of its own: boto3's default one is not to be used by several threads. `fence`: called before each
    attempt to set a size is sent, after the credentials were fetched.

    Raises:
        ScalingError: boto3 is not installed, or there are no credentials.
        Unavailable: the credentials cannot be had now.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ScalingError(
            "NotInstalled", "boto3 is not installed: pip install '.[pools]' in a checkout of Shoal"
        ) from error
    try:
        session = boto3.session.Session()
        if session.get_credentials() is None:
            words = (
                "there are no AWS credentials: annotate the service account of shoal-pools with a role (IRSA)"
            )
            raise ScalingError("Forbidden", words)
        client = session.client("eks", region_name=region, config=Config(**TIMEOUTS))
    except BotoCoreError as error:
        raise Unavailable(f"EKS in {region}: {error}") from error

    def before_send(**_: Any) -> None:  # what it returned would be the answer
        fence()

    client.meta.events.register("before-send.eks.UpdateNodegroupConfig", before_send)
    return client


class EksDriver:
    """Sizes one managed node group. `client`: of a region."""

    def __init__(self, group: EksNodegroup, pace: Pace, client: Callable[[str], Any]) -> None:
        self._group = group
        self._names = {"clusterName": group.cluster, "nodegroupName": group.nodegroup}
        self._what = f"EKS node group {group.cluster}/{group.nodegroup} in {group.region}"
        self._client = client
        self.pace = pace

    async def read(self) -> Target:
        """See `Driver`."""
        found = (await self._call("describe_nodegroup"))["nodegroup"]
        sizes = found["scalingConfig"]
        status = found.get("status", "")
        return Target(
            nodes=int(sizes["desiredSize"]),
            minimum=int(sizes.get("minSize", 0)),
            maximum=int(sizes["maxSize"]),
            busy="" if status in STEADY else f"{self._what} is {status}",
        )

    async def resize(self, nodes: int, _seen: Target, /) -> None:
        """See `Driver`."""
        await self._call("update_nodegroup_config", scalingConfig={"desiredSize": nodes})

    async def let_go(self) -> None:
        """See `Driver`; the group stays."""

    async def _call(self, method: str, **parameters: Any) -> Any:
        client = await asyncio.to_thread(self._client, self._group.region)
        from botocore.exceptions import BotoCoreError, ClientError  # there is a client, so they are installed

        try:
            return await asyncio.to_thread(getattr(client, method), **self._names, **parameters)
        except ClientError as error:
            raise self._failed(error.response) from error
        except BotoCoreError as error:
            raise Unavailable(f"{self._what}: {error}") from error

    def _failed(self, response: dict[str, Any]) -> Exception:
        error, meta = response["Error"], response.get("ResponseMetadata") or {}
        code, words = error.get("Code", ""), f"{self._what}: {error.get('Message', '')}"
        if meta.get("RetryAttempts") or meta.get("HTTPStatusCode") not in REFUSED or "Throttl" in code:
            return Unavailable(f"{words} ({code})")  # what a repeated request meets may be its first attempt
        if code == "ResourceNotFoundException":
            return ScalingError("TargetNotFound", f"{words} Correct spec.scaling.cloud.eks")
        if code == "ResourceInUseException":
            return Busy("Busy", words)
        if "AccessDenied" in code or code in {"UnrecognizedClientException", "ExpiredTokenException"}:
            rights = "eks:DescribeNodegroup and eks:UpdateNodegroupConfig on this node group"
            return ScalingError("Forbidden", f"{words} Grant {rights}")
        return ScalingError("Refused", f"{words} ({code})")
