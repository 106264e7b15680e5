"""The local cluster: a real control plane for any user, and real nodes with root on Linux."""

from dev.cluster.control_plane import ControlPlane

__all__ = ["ControlPlane"]
