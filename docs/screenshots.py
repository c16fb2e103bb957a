"""Take the pictures of the report in docs/images: a desk, a phone, the dark.

    python docs/screenshots.py [RUN]

RUN is the run folder of a study, runs/minilm by default (`make cast`). It needs playwright and a Chromium
(apt-get install chromium-headless-shell).
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile

from playwright.sync_api import Browser, sync_playwright

from trimtab.errors import TrimtabError
from trimtab.report import write

IMAGES = pathlib.Path(__file__).parent / "images"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SHOTS = {
    "report": (1280, 1900, "light", "#main"),
    "report-trials": (1280, 1000, "light", "#trials"),
    "report-why": (1280, 1400, "light", "#why"),
    "report-dark": (1280, 1000, "dark", "#main"),
    "report-phone": (390, 844, "light", "#ladder"),
}
"""Name -> width and height of the screen, theme, and what stands at its top."""


def shoot(browser: Browser, page_file: pathlib.Path, name: str) -> pathlib.Path:
    """One picture."""
    width, height, scheme, top = SHOTS[name]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light")
    page.goto(page_file.as_uri())
    page.wait_for_selector("#chart-ladder .main-svg")
    if top != "#main":
        page.locator(top).evaluate("each => each.scrollIntoView()")
    page.wait_for_timeout(300)  # plotly fits its margins once more after it has drawn
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    page.close()
    return path


def main(run: pathlib.Path) -> int:
    """All pictures of the study in ``run``."""
    chromium = next((path for each in NAMES if (path := shutil.which(each))), None)
    if chromium is None:
        print("There is no Chromium here: apt-get install chromium-headless-shell", file=sys.stderr)
        return 2
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        try:
            report = write(run, pathlib.Path(place) / "report.html")
        except TrimtabError as error:
            print(f"{error} `make cast` makes the study in runs/minilm.", file=sys.stderr)
            return 2
        as_root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=as_root)
        for name in SHOTS:
            print(shoot(browser, report, name))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/minilm")))
