"""A learner in memory, clients of it and outboxes that are closed at the end."""

from contextlib import ExitStack, closing
from functools import partial

import pytest
from serl_client.outbox import Outbox

from tests.shared.clients import connected
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
def opened(tmp_path):
    """opened(folder, capacity) -> an outbox."""
    with ExitStack() as stack:
        yield lambda folder=tmp_path / "outbox", capacity=1 << 20: stack.enter_context(
            closing(Outbox(folder, capacity))
        )
