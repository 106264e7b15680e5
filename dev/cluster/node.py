"""One real node: network, pid, mount and uts namespaces with containerd, kubelet and kube-proxy.

Pid 1 of the node is `node_init.py`. Killing it is like the end of a machine: the kernel kills every process of the
node.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dev.cluster import cgroups, network
from dev.cluster.containerd import config, copy_template
from dev.cluster.network import Addresses
from dev.cluster.pki import Pki
from dev.cluster.processes import ProcessTable
from dev.tools import Tools

SPOT = {"cloud.google.com/gke-spot": "true", "cloud.google.com/gke-provisioning": "spot"}
ON_DEMAND = {"cloud.google.com/gke-provisioning": "standard"}
DNS_IP = "10.96.0.10"
GRACE_SECONDS = 30
CRITICAL_SECONDS = 15
"""GKE's spot nodes: 30 s from the notice to the end, of which the last 15 s are for the system's own pods."""


@dataclass(frozen=True)
class NodeSpec:
    """The spec of a node. `index` determines its addresses and is unique in a cluster."""

    name: str
    index: int
    spot: bool
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_labels(self) -> dict[str, str]:
        """The labels, as on GKE."""
        return {
            "cloud.google.com/gke-nodepool": "spot" if self.spot else "on-demand",
            "topology.kubernetes.io/zone": "local-a",
            "topology.kubernetes.io/region": "local",
            "node.kubernetes.io/instance-type": "local",
            **(SPOT if self.spot else ON_DEMAND),
            **self.labels,
        }


class Node:
    """One node's files and processes, in the cluster's folder."""

    def __init__(self, spec: NodeSpec, folder: Path, addresses: Addresses, tools: Tools, pki: Pki) -> None:
        self.spec = spec
        self.folder = folder
        self.addresses = addresses
        self.tools = tools
        self.pki = pki
        self.processes = ProcessTable(folder / "processes", folder / "logs")

    @property
    def address(self) -> str:
        """The node's address."""
        return self.addresses.node(self.spec.index)

    @property
    def cgroup(self) -> str:
        """The name of its cgroup and of its network namespace."""
        return self.addresses.node_netns(self.spec.name)

    @property
    def socket(self) -> Path:
        """The socket of containerd."""
        return self.folder / "containerd.sock"

    @property
    def alive(self) -> bool:
        """Whether its pid 1 runs."""
        return self.processes.running("init")

    def start(self, server: str) -> None:
        """Create and start the node. It registers itself; this does not wait for Ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "node.json").write_text(json.dumps(asdict(self.spec)))
        name = self.spec.name
        self.pki.issue(
            f"node-{name}", f"system:node:{name}", group="system:nodes", hosts=(name, self.address)
        )
        self.pki.kubeconfig(f"node-{name}", server)
        network.add_node(self.addresses, name, self.spec.index)
        cgroups.create(self.cgroup)
        copy_template(self.folder / "containerd")
        self._write_configuration()
        logind = ["nsenter", f"--net=/run/netns/{self.cgroup}", sys.executable, "-I"]
        self.processes.start("logind", [*logind, str(_script("logind.py")), str(self.folder / "logind.sock")])
        # --kill-child: the init dies with `unshare`, whose pid is recorded; the node ends with its pid 1.
        unshare = ["unshare", "--kill-child=KILL", "--pid", "--fork", "--mount", "--uts", "--mount-proc"]
        init = [sys.executable, "-I", str(_script("node_init.py")), str(self.folder / "init.json")]
        self.processes.start("init", [*unshare, "--propagation", "private", *init], netns=self.cgroup)

    def limit(self, cores: float) -> None:
        """Limit the CPU time of its pods, in cores; 0: no limit."""
        cgroups.limit(self.cgroup, cores)

    def used(self) -> cgroups.Used:
        """What its pods had of the CPUs so far. Raises OSError if it is gone."""
        return cgroups.used(self.cgroup)

    def power_button(self) -> None:
        """Begin a graceful shutdown by the kubelet."""
        if found := self.processes.find("logind"):
            found.signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the machine: SIGKILL to its pid 1, then remove its kernel objects."""
        self.processes.stop("init", "logind", number=signal.SIGKILL)
        self.clean()

    def clean(self) -> None:
        """Remove namespace, cgroups and files of a node whose processes have ended."""
        network.remove_node(self.addresses, self.spec.name, self.spec.index)
        cgroups.remove(self.cgroup)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_configuration(self) -> None:
        folder = self.folder
        for name in ("cni", "kubelet"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "resolv.conf").write_text(f"nameserver {self.addresses.control_plane}\n")
        (folder / "cni" / "10-bridge.conflist").write_text(json.dumps(self._cni()))
        (folder / "containerd.toml").write_text(
            config(folder / "containerd", folder / "state", self.socket, folder / "cni")
        )
        (folder / "kubelet.json").write_text(json.dumps(self._kubelet()))
        (folder / "proxy.json").write_text(json.dumps(self._proxy()))
        (folder / "init.json").write_text(json.dumps(self._init()))

    def _init(self) -> dict[str, object]:
        folder, logs = self.folder, self.folder / "logs"
        labels = ",".join(f"{key}={value}" for key, value in self.spec.all_labels.items())
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        kubelet = [
            self.tools["kubelet"],
            f"--config={folder / 'kubelet.json'}",
            f"--kubeconfig={self.pki.path(f'node-{self.spec.name}.kubeconfig')}",
            f"--hostname-override={self.spec.name}",
            f"--node-ip={self.address}",
            f"--root-dir={folder / 'kubelet'}",
            f"--cert-dir={folder / 'kubelet' / 'pki'}",
            f"--node-labels={labels}",
        ]
        bus = {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={folder / 'logind.sock'}", "PATH": path}
        return {
            "name": self.spec.name,
            "sysctls": {"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"},
            "processes": [
                {
                    "command": ["containerd", "--config", str(folder / "containerd.toml")],
                    "log": str(logs / "containerd.log"),
                    "env": {"PATH": path},
                    "socket": str(self.socket),
                },
                {"command": kubelet, "log": str(logs / "kubelet.log"), "env": bus},
                {
                    "command": [self.tools["kube-proxy"], f"--config={folder / 'proxy.json'}"],
                    "log": str(logs / "kube-proxy.log"),
                    "env": {"PATH": path},
                },
            ],
        }

    def _cni(self) -> dict[str, object]:
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "mtu": 1500,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.folder / "ipam"),
                "ranges": [[{"subnet": self.addresses.node_pods(self.spec.index)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, portmap]}

    def _kubelet(self) -> dict[str, object]:
        folder, path = self.folder, self.pki.path
        name = f"node-{self.spec.name}"
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": path("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": path(f"{name}.crt"),
            "tlsPrivateKeyFile": path(f"{name}.key"),
            "clusterDNS": [DNS_IP],
            "clusterDomain": "cluster.local",
            "resolvConf": str(folder / "resolv.conf"),
            "failSwapOn": False,
            "oomScoreAdj": 0,  # a lower one needs CAP_SYS_RESOURCE, which root may lack
            "podLogsDir": str(folder / "pods"),
            "volumePluginDir": str(folder / "plugins"),
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "serializeImagePulls": False,
            "syncFrequency": "10s",
            "nodeStatusUpdateFrequency": "5s",
            "shutdownGracePeriod": f"{GRACE_SECONDS}s",
            "shutdownGracePeriodCriticalPods": f"{CRITICAL_SECONDS}s",
            "maxPods": 60,
        }

    def _proxy(self) -> dict[str, object]:
        fast = {"minSyncPeriod": "200ms", "syncPeriod": "30s"}
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "oomScoreAdj": 0,
            "bindAddress": "0.0.0.0",
            "hostnameOverride": self.spec.name,
            "clientConnection": {"kubeconfig": self.pki.path("proxy.kubeconfig")},
            "clusterCIDR": self.addresses.pods,
            "mode": "iptables",
            # Connection tracking is shared by the whole machine: do not change it.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "iptables": fast,
            "nftables": fast,
            "metricsBindAddress": "127.0.0.1:10249",
            "healthzBindAddress": "127.0.0.1:10256",
        }


def read_spec(folder: Path) -> NodeSpec | None:
    """The spec of a node that an earlier command created, or None."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return NodeSpec(**json.loads((folder / "node.json").read_text()))
    return None


def _script(name: str) -> Path:
    return Path(__file__).resolve().parent / name
