"""The report's page as a browser shows it: every figure drawn, no error, no request, nothing wider than the screen."""

import itertools
import json
import shutil
from dataclasses import replace
from urllib.parse import urlparse

import pytest
from report_examples import NASTY, example_run, image_observations, text_observations

from hamu.report.report import Reported, report_page
from hamu.report.trajectories import STYLES

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="there is no Chromium with its driver here"
)
MANY = ["hamu-q", "hamu-u", *STYLES, "a-plugin"]  # HAMU twice each
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}

DRAWN = """[...document.querySelectorAll(".chart")].map((holder) => {
    const svg = holder.querySelector(":scope > svg");
    if (!svg) return {marks: 0};
    const box = svg.getBoundingClientRect(), text = svg.outerHTML.replace(/href="[^"]*"/g, "");  // without images
    return {says: svg.getAttribute("aria-label"), marks: svg.querySelectorAll("path, circle, rect, image").length,
            width: box.width, height: box.height, broken: /NaN|Infinity|undefined/.test(text)};
})"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """By name: a run with images, one with texts of 100,000 steps, both, many, one twice; names are code."""
    folder = tmp_path_factory.mktemp("pages")
    short = Reported(
        example_run(folder, "images", names=(NASTY, "b")), image_observations((NASTY, "b"))
    )
    long = Reported(
        example_run(folder, "texts", steps=100_000, figures=("probability",)), text_observations()
    )
    many = [
        Reported(replace(short.run, name=f"{n} {method}", method=method))
        for n, method in enumerate(MANY)
    ]
    runs = {
        "images": [short],
        "texts": [long],
        "both": [short, long],
        "many": many,
        "twice": [short, short],
    }
    found = {}
    for name, reported in runs.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(report_page(reported, contents=True), encoding="utf-8")
    return found


@pytest.fixture
def opened(browser, pages):
    """Opens a page at a size; yields the browser."""

    def open_page(name, size):
        width, height = SIZES[size]
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": size == "phone",
        }
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for kind in ("browser", "performance"):
            browser.get_log(kind)  # what came before is not of this page
        browser.get(pages[name].as_uri())
        return browser

    return open_page


def requests(browser):
    """What was asked for that does not lie within the page."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in urls if urlparse(url).scheme != "data"]


def run_script(browser, body):
    return browser.execute_script(f"return {body}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["images", "texts", "both"])
def test_every_figure_is_drawn_without_error_or_request(opened, pages, name, size):
    browser = opened(name, size)
    charts = run_script(browser, DRAWN)
    assert len(charts) == {"images": 17, "texts": 13, "both": 33}[name]
    for chart in charts:
        assert chart["marks"] > 1, chart
        assert chart["width"] > 200, chart
        assert chart["height"] > 60, chart
        assert len(chart["says"]) > 60, chart
        assert not chart["broken"], chart
    assert run_script(browser, "window.broken === undefined"), "what the data say has run as code"
    assert run_script(browser, "document.documentElement.scrollWidth <= window.innerWidth")
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    assert requests(browser) == [pages[name].as_uri()]


def test_the_legend_hides_a_series_and_shows_it_again(opened):
    browser = opened("images", "desktop")
    chart = 'document.querySelectorAll("figure:has(.legend)")[1]'
    count = f'{chart}.querySelectorAll(".chart > svg path").length'
    before = run_script(browser, count)
    button = browser.execute_script(f'return {chart}.querySelector(".legend button")')
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert run_script(browser, count) == before - 1
    button.click()
    assert run_script(browser, count) == before


def test_the_legend_hides_one_of_two_series_of_the_same_name(opened):
    browser = opened("twice", "desktop")
    browser.find_element("css selector", "#all .legend button").click()
    assert (
        run_script(browser, 'document.querySelectorAll("#all .chart > svg path").length')
        == 2 * 3 - 1
    )


def test_of_many_runs_each_has_a_line_of_its_own_as_the_legend_shows_it(opened):
    browser = opened("many", "desktop")
    looks = run_script(
        browser,
        """[...document.querySelectorAll("#all figure")].map((figure) => {
            const of = (css) => [...figure.querySelectorAll(css)].map((line) => {
                const style = getComputedStyle(line);
                return `${style.stroke} ${style.strokeDasharray}`;
            });
            return [of(".legend line"), of(".chart > svg path")];
        })""",
    )
    assert len(looks) == 3
    for legend, drawn in looks:
        assert drawn == legend
        assert len(set(drawn)) == len(drawn) > 9
    assert len(looks[0][0]) == len(MANY)
    heights = '[...document.querySelectorAll(".legend button")].map((b) => b.getBoundingClientRect().height)'
    assert max(run_script(browser, heights)) < 40, "names stand on one line"


def test_the_pointer_shows_values(opened):
    browser = opened("images", "desktop")
    for kind in ("path", "image", "circle"):
        browser.execute_script(f"""
            const mark = [...document.querySelectorAll(".chart > svg {kind}")].pop();
            const box = mark.getBoundingClientRect();
            const at = {{clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true}};
            mark.closest("svg").dispatchEvent(new PointerEvent("pointermove", at));""")
        assert run_script(browser, 'document.getElementById("hint").hidden') is False
        assert any(
            digit in run_script(browser, 'document.getElementById("hint").textContent')
            for digit in "0123456789"
        )


def test_the_arrow_keys_show_values_in_every_figure(opened):
    browser = opened("images", "desktop")
    hint = 'document.getElementById("hint")'
    for chart in range(run_script(browser, 'document.querySelectorAll(".chart > svg").length')):
        browser.execute_script(f"""
            const svg = document.querySelectorAll(".chart > svg")[{chart}];
            svg.focus({{preventScroll: true}});
            for (const key of ["ArrowRight", "ArrowRight", "ArrowDown"])
                svg.dispatchEvent(new KeyboardEvent("keydown", {{key, bubbles: true, cancelable: true}}));""")
        assert run_script(
            browser,
            f'document.activeElement === document.querySelectorAll(".chart > svg")[{chart}]',
        )
        assert run_script(browser, f"{hint}.hidden") is False, chart
        first = run_script(browser, f"{hint}.textContent")
        assert any(digit in first for digit in "0123456789")
        browser.execute_script(
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
        )
        assert run_script(browser, f"{hint}.hidden") is True
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_what_is_tapped_stays_until_the_next_tap_elsewhere(opened):
    browser = opened("images", "phone")
    kinds = "".join(
        f'svg.dispatchEvent(new PointerEvent("{kind}", {{...at, pointerType: "touch"}}));'
        for kind in ("pointerdown", "pointerup", "pointerout", "pointerleave")
    )
    browser.execute_script(f"""
        const mark = [...document.querySelectorAll(".chart > svg circle")].pop(), svg = mark.closest("svg");
        const box = mark.getBoundingClientRect();
        const at = {{clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true}};
        {kinds}""")
    assert run_script(browser, 'document.getElementById("hint").hidden') is False
    browser.execute_script(
        'document.querySelector("h1").dispatchEvent(new PointerEvent("pointerdown", {bubbles: true}))'
    )
    assert run_script(browser, 'document.getElementById("hint").hidden') is True


def test_headings_leave_out_no_level(opened):
    for name in ("images", "both"):
        levels = run_script(
            opened(name, "desktop"),
            '[...document.querySelectorAll("h1,h2,h3,h4,h5")].map((h) => +h.tagName[1])',
        )
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), name


def test_figures_follow_the_width(opened):
    browser = opened("images", "desktop")
    wide = run_script(browser, 'document.querySelector(".chart > svg").viewBox.baseVal.width')
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
    )
    narrow = run_script(browser, 'document.querySelector(".chart > svg").viewBox.baseVal.width')
    assert narrow < wide
    assert narrow <= 400


def test_a_printed_page_holds_all_figures_whole(opened):
    browser = opened("images", "desktop")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        style = 'getComputedStyle(document.querySelector("figure"))'
        assert run_script(browser, f"{style}.breakInside") == "avoid"
        tallest = run_script(
            browser,
            'Math.max(...[...document.querySelectorAll("figure")].map((f) => f.getBoundingClientRect().height))',
        )
        assert tallest < 1000, "of an A4 page, in CSS pixels"
        assert (
            run_script(browser, 'getComputedStyle(document.querySelector("nav")).display') == "none"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert printed.startswith("JVBERi0"), "a PDF"
