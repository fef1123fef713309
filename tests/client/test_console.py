"""The console: who drives is its first word, in large on a terminal, and it changes at once."""

import io
import logging
import os
import re
import subprocess
import sys
import threading

import pytest
from serl_client import console
from serl_client.console import COLOURS, Console, LiveDisplay

from tests.shared.common import PATIENCE, until

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def words(self):
        """All that was ever drawn, without the escapes."""
        return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", self.getvalue()).split()


def test_on_a_terminal_the_banner_is_the_first_word_in_three_lines_of_colour():
    for banner, colour in COLOURS.items():
        terminal = Terminal()
        Console("arm", terminal).show({"phase": "practise"}, banner)
        lines = terminal.getvalue().splitlines()
        assert terminal.words[0] == banner
        assert all(line.startswith(f"\x1b[1;{colour}m") and line.endswith("\x1b[0m\x1b[K") for line in lines[:3])
        assert not any("\x1b[1;" in line for line in lines[3:])


def test_the_block_with_its_banner_is_redrawn_in_place():
    terminal = Terminal()
    shown = Console("arm", terminal)
    shown.show({"phase": "practise"}, "POLICY")
    drawn = terminal.getvalue().count("\n")
    shown.show({"phase": "practise"}, "HUMAN")
    assert terminal.getvalue().count("\n") == 2 * drawn
    assert f"\x1b[{drawn}F" in terminal.getvalue()


@pytest.fixture
def size(monkeypatch):
    """size(columns, lines) of the terminal."""

    def size(*size):
        monkeypatch.setattr(console.Console, "_size", lambda _: os.terminal_size(size))

    return size


def test_a_warning_is_shown_whole_for_a_minute_unless_a_line_shows_its_cause(clock, size):
    size(40, 30)
    terminal, warning = Terminal(), "the arm holds; " + "look at it, then press r; " * 4
    shown = Console("arm", terminal)
    shown.emit(logging.makeLogRecord({"msg": "away", "levelno": logging.WARNING, "is_shown": True}))
    shown.show({"learner": "AWAY"})
    assert "last warning" not in terminal.getvalue()
    shown.emit(logging.makeLogRecord({"msg": warning, "levelno": logging.WARNING}))

    def drawn():
        terminal.seek(terminal.truncate(0))
        shown.show({"learner": "AWAY"})
        return " ".join(terminal.words)

    assert warning.strip() in drawn()
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", terminal.getvalue()).splitlines())) < 40
    clock.advance(console.WARNING_S)
    assert "warning" not in drawn()


def test_a_block_never_fills_the_whole_screen(size):
    for lines in (5, 12, 24):
        size(80, lines)
        terminal = Terminal()
        shown = Console("arm", terminal)
        shown.show({f"row {i}": "value" for i in range(40)}, "POLICY")
        assert terminal.getvalue().count("\n") == lines - 2


def test_without_a_terminal_the_banner_is_the_first_word_of_the_line():
    stream = io.StringIO()
    shown = Console("arm", stream)
    shown.show({"phase": "practise"}, "WAITING")
    shown.show({"phase": "practise"}, "POLICY")  # soon after: no line for each tick
    assert re.fullmatch(rf"\[arm\] {STAMP} WAITING \| phase: practise\n", stream.getvalue())


def test_without_a_terminal_a_line_is_short_and_says_only_what_has_changed(clock):
    stream, rows = io.StringIO(), {"phase": "practise", "long": "x" * 300, "episodes": "1", "of last 20": "y" * 100}
    shown = Console("arm", stream)
    for episodes in ("1", "1", "2", "2", "2"):
        shown.show({**rows, "episodes": episodes, "long": "x" * 300 + episodes})
        clock.advance(console.PLAIN_S)
    lines = [line.split(" | ")[1:] for line in stream.getvalue().splitlines()]
    assert lines[0] == ["phase: practise", "episodes: 1", f"of last 20: {'y' * 100}"]
    assert lines[1:] == [["episodes: 2"]]
    assert max(map(len, stream.getvalue().splitlines())) <= console.PLAIN_WIDTH


@pytest.mark.slow
def test_every_line_of_a_log_begins_with_who_and_when(capsys):
    code = "import logging; from serl_client import console; {}; logging.getLogger('x').warning('trouble')"
    for made in ("console.console('arm')", "console.log_as('arm', logging.WARNING)"):
        done = subprocess.run([sys.executable, "-c", code.format(made)], capture_output=True, text=True, check=True)
        assert re.fullmatch(rf"\[arm\] {STAMP} trouble\n", done.stderr)


def test_a_terminal_never_gets_an_escape_of_a_client(same_loggers, monkeypatch):
    terminal, evil = Terminal(), "eve\x1b[2J\n\x9b1m\u202e"
    monkeypatch.setattr(sys, "stderr", terminal)
    logging.getLogger().handlers.clear()
    console.log_as("server")
    shown = console.console("learner")
    logging.getLogger("client").warning("%s is silent", evil)
    try:
        raise ValueError(evil)
    except ValueError:
        logging.getLogger("client").exception("not handled")
    shown.show({"actors": evil})
    assert terminal.getvalue().count("eve?[2J ?1m?") == 2 + 1  # each log in one line, and the console's row
    assert terminal.getvalue().replace("\x1b[K", "").count("eve?[2J\n?1m?") == 2  # of two tracebacks
    assert not re.search(r"\x1b\[2J|\x9b|\u202e", terminal.getvalue())


def test_of_what_clients_cause_a_log_says_few_lines_and_how_many_it_left_out(clock, monkeypatch, caplog):
    monkeypatch.setattr(console, "QUIET_S", 10.0)
    log = console.throttled("clients")
    for name in [*"aab", *range(100)]:
        log.warning("%s is silent", name)
    log.warning("another kind, 100 %")
    clock.advance(10.0)
    log.warning("%s is silent", "%s")
    silent = ["a", "b", "0", "1", "2", "%s"]
    said = [f"{name} is silent" for name in silent]
    assert caplog.messages == [*said[:5], "another kind, 100 %", f"{said[5]} (98 more like it before)"]


def test_a_console_without_a_banner_begins_with_its_title():
    terminal = Terminal()
    Console("learner", terminal).show({"phase": "practise"})
    assert terminal.words[:2] == ["--", "learner"]


@pytest.mark.usefixtures("clock")  # it stands still: the next second never comes
def test_a_takeover_is_seen_within_a_tick_and_not_with_the_next_second():
    terminal, driver = Terminal(), ["IDLE"]
    with LiveDisplay(Console("arm", terminal), lambda: {"phase": "practise"}, lambda: driver[0]):
        for word in ("POLICY", "HUMAN", "POLICY", "WAITING"):
            driver[0] = word
            until(lambda word=word: [seen for seen in terminal.words if seen in COLOURS][-1:] == [word])


def test_a_terminal_that_takes_nothing_delays_nobody_who_logs():
    class Stalled(Terminal):
        def write(self, text):
            assert goes_on.wait(PATIENCE)
            return super().write(text)

    goes_on, terminal, log = threading.Event(), Stalled(), logging.getLogger("stalled")
    shown = Console("arm", terminal)
    log.addHandler(shown)
    try:
        with LiveDisplay(shown, lambda: {"phase": "practise"}):
            for row in range(2000):
                log.warning("row %d", row)
            goes_on.set()
        log.warning("afterwards")
    finally:
        log.removeHandler(shown)
    lines = re.findall(r"\[arm\] (.*)\x1b\[K$", terminal.getvalue(), re.MULTILINE)
    assert lines[-2:] == ["row 1999", "afterwards"]
    assert len(lines) <= 2000


def test_a_terminal_that_is_gone_is_no_error():
    class Gone(Terminal):
        def write(self, text):
            tried.set()
            raise OSError(5, "Input/output error")

    tried = threading.Event()
    with LiveDisplay(Console("arm", Gone()), lambda: {"phase": "practise"}, lambda: "POLICY"):
        assert tried.wait(PATIENCE)
    Console("arm", Gone()).show({"phase": "practise"})
