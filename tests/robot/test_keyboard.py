"""Terminal keys: what they say, that the terminal is given back, and how a person drives a robot with them."""

import os
import re
import subprocess
import sys
import termios
from types import SimpleNamespace

import numpy as np
import pytest
from serl_client import Feature
from serl_client.errors import ConfigError
from serl_client.person import Person
from serl_client.status import ActorStatus

from robot_infra.tasks import fake
from robot_infra.teleop import hands as hands_module
from robot_infra.teleop import keyboard as keyboard_module
from robot_infra.teleop.hands import Hands, make_devices
from robot_infra.teleop.keyboard import DIGITS, KEYS, LEGEND, MOTION_LEGEND, MOTIONS, TOGGLE, Keyboard, KeyboardDevice
from tests.shared.actors import FakeClient
from tests.shared.common import ROOT
from tests.shared.robots import Hand, build, point


@pytest.fixture
def typed(terminal):
    """typed(bytes) -> the keyboard, which has them to read."""
    with Keyboard(terminal[1]) as keyboard:
        yield lambda data: os.write(terminal[0], data) and keyboard


@pytest.fixture
def said(terminal, clock):
    """said((bytes, seconds before them), ...) -> what each of them says."""
    with Keyboard(terminal[1]) as keyboard:

        def say(*presses):
            heard = []
            for keys, seconds in presses:
                clock.sleep(seconds)
                os.write(terminal[0], keys)
                heard.append(keyboard.poll())
            return heard

        yield say


@pytest.mark.parametrize(
    ("keys", "events"),
    [
        (b"p", ["pause"]), (b"n", ["next"]), (b"s", ["success"]), (b"f", ["failure"]), (b"r", ["ready"]),
        (b"q", ["halt"]), (b"D", ["discard"]), (b"1", ["stage 1"]),  # caps lock
        (b"ss", ["success"]), (b"iisi", ["success"]), (b"ppp", ["halt"]),
        (b"sd", []), (b"s\n", []), (b"spq", ["halt", "halt"]),
        (b"xyz \n", []), (b"\x1b[D\x1b[A", []), (b"\x1bOS", []), (b"\x1b[15~", []), ("ü".encode(), []),
    ],
)  # fmt: skip
def test_a_key_alone_is_an_event_and_of_several_at_once_only_a_pause_counts(typed, keys, events):
    keyboard = typed(keys)
    assert (keyboard.poll(), keyboard.poll()) == (events, [])


def test_the_terminal_is_given_back_on_an_exception_and_twice(terminal):
    before = termios.tcgetattr(terminal[1])
    keyboard = Keyboard(terminal[1])

    def use():
        with keyboard:
            assert termios.tcgetattr(terminal[1]) != before
            assert termios.tcgetattr(terminal[1])[3] & termios.ISIG, "ctrl-C still interrupts"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    for _ in range(2):
        assert termios.tcgetattr(terminal[1]) == before
        keyboard.close()
    assert keyboard.poll() == []


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


def test_keys_are_for_those_who_ask_for_them(typed):
    keyboard = typed(b"isJt\x1b[A\x1bOBs\x1b[1;5C\x1b[D")
    assert keyboard.poll() == ["success"]
    assert keyboard.motions() == ["i", "j", "t", "i", "k", "l", "j"]
    assert (keyboard.poll(), keyboard.motions()) == ([], [])


@pytest.mark.parametrize("parts", [(b"\x1b", b"[D"), (b"\x1b[", b"D"), (b"\x1bO", b"D"), (b"\x1b[1;", b"5D")])
def test_an_arrow_that_comes_in_two_parts_discards_nothing(typed, parts):
    assert [typed(part).poll() for part in parts] == [[], []]
    assert typed(b" ").motions() == ["j"]


def test_the_key_escape_swallows_no_key_that_comes_later(said):
    assert said((b"\x1b", 0.0), (b"s", 0.6)) == [[], ["success"]]


def test_motions_that_nobody_asks_for_are_forgotten_in_the_end(typed):
    for _ in range(4):
        typed(b"i" * 100).poll()
    motions = typed(b"k").motions()
    assert (len(motions), motions[-1]) == (256, "k")


PASTED = b"\x1b[200~", b"\x1b[201~"
TEXT = (ROOT / "README.md").read_bytes()[:10_000]


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 4096])
def test_a_paste_in_brackets_says_nothing_however_it_comes(said, size):
    pasted = PASTED[0] + TEXT[:2000] + PASTED[1]
    pieces = [pasted[begin : begin + size] for begin in range(0, len(pasted), size)]
    assert not any(said(*((piece, 0.0003) for piece in pieces)))
    assert said((b"s", 0.4), (b"p", 0.0), (b"s", 1.0)) == [[], ["halt"], ["success"]]


def test_the_terminal_is_told_to_put_pastes_in_brackets_and_told_to_stop(terminal):
    with Keyboard(terminal[1]):
        assert os.read(terminal[0], 100) == b"\x1b[?2004h"
    assert os.read(terminal[0], 100) == b"\x1b[?2004l"


def test_a_paste_whose_end_is_lost_leaves_nobody_unheard(said):
    assert said((PASTED[0] + b"sss", 0.0), (b"p", 1.9), (b"p", 0.2)) == [[], [], ["halt"]]


@pytest.mark.parametrize("size", [5, 64, 1000, 4095, 4096])
def test_a_paste_without_brackets_judges_nothing_stops_nothing_moves_nothing_and_is_not_ready(terminal, clock, size):
    assert {*KEYS, *MOTIONS, TOGGLE} <= {*TEXT.decode()}
    with Keyboard(terminal[1]) as keyboard:
        heard, motions = [], []
        for begin in range(0, len(TEXT), size):
            os.write(terminal[0], TEXT[begin : begin + size])
            clock.sleep(0.03)
            heard += keyboard.poll()
            motions += keyboard.motions()
        assert (set(heard), motions) == ({"halt"}, [])
        for last in (b"s", b"r", b"n", b"q"):  # what may come late is no answer either
            os.write(terminal[0], last)
            clock.sleep(0.1)
            assert keyboard.poll() in ([], ["halt"])


def test_whoever_is_afraid_and_presses_pause_again_and_again_does_not_let_the_robot_go_on(terminal, spec, clock):
    with Keyboard(terminal[1]) as keyboard:
        person = Person(keyboard, FakeClient(spec), ActorStatus())

        def pauses(*presses):
            for keys, seconds in presses:
                clock.sleep(seconds)
                os.write(terminal[0], keys)
                person.listen()
                yield person.is_paused

        quick = [(b"p", 0.2)] * 9
        assert all(pauses(*quick))
        assert list(pauses((b"p", 2.0), *quick)) == [False, *[True] * 9], "it resumed, and was paused at once"
        assert all(pauses((b"pp", 2.0)))


@pytest.mark.parametrize(
    ("presses", "events"),
    [
        ([(b"q", 0), (b"q", 1.9)], ["halt", "stop"]),
        ([(b"q", 0), (b"q", 2.1), (b"q", 1.0)], ["halt", "halt", "stop"]),
        ([(b"qq", 0), (b"p", 0.9)], ["halt", "pause"]),
        ([(b"q", 0), (b"xq", 1.0), (b"q", 1.0)], ["halt", "halt", "halt"]),
    ],
    ids=["twice", "too late", "at once", "a burst between them"],
)
def test_the_first_q_holds_the_robot_and_a_second_one_ends_the_run(said, presses, events, caplog):
    assert said(*presses) == [[event] for event in events]
    assert "the robot holds: q again within 2 s ends the run; p resumes" in caplog.messages


def test_the_legend_names_every_key_and_none_means_two_things():
    assert len({*KEYS, *MOTIONS, *DIGITS, TOGGLE}) == len(KEYS) + len(MOTIONS) + len(DIGITS) + 1
    words = MOTION_LEGEND.split()
    assert all(key in words for key in (*MOTIONS, TOGGLE))
    assert [entry.split()[0] for entry in LEGEND.split("   ")] == ["p", "r", "n", "s", "f", "d", "q"] == list(KEYS)


# -- a person drives


@pytest.fixture
def at_keys(terminal, clock):
    """(teleop of a robot with x, y, z and gripper, read(keys, seconds): its action after so long with these keys)."""
    action = Feature((4,), names=("x", "y", "z", "gripper"), low=np.array(-1), high=np.array(1))
    with Keyboard(terminal[1]) as keyboard:
        teleop = Hands([KeyboardDevice(keyboard)], action, "ee_delta")
        teleop.reset(0, demonstrate=False)

        def read(keys, seconds):
            os.write(terminal[0], keys)
            clock.sleep(seconds)
            return None if (given := teleop.read(np.zeros(4, np.float32))) is None else given.tolist()

        yield teleop, read


STILL, FORWARD = [0, 0, 0, 0], [0.5, 0, 0, 0]


@pytest.mark.parametrize(
    "reads",
    [
        [(b"ig", 5, None), (b"i", 0, FORWARD), (b"ktt", 5, STILL)],  # the toggle counts
        [(b"", 0, None), (b"i", 0, FORWARD), (b"l", 0.1, [0.5, -0.5, 0, 0]), (b"", 0.1, [0, -0.5, 0, 0]),
         (b"", 0.1, STILL), *[(b"\x1b[B", 0.033, [-0.5, 0, 0, 0])] * 9],
        [(b"t", 0, STILL), (b"gu", 0, [0, 0, 0.5, 1]), (b"", 9, [0, 0, 0, 1]), (b"h", 0, [0, 0, 0, -1]),
         (b"t", 0, None), (b"o", 0, [0, 0, -0.5, 0])],
    ],
    ids=["pressed while nobody read", "a motion takes over for a moment, a held key goes on", "toggle and gripper"],
)  # fmt: skip
def test_what_a_person_types_moves_the_robot(at_keys, reads):
    assert [at_keys[1](keys, seconds) for keys, seconds, _ in reads] == [expected for _, _, expected in reads]


def test_an_episode_begins_with_the_policy_and_a_demonstration_at_rest(at_keys):
    teleop, read = at_keys
    assert read(b"ti", 0) == FORWARD
    teleop.reset(1, demonstrate=False)
    assert read(b"", 0) is None
    assert read(b"i", 0) == FORWARD
    teleop.reset(1, demonstrate=True)
    assert [read(keys, 1.0) for keys in (b"", b"i", b"")] == [None, FORWARD, STILL], "from its first motion on"


@pytest.mark.parametrize(
    ("word", "clock", "match"),
    [
        ("joypad", "real", "joypad is unknown; use keyboard, gamepad, spacemouse, leader, page, scripted"),
        ("keyboard", "simulated", "needs task.env.clock=real"),
        ("keyboard", "real", "needs a terminal"),
    ],
)
def test_an_operator_that_cannot_be_is_refused_in_one_sentence(word, clock, match, monkeypatch):
    monkeypatch.setattr(keyboard_module, "_in_front", lambda descriptor: False)
    with pytest.raises(ConfigError, match=match):
        fake.make(max_steps=9, noise=0.0, clock=clock, operator=word)


def test_a_keyboard_refuses_a_robot_whose_action_it_cannot_give(terminal, monkeypatch):
    monkeypatch.setattr(hands_module, "Keyboard", lambda: Keyboard(terminal[1]))
    bounds = {"low": np.array(-1), "high": np.array(1)}
    for action, named in (
        (Feature((2,), names=("x", "wrist"), **bounds), "x, wrist"),
        (Feature((6,), **bounds), "6 entries without names"),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            make_devices("keyboard", Hand(), SimpleNamespace(action=action, space="ee_delta"), clock="real")
    teleop, keys = make_devices("keyboard", Hand(), point(), clock="real")
    assert isinstance(teleop, Hands)
    before = termios.tcgetattr(terminal[1])
    env = build(teleop=teleop, operator=keys)
    env.close()
    assert termios.tcgetattr(terminal[1]) != before, "the terminal was given back"
