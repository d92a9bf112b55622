"""The dashboard in a browser: every page, sign-in, changes with their effect named first, and restarts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.harness.loop_service import ADMIN
from tests.harness.service_process import Served, serving, wait_until
from tests.ui.conftest import WAIT_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

PAGES = {
    "overview": "Overview",
    "overview?window=day": "Overview",
    "requests": "Requests",
    "requests/chat-11": "chat-11",
    "requests/batch%2F%3Cb%3E1%3C%2Fb%3E": "batch/<b>1</b>",
    f"requests/{'unknown' * 60}": "unknown" * 60,
    "config": "Configuration",
    "evictions": "Evictions",
    "policies": "Policies and rules",
    "pool": "Pool",
    "tiers": "Tiers",
    "audit": "Audit",
}
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@contextmanager
def opened(
    browser: Browser, service: Served, path: str = "", size: str = "desktop", scheme: str = "light", expected: str = ""
) -> Iterator[Page]:
    """The dashboard in a tab of its own, in which errors in the console and requests to other hosts fail the test.

    Console errors that match `expected` do not: a browser logs each response with an error status.
    """
    width, height = SIZES[size]
    complaints: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()

    def complain(text: str) -> None:
        if not expected or not re.search(expected, text):
            complaints.append(text)

    def check_host(url: str) -> None:
        if urlsplit(url).netloc != urlsplit(service.url).netloc:
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


def heading(page: Page, text: str) -> None:
    page.get_by_role("heading", name=text, level=1, exact=True).wait_for()


@pytest.mark.parametrize("size", SIZES)
def test_every_page_opens_without_errors_and_scrolls_down_only(browser: Browser, served: Served, size: str) -> None:
    with opened(browser, served, size=size, expected="404") as page:
        for path, title in PAGES.items():
            page.goto(f"{served.url}/ui/#/{path}")
            heading(page, title)
            assert page.locator("main .error:visible").all_inner_texts() == []
            assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], path
            assert page.locator("#nav a[aria-current=page]").count() == 1
            assert page.locator("[style*=url], script:not([src])").count() == 0


@pytest.mark.parametrize(("size", "scheme"), [("desktop", "light"), ("phone", "dark")])
def test_no_page_has_a_serious_violation(
    browser: Browser, served: Served, guarded: Served, size: str, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    found: list[Any] = []

    def check(page: Page, name: str) -> None:
        found.extend(
            (name, violation["id"], [node["html"][:120] for node in violation["nodes"][:3]])
            for violation in axe.run(page).response["violations"]
            if violation["impact"] in ("serious", "critical")
        )

    with opened(browser, served, size=size, scheme=scheme, expected="404") as page:
        for path, title in PAGES.items():
            page.goto(f"{served.url}/ui/#/{path}")
            heading(page, title)
            check(page, path)
        page.get_by_role("button", name="Reset…").click()
        check(page, "form of a dialog")
        page.get_by_role("button", name="Next: effect").click()
        page.locator(".effect").wait_for()
        check(page, "effect in a dialog")
    with opened(browser, guarded, size=size, scheme=scheme, expected="401") as page:
        page.get_by_label("Token").wait_for()
        check(page, "sign-in")
    assert found == []


def test_overview_shows_where_prompt_tokens_come_from(browser: Browser, served: Served) -> None:
    with opened(browser, served, "overview") as page:
        page.get_by_text("Ready: everything works").wait_for()
        page.get_by_role("figure", name="Where prompt tokens come from").locator("canvas").wait_for()
        page.locator(".tile", has_text="Pool in use").wait_for()
        page.get_by_role("cell", name=re.compile("never computed before")).wait_for()
        page.locator("#connection", has_text="live").wait_for()


def test_token_is_asked_for_once_and_kept_in_memory(browser: Browser, guarded: Served) -> None:
    with opened(browser, guarded, "config", expected="401") as page:
        field = page.get_by_label("Token")
        field.fill("not the token of it")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("alert").filter(has_text="This token is not known here.").wait_for()
        field.fill(ADMIN)
        page.keyboard.press("Enter")
        heading(page, "Configuration")
        page.get_by_role("link", name="Audit").click()
        heading(page, "Audit")
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [0, 0, ""]
        page.reload()
        page.get_by_label("Token").wait_for()


def fill_in(page: Page, button: str, values: dict[str, str]) -> str:
    """Open a dialog, fill it in, and return the effect that it names."""
    page.get_by_role("button", name=button).first.click()
    dialog = page.get_by_role("dialog")
    for label, value in values.items():
        control = dialog.get_by_label(label, exact=True)
        if control.evaluate("element => element.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
    if values:
        dialog.get_by_role("button", name="Next: effect").click()
    dialog.get_by_role("heading", name="Effect").wait_for()
    return dialog.locator(".effect").inner_text()


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


def test_setting_is_changed_after_its_effect_was_confirmed(browser: Browser, served: Served) -> None:
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
        fill_in(page, "Change pool_bytes", {"New value": "1.2345GiB"})
        page.get_by_role("dialog").get_by_role("button", name="Change pool_bytes").click()
        page.get_by_role("alert").filter(has_text="must be a number of bytes, or a size such as 8GiB").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="detached")


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


def test_rule_is_added_moved_and_deleted(browser: Browser, served: Served) -> None:
    def names() -> list[str]:
        return [rule["name"] for rule in served.get("/admin/v1/rules")["items"]]

    with opened(browser, served, "policies") as page:
        for name in ("first", "second"):
            effect = fill_in(page, "Add a rule…", {"Name": name, "Request id, as a glob": f"{name}-*", "load": "false"})
            assert "load is false" in effect
            confirm(page, "Add the rule")
            page.get_by_role("button", name=f"Delete {name}").wait_for()
        assert "before first" in fill_in(page, "Move second up", {})
        confirm(page, "Move the rule")
        wait_until(lambda: names() == ["second", "first"], "the rule is moved")
        for name in ("first", "second"):
            fill_in(page, f"Delete {name}", {})
            confirm(page, "Delete the rule")
            page.get_by_role("button", name=f"Delete {name}").wait_for(state="detached")
        assert names() == []


def test_reset_names_what_it_drops(browser: Browser, served: Served) -> None:
    with opened(browser, served, "pool") as page:
        page.locator("#connection", has_text="live").wait_for()
        effect = fill_in(page, "Reset…", {"Request id, as a glob": "chat-3", "Reason, for the audit": "the test"})
        assert "stored by requests chat-3 are dropped from the pool" in effect
        assert "the tier fs" in effect
        confirm(page, "Drop these blocks")
        page.get_by_text(re.compile(r"Dropped \d+ blocks")).wait_for()
        page.get_by_role("link", name="Audit").click()
        page.get_by_role("cell", name="POST /admin/v1/reset", exact=True).wait_for()


def test_restart_of_the_service_is_survived(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, engine="none", pool_bytes="8MiB") as first:
        port = urlsplit(first.url).port
        with opened(browser, first, "overview", expected="ERR_|Failed to load") as page:
            page.locator("#connection", has_text="live").wait_for()
            first.stop()
            page.locator("#connection", has_text="trying again").wait_for()
            page.get_by_text("The service cannot be reached.").wait_for()
            with serving(tmp_path, engine="none", pool_bytes="8MiB", port=port):
                page.get_by_text("Connected again.").wait_for()
                page.get_by_text("Ready: everything works").wait_for()
