"""The page beside a job whose nodes are taken, in Chromium: what it shows, by keyboard and to a screen reader, live."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dev.npm import AXE, fetched
from shoal.process.endpoints import serve
from tests.browser.chromium import Tab, chromium
from tests.browser.scene import Scene


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.play()
    return scene


@pytest.fixture
async def address(scene: Scene) -> AsyncIterator[str]:
    runner = await serve(0, scene.page.answers)
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
async def tab() -> AsyncIterator[Tab]:
    async with chromium() as tab:
        yield tab


CONTRAST = Path(__file__).with_name("contrast.js")
TEXT = "document.body.innerText"


async def test_the_list_and_one_job(tab: Tab, address: str, scene: Scene, tmp_path: Path) -> None:
    await tab.open(address)
    await tab.until("document.querySelectorAll('#job-table tbody tr').length === 5")
    assert await tab.evaluate("document.querySelectorAll('#pool-table tbody tr').length") == 4
    await tab.evaluate("document.querySelector('#job-table a[href*=resnet]').click()")
    await tab.until("document.querySelectorAll('#job rect').length > 10")
    text = await tab.evaluate(TEXT)
    for words in ("vision/resnet50-imagenet", "samples/s", "Expected end", "l4-spot-a was interrupted three "
                                                                           "times in 20 minutes",
                  "Earlier plans", "on-demand nodes"):  # fmt: skip
        assert words in text
    shown = scene.page.job("vision", "resnet50-imagenet")
    assert shown
    spans = shown["spans"]
    assert await tab.evaluate("document.querySelectorAll('#job svg rect title').length") >= len(spans)
    lost = [span for span in spans if span["end"] and span["cause"]]
    assert lost
    assert await tab.evaluate("document.querySelectorAll('#job svg text.end').length") == len(lost)
    await tab.picture(Path(os.environ.get("SHOAL_PICTURES", tmp_path)) / "page.png")
    assert tab.problems == []


async def test_it_is_live(tab: Tab, address: str, scene: Scene) -> None:
    await tab.open(f"{address}/#/vision/resnet50-imagenet")
    before = await tab.until("document.querySelectorAll('#job details tbody tr').length")
    scene.play(20)
    await tab.until(f"document.querySelectorAll('#job details tbody tr').length > {before}")
    assert await tab.evaluate("document.getElementById('live').textContent") == "live"


async def test_keyboard_and_screen_reader(tab: Tab, address: str) -> None:
    await tab.open(address)
    await tab.until("document.querySelectorAll('#job-table tbody tr').length")
    focused = "document.activeElement.id || document.activeElement.textContent"
    seen = []
    for _ in range(6):
        await tab.press("Tab")
        seen.append(await tab.evaluate(focused))
    assert seen[0] == "Skip to the jobs"
    assert "filter" in seen
    assert any(each.startswith("Failed ") for each in seen), "then the phases"
    while not (await tab.evaluate(focused)).startswith("vision/resnet50"):
        await tab.press("Tab")
    await tab.press("Enter")
    await tab.until("document.activeElement.id === 'job-name'")
    await tab.until("document.querySelectorAll('#job svg').length > 3")
    known = await tab.accessible()
    images = [name for role, name in known if role in {"image", "img"}]
    assert any(name.startswith("Time line of 7 slots") and "taken or failed" in name for name in images)
    assert any(name.startswith("Samples per second: now") for name in images)
    assert all(images), "every drawing has words"
    headings = [name for role, name in known if role == "heading"]
    assert "Capacity pools" in headings
    assert all(name for role, name in known if role in {"link", "searchbox", "progressIndicator"})


@pytest.mark.parametrize("dark", [False, True])
async def test_contrast_of_all_text(tab: Tab, address: str, dark: bool, tmp_path: Path) -> None:
    """WCAG AA: 4.5 : 1 for text, computed from what the browser computed."""
    await tab.open(f"{address}/#/vision/resnet50-imagenet", dark=dark)
    await tab.until("document.querySelectorAll('#job svg').length > 3")
    poor = await tab.evaluate(CONTRAST.read_text())
    await tab.picture(
        Path(os.environ.get("SHOAL_PICTURES", tmp_path)) / f"page-{'dark' if dark else 'light'}.png"
    )
    assert poor == []


AXE_RUN = """axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map(
  each => each.id + ': ' + each.help + ': ' + each.nodes.map(node => node.html).slice(0, 3).join(' ')))"""


@pytest.mark.parametrize(
    ("dark", "others"), [(False, 4), (True, 4), pytest.param(False, 499, marks=pytest.mark.nightly)]
)
async def test_axe_finds_nothing(tab: Tab, address: str, scene: Scene, dark: bool, others: int) -> None:
    """All rules of axe-core, best practices included, on the list and on a job."""
    scene._others = others
    axe = fetched(AXE).read_text(encoding="utf-8")
    places = (
        ("", f"document.querySelectorAll('#job-table tbody tr').length === {others + 1}"),
        ("#/vision/resnet50-imagenet", "document.querySelectorAll('#job svg').length > 3"),
    )
    for place, ready in places[: 1 if others > 4 else 2]:
        await tab.open(f"{address}/{place}", dark=dark)
        await tab.until(ready)
        await tab.evaluate(axe)
        assert await tab.evaluate(AXE_RUN, within=100.0) == [], place
    if others > 4:
        return
    await tab.evaluate("document.documentElement.removeAttribute('lang')")
    [found] = await tab.evaluate(AXE_RUN)
    assert found.startswith("html-has-lang"), "it would find something"


async def test_500_jobs_stay_usable(tab: Tab, address: str, scene: Scene) -> None:
    scene._others = 499
    await tab.open(address)
    await tab.until("document.querySelectorAll('#job-table tbody tr').length === 500")
    milliseconds = await tab.evaluate("""(() => {
      const filter = document.getElementById('filter'), start = performance.now();
      filter.value = 'resnet'; filter.dispatchEvent(new Event('input'));
      return performance.now() - start;
    })()""")
    assert await tab.evaluate("document.querySelectorAll('#job-table tbody tr').length") == 1
    assert await tab.evaluate("document.getElementById('jobs-title').textContent") == "Jobs (1 of 500)"
    assert milliseconds < 500


async def test_500_jobs_by_phase_and_in_order(tab: Tab, address: str, scene: Scene) -> None:
    scene._others = 499
    await tab.open(address)
    rows = "document.querySelectorAll('#job-table tbody tr')"
    await tab.until(f"{rows}.length === 500")
    await tab.evaluate("document.querySelector('[data-phase=Failed]').click()")
    assert await tab.evaluate("document.querySelector('[data-phase=Failed]').textContent") == "Failed 125"
    assert await tab.evaluate(f"{rows}.length") == 125
    assert await tab.evaluate("document.querySelector('[data-phase=Failed]').ariaPressed") == "true"
    await tab.evaluate("document.querySelector('[data-phase=Failed]').click()")
    assert await tab.evaluate(f"{rows}.length") == 500
    speed = "document.querySelector('th[data-by=samplesPerSecond]')"
    await tab.evaluate(f"{speed}.querySelector('button').click()")
    first = f"{rows}[0].querySelector('a').textContent"
    assert await tab.evaluate(first) == "vision/resnet50-imagenet", "the only one with a speed"
    assert await tab.evaluate(f"{speed}.ariaSort") == "descending"
    name = "document.querySelector('th[data-by=name] button')"
    await tab.evaluate(f"{name}.click()")
    assert await tab.evaluate(first) == "team/digits-000"
    await tab.evaluate(f"{name}.click()")
    assert await tab.evaluate(first) == "vision/resnet50-imagenet"
    scene.play(1)  # what is sorted stays so when the operator sends what is new
    await tab.until("document.getElementById('live').textContent === 'live'")
    assert await tab.evaluate(first) == "vision/resnet50-imagenet"
