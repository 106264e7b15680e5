"""README.md, "Your cluster": its commands run as they stand, on a real API server.

What `shoal follow`, `explain` and `model` do of a job that runs is in tests/nodes/test_documented.py.
"""

from __future__ import annotations

import shlex

from dev.images import IMAGES
from dev.kube import Kube
from dev.publish import reference
from tests.control_plane.terminal import Terminal
from tests.unit.docs.pages import block


async def test_a_job_is_applied_and_one_made_of_a_file(
    terminal: Terminal, kube: Kube, namespace: str
) -> None:
    """In the order of the page."""
    apply, get = block("README.md", "sed").commands
    await terminal.run(apply.line)
    jobs = f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/trainingjobs"
    [job] = (await kube.get(jobs))["items"]
    [worker] = job["spec"]["workers"]["template"]["spec"]["containers"]
    assert worker["image"] == reference(IMAGES["digits"], "registry.example.com/team", "TAG")
    words = shlex.split(get.line, comments=True)
    assert words[-1] == "-w"  # it does not end
    header, line = (await terminal.run(shlex.join(words[:-1]))).splitlines()
    shown = block("README.md", "NAME").text
    assert header.split() == shown.splitlines()[0].split()
    assert line.split()[0] == "digits"

    init, *_ = block("README.md", "shoal init").commands
    await terminal.run(init.line)
    [second] = [each for each in (await kube.get(jobs))["items"] if each["metadata"]["name"] != "digits"]
    assert second["spec"]["workers"]["replicas"] == 3
    claims = [each["spec"]["storage"]["volumeClaim"]["name"] for each in (job, second)]
    made = (await kube.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"))["items"]
    assert sorted(claims) == sorted(each["metadata"]["name"] for each in made), "one each: it serves one node"
    assert "no operator has looked at this job" in await terminal.run("shoal explain quickstart")
