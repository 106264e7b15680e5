"""The control plane as plain processes (etcd, apiserver, controller-manager, scheduler), for any user.

On loopback it uses free ports, so that several can run at once; with real nodes it has a network namespace. The data
are deleted with the cluster, so etcd does not sync to disk, and processes are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dev.cluster import holder
from dev.cluster.pki import Pki
from dev.cluster.processes import ProcessTable
from dev.errors import DevError
from dev.paths import clusters
from dev.tools import CONTROL_PLANE, Tools, ensure, locate

OF_A_BLOCK = "control-plane-*-*"
"""The folders of those that end with a block."""
PROCESSES = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")
OPERATOR_NAMESPACE = "shoal-system"
SERVICE_CIDR = "10.96.0.0/16"

AUDIT_MEGABYTES = 100_000
"""More than any: a log that is rotated has an end that its readers do not see. (0 means the default, 100.)"""
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    # A record at RequestReceived lacks the object's name; the one at ResponseComplete has both times.
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        # What an operator with a service account of this namespace asks for, reads included.
        {"level": "Metadata", "userGroups": [f"system:serviceaccounts:{OPERATOR_NAMESPACE}"]},
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io"}]},
        {"level": "Metadata"},
    ],
}


@dataclass(frozen=True)
class Network:
    """The addresses of the control plane. Without a namespace: loopback, on free ports."""

    address: str = "127.0.0.1"
    netns: str | None = None
    apiserver_port: int = 0
    etcd_port: int = 0
    etcd_peer_port: int = 0
    controller_manager_port: int = 0
    scheduler_port: int = 0

    def with_ports(self) -> Network:
        """A copy with free ports where none is set."""
        names = (
            "apiserver_port",
            "etcd_port",
            "etcd_peer_port",
            "controller_manager_port",
            "scheduler_port",
        )
        free = free_ports(len(names))
        values = {n: getattr(self, n) or port for n, port in zip(names, free, strict=True)}
        return Network(self.address, self.netns, **values)


@dataclass
class ControlPlane:
    """A control plane: with `start` it ends with the block, with `launch` it outlives the process."""

    folder: Path
    tools: Tools
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        self.processes = ProcessTable(self.folder / "processes", self.folder / "logs")
        self.pki = Pki(self.folder / "pki")

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return f"https://{self.network.address}:{self.network.apiserver_port}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, with embedded credentials."""
        return self.folder / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON event per line for every write request except leases, at stage ResponseComplete.

        Of service accounts in `OPERATOR_NAMESPACE` also reads and leases.

        `requestReceivedTimestamp` and `stageTimestamp` have microseconds; `objectRef.name` is set also for
        creates. `dev.audit` reads it.
        """
        return self.folder / "logs" / "audit.log"

    @property
    def env(self) -> dict[str, str]:
        """The environment for commands: KUBECONFIG, and the built tools first on PATH."""
        path = f"{self.tools.folder}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}

    @classmethod
    @contextlib.contextmanager
    def start(cls, *, controller_manager_args: Sequence[str] = ()) -> Iterator[ControlPlane]:
        """A control plane on loopback for the duration of a block; its folder is removed afterwards.

        Builds missing tools. Many can run at once. What killed processes left is stopped before: it has a gigabyte.
        """
        tools = ensure(CONTROL_PLANE)
        for orphan in orphans():
            orphan.stop()
        folder = clusters() / f"control-plane-{os.getpid()}-{time.monotonic_ns():x}"
        plane = cls(folder, tools)
        holder.hold(folder.name)
        try:
            plane.launch(controller_manager_args)
            yield plane
        finally:
            plane.stop()

    def launch(self, controller_manager_args: Sequence[str] = ()) -> None:
        """Start everything and wait until it serves.

        Raises:
            DevError: a process ended or did not become ready; the message holds the end of its log.
        """
        for attempt in (1, 2, 3):
            self.network = self.network.with_ports()
            try:
                self._launch_apiserver()
                break
            except _PortTaken:
                if attempt == 3 or self.network.netns is not None:
                    raise
                self.network = Network(self.network.address)  # another process took a port: choose others
        self._launch_controllers(controller_manager_args)

    def stop(self) -> None:
        """End the processes and remove the folder with everything in it."""
        self.processes.stop(*PROCESSES, number=signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.match(OF_A_BLOCK):
            holder.release(self.folder.name)

    def kubectl(self, *args: str, stdin: str | None = None, timeout: float = 60) -> str:
        """Run kubectl and return what it prints.

        Raises:
            subprocess.CalledProcessError: with kubectl's output in `stderr`.
        """
        done = subprocess.run(
            [self.tools["kubectl"], f"--kubeconfig={self.kubeconfig}", *args],
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout,
        )
        return done.stdout

    def get(self, path: str) -> bytes:
        """GET a path of the API server as the administrator.

        Raises:
            OSError: not reachable, or an HTTP error.
        """
        context = ssl.create_default_context(cafile=self.pki.path("ca.crt"))
        context.load_cert_chain(self.pki.path("admin.crt"), self.pki.path("admin.key"))
        with urllib.request.urlopen(self.server + path, context=context, timeout=5) as answer:
            return bytes(answer.read())

    def _launch_apiserver(self) -> None:
        network, pki = self.network, self.pki
        for old in ("etcd", "pki"):
            shutil.rmtree(self.folder / old, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        pki.create(network.address)
        for name, server in (("admin", self.server), ("kcm", self.server), ("scheduler", self.server)):
            pki.kubeconfig(name, server)
        pki.kubeconfig("proxy", self.server)
        shutil.copy(pki.path("admin.kubeconfig"), self.kubeconfig)
        (self.folder / "audit-policy.yaml").write_text(json.dumps(AUDIT_POLICY))
        (self.folder / "network.json").write_text(json.dumps(vars(network)))
        self.processes.start(
            "etcd", [self.tools["etcd"], *etcd_args(self.folder / "etcd", network)], netns=network.netns
        )
        self.processes.start(
            "kube-apiserver",
            [self.tools["kube-apiserver"], *self._apiserver_args()],
            netns=network.netns,
        )
        self._wait("kube-apiserver", lambda: self.get("/readyz") == b"ok", 120)

    def _launch_controllers(self, controller_manager_args: Sequence[str]) -> None:
        netns = self.network.netns
        manager = [self.tools["kube-controller-manager"], *self._controller_manager_args()]
        self.processes.start("kube-controller-manager", [*manager, *controller_manager_args], netns=netns)
        scheduler = [
            self.tools["kube-scheduler"],
            *_kubeconfigs(self.pki.path("scheduler.kubeconfig")),
            f"--secure-port={self.network.scheduler_port}",
        ]
        self.processes.start("kube-scheduler", scheduler, netns=netns)
        # Pods need the default service account last; the scheduler has its own readiness endpoint.
        self._wait(
            "kube-controller-manager",
            lambda: bool(self.get("/api/v1/namespaces/default/serviceaccounts/default")),
            60,
        )

    def _wait(self, name: str, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                if ready():
                    return
            for process in self.processes.names():
                if not self.processes.running(process):
                    tail = self.processes.tail(process)
                    self.processes.stop(*PROCESSES, number=signal.SIGKILL)
                    kind = _PortTaken if "address already in use" in tail else DevError
                    raise kind(f"{process} ended while the control plane was starting:\n{tail}")
            if time.monotonic() > deadline:
                raise DevError(
                    f"{name} was not ready in {seconds:.0f} s:\n{self.processes.tail(name)}\n"
                    f"The whole log is {self.processes.log(name)}."
                )
            time.sleep(0.05)

    def _apiserver_args(self) -> list[str]:
        network, path = self.network, self.pki.path
        on_loopback = network.netns is None
        return [
            f"--etcd-servers=http://127.0.0.1:{network.etcd_port}",
            f"--bind-address={network.address}",
            f"--advertise-address={network.address}",
            f"--secure-port={network.apiserver_port}",
            *(["--endpoint-reconciler-type=none"] if on_loopback else ["--enable-aggregator-routing=true"]),
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--client-ca-file={path('ca.crt')}",
            f"--tls-cert-file={path('apiserver.crt')}",
            f"--tls-private-key-file={path('apiserver.key')}",
            f"--kubelet-client-certificate={path('apiserver-kubelet-client.crt')}",
            f"--kubelet-client-key={path('apiserver-kubelet-client.key')}",
            f"--kubelet-certificate-authority={path('ca.crt')}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={path('front-ca.crt')}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={path('front-proxy-client.crt')}",
            f"--proxy-client-key-file={path('front-proxy-client.key')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={path('sa.pub')}",
            f"--service-account-signing-key-file={path('sa.key')}",
            "--api-audiences=https://kubernetes.default.svc,api",
            "--profiling=false",
            f"--audit-policy-file={self.folder / 'audit-policy.yaml'}",
            f"--audit-log-path={self.audit_log}",
            f"--audit-log-maxsize={AUDIT_MEGABYTES}",
        ]

    def _controller_manager_args(self) -> list[str]:
        path = self.pki.path
        return [
            *_kubeconfigs(path("kcm.kubeconfig")),
            f"--secure-port={self.network.controller_manager_port}",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={path('sa.key')}",
            f"--root-ca-file={path('ca.crt')}",
            f"--cluster-signing-cert-file={path('ca.crt')}",
            f"--cluster-signing-key-file={path('ca.key')}",
            f"--requestheader-client-ca-file={path('front-ca.crt')}",
            f"--client-ca-file={path('ca.crt')}",
            "--allocate-node-cidrs=false",  # each node's range is in its configuration
        ]


class _PortTaken(DevError):
    """A port was taken meanwhile."""


def load(folder: Path) -> ControlPlane | None:
    """The control plane that an earlier command launched in `folder`, or None."""
    try:
        network = Network(**json.loads((folder / "network.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return ControlPlane(folder, locate(), network)


def orphans() -> list[ControlPlane]:
    """Control planes of blocks whose process was killed before it could stop them."""
    left = [folder for folder in clusters().glob(OF_A_BLOCK) if holder.is_left(folder.name)]
    return [ControlPlane(folder, locate()) for folder in left]


def etcd_args(data: Path, network: Network) -> list[str]:
    """A single etcd without durability, for a temporary cluster."""
    client, peer = (f"http://127.0.0.1:{port}" for port in (network.etcd_port, network.etcd_peer_port))
    return [
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _kubeconfigs(kubeconfig: str) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        # With the defaults (20/s) the first service account takes 5 s, and pods are bound slowly.
        "--kube-api-qps=300",
        "--kube-api-burst=500",
    ]


def free_ports(count: int) -> list[int]:
    """So many ports of loopback that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
