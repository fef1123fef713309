"""The script that starts both sides: in the panes of a tmux that it finds itself in, or in one terminal; and how either
side's end is the other's. The sides are small scripts here; tmux runs a server of its own."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples/experiments/sim_arm/start_tmux.sh"
PATIENCE = 30.0
WAITS = "trap 'echo {0} is interrupted; exit 130' INT TERM; echo {0} $@; sleep 60 >&- 2>&- & wait\n"
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


@pytest.fixture
def script(tmp_path):
    """script(learner=..., actor=...): the script beside two sides that run these lines of bash, or wait."""

    def script(**sides):
        for side in ("learner", "actor"):
            file = tmp_path / f"run_{side}.sh"
            file.write_text("#!/usr/bin/env bash\n" + sides.get(side, WAITS.format(side)))
            file.chmod(0o755)
        return shutil.copy(SCRIPT, tmp_path)

    return script


@pytest.fixture
def tmux(tmp_path):
    """tmux(*words) -> what it says, on a server of its own."""
    place = Path("/tmp") / f"tmux-{os.getpid()}-{time.monotonic_ns()}"  # the path of a socket is short
    place.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TMUX")}
    environment |= {"TMUX_TMPDIR": str(place), "TERM": "xterm"}

    def tmux(*words):
        return subprocess.run(
            ["tmux", *words], env=environment, capture_output=True, text=True, timeout=PATIENCE
        ).stdout

    yield tmux
    tmux("kill-server")
    shutil.rmtree(place)


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.05)
    return value


def panes(tmux):
    """{what a pane shows at first: its id}"""
    ids = tmux("list-panes", "-t", "outer", "-F", "#{pane_id}").split()
    return {tmux("capture-pane", "-p", "-t", each).split("\n")[0].split(" ")[0]: each for each in ids}


@needs_tmux
def test_inside_tmux_each_side_has_a_pane_of_its_own(script, tmux):
    tmux("new-session", "-d", "-s", "outer", "-x", "80", "-y", "24", f"{script()} seed=1; echo status $?; sleep 60")
    shown = until(lambda: found if len(found := panes(tmux)) == 2 and {"learner", "actor"} <= found.keys() else None)
    assert tmux("list-sessions", "-F", "#{session_name}").split() == ["outer"]
    for side, pane in shown.items():
        assert tmux("capture-pane", "-p", "-t", pane).startswith(f"{side} seed=1\n")


@needs_tmux
def test_ctrl_c_in_the_actors_pane_ends_the_learner_and_says_so(script, tmux):
    tmux("new-session", "-d", "-s", "outer", "-x", "80", "-y", "24", f"{script()} seed=1; echo status $?; sleep 60")
    shown = until(lambda: found if {"learner", "actor"} <= (found := panes(tmux)).keys() else None)
    tmux("send-keys", "-t", shown["actor"], "C-c")
    until(lambda: "status 130" in tmux("capture-pane", "-p", "-t", shown["learner"]))


def ended(command, **options):
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, **options
    )
    return done.returncode, done.stdout + done.stderr


def test_in_one_terminal_an_actor_that_fails_ends_the_learner(script):
    status, said = ended([script(actor="exit 3\n"), "seed=1"])
    assert status == 3
    assert "The actor has ended, and the learner is stopped. The same command goes on" in said


def test_in_one_terminal_a_learner_that_fails_ends_the_actor_and_its_status_counts(script):
    assert ended([script(learner="exit 4\n")])[0] == 4


def test_in_one_terminal_an_actor_that_is_done_waits_for_the_learner(script):
    status, said = ended([script(actor="exit 0\n", learner="sleep 0.3; echo summary; exit 5\n")])
    assert (status, "summary" in said) == (5, True)
