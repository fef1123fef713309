"""Acks, sessions, fences and outboxes: every short history of the model keeps the promises, and the real outbox, stream
and server do in each of them what the model does."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from serl_client import messages as m
from serl_client import outbox as outbox_module
from serl_client import send_queue as stream_module
from serl_client.errors import Refused

from serl_launcher.service import connections, intake
from serl_launcher.service.router import Router
from tests.faults.beside_model import Real, shown
from tests.faults.exploring import Violation, drain, explore, fair, history
from tests.faults.protocol_model import Protocol

# Bounds within which every state is visited: (starts of each client, pushes of each life, faults).
SMALL = [
    pytest.param(((2,), 1, 2), id="one client that dies", marks=pytest.mark.slow),
    pytest.param(((1,), 2, 2), id="one client that lives on", marks=pytest.mark.nightly),
    pytest.param(((1, 1), 1, 1), id="two clients of one name", marks=pytest.mark.nightly),
    pytest.param(((2, 1), 1, 1), id="two clients, one of which is started again", marks=pytest.mark.nightly),
]
SHORT = (((1,), 2, 1), 13), (((2,), 1, 1), 999), (((1, 1), 1, 1), 7)  # with a depth
SHORTEST = (((1,), 2, 1), 6), (((2,), 1, 1), 8), (((1, 1), 1, 1), 3)
HISTORIES = 50  # for one server, before a new one is taken


@pytest.mark.parametrize("bounds", SMALL)
def test_no_history_breaks_a_promise_and_each_one_goes_on_to_the_end(bounds):
    assert explored_to_the_end(Protocol(*bounds)) > 10_000


def explored_to_the_end(protocol):
    """How many states there are. Raises Violation."""
    found, delivered = explore(protocol), set()
    for state in found:
        try:
            drain(protocol, state, delivered)
        except Violation as violation:
            raise Violation(f"{violation}, after {history(found, state)}") from None
    return len(found)


# ---- mutations of the model, each of which has to be found out: of what is safe, of who is fenced, of what goes on


class KeepsTheWatermarkOfWhatWasLost(Protocol):
    def restored(self, server):
        sessions = (session._replace(log=session.log[: session.kept]) for session in server.sessions)
        return server._replace(sessions=tuple(sessions))


class StopsTheLaterClient(Protocol):
    def outranked(self, state, name, who):
        return "Replaced" * any(other.speaks and other.session != name for other in state.server.peers)


class StopsWhoWorks(Protocol):
    def outranked(self, state, name, who):
        later = any(
            other.speaks and state.position(other.session) > state.position(name) for other in state.server.peers
        )
        return "Replaced" * later


class NeverSendsAgain(Protocol):
    def welcome(self, client, expected):
        return super().welcome(client, expected)._replace(sending=client.sending)

    def stall(self, state, who):
        return state


@pytest.mark.parametrize("mutation", Protocol.__subclasses__(), ids=lambda mutation: mutation.__name__)
def test_a_protocol_with_one_fault_is_found_out(mutation):
    with pytest.raises(Violation):
        assert [explored_to_the_end(mutation(*bounds)) for bounds, _ in SHORT]


# ---- the implementation, step by step beside the model


@pytest.fixture
def real(spec, make_segment, monkeypatch):
    """real() -> a Real that begins a new history; on a memory disk where there is one."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    record = sum(len(part) for part in m.encode_record(0, make_segment("0" * len("000000a0"), 0, 0, 1)))
    for module, name in ((intake, "MAX_UNACKNOWLEDGED"), (connections, "WINDOW")):
        monkeypatch.setattr(module, name, Protocol.window * record)
    monkeypatch.setattr(connections, "LEAST_WINDOW", 1)
    monkeypatch.setattr(outbox_module, "SLICE_BYTES", 1)
    monkeypatch.setattr(stream_module, "STALL", float("inf"))
    monkeypatch.setattr(os, "fdatasync", lambda _: _fail() if made and made[-1].disk_fails else None)
    monkeypatch.setattr(connections.Connections, "living", property(lambda _: made[-1].living if made else set()))
    monkeypatch.setattr(Router, "tell", lambda *arguments: made[-1].send(*arguments[:3]) is None)
    made = []

    def begin():
        if not made or made[-1].played >= HISTORIES:
            if made:
                made[-1].close()
            made.append(Real(folder / str(len(made)), spec, make_segment))
        made[-1].begin()
        return made[-1]

    yield begin
    if made:
        made[-1].close()
    shutil.rmtree(folder)


def _fail():
    raise OSError(28, "No space left on device")


def play(protocol, real, actions):
    """Both take the same way. Raises AssertionError where they part."""
    state, done = protocol.initial, []
    actions = actions if callable(actions) else iter(actions)
    while (action := actions(state) if callable(actions) else next(actions, None)) is not None:
        state = protocol.step(state, action)
        done.append(action)
        try:
            real.act(action, state)
        except Refused as error:
            raise AssertionError(f"{error}, after {done}") from error
        assert real.seen() == shown(state), done
    return state


def short_ones(bounded):
    """(protocol, history): together they take every step that is possible within some depth."""
    for bounds, depth in bounded:
        protocol = Protocol(*bounds)
        found = explore(protocol, depth)
        inner = {entry[0] for entry in found.values() if entry}
        for state in inner:
            for action in protocol.actions(state):
                after = protocol.step(state, action)
                if found[after] != (state, action) or after not in inner:  # or else it is a part of a longer one
                    yield protocol, [*history(found, state), action]


def wild_one(seed):
    """A protocol, and what chooses its next action: sixty at random, then a fair end."""
    protocol, generator = Protocol((3, 3), 4, 12), random.Random(seed)
    left = iter(range(60))

    def choose(state):
        if next(left, None) is None:
            return fair(protocol, state)
        return generator.choice(list(protocol.actions(state)) or [fair(protocol, state)])

    return protocol, choose


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounded", "count"), [(SHORTEST, 150), pytest.param(SHORT, 2000, marks=pytest.mark.nightly)], ids=["short", "all"]
)
def test_the_implementation_takes_every_short_step_as_the_model_does(real, bounded, count):
    for protocol, actions in short_ones(bounded):
        play(protocol, real(), actions)
        count -= 1
    assert count < 0


@pytest.mark.parametrize("seed", range(10))
def test_the_implementation_goes_a_long_way_as_the_model_does_and_delivers_all(real, seed):
    protocol, choose = wild_one(seed)
    beside = real()
    state = play(protocol, beside, choose)
    made = {f"{'ab'[who]}{life}": n for who, client in enumerate(state.clients) for life, n in enumerate(client.made)}
    assert beside.rows() == {name: list(range(count)) for name, count in made.items() if count}
