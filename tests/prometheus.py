"""A real Prometheus with the chart's alerts, and the queries of its dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from dev.paths import ROOT
from dev.tools.prometheus import prometheus_command
from tests.control_plane.operators import eventually, fixed_ports

FILES = ROOT / "charts" / "shoal" / "files"
DASHBOARD = json.loads((FILES / "dashboard.json").read_text(encoding="utf-8"))
QUERIES = [
    (panel["title"], re.sub(r"\$\w+", ".*", target["expr"]))
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]


class Prometheus:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def get(self, path: str, **query: str) -> Any:
        async with self._session.get(f"{self._url}/api/v1/{path}", params=query) as answer:
            found = await answer.json()
            assert found["status"] == "success", (query, found)
            return found["data"]

    async def query(self, expression: str) -> list[Any]:
        return list((await self.get("query", query=expression))["result"])


@contextlib.asynccontextmanager
async def prometheus(folder: Path, scraped: Sequence[dict[str, Any]]) -> AsyncIterator[Prometheus]:
    """A server that scrapes and evaluates the alerts each second. `scraped`: its `scrape_configs`."""
    (folder / "alerts.yaml").write_text((FILES / "alerts.yaml").read_text(encoding="utf-8"))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": list(scraped),
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    [port] = fixed_ports(1)
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(prometheus_command("prometheus")),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}"

            async def ready() -> bool:
                assert process.returncode is None, (folder / "log").read_text()
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/-/ready") as answer:
                        return answer.status == 200
                return False

            await eventually(ready, what="Prometheus")
            yield Prometheus(session, url)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def reads(server: Prometheus, query: str) -> Callable[[], Any]:
    """What `eventually` asks until there is an answer."""
    return lambda: server.query(query)
