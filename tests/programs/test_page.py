"""The page beside a learner: it is started with it, dies and comes again alone; its tool finds a run without one."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.page.conftest import Browser, knocking
from tests.programs.test_run import WORDS
from tests.shared.common import TOOLS, free_port

pytestmark = pytest.mark.slow
LINK = re.compile(r"operator, for 12 h: https?://[\w.]+:(\d+)/#(\S+)")


def opened(stack, port, token, keys=None):
    """A browser that follows a link; what it is welcomed with. keys: the folder of those of a page that speaks TLS."""
    browser = Browser(stack.enter_context(knocking(SimpleNamespace(port=int(port), keys=keys))), token)
    return browser, browser.welcome()


def test_a_page_is_started_with_the_learner_and_again_after_its_death_and_its_tool_finds_the_run(programs, keys):
    learner, port = programs.start("learner", *WORDS, f"page={free_port()}"), free_port()
    with ExitStack() as stack:
        (link,) = programs.until(lambda: LINK.findall(programs.said()))
        browser, welcome = opened(stack, *link)
        assert welcome == {"role": "operator", "run": "run"}
        programs.until(lambda: browser.ask("state")["alive"])
        assert browser.ask("state")["plan"][0]["name"] == "demonstrate"
        programs.kill("page")
        _, again = programs.until(lambda: len(found := LINK.findall(programs.said())) == 2 and found)
        assert again[1] != link[1]
        assert opened(stack, *again)[1] == welcome
        os.kill(page := programs.alive()["page"], signal.SIGTERM)  # as where a system signals all processes
        tool = [sys.executable, TOOLS / "page.py", programs.run_dir, "--port", str(port)]
        tool += ["--host", "0.0.0.0", "--keys", keys]
        beside = stack.enter_context(subprocess.Popen(tool, stdout=subprocess.PIPE, text=True))
        browser, _ = opened(stack, *LINK.search(beside.stdout.readline()).groups(), keys)
        programs.until(lambda: browser.ask("state")["alive"])
        beside.send_signal(signal.SIGINT)
        assert beside.wait(60) == 0
        assert programs.alive()["page"] == page, "the launcher decides when it ends"
        learner.send_signal(signal.SIGINT)
        programs.status(learner)
        programs.until(lambda: not programs.alive())
    assert "Traceback" not in programs.said()
    for file in programs.run_dir.rglob("*"):
        assert not file.is_file() or link[1].encode() not in file.read_bytes()
