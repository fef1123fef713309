"""The script that starts both sides: in the panes of a tmux that it finds itself in, or in one terminal; and how either
side's end is the other's; what their consoles say. The sides are small scripts here; tmux runs a server of its own."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from serl_client.reach import Lookout
from serl_client.status import ActorStatus

from serl_launcher.training.monitor import Monitor
from tests.shared.common import PATIENCE, ROOT, until
from tests.shared.here import TRAIN

SCRIPT = ROOT / "examples/experiments/sim_arm/start_tmux.sh"
WAITS = "trap 'echo {0} is interrupted; exit 130' INT TERM; echo {0} $@; sleep 60 >&- 2>&- & wait\n"


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
def tmux():
    """tmux(*words) -> what it says, on a server of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # the path of a socket is short
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TMUX")}
        environment |= {"TMUX_TMPDIR": place, "TERM": "xterm"}

        def tmux(*words):
            return subprocess.run(
                ["tmux", *words], env=environment, capture_output=True, text=True, timeout=PATIENCE
            ).stdout

        yield tmux
        tmux("kill-server")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_inside_tmux_each_side_has_a_pane_of_its_own_and_ctrl_c_of_the_actor_ends_the_learner(script, tmux):
    def shown():
        """{what a pane shows at first: its id}"""
        ids = tmux("list-panes", "-t", "outer", "-F", "#{pane_id}").split()
        return {tmux("capture-pane", "-p", "-t", each).split("\n")[0]: each for each in ids}

    tmux("new-session", "-d", "-s", "outer", "-x", "80", "-y", "24", f"{script()} seed=1; echo status $?; sleep 60")
    until(lambda: shown().keys() == {"learner seed=1", "actor seed=1"}, every=0.05)
    assert tmux("list-sessions", "-F", "#{session_name}").split() == ["outer"]
    panes = shown()
    tmux("send-keys", "-t", panes["actor seed=1"], "C-c")
    until(lambda: "status 130" in tmux("capture-pane", "-p", "-t", panes["learner seed=1"]), every=0.05)
    screen = tmux("capture-pane", "-p", "-t", panes["learner seed=1"])
    assert "Interrupted: both sides are stopped. The same command goes on with the run." in screen.replace("\n", "")


REDRAWS = """
from serl_client.console import Console
shown = Console("arm")
for number in range(40):
    shown.show({f"row {row}": f"{number}" for row in range(30)}, "POLICY")
print("drawn", flush=True)
input()
"""


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_what_the_console_draws_again_does_not_fill_the_scrollback_of_a_small_pane(tmux):
    command = shlex.join([sys.executable, "-c", REDRAWS])
    tmux("new-session", "-d", "-s", "small", "-x", "80", "-y", "12", command)
    until(lambda: "drawn" in tmux("capture-pane", "-p", "-t", "small"), every=0.05)
    assert int(tmux("display-message", "-p", "-t", "small", "#{history_size}")) < 12


@pytest.mark.parametrize(
    ("sides", "status", "sentence"),
    [
        ({"actor": "exit 3\n"}, 3, "The actor has failed: see its last lines above. The learner is stopped. Mend"),
        ({"actor": "exit 130\n"}, 130, "Interrupted: both sides are stopped. The same command goes on with the run."),
        ({"learner": "exit 4\n"}, 4, ""),
        ({"actor": "exit 0\n", "learner": "sleep 0.3; echo summary; exit 5\n"}, 5, "summary"),
        ({"learner": "echo stopped\n"}, 0, "actor is interrupted"),
    ],
    ids=["an actor fails", "Ctrl-C", "a learner fails", "an actor is done and the learner goes on", "it is stopped"],
)
def test_in_one_terminal_the_end_of_a_side_is_the_end_of_both(script, sides, status, sentence):
    done = subprocess.run(
        [script(**sides), "seed=1"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == status
    assert sentence in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("driver", "is_shown"), [("POLICY", True), ("HUMAN", True), ("WAITING", False), ("IDLE", False)]
)
def test_an_actors_console_says_a_rate_of_what_moves_alone_and_only_warnings_whose_cause_is_there(driver, is_shown):
    client = SimpleNamespace(pending=(0, 0), fault="", state=SimpleNamespace(degraded="the disk is full"))
    lookouts = {name: Lookout(name, lambda: 0.0, list) for name in ("learner", "actions")}
    status = ActorStatus(phase="evaluate", mode="evaluate", driver=driver, rate=10.0)
    rows = TRAIN.rows(status, client, {}, lookouts)
    assert rows["control"] == "10.0 Hz, " * is_shown + "0 late ticks"
    assert (rows["phase"], rows["learner"]) == ("evaluate", "connected")
    assert rows["outbox"].endswith(": the disk is full")
    assert not {"warning", "actions"} & set(rows)
    status.warn("look at it")
    assert TRAIN.rows(status, client, {}, lookouts)["warning"] == "look at it"


def test_a_learners_console_says_no_rate_before_it_has_measured_one(clock):
    shown = []
    counters = SimpleNamespace(episodes=0, recent=lambda *_: [], sources=SimpleNamespace(buffers={}))
    console = SimpleNamespace(show=lambda rows: shown.append(rows["updates"]))
    monitor = Monitor(SimpleNamespace(), console, counters, SimpleNamespace(), SimpleNamespace())
    for updates in (8000, 8000, 8030):
        words = {"refused": 0, "mode": "idle", "wall_s": 0.0, "waits_for": "", "left": "", "version": 1, "actors": ""}
        monitor.show(None, updates=updates, evaluations={}, **words)
        clock.advance(3.0)
    assert shown == ["8000", "8000", "8030, 10/s"], "those of before a resume count in no rate"
