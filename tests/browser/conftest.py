"""A browser with tabs that note whatever went wrong in them: errors of scripts, and requests to anywhere else."""

import shutil
from contextlib import contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.page.conftest import served  # noqa: F401
from tests.shared.common import PATIENCE, until
from tools import screenshots

SIZES = {"phone": (390, 844), "screen": (1920, 1080)}
SCHEMES = ("dark", "light")
BAD = ("serious", "critical")  # what axe-core calls the impact of a finding
SMALL = """() => [...document.querySelectorAll("button, select, summary")].filter((each) => {
  const {width, height} = each.getBoundingClientRect();
  return width && (width < 44 || height < 44) && each.tagName !== "SUMMARY";
}).map((each) => each.textContent)"""


class Tab:
    """A page in a browser. `errors`: what its console and its scripts complained of; `requests`: URLs it asked for.

    wait: as common.until, which waits for a condition.
    """

    def __init__(self, page):
        self.wait = until
        self.page, self.errors, self.requests = page, [], []
        page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))
        page.set_default_timeout(1000 * PATIENCE)

    def until(self, condition, argument=None):
        """Wait until a function or an expression of JavaScript gives something true, and return that."""
        return self.wait(lambda: self.page.evaluate(condition, argument))

    def says(self, text, within="body"):
        """Wait until this text stands there."""
        self.until("([at, text]) => document.querySelector(at)?.innerText.includes(text)", [within, text])

    def check(self):
        """No serious finding of axe-core, nothing wider than the window, no target smaller than 44 pixels."""
        found = Axe().run(self.page).response["violations"]
        assert not [(each["id"], [n["html"] for n in each["nodes"]]) for each in found if each["impact"] in BAD]
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        assert self.page.evaluate(SMALL) == []


@pytest.fixture(scope="module")
def chromium():
    if not shutil.which(screenshots.CHROMIUM):
        pytest.skip("needs a browser: apt-get install chromium")
    with screenshots.chromium() as browser:
        yield browser


@contextmanager
def opened(browser, url, size="screen", scheme="light"):
    page = screenshots.blank(browser, SIZES[size], scheme)
    tab = Tab(page)
    page.goto(url)
    try:
        yield tab
    finally:
        page.context.close()


@pytest.fixture
def open_tab(chromium, exits):
    """open_tab(url, size, scheme) -> a Tab, which shows the URL; in it nothing may go wrong."""
    tabs = []

    def open_tab(url, *options):
        tabs.append(exits.enter_context(opened(chromium, url, *options)))
        return tabs[-1]

    yield open_tab
    assert [error for tab in tabs for error in tab.errors] == []
