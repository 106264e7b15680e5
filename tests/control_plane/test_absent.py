"""How a real API server says that there is no such object, and that it does not know such objects."""

from __future__ import annotations

import pytest

from dev.cluster import ControlPlane
from shoal.cluster.transport import JSON
from shoal.errors import Unavailable
from tests.control_plane.operators import transport

UID = {"preconditions": {"uid": "0-0-0"}}


async def test_a_404_is_about_the_object_only_where_its_kind_is_known(
    control_plane: ControlPlane, crds: None, namespace: str
) -> None:
    """What `Answer.accept` goes by: an object that was taken for gone is hidden from the operator for good."""
    server = await transport(control_plane.kubeconfig)
    known = [
        "/api/v1/{}/pods/x",
        "/apis/policy/v1/{}/poddisruptionbudgets/x",
        "/apis/shoal.dev/v1alpha1/{}/trainingjobs/x",
    ]
    unknown = ["/apis/shoal.dev/v9/{}/trainingjobs/x", "/apis/absent.dev/v1/{}/things/x"]
    try:
        for path in (each.format(f"namespaces/{namespace}") for each in known):
            for method, body in (("GET", None), ("DELETE", UID)):
                answer = await server.request(method, path, body=body, content_type=JSON)
                answer.accept(404)
                assert (answer.status, answer.reason) == (404, "NotFound"), path
        for path in (each.format(f"namespaces/{namespace}") for each in unknown):
            for method, body in (("GET", None), ("DELETE", UID)):
                answer = await server.request(method, path, body=body, content_type=JSON)
                assert (answer.status, answer.reason) == (404, ""), path
                with pytest.raises(Unavailable):
                    answer.accept(404)
    finally:
        await server.close()
