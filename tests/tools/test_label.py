"""tools/label.py: a verdict that comes late is durable, wins over earlier ones, and all of them are kept."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from serl_client import Outcome
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.errors import TrainerError

from serl_launcher.store.index import Index

LABEL = Path(__file__).resolve().parents[2] / "tools" / "label.py"
SERVE = """
import sys
from pathlib import Path
from serl_launcher.store.server import serve
serve(Path(sys.argv[1]), {"online": 1000}, public=sys.argv[2], local=sys.argv[3], inference="tcp://127.0.0.1:1")
"""


def label(port, run_dir, *arguments):
    """(exit status, what was said)."""
    command = [sys.executable, LABEL, "--port", str(port), "--run-dir", str(run_dir), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, (done.stdout + done.stderr).strip()


class Run:
    """A server over a run folder, which can be killed and started again."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.local = folder, f"ipc://{folder}/server"
        folder.mkdir()
        self.start()

    def start(self):
        command = [sys.executable, "-c", SERVE, str(self.folder), f"tcp://127.0.0.1:{self.port}", self.local]
        self.process = subprocess.Popen(command)
        self.ask(m.Status())

    def stop(self):
        self.process.kill()
        self.process.wait(10)

    def ask(self, message):
        deadline = time.monotonic() + 20
        with Connection(self.local, m.Hello(m.PROTOCOL, "learner", "trainer")) as link:
            while True:
                try:
                    return link.call(message, 2.0)
                except TrainerError:
                    assert time.monotonic() < deadline, "the server does not answer"
                    time.sleep(0.05)

    def verdicts(self):
        """{episode: (success, discard, whose word it is)}."""
        rows = [dict(zip(m.EPISODE, row, strict=True)) for row in self.ask(m.Sync(0, 0)).episodes]
        return {row["id"]: (row["success"], row["discard"], row["judged_by"]) for row in rows}


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    yield made
    made.stop()


@pytest.fixture
def actor(run, spec, tmp_path, make_segment):
    """An actor of the run that has delivered the finished episodes e0, a success, and e1."""
    with TrainerClient(f"tcp://127.0.0.1:{run.port}", actor="arm", spec=spec, outbox=tmp_path / "outbox") as client:
        deadline = time.monotonic() + 20
        while not client.connected:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.ask(m.Direct({"phase": "practise", "mode": "collect", "into": "online"}, None))
        client.push(Outcome("e0", True))
        client.push(make_segment("e0", ends="terminated"))
        client.push(make_segment("e1", ends="truncated"))
        assert client.drain(20)
        yield client


@pytest.mark.usefixtures("actor")
def test_a_late_failure_wins_a_later_success_wins_over_that_and_a_discard_over_all(run):
    assert run.verdicts()["e0"] == (True, False, "judge")
    for word, kept in (("failure", (False, False)), ("success", (True, False)), ("discard", (None, True))):
        assert label(run.port, run.folder, "e0", word) == (0, f"e0: {word}")
        assert run.verdicts() == {"e0": (*kept, "operator"), "e1": (None, False, "")}
    run.stop()
    run.start()
    assert run.verdicts()["e0"] == (None, True, "operator")
    outcomes = Index(run.folder / "store" / "index.sqlite").outcomes("e0")
    assert [(o.success, o.discard, o.judged_by) for o in outcomes] == [
        (True, False, "judge"), (False, False, "operator"), (True, False, "operator"), (None, True, "operator"),
    ]  # fmt: skip


def test_what_the_environment_says_afterwards_does_not_overrule_the_operator(run, actor):
    assert label(run.port, run.folder, "e1", "failure")[0] == 0
    actor.push(Outcome("e1", True))
    assert actor.drain(20)
    assert run.verdicts()["e1"] == (False, False, "operator")


@pytest.mark.usefixtures("actor")
def test_a_name_that_no_episode_has_is_refused_where_the_store_can_be_seen(run, tmp_path):
    status, said = label(run.port, run.folder, "e7", "success")
    assert (status, said.count("\n")) == (1, 0)
    assert "there is no episode 'e7'" in said
    assert "did you mean 'e" in said
    assert "the newest are e1, e0; tools/label.py --run-dir" in label(run.port, run.folder, "nothing", "success")[1]
    assert label(run.port, tmp_path / "robot", "e0", "failure")[0] == 0  # on another machine: the store is not here
    assert run.verdicts()["e0"] == (False, False, "operator")


@pytest.mark.usefixtures("actor")
def test_without_a_name_it_lists_the_episodes_with_what_is_said_of_them(run, tmp_path):
    label(run.port, run.folder, "e1", "discard")
    status, said = label(run.port, run.folder)
    lines = [line.split() for line in said.splitlines()]
    assert (status, [line[0] for line in lines]) == (0, ["e1", "e0"])
    assert lines[0][-2:] == ["discarded", "(operator)"]
    assert lines[1][1:] == ["practise", "4", "steps", "success", "(judge)"]
    assert "there is no episode in" in label(run.port, tmp_path / "robot")[1]
    assert "say what e0 was: success, failure, discard" in label(run.port, run.folder, "e0")[1]


def test_without_an_actor_or_without_a_learner_it_says_so(run):
    status, said = label(run.port, run.folder, "e0", "success")
    assert (status, said) == (1, "error: no actor has come to this run yet: there is no episode")
    run.stop()
    status, said = label(run.port, run.folder, "e0", "success")
    assert status == 1
    assert f"nobody listens at 127.0.0.1:{run.port}: start the learner" in said


def test_an_outcome_of_another_kind_of_bool_is_refused_where_it_is_pushed(actor):
    for outcome in (Outcome("e0", np.True_), Outcome("e0", None, np.False_), Outcome("e0", 1)):
        with pytest.raises(TypeError, match="bool"):
            actor.push(outcome)
    actor.push(Outcome("e0", False))
    assert actor.drain(20)
