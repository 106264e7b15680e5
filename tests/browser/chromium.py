"""A headless Chromium over its DevTools protocol: open a page, evaluate, press keys, look. Needs only aiohttp."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dev.cluster.host import is_root

SLOW = 120.0


class Tab:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        """Errors of scripts and of the console, and requests that were refused."""
        self._snapshot: list[str] = []

    async def call(self, method: str, *, within: float = SLOW, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; events before its answer are looked through for problems."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(within):
            while True:
                message = json.loads((await self._socket.receive()).data)
                self._note(message)
                if message.get("id") == number:
                    assert "error" not in message, message
                    return dict(message["result"])

    async def evaluate(self, expression: str, within: float = SLOW) -> Any:
        """The value of a JavaScript expression, awaited, at most so many seconds."""
        answer = await self.call(
            "Runtime.evaluate", within=within, expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 1100) -> None:
        """Go to an address and wait until it is loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def until(self, expression: str) -> Any:
        """The first truthy value of an expression."""
        async with asyncio.timeout(SLOW):
            while not (value := await self.evaluate(expression)):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.05)
            return value

    async def press(self, key: str) -> None:
        """One key, such as Tab or Enter."""
        pressed: dict[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13}[key],
        }
        text: dict[str, Any] = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", **{"type": kind, **pressed, **text})

    async def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(answer["data"]))

    async def held(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of what scripts hold, by V8's kind (`object`, `closure`, …), after a garbage collection."""
        self._snapshot.clear()
        await self.call("HeapProfiler.takeHeapSnapshot", within=100.0)
        heap = json.loads("".join(self._snapshot))
        fields, kinds = heap["snapshot"]["meta"]["node_fields"], heap["snapshot"]["meta"]["node_types"][0]
        columns = [heap["nodes"][fields.index(each) :: len(fields)] for each in ("type", "self_size")]
        found = dict.fromkeys(kinds, (0, 0))
        for kind, size in zip(*columns, strict=True):
            number, total = found[kinds[kind]]
            found[kinds[kind]] = number + 1, total + size
        return found

    async def accessible(self) -> list[tuple[str, str]]:
        """(role, name) of everything that a screen reader sees."""
        tree = await self.call("Accessibility.getFullAXTree")
        return [
            (node.get("role", {}).get("value", ""), node.get("name", {}).get("value", ""))
            for node in tree["nodes"]
            if not node.get("ignored")
        ]

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "HeapProfiler.addHeapSnapshotChunk":
            self._snapshot.append(parameters["chunk"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])


def find() -> str | None:
    """The command of Chromium."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needs_chromium = pytest.mark.skipif(
    find() is None and not is_root(), reason="there is no Chromium, and only root can install it"
)
"""As root it is installed, so that a test without it fails."""


@contextmanager
def browser() -> Iterator[str]:
    """A browser with a profile of its own; yields the address of its DevTools."""
    command = find()
    assert command is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                command, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": profile},
        )  # fmt: skip
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            deadline = time.monotonic() + SLOW
            while not port_file.exists() or "\n" not in port_file.read_text():
                assert time.monotonic() < deadline, "Chromium does not start"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text().split()[0]}"
        finally:
            process.terminate()
            process.wait()


@asynccontextmanager
async def new_tab(devtools: str) -> AsyncIterator[Tab]:
    """A tab of this browser, closed at the end."""
    async with aiohttp.ClientSession(devtools) as session:
        async with session.put("/json/new?about:blank") as answer:
            page = await answer.json()
        async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            yield Tab(socket)
        async with session.get(f"/json/close/{page['id']}"):
            pass


@asynccontextmanager
async def chromium() -> AsyncIterator[Tab]:
    """The only tab of a browser."""
    with ExitStack() as stack:
        devtools = await asyncio.to_thread(stack.enter_context, browser())
        async with new_tab(devtools) as tab:
            yield tab
