"""Take the pictures of the report and of the page of a server in docs/images: a desk, a phone, the dark.

    python docs/screenshots.py [RUN [ARTIFACT]]

RUN is the run folder of a study, runs/minilm by default (`make cast`). ARTIFACT is what the server serves, runs/digits/artifact
by default (`make demo`). It needs playwright and a Chromium (apt-get install chromium-headless-shell).
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile

from playwright.sync_api import Browser, sync_playwright

from trimtab.errors import ArtifactError, TrimtabError
from trimtab.report import write
from trimtab.serve.own_server import address_of

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
SERVING = {"serving": (1280, "light"), "serving-dark": (1280, "dark"), "serving-phone": (390, "light")}
"""Name -> width of the screen, and theme."""
LOAD_S = 24
"""Seconds of requests before the pictures, so that there are figures to show."""
REQUESTS = """async (seconds) => {
  const end = performance.now() + seconds * 1e3, request = JSON.stringify(window.trimtab.asked(document.querySelector("form")));
  const base = "/v2/models/" + document.querySelector("section").dataset.model;
  let waves = 0;
  while (performance.now() < end) {
    const several = 1 + waves++ % 40;
    await Promise.all(Array.from({length: several}, () => fetch(base + "/infer", {method: "POST", body: request})));
    await new Promise((done) => setTimeout(done, 40));
  }
}"""


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


def shoot_server(browser: Browser, address: str, name: str) -> pathlib.Path:
    """One picture of the page of the server at ``address``, after some load and one request by its form."""
    width, scheme = SERVING[name]
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light")
    page.goto(address)
    page.evaluate(REQUESTS, LOAD_S)
    page.get_by_role("button", name="Compute").click()
    page.locator(".answer table").wait_for()
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    page.close()
    return path


def main(run: pathlib.Path, artifact: pathlib.Path) -> int:
    """All pictures of the study in ``run``, and of a server for ``artifact``."""
    chromium = next((path for each in NAMES if (path := shutil.which(each))), None)
    if chromium is None:
        print("There is no Chromium here: apt-get install chromium-headless-shell", file=sys.stderr)
        return 2
    IMAGES.mkdir(exist_ok=True)
    code = 0
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        as_root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=as_root)
        try:
            report = write(run, pathlib.Path(place) / "report.html")
            for name in SHOTS:
                print(shoot(browser, report, name))
        except TrimtabError as error:
            print(f"{error} `make cast` makes the study in runs/minilm.", file=sys.stderr)
            code = 2
        try:
            if not artifact.is_dir():
                raise ArtifactError(f"There is no folder {artifact}.")
            with address_of(str(artifact), trust=True) as address:
                for name in SERVING:
                    print(shoot_server(browser, address, name))
        except TrimtabError as error:
            print(f"{error} `make demo` makes the artifact in runs/digits.", file=sys.stderr)
            code = 2
        browser.close()
    return code


if __name__ == "__main__":
    given = [pathlib.Path(word) for word in sys.argv[1:3]]
    sys.exit(main(*given, *[pathlib.Path("runs/minilm"), pathlib.Path("runs/digits/artifact")][len(given) :]))
