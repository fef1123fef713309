"""What is a demonstration, what one waits for, and that nothing is collected under a directive that is over."""

import dataclasses
import threading
import time

import pytest
from serl_client import Outcome
from serl_client import messages as m
from serl_client.controller import RandomPolicy
from serl_client.episode import Segment
from serl_client.errors import RobotFault
from serl_client.runner import run_actor
from serl_client.status import ActorStatus
from serl_client.way_home import BEGIN

from tests.shared.actors import CountingEnv, FakeClient, Keys, run
from tests.shared.common import PATIENCE, until


class Teleop(CountingEnv):
    """Demonstrations in which somebody drives the rows of `driven`."""

    def __init__(self, spec, driven=(), **options):
        super().__init__(spec, has_operator=True, **options)
        self.driven, self.looks = driven, 0

    def step(self, action):
        return dataclasses.replace(super().step(action), driven=self.row in self.driven)

    def look(self):
        self.looks += 1
        return False


class Demonstrator(Keys):
    demonstrates = True


@pytest.fixture
def client(spec):
    return FakeClient(spec, "teleop")


# -- who drove


@pytest.mark.parametrize("key", [None, "success", "failure"])
@pytest.mark.parametrize("look", [5, 14])  # in the episode, and after it
def test_a_demonstration_that_nobody_drove_is_discarded_whatever_is_said_of_it(client, spec, key, look):
    status = ActorStatus()
    reports = run(Teleop(spec), client, operator=Keys({look: [key] if key else []}), status=status)
    first, second = client.episodes
    assert client.outcomes == [Outcome(each.episode, None, discard=True) for each in (first, second)]
    assert [(report["discard"], report["success"]) for report in reports] == [(True, None)] * 2
    assert first.intervened.all()
    assert status.warning == f"nobody drove: {second.episode} is no demonstration, and is discarded"


def test_one_driven_row_makes_it_a_demonstration(client, spec):
    reports = run(Teleop(spec, driven=[13]), client, episodes=1)
    assert client.outcomes == [Outcome(client.episodes[0].episode, True)]
    assert not reports[0]["discard"]


def test_an_interrupted_one_that_nobody_has_driven_yet_is_discarded_and_one_without_rows_is_none(client, spec):
    env = Teleop(spec, driven=[9], clock="real")
    env.fails_at = 7
    with pytest.raises(RobotFault, match="gone"):
        run(env, client)
    assert client.outcomes == [Outcome(client.episodes[0].episode, None, discard=True)]
    env.fails_at, client = 0, FakeClient(spec, "teleop")
    with pytest.raises(RobotFault, match="gone"):
        run(env, client)
    assert client.records == []


def test_what_a_policy_does_is_not_asked_for_a_driver(spec):
    client = FakeClient(spec)
    run(Teleop(spec), client, episodes=1)
    assert client.outcomes == [Outcome(client.episodes[0].episode, True)]


# -- what it waits for


@pytest.mark.parametrize("word", ["ready", "moved"])
def test_a_demonstration_waits_for_its_person_and_every_one_anew(client, spec, word):
    env, status, seen = Teleop(spec, driven=[1]), ActorStatus(), []
    client.script = {"wait 4": lambda: seen.append((status.driver, list(env.seeds), env.looks))}
    person = Demonstrator({look: [word] for look in (0, 6, 12, 21, 40)})  # 0 and 21: before it was asked
    run(env, client, operator=person, status=status)
    assert seen == [(BEGIN, [], 4)]
    assert client.lengths == [13, 13]
    assert person.looks == 40 + 14, "the second one was waited for, too: what came in the first is no answer"


def test_a_script_that_demonstrates_waits_for_nobody_and_a_policy_neither(client, spec):
    env = Teleop(spec, driven=[1])
    run(env, client, operator=Keys({}))
    policys = FakeClient(spec)
    run(env, policys, operator=Demonstrator({}))
    absent = Demonstrator({})
    absent.has_terminal = False
    run(env, FakeClient(spec, "teleop"), operator=absent)
    assert (env.looks, len(env.seeds), client.waited) == (0, 6, 2)


def test_pause_next_and_a_new_directive_are_obeyed_while_it_waits(client, spec, running_clock):
    env, status, drivers = Teleop(spec, driven=[1]), ActorStatus(), []
    presses = {3: ["pause"], 6: ["ready"], 7: ["moved"], 9: ["next"], 20: ["pause"]}  # two looks a turn in a pause
    client.script = {f"wait {n}": lambda: drivers.append(status.driver) for n in range(1, 14)}
    client.script["wait 14"] = lambda: client.direct("collect", number=2)
    person = Demonstrator(presses, running_clock)
    run(env, client, operator=person, status=status, episodes=1)
    assert drivers == [*[BEGIN] * 3, *["PAUSED"] * 8, *[BEGIN] * 2]
    assert (person.asked, env.stops) == ([True, *[False] * 8, True], 1), "nothing is led in a pause"
    assert client.commands == ["next"]
    (episode,) = client.episodes
    assert (episode.stamp.directive, episode.intervened.any(), env.teleops) == (2, False, [False])


def test_after_the_word_that_a_reset_asks_for_a_demonstration_begins(client, spec):
    env, status, person = Teleop(spec, driven=[1]), ActorStatus(), Demonstrator({4: ["moved"], 7: ["ready"]})
    run(env, client, operator=person, reset="operator", status=status, episodes=1)
    assert (person.looks, client.lengths) == (7 + 14, [13])


def test_a_directive_that_changes_on_the_way_home_records_nothing_more_under_the_old_one(spec):
    client = FakeClient(spec)
    env = CountingEnv(spec)
    env.home = lambda seed: client.direct("collect", number=2) if not env.seeds else None
    run(env, client, episodes=1)
    assert {segment.stamp.directive for segment in client.segments} == {2}


# -- while the learner is away


class Says(Keys):
    """A person who says what is put into `words`."""

    def __init__(self):
        super().__init__({})
        self.words = []

    def poll(self):
        said, self.words = self.words, []
        return said


@pytest.mark.parametrize("word", ["next", "stop"])
@pytest.mark.parametrize("mode", ["teleop", "collect"])
def test_what_is_said_while_the_learner_is_away_ends_the_directive_at_once_and_is_told_later(
    learner, connect, spec, word, mode
):
    """Its process, and the trainer in it, may need minutes to come back; then it repeats the old directive first."""
    collect = {"number": 2, "phase": "demonstrate", "mode": mode, "explore": True, "weights": None}
    learner.notice = dataclasses.replace(learner.notice, directive=collect)
    env, client, person = Teleop(spec, driven=[1], clock="real"), connect(), Says()
    step = env.step
    env.step = lambda action: (time.sleep(0.005), step(action))[1]
    arguments = env, RandomPolicy(spec, 0), client
    actor = threading.Thread(target=run_actor, args=arguments, kwargs={"seed": 0, "operator": person})
    actor.start()
    until(lambda: len(env.actions) > 20)
    learner.stop()
    until(lambda: not client.connected)
    before = len(env.actions)
    until(lambda: len(env.actions) > before + 20)  # without a word it goes on, and keeps what it makes
    person.words += [word] * 3
    until(lambda: client.over == word)
    time.sleep(0.3)  # more than an episode
    made = len(env.actions)
    assert (made % 13 == 0) or word == "stop", "next lets the episode end"
    learner.start()
    until(lambda: learner.hear(m.Command))
    until(lambda: not client.pending[0])
    time.sleep(0.2)
    assert len(env.actions) == made, "the old directive is repeated, and is over"
    assert [command.name for command in learner.hear(m.Command)] == [word], "a phase is not skipped"
    learner.tell(directive={**collect, "number": 3})
    if word == "stop":  # it has taken that, and will obey it
        time.sleep(0.2)
        assert len(env.actions) == made
        learner.stop()
        until(lambda: not client.connected)
        learner.start()  # with another plan
    until(lambda: len(env.actions) > made)
    learner.tell(directive={"number": 4, "phase": "", "mode": "stop", "boundary": "now"})
    actor.join(PATIENCE)
    assert not actor.is_alive()
    rows = {number: 0 for number in (2, 3)}
    for *_, record in learner.records:
        if isinstance(record, Segment):
            rows[record.stamp.directive] += len(record)
    assert (rows[2], sum(rows.values())) == (made, len(env.actions))


def test_a_word_that_the_learner_refuses_ends_nothing(learner, connect):
    may_answer = threading.Event()

    def refused(_, command):
        may_answer.wait(PATIENCE)
        return m.Failed("Forbidden", "not with this key", request=command.request)

    learner._command = refused
    client = connect()
    until(lambda: client.connected)  # a word is about what goes on then
    client.command("next")
    assert client.over == "next"
    may_answer.set()
    until(lambda: not client.over)


@pytest.mark.parametrize("connected", [True, False])
def test_an_evaluation_does_no_more_episodes_than_asked_while_the_learner_is_away(spec, connected):
    client = FakeClient(spec, "evaluate", episodes=3)
    client.connected = connected
    client.script = {"wait 20": lambda: client.direct("stop", number=2)}
    run(CountingEnv(spec), client, episodes=5)
    assert len(client.episodes) == (5 if connected else 3)
