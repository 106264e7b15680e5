"""The page beside a job whose nodes are taken, in Chromium: what it shows, by keyboard and to a screen reader, live."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from dev.npm import AXE, fetched
from shoal.process.endpoints import serving
from tests.browser.chromium import Tab, browser, new_tab
from tests.browser.scene import POOLS, Scene


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.play()
    return scene


@pytest.fixture
async def address(scene: Scene) -> AsyncIterator[str]:
    async with serving(0, scene.page.answers) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def devtools() -> Iterator[str]:
    with browser() as devtools:
        yield devtools


@pytest.fixture
async def tab(devtools: str) -> AsyncIterator[Tab]:
    async with new_tab(devtools) as tab:
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
                  "Earlier plans", "on-demand nodes", "val_accuracy",
                  "Price per node-hour", "Used / free / limit", "3 / 1 / 8",
                  "in the currency of the pools’ prices"):  # fmt: skip
        assert words in text
    shown = scene.page.job("vision", "resnet50-imagenet")
    assert shown
    spans = shown["spans"]
    assert await tab.evaluate("document.querySelectorAll('#job svg rect title').length") >= len(spans)
    lost = [span for span in spans if span["end"] and span["cause"]]
    assert lost
    assert await tab.evaluate("document.querySelectorAll('#job svg text.end').length") == len(lost)
    fits = "[...document.querySelectorAll('.scroll')].every((each) => each.scrollWidth <= each.clientWidth)"
    assert await tab.evaluate(fits), "nothing is hidden at 1280 pixels"
    await tab.picture(Path(os.environ.get("SHOAL_PICTURES", tmp_path)) / "page.png")
    assert tab.problems == []


async def test_time_line_and_cards_of_a_job(tab: Tab, address: str, scene: Scene) -> None:
    """A colour for each pool; the expected end with its band, and the deadline; what became of the data; the cost."""
    await tab.open(f"{address}/#/vision/resnet50-imagenet")
    await tab.until("document.querySelectorAll('#job svg').length > 3")
    fills = await tab.evaluate("""[...document.querySelectorAll('#job svg rect')].map((each) => [
      /pool ([\\w-]+)/.exec(each.textContent)?.[1], getComputedStyle(each).fill]).filter(([pool]) => pool)""")
    assert {pool for pool, _ in fills} == set(POOLS)
    assert len({fill for _, fill in fills}) == len({(pool, fill) for pool, fill in fills}) == len(POOLS)
    band, now, deadline = [
        await tab.evaluate(f"document.querySelector('#job svg .{name}').getBBox().x")
        for name in ("band", "now", "deadline")
    ]
    assert now < band < deadline
    words = "[...document.querySelectorAll('#job .card')].map((each) => [...each.children].map((it) => it.innerText))"
    cards = {title: ". ".join(said) for title, *said in await tab.evaluate(words)}
    assert re.search(r"between .* and .*; 15 min 0 s before the deadline", cards["Expected end"]), cards
    assert re.search(
        r"of 1,281,167. whole run: .* repeated, .* partial, .* lost", cards["Data of this epoch"]
    )
    assert re.search(r"^0\.96. 1\.44 per hour now; on-demand nodes: 3\.36;", cards["Cost so far"]), cards
    assert "taken by the platform" in cards["Workers"]


async def test_metrics_over_time(tab: Tab, address: str, scene: Scene) -> None:
    """A curve of each, beside the losses; one that came later begins later."""
    await tab.open(f"{address}/#/vision/resnet50-imagenet")
    await tab.until("document.querySelectorAll('#job .curves svg').length === 5")
    titles = "[...document.querySelectorAll('#job .curves h3')].map((each) => each.textContent)"
    assert await tab.evaluate(titles) == [
        "Samples per second", "Loss", "Workers that run", "accuracy", "val_accuracy"
    ]  # fmt: skip
    points = "[...document.querySelectorAll('#job .curves polyline')].map((each) => each.points.length)"
    [*_, trained, evaluated] = await tab.evaluate(points)
    assert (trained, evaluated) == (240, 211), "the first five minutes lack one"
    words = "document.querySelector('#job .curves > :nth-child(4) svg').ariaLabel"
    before = await tab.evaluate(words)
    assert re.fullmatch(r"accuracy: now 0\.725, lowest 0\.0\d+, highest 0\.725, since .*", before), before
    scene.play(1)
    await tab.until(f"{words} !== {before!r}")


@pytest.mark.nightly
async def test_metrics_beyond_the_curves_are_told(
    tab: Tab, address: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight curves, however many metrics and however small or long their names."""
    many = {f"{'metric_' * 18}{number}"[-128:]: "1.5e-07" for number in range(10)}
    monkeypatch.setattr(scene, "metrics", lambda _: many)
    scene.play(1)
    await tab.open(f"{address}/#/vision/resnet50-imagenet")
    await tab.until("document.querySelectorAll('#job .curves svg').length === 3 + 8")
    assert "4 metrics more have no curve" in await tab.evaluate(TEXT)
    assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    texts = "[...document.querySelectorAll('#job .curves text')].every((each) => each.getBBox().x >= 0)"
    assert await tab.evaluate(texts)


async def test_it_is_live(tab: Tab, address: str, scene: Scene) -> None:
    await tab.open(f"{address}/#/vision/resnet50-imagenet")
    before = await tab.until("document.querySelectorAll('#job details tbody tr').length")
    scene.play(20)
    await tab.until(f"document.querySelectorAll('#job details tbody tr').length > {before}")
    assert await tab.evaluate("document.getElementById('live').textContent") == "live"


async def test_what_is_focused_and_opened_stays_so_while_the_page_is_live(
    tab: Tab, address: str, scene: Scene
) -> None:
    """The same elements, too: a screen reader says a new one again, every two seconds."""
    await tab.open(f"{address}/#/vision/resnet50-imagenet")
    await tab.until("document.querySelectorAll('#job details').length === 2")
    plans, pods = (f"document.querySelectorAll('#job details')[{index}]" for index in (0, 1))
    for opened, closed in ((pods, plans), (plans, pods)):
        await tab.evaluate(f"{closed}.open = false, {opened}.open = true")
        await tab.evaluate(f"window.before = {opened}.querySelector('summary'), before.focus()")
        steps = await tab.evaluate("document.querySelector('#job .cards').textContent")
        scene.play(1)
        await tab.until(f"document.querySelector('#job .cards').textContent !== {steps!r}")
        assert await tab.evaluate(f"[{opened}.open, {closed}.open]") == [True, False]
        assert await tab.evaluate("document.activeElement === before && before.isConnected")
        assert "vision/resnet50-imagenet" in await tab.evaluate(
            "document.activeElement.closest('#job').innerText"
        )


@pytest.mark.nightly
async def test_a_link_in_the_list_stays_focused_when_rows_come_and_go(
    tab: Tab, address: str, scene: Scene
) -> None:
    await tab.open(address)
    rows = "document.querySelectorAll('#job-table tbody tr').length"
    await tab.until(f"{rows} === 5")
    await tab.evaluate("document.querySelector('#job-table a[href*=resnet]').focus()")
    for others in (9, 2):
        scene._others = others
        scene.play(1)
        await tab.until(f"{rows} === {others + 1}")
        assert await tab.evaluate("document.activeElement.textContent") == "vision/resnet50-imagenet"
        order = "[...document.querySelectorAll('#job-table tbody a')].map((each) => each.textContent)"
        shown = [f"{each['namespace']}/{each['name']}" for each in scene.page.overview()["jobs"]]
        assert await tab.evaluate(order) == shown


async def test_a_page_that_is_turned_away_comes_back(
    tab: Tab, address: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EventSource gives up for good where the answer is no stream."""
    monkeypatch.setattr("shoal.page.server.STREAMS", 0)
    await tab.open(address)
    await tab.until("document.getElementById('live').textContent.includes('Trying again')")
    monkeypatch.setattr("shoal.page.server.STREAMS", 100)
    await tab.until("document.querySelectorAll('#job-table tbody tr').length === 5")
    assert await tab.evaluate("document.getElementById('live').textContent") == "live"


async def test_silence_is_told(tab: Tab, address: str) -> None:
    """A stream that stands open says nothing where the operator's page has ended, or a proxy holds it."""
    await tab.open(address)
    await tab.until("document.getElementById('live').textContent === 'live'")
    await tab.evaluate("""{ window.said = []; const live = document.getElementById('live'), real = Date.now;
      new MutationObserver(() => said.push(live.textContent)).observe(live, {childList: true});
      Date.now = () => real() + 90000; }""")
    assert "nothing heard for 1 min" in await tab.until("window.said[0]")
    await tab.until("window.said[1] === 'live'")  # by another stream


async def test_a_bookmark_of_a_job(tab: Tab, address: str) -> None:
    """Its title is the job's, and no job is said to be missing before anybody has answered."""
    watch = """new MutationObserver(() => { window.said = (window.said ?? '') +
      document.getElementById('job')?.innerText; })
      .observe(document, {childList: true, subtree: true, characterData: true});"""
    await tab.call("Page.addScriptToEvaluateOnNewDocument", source=watch)
    await tab.open(f"{address}/#/vision/resnet50-imagenet")
    await tab.until("document.querySelectorAll('#job svg').length > 3")
    assert await tab.evaluate("document.title") == "vision/resnet50-imagenet – Shoal"
    assert "There is no such job" not in await tab.evaluate("window.said")
    await tab.evaluate("location.hash = '#/team/nowhere'")
    await tab.until("document.getElementById('job').innerText.includes('There is no such job')")


@pytest.mark.nightly
async def test_an_address_that_is_none_shows_the_list(tab: Tab, address: str) -> None:
    await tab.open(f"{address}/#/%/x")
    await tab.until("document.querySelectorAll('#job-table tbody tr').length === 5")
    assert tab.problems == []


async def test_a_page_behind_a_path_is_live(tab: Tab, scene: Scene) -> None:
    """As an Ingress and `kubectl proxy` have it, which make no other path of what a script asks for."""
    below = "/services/shoal-metrics:page/proxy"
    async with serving(0, {below + path: answer for path, answer in scene.page.answers.items()}) as port:
        await tab.open(f"http://127.0.0.1:{port}{below}/#/vision/resnet50-imagenet")
        await tab.until("document.getElementById('live').textContent === 'live'")
        await tab.until("document.querySelectorAll('#job rect').length > 10")
        assert tab.problems == []


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


@pytest.mark.by_day(1)
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


@pytest.mark.by_day(1)
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
async def test_ten_minutes_of_a_page_leave_nothing_behind(
    tab: Tab, address: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drawn stays as large: the curves have got sparse at their 100 points. Compiled code is left out, which
    grows until what is called often is optimized; not a thing that scripts make may be left for each update."""
    monkeypatch.setattr("shoal.page.memory.SAMPLES", 100)
    await tab.open(f"{address}/#/vision/resnet50-imagenet")
    await tab.until("document.querySelectorAll('#job svg').length > 3")
    await tab.call("Performance.enable")
    made = {
        "object",
        "closure",
        "array",
        "string",
        "concatenated string",
        "sliced string",
        "number",
        "regexp",
    }

    async def held(updates: int) -> dict[str, float]:
        for _ in range(updates):
            await tab.evaluate("""window.drawn = new Promise((done) => new MutationObserver((_, watch) => {
              watch.disconnect(); done(); }).observe(document.getElementById('job'), {
              childList: true, subtree: true, attributes: true, characterData: true })), 0""")
            scene.now += timedelta(seconds=2)
            scene.page.look()
            await tab.evaluate("window.drawn.then(() => 0)")
        heap = await tab.held()
        told = await tab.call("Performance.getMetrics")
        counted = {each["name"]: each["value"] for each in told["metrics"]}
        return {
            "listeners": counted["JSEventListeners"],
            "nodes": counted["Nodes"],
            "made": sum(heap[kind][0] for kind in made),
            "bytes": sum(heap[kind][1] for kind in made),
        }

    first, last = await held(100), await held(300)
    assert last["listeners"] == first["listeners"]
    assert last["nodes"] < first["nodes"] + 100
    assert last["made"] < first["made"] + 100
    assert last["bytes"] < 1.05 * first["bytes"]
