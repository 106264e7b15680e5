"""Mode Cloud, GKE: the size of a node pool.

GKE sets the same number of nodes in each zone of the pool, and does not say how many it has set: the managed instance
group of each zone does (Compute Engine's `targetSize`), as Terraform's provider reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.api.base import Reason
from shoal.api.capacity_pool_scaling import GkeNodePool
from shoal.errors import Busy, ScalingError, Unavailable
from shoal.pools.driver import Fence
from shoal.pools.rules import Pace, Target

SECONDS = 20.0
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


@dataclass(frozen=True)
class Gke:
    """Clients of the container API and, for the size of an instance group by its URL, of Compute Engine."""

    clusters: Any
    target_size: Callable[[str], int]


def gke_clients() -> Gke:
    """Clients with the credentials of the pod: to be kept, since they hold a connection and a token for all threads.

    Raises:
        ScalingError: the client is not installed, or there are no credentials.
    """
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
        from google.cloud.container_v1 import ClusterManagerClient
    except ImportError as error:
        words = "google-cloud-container is not installed: pip install '.[pools]' in a checkout of Shoal"
        raise ScalingError("NotInstalled", words) from error
    try:
        credentials, _ = google.auth.default(scopes=SCOPES)
    except GoogleAuthError as error:
        words = (
            "there are no Google credentials: annotate the service account of shoal-pools (Workload Identity)"
        )
        raise ScalingError("Forbidden", f"{words}: {error}") from error
    return Gke(ClusterManagerClient(credentials=credentials), compute(lambda: AuthorizedSession(credentials)))


def compute(sessions: Callable[[], Any]) -> Callable[[str], int]:
    """Reads the target size of an instance group, each with a `requests` session, which is one thread's."""

    def target_size(url: str) -> int:
        with sessions() as session:
            answer = session.get(url.replace("/instanceGroups/", "/instanceGroupManagers/"), timeout=SECONDS)
        if answer.status_code in {401, 403, 404}:
            words = f"cannot read {url}: HTTP {answer.status_code}; grant compute.instanceGroupManagers.get"
            raise ScalingError("Forbidden", words)
        if not answer.ok:
            raise Unavailable(f"{url}: HTTP {answer.status_code}")
        return int(answer.json()["targetSize"])

    return target_size


class GkeDriver:
    """Sizes one node pool."""

    def __init__(self, pool: GkeNodePool, pace: Pace, clients: Callable[[], Gke], fence: Fence) -> None:
        where = f"projects/{pool.project}/locations/{pool.location}/clusters/{pool.cluster}"
        self._name = f"{where}/nodePools/{pool.node_pool}"
        self._clients = clients
        self._fence = fence
        self.pace = pace

    async def read(self) -> Target:
        """See `Driver`."""
        found: Target = await self._call(self._read)
        return found

    async def resize(self, nodes: int, seen: Target, /) -> None:
        """See `Driver`."""

        def send(gke: Gke) -> None:
            self._fence()
            request = {"name": self._name, "node_count": nodes // seen.step}
            gke.clusters.set_node_pool_size(request=request, timeout=SECONDS)

        await self._call(send)

    async def let_go(self) -> None:
        """See `Driver`; the node pool stays."""

    def _read(self, gke: Gke) -> Target:
        found = gke.clusters.get_node_pool(request={"name": self._name}, timeout=SECONDS)
        groups = list(found.instance_group_urls)
        status = found.status.name
        return Target(
            nodes=sum(gke.target_size(url) for url in groups),
            step=max(1, len(groups)),
            busy="" if status in {"RUNNING", "RUNNING_WITH_ERROR"} else f"{self._name} is {status}",
            sized_by=_autoscaler(found.autoscaling.enabled),
        )

    async def _call(self, function: Callable[[Gke], Any]) -> Any:
        clients = await asyncio.to_thread(self._clients)
        from google.api_core import exceptions  # there are clients, so they are installed
        from google.auth.exceptions import GoogleAuthError
        from requests import RequestException  # Compute Engine's, also where its answer is no JSON

        try:
            return await asyncio.to_thread(function, clients)
        except exceptions.NotFound as error:
            words = f"{self._name}: {error.message} Correct spec.scaling.cloud.gke"
            raise ScalingError("TargetNotFound", words) from error
        except exceptions.FailedPrecondition as error:  # another operation of the cluster
            raise Busy("Busy", f"{self._name}: {error.message}") from error
        except (exceptions.Forbidden, exceptions.Unauthorized) as error:
            words = (
                f"{self._name}: {error.message} Grant container.clusters.get and container.clusters.update"
            )
            raise ScalingError("Forbidden", words) from error
        except (
            exceptions.ServerError,
            exceptions.TooManyRequests,
            exceptions.RetryError,
            GoogleAuthError,
            RequestException,
        ) as error:
            raise Unavailable(f"{self._name}: {error}") from error
        except exceptions.GoogleAPICallError as error:
            raise ScalingError("Refused", f"{self._name}: {error}") from error


def _autoscaler(enabled: bool) -> Reason | None:
    if not enabled:
        return None
    words = "GKE's autoscaler sizes it: set spec.scaling.mode to Pods, or turn its autoscaling off"
    return Reason("AutoscalerActive", words)
