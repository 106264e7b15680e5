"""The log of a process, on standard error: lines for people, or one JSON object a line for a log collector."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from shoal.runtime.about import fields

NOISY = ("kopf", "aiohttp.access")


class JsonLines(logging.Formatter):
    """One object a line, with the names that Cloud Logging and most collectors read without a rule."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start_log(level: str, style: str = "text") -> None:
    """Log from now on. `style`: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines()
        if style == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    if level != "DEBUG":
        for noisy in NOISY:
            logging.getLogger(noisy).setLevel(logging.ERROR)
