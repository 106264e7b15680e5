"""A cluster with real nodes on this machine.

All names begin with the cluster's name, and every process is recorded before it runs, so that `down` finds everything
after a crash of `up`, and ends nothing else.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dev.cluster import addons, cgroups, holder, host, network
from dev.cluster.containerd import ensure_template, load
from dev.cluster.control_plane import ControlPlane, Network
from dev.cluster.network import Addresses
from dev.cluster.node import GRACE_SECONDS, Node, NodeSpec, read_spec
from dev.console import alone, say, step
from dev.errors import DevError
from dev.paths import clusters
from dev.tools import NODES, ensure, locate

NUMBERS = {"local": 0, "test": 1, "spare": 2}
"""The clusters that can run on one machine at once. The number determines their addresses."""

DEFAULT_NODES = (("ondemand-1", False), ("spot-1", True), ("spot-2", True), ("spot-3", True))


class LocalCluster:
    """One cluster with real nodes. All changes need root on Linux."""

    def __init__(self, name: str = "local") -> None:
        if name not in NUMBERS:
            raise DevError(f"{name} is not a cluster name; choose one of {', '.join(NUMBERS)}.")
        self.name = name
        self.folder = clusters() / name
        self.addresses = Addresses(name, NUMBERS[name])
        ports = Network(self.addresses.control_plane, self.addresses.netns, 6443, 2379, 2380, 10257, 10259)
        self.plane = ControlPlane(self.folder, locate(), ports)

    # --- up and down ------------------------------------------------------------------------------------------------

    def up(self, nodes: Sequence[tuple[str, bool]] = DEFAULT_NODES, images: Sequence[str] = ()) -> None:
        """Control plane, DNS, storage, then the nodes together. `images` are the references to load.

        Raises:
            DevError: it is already running, or another process uses it, or something did not start (it is kept for
            inspection; `down` removes it).
        """
        host.prepare()
        self.plane.tools = ensure(NODES)
        with self._lock():
            self.refuse_another()
            if self.plane.processes.running("kube-apiserver"):
                raise DevError(
                    f"The cluster {self.name} is already running. Stop it with `python -m dev down`."
                )
            self._remove()
            holder.hold(self.name)
            host.save_sysctls()
            with ThreadPoolExecutor() as pool:
                template = pool.submit(ensure_template, images)
                with step("control plane"):
                    network.create(self.addresses)
                    self.plane.launch()
                    addons.start_dns(self.plane, self.addresses)
                    self._apply(addons.dns_manifests(self.addresses))
                    self._apply(addons.storage_manifests(self.folder / "volumes"))
                template.result()
        with step(f"{len(nodes)} nodes"):
            self.add_nodes(nodes)

    def down(self) -> None:
        """Stop and remove everything of this cluster, in any state.

        Raises:
            DevError: another process, which still runs, uses it.
        """
        with self._lock():
            self._remove()

    def refuse_another(self) -> None:
        """Raise a DevError if another process uses this cluster."""
        holder.refuse_another(self.name)

    def _remove(self) -> None:
        self.refuse_another()
        for node in self.nodes():
            node.processes.stop("init", "logind", number=signal.SIGKILL)
        # A node without a spec file can still have recorded processes.
        for folder in self._node_folders():
            self._stray(folder)
        self.plane.processes.stop(*self.plane.processes.names(), number=signal.SIGKILL)
        # Names and addresses are per machine, records per cache folder.
        if others := network.processes(self.addresses):
            raise DevError(
                f"A cluster {self.name} of another cache folder (XDG_CACHE_HOME) runs on this machine, with the "
                f"processes {', '.join(map(str, others))}. Stop it with `make demo-down` where it was started."
            )
        network.remove(self.addresses)
        if busy := cgroups.remove(self.addresses.prefix):
            say(f"[yellow]still busy, not removed: {', '.join(map(str, busy))}[/yellow]")
        shutil.rmtree(self.folder, ignore_errors=True)
        holder.release(self.name)
        if not any((clusters() / name / "nodes").exists() for name in NUMBERS):
            host.restore_sysctls()

    def _stray(self, folder: Path) -> None:
        node = Node(
            NodeSpec(folder.name, 0, spot=False), folder, self.addresses, self.plane.tools, self.plane.pki
        )
        node.processes.stop(*node.processes.names(), number=signal.SIGKILL)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """The nodes that exist."""
        specs = [(folder, read_spec(folder)) for folder in self._node_folders()]
        return [
            Node(spec, folder, self.addresses, self.plane.tools, self.plane.pki)
            for folder, spec in specs
            if spec
        ]

    def node(self, name: str) -> Node:
        """One node by name.

        Raises:
            DevError: there is no such node.
        """
        names = {node.spec.name: node for node in self.nodes()}
        if name not in names:
            raise DevError(f"There is no node {name}; there are: {', '.join(names) or 'none'}.")
        return names[name]

    def add_nodes(
        self,
        nodes: Sequence[tuple[str, bool]],
        *,
        labels: Mapping[str, str] | None = None,
        seconds: float = 90.0,
    ) -> None:
        """Add nodes, as pairs (name, whether it is spot), with more labels, and wait until they are Ready."""
        self._need_running()
        if taken := {name for name, _ in nodes} & {node.spec.name for node in self.nodes()}:
            raise DevError(f"There is a node {', '.join(sorted(taken))} already.")
        first = self._reserve(len(nodes))
        made = [
            Node(
                NodeSpec(name, first + i, spot, dict(labels or {})),
                self.folder / "nodes" / name,
                self.addresses,
                self.plane.tools,
                self.plane.pki,
            )
            for i, (name, spot) in enumerate(nodes)
        ]
        for node in made:
            # A machine with the name of a removed one is another node.
            self.plane.kubectl("delete", "node", node.spec.name, "--ignore-not-found", "--wait=false")
        for node in made:
            node.start(self.plane.server)
        deadline = time.monotonic() + seconds
        for node in made:
            self._await_ready(node, deadline)

    def notice(self, name: str, *, seconds: float = GRACE_SECONDS) -> None:
        """Reclaim a spot machine: the notice, and after `seconds` the end. Blocks until the end.

        The kubelet reports "node is shutting down", sends SIGTERM, and ends the pods.
        """
        node = self.node(name)
        node.power_button()
        time.sleep(seconds)
        node.kill()

    def kill(self, name: str) -> None:
        """End the machine without notice."""
        self.node(name).kill()

    def load_image(self, reference: str) -> None:
        """Load an image of the cache into all running nodes; new nodes get it from the template."""
        ensure_template([reference])
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(load, node.socket, reference) for node in self.nodes() if node.alive]:
                done.result()

    def _await_ready(self, node: Node, deadline: float) -> None:
        while True:
            with contextlib.suppress(OSError):
                status = json.loads(self.plane.get(f"/api/v1/nodes/{node.spec.name}"))["status"]
                conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
                if conditions.get("Ready") == "True":
                    return
            if not node.alive or time.monotonic() > deadline:
                logs = {n: node.processes.tail(n, 5) for n in ("init", "containerd", "kubelet")}
                what = "\n".join(f"--- {name}\n{tail}" for name, tail in logs.items())
                raise DevError(
                    f"The node {node.spec.name} did not become Ready:\n{what}\nLogs: {node.folder / 'logs'}"
                )
            time.sleep(0.05)

    def _need_running(self) -> None:
        if not self.plane.processes.running("kube-apiserver"):
            raise DevError(f"The cluster {self.name} is not running. Start it with `python -m dev up`.")

    def _reserve(self, count: int) -> int:
        path = self.folder / "next-node"
        first = int(path.read_text()) if path.exists() else 1
        if first + count > 200:
            raise DevError(
                "A cluster can have at most 200 nodes in its lifetime; stop it and start it again."
            )
        path.write_text(str(first + count))
        return first

    def _node_folders(self) -> list[Path]:
        return sorted(p for p in (self.folder / "nodes").glob("*") if p.is_dir())

    def _apply(self, manifests: Sequence[addons.Manifest]) -> None:
        documents = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        try:
            self.plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(documents))
        except subprocess.CalledProcessError as error:
            raise DevError(f"kubectl apply failed: {error.stderr}") from error

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        clusters().mkdir(parents=True, exist_ok=True)
        with alone(clusters() / f".{self.name}.lock", f"busy with the cluster {self.name}"):
            yield
