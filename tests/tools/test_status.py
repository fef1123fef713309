"""tools/status.py: what it says of a learner that is up, that lacks somebody, and that is down."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.errors import TrainerError

from tests.shared.common import free_port

STATUS = Path(__file__).resolve().parents[2] / "tools" / "status.py"
SERVE = """
import sys
from pathlib import Path
from serl_launcher.store.server import serve
serve(Path(sys.argv[1]), {"online": 1000}, public=sys.argv[2], local=sys.argv[3], inference="tcp://127.0.0.1:1")
"""


def status(port, *arguments):
    """(exit status, what was said)."""
    command = [sys.executable, STATUS, "--port", str(port), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


class Learner:
    """A server process, and the learner's other processes as far as the server can tell: `join(name)` is one."""

    def __init__(self, run_dir):
        self.port, self.local = free_port(), f"ipc://{run_dir}/server"
        self.address = f"tcp://127.0.0.1:{self.port}"
        run_dir.mkdir()
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, run_dir, self.address, self.local])
        self.links = {}
        self.join("trainer")

    def join(self, name):
        self.links[name] = Connection(self.local, m.Hello(m.PROTOCOL, "learner", name))
        return self.ask(name, m.Status()).report

    def ask(self, name, message):
        deadline = time.monotonic() + 20
        while True:
            try:
                return self.links[name].call(message, 2.0)
            except TrainerError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def close(self):
        for link in self.links.values():
            link.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def learner(tmp_path):
    made = Learner(tmp_path / "run")
    yield made
    made.close()


def test_a_learner_without_an_actor_says_what_is_missing(learner):
    code, said = status(learner.port)
    assert code == 0
    assert "new: no actor has come yet" in said
    assert "missing    the inference process" in said
    assert "missing    an actor: start one with run_actor.sh" in said
    assert "the trainer process" not in said


def test_who_is_there_what_it_reports_and_what_lags(learner, spec, tmp_path):
    with TrainerClient(learner.address, actor="left", spec=spec, outbox=tmp_path / "outbox") as client:
        client.report = {"directive": 1, "rate": 9.98765, "warning": ""}
        deadline = time.monotonic() + 20
        while not client.connected:
            client.wait(0.05)
            assert time.monotonic() < deadline
        learner.join("inference")
        learner.links["inference"].send(m.Heartbeat({"version": 0}))
        for phase in ("first", "second"):
            learner.ask("trainer", m.Direct({"phase": phase, "mode": "collect", "into": "online"}, None))
        while "rate" not in (said := status(learner.port)[1]):
            assert time.monotonic() < deadline
        report = json.loads(status(learner.port, "--json")[1])
    assert "phase      second (collect)" in said
    assert "source     online: 0 of 1,000 steps, 0 evicted" in said
    assert re.search(r"actor      left: seen \d+\.\d s ago", said)
    assert ", directive 1, rate 10.0\n" in said
    assert "lags       left: directive 1, the newest is 2" in said
    assert "missing" not in said
    assert {client["actor"] for client in report["clients"]} == {"left", "trainer", "inference"}


def test_who_is_silent_is_missing(learner, spec):
    actor = Connection(learner.address, m.Hello(m.PROTOCOL, "actor", "left", "e" * 32, "o" * 32, "", spec.to_dict()))
    actor.call(m.Status(), 5.0)
    actor.close()
    deadline = time.monotonic() + 20
    said = ""
    while "missing    left: silent for" not in said or "missing    the trainer process" not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
        said = status(learner.port)[1]


def test_a_learner_that_is_down_is_told_by_its_run_folder(tmp_path):
    port, run = free_port(), tmp_path / "run"
    code, said = status(port)
    assert code == 1
    assert said.startswith(f"nobody listens at 127.0.0.1:{port}: start the learner; if it runs, compare port= there")
    assert "no-such-host.invalid is no known name" in status(port, "--ip", "no-such-host.invalid")[1]
    assert "tcp://not a host:1 is no address: say ip=" in status(1, "--ip", "not a host")[1]
    assert "There is no run in" in status(port, "--run-dir", run)[1]
    run.mkdir()
    assert "No learner has ever run in" in status(port, "--run-dir", run)[1]
    (run / "lock").write_text("4711")
    assert "start it again with the same command" in status(port, "--run-dir", run)[1]
    (run / "summary.json").touch()
    assert "has ended: see its summary.json" in status(port, "--run-dir", run)[1]
    (run / "config.yaml").touch()  # a later start, which has not ended
    os.utime(run / "summary.json", (1, 1))
    assert "start it again with the same command" in status(port, "--run-dir", run)[1]
    (run / "evaluation.json").touch()
    assert "has ended: see its evaluation.json" in status(port, "--run-dir", run)[1]
    with open(run / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, said = status(port, "--run-dir", run)
    assert code == 1
    assert f"Process 4711 holds {run}, but does not answer at this address" in said
