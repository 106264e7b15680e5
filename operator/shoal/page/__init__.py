"""The web page: jobs and pools of the operator's caches; read-only, no secrets, no other hosts, no build step.

`Page(jobs, pools)` gives the answers for an HTTP server, and `run()` remembers over time what the caches only have now.
"""

from shoal.page.server import Page

__all__ = ["Page"]
