"""Kubernetes' own commands, etcd, CoreDNS and helm, built from source at pinned versions.

`go.mod` and `go.sum` beside this file pin them (as Go tools), so a checkout and the Go module proxy are all
it takes: no downloads of binaries, no registry. They are built once into the user's cache, in a folder that
is named after what they are built from.
"""

from dev.tools.build import CONTROL_PLANE, NODES, Tools, ensure, locate

__all__ = ["CONTROL_PLANE", "NODES", "Tools", "ensure", "locate"]
