"""The cluster's network: a namespace for the control plane with a bridge, one for each node, and a link to the host.

```
host 172.30.N.254 ── shoalN ─┐                      control plane 172.30.N.1 (also the DNS server)
                              ├─ bridge in shoal-NAME-cp ─┤
node 172.30.N.(10+i) ── eth0 ─┘                      pods of node i: 10.(200+N).i.0/24, routed through the bridge
```
Clusters have numbers (N), so that several can run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dev.commands import command

NETNS = Path("/run/netns")


@dataclass(frozen=True)
class Addresses:
    """The addresses and names of one cluster, derived from its name and number."""

    cluster: str
    number: int

    @property
    def control_plane(self) -> str:
        """The API server's address."""
        return f"172.30.{self.number}.1"

    @property
    def host(self) -> str:
        """The machine's address on the cluster's network."""
        return f"172.30.{self.number}.254"

    @property
    def pods(self) -> str:
        """The range of all pods."""
        return f"10.{200 + self.number}.0.0/16"

    @property
    def netns(self) -> str:
        """The control plane's network namespace."""
        return f"{self.prefix}cp"

    @property
    def prefix(self) -> str:
        """The prefix of the names of network namespaces and cgroups."""
        return f"shoal-{self.cluster}-"

    @property
    def link(self) -> str:
        """The host's network device."""
        return f"shoal{self.number}"

    def node(self, index: int) -> str:
        """A node's address."""
        return f"172.30.{self.number}.{10 + index}"

    def node_pods(self, index: int) -> str:
        """The range of a node's pods."""
        return f"10.{200 + self.number}.{index}.0/24"

    def node_netns(self, node: str) -> str:
        """A node's network namespace, and its cgroup's name."""
        return f"{self.prefix}node-{node}"


def create(addresses: Addresses) -> None:
    """Create the control plane's namespace with the bridge, and the host's link to it."""
    netns, link = addresses.netns, addresses.link
    command("ip", "netns", "add", netns)
    _batch(
        netns,
        "link set lo up",
        # Without a fixed MAC address, the bridge's changes when a node leaves, and the host loses the API for 20-50
        # s.
        f"link add br0 address 02:00:ac:1e:{addresses.number:02x}:01 type bridge forward_delay 0",
        f"addr add {addresses.control_plane}/24 dev br0",
        "link set br0 up",
    )
    command("ip", "link", "add", link, "type", "veth", "peer", "name", "host", "netns", netns)
    _batch(netns, "link set host master br0 up")
    _batch(
        None,
        f"addr add {addresses.host}/24 dev {link}",
        f"link set {link} up",
        f"route replace {addresses.pods} via {addresses.control_plane}",
    )
    command("nsenter", f"--net={NETNS / netns}", "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")


def add_node(addresses: Addresses, node: str, index: int) -> None:
    """Create the namespace of a node, on the bridge, and the route to its pods."""
    netns = addresses.node_netns(node)
    command("ip", "netns", "add", netns)
    peer = f"n{index}"
    command(
        "ip",
        "link",
        "add",
        "eth0",
        "netns",
        netns,
        "type",
        "veth",
        "peer",
        "name",
        peer,
        "netns",
        addresses.netns,
    )
    _batch(
        netns,
        "link set lo up",
        f"addr add {addresses.node(index)}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {addresses.control_plane}",
    )
    _batch(
        addresses.netns,
        f"link set {peer} master br0 up",
        f"route replace {addresses.node_pods(index)} via {addresses.node(index)}",
    )


def remove_node(addresses: Addresses, node: str, index: int) -> None:
    """Remove what `add_node` created, if it exists."""
    command("ip", "netns", "del", addresses.node_netns(node), check=False)
    command("ip", "-n", addresses.netns, "link", "del", f"n{index}", check=False)
    command("ip", "-n", addresses.netns, "route", "del", addresses.node_pods(index), check=False)


def remove(addresses: Addresses) -> None:
    """Remove everything of the cluster, by name, if it exists."""
    command("ip", "link", "del", addresses.link, check=False)
    for netns in namespaces(addresses):
        command("ip", "netns", "del", netns, check=False)


def namespaces(addresses: Addresses) -> list[str]:
    """The existing network namespaces of the cluster."""
    return sorted(path.name for path in NETNS.glob(f"{addresses.prefix}*"))


def processes(addresses: Addresses) -> list[int]:
    """All processes in the control plane's namespace."""
    return [int(pid) for pid in command("ip", "netns", "pids", addresses.netns, check=False).split()]


def _batch(netns: str | None, *commands: str) -> None:
    command("ip", *(["-n", netns] if netns else []), "-batch", "-", stdin="\n".join(commands) + "\n")
