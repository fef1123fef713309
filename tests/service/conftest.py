"""Servers, and actors by hand; whatever a test opens is closed at its end."""

import contextlib

import pytest

from tests.shared.clients import RawActor
from tests.shared.servers import ServerProcess


@pytest.fixture
def server(serve):
    return serve(capacities={"online": 20_000, "demo": 1000})


@pytest.fixture
def process(tmp_path):
    """A server in a process of its own, which can be killed."""
    with contextlib.closing(ServerProcess(tmp_path / "run")) as made:
        yield made


@pytest.fixture
def act(spec, exits):
    """act(server, **options) -> a RawActor that was welcomed, when the directive is there."""

    def act(server, name="arm", **options):
        actor = exits.enter_context(RawActor(server.address, spec, name, **options))
        actor.welcome()
        server.direct()
        return actor

    return act
