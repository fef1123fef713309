"""A learner in memory, clients of it and outboxes that are closed at the end."""

import pytest
from serl_client.client import TrainerClient
from serl_client.outbox import Outbox

from tests.shared.clients import connected
from tests.shared.fake_learner import FakeLearner


@pytest.fixture
def learner():
    learner = FakeLearner()
    yield learner
    learner.stop()


@pytest.fixture
def connect(spec, tmp_path, learner):
    """Opens clients of the learner; they are closed at the end."""
    clients = []

    def open_client(address=None, **options):
        options = {"actor": "robot", "spec": spec, "outbox": tmp_path / "outbox", **options}
        clients.append(TrainerClient(address or learner.address, **options).__enter__())
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


@pytest.fixture
def client(connect):
    return connected(connect())


@pytest.fixture
def opened(tmp_path):
    """Opens outboxes, and closes them at the end."""
    outboxes = []

    def open_outbox(folder=tmp_path / "outbox", capacity=1 << 20):
        outboxes.append(Outbox(folder, capacity))
        return outboxes[-1]

    yield open_outbox
    for outbox in outboxes:
        outbox.close()
