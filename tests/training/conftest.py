"""The server of a run that has begun, lives of its trainer, and clients of it."""

import pytest

from tests.shared.common import PATIENCE, until
from tests.shared.servers import ServerProcess

from .life import CAPACITIES, Life, found


@pytest.fixture
def serve(spec):
    """serve(run_dir, **counts) -> the server of a run that has some episodes, in a process."""
    servers = []

    def make(run_dir, **counts):
        if not run_dir.exists():
            found(run_dir, spec, **counts)
        servers.append(ServerProcess(run_dir, **CAPACITIES))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture
def server(serve, tmp_path):
    return serve(tmp_path / "run")


@pytest.fixture
def live(spec):
    """live(server, plan) -> a Life in the server's run that has not begun."""
    lives = []

    def make(server, plan, **options):
        lives.append(Life(server.run_dir, server, options.pop("spec", spec), plan, **options))
        return lives[-1]

    yield make
    for life in lives:
        life.dying.set()
        if life._thread.ident is not None:
            life._thread.join(PATIENCE)


@pytest.fixture
def connect(join):
    """connect(server) -> a TrainerClient that has heard a directive."""

    def connect(server, name="arm"):
        client = join(server, name, told=False)
        until(lambda: client.state.directive["number"] > 2)  # those two are from before the trainer began
        return client

    return connect
