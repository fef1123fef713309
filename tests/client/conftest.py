"""A learner in memory, clients of it and outboxes that are closed at the end."""

import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
from serl_client.outbox import Outbox

from tests.shared.clients import connected
from tests.shared.common import PATIENCE, ROOT, TRAIN
from tests.shared.fake_learner import FakeLearner


@pytest.fixture
def learner():
    learner = FakeLearner()
    yield learner
    learner.stop()


@pytest.fixture
def connect(learner, join):
    """connect(**options) -> a client of the learner, which may not have connected yet."""
    return partial(join, learner, "robot", told=False)


@pytest.fixture
def client(connect):
    return connected(connect())


@pytest.fixture
def opened(tmp_path, closes):
    """opened(folder, capacity) -> an outbox."""
    return lambda folder=tmp_path / "outbox", capacity=1 << 20: closes(Outbox(folder, capacity))


@pytest.fixture
def acting(tmp_path):
    """acting(port, *words): an actor runs as a script starts it with &: its standard input is no terminal, and SIGINT
    is ignored. `said()` is its log. It ends with Ctrl-C."""

    @contextmanager
    def act(port, *words):
        said = tmp_path / "said"
        command = [sys.executable, TRAIN, "actor=true", f"port={port}", f"run_dir={tmp_path / 'run'}", *words]
        with open(said, "w") as file, subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        ) as actor:  # fmt: skip
            try:
                yield said.read_text
                actor.send_signal(signal.SIGINT)
                assert actor.wait(PATIENCE) == 130
            finally:
                actor.kill()

    return act
