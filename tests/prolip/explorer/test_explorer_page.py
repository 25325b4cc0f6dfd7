"""The explorer's page in a real browser: what people do with it, and what captions cannot do to them."""

from __future__ import annotations

import re
import shutil

import pytest
from explored import HOSTILE
from squares import COLOURS, picture

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")
expect = sync_api.expect
VIEWS = ("nearest", "beside", "path", "map", "uncertain", "rules")
#: Milliseconds, of a machine that does much else.
PATIENCE = 60_000


@pytest.fixture(scope="module")
def browser():
    expect.set_options(timeout=PATIENCE)
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser, server):
    """Return (width, height) -> a page that is ready; any error on the page ends the test."""
    contexts, complaints = [], []

    def run(width: int = 1280, height: int = 900, place: str = ""):
        context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if "Security" in line.text else None)
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: complaints.append(request.url) if foreign(request.url, server.url) else None)
        page.goto(server.url + place)
        expect(page.locator("html")).to_have_attribute("data-ready", "yes")
        return page

    yield run
    for context in contexts:
        context.close()
    assert complaints == []


def foreign(url: str, own: str) -> bool:
    return not url.startswith((own, "data:", f"blob:{own}"))


def ask(page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")
    expect(page.locator("#status")).to_contain_text("12 items; the nearest:")


def view(page, name: str) -> None:
    page.click(f"#tab-{name}")
    expect(page.locator(f"#{name}")).to_be_visible()
    expect(page.locator("#status")).not_to_contain_text("…")


def drop(page, data: bytes, name: str = "mine.png") -> None:
    page.set_input_files("#picture", {"name": name, "mimeType": "image/png", "buffer": data})


def test_a_text_is_asked_compared_and_walked(opened):
    page = opened()
    ask(page, "a red square")
    expect(page.locator("#answers li")).to_have_count(12)
    expect(page.locator("#answers .meter").first).to_be_visible()
    expect(page.locator("#answers img").first).to_have_js_property("complete", True)
    assert page.locator("#answers img").first.evaluate("image => image.naturalWidth") == 32
    expect(page.locator("#makes .verdict")).to_contain_text(re.compile("would (answer|refuse) this"))
    page.locator("#least-sure").fill("100")
    expect(page.locator("#makes .verdict")).to_have_text("The model would refuse this")
    page.locator("#least-sure").fill("0")
    expect(page.locator("#makes .verdict")).to_have_text("The model would answer this")
    view(page, "beside")
    expect(page.locator("#columns section h2")).to_have_text([re.compile("^csd"), "mean", "elk"])
    expect(page.locator("#columns section").first.locator("li")).to_have_count(8)
    view(page, "path")
    expect(page.locator("#steps .word").first).to_have_text("a red square")
    expect(page.locator("#steps .word").last).to_have_text("[ROOT]")
    expect(page.locator("#steps li").first.locator("img")).to_have_count(4)
    page.check("input[value=empty]")
    expect(page.locator("#steps .says").last).to_have_text("“”")


def test_a_picture_is_asked_by_and_then_an_item(opened):
    page = opened()
    drop(page, picture("cyan"))
    expect(page.locator("#status")).to_contain_text("the nearest: a cyan square")
    expect(page.locator("#chips")).to_contain_text("your image")
    expect(page.locator("#makes")).to_contain_text("Best captions")
    page.locator("#answers button").first.click()
    expect(page.locator("#chips")).to_contain_text("a cyan square")
    expect(page.locator("#status")).to_contain_text("11 items; the nearest:")
    page.click("#chips button")
    expect(page.locator("#asked")).to_be_hidden()


def test_captions_are_text_and_run_nothing(opened):
    page = opened()
    ask(page, HOSTILE[1])
    for name in VIEWS:
        view(page, name)
    view(page, "uncertain")
    for hostile in HOSTILE:
        expect(page.get_by_text(hostile, exact=True).locator("visible=true").first).to_be_visible()
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None
    made = "main script, main svg:not(.bars), [onerror], [onload]"
    assert page.evaluate(f"document.querySelectorAll('{made}').length") == 0


def test_rules_count_while_the_slider_moves(opened):
    page = opened(place="#rules")
    expect(page.locator("#kept")).to_contain_text("of 12 kept")
    slider = page.locator("#list input[type=range]")
    slider.fill("0")
    expect(page.locator("#kept")).to_contain_text("12 of 12 kept")
    slider.fill("50")
    expect(page.locator("#kept")).to_contain_text("6 of 12 kept")
    expect(page.locator("#goes li")).to_have_count(6)
    expect(page.locator("#curating")).to_be_hidden()  # nothing was scored that could be curated
    page.click("#formula")
    page.locator("#list input[type=text]").last.fill("text_uncertainty <")
    expect(page.locator("#list .wrong")).to_contain_text("is not a rule")
    page.locator("#list input[type=text]").last.fill("cosine < quantile(cosine, 2)")
    expect(page.locator("#list .wrong")).to_contain_text("is not supported")
    page.locator("#list input[type=text]").last.fill("cosine > -2")
    expect(page.locator("#kept")).to_contain_text("0 of 12 kept")


def test_all_of_it_goes_by_keyboard(opened):
    page = opened()
    press = page.keyboard.press
    page.bring_to_front()
    press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    press("Tab")
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.type("a blue square")
    press("Enter")
    expect(page.locator("#status")).to_contain_text("12 items; the nearest:")
    page.focus("#tab-nearest")
    for name in (*VIEWS[1:], "nearest"):
        press("ArrowRight")
        expect(page.locator(f"#{name}")).to_be_visible()
        expect(page.locator(f"#tab-{name}")).to_be_focused()
    press("Tab")  # from the tab into its panel
    expect(page.locator("#least-sure")).to_be_focused()
    press("Tab")
    expect(page.locator("#answers .card").first).to_be_focused()
    press("Enter")
    expect(page.locator("#status")).to_contain_text("11 items; the nearest:")
    view(page, "map")
    page.focus("#canvas")
    press("ArrowRight")
    expect(page.locator("#chosen .card")).to_be_visible()
    chosen = page.locator("#chosen .caption").inner_text()
    press("Enter")
    expect(page.locator("#chips")).to_contain_text(chosen)


def test_every_view_fits_a_telephone_and_has_names_for_a_screen_reader(opened):
    page = opened(375, 740)
    ask(page, "a square with a very long description " * 12)
    for name in VIEWS:
        view(page, name)
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1] == 375, name
    found = page.evaluate("""() => {
        const all = (what) => [...document.querySelectorAll(what)], html = (some) => some.map((x) => x.outerHTML);
        const ids = all('[id]').map((x) => x.id);
        return {
            unlabelled: html(all('input, select, canvas').filter((x) => !x.labels?.length && !x.ariaLabel)),
            mute: html(all('button').filter((x) => !x.textContent.trim() && !x.ariaLabel)),
            alt: html(all('img').filter((x) => !x.hasAttribute('alt'))),
            ids: ids.filter((x, i) => ids.indexOf(x) !== i),
            live: all('[aria-live], [role=alert]').map((x) => x.id),
            controls: html(all('[aria-controls]').filter((x) => !ids.includes(x.getAttribute('aria-controls')))),
        };
    }""")
    assert {"status", "error", "kept", "chosen"} <= set(found.pop("live"))
    assert found == {"unlabelled": [], "mute": [], "alt": [], "ids": [], "controls": []}


def test_what_fails_is_said_and_what_comes_late_wipes_nothing_out(opened, tmp_path):
    page, held = opened(), []
    error = page.locator("#error")
    drop(page, b"no picture at all")
    expect(error).to_contain_text("This is not a readable image")
    (tmp_path / "huge.png").write_bytes(bytes(2**24 + 1))
    page.set_input_files("#picture", tmp_path / "huge.png")
    expect(error).to_have_text("This file has 16,777,217 bytes: the limit is 16,777,216")
    drop(page, picture("red"))
    expect(page.locator("#status")).to_contain_text("12 items; the nearest:")
    expect(error).to_be_hidden()
    page.route("**/api/walk", lambda route: route.fulfill(status=400, json={"error": "there are no captions here"}))
    page.click("#tab-path")
    expect(error).to_have_text("There are no captions here")
    expect(page.locator("#path .empty")).to_be_hidden()  # "Search first."
    for tab, slow, filled in (
        ("uncertain", "uncertain", "#least li"),
        ("rules", "columns", "#kept .big"),
        ("map", "map", "#map-lead:has-text('All 12')"),
    ):
        page.route(f"**/api/{slow}", lambda route: held.append(route))
        page.click(f"#tab-{tab}")
        expect(page.locator("#status")).to_contain_text("…")
        ask(page, "red")
        held.pop().continue_()
        expect(page.locator(filled).first).to_be_attached()
        expect(page.locator("#status")).to_contain_text("12 items; the nearest:")


def test_a_click_on_the_map_chooses_an_item_and_small_probabilities_are_one_in_so_many(opened):
    page = opened(place="#map")
    expect(page.locator("#map-lead")).to_contain_text("All 12 items")
    box = page.locator("#canvas").bounding_box()
    at = page.evaluate("onScreen(view.points[3].at, document.getElementById('canvas').getBoundingClientRect())")
    page.mouse.click(box["x"] + at[0], box["y"] + at[1])
    expect(page.locator("#chosen .card")).to_contain_text(f"a {COLOURS[3]} square")
    said = [page.evaluate(f"odds({x})") for x in ("0.5", "0.034", "0.01", "0.0096", "0.00004321", "0", "null")]
    assert said == ["50%", "3.4%", "1.0%", "1 in 100", "1 in 23,000", "under 1 in a million", "–"]
