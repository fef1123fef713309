"""Terminal keys: what they say, and that the terminal is given back."""

import os
import subprocess
import sys
import termios
import time

import pytest

from robot_infra.teleop.keyboard import KEYS, LEGEND, MOTION_LEGEND, MOTIONS, TOGGLE, Keyboard


@pytest.fixture
def terminal():
    """A pseudo-terminal: the end that a person types into, and the end that the program reads."""
    person, program = os.openpty()
    yield person, program
    os.close(person)
    os.close(program)


def test_keys_become_events_in_order(terminal):
    person, program = terminal
    with Keyboard(program) as keyboard:
        os.write(person, b"pnsfdq")
        assert keyboard.poll() == ["pause", "next", "success", "failure", "discard", "stop"]
        assert keyboard.poll() == []


def test_caps_lock_does_not_keep_anybody_from_stopping(terminal):
    person, program = terminal
    with Keyboard(program) as keyboard:
        os.write(person, b"Q")
        assert keyboard.poll() == ["stop"]


@pytest.mark.parametrize("typed", [b"xyz \n", b"\x1b[D\x1b[A", b"\x1bOS", b"\x1b[15~", "ü".encode()])
def test_other_keys_say_nothing(terminal, typed):
    person, program = terminal
    with Keyboard(program) as keyboard:
        os.write(person, typed)
        assert keyboard.poll() == []


def test_asking_does_not_wait(terminal):
    with Keyboard(terminal[1]) as keyboard:
        start = time.monotonic()
        assert keyboard.poll() == []
        assert time.monotonic() - start < 0.5


def test_the_terminal_is_given_back_on_an_exception_and_twice(terminal):
    before = termios.tcgetattr(terminal[1])
    keyboard = Keyboard(terminal[1])

    def use():
        with keyboard:
            assert termios.tcgetattr(terminal[1]) != before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert termios.tcgetattr(terminal[1]) == before
    keyboard.close()
    assert termios.tcgetattr(terminal[1]) == before
    assert keyboard.poll() == []


def test_ctrl_c_still_interrupts(terminal):
    with Keyboard(terminal[1]):
        assert termios.tcgetattr(terminal[1])[3] & termios.ISIG


def test_a_stdin_that_is_no_terminal_gives_no_events():
    reader, writer = os.pipe()
    os.write(writer, b"q")
    with Keyboard(reader) as keyboard:
        assert keyboard.poll() == []
    os.close(reader)
    os.close(writer)
    assert Keyboard(reader).poll() == []  # a closed one neither


def test_a_terminal_that_goes_away_is_no_error():
    person, program = os.openpty()
    with Keyboard(program) as keyboard:
        os.close(person)
        assert keyboard.poll() == []
        assert keyboard.poll() == []
    os.close(program)


def test_a_job_in_the_background_neither_stops_nor_reads():
    code = """
import os, pty, sys
child, _ = pty.fork()
if child == 0:  # leads a session on the new terminal
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        from robot_infra.teleop.keyboard import Keyboard
        with Keyboard() as keyboard:
            os._exit(len(keyboard.poll()))
    os._exit(os.waitpid(job, os.WUNTRACED)[1] != 0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_keys_are_for_those_who_ask_for_them(terminal):
    person, program = terminal
    with Keyboard(program) as keyboard:
        os.write(person, b"ipJt\x1b[A\x1bOBs\x1b[1;5C\x1b[D")
        assert keyboard.poll() == ["pause", "success"]
        assert keyboard.motions() == ["i", "j", "t", "i", "k", "l", "j"]
        assert (keyboard.poll(), keyboard.motions()) == ([], [])


@pytest.mark.parametrize("parts", [(b"\x1b", b"[D"), (b"\x1b[", b"D"), (b"\x1bO", b"D"), (b"\x1b[1;", b"5D")])
def test_an_arrow_that_comes_in_two_parts_discards_nothing(terminal, parts):
    person, program = terminal
    with Keyboard(program) as keyboard:
        for part in parts:
            os.write(person, part)
            assert keyboard.poll() == []
        assert keyboard.motions() == ["j"]


def test_motions_that_nobody_asks_for_are_forgotten_in_the_end(terminal):
    person, program = terminal
    with Keyboard(program) as keyboard:
        for _ in range(4):
            os.write(person, b"i" * 100)
            keyboard.poll()
        os.write(person, b"k")
        motions = keyboard.motions()
        assert (len(motions), motions[-1]) == (256, "k")


def test_no_key_means_two_things():
    assert len({*KEYS, *MOTIONS, TOGGLE}) == len(KEYS) + len(MOTIONS) + 1


def test_the_legend_names_every_key():
    words = MOTION_LEGEND.split()
    assert all(key in words for key in (*MOTIONS, TOGGLE))
    assert [entry.split()[0] for entry in LEGEND.split("   ")] == ["p", "n", "s", "f", "d", "q"] == list(KEYS)
