"""The documentation site in a browser: its diagrams are drawn, and nothing is asked of another host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from dev.site import build
from tests.browser.chromium import chromium

pytestmark = pytest.mark.nightly


async def test_diagrams_are_drawn_without_another_host(tmp_path: Path) -> None:
    html = await asyncio.to_thread(build, tmp_path / "site")

    async def page(request: web.Request) -> web.FileResponse:
        path = html / request.match_info["path"]
        return web.FileResponse(path / "index.html" if path.is_dir() else path)

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with chromium() as tab:
            await tab.open(f"{host}/docs/architecture/")
            # A block of code has lines of text; a drawing is in a shadow tree.
            await tab.until("document.querySelector('div.mermaid')?.clientHeight > 100")
            asked = await tab.evaluate("performance.getEntriesByType('resource').map(each => each.name)")
            assert any(each.endswith("mermaid.min.js") for each in asked)
            assert [each for each in asked if not each.startswith((host, "data:", "blob:"))] == []
            assert tab.problems == []
    finally:
        await runner.cleanup()
