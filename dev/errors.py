"""What a developer can mend: one sentence that says what to do, and no traceback."""

from __future__ import annotations


class DevError(Exception):
    """Something is lacking, or did not start. The command line prints it and exits 2."""
