"""Servers and their actors; whatever a test opens is closed at its end, the clients first."""

import contextlib

import pytest
from serl_client.client import TrainerClient

from tests.shared import keys as shared_keys
from tests.shared.clients import RawActor, connected, directed
from tests.shared.servers import ServerProcess, ServerThread


@pytest.fixture
def serve(tmp_path):
    """serve(**options) -> a server in a thread, in the folder `run`."""
    with contextlib.ExitStack() as stack:

        def serve(**options):
            made = ServerThread(tmp_path / "run", **options)
            stack.callback(made.close)
            return made

        yield serve


@pytest.fixture
def server(serve):
    return serve(capacities={"online": 20_000, "demo": 1000})


@pytest.fixture
def process(tmp_path):
    """A server in a process of its own, which can be killed."""
    made = ServerProcess(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def join(spec, tmp_path):
    """join(server, name) -> a TrainerClient that has got a directive to collect; `told=False`: it only tries."""
    with contextlib.ExitStack() as stack:

        def join(server, name="arm", *, outbox=None, spec=spec, told=True, **options):
            folder = tmp_path / (outbox or f"outbox-{name}")
            client = stack.enter_context(
                TrainerClient(server.address, actor=name, spec=spec, outbox=folder, **options)
            )  # fmt: skip
            if told:
                connected(client)
                server.direct()
                directed(client)
            return client

        yield join


@pytest.fixture
def act(spec):
    """act(server, **options) -> a RawActor that was welcomed, when the directive is there."""
    with contextlib.ExitStack() as stack:

        def act(server, name="arm", **options):
            actor = stack.enter_context(RawActor(server.address, spec, name, **options))
            actor.welcome()
            server.direct()
            return actor

        yield act


@pytest.fixture
def keys(tmp_path):
    """A folder with a key for everybody in PEOPLE, made by the tool."""
    return shared_keys.make(tmp_path / "keys")
