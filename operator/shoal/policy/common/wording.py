"""Text for events, conditions and failures."""

from __future__ import annotations

import re

from shoal_trainer.contract import plain


def role_word(role: str) -> str:
    """The name of a role for people."""
    return "parameter server" if role == "ps" else "worker"


def conclusion(text: str) -> str:
    """The last line with text: where a log ends in a traceback, the error itself."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def short(text: str, limit: int = 1000) -> str:
    """Text cut to fit into a status, before a word. The end is kept: that is where a traceback has its error.

    Without control characters, which pods may say: an administrator reads it in a terminal.
    """
    text = plain(text).strip()
    return text if len(text) <= limit else "…" + re.sub(r"^\S{1,60}\s+", "", text[-(limit - 1) :])
