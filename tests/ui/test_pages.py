"""The dashboard in a browser: every page, sign-in, changes with their effect named first, and restarts."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from kvferry.core.keys import tenant_digest
from tests.harness.loop_service import ADMIN, READ
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.ui.conftest import WAIT_MS, prompt

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.long

PAGES = {
    "overview": "Overview",
    "overview?window=hour": "Overview",
    "overview?window=day": "Overview",
    "requests": "Requests",
    "requests/chat-11": "chat-11",
    "requests/chat-10": "chat-10",
    "requests/batch%2F%3Cb%3E1%3C%2Fb%3E": "batch/<b>1</b>",
    f"requests/{'unknown' * 60}": "unknown" * 60,
    "sessions": "Sessions",
    "config": "Configuration",
    "evictions": "Evictions",
    "policies": "Policies and rules",
    "pool": "Pool",
    "what-if": "What if",
    "breaks": "Breaks",
    "tiers": "Tiers",
    "audit": "Audit",
}
DIALOGS: dict[str, dict[str, dict[str, str]]] = {
    "requests/chat-11": {"Override its policy…": {"store": "false"}},
    "requests/chat-10": {"Remove the override…": {}},
    "config": {
        "Change store_threshold": {"New value": "3"},
        "Change pool_bytes": {"New value": "1MiB"},
        "Change eviction_policy": {"New value": "arc"},
    },
    "policies": {
        "Change the defaults…": {"store": "false"},
        "Add a rule…": {"Name": "new", "Request id, as a glob": "chat-*", "load": "false"},
        "Edit rule-1": {"Order": "7"},
        "Move rule-1 down": {},
        "Delete rule-1": {},
    },
    "pool": {
        "Reset…": {"Request id, as a glob": "chat-*"},
        "Pin block": {"For how many seconds": "600"},
        "Drop block": {},
    },
    "tiers": {
        "Reset fs…": {"Reason, for the audit": "a test"},
        "Flush to fs…": {},
        "Disable fs…": {},
        "Detach fs…": {"Time for its jobs to end, in seconds": "5"},
        "Attach a tier…": {"Name": "more"},
    },
}
"""Button and values of every dialog, by its page."""
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
OF_COLORS = ["color-contrast", "link-in-text-block"]
"""Rules of axe that a color scheme can break."""
FOCUS = """element => {
    const { width, top, bottom } = element.getBoundingClientRect();
    return [getComputedStyle(element).outlineStyle, width > 1, top > -2 && bottom < innerHeight + 2];
}"""
MISSING_VALUES = """() => [...document.querySelectorAll("main, main *")].flatMap((element) => [...element.childNodes])
    .filter((node) => node.nodeType === Node.TEXT_NODE && /^(null|undefined|NaN)$/.test(node.data.trim()))
    .map((node) => node.parentElement.outerHTML.slice(0, 200))"""
"""Returns elements that show a value which there is not."""
MAX_SCREENS = 6
"""Screens to scroll through, on a phone too, with as many requests and blocks as there may be."""


@contextmanager
def opened(
    browser: Browser, service: Served, path: str = "", size: str = "desktop", expected: str = ""
) -> Iterator[Page]:
    """The dashboard in a tab of its own, in which errors in the console and requests to other hosts fail the test.

    Console errors that match `expected` do not: a browser logs each response with an error status.
    """
    width, height = SIZES[size]
    complaints: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()

    def complain(text: str) -> None:
        if not expected or not re.search(expected, text):
            complaints.append(text)

    def check_host(url: str) -> None:
        if urlsplit(url.removeprefix("blob:")).netloc != urlsplit(service.url).netloc:
            complaints.append(f"another host: {url}")

    page.on("console", lambda message: complain(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complain(str(error)))
    page.on("request", lambda request: check_host(request.url))
    try:
        page.goto(f"{service.url}/ui/#/{path}")
        yield page
        assert complaints == []
    finally:
        context.close()


@contextmanager
def under_load(service: Served) -> Iterator[None]:
    """Requests that arrive one after the other until the block ends."""
    is_over = threading.Event()

    def send() -> None:
        number = 0
        while not is_over.is_set():
            service.complete(prompt(number % 6, 256), f"load-{number}", max_tokens=1)
            number += 1

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        try:
            yield
        finally:
            is_over.set()
    sending.result()
    service.settle()


def heading(page: Page, text: str) -> None:
    """Wait until the page with this title is loaded."""
    page.locator("main:not([aria-busy])").get_by_role("heading", name=text, level=1, exact=True).wait_for()


@pytest.mark.parametrize("size", SIZES)
def test_every_page_opens_without_errors_and_scrolls_down_only(browser: Browser, served: Served, size: str) -> None:
    with under_load(served), opened(browser, served, size=size, expected="404") as page:
        for path, title in PAGES.items():
            page.goto(f"{served.url}/ui/#/{path}")
            heading(page, title)
            assert page.locator("main .error:visible").all_inner_texts() == []
            assert page.evaluate(MISSING_VALUES) == []
            width, height = page.evaluate(
                "(({scrollWidth, scrollHeight}) => [scrollWidth, scrollHeight])(document.documentElement)"
            )
            assert width <= SIZES[size][0], path
            assert height < MAX_SCREENS * SIZES[size][1], path
            assert page.locator("#nav a[aria-current=page]").count() == 1
            assert page.evaluate("[...document.querySelectorAll('.choice a')].every((one) => one.clientHeight < 40)"), (
                path
            )
            assert page.locator("[style*=url], script:not([src])").count() == 0


@pytest.mark.parametrize("size", SIZES)
def test_no_page_has_a_serious_violation(browser: Browser, served: Served, guarded: Served, size: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    found: list[Any] = []
    # Rows are alike, and checking all of them takes most of the time.
    context = {"exclude": [["tbody tr:nth-child(n + 4)"]]}

    def check(page: Page, name: str) -> None:
        # Evaluating the script for each check takes a quarter of the time.
        if not page.evaluate("'axe' in window"):
            page.evaluate(axe.axe_script)
        for scheme, rules in (("dark", {"runOnly": OF_COLORS}), ("light", {})):
            page.emulate_media(color_scheme=scheme)
            options = {"resultTypes": ["violations"], **rules}
            result = page.evaluate("([context, options]) => axe.run(context, options)", [context, options])
            found.extend(
                (name, scheme, violation["id"], [node["html"][:120] for node in violation["nodes"][:3]])
                for violation in result["violations"]
                if violation["impact"] in ("serious", "critical")
            )

    for number in (1, 2):
        served.http.put(f"/admin/v1/rules/rule-{number}", json={"order": number, "match": {"request": f"{number}-*"}})
    served.http.put("/admin/v1/requests/chat-10/policy", json={"store": False})
    with opened(browser, served, size=size, expected="404") as page:
        for path in ("overview", "requests", "requests/chat-11", *list(PAGES)[8:]):
            page.goto(f"{served.url}/ui/#/{path}")
            heading(page, PAGES[path])
            page.evaluate("for (const each of document.querySelectorAll('main details')) each.open = true")
            check(page, path)
        for path, buttons in DIALOGS.items():
            for button, values in buttons.items():
                page.goto(f"{served.url}/ui/?dialog#/{path}")
                heading(page, PAGES.get(path, PAGES[path.partition("?")[0]]))
                fill_in(page, button, values, between=lambda button=button: check(page, f"form of {button}"))
                check(page, f"effect of {button}")
                assert page.evaluate("document.querySelector('dialog').scrollWidth <= innerWidth"), button
                page.keyboard.press("Escape")
                page.get_by_role("dialog").wait_for(state="detached")
    with opened(browser, guarded, size=size, expected="401") as page:
        page.get_by_label("Token").wait_for()
        check(page, "sign-in")
    for number in (1, 2):
        served.http.delete(f"/admin/v1/rules/rule-{number}")
    served.http.delete("/admin/v1/requests/chat-10/policy")
    assert found == []


# A point, a pause, then two points: which of the chart's thirds are drawn in.
DRAWN_THIRDS = """async () => {
  const { Chart } = await import("/ui/chart.js");
  const series = [{label: "one", color: "host"}];
  const chart = new Chart("one", {series, format: String}, new AbortController().signal);
  document.body.append(chart.element);
  chart.holder.style.width = "600px";
  const values = Array(90).fill(null);
  Object.assign(values, {10: 4, 70: 4, 74: 4});
  chart.set(0, 90, values.map((_, at) => at), [values]);
  await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  const canvas = chart.holder.querySelector("canvas");
  const plot = canvas.getContext("2d").getImageData(90, 0, canvas.width - 90, canvas.height);
  const color = getComputedStyle(document.documentElement).getPropertyValue("--host");
  const [red, green, blue] = color.match(/\\w\\w/g).map((hex) => parseInt(hex, 16));
  const thirds = [0, 0, 0];
  for (let at = 0; at < plot.data.length; at += 4) {
    if (plot.data[at] === red && plot.data[at + 1] === green && plot.data[at + 2] === blue) {
      thirds[Math.floor(3 * ((at / 4) % plot.width) / plot.width)] += 1;
    }
  }
  return thirds.map((number) => number > 0);
}"""


def test_overview_shows_charts_tiles_and_causes_of_the_service(browser: Browser, served: Served) -> None:
    stats = served.stats()
    with opened(browser, served, "overview") as page:
        assert page.evaluate(DRAWN_THIRDS) == [True, False, True]
        page.get_by_text("Ready: everything works").wait_for()
        names = page.locator("#nav a").all_inner_texts()
        assert names[:5] == ["Overview", "Requests", "Sessions", "Pool", "Tiers"]
        assert names[-3:] == ["Policies", "Configuration", "Audit"]
        page.get_by_role("heading", name=re.compile(r"^Over the last \d+ (seconds|minutes?) offloading")).wait_for()
        page.locator(".tile", has_text=f"{stats['evictions']['total']:,} since the start").wait_for()
        figure = page.get_by_role("figure", name="Slots of the pool")
        figure.get_by_text("Show as table").click()
        free, storing, ready = (stats["pool"][name] for name in ("free", "storing", "ready"))
        figure.get_by_role("row", name=re.compile(rf":\d\d {ready:,} {storing} {free:,}$")).first.wait_for()
        assert page.get_by_text("Show as table").count() >= 6
        page.get_by_role("figure", name="Where prompt tokens come from").locator("canvas").wait_for()
        page.locator(".tile", has_text="Pool in use").wait_for()
        page.get_by_role("cell", name=re.compile("never computed before")).wait_for()
        page.locator("#connection", has_text="live").wait_for()


@pytest.mark.parametrize(("loss_s", "is_paused", "warnings"), [(2.0, False, 0), (30.0, False, 1), (30.0, True, 0)])
def test_overview_warns_of_a_loss_that_is_not_noise(
    browser: Browser, served: Served, loss_s: float, is_paused: bool, warnings: int
) -> None:
    stats = served.stats()
    stats["balance"] |= {"window_s": 600.0, "gain_s": 0.0, "cost_s": loss_s, "net_s": -loss_s, "paused": is_paused}
    event = f"data: {json.dumps(stats)}\n\n"
    with opened(browser, served, "audit") as page:
        heading(page, "Audit")
        page.route("**/stats/stream*", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
        page.goto(f"{served.url}/ui/?again#/overview")
        page.get_by_text(re.compile(r"saved 0\ss of prefill and cost")).wait_for()
        page.get_by_text("net loss").wait_for()
        assert page.get_by_text("It costs more than it saves").count() == warnings
        assert page.get_by_text("To store again at once, switch auto_pause off.").count() == is_paused


def test_overview_shows_the_advice_with_command_and_page(browser: Browser, served: Served) -> None:
    stats = served.stats()
    assert stats["advice"] is None
    advice = {"kind": "break", "seconds_per_hour": 40.0, "text": "It took 40 s an hour.", "command": "kvferry breaks"}
    event = f"data: {json.dumps(stats | {'advice': advice})}\n\n"
    with opened(browser, served, "audit") as page:
        heading(page, "Audit")
        page.route("**/stats/stream*", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
        page.goto(f"{served.url}/ui/?again#/overview")
        page.get_by_label("Advice").get_by_text("It took 40 s an hour. kvferry breaks").wait_for()
        page.get_by_label("Advice").get_by_role("link", name="Breaks").click()
        heading(page, "Breaks")


def test_overview_after_a_restart_shows_marks_and_causes_of_before(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, pool_bytes="2MiB", device_blocks=64) as first:
        first.complete(prompt(1, 64), max_tokens=1)
        first.http.patch("/admin/v1/config", json={"store_threshold": 2}).raise_for_status()
        wait_until(lambda: first.get("/admin/v1/stats/history?window_s=3600")["rows"], "the start is sampled")
        first.settle()
        assert first.stop() == 0
    with serving(tmp_path, pool_bytes="2MiB", device_blocks=64) as second:
        wait_until(lambda: len(second.get("/admin/v1/stats/history?window_s=3600")["rows"]) == 3, "the second start")
        with opened(browser, second, "overview?window=hour") as page:
            heading(page, "Overview")
            causes = page.get_by_role("table", name="Prompt tokens computed, by cause")
            causes.get_by_role("cell", name=re.compile("never computed before")).wait_for()
            assert causes.get_by_role("columnheader").first.inner_text() == "Last hour"
            figure = page.get_by_role("figure", name="Hit rate")
            figure.get_by_text(re.compile(r"^Lines: \d\d:\d\d process started, and 2 earlier$")).wait_for()
            lines = figure.locator(".mark")
            assert [line.get_attribute("class") for line in lines.all()] == ["mark start", "mark change", "mark start"]
            places = [(line.bounding_box() or {})["x"] for line in lines.all()]
            assert places == sorted(places)
            figure.get_by_text("Show as table").click()
            table = figure.get_by_role("table", name="Starts and changes")
            table.wait_for()
            assert [row.get_by_role("cell").last.inner_text() for row in table.get_by_role("row").all()[1:]] == [
                "process started",
                "PATCH config: store_threshold=2",
                "process started",
            ]
            page.get_by_role("link", name="15 minutes").click()
            page.get_by_text("No prompt was computed in this time.").wait_for()
            second.complete(prompt(2, 64), max_tokens=1)
            causes.get_by_role("cell", name=re.compile(r"^\d+ \(")).first.wait_for()
            assert causes.get_by_role("columnheader").first.inner_text() == "Last 15 minutes"
            assert figure.locator(".mark").count() == 3


def test_overview_compares_first_tokens_of_prompts_of_one_length(browser: Browser, tmp_path: Path) -> None:
    settings = {"device_blocks": 160, "pool_bytes": "64MiB", "load_decision": "always"}
    with serving(tmp_path, **settings) as served:
        wait_until(lambda: served.get("/admin/v1/stats/history?window_s=3600")["rows"], "the start is sampled")
        for number in (1, 2, 1):
            served.complete(prompt(number, 2000), max_tokens=1)
            served.settle()
        for number in range(10, 16):
            served.complete(prompt(number, 50), max_tokens=1)
        with opened(browser, served, "overview") as page:
            tile = page.locator(".tile", has_text="First token")
            means = r"prompts of 1k-8k tokens, loaded [\d.]+\s\w+, nothing found [\d.]+\s\w+$"
            tile.get_by_text(re.compile(means)).wait_for()
            figure = page.get_by_role("figure", name=re.compile("^Time to first token"))
            figure.get_by_text("mean, of prompts of 1k-8k tokens").first.wait_for()
            by_length = page.get_by_role("table", name="Mean time to first token, last 15 minutes")
            cells = [row.get_by_role("cell").all_inner_texts() for row in by_length.get_by_role("row").all()[1:]]
            numbers = [[re.sub(r".*\((\d+)\)", r"\1", cell) for cell in row] for row in cells]
            assert numbers == [["<1k", "–", "–", "6"], ["1k-8k", "1", "–", "2"]]


def test_sign_in_holds_for_the_tab_until_it_is_ended(browser: Browser, guarded: Served) -> None:
    with opened(browser, guarded, "config", expected="401") as page:
        field = page.get_by_label("Token")
        field.fill("not the token of it")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("alert").filter(has_text="This token is not known here.").wait_for()
        field.fill(ADMIN)
        page.keyboard.press("Enter")
        heading(page, "Configuration")
        page.get_by_role("link", name="Audit", exact=True).click()
        heading(page, "Audit")
        page.reload()
        heading(page, "Audit")
        assert page.evaluate("[{...sessionStorage}, localStorage.length, document.cookie]") == [
            {"kvferry-token": ADMIN},
            0,
            "",
        ]
        page.get_by_role("link", name="API documentation").click()
        page.get_by_role("heading", name="kvferry").first.wait_for()
        page.get_by_text("The token of this call").wait_for()
        assert not page.get_by_label("Token", exact=True).is_visible()
        page.go_back()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("Token").wait_for()
        page.reload()
        page.get_by_label("Token").wait_for()
        assert page.evaluate("sessionStorage.length") == 0


def fill_in(page: Page, button: str, values: dict[str, str], between: Callable[[], None] = lambda: None) -> str:
    """Open a dialog, fill it in, and return the effect that it names; `between` is called with the form open."""
    page.get_by_role("button", name=button).first.click()
    dialog = page.get_by_role("dialog")
    for label, value in values.items():
        control = dialog.get_by_label(label, exact=True)
        if control.evaluate("element => element.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
    if values:
        between()
        dialog.get_by_role("button", name="Next: effect").click()
    dialog.get_by_role("heading", name="Effect").wait_for()
    # A browser keeps the space between a number and its unit.
    return dialog.locator(".effect").inner_text().replace("\u00a0", " ")


def confirm(page: Page, button: str) -> None:
    page.get_by_role("dialog").get_by_role("button", name=button).click()
    page.get_by_role("dialog").wait_for(state="detached")


def test_override_names_its_effect_and_is_in_force(browser: Browser, served: Served) -> None:
    with opened(browser, served, "requests/chat-11") as page:
        page.get_by_text("Why the rest was computed").wait_for()
        effect = fill_in(page, "Override its policy…", {"store": "false", "max_load_tokens": "64"})
        assert "store: true (from default) becomes false" in effect
        assert "max_load_tokens: unlimited (from default) becomes 64" in effect
        assert served.get("/admin/v1/requests/chat-11")["override"] is None
        confirm(page, "Set the override")
        page.get_by_text("An override of max_load_tokens, store holds until").or_(
            page.get_by_text("An override of store, max_load_tokens holds until")
        ).wait_for()
        assert set(served.get("/admin/v1/requests/chat-11")["override"]["fields"]) == {"store", "max_load_tokens"}
        fill_in(page, "Remove the override…", {})
        confirm(page, "Remove the override")
        page.get_by_role("button", name="Override its policy…").wait_for()
        assert served.get("/admin/v1/requests/chat-11")["override"] is None


def test_requests_are_listed_with_times_of_arrival(browser: Browser, served: Served) -> None:
    (request,) = served.get("/admin/v1/requests?limit=1")["items"]
    local = datetime.fromisoformat(request["arrived_at"]).astimezone().strftime("%H:%M:%S")
    with opened(browser, served, "requests") as page:
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=request["id"], exact=True))
        row.get_by_role("cell", name=re.compile(f"{local}$")).wait_for()


def test_lists_name_causes_in_three_words_with_the_sentence(browser: Browser, served: Served) -> None:
    sentence = served.get("/admin/v1/stats/causes")["evicted"]["capacity"]
    # The tier would bring what has left the pool, if it answers in time.
    served.http.put("/admin/v1/rules/untiered", json={"match": {"request": "untiered-*"}, "policy": {"tiers": []}})
    for number in range(6):
        served.complete(prompt(number, 256), f"untiered-{number}", max_tokens=1)
    served.http.delete("/admin/v1/rules/untiered")
    with opened(browser, served, "requests?missed=true") as page:
        assert page.get_by_text("no room left").first.get_attribute("title") == sentence
        page.get_by_role("link", name="Evictions", exact=True).click()
        heading(page, "Evictions")
        page.get_by_label("Reason").select_option(label="no room left")
        page.get_by_role("button", name="Filter").click()
        page.wait_for_url("**reason=capacity*")
        assert page.get_by_role("table", name="Evicted blocks").get_by_title(sentence).count() > 0


def test_request_whose_policy_forbids_loads_names_the_rule(browser: Browser, served: Served) -> None:
    served.http.put("/admin/v1/rules/slow", json={"match": {"request": "slow-*"}, "policy": {"load": False}})
    served.complete(prompt(1, 256), "slow-1", max_tokens=1)
    served.http.delete("/admin/v1/rules/slow")
    with opened(browser, served, "requests/slow-1") as page:
        page.get_by_text("load is false, from rule:slow.").wait_for()


@pytest.mark.parametrize("size", SIZES)
def test_tab_key_moves_through_what_is_visible(browser: Browser, served: Served, size: str) -> None:
    with opened(browser, served, "requests", size=size) as page:
        for path in ("requests", "config", "pool"):
            page.goto(f"{served.url}/ui/?{path}#/{path}")
            heading(page, PAGES[path])
            page.locator("#connection", has_text="live").wait_for()
            for _ in range(22):
                page.keyboard.press("Tab")
                stop = page.evaluate(f"({FOCUS})(document.activeElement)")
                assert stop == ["solid", True, True], page.evaluate("document.activeElement.outerHTML")


def test_setting_is_changed_after_its_effect_was_confirmed(browser: Browser, served: Served) -> None:
    try:
        with opened(browser, served, "config?setting=store_threshold", expected="422") as page:
            effect = fill_in(page, "Change store_threshold", {"New value": "3"})
            assert "store_threshold: 1 becomes 3" in effect
            assert "lost at the next start" in effect
            assert served.get("/admin/v1/config")["store_threshold"]["value"] == 1
            confirm(page, "Change store_threshold")
            page.get_by_text("store_threshold is 3.").wait_for()
            page.get_by_role("row", name=re.compile("store_threshold")).get_by_text("runtime").wait_for()
            assert served.get("/admin/v1/config")["store_threshold"]["value"] == 3
            page.goto(f"{served.url}/ui/#/config?setting=pool_bytes")
            page.locator("main").get_by_role("heading", name="Pool", level=2, exact=True).wait_for()
            page.get_by_role("row", name=re.compile("pool_bytes")).get_by_text("2MiB", exact=True).wait_for()
            page.get_by_role("button", name="Change pool_bytes").click()
            assert page.get_by_label("New value").input_value() == "2MiB"
            page.keyboard.press("Escape")
            effect = fill_in(page, "Change pool_bytes", {"New value": "1572864"})
            assert "pool_bytes: 2MiB becomes 1536KiB" in effect
            page.keyboard.press("Escape")
            page.get_by_role("dialog").wait_for(state="detached")
            fill_in(page, "Change pool_bytes", {"New value": "1.2345GiB"})
            page.get_by_role("dialog").get_by_role("button", name="Change pool_bytes").click()
            page.get_by_role("alert").filter(has_text="must be a number of bytes, or a size such as 8GiB").wait_for()
            assert page.get_by_label("New value").get_attribute("aria-invalid") == "true"
            page.keyboard.press("Escape")
            page.get_by_role("dialog").wait_for(state="detached")
            page.goto(f"{served.url}/ui/?limit#/config?setting=tenant_max_bytes")
            effect = fill_in(page, "Change tenant_max_bytes", {"New value": "1 MiB"})
            assert "tenant_max_bytes: unlimited becomes 1MiB" in effect
            confirm(page, "Change tenant_max_bytes")
            assert "1MiB becomes unlimited" in fill_in(page, "Change tenant_max_bytes", {"New value": "unlimited"})
            confirm(page, "Change tenant_max_bytes")
            assert served.get("/admin/v1/config")["tenant_max_bytes"]["value"] == "unlimited"
    finally:
        # Tests after this one expect that blocks are stored at once.
        restored = {"store_threshold": 1, "tenant_max_bytes": None}
        served.http.patch("/admin/v1/config", json=restored).raise_for_status()


def test_block_is_pinned_unpinned_and_dropped(browser: Browser, served: Served) -> None:
    (block,) = served.get("/admin/v1/blocks?limit=1")["items"]
    path = f"/admin/v1/blocks/{block['hash']}"
    with opened(browser, served, f"pool?hash={block['hash']}", expected="404") as page:
        effect = fill_in(page, "Pin block", {"For how many seconds": "600"})
        assert "stays in the pool for 10 min" in effect
        confirm(page, "Pin the block")
        page.get_by_role("button", name="Unpin block").wait_for()
        assert served.get(path)["pinned_until"] is not None
        fill_in(page, "Unpin block", {})
        confirm(page, "Unpin the block")
        page.get_by_role("button", name="Unpin block").wait_for(state="detached")
        assert served.get(path)["pinned_until"] is None
        assert "cannot be undone" in fill_in(page, "Drop block", {})
        confirm(page, "Drop the block")
        page.get_by_text("The pool does not hold this block.").wait_for()
        assert served.http.get(path).status_code == 404


def test_pool_lists_tenants_with_their_usage_and_limits(browser: Browser, served: Served) -> None:
    digest = tenant_digest("a-salt")
    served.complete([5] * 40, "salted", max_tokens=2, cache_salt="a-salt")
    served.settle()
    path = f"/admin/v1/tenants/{digest}"
    served.http.put(path, json={"max_pool_bytes": 1 << 30}).raise_for_status()
    try:
        with opened(browser, served, "pool") as page:
            table = page.get_by_role("table", name="Tenants by bytes in the pool")
            table.get_by_role("row", name=re.compile(rf"^{digest} \S+ [KM]iB 1 GiB tenant ")).wait_for()
            table.get_by_role("row", name=re.compile(r"^no tenant .* none default ")).wait_for()
            assert page.get_by_role("heading", level=2).all_inner_texts()[-2:] == ["Tenants", "Blocks"]
    finally:
        served.http.delete(path).raise_for_status()
        # Tests after this one expect that all blocks are of no tenant.
        for block in served.get("/admin/v1/blocks?limit=1000")["items"]:
            if block["request"] == "salted":
                served.http.delete(f"/admin/v1/blocks/{block['hash']}").raise_for_status()


def test_rule_is_added_moved_and_deleted(browser: Browser, served: Served) -> None:
    def names() -> list[str]:
        return [rule["name"] for rule in served.get("/admin/v1/rules")["items"]]

    num_requests = len(served.get("/admin/v1/requests?limit=1000")["items"])
    with opened(browser, served, "policies") as page:
        for name in ("first", "second"):
            effect = fill_in(page, "Add a rule…", {"Name": name, "Request id, as a glob": f"{name}-*", "load": "false"})
            assert "load is false" in effect
            assert f"Tested with the latest {num_requests} requests: it concerns none of them." in effect
            confirm(page, "Add the rule")
            page.get_by_role("button", name=f"Delete {name}").wait_for()
        effect = fill_in(page, "Edit first", {"Request id, as a glob": "chat-1*"})
        assert "it concerns 3 of them, such as chat-11, chat-10, chat-1." in effect
        assert "3 would get first instead of no rule." in effect
        assert "The policy of 3 would change: load from true to false for 3" in effect
        confirm(page, "Change the rule")
        assert "before first" in fill_in(page, "Move second up", {})
        confirm(page, "Move the rule")
        wait_until(lambda: names() == ["second", "first"], "the rule is moved")
        for name in ("first", "second"):
            fill_in(page, f"Delete {name}", {})
            confirm(page, "Delete the rule")
            page.get_by_role("button", name=f"Delete {name}").wait_for(state="detached")
        assert names() == []


def test_reset_names_what_it_drops(browser: Browser, served: Served) -> None:
    with opened(browser, served, "overview") as page:
        page.locator("#connection", has_text="live").wait_for()
        assert page.get_by_role("button", name="Reset").count() == 0
        page.get_by_role("link", name="Pool", exact=True).click()
        effect = fill_in(page, "Reset…", {"Request id, as a glob": "chat-3", "Reason, for the audit": "the test"})
        assert "stored by requests chat-3 are dropped from the pool" in effect
        assert "the tier fs" in effect
        confirm(page, "Drop these blocks")
        page.get_by_text(re.compile(r"Dropped \d+ blocks")).wait_for()
        page.get_by_role("link", name="Audit", exact=True).click()
        row = page.get_by_role("row").filter(has=page.get_by_role("cell", name="POST /admin/v1/reset", exact=True))
        row.get_by_role("cell", name=re.compile(r"^20\d\d-\d\d-\d\d \d\d:\d\d:\d\d$")).first.wait_for()


def test_cell_of_the_slot_map_leads_to_its_blocks(browser: Browser, served: Served) -> None:
    (block,) = served.get("/admin/v1/blocks?limit=1")["items"]
    with opened(browser, served, "pool") as page:
        page.locator("dl", has_text="pinned: not evicted").get_by_text("pageable memory").wait_for()
        page.get_by_label("Color by").select_option("tenant")
        page.get_by_text("no tenant: ").wait_for()
        page.locator("canvas").click(position={"x": 16 * block["slot"] + 8, "y": 8})
        heading_text = f"Blocks of the slots {block['slot']} to {block['slot']}"
        page.get_by_role("heading", name=heading_text).wait_for()
        page.get_by_role("button", name=f"Pin block {block['hash'][:12]}").wait_for()
        assert page.get_by_role("table", name="Blocks by slot").get_by_role("row").count() == 2
        page.get_by_text("Show as table").click()
        page.get_by_role("table", name="Slots by tenant").get_by_role("link", name=re.compile("^0 to ")).click()
        page.get_by_role("heading", name=heading_text).wait_for(state="detached")


def test_tier_is_reset_from_its_page(browser: Browser, served: Served) -> None:
    with opened(browser, served, "tiers") as page:
        page.get_by_text("It works.").wait_for()
        page.get_by_role("button", name="Reset fs…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Next: effect").click()
        blocks = served.stats()["tiers"]["fs"]["blocks"]
        dialog.get_by_text(f"All blocks are dropped from the tier fs ({blocks} blocks").wait_for()
        confirm(page, "Drop all of fs")
        page.locator("dl", has_text="0 blocks").wait_for()
        assert served.stats()["pool"]["ready"] > 0


def test_pool_is_flushed_to_a_tier_from_its_page(browser: Browser, served: Served) -> None:
    with opened(browser, served, "tiers") as page:
        assert "beginnings of prompts first" in fill_in(page, "Flush to fs…", {})
        confirm(page, "Flush the pool")
        page.locator("dl", has_text=re.compile(r"done, \d+ of \d+ blocks")).wait_for()
    assert served.get("/admin/v1/tiers/fs")["flush"]["state"] == "done"


NEXT_STATS = """import("/ui/live.js").then(
  ({ live }) => new Promise((seen) => live.addEventListener("stats", () => seen(), { once: true })))"""
"""Waits until the page has got the next figures."""


def test_focus_returns_to_a_tier_from_a_dialog_that_is_canceled(browser: Browser, served: Served) -> None:
    with under_load(served), opened(browser, served, "tiers") as page:
        page.get_by_role("button", name="Disable fs…").press("Space")
        page.get_by_role("dialog").wait_for()
        # The counts on the page behind it change, once a second.
        page.evaluate(NEXT_STATS)
        page.evaluate(NEXT_STATS)
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="detached")
        assert page.evaluate("document.activeElement.textContent") == "Disable fs…"


def test_tier_is_attached_disabled_enabled_and_detached(browser: Browser, served: Served) -> None:
    def tiers() -> dict[str, bool]:
        return {one["name"]: one["enabled"] for one in served.get("/admin/v1/tiers")["items"]}

    folder = Path(served.get("/admin/v1/config")["state_dir"]["value"]) / "tiers"
    definition = {"type": "fs", "path": str(folder / "more"), "max_bytes": "8MiB"}
    with opened(browser, served, "tiers", expected="422") as page:
        page.get_by_text("Attached by the settings: type fs").wait_for()
        values = {"Name": "more", "Definition, as JSON": json.dumps(definition)}
        effect = fill_in(page, "Attach a tier…", values)
        assert "The tier more is opened and tested as at start" in effect
        assert "after fs." in effect
        assert list(tiers()) == ["fs"]
        confirm(page, "Attach the tier")
        page.get_by_role("heading", name="Tier more").wait_for()
        page.get_by_text("Attached by an operator, until the next start").wait_for()
        assert "nothing is stored in it" in fill_in(page, "Disable more…", {})
        assert tiers() == {"fs": True, "more": True}
        confirm(page, "Disable the tier")
        page.get_by_role("button", name="Enable more…").wait_for()
        assert tiers() == {"fs": True, "more": False}
        assert "Requests that arrive from now on" in fill_in(page, "Enable more…", {})
        confirm(page, "Enable the tier")
        page.get_by_role("button", name="Disable more…").wait_for()
        effect = fill_in(page, "Detach more…", {"Time for its jobs to end, in seconds": "3"})
        assert "3 s to end" in effect
        assert "it is used again once it is attached again" in effect
        confirm(page, "Detach the tier")
        page.get_by_role("heading", name="Tier more").wait_for(state="detached")
        assert tiers() == {"fs": True}
        page.get_by_role("button", name="Attach a tier…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Name").fill("more")
        for text, problem in (
            ("no JSON", "This is not JSON"),
            ('{"path": "/x"}', "at least its type"),
            ('{"type": "tape"}', "there is no type of tier called tape"),
        ):
            dialog.get_by_label("Definition, as JSON").fill(text)
            dialog.get_by_role("button", name="Next: effect").click()
            if "tape" in text:
                dialog.get_by_role("button", name="Attach the tier").click()
            dialog.get_by_role("alert").filter(has_text=problem).first.wait_for()
        assert tiers() == {"fs": True}


def test_dashboard_when_used_by_keyboard_changes_a_setting(browser: Browser, served: Served) -> None:
    with opened(browser, served, "config") as page:
        heading(page, "Configuration")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "skip"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.type("log_level")
        page.get_by_text(re.compile("^1 of ")).wait_for()
        for _ in range(2):
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_label("New value").focus()
        page.keyboard.press("ArrowUp")
        for _ in range(2):
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Effect").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="detached")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Change log_level"


def test_read_token_shows_no_buttons_for_changes(browser: Browser, guarded: Served) -> None:
    for token, is_reader in ((ADMIN, False), (READ, True)):
        with opened(browser, guarded, "config", expected="401|404") as page:
            page.get_by_label("Token").fill(token)
            page.keyboard.press("Enter")
            for path in ("config", "policies", "pool", "tiers", "requests/unknown"):
                page.evaluate("path => { location.hash = path; }", f"#/{path}")
                heading(page, PAGES.get(path, "unknown"))
                assert (page.locator("main button", has_text="…").count() == 0) == is_reader, path
                assert (page.get_by_role("columnheader", name="Change").count() == 0) or not is_reader, path
            assert page.get_by_text("read only", exact=True).is_visible() == is_reader


def test_restart_of_the_service_asks_for_a_token_only_if_needed(browser: Browser, tmp_path: Path) -> None:
    def restarted(port: int | None, token: str) -> AbstractContextManager[Served]:
        return serving(tmp_path, engine="none", pool_bytes="8MiB", port=port or 0, admin_token=token)

    with restarted(None, ADMIN) as first:
        port = urlsplit(first.url).port
        with opened(browser, first, "overview", expected="ERR_|Failed to load|401") as page:
            page.get_by_label("Token").fill(ADMIN)
            page.keyboard.press("Enter")
            page.locator("#connection", has_text="live").wait_for()
            first.process.kill()
            first.process.wait(DEADLINE_S)
            page.get_by_text("The service cannot be reached.").wait_for()
            with restarted(port, ADMIN) as second:
                page.get_by_text("Connected again.").wait_for()
                page.get_by_text("Ready: everything works").wait_for()
                page.get_by_role("link", name="Policies", exact=True).click()
                page.get_by_role("button", name="Add a rule…").click()
                second.process.kill()
                second.process.wait(DEADLINE_S)
            with restarted(port, ADMIN[::-1]):
                page.get_by_role("alert").filter(has_text="does not know the token any more").wait_for()
                assert page.get_by_role("dialog").count() == 0
                page.get_by_label("Token").fill(ADMIN[::-1])
                page.keyboard.press("Enter")
                heading(page, "Policies and rules")


def test_refusal_of_an_earlier_token_keeps_the_new_sign_in(browser: Browser, guarded: Served) -> None:
    def sign_in() -> None:
        page.get_by_label("Token").fill(ADMIN)
        page.keyboard.press("Enter")

    with opened(browser, guarded, "policies", expected="401") as page:
        sign_in()
        heading(page, "Policies and rules")
        fill_in(page, "Change the defaults…", {"store": "false"})
        held: list[Route] = []
        page.route("**/admin/v1/policy", lambda route: held.append(route))
        page.get_by_role("dialog").get_by_role("button", name="Change the defaults").click()
        page.route("**/admin/v1/config", lambda route: route.fulfill(status=401))
        page.evaluate("location.hash = '#/config'")
        page.get_by_role("alert").filter(has_text="does not know the token any more").wait_for()
        page.unroute("**/admin/v1/config")
        sign_in()
        heading(page, "Configuration")
        with page.expect_response("**/admin/v1/policy"):
            held[0].fulfill(status=401)
        page.get_by_role("link", name="Tiers", exact=True).click()
        heading(page, "Tiers")


@contextmanager
def breaking_off() -> Iterator[str]:
    """A server that sends half of each response and closes the connection, as a process that is killed does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)


def test_page_when_a_response_breaks_off_says_it_is_unreachable(browser: Browser, served: Served) -> None:
    with breaking_off() as url, opened(browser, served, "audit", expected="ERR_") as page:
        heading(page, "Audit")
        page.route("**/admin/v1/rules*", lambda route: route.continue_(url=url))
        page.get_by_role("link", name="Overview", exact=True).click()
        page.locator("main").get_by_text("The service cannot be reached.").wait_for()
        page.unroute_all()
        page.get_by_role("button", name="Try again").click()
        page.get_by_text("Ready: everything works").wait_for()


def test_page_when_the_service_hangs_says_it_is_unreachable(browser: Browser, tmp_path: Path) -> None:
    with (
        serving(tmp_path, engine="none", pool_bytes="8MiB") as service,
        opened(browser, service, "overview", expected="ERR_") as page,
    ):
        page.get_by_text("Ready: everything works").wait_for()
        service.process.send_signal(signal.SIGSTOP)
        page.get_by_text("The service cannot be reached.").wait_for()
        page.get_by_role("link", name="Audit", exact=True).click()
        page.get_by_text("The service has not answered for 20 seconds.").wait_for()
        service.process.send_signal(signal.SIGCONT)
        heading(page, "Audit")
        page.get_by_text("Connected again.").wait_for()


def test_names_when_long_or_with_invisible_characters_are_shown(browser: Browser, tmp_path: Path) -> None:
    name = "x" * 480 + "<img src=x>"
    with serving(tmp_path, pool_bytes="2MiB", device_blocks=64) as service:
        service.complete(prompt(1, 64), name, max_tokens=1)
        service.settle()
        rule = {"match": {"lora": "\u202e<b>evil\u0007</b>"}, "policy": {"store": False}}
        assert service.http.put("/admin/v1/rules/odd", json=rule).is_success
        with opened(browser, service, "pool") as page:
            link = page.get_by_role("link", name="xxxx").first
            assert len(link.inner_text()) == 40
            assert link.get_attribute("title") == name
            link.click()
            page.get_by_text("What served its prompt").wait_for()
            page.get_by_role("link", name="Policies", exact=True).click()
            page.get_by_text("lora \ufffd<b>evil\ufffd</b>").wait_for()


def test_page_when_the_network_is_slow_says_that_it_loads(browser: Browser, served: Served) -> None:
    with opened(browser, served, "overview") as page:
        page.locator(".tile").first.wait_for()
        held: list[Route] = []
        page.route(re.compile("/audit|/slots/map"), lambda route: held.append(route))
        page.get_by_role("link", name="Audit", exact=True).click()
        page.get_by_text("Loading…").wait_for()
        held.pop().continue_()
        heading(page, "Audit")
        page.get_by_role("link", name="Pool", exact=True).click()
        page.get_by_role("heading", name="Slots").wait_for()
        page.locator("main[aria-busy]").wait_for()
        assert page.get_by_text("Loading…").count() == 0
        held.pop().continue_()
        page.get_by_text("Each cell is a slot").wait_for()


def test_page_whose_answer_comes_late_leaves_the_next_one_alone(browser: Browser, served: Served) -> None:
    with opened(browser, served, "audit") as page:
        heading(page, "Audit")
        held: list[Route] = []
        page.route("**/openapi.json", lambda route: held.append(route))
        page.get_by_role("link", name="Tiers", exact=True).click()
        page.get_by_text("Loading…").wait_for()
        page.get_by_role("link", name="Sessions", exact=True).click()
        heading(page, "Sessions")
        page.evaluate(
            "() => { window.titles = []; const main = document.getElementById('main');"
            "new MutationObserver(() => titles.push(main.firstElementChild.textContent))"
            ".observe(main, { childList: true }); }"
        )
        with page.expect_response("**/openapi.json") as late:
            held.pop().continue_()
        late.value.finished()
        page.get_by_role("link", name="Audit", exact=True).click()
        heading(page, "Audit")
        assert page.evaluate("titles") == ["Audit"]


def test_breaks_shows_a_span_with_its_text_or_how_to_keep_it(browser: Browser, served: Served) -> None:
    with opened(browser, served, "breaks") as page:
        page.get_by_text("No token ids are kept").get_by_role("link", name="explain_bytes").wait_for()
    try:
        served.http.patch("/admin/v1/config", json={"explain_bytes": "16MiB"}).raise_for_status()
        head, body = "Answer in short sentences. It is ", ", and the customer's contract says: " + "nothing new. " * 12
        for minute in (41, 57):
            served.complete(f"{head}12:{minute}{body}", f"break-{minute}", max_tokens=1)
        wait_until(lambda: bool(served.get("/admin/v1/breaks")["items"]), "they are compared")
        with opened(browser, served, "breaks") as page:
            heading(page, "Breaks")
            page.get_by_role("heading", name=f"At token {len(head) + 3}").wait_for()
            for text in (f"{head}12:"[-16:], "41", "57"):
                page.get_by_text(text, exact=True).wait_for()
            page.get_by_role("link", name="break-57").click()
            page.get_by_text("which it left in the 16 tokens after them").wait_for()
    finally:
        served.http.patch("/admin/v1/config", json={"explain_bytes": None}).raise_for_status()


def test_sessions_lead_to_their_requests(browser: Browser, served: Served) -> None:
    served.complete("a prompt of a session", "in-session", session_id="agent/<b>7</b>", max_tokens=1)
    with opened(browser, served, "sessions") as page:
        heading(page, "Sessions")
        page.get_by_role("link", name="agent/<b>7</b>").click()
        heading(page, "Requests")
        page.get_by_role("link", name="in-session").click()
        page.get_by_text("agent/<b>7</b>", exact=True).wait_for()


def test_what_if_shows_one_curve_with_marks_or_how_to_switch_it_on(browser: Browser, served: Served) -> None:
    def rate(value: float) -> str:
        return f"{100 * value:.1f} %"

    wait_until(lambda: bool(served.get("/admin/v1/what-if")["points"]), "requests are counted")
    with opened(browser, served, "what-if") as page:
        heading(page, "What if")
        answer = served.get("/admin/v1/what-if")
        figure = page.get_by_role("figure", name="Share of prompt tokens served")
        figure.locator("canvas").wait_for()
        figure.get_by_text("Show as table").click()
        # The larger of pool and device, which have 2 MiB each, and both together.
        kept, eager, lazy = (rate(answer[name]) for name in ("ceiling", "eager", "lazy"))
        figure.get_by_role("row", name=f"2 MiB {kept} {eager} {eager} –").wait_for()
        figure.get_by_role("row", name=f"4 MiB {kept} {lazy} – {lazy}").wait_for()
        page.get_by_text("What is left out").click()
        page.get_by_text(answer["notes"][0]).wait_for()
        try:
            served.http.patch("/admin/v1/config", json={"what_if": False}).raise_for_status()
            page.goto(f"{served.url}/ui/?off#/what-if")
            page.get_by_text("No request was counted yet.").get_by_role("link", name="what_if").click()
            heading(page, "Configuration")
        finally:
            served.http.patch("/admin/v1/config", json={"what_if": None}).raise_for_status()
