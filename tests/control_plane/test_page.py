"""The web page of the real operator, in a real browser, beside a job whose node is taken."""

from __future__ import annotations

from pathlib import Path

from dev.cluster import ControlPlane
from dev.kube import Kube
from tests.browser.chromium import chromium, needs_chromium
from tests.control_plane.operators import Job, OperatorProcess, fixed_ports
from tests.doubles.fake_kubelet import FakeKubelet


@needs_chromium
async def test_page_shows_why_a_worker_was_replaced(
    control_plane: ControlPlane,
    crds: None,
    kube: Kube,
    namespace: str,
    fake_kubelet: FakeKubelet,
    tmp_path: Path,
) -> None:
    await fake_kubelet.add_node("safe-1")
    for name in ("spot-1", "spot-2", "spot-3"):
        await fake_kubelet.add_node(name, spot=True)
    [port] = fixed_ports(1)
    job = Job(kube, namespace)
    operator = OperatorProcess(control_plane.kubeconfig, namespace, tmp_path, {"SHOAL_PAGE_PORT": str(port)})
    async with operator, chromium() as tab:
        await job.apply()
        await job.runs()
        await tab.open(f"http://127.0.0.1:{port}/#/{namespace}/{job.name}")
        await tab.until("document.querySelectorAll('#job svg rect').length >= 3")
        await fake_kubelet.notice((await job.pods())["digits-worker-0-0"]["spec"]["nodeName"])
        why = "[...document.querySelectorAll('#job svg rect title')].map(each => each.textContent).join()"
        await tab.until(f"/worker 0-0 on spot-.*ended: NodeShutdown/.test({why})")
        await tab.until(f"/worker 0-1 on spot-.*Running/.test({why})")
        assert tab.problems == []
