#!/usr/bin/env python
"""Takes the pictures of docs/guides/page.md: the page of a run, on a screen and on a phone, and the run's report.

tools/screenshots.py RUN [--report RUN] [--out FOLDER]

While its learner runs, the pictures show it at work; a report has the result once its run has ended. It needs the group
`dev`, and Debian's package chromium.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright
from serl_client.errors import ConfigError

from serl_launcher.error_log import in_one_sentence
from serl_launcher.report.page import write

CHROMIUM = "/usr/bin/chromium"
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
TOOL, PORT = Path(__file__).with_name("page.py"), 8087
LINK = re.compile(r"https?://localhost:\d+/#\S+")
PLACE = Path("docs/pictures")
COLOURS = 256  # of a picture, so that it is small
Scheme = Literal["light", "dark"]
PICTURES: dict[str, tuple[tuple[int, int], Scheme]] = {  # {name: (width and height of the window, scheme)}
    "page": ((1280, 1340), "light"), "page_phone": ((390, 844), "dark"), "report": ((1280, 1130), "light"),
}  # fmt: skip


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, on this machine")
    parser.add_argument("--report", type=Path, metavar="RUN", help="another run, whose report is shown (RUN)")
    parser.add_argument("--out", type=Path, default=PLACE, help=f"the folder of the pictures ({PLACE})")
    options = parser.parse_args()
    if not shutil.which(CHROMIUM):
        raise ConfigError("chromium is missing: apt-get install chromium")
    report = write(options.report or options.run).resolve().as_uri()
    with chromium() as browser, linked(options.run) as link:
        for name, (size, scheme) in PICTURES.items():
            path, tab = options.out / f"{name}.png", blank(browser, size, scheme)
            tab.goto(report if name == "report" else link)
            if name != "report":
                settle(tab)
            tab.screenshot(path=path)
            tab.context.close()
            Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium without a window; Playwright brings none of its own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


def blank(browser: Browser, size: tuple[int, int], scheme: Scheme) -> Page:
    """Open an empty tab that shares nothing with others. size: width and height of its window in pixels."""
    viewport: ViewportSize = {"width": size[0], "height": size[1]}
    return browser.new_context(viewport=viewport, color_scheme=scheme).new_page()


@contextmanager
def linked(run: Path) -> Iterator[str]:
    """Show a run, and give the operator's link."""
    command = [sys.executable, TOOL, run, "--port", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            found = LINK.search(page.stdout.readline())
            if found is None:
                raise ConfigError(f"{TOOL.name} prints no link")
            yield found[0]
        finally:
            page.terminate()


def settle(tab: Page) -> None:
    """Wait until all is shown: the numbers, and an image of each camera."""
    for selector in ("#numbers dd", "#curves path", "#episodes li"):
        tab.wait_for_selector(selector, state="attached")
    tab.wait_for_function("() => [...document.querySelectorAll('img')].every((each) => each.naturalWidth)")


if __name__ == "__main__":
    main()
