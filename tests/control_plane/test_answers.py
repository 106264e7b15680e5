"""What a real API server answers, where Shoal goes by it: that there is no such object, and to a patch of nothing."""

from __future__ import annotations

import pytest

from dev.cluster import ControlPlane
from dev.kube import Kube
from shoal.api.base import Resource
from shoal.api.events import Event
from shoal.cluster.clock import utc_now
from shoal.cluster.transport import JSON
from shoal.errors import Unavailable
from shoal.runtime.recorder import Recorder
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


async def test_a_repetition_counts_on_from_what_an_earlier_process_posted(
    control_plane: ControlPlane, namespace: str, kube: Kube
) -> None:
    server = await transport(control_plane.kubeconfig)
    job = Resource.model_validate(
        {"kind": "TrainingJob", "metadata": {"name": "digits", "namespace": namespace, "uid": "u"}}
    )
    event = Event("Warning", "WorkerDisrupted", "worker 0 was disrupted")
    try:
        for process in range(3):
            recorder = Recorder(server, reporter=f"operator-{process}", wall=utc_now)
            for _ in range(2):
                recorder.record(job, [event])
                await recorder.drain()
    finally:
        await server.close()
    [found] = (await kube.get(f"/api/v1/namespaces/{namespace}/events"))["items"]
    assert (found["count"], found["message"]) == (6, event.message)
