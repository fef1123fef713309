"""What an operator says to the plan: which directive it is about, and what it ends until the learner has taken it."""

import pytest
from serl_client.commands import Commands
from serl_client.person import Person
from serl_client.status import ActorStatus

from tests.shared.actors import FakeClient, Keys

ONE, AGAIN, OTHER = ({"number": number, "phase": phase} for number, phase in ((5, "a"), (6, "a"), (7, "b")))


@pytest.fixture
def commands():
    return Commands(1)


def test_next_is_about_the_phase_that_its_person_sees_though_another_one_has_begun(commands, spec):
    commands.say("next", "", ONE, OTHER)
    assert (commands.to_send().directive, commands.ended) == (5, ((5,), "next"))
    client, status = FakeClient(spec), ActorStatus()
    status.directive, status.phase = ONE.values()
    Person(Keys({0: ["next"]}), client, status).listen()
    assert client.seen == ONE


def test_until_the_learner_has_heard_it_next_ends_each_directive_of_its_phase(commands):
    commands.say("next", "", ONE, ONE)
    commands.directed(ONE, AGAIN)
    assert commands.ended == ((5, 6), "next")
    commands.directed(AGAIN, OTHER)
    assert commands.ended == ((5, 6), "next")
    commands.say("stop", "", ONE, OTHER)
    commands.say("next", "", OTHER, OTHER)
    for _ in range(3):
        commands.sent()
        commands.done(commands._number, 1)
    commands.directed(OTHER, {"number": 8, "phase": "c"})
    assert commands.ended == ((7, 8), "stop"), "it is about the run, also once the learner has taken it"
    commands.welcomed()
    assert commands.ended == ((), ""), "another learner has it"
    for _ in range(2):
        commands.say("stop", "", OTHER, OTHER)
    assert (commands.ended, len(commands._queue)) == (((7,), "stop"), 1), "and it may be said again"


def test_what_the_learner_has_taken_ends_no_later_directive(commands):
    commands.say("next", "", ONE, ONE)
    commands.sent()
    commands.done(2, 1)
    commands.directed(ONE, AGAIN)
    assert (commands.ended, commands.to_send()) == (((5,), "next"), None)


def test_a_refusal_takes_back_its_own_word_alone(commands):
    for directive in (ONE, OTHER):
        commands.say("next", "", directive, directive)
        commands.sent()
    assert (commands.take_back(9), commands.take_back(3)) == ("", "next")
    assert (commands.ended, commands.to_send().directive) == (((7,), "next"), 7)
    commands.sent()
    commands.take_back()
    assert commands.ended == ((), "")
