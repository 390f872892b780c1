"""Take a picture of a report as a browser shows it, down to its first figure.

    python examples/report_picture.py runs/unlearned/report.html docs/images/report.png

Needs selenium, and Chromium with its driver.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
from pathlib import Path

from PIL import Image
from selenium import webdriver

WIDTH, MARGIN = 1180, 24  # CSS pixels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    settings = webdriver.ChromeOptions()
    settings.binary_location = str(shutil.which("chromium") or shutil.which("google-chrome"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        settings.add_argument(argument)
    settings.add_argument(f"--window-size={WIDTH},1000")
    browser = webdriver.Chrome(
        options=settings, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        browser.get(options.page.resolve().as_uri())
        end = "return document.querySelector('figure').getBoundingClientRect().bottom"
        height = browser.execute_script(end) + MARGIN
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        shot = browser.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
        )
    finally:
        browser.quit()
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    image.save(options.picture, optimize=True)


if __name__ == "__main__":
    main()
