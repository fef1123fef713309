"""What the learner knows, no client says: phase, source, number, weights, who evaluates, its own word. By wire."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
from serl_client import Outcome
from serl_client import messages as m
from serl_client.errors import Refused

from serl_launcher.store import texts
from serl_launcher.store.directives import DATASET
from tests.shared.clients import RawActor
from tests.shared.common import PATIENCE, until
from tests.shared.data import make_segment

EVALUATION = {"phase": "evaluate", "mode": "evaluate", "into": "eval", "weights": 1}
BODIES = (
    {"phase": "practise", "mode": "idle", "into": "online"}, {"phase": DATASET, "mode": DATASET, "into": "online"},
    EVALUATION,
)  # fmt: skip  # 2 to 4; 1 is to practise
LATE = "it came after this evaluation had begun, which is for arm"
OURS = {"directive": 4, "phase": "evaluate", "weights": 1}


@pytest.fixture
def serving(serve):
    return lambda **options: serve(capacities={"online": 400, "eval": 400}, **options)


@pytest.mark.parametrize(
    ("forged", "says"),
    [
        (make_segment("e1", phase="evaluate"), "names the phase 'evaluate', and its directive 1 is of 'practise'"),
        (make_segment("e1", directive=2), "directive 2, of e1, is idle: nobody makes steps"),
        (make_segment("e1", directive=3, phase=DATASET), "directive 3, of e1, is the importer's own"),
        (make_segment("e1", directive=5), "no directive 5, of e1, was ever given"),
        (make_segment("e1", weights=2), "names the weights 2, and the newest are 1"),
        (make_segment("e1", **{**OURS, "weights": 0}), "names the weights 0, and its directive 4 wants .* version 1"),
        (make_segment("e0", start=4, phase="evaluate"), "names the phase 'evaluate'"),
        (make_segment("e0", start=4, **OURS), "names directive 4, and its episode began under 1"),
        (Outcome("e0", None, discard=True, judged_by="learner: bad"), "is the learner's own: no client says it"),
    ],
)
def test_what_no_honest_actor_says_is_refused_with_both_words_and_nothing_of_it_is_kept(serving, act, forged, says):
    server = serving()
    actor = act(server)
    server.publish(b"weights")
    for body in BODIES:
        server.direct(body)
    actor.push(0, make_segment("e0"), forged)
    assert re.search(says, actor.refused())
    (found,) = until(server.episodes).values()  # what came before it is committed with its group
    assert (found["phase"], found["steps"], found["discard"]) == ("practise", 4, False)


def test_an_evaluation_is_for_those_who_were_there_and_for_others_only_once_all_of_these_have_left(serving, spec, act):
    """All environments of a command are one of these."""
    server = serving()
    honest = act(server, "arm/0")
    server.publish(b"weights")
    server.direct(EVALUATION)
    stamp = {**OURS, "directive": 2, "ends": "terminated"}
    with RawActor(server.address, spec, "mallory", session="b" * 32, outbox="other") as other:
        told = other.welcome().state["directive"]
        assert (told["mode"], told["because"]) == ("idle", LATE)
        assert server.ask(m.Sync(0, 0)).actors == [["arm/0", "", False], ["mallory", LATE, False]]
        assert {client["actor"]: client.get("because") for client in server.ask(m.Status()).report["clients"]} == {
            "arm/0": None, "mallory": LATE,
        }  # fmt: skip
        other.push(0, *(make_segment(f"m{i}", 0, 0, 1, **stamp) for i in range(47)))
        assert re.search("directive 2, of m0, evaluates: it is for arm, and mallory idles", other.refused())
    with RawActor(server.address, spec, "arm/1", session="c" * 32, outbox="third") as third:
        assert third.welcome().state["directive"]["mode"] == "evaluate"
        third.push(0, make_segment("f0", **stamp))
        third.told(1)
        third.link.send(m.Bye())
    honest.push(0, make_segment("e0", **stamp))
    honest.told(1)
    assert server.episodes().keys() == {"e0", "f0"}
    honest.link.send(m.Bye())
    with RawActor(server.address, spec, "desk", session="d" * 32, outbox="desk") as desk:
        desk.welcome()
        until(lambda: (desk.hear(), desk.link.notice)[1].directive["mode"] == "evaluate")


@pytest.mark.parametrize("seconds", [14.0, 15.0])
def test_after_a_restart_an_evaluation_waits_a_while_for_those_who_had_it(serving, act, spec, clock, seconds):
    server = serving()
    act(server)
    server.publish(b"weights")
    server.direct(EVALUATION)
    server.close()
    again = serving()
    with RawActor(again.address, spec, "desk", session="b" * 32, outbox="desk") as desk:
        desk.welcome()
        again.stop()
        clock.advance(seconds)
        again.server.updates.deal()
    assert again.server.store.directives.dealt == {2: ["arm"] if seconds < 15 else ["arm", "desk"]}


def test_a_command_about_another_phase_than_the_newest_is_refused_and_not_carried_out(server, act):
    actor = act(server)
    before = server.direct(phase="before")
    now = server.direct(phase="now")
    server.direct(phase="now", paced=True)
    for number, phase in ((before, "before"), (99, None)):
        actor.link.send(m.Command("next", directive=number))
        until(lambda phase=phase: f"next was said about phase {phase}, and it is now now" in actor.refused())
    actor.link.send(m.Command("next", directive=now))
    until(lambda: server.ask(m.Sync(0, 0)).commands == [[1, "next", ""]])


def test_an_actor_that_only_evaluates_does_nothing_else_and_nobody_else_does_its_evaluations(serving, spec, act):
    server = serving()
    arm, judge = act(server, "arm"), act(server, "judge/0", session="b" * 32, outbox="other", paced=True)
    server.publish(b"weights")
    server.direct({"phase": "practise", "mode": "collect", "into": "online", "by": "", "without": ["judge"]})

    def told(actor):
        actor.hear()
        directive = actor.link.notice.directive
        return directive["mode"], directive.get("because", "")

    until(lambda: told(judge) == ("idle", "it only evaluates") and told(arm) == ("collect", ""))
    server.server.keeper.store.deal({"judge/0"})  # as where the arm is silent for a while
    assert told(judge) == ("idle", "it only evaluates")
    arm.push(0, make_segment("before", directive=2, ends="terminated"))
    arm.told(1)
    server.direct({**EVALUATION, "by": "judge"})
    alone = "this evaluation is by judge alone"
    until(lambda: told(judge) == ("evaluate", "") and told(arm) == ("idle", alone))
    stamp = {**OURS, "directive": 3, "ends": "terminated"}
    judge.push(0, make_segment("j0", **stamp))
    judge.told(1)
    judge.push(1, make_segment("j1", directive=2, ends="terminated"))
    assert "directive 2, of j1, is for those that do not evaluate alone, and judge/0 idles" in judge.refused()
    judge.link.send(m.Bye())
    until(lambda: [each[0] for each in server.ask(m.Sync(0, 0)).actors] == ["arm"])
    server.server.updates.deal()
    assert told(arm) == ("idle", alone), "it is not dealt anew, also when its actor has left"
    arm.push(1, make_segment("e0", **stamp))
    assert "evaluates: it is for judge, and arm idles" in arm.refused()


@pytest.mark.parametrize(
    ("body", "able", "because"),
    [
        ({"mode": "teleop"}, {"has_operator": True}, "it has no operator"),
        ({"mode": "collect", "policy": "random"}, {"paced": True}, "its clock is real, and the actions are random"),
    ],
)
def test_an_actor_that_cannot_do_what_a_phase_wants_is_told_why_and_the_learner_too(serving, act, body, able, because):
    server = serving()
    act(server, "able", **able)
    unable = act(server, "unable", session="b" * 32, outbox="other")
    server.direct({"phase": "begin", "into": "online", **body})
    until(lambda: (unable.hear(), unable.link.notice)[1].directive.get("because") == because)
    assert unable.link.notice.directive["mode"] == body["mode"]
    known = server.ask(m.Sync(0, 0)).actors
    assert known == [["able", "", able.get("paced", False)], ["unable", because, False]]


NEW = {
    "tasks": lambda i: replace(make_segment(f"e{i}", ends="terminated"), task=f"task {i}"),
    "episodes that never come": lambda i: Outcome(f"ghost {i}", True),
    "judges": lambda i: Outcome("e", True, judged_by=f"judge {i}"),
}


@pytest.mark.parametrize("kind", NEW)
def test_a_key_brings_so_many_different_texts_and_no_more_and_other_keys_go_on(serving, keys, act, monkeypatch, kind):
    monkeypatch.setattr(texts, "MOST", 8)
    server = serving(keys=keys)
    left = act(server, "left", key=keys / "left.key")
    right = act(server, "right", key=keys / "right.key", session="b" * 32, outbox="other")
    left.push(0, make_segment("e", ends="terminated"))
    left.told(1)
    left.push(1, *map(NEW[kind], range(9)))
    assert "the key left has brought 8 different names and tasks" in left.refused()
    right.push(0, make_segment("r", ends="terminated"))
    right.told(1)


def test_an_episode_that_comes_after_its_verdict_leaves_room_for_the_next(serving, keys, act, monkeypatch):
    monkeypatch.setattr(texts, "MOST", 8)
    left = act(serving(keys=keys), "left", key=keys / "left.key")
    for i in range(20):
        left.push(2 * i, Outcome(f"e{i}", True), make_segment(f"e{i}", ends="terminated"))
    until(lambda: left.hear() == 40)


def test_names_of_actors_are_counted_too(serving, keys, spec, act, monkeypatch):
    monkeypatch.setattr(texts, "MOST", 8)
    server = serving(keys=keys)
    act(server, "left", key=keys / "left.key")
    for i in range(3):
        says = "the key left has brought 8 different names and tasks" if i == 2 else None
        with (
            RawActor(server.address, spec, f"left/{i}", session=f"{i}" * 32, key=keys / "left.key") as actor,
            pytest.raises(Refused, match=says) if says else nullcontext(),
        ):
            actor.link.hello(PATIENCE)


def test_what_an_operator_says_to_an_actor_reaches_that_one_once_with_the_number_of_the_answer(serving, act):
    server = serving()
    left, right = act(server, "left"), act(server, "right", session="b" * 32, outbox="right")

    def commands(actor):
        while (message := actor.link.receive()) is not None:
            if isinstance(message, m.Command):
                yield message

    with server.link("viewer", "screen") as link:
        numbers = [link.call(m.Command("ready", "7", actor="left"), PATIENCE).value for _ in range(2)]
        for name, actor, says in (("ready", "none", "no actor none is connected"), ("goto", "left", "is told one of")):
            with pytest.raises(Refused, match=says):
                link.call(m.Command(name, actor=actor), PATIENCE)
    came = []
    until(lambda: came.extend(commands(left)) or len(came) == 2)
    assert came == [m.Command("ready", "7", number, "left") for number in numbers]
    assert numbers[0] < numbers[1]
    assert [*commands(right)] == []
    assert server.server.keeper.ready.index.commands(0) == []  # none of them is for the plan


def test_an_input_reaches_its_actor_whose_answer_reaches_only_who_drives_in_their_own_name(serving, act):
    server = serving()
    left, right = act(server, "left"), act(server, "right", session="b" * 32, outbox="right")
    drive, update = (
        m.Drive("left", "screen/1", 1, 0, "take over", {"x": 0.5}, 1),
        m.DriverUpdate("screen/1", "", "", 1, 1),
    )

    def come(link, *kinds):
        """The next message of these kinds."""
        found = []
        until(lambda: found.extend(each for each in [link.receive()] if isinstance(each, kinds)) or found)
        return found[0]

    with server.link("viewer", "screen") as link, server.link("viewer", "other") as other:
        link.hello(PATIENCE)
        other.hello(PATIENCE)
        link.send(drive)
        assert come(left.link, m.Drive) == drive
        for bad, says in ((drive, "called other"), (replace(drive, gripper=2), "gripper is -1, 0 or 1")):
            other.send(bad)
            assert says in come(other, m.Failed).text
        right.link.send(replace(update, text="a lie"))
        right.link.send(m.Status())
        come(right.link, m.Status)
        left.link.send(update)
        assert come(link, m.DriverUpdate) == update
        link.send(replace(drive, actor="none"))
        assert come(link, m.DriverUpdate).text == "this actor is not connected"
