"""What stands between two episodes: the way home, the word of the person, and faults of the robot."""

import pytest
from serl_client import Outcome
from serl_client.errors import ConfigError, RobotFault
from serl_client.faults import Faults
from serl_client.messages import Command
from serl_client.person import Person
from serl_client.status import ActorStatus

from tests.shared.actors import STATE, CountingEnv, FakeClient, Keys, WaitingClient, run


@pytest.fixture
def client(spec):
    return FakeClient(spec)


class Way(CountingEnv):
    """A robot whose way home takes five looks."""

    def __init__(self, spec, **options):
        super().__init__(spec, **options)
        self.way, self.log = 0, []

    def home(self, seed):
        super().home(seed)
        self.way = 5
        self.log.append("home")

    @property
    def is_home(self):
        self.way -= 1
        return self.way < 0

    def stop(self):
        super().stop()
        self.way = 1000
        self.log.append("stop")

    def reset(self, seed, **options):
        self.log.append("reset")
        return super().reset(seed, **options)


def test_a_pause_on_the_way_home_holds_the_robot_and_the_way_begins_anew_after_it(client, spec, running_clock):
    env = Way(spec)
    run(env, client, episodes=1, operator=Keys({2: ["pause"], 5: ["pause"]}, running_clock))
    assert env.log == ["home", "stop", "home", "reset", "stop"]
    assert client.lengths == [13]


def test_a_stop_is_obeyed_on_the_way_home(client, spec):
    env = Way(spec)
    client.script = {"wait 2": lambda: client.direct("stop", number=2)}
    run(env, client)
    assert (env.log, client.records) == (["home", "stop", "stop"], [])


def test_with_reset_by_the_operator_each_episode_waits_for_their_word(client, spec):
    env, seen, status = Way(spec), [], ActorStatus()
    client.script = {"wait 3": lambda: seen.append((list(env.log), status.driver))}
    run(env, client, operator=Keys({5: ["ready"], 40: ["ready"]}), reset="operator", status=status)
    assert seen == [(["stop"], "RESET")]
    assert env.log == [*["stop", "home", "reset"] * 2, "stop"]
    assert client.lengths == [13, 13]
    for reset, said in (("operator", "needs a person"), ("never", "use auto or operator")):
        with pytest.raises(ConfigError, match=said):
            run(env, client, reset=reset)


# -- faults


COLLISION = RobotFault("the arm touched the table", "collision")


class Failing(CountingEnv):
    """A robot that fails in some calls of one kind, counted over all episodes, and where it is told to recover."""

    def __init__(self, spec, fails_in=(), fails_to_recover=0, *, call="step", error=COLLISION, clock="real"):
        super().__init__(spec, clock=clock)
        self.fails_in, self.fails_to_recover, self.log = list(fails_in), fails_to_recover, []
        self.call, self.error = call, error

    def note(self, call):
        self.log.append(call)
        if call == self.call and self.log.count(call) in self.fails_in:
            raise self.error

    def reset(self, seed, **options):
        self.note("reset")
        return super().reset(seed, **options)

    def step(self, action):
        self.note("step")
        return super().step(action)

    def stop(self):
        self.log.append("stop")

    def recover(self):
        self.log.append("recover")
        self.fails_to_recover -= 1
        if self.fails_to_recover >= 0:
            raise RobotFault("the button is still pressed", "estop")

    def home(self, seed):
        self.note("home")


class ReadyPerson(Keys):
    """Says ready at each look, once the console shows a fault."""

    def __init__(self, status):
        super().__init__({})
        self.status, self.said = status, []

    def poll(self):
        if self.status.driver != "FAULT":
            return []
        self.said.append(self.status.warning)
        return ["ready"]


@pytest.fixture
def hours(monkeypatch, clock):
    """Two minutes pass between two faults."""
    add = Faults.add

    def later(self, fault):
        clock.now += 120
        add(self, fault)

    monkeypatch.setattr(Faults, "add", later)


@pytest.mark.usefixtures("hours")
def test_faults_in_ten_episodes_leave_ten_truncated_episodes_and_a_living_actor(client, spec):
    env, status = Failing(spec, fails_in=range(7, 77, 7)), ActorStatus()
    person = ReadyPerson(status)
    run(env, client, episodes=11, operator=person, status=status)
    assert client.lengths == [6] * 10 + [13]
    assert [episode.truncated for episode in client.episodes] == [True] * 10 + [False]
    for episode in client.episodes:
        assert episode.observation[STATE][:, 0].tolist() == list(range(len(episode) + 1))
    assert client.outcomes == [Outcome(client.episodes[-1].episode, True)]
    assert env.log.count("recover") == 10
    assert "collision: the arm touched the table. The robot holds. Look at it, then press r" in person.said[0]


def test_after_a_fault_nothing_moves_until_the_person_is_ready_and_then_it_goes_home(client, spec):
    env, status = Failing(spec, fails_in=[2], fails_to_recover=1), ActorStatus()
    run(env, client, episodes=2, operator=ReadyPerson(status), status=status)
    between = env.log[env.log.index("stop") : env.log.index("home", 2)]
    assert set(between) == {"stop", "recover"}
    assert between.count("recover") == 2  # the first ready came while the button was pressed
    assert client.lengths == [1, 13]


def told(client, number, name, argument):
    """Let the client hear a command of an operator elsewhere; argument: gives it then."""
    return lambda: client.said.append(Command(name, argument(), number, client.actor))


def test_ready_from_elsewhere_counts_for_the_question_that_is_asked_now(client, spec):
    env, status, heard = Failing(spec, fails_in=[2]), ActorStatus(), []
    client.script = {
        "wait 3": told(client, 1, "ready", lambda: str(status.question - 1)), "wait 6": told(client, 2, "dance", str),
        "wait 9": told(client, 3, "success", lambda: "another"), "wait 12": told(client, 4, "ready", str),
        "wait 15": told(client, 5, "ready", lambda: str(status.question)),
        **{f"wait {n}": lambda: heard.append((status.driver, status.heard)) for n in (5, 8, 11, 14)},
    }  # fmt: skip
    run(env, client, operator=Keys({}), status=status)
    assert heard == [("FAULT", f"{number} late") for number in (1, 2, 3, 4)]
    assert (client.lengths, status.heard) == ([1, 13], "5")


def test_a_pause_beside_the_robot_is_lifted_there_alone(client, clock):
    keys, status = Keys({1: ["pause"], 3: ["pause"], 6: ["pause"]}), ActorStatus()
    person, told = Person(keys, client, status), {0: "pause", 2: "resume", 4: "pause", 5: "resume", 7: "resume"}
    seen = []
    for look in range(8):
        clock.advance(1.1)
        client.said += [Command(told[look], "", look, client.actor)] if look in told else []
        person.listen()
        seen.append((person.is_paused, status.heard))
    assert [paused for paused, _ in seen] == [True, False, False, True, True, True, False, False]
    assert [heard for _, heard in seen][-4:] == ["4", "5 late", "5 late", "7"]


@pytest.mark.parametrize(
    ("first", "then", "after", "holds"),
    [
        ("", ["pause"], 0.9, True), ("", ["pause"], 1.1, False), ("", ["pause"] * 2, 1.1, True),
        ("halt", ["pause"], 0.9, True), ("pause", ["pause"], 0.9, True), ("pause", ["pause"], 1.1, False),
    ],
)  # fmt: skip
def test_whoever_says_pause_at_once_after_another_one_does_not_let_the_robot_go_on(
    client, clock, first, then, after, holds
):
    """The first one says it beside the robot, or at the page."""
    person = Person(Keys({0: [first] * bool(first), 1: then}), client, ActorStatus())
    client.said += [] if first else [Command("pause", "", 1, client.actor)]
    person.listen()
    clock.advance(after)
    person.listen()
    assert person.is_paused == holds


@pytest.mark.parametrize(("after", "holds"), [(0.9, True), (1.1, False)])
def test_whoever_presses_pause_again_and_again_on_a_page_does_not_press_the_resume_that_takes_its_place(
    client, clock, after, holds
):
    person = Person(None, client, status := ActorStatus())
    for number, word in enumerate(("pause", "pause", "resume"), 1):
        client.said += [Command(word, "", number, client.actor)]
        clock.advance(after)
        person.listen()
    assert (person.is_paused, status.heard) == (holds, "3 late" if holds else "3")


def test_a_verdict_from_elsewhere_ends_the_episode_that_it_names_and_a_pause_holds_the_robot(spec, clock):
    env, status, drivers, client = CountingEnv(spec), ActorStatus(), [], WaitingClient(spec, clock)
    client.script = {
        1: told(client, 1, "success", lambda: status.episode), "wait 40": told(client, 3, "resume", str),
        3: told(client, 2, "pause", str), "wait 2": lambda: drivers.append(status.driver),
    }  # fmt: skip
    run(env, client, status=status)
    assert client.outcomes[0] == Outcome(client.episodes[0].episode, True, judged_by="operator")
    assert client.lengths[0] < client.lengths[1] == 13
    assert (drivers, status.heard, client.commands) == (["PAUSED"], "3", [])


def test_the_seconds_until_a_person_says_ready_are_counted(spec, clock):
    """After a fault, as waiting; before each of two resets by hand as those."""
    env, status, client = Failing(spec, fails_in=[2]), ActorStatus(), WaitingClient(spec, clock)
    person, asked = Keys({}), {}  # when each question was first shown
    person.poll = lambda: (
        ["ready"] if clock.now > asked.setdefault((status.driver, len(env.log)), clock.now) + 60 else []
    )
    run(env, client, episodes=2, operator=person, reset="operator", status=status)
    assert (status.waiting_s, status.reset_s) == (pytest.approx(60, abs=0.2), pytest.approx(120, abs=0.4))


@pytest.mark.parametrize("there", [None, False, True])
def test_a_fault_ends_the_run_if_nobody_is_there_or_it_comes_a_third_time_within_a_minute(client, spec, there):
    """None: no operator; False: a script that says verdicts, and no terminal."""
    env, status = Failing(spec, fails_in=(2, 4, 6)), ActorStatus()
    said = "fault 3 within 60 s: mend" if there else "touched the table"
    person = ReadyPerson(status)
    person.has_terminal = there
    with pytest.raises(RobotFault, match=said) as fault:
        run(env, client, episodes=9, operator=None if there is None else person, status=status)
    assert fault.value.kind == "collision"
    assert env.log[-1] == "stop"
    assert client.lengths == [1] * (3 if there else 1)


@pytest.mark.parametrize("error", [COLLISION, KeyError("gripper"), OSError("no such device")])
@pytest.mark.parametrize(("call", "lengths"), [("home", [13, 13]), ("reset", [13, 13]), ("step", [1, 13])])
def test_a_simulated_environment_that_raises_is_made_again_and_nobody_is_asked(client, spec, call, error, lengths):
    env = Failing(spec, [2], 1, call=call, error=error, clock="simulated")  # the first try to make it again fails, too
    run(env, client, episodes=2)
    assert client.lengths == lengths
    assert [episode.truncated for episode in client.episodes] == [length == 1 for length in lengths]
    assert env.log.count("recover") == 2


@pytest.mark.parametrize("call", ["home", "reset", "step"])
def test_a_simulated_environment_that_always_raises_ends_its_actor_with_the_last_line_once_all_is_delivered(
    client, spec, call, caplog
):
    env, asked = Failing(spec, range(2, 99), call=call, error=KeyError("gripper"), clock="simulated"), []
    client.drain = lambda seconds, **_: asked.append(seconds)
    with pytest.raises(RobotFault, match=r"^KeyError: 'gripper'\. This was fault 3 within 60 s: mend that first$"):
        run(env, client, episodes=9, operator=ReadyPerson(ActorStatus()))
    assert client.lengths == ([1] if call == "step" else [13])
    assert asked
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == 3 * [env.error]


def test_a_verdict_after_a_fault_is_about_the_episode_that_it_cut_off(client, spec):
    class Judging(ReadyPerson):
        def poll(self):
            said = super().poll()
            return ["failure", *said] if said else []

    env, status = Failing(spec, fails_in=[4]), ActorStatus()
    run(env, client, episodes=2, operator=Judging(status), status=status)
    assert client.outcomes[0] == Outcome(client.episodes[0].episode, False, judged_by="operator")
