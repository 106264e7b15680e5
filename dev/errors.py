"""The errors that a developer can fix."""

from __future__ import annotations


class DevError(Exception):
    """Something is missing, or did not start. The command line prints the message and exits 2."""
