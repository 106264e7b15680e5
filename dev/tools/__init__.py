"""Kubernetes, etcd, CoreDNS and helm, built from source at pinned versions.

`go.mod` and `go.sum` in this folder pin them as Go tools, so only the Go module proxy is needed. They are built once
into the user's cache, in a folder named after their versions.
"""

from dev.tools.build import CONTROL_PLANE, NODES, Tools, ensure, locate

__all__ = ["CONTROL_PLANE", "NODES", "Tools", "ensure", "locate"]
