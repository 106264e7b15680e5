"""The local cluster: a real control plane for anybody, and with root on Linux real nodes."""

from dev.cluster.control_plane import ControlPlane

__all__ = ["ControlPlane"]
