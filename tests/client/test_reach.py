"""An actor that hears nothing says why, in the words of the doctor, and says when its learner is there again."""

import logging
import socket
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
import zmq
from serl_client import reach
from serl_client.client import TrainerClient
from serl_client.connection import tcp
from serl_client.errors import ConfigError, Refused
from serl_client.lockfile import lock_folder
from serl_client.reach import Lookout, look, why_silent

from serl_launcher.config import composed
from serl_launcher.launcher import check_ports
from tests.shared.common import CONFIG, PATIENCE, free_port, own_ports, until
from tests.shared.servers import ServerThread


@pytest.fixture
def lookout(clock, caplog):
    """lookout(port, ip) -> one that speaks at once, whose `is_there` says whether the learner is; `said` is the log."""
    caplog.set_level(logging.INFO)

    def make(port, ip="127.0.0.1", has_key=False, option="port"):
        learner, began = SimpleNamespace(is_there=False, heard=clock.monotonic()), clock.monotonic()

        def silence():
            learner.heard = clock.monotonic() if learner.is_there else learner.heard
            return 0.0 if learner.is_there else clock.monotonic() - max(began, learner.heard)

        made = Lookout("the learner", silence, lambda: why_silent(tcp(ip, port), has_key=has_key, option=option))
        clock.advance(reach.SILENCE)
        return made, learner, lambda: [record.getMessage() for record in caplog.records]

    return make


def test_a_closed_port_is_said_once_and_so_is_the_return(lookout, clock):
    assert str(Lookout("the learner", lambda: reach.SILENCE - 1, list)) == "connecting", "nothing is wrong yet"
    watcher, learner, said = lookout(port := free_port())
    watcher.watch()
    watcher.watch()
    (sentence,) = said()
    assert sentence.startswith(
        f"nothing is heard of the learner: nobody listens at 127.0.0.1:{port} (start the learner"
    )
    assert sentence.endswith("Ctrl-C ends it")
    assert str(watcher) == f"AWAY, never heard: nobody listens at 127.0.0.1:{port}"
    learner.is_there = True
    watcher.watch()
    assert (said()[1:], str(watcher)) == (["the learner answers"], "connected")
    learner.is_there = False
    watcher.watch()
    clock.advance(1.0)
    assert (len(said()), str(watcher)) == (2, "AWAY, last heard 1 s ago"), "not before the silence has lasted"
    clock.advance(reach.SILENCE)
    watcher.watch()
    assert said()[2].startswith("the learner answers no more: nobody listens")
    assert str(watcher).startswith(f"AWAY, last heard {reach.SILENCE + 1:.0f} s ago: nobody")
    watcher._refusal = lambda: "another run"
    watcher.watch()
    assert (len(said()), str(watcher).rpartition(": ")[2]) == (3, "another run"), "its client has said it"


def test_an_unknown_host_is_told(lookout):
    watcher, _, said = lookout(5588, "no-such-host.invalid")
    watcher.watch()
    assert "no-such-host.invalid is no known name" in said()[0]
    assert "ip=10.0.0.5" in said()[0]


def test_another_program_that_speaks_zeromq_is_no_learner(lookout):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        assert look("127.0.0.1", port, has_key=False).ok
        watcher, _, said = lookout(port)
        watcher.watch()
        assert f"127.0.0.1:{port} takes connections and does not answer" in said()[0]
        keyed, _, said = lookout(port, has_key=True)
        keyed.watch()
        assert "has no keys, and key= is given" in said()[-1]


def test_what_is_found_later_is_said_too_and_looks_are_rare(lookout, monkeypatch, clock):
    found = [reach.Look(False, "nobody listens"), reach.Look(True, "answers")]
    monkeypatch.setattr(reach, "look", lambda *arguments, **options: found.pop(0))
    watcher, _, said = lookout(1)
    watcher.watch()
    watcher.watch()
    assert len(said()) == len(found) == 1, "the second look comes later"
    clock.advance(reach.AGAIN)
    watcher.watch()
    assert "127.0.0.1:1 takes connections and does not answer" in said()[1]


def test_it_looks_by_itself_and_its_end_waits_for_no_look(lookout, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        assert goes_on.wait(PATIENCE)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(reach, "WATCH", 0.01)
    monkeypatch.setattr(reach, "greeted", slow)
    watcher, _, said = lookout(5588, "nowhere")
    with watcher:
        assert begun.wait(PATIENCE)
    assert said() == []
    goes_on.set()
    until(lambda: not any(thread.name == "lookout" for thread in threading.enumerate()))
    assert said() == [], "who has left hears no more"


@pytest.mark.parametrize(("ip", "shown"), [("::1", "[::1]"), ("gpu-box", "gpu-box")])
def test_ipv6_addresses_and_names_are_listened_on_reached_and_looked_at(spec, tmp_path, monkeypatch, ip, shown):
    """As host=::1 and ip=... say them; an actor asks for actions at the host by which it came."""
    known = socket.getaddrinfo  # the name gpu-box has no IPv4 address
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *to, **how: known(host.replace(ip, "::1"), *to, **how))
    with closing(ServerThread(tmp_path / "run", host="::1", inference="tcp://*:7")) as server, TrainerClient(
        tcp(ip, server.port), actor="arm", spec=spec, outbox=tmp_path / "outbox"
    ) as client:  # fmt: skip
        until(lambda: client.connected)
        assert client.inference == f"tcp://{shown}:7"
        assert look(ip, server.port, has_key=False).text.startswith(f"{shown}:{server.port} answers")
        config = composed(CONFIG, ["learner=true", "host=::1", f"port={server.port}"])
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{server.port} \(Address already in use\)"):
            check_ports(config)
        until(lambda: len(server.server.access.connections.places) == 1)
        assert server.server.access.report["refusals"] == {}, "who only looks is refused nothing"
        server.hang_up()
    check_ports(composed(CONFIG, ["learner=true", "host=::1", *own_ports()]))


def test_an_address_that_is_none_ends_the_actor_with_one_sentence(spec, tmp_path, caplog):
    with TrainerClient("tcp://no host:1", actor="arm", spec=spec, outbox=tmp_path / "outbox") as client:
        until(lambda: client._network.error)
        with pytest.raises(Refused, match="tcp://no host:1 is no address: say ip="):
            client.check()
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_an_actor_without_learner_terminal_or_interrupts_says_what_it_waits_for_and_ends_with_ctrl_c(acting):
    with acting(port := free_port()) as said:
        until(lambda: f"nobody listens at 127.0.0.1:{port}" in said())
    assert "motion keys" not in said()


@pytest.mark.slow
def test_of_a_learner_that_is_starting_on_the_same_machine_nobody_is_warned(acting, tmp_path):
    """As by ./start.sh: it has the run's folder, and listens some seconds later."""
    (tmp_path / "run").mkdir()
    with lock_folder(tmp_path / "run", str), acting(free_port()) as said:
        until(lambda: "the learner: starting, on this machine" in said())
        assert "nobody listens" not in said()


@pytest.mark.slow
def test_an_inference_port_that_is_closed_is_told_and_the_word_that_is_named_opens_it(learner, acting):
    """As behind a tunnel that has another port, or none, for actions."""
    learner.notice.directive.update(mode="collect", explore=True, weights=None)
    learner.inference_port = closed = free_port()
    with acting(learner.port, "task=fake") as said:
        until(lambda: f"nothing is heard of the inference process: nobody listens at 127.0.0.1:{closed} (" in said())
        assert "compare inference_port= there and here" in said()
        assert "nothing is heard of the learner" not in said()
    assert not learner.records
    with acting(learner.port, "task=fake", f"inference_port={learner.port}"):
        until(lambda: learner.records)


@pytest.mark.slow
def test_weights_that_do_not_come_are_told(learner, acting):
    learner.notice.directive.update(mode="collect", explore=True, weights=None)
    with acting(learner.port, "task=fake", "inference=local") as said:
        until(lambda: "nothing is heard of the learner's weights: the learner has published no weights yet" in said())
        learner._weightsrequest = lambda identity, request: None
        learner.tell(weights={"version": 4, "sha256": "a" * 64, "size": 10})
        until(lambda: "part 1 of 1 of weights 4 was asked for, and has not come" in said())
