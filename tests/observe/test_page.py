"""The page in a real browser: panels, problems, restarts, hostile names, sizes, colours."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.observe.fleet import Fleet, past
from tests.support.browser import SLOW_S, Browser, needs_browser
from tests.support.observe_process import ObserveProcess
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess, fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

pytestmark = needs_browser

HOSTILE = (
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"' onmouseover=alert(1) x=",
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{ZERO WIDTH SPACE}" + "W" * 100,
    "__proto__",
)
PANELS = [
    "Hit rate",
    "Lookup tokens per second",
    "L1",
    "Evictions from L1 per second",
    "Hit rate with more memory",
    "Idle time of evicted objects",
    "Reasons of missed lookups",
    "Tiers",
    "By model",
    "By tenant",
    "By engine",
    "Hot prefixes",
    "Instances",
]
SEEN = "[...document.querySelectorAll('section:not([hidden]) > h2')].map((each) => each.textContent)"
# How many stretches the chart of the hit rate shows of L1.
DRAWN = "document.querySelector('#hit-rate path.l1').getAttribute('d').split('Z').length - 1"
# What reaches beyond the page, or is cut off by what holds it.
TOO_WIDE = """[...document.querySelectorAll("body *")].filter((each) =>
    !each.closest(".unseen") && (each.getBoundingClientRect().right > innerWidth + 0.5
    || each.getBoundingClientRect().left < -0.5
    || (each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== "visible"
      && !each.closest("svg")))
).map((each) => each.outerHTML.slice(0, 200)).slice(0, 3)"""
# The contrast of text to what is behind it: WCAG's ratio, the least one.
LEAST_CONTRAST = """(() => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (each) => {
    const colour = getComputedStyle(each).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? ground(each.parentElement) : colour;
  };
  return Math.min(...[...document.querySelectorAll("h1, h2, h3, p, a, b, th, td, span, small, strong, summary, button")]
    .filter((each) => each.offsetParent && each.textContent.trim()).map((each) => {
      const [one, other] = [light(getComputedStyle(each).color), light(ground(each))].sort((a, b) => b - a);
      return (one + 0.05) / (other + 0.05);
    }));
})()"""


running = fixture_of(Browser, scope="module")


@pytest.fixture
def browser(running: Browser) -> Iterator[Browser]:
    """A browser whose pages say nothing to their console."""
    running.shape(1280)
    running.said.clear()
    yield running
    assert running.said == []
    running.open("about:blank")


fleet = fixture_of(Fleet, scope="module")


def see(browser: Browser, url: str) -> None:
    browser.open(url)
    wait_until(lambda: "Instances" in browser.value(SEEN), SLOW_S, "the page")


def test_every_panel_shows_what_the_server_says(browser: Browser, fleet: Fleet) -> None:
    see(browser, fleet.url)
    assert browser.value(SEEN) == ["1 problem", *PANELS]
    assert browser.text("#tiles").startswith("Hit rate\n6")
    assert re.search(r"\+\d+\sGiB would have raised the hit rate by [\d.]+\s%", browser.text("#capacity"))
    assert "Half of the evicted objects were idle for less than 7" in browser.text("#ages")
    tiers = browser.text("#tiers")
    assert re.search(r"filesystem\s+works\s+3\.10\sms, 14\.2\sms", tiers.replace("\N{BLACK CIRCLE}", ""))
    assert "down for reads and writes" in tiers
    assert "assistant" in browser.text("#tenants")
    assert "never stored\t8,120" in browser.text("#misses")
    assert "5c2e9a04\tQwen3-32B\t9,520 to 9,600\t" in browser.text("#prefixes").replace("\n", "")


def test_a_problem_leads_to_what_to_do(browser: Browser, fleet: Fleet) -> None:
    see(browser, fleet.url)
    assert browser.value("document.querySelector('#said[role=status]').textContent") == "1 problem"
    (link,) = browser.value("[...document.querySelectorAll('#problems a')].map((each) => each.href)")
    assert re.fullmatch(r"https://\S+/docs/operations\.md#tier-down", link)


def test_a_chart_has_its_numbers_and_a_name(browser: Browser, fleet: Fleet) -> None:
    see(browser, fleet.url)
    charts = browser.value("""[...document.querySelectorAll(".drawing")].map((each) => ({
        name: each.querySelector("svg").getAttribute("aria-label"),
        rows: each.parentElement.querySelectorAll("details tbody tr").length}))""")
    assert len(charts) == 6
    assert all(chart["name"] and 1 < chart["rows"] <= 40 for chart in charts), charts
    browser.value("document.querySelector('#hit-rate summary').focus()")
    browser.value("document.querySelector('#hit-rate details').open = true")
    drawn = browser.value("performance.now()")
    asked = (
        "performance.getEntriesByName(new URL('status', location).href).filter((each) => each.startTime > {}).length"
    )
    wait_until(lambda: browser.value(asked.format(drawn)) > 1, SLOW_S, "two more answers")
    # What is open stays open, and the keyboard stays where it is.
    assert browser.value("document.activeElement.textContent") == "Table: Hit rate by tier, newest first"
    assert "L1" in browser.text("#hit-rate table")


def test_the_range_and_the_pointer(browser: Browser, fleet: Fleet) -> None:
    see(browser, fleet.url)
    quarter = browser.value("document.querySelector('#tokens path').getAttribute('d')")
    browser.value("document.querySelector('button[value=day]').click()")
    assert browser.value("document.querySelector('button[value=day]').ariaPressed") == "true"
    assert browser.value("document.querySelector('#tokens path').getAttribute('d')") != quarter
    before = browser.text("#tokens .when")
    browser.value("""(() => {
        const box = document.querySelector("#hit-rate .drawing").getBoundingClientRect();
        const at = { bubbles: true, clientX: box.left + box.width * 0.7, clientY: box.top + 40 };
        document.querySelector("#hit-rate .drawing").dispatchEvent(new PointerEvent("pointermove", at));
    })()""")
    assert browser.text("#tokens .when") != before


def test_nothing_is_cut_off_and_all_is_legible(browser: Browser, fleet: Fleet) -> None:
    see(browser, fleet.url)
    browser.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    for width, dark in itertools.product((320, 360, 700, 961, 1280), (False, True)):
        browser.shape(width, dark=dark)
        drawn = f"innerWidth === {width} && document.querySelector('#tokens svg').clientWidth > 0"
        wait_until(lambda drawn=drawn: browser.value(drawn), SLOW_S, "the size")  # type: ignore[misc]
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value(TOO_WIDE) == [], (width, dark)
        ground = browser.value("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", ground))) < 60) == dark
        assert browser.value(LEAST_CONTRAST) >= 4.5, (width, dark)


@pytest.mark.parametrize("width", [360, 1280])
def test_names_from_clients_are_text(browser: Browser, width: int) -> None:
    def status(age: float) -> dict[str, Any]:
        made = past(age, models=HOSTILE, down=False)
        row = {**made["use"]["tenants"]["search"], "bytes": 2**30}
        made["use"] = {kind: dict.fromkeys(HOSTILE, row) for kind in ("models", "tenants", "engines")}
        hot = {"hit_tokens": 5, "count": 3, "error": 0}
        made["use"]["hot_prefixes"] = [{"model": name, "prefix": name, **hot} for name in HOSTILE]
        made["instances"][0]["lost"] = HOSTILE[0]
        made["l2"][0].update(name=HOSTILE[1], state="open", last_error=HOSTILE[0] * 9)
        made["lookups"]["misses"] = dict.fromkeys(HOSTILE, 1)
        made["l1"]["evicted"] = dict.fromkeys(HOSTILE, 1)
        made["problems"] = [{"where": where, "fact": HOSTILE[1]} for where in (*HOSTILE, "l2.0")]
        made["server"]["endpoint"] = HOSTILE[3]
        return made

    browser.shape(width)
    with Fleet(status, span=30) as hostile:
        see(browser, hostile.url)
        text = browser.value("document.body.textContent")
        assert all(text.count(name) >= 4 for name in HOSTILE)
        assert browser.value("document.querySelectorAll('main script, main img, [onerror], [onmouseover]').length") == 0
        assert browser.value("document.title").endswith("kvframework")
        links = browser.value("[...document.querySelectorAll('#problems a')].map((each) => each.hash)")
        assert links == ["#what-do-you-see"] * len(HOSTILE) + ["#tier-down"]
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value(TOO_WIDE) == []


def test_what_a_server_does_not_say_has_no_panel(browser: Browser) -> None:
    """As a server of another release may not."""

    def status(age: float) -> dict[str, Any]:
        made = past(age)
        for name in ("use", "problems", "transports", "messaging"):
            del made[name]
        for name in ("more_capacity", "evicted_idle_s", "evicted"):
            del made["l1"][name]
        del made["lookups"]["misses"]
        return {**made, "l2": []}

    with Fleet(status, span=30) as old:
        see(browser, old.url)
        assert browser.value(SEEN) == [*PANELS[:4], "Instances"]
        assert "undefined" not in browser.text()
        assert "NaN" not in browser.text()


def test_a_page_with_no_point_yet(browser: Browser) -> None:
    with ObserveProcess("ipc:///nowhere/s.sock") as observe:
        browser.open(observe.url)
        wait_until(lambda: "does not answer" in browser.text("#notice"), SLOW_S, "what is wrong")
        assert "before this page was opened" in browser.text("#notice")
        assert browser.value(SEEN) == []


def test_a_hit_rate_a_dead_tier_and_a_restart(browser: Browser) -> None:
    """A server with load: what the page shows of it, of its fault, its absence and its next start."""
    tier = ("l2.0.use=redis", f"l2.0.url=redis://127.0.0.1:{free_port()}/0", "l2.0.timeout_s=0.5")
    model = HOSTILE[0]

    def load(server: ServerProcess, tokens: int) -> None:
        with WireClient(server.endpoint, timeout=SLOW_S) as client:
            registered = client.register(model_name=model)
            key = key_for(registered, range(tokens), model_name=model)
            client.store(key, b"a")
            for _ in range(3):
                assert client.lookup(key).hit_tokens == tokens

    with ServerProcess(*tier) as server, ObserveProcess(server.endpoint) as observe:
        browser.open(observe.url)
        wait_until(lambda: "Hit rate" in browser.value(SEEN), SLOW_S, "the page")
        load(server, 512)
        wait_until(lambda: "1,536 since the start" in browser.text("#tiles"), SLOW_S, "the tokens that were found")
        assert "100.0\N{NO-BREAK SPACE}% since the start" in browser.text("#tiles")
        wait_until(lambda: browser.value(DRAWN) >= 1, SLOW_S, "the chart")
        wait_until(lambda: "redis is down" in browser.text("#problems"), SLOW_S, "the problem")
        assert "down for" in browser.text("#tiers")
        server.kill9()
        wait_until(lambda: "The server does not answer since" in browser.text("#notice"), SLOW_S, "the absence")
        assert browser.value("document.title").startswith("away")
        server.start()
        wait_until(lambda: browser.text("#notice") == "", SLOW_S, "the answer")
        load(server, 768)
        restarts = "document.querySelectorAll('#hit-rate .restart').length"
        wait_until(lambda: browser.value(restarts) == 1, SLOW_S, "the mark of the restart")
        wait_until(lambda: "2,304 since the start" in browser.text("#tiles"), SLOW_S, "what the new server found")
        assert browser.value(DRAWN) >= 1  # of before the restart, and of after it, which may be one
        observe.process.terminate()
        observe.process.wait(SLOW_S)
        wait_until(lambda: "kvframework observe does not answer since" in browser.text("#notice"), SLOW_S, "its end")


def test_a_page_that_is_not_seen_asks_nothing(browser: Browser, fleet: Fleet) -> None:
    see(browser, fleet.url)
    # The page's next turn is made here instead of by the clock.
    browser.value("window.setTimeout = (turn) => { window.turn = turn; return 0; }; void 0")
    wait_until(lambda: browser.value("Boolean(window.turn)"), SLOW_S, "the next turn")
    browser.value("Object.defineProperty(document, 'hidden', { get: () => window.unseen }); void 0")
    browser.value("window.asked = 0; window.real = fetch; void 0")
    browser.value("window.fetch = (...all) => { window.asked += 1; return window.real(...all); }; void 0")
    assert browser.value("window.unseen = true, turn(), window.asked") == 0
    seen = "document.dispatchEvent(new Event('visibilitychange'))"
    assert browser.value(f"window.unseen = false, {seen}, window.asked") == 1
    wait_until(lambda: browser.value("window.asked") == 2, SLOW_S, "the status")


def test_history_is_bounded_in_the_page(browser: Browser, fleet: Fleet) -> None:
    see(browser, fleet.url)
    kept = browser.value("""import("./points.js").then(({ Points }) => {
        const points = new Points();
        const fields = ["time", "boot", "tiers"];
        for (let time = 0; time < 200000; time += 500) {
            const seconds = Array.from({ length: 500 }, (_, at) => [time + at, 1, []]);
            points.take({ fields, tier_fields: [], seconds, minutes: seconds.filter(([at]) => at % 20 === 0) });
        }
        return [points.seconds.length, points.minutes.length, points.minutes.at(-1).time];
    })""")
    assert kept == [900, 1440, 199980]
