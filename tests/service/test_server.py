"""Actors and the server on loopback: what is lost, doubled or blocked when something breaks.

What is known to lose data in other systems (E1, E2, ...) is in test_peer_faults.py.
"""

import dataclasses
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zmq
from serl_client import Feature, network, wire
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.episode import BEYOND
from serl_client.errors import Disconnected, Refused, ServerFailed, VersionMismatch
from serl_client.outbox import Outbox

from serl_launcher.store.layout import GAP
from tests.shared import oracle
from tests.shared.clients import RawActor, connected, own_name, push_all, push_episodes
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.data import blank_segment, changed, make_episode, make_segment, tiny_spec

FIRST, SECOND = "a" * 32, "b" * 32  # sessions


def assert_whole(server, client, count):
    """Every episode of the client is there once, whole and in order, and nothing else is."""
    assert server.stored() == {own_name(client, i): list(range(8)) for i in range(count)}
    rows = oracle.whole(server.run_dir / "store")
    keys = {id: {step.origin[0] for step in rows.steps[row["number"]]} for id, row in rows.episodes.items()}
    assert keys == {own_name(client, i): {float(i)} for i in range(count)}


# -- processes


@pytest.mark.slow
def test_a_server_that_is_stopped_and_killed_again_and_again_loses_and_doubles_nothing(process, join, monkeypatch):
    monkeypatch.setattr(network, "SILENCE", 1.5)
    client, generator = join(process), np.random.default_rng(0)
    for i in range(120):
        push_episodes(client, [i])
        time.sleep(generator.uniform(0, 0.01))  # so that it dies at any point
        if i == 50:
            process.signal(signal.SIGSTOP)
            until(lambda: not client.connected)  # longer than SILENCE
            process.signal(signal.SIGCONT)
        if i % 20 == 19:
            process.kill()
            process.start()
    assert client.drain(PATIENCE)
    assert_whole(process, client, 120)
    known = process.episodes().values()
    assert [e["success"] for e in known] == [1, 0] * 60
    assert all(e["closed"] and e["final"] and e["terminated"] for e in known)


ACTOR = """
import sys
from pathlib import Path
from serl_client.client import TrainerClient
from tests.shared import clients, data
with TrainerClient(sys.argv[1], actor="arm", spec=data.tiny_spec(), outbox=Path(sys.argv[2])) as client:
    print(client.session, flush=True)
    clients.directed(client)
    for number in range(100_000):
        clients.push_episodes(client, [number], directive=client.state.directive["number"])
        client.wait(0.002)
"""


@pytest.mark.slow
def test_an_actor_that_is_killed_leaves_a_prefix_which_its_next_life_delivers(process, join, tmp_path):
    sessions = []

    for life in range(3):
        words = [sys.executable, "-c", ACTOR, process.address, tmp_path / "outbox-arm"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as actor:
            sessions.append(actor.stdout.readline().strip())
            if life == 0:
                until(lambda: process.report()["clients"])
                process.direct()
            until(lambda: sum(sessions[-1][:8] in id for id in process.episodes()) > 10)
            if life == 1:
                process.kill()  # and the server with it
                time.sleep(0.1)  # the actor makes some more
            actor.kill()
        if life == 1:
            process.start()
    last = join(process)
    push_episodes(last, [0])
    assert last.drain(PATIENCE)
    until(lambda: all(e["closed"] for e in process.episodes().values()))
    found, known = process.stored(), process.episodes()
    for session in sessions:
        mine = sorted(name for name in found if session[:8] in name)
        assert mine == [f"arm-{session[:8]}-{i:06d}" for i in range(len(mine))], "a prefix, without holes"
        assert len(mine) > 10
        assert all(found[name] == list(range(8)) for name in mine[:-1])
        assert found[mine[-1]] in (list(range(4)), list(range(8)))
        if len(found[mine[-1]]) == 4:
            assert (known[mine[-1]]["truncated"], known[mine[-1]]["terminated"], known[mine[-1]]["final"]) == (1, 0, 0)


@pytest.mark.slow
def test_a_full_disk_is_degraded_nothing_false_is_acknowledged_and_space_brings_it_back(process, join):
    client = join(process)
    push_episodes(client, [0])
    assert client.drain(PATIENCE)
    with process.full_disk():
        push_episodes(client, range(1, 10))
        until(lambda: "No space left" in client.state.degraded)
        assert client.pending[0] == 27
        assert "No space left" in process.report()["degraded"]
    assert client.drain(PATIENCE)
    until(lambda: client.state.degraded == "")
    assert_whole(process, client, 10)


@pytest.mark.slow
def test_a_gap_is_answered_once_and_only_with_what_is_durable(process, act):
    actor = act(process)
    with process.full_disk():
        actor.push(0, make_segment("e0"))
        actor.push(2, make_segment("e0", start=8))
        until(lambda: process.report()["degraded"])
        assert actor.hear() == 0
        assert actor.acks == [], "nothing is durable: not even the number of what is missing may be told"
    actor.told(0, resend=True)
    actor.push(0, make_segment("e0"))
    actor.told(1)
    actor.push(2, make_segment("e0", start=8))
    actor.told(1, resend=True)
    for _ in range(2):
        actor.push(2, make_segment("e0", start=8))
        actor.link.call(m.Status(), 5.0)
    actor.push(1, make_segment("e0", start=4), make_segment("e0", start=8, ends="terminated"))
    until(lambda: actor.hear() == 3)
    assert (1, True) not in actor.acks, "once is enough"


# -- records that are wrong

FARTHEST = 1 + 2 * BEYOND  # from the middle of an action's bounds, which are -1 and 1


@pytest.mark.parametrize("side", [-1, 1])
def test_an_action_may_be_as_far_outside_of_its_bounds_as_the_error_says(side):
    changed(make_segment("e0"), "action", side * FARTHEST).check(tiny_spec())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *(
            (changed(make_segment("e0"), column, value), f"{column} must be finite")
            for column in (STATE, "time", "reward", "action") for value in (np.nan, np.inf, -np.inf)
        ),
        *((changed(make_segment("e0"), "action", side * 1.001 * FARTHEST), "outside of them") for side in (-1, 1)),
        (make_segment(weights=-1), "numbers from 0 on"),
        (make_segment(weights=2**63), "numbers from 0 on"),
    ],
)  # fmt: skip
def test_a_value_that_no_actor_gives_is_refused_by_its_column_and_the_server_goes_on(server, act, wrong, says):
    (actor := act(server)).push(0, wrong)
    assert says in actor.refused()
    assert server.episodes() == {}


LIMITED = tiny_spec(
    observation={STATE: Feature((8,), low=-100, high=[9.0] * 7 + [np.inf]), "observation.count": Feature((), "int32")},
    extras={"force": Feature((2,), names=("x", "y"), low=-50, high=50)},
)
BEYOND_LIMITS = {
    STATE: (10, f"{STATE} [0] is 10 at step 1, beyond its limit of 9"),
    "observation.count": (2_000_000, "observation.count is 2e+06 at step 1, beyond its limit of 1e+06"),
    "force": ([0, 51], "force (y) is 51 at step 1, beyond its limit of 50"),
    "reward": (-2e6, "reward is -2e+06 at step 1, beyond its limit of -1e+06"),
    "time": (-1e308, "time is -1e+308 s at step 1, beyond its limit of -1e+11 s"),
}


@pytest.mark.parametrize("column", BEYOND_LIMITS)
def test_a_number_beyond_its_limit_is_acknowledged_and_its_episode_set_aside(server, column):
    value, reason = BEYOND_LIMITS[column]
    with RawActor(server.address, LIMITED) as actor:
        limits = actor.welcome().spec["observation"][STATE]
        assert (limits["low"], limits["high"][0]) == ([-100.0] * 8, 9.0)
        server.direct()
        wrong, right = (blank_segment(LIMITED, name, ends="terminated") for name in ("bad", "good"))
        actor.push(0, changed(wrong, column, value), right)
        actor.told(2)
    known = server.episodes()
    assert (known["bad"]["discard"], known["bad"]["judged_by"]) == (1, f"learner: {reason}")
    assert (known["good"]["discard"], known["bad"]["steps"]) == (0, 2)


def test_a_clock_that_goes_backwards_is_kept_and_its_steps_are_marked_as_gaps(server, act):
    (actor := act(server)).push(0, changed(make_segment("e0"), "time", -5.0))  # 0, 1, -5, 3
    later = make_segment("e0", start=4, ends="terminated")
    actor.push(1, dataclasses.replace(later, time=later.time - 100))
    actor.told(2)
    (steps,) = oracle.whole(server.run_dir / "store").steps.values()
    assert [step.record["time"] for step in steps] == [0, 1, -5, 3, -96, -95, -94, -93]
    assert [step.index for step in steps if step.record["flags"] & GAP] == [2, 4]


def test_a_sensor_that_fails_ends_the_episode_before_it_and_its_actor_goes_on(server, join, caplog):
    client = join(server)
    name, (first, *others) = own_name(client, 0), make_episode(own_name(client, 1), 1)
    push_all(client, [
        make_segment(name, 0), changed(make_segment(name, 0, 4), STATE, np.nan), make_segment(name, 0, 8),
        make_segment(name, 0, 12, ends="terminated"), changed(first, "action", 1.5), *others,  # near its bounds
    ])  # fmt: skip
    assert client.drain(PATIENCE)
    known = server.episodes()[name]
    assert server.stored() == {name: list(range(4)), own_name(client, 1): list(range(8))}
    assert (known["closed"], known["truncated"], known["final"]) == (1, 1, 0)
    assert f"{name} ends before row 4: observation.state must be finite" in caplog.text


# -- lives


def test_a_life_that_died_before_it_saw_its_last_ack_is_closed_and_takes_nothing_new(server, act, spec):
    old = act(server, session=FIRST)
    old.push(0, make_segment("e0"), make_segment("e0", start=4))
    old.told(2)
    old.link.close()
    with RawActor(server.address, spec, session=SECOND, earlier=[[FIRST, 1]]) as actor:
        assert dict(actor.welcome().expected) == {FIRST: 2, SECOND: 0}
        episode = server.episodes()["e0"]
        assert (episode["closed"], episode["truncated"], episode["final"]) == (1, 1, 0)
        actor.push(1, make_segment("e0", start=4), session=FIRST)  # once more: acknowledged, not stored again
        actor.told(2)
        assert server.episodes()["e0"]["steps"] == 8
        actor.push(2, make_segment("z1", ends="terminated"), session=FIRST)
        assert f"session {FIRST} is over" in actor.refused()
    with RawActor(server.address, spec) as again, pytest.raises(Refused, match="is over: another client named arm"):
        again.welcome()
    assert server.episodes().keys() == {"e0"}


@pytest.mark.slow
def test_an_outbox_of_more_lives_than_a_hello_names_is_delivered_in_order(server, act, join, spec, tmp_path):
    """Each of them had said Hello, so that a server which took the rest for lost could have closed it."""
    lives = [f"{i:032x}" for i in range(m.MAX_EARLIER + 6)]
    act(server)
    for i, life in enumerate(lives):
        box = Outbox(tmp_path / "outbox-arm", 1 << 30)
        record = m.encode_record(0, make_segment(f"e{i:02}", ends="terminated"))
        box.append(life, 0, [b"".join(bytes(part) for part in record)])
        earlier = [[session, 0] for session in lives[:i]][: m.MAX_EARLIER]
        with RawActor(server.address, spec, session=life, outbox=box.id, earlier=earlier) as actor:
            actor.welcome()
            actor.link.call(m.Status(), 5.0)
        box.close()
    with TrainerClient(server.address, actor="arm", spec=spec, outbox=tmp_path / "outbox-arm") as client:
        client.push(make_segment("last", ends="terminated"))
        assert client.drain(PATIENCE)
    known = sorted(server.episodes().values(), key=lambda episode: episode["number"])
    assert [episode["id"] for episode in known] == [*(f"e{i:02}" for i in range(len(lives))), "last"]


def test_a_hello_that_names_too_many_lives_is_refused_and_one_that_breaks_off_leaves_no_session(server, spec):
    many = [[f"{i:032x}", 0] for i in range(m.MAX_EARLIER + 1)]
    refused = pytest.raises(Refused, match=r"earlier session|besides its")
    for earlier in (many, [[SECOND, 0]] * 2, [[FIRST, 0]], [[SECOND, -1]]):
        with RawActor(server.address, spec, earlier=earlier) as actor, refused:
            actor.welcome()
    for _ in range(8):
        with RawActor(server.address, spec) as actor:
            actor.welcome()
    assert [client["actor"] for client in server.report()["clients"]] == ["arm"]


def test_the_hello_and_the_farewell_of_a_dead_life_that_come_late_stop_and_close_nothing(server, act, spec):
    living = act(server, session=SECOND)
    with RawActor(server.address, spec) as ghost:
        living.push(0, make_segment("e0"))
        living.told(1)
        ghost.welcome()  # the network held it up; its process was killed before
        ghost.link.send(m.Bye())
        with pytest.raises(Disconnected, match="say Hello first"):
            ghost.link.call(m.Status(), 5.0)
        living.push(1, make_segment("e0", start=4, ends="terminated"))
        living.told(2)
    assert server.episodes()["e0"]["terminated"]


@pytest.mark.parametrize("has_keys", [False, True])
def test_of_two_robots_with_one_name_or_with_copies_of_one_key_the_one_that_works_goes_on(
    serve, keys, act, spec, caplog, has_keys
):
    server = serve(keys=keys if has_keys else None)
    key = keys / "left.key" if has_keys else None
    working = act(server, "left", key=key)
    working.push(0, make_segment("e0"))
    working.told(1)
    said = r"left works here already, and goes on .* say name=left/second at this one, or make each a key"
    second = RawActor(server.address, spec, "left", session=SECOND, outbox="another PC's", key=key)
    with second, pytest.raises(Refused, match=said):
        second.welcome()
    assert "refused, not taken: an actor named left works here already" in caplog.text
    working.push(1, make_segment("e0", start=4))
    working.told(2)
    working.link.close()
    until(lambda: not server.server.access.connections.living)
    with second:
        second.welcome()


# -- who is refused


def test_a_hello_of_another_version_is_told_so_whatever_else_it_holds(server):
    """And in the words that a client of protocol 3 understands: type, kind, text and final, and nothing else."""
    strange = {"type": "Hello", "protocol": [3, 4], "role": "actor", "actor": "arm", "new": 1}
    for hello, versions in ((strange | {"protocol": [3, 3]}, "3-3"), (strange | {"protocol": [9, 9]}, "9-9"),
                            (strange, "3-4")):  # fmt: skip
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(server.address)
            socket.send_multipart(wire.pack(hello, {}))
            assert socket.poll(15_000)
            header, _ = wire.unpack(socket.recv_multipart())
        assert header.keys() == {"type", "kind", "text", "final"}
        assert (header["type"], header["kind"], header["final"]) == ("Failed", "VersionMismatch", True)
        assert f"this client {versions}, this learner {m.PROTOCOL[0]}-{m.PROTOCOL[1]}" in header["text"]
    newer = m.PROTOCOL[1] + 1
    said = f"this client {newer}-{newer + 2}, this learner {m.PROTOCOL[0]}-{m.PROTOCOL[1]}"
    with (
        Connection(server.address, m.Hello((newer, newer + 2), "actor", "arm")) as link,
        pytest.raises(VersionMismatch, match=said),
    ):
        link.call(m.Status(), 5.0)
    until(lambda: server.refusals() == {"other version": 4})


def test_the_learners_messages_are_refused_from_the_actors_address(server, act):
    act(server)
    with server.link("learner", "intruder") as link, pytest.raises(Refused, match="role 'learner' is not given on"):
        link.call(m.Direct({"mode": "stop", "phase": ""}, None), 5.0)
    with server.link("viewer", "intruder") as viewer, pytest.raises(Refused, match="not for the role viewer"):
        viewer.call(m.Publish("0" * 64, 1, 1), 5.0)


def test_an_answer_that_cannot_be_encoded_ends_nobody(serve, act, monkeypatch):
    served = serve()
    monkeypatch.setitem(served.server._handlers, m.Status, lambda peer, _: m.Status({"what": object()}))
    with served.link("viewer", "eye") as viewer, pytest.raises(ServerFailed, match="its log says why"):
        viewer.call(m.Status(), PATIENCE)
    act(served)


# -- plan, operator, clocks


def test_a_paced_actor_gets_its_share_of_the_steps_and_no_more(server, join):
    client = connected(join(server, paced=True, told=False))
    number = server.ask(m.Direct({"phase": "practise", "mode": "collect", "into": "online", "paced": True}, 20)).value
    until(lambda: client.state.step_limit == 20)
    push_episodes(client, [0])
    assert client.drain(PATIENCE)
    assert client.state.step_limit == 20
    other = join(server, "other", paced=True, told=False)
    until(lambda: other.state.step_limit == 6 and client.state.step_limit == 8 + 6)
    server.admin.send(m.StepLimit(number, None))
    until(lambda: client.state.step_limit is None)


def test_steps_that_are_lost_are_taken_off_a_paced_actors_count(server, join):
    client = connected(join(server, paced=True, told=False))
    server.ask(m.Direct({"phase": "practise", "mode": "collect", "into": "online", "paced": True}, 4))
    name = own_name(client, 0)
    push_all(client, [changed(make_segment(name), STATE, np.nan), make_segment(name, start=4, ends="terminated")])
    until(lambda: client.state.step_limit == 8 + 4)


def test_an_operators_command_is_acknowledged_and_reaches_the_learner(server, join):
    join(server).command("goto", "practise")
    until(lambda: server.ask(m.Sync(0, 0)).commands == [[1, "goto", "practise"]])


@pytest.mark.parametrize(("phase", "closed"), [("", 1), ("rest", 0)], ids=["run", "phase"])
def test_the_end_of_a_run_leaves_no_episode_open_and_that_of_a_phase_does(serve, act, tmp_path, phase, closed):
    server = serve()
    actor = act(server)
    actor.push(0, make_segment("e0"))
    actor.told(1)
    server.direct(mode="stop", phase=phase)
    server.close()
    (episode,) = oracle.whole(tmp_path / "run/store").episodes.values()
    assert (episode["steps"], episode["closed"], episode["truncated"], episode["final"]) == (4, closed, closed, 0)
