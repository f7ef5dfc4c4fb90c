"""The dashboard in a browser: it loads, asks for the key, updates, and logs nothing to the console.

Skipped without Chromium or Chrome.
"""

import contextlib
import shutil

import pytest

from tests.dsv3.server.conftest import KEY

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason=f"needs one of {', '.join(BROWSERS)}")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def shown(browser, url: str, **context):
    """The page, and its problems: errors, messages on the console, requests to other servers."""
    page = browser.new_page(**context)
    page.set_default_timeout(WAIT_MS)
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("request", lambda request: request.url.startswith(url) or page.complaints.append(request.url))
    page.goto(f"{url}/dashboard")
    try:
        yield page
    finally:
        page.close()


def tile(page, title: str) -> str:
    return page.locator(".tile", has_text=title).locator(".value").inner_text()


def work(server, tokens: int, **headers) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": tokens}
    server.http.post("/v1/completions", json=body, headers=headers).raise_for_status()


def test_the_page_draws_and_updates(browser, server) -> None:
    with shown(browser, server.url) as page:
        page.get_by_text("serving").wait_for()
        assert page.locator("h1").inner_text() == "tiny"
        assert page.locator("#gate").is_hidden()
        assert "no drafts; --speculative_config" in page.locator(".card", has_text="Speculation").inner_text()
        assert "--enable_expert_parallel" in page.locator(".card", has_text="Load of experts").inner_text()

        def has_worked() -> bool:
            work(server, 400)
            page.wait_for_timeout(300)
            return tile(page, "Tokens written").split()[0] not in ("0", "–")

        server.wait_for(has_worked)
        server.wait_for(lambda: has_worked() and page.locator("svg rect title", has_text="wait").count() > 0)
        line = page.locator(".card", has_text="Tokens per second").locator("path.s.c1").first
        before = line.get_attribute("d")
        server.wait_for(lambda: has_worked() and line.get_attribute("d") != before)
        page.get_by_text("10 min", exact=True).click()
        assert "10 min ago" in page.locator(".card", has_text="Tokens per second").inner_text()
        assert page.complaints == []


def test_the_page_asks_for_the_key_once(browser, locked_server) -> None:
    with shown(browser, locked_server.url) as page:
        page.locator("#key").wait_for()
        assert page.locator("#board").is_hidden()
        assert page.locator("#status").inner_text() == "needs a key"
        page.fill("#key", "wrong")
        page.get_by_role("button", name="Show").click()
        page.get_by_text("does not know this key").wait_for()
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.get_by_text("Tokens written").wait_for()
        page.reload()  # the tab knows it now
        page.get_by_text("Tokens written").wait_for()
        assert page.locator("#gate").is_hidden()
        assert page.evaluate("localStorage.length") == 0 and KEY not in page.content()
        assert all("401" in complaint for complaint in page.complaints)  # the browser notes refusals by itself


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_a_phone_in_light_and_dark(browser, server, theme) -> None:
    with shown(browser, server.url, viewport={"width": 360, "height": 740}, color_scheme=theme) as page:
        page.get_by_text("Tokens written").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        tiles = page.evaluate("[...document.querySelectorAll('.tile')].map(tile => tile.getBoundingClientRect().right)")
        assert tiles[-1] == max(tiles)  # no hole behind the last one
        lines = page.evaluate("[...document.querySelectorAll('.flag')].map(flag => flag.getClientRects().length)")
        assert set(lines) == {1}
        assert page.locator(".flag", has_text="--speculative_config").count() == 1
        red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(red, green, blue) < 60) == (theme == "dark")
        page.get_by_text("theme: system").click()  # light, whatever the system has
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert page.complaints == []


def test_texts_of_the_server_are_escaped(browser, server) -> None:
    """A model name that looks like HTML is shown as text, and its script does not run."""
    name = "<img src=x onerror=alert(1)>"
    with shown(browser, server.url) as page:
        page.get_by_text("Tokens written").wait_for()
        page.evaluate("name => { update({ ...state.data, model: name }); drawAll(true); }", name)
        assert page.locator("h1").inner_text() == name
        slow = {"id": name, "trace_id": name, "first_token_s": 1, "trace_url": 'http://viewer/?"><script>'}
        draw = "slow => { state.data.slow_requests = slow; const p = make('p', {}, ...slowFacts()[0]);"
        p = page.evaluate_handle(f"{draw} document.body.append(p); return p; }}", [slow]).as_element()
        assert p.inner_text() == f"1 s: {name}, trace{name}"
        link = page.get_by_role("link")
        assert link.get_attribute("href") == slow["trace_url"] and link.get_attribute("rel") == "noopener noreferrer"
        assert page.complaints == []


def test_a_step_with_two_launches_ends_at_its_last_wait(browser, server) -> None:
    """The devices are busy from the first launch to the end of the last wait."""
    parts = [["launch", 1e6], ["wait", 2e6], ["launch", 3e6], ["wait", 4e6], ["collect", 5e6]]
    with shown(browser, server.url) as page:
        ends = page.evaluate("step => [launchOf(step), waitOf(step)]", {"began": 10, "parts": parts})
        assert ends == [11, 14]
        assert page.evaluate("step => waitOf(step)", {"began": 10, "parts": parts[:1]}) is None


def test_expert_moves_are_shown_as_heat_maps(browser, server) -> None:
    """Shows an instance with expert parallelism; a page that has a version gets numbers only."""
    experts = {"version": 3, "layers": 2, "experts": 4, "devices": 2, "experts_moved": 5, "experts_balancedness": 0.9}
    rows = {"load": [[400, 0, 0, 0], [0, 200, 200, 0]], "device_load": [[100, 100], [100, 100]]}
    rows |= {"before": [[200, 0], [100, 100]], "after": [[100, 100], [100, 100]]}
    with shown(browser, server.url) as page:
        page.get_by_text("Tokens written").wait_for()
        page.evaluate("e => drawAll(update({ ...state.data, experts: e }))", experts | rows)
        card = page.locator(".card", has_text="Load of experts")
        assert "devices before the last move, busiest 200 %" in card.inner_text()
        assert "experts now, busiest 400 %" in card.inner_text() and "5 replicas moved" in card.inner_text()
        colors = "c => [...c.getContext('2d').getImageData(0, 0, 2, 2).data]"
        pixels = card.locator("canvas").first.evaluate(colors)
        assert pixels[:4] == [255, 234, 70, 255] and pixels[4:8] == [0, 32, 77, 255]
        assert pixels[8:12] == pixels[12:16]
        redraws = page.evaluate("e => update({ ...state.data, experts: e })", {"version": 3, "experts_moved": 6})
        assert redraws is False and page.evaluate("state.experts.moved") == 6
        assert page.complaints == []


def test_the_page_shows_that_the_server_has_gone(browser, server) -> None:
    with shown(browser, server.url) as page:
        page.get_by_text("Tokens written").wait_for()
        page.context.set_offline(True)
        page.get_by_text("the data are old").wait_for()
        assert "old" in page.locator("#board").get_attribute("class")
        page.context.set_offline(False)
        page.locator("#notice").wait_for(state="hidden")
