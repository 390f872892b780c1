"""The report in a browser: every chart drawn, no error, no request, no data run as code."""

import json
import shutil
from urllib.parse import urlparse

import pytest
from report_examples import NASTY, example_run, image_observations, text_observations

from hamu.report.page import report_page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="there is no Chromium with its driver here"
)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


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
def page(tmp_path_factory):
    """Page of a run on images and a long one on texts, with names that are code."""
    folder = tmp_path_factory.mktemp("page")
    names = (NASTY, "b")
    short = example_run(folder, "images", image_observations(names), names=names)
    long = example_run(folder, "texts", text_observations(), steps=20_000)
    page = report_page([short, long], contents=True)
    (folder / "page.html").write_text(page, encoding="utf-8")
    return folder / "page.html"


@pytest.fixture(params=SIZES)
def opened(request, browser, page):
    """The browser with the page at a size."""
    width, height = SIZES[request.param]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
    metrics["mobile"] = request.param == "phone"
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # entries of the page before
    browser.get(page.as_uri())
    return browser


def test_every_chart_is_drawn_without_error_or_request(opened, page):
    charts = opened.execute_script(
        """return [...document.querySelectorAll(".chart")].map((chart) => [
            chart.querySelectorAll(".main-svg path, .main-svg image").length,
            chart.querySelector(".main-svg")?.getBoundingClientRect().width])"""
    )
    assert len(charts) == 34
    assert all(marks > 1 and width > 150 for marks, width in charts)
    assert opened.execute_script("return window.broken === undefined"), "data ran as code"
    fits = "return document.documentElement.scrollWidth <= window.innerWidth"
    assert opened.execute_script(fits), "nothing is wider than the screen"
    assert [entry["message"] for entry in opened.get_log("browser")] == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    urls = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in urls if urlparse(url).scheme not in ("data", "blob")] == [page.as_uri()]


def test_the_arrow_keys_show_values(opened):
    # the first cell of the changes is empty
    shown = opened.execute_script("""
        const press = (key) => new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true});
        const charts = document.querySelectorAll(".chart:not([aria-label^='‖Δw‖'])");
        return [...charts].map((chart) => {
            chart.focus({preventScroll: true});
            for (const key of ["ArrowRight", "ArrowRight"]) chart.dispatchEvent(press(key));
            return chart.querySelector(".hoverlayer").textContent;
        })""")
    assert all(any(letter.isdigit() for letter in text) for text in shown), shown
