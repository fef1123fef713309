"""What only a real robot can show, with a person beside it (docs/reference/manual.md). It needs RETAKE_ROBOT."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from serl_client.errors import RobotFault

from serl_launcher.config import composed, factory
from tests.shared.common import CONFIG, TOOLS

pytestmark = pytest.mark.manual
WORDS = shlex.split(os.environ.get("RETAKE_ROBOT", ""))
SHOWN_S = 10.0  # within which a fault has to show


@pytest.fixture(autouse=True)
def _there_is_a_robot():
    if not WORDS:
        pytest.skip("RETAKE_ROBOT names no robot: docs/reference/manual.md")


def confirmed(question):
    answer = input(f"\n>>> {question} [y/n] ")
    assert answer.strip().lower() == "y", f"{question}: {answer}"


def asked(what):
    input(f"\n>>> {what}, then press Enter ")


def checked(*words):
    """The tool that tries a robot, as a process."""
    command = [sys.executable, TOOLS / "check_robot.py", *WORDS, *words, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def robot():
    """The robot's Env, ready to move and at the start of an episode."""
    with factory(composed(CONFIG, ["actor=true", *WORDS]), "task.env")() as env:
        asked("The arm goes to its home: clear its way, and keep a hand on its emergency stop")
        env.recover()
        env.reset(0)
        yield env


def fault_of(env):
    """What the robot says is wrong with it, while it is asked to hold."""
    end = time.monotonic() + SHOWN_S
    while time.monotonic() < end:
        try:
            env.step(None)
        except RobotFault as fault:
            return str(fault)
    raise AssertionError("no fault was told")


def test_looking_moves_nothing_and_switches_no_motor():
    said = checked().communicate()[0]
    assert '"failed": 0' in said, said
    confirmed("Did the arm stay as it was, with its motors as they were?")


def test_it_goes_home_holds_and_takes_small_steps():
    asked("Each joint makes a tiny step, then the arm goes to its home and takes small steps: clear its way")
    said = checked("--move").communicate()[0]
    assert '"failed": 0' in said, said
    confirmed("Did it move slowly, and nowhere else?")


def test_it_holds_when_its_program_is_killed():
    asked("Each joint makes a tiny step, the arm goes to its home, and then its program is killed")
    with checked("--move", "--seconds", "60") as process:
        assert process.stdout is not None
        assert any("ok   stop" in line for line in process.stdout), "it never came to move"
        process.send_signal(signal.SIGKILL)
    confirmed("Does the arm hold where it was?")
    said = checked().communicate()[0]
    assert '"failed": 0' in said, "whoever comes next cannot reach it"


@pytest.mark.parametrize("how", ["Pull the arm's cable", "Press its emergency stop"])
def test_what_cuts_it_off_is_told_and_it_moves_again_only_after_ready(how, robot):
    asked(how)
    confirmed(f"Does this say what is wrong: {fault_of(robot)}")
    asked("Undo that, and push the arm a hand's breadth away, if its motors are off")
    time.sleep(2)
    confirmed("Did the arm stay where you left it?")
    asked("It moves again now: clear its way")
    robot.recover()
    robot.reset(0)
    confirmed("Did it go home slowly?")
