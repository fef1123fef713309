"""The run's place in its plan: what ends a phase, its updates and their pace, a restart, the operator."""

import logging
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serl_client.errors import ConfigError

from serl_launcher.training.plan import Pace
from serl_launcher.training.plan_state import PhaseCounts, PlanState, Progress, SourceCounts
from serl_launcher.training.rate_limiter import RateLimiter

from .plans import PLAN, ROUNDS, at, edited, load, practise, resumed, train, won


def test_what_a_phase_begins_with_is_done_once_and_before_its_first_update():
    mapping = edited("phases.clone.on_begin", [{"fit_normalizer": "demo"}])
    state = PlanState(load(mapping))
    state.advance(demonstrated := Progress(sources={"demo": SourceCounts(300, 20)}))
    assert state.begin() == [("fit_normalizer", "demo")]
    for each in (state, resumed(state, mapping)):
        assert each.next_update(demonstrated) == "update"
        assert each.begin() == []


# -- what ends a phase
def test_phases_follow_each_other_and_say_what_is_to_be_done():
    state = PlanState(load())
    assert state.advance(Progress(sources={"demo": SourceCounts(300, 19)})) == []
    assert state.advance(Progress(sources={"demo": SourceCounts(300, 20)})) == [("fit_normalizer", "demo")]
    assert state.phase.name == "clone"
    for _ in range(4):
        assert state.advance(Progress()) == []
        state.did_update("update")
    assert state.advance(Progress()) == [("checkpoint", None), ("publish", None)]
    assert state.advance(practise(1000)) == [("checkpoint", None)]
    assert state.advance(practise(episodes=50, phase="evaluate")) == []
    assert state.phase is None
    assert state.directive()["mode"] == "stop"
    assert state.next_update(Progress()) is None
    assert state.step_limit(Progress()) is None
    assert state.updates == 4


def test_an_evaluation_counts_what_came_under_its_own_directives_also_after_a_hold_and_a_restart():
    state = at("evaluate", practise(episodes=60, phase="evaluate"))  # of an earlier one; more may come late
    kept = state.state_dict()
    del kept["at"]["directives"]  # a checkpoint of before they were counted
    state = PlanState(load())
    state.load_state_dict(kept)
    state.did_direct(7)
    state.command("hold")
    state.command("resume")
    state.did_direct(9)
    for last, ends in ((24, False), (25, True)):
        state = resumed(state)
        found = {"evaluate": PhaseCounts(episodes=500), 7: PhaseCounts(episodes=25), 9: PhaseCounts(episodes=last)}
        state.advance(Progress(found))
        assert (state.phase is None) == ends


def test_late_data_do_not_advance_another_phase():
    state = at("practise")
    late = Progress({"demonstrate": PhaseCounts(env_steps=5000, episodes=300)})
    state.advance(late)
    assert state.phase.name == "practise"
    assert state.waits_for(late) == "the start: online.steps >= 10"


def test_a_phase_that_is_entered_again_counts_from_there():
    state = at("practise", practise(steps=999, episodes=90, recent=((True, False),) * 9, wall_s=3000))
    state.advance(practise(steps=1001, episodes=93, recent=((True, False),) * 9, wall_s=3001))
    assert state.phase.name == "practise"  # 2 steps, 3 episodes, 1 second
    state.advance(practise(steps=1001, episodes=93, wall_s=6600))
    assert state.phase.name == "evaluate"


def test_an_assisted_success_is_a_failure_for_the_unassisted_metric():
    alone, helped, failed = (True, False), (True, True), (False, False)
    for recent, ends in [
        ((failed, alone, alone, alone, helped), True),  # 3 of 4 alone, 4 of 5 in all
        ((failed, alone, alone, helped, helped), False),  # 2 of 4 alone
        ((alone, alone, alone, alone), False),  # the second window is not full
        ((failed, failed, alone, alone, alone), True),
        ((failed, failed, failed, alone, alone), False),
    ]:
        state = at("practise")
        state.advance(practise(episodes=len(recent), recent=recent))
        assert (state.phase.name == "evaluate") == ends, recent


def test_the_directive_says_all_that_actors_need():
    assert at("practise").directive() == {
        "phase": "practise", "mode": "collect", "into": "online", "explore": True,
        "intervene": False, "policy": "trained", "by": "", "episodes": None, "boundary": "episode",
    }  # fmt: skip
    evaluation = at("evaluate").directive()
    assert (evaluation["into"], evaluation["explore"], evaluation["episodes"]) == ("eval", False, 50)
    assert at("evaluate", mapping=edited("phases.evaluate.until", "episodes > 50")).directive()["episodes"] == 51
    quiet = edited("phases.practise.actors.explore", False)
    assert at("practise", mapping=quiet).directive()["explore"] is False


# -- again and again
def test_repeated_phases_follow_each_other_and_each_counts_for_itself_also_over_restarts():
    mapping, seen = edited("repeat", ROUNDS), []
    state = at("practise#1", mapping=mapping)
    while state.phase is not None:
        seen.append(state.phase.name)
        name = state.phase.name
        state = resumed(state, mapping)
        state.advance(won(*seen[:-1], steps=1000, successes=1))
        assert state.phase.name == name, "what the others have does not count"
        state.advance(won(*seen, steps=1000, successes=1))
    assert seen == [f"{name}#{time}" for time in (1, 2, 3) for name in ROUNDS["phases"]]
    assert [*state.ended] == ["demonstrate", *seen]


def test_repetitions_end_early_where_the_last_phase_meets_a_condition_and_by_the_operator():
    mapping = edited("repeat", {**ROUNDS, "phases": ["clone", "practise"], "until": ["success[2] >= 1"]})
    for successes, then in ((1, "clone#2"), (2, "evaluate")):
        state = at("practise#1", mapping=mapping)
        state.advance(practise(1000, 9, ((False, False), (True, False), (successes == 2, False)), phase="practise#1"))
        assert state.phase.name == then
        state = at("clone#1", mapping=mapping)
        state.command("next")
        state.advance(practise(0, 9, ((True, False),) * 9, phase="practise#1"))
        assert state.phase.name == "practise#1", "only the last phase is looked at"
    state.command("goto", "evaluate")
    state.advance(Progress())
    assert state.phase.name == "evaluate"


@pytest.mark.parametrize(("every", "pace"), [({"every_env_steps": 100}, 4), ({"every_updates": 50}, 2)])
def test_a_phase_evaluates_at_each_multiple_and_then_makes_all_updates_that_its_steps_are_due(every, pace):
    mapping = edited("phases.practise.evaluate", {**every, "until": "episodes >= 50"})
    mapping["phases"]["practise"] |= {"pace": {"updates_per_step": pace, "tolerance": 8}, "until": "env_steps >= 5000"}
    state, begun, steps = at("practise", mapping=mapping), [], 0
    while steps < 1000:
        steps += 2
        now = practise(steps, online=1000)
        while not state.at.evaluates and (name := state.next_update(now)):
            state.did_update(name)
            assert state.advance(now) == []
        if state.at.evaluates:
            begun.append({"every_env_steps": steps, "every_updates": state.updates}[next(iter(every))])
            assert (state.phase.name, state.directive()["mode"]) == ("practise.evaluate", "evaluate")
            assert (state.next_update(now), state.step_limit(now)) == (None, None)
            state = resumed(state, mapping, now)
            state.did_direct(len(begun))
            assert state.advance(won("practise.evaluate")) == [], "those of an earlier one do not count"
            assert state.at.evaluates
            steps += 25  # of the episodes that were under way: they are acknowledged meanwhile
            assert state.advance(Progress({**practise(steps).phases, len(begun): PhaseCounts(episodes=50)})) == []
            assert (state.phase.name, state.directive()["mode"]) == ("practise", "collect")
    train(state, practise(steps, online=1000))
    assert [count // (100 if "every_env_steps" in every else 50) for count in begun] == [*range(1, len(begun) + 1)]
    assert len(begun) >= 9
    made = pace * (steps - 2) + 8  # it began after two steps
    assert (state.at.updates, state.updates, state.dropped) == (made, made, 0)


def test_an_evaluation_within_a_phase_is_ended_by_next_and_left_with_the_phase_by_goto_and_stop():
    mapping = edited("phases.practise.evaluate", {"every_env_steps": 100, "until": "episodes >= 50"})
    for words, then, actions in (
        (("next",), "practise", []), (("goto", "clone"), "clone", [("checkpoint", None)]),
        (("stop",), None, [("checkpoint", None)]),
    ):  # fmt: skip
        state = at("practise", mapping=mapping)
        state.advance(practise(100, wall_s=10))
        assert state.at.evaluates
        state.command("hold")
        assert state.directive()["mode"] == "idle"
        assert state.advance(won("practise.evaluate")) == []
        state.command(*words)
        assert state.advance(practise(100, wall_s=5000)) == actions
        assert state.at.phase == then
    state = at("practise", mapping=mapping)
    state.advance(practise(100, wall_s=3590))
    state.command("next")
    state.advance(practise(100, wall_s=3700))
    state.advance(practise(100, wall_s=3709))
    assert state.phase.name == "practise", "the seconds of an evaluation are not the phase's"
    state.advance(practise(100, wall_s=3710))
    assert state.phase.name == "evaluate"


# -- updates
def test_only_updates_that_happened_are_counted():
    state = at("clone")
    for _ in range(9):  # the data were not ready: nothing is reported
        assert state.next_update(Progress()) == "update"
        assert state.advance(Progress()) == []
    assert state.updates == 0
    with pytest.raises(ValueError, match="'update' was due"):
        state.did_update("update_critic")


def test_updates_come_in_the_order_of_the_list():
    entries = ["update_critic", "update_critic", {"update": {"every": 2, "from_updates": 5}}]
    mapping = edited("phases.clone.updates", entries)
    state, names = at("clone", mapping=mapping), []
    for _ in range(12):
        names.append(state.next_update(Progress()))
        state.did_update(names[-1])
    critics = ["update_critic"] * 2
    assert names == [*critics * 4, "update", *critics[:1] * 3]  # not yet due after round 2
    assert state.at.updates == 12


def test_an_update_that_has_seen_all_lets_the_others_go_on_and_comes_again_with_new_steps():
    entries = [{"update": {"order": "once"}}, "update_critic"]
    mapping = edited("phases.clone.updates", entries)
    state, names = at("clone", mapping=mapping), []
    for turn in range(8):
        names.append(state.next_update(Progress()))
        if turn in (2, 3):  # nothing is new
            assert names[-1] == ("update" if turn == 2 else "update_critic")
        if turn == 2:
            state.did_see("update", {"demo/demo": (4, 2)}, all_there_is=True)
            continue
        state.did_update(names[-1])
        if turn == 5:
            state.look_again()
    assert names == ["update", "update_critic", "update", *["update_critic"] * 3, "update", "update_critic"]
    assert (state.at.updates, resumed(state, mapping).at.seen) == (7, {"update": {"demo/demo": [4, 2]}})


def test_a_phase_may_end_when_each_step_was_seen_and_its_updates_wait_for_new_ones():
    mapping = edited("phases.clone.updates", [{"update": {"order": "once"}}])
    mapping["phases"]["clone"]["until"] = ["seen"]
    state = at("clone", mapping=mapping)
    state.did_update(state.next_update(Progress()))
    assert (state.advance(Progress()), state.has_seen_all) == ([], False)
    state.did_see("update", {}, all_there_is=True)
    assert state.next_update(Progress()) is None
    assert state.waits_for(Progress()) == "new steps: its updates have seen all"
    assert state.advance(Progress())
    assert state.phase.name == "practise"
    assert not state.at.exhausted


def test_publication_is_due_once_in_so_many_updates():
    state, due, ready = at("practise"), [], practise(10, online=10)
    for update in range(1, 8):
        state.did_update(state.next_update(ready))
        if state.publish_due():
            due.append(update)
            state.did_publish()
        assert not state.publish_due()
    assert due == [3, 6]


# -- pace
@given(
    ratio=st.sampled_from([0.1, 0.25, 0.7, 1.0, 1.5, 2.0, 4.0, 20.0]),
    tolerance=st.integers(0, 64),
    turns=st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=200),
    warm_up=st.integers(0, 300),
)
def test_neither_side_runs_further_ahead_than_the_tolerance(ratio, tolerance, turns, warm_up):
    bucket = RateLimiter(Pace(ratio, tolerance), uncounted_steps=warm_up)
    steps, updates = warm_up, 0
    for actors_turn, want in turns:
        if actors_turn:
            steps = min(steps + want, max(steps, bucket.step_limit(steps, updates)))
        for _ in range(0 if actors_turn else want):
            updates += bucket.may_update(steps, updates)
        assert -tolerance <= ratio * (steps - warm_up) - updates <= tolerance + 1 + ratio + 1e-6
        assert bucket.may_update(steps, updates) or bucket.step_limit(steps, updates) > steps  # no deadlock
    assert bucket.uncounted_steps == warm_up  # a paced simulator never makes a step that goes uncounted_steps


@given(ratio=st.integers(1, 3000).map(lambda hundredths: hundredths / 100), tolerance=st.integers(0, 2))
def test_learner_and_actors_never_wait_for_each_other_whatever_the_pace(ratio, tolerance):
    bucket, steps, updates = RateLimiter(Pace(ratio, tolerance), uncounted_steps=0), 0, 0
    for _ in range(1000):
        may = bucket.may_update(steps, updates)
        assert may or bucket.step_limit(steps, updates) > steps
        steps, updates = steps + (not may), updates + may


@given(bursts=st.lists(st.integers(0, 2000), min_size=1, max_size=30), ratio=st.sampled_from([0.3, 1.0, 4.0]))
def test_catching_up_is_capped(bursts, ratio):
    bucket, steps, updates = RateLimiter(Pace(ratio, 16), uncounted_steps=0), 0, 0
    for burst in bursts:  # a real robot waits for nobody
        steps, before = steps + burst, updates
        while bucket.may_update(steps, updates):
            updates += 1
        assert updates - before <= 2 * 16 + 1 + ratio
    bucket.unpaced = ""  # but where all wait, nothing is dropped
    dropped = bucket.dropped
    for burst in bursts:
        steps += burst
        while bucket.may_update(steps, updates):
            updates += 1
        assert 0 <= updates - ratio * (steps - bucket.uncounted_steps) + 1e-6 <= 16 + 1
    assert bucket.dropped == dropped


def test_what_will_not_be_caught_up_is_logged(caplog):
    bucket = RateLimiter(Pace(1.0, 16), uncounted_steps=0)
    with caplog.at_level(logging.WARNING):
        assert bucket.may_update(1018, 0)
    assert "1000 updates dropped so far: the learner is too slow for a real robot" in caplog.text
    count = len(caplog.records)
    bucket.may_update(1019, 0)
    assert len(caplog.records) == count  # not for every step


def test_the_learner_starts_when_told_and_a_simulator_is_free_until_then():
    state = at("practise")
    assert state.step_limit(practise(500, online=9)) is None
    assert state.next_update(practise(500, online=9)) is None
    ready = practise(500, online=500)
    assert state.next_update(ready) == "update_critic"
    assert state.step_limit(ready) == 500 + 5  # 8 + 1 updates ahead at 2 a step; the first 500 pay for nothing
    assert len(train(state, ready)) == 8
    assert state.waits_for(ready) == "env steps: pace"
    assert state.next_update(practise(502, online=0)) is not None  # started is started


def test_a_phase_that_only_collects_ends_at_its_step():
    mapping = deepcopy(PLAN)
    actors = {"mode": "collect", "into": "online", "policy": "random"}
    mapping["phases"]["practise"] = {"actors": actors, "until": ["env_steps > 99.5", "operator", "env_steps >= 400"]}
    state = at("practise", practise(7), mapping)
    assert (state.step_limit(practise(7)), state.step_limit(practise(90))) == (107, 107)
    assert state.advance(practise(106)) == []
    assert state.phase.name == "practise"
    state.advance(practise(107))
    assert state.phase.name == "evaluate"


def test_free_pace_and_phases_that_evaluate_limit_nobody():
    state = at("practise", mapping=edited("phases.practise.pace", "free"))
    assert state.step_limit(practise(900, online=900)) is None
    assert state.next_update(practise(900, online=900))
    assert at("evaluate").step_limit(practise(9, phase="evaluate")) is None
    assert at("evaluate").waits_for(Progress()) == "the actors: this phase has no updates"
    assert "begins each one at the actor, by r or a motion" in at("demonstrate").waits_for(Progress())


def test_lockstep_is_one_update_for_each_step():
    mapping = edited("phases.practise.pace", "lockstep")
    del mapping["phases"]["practise"]["start_when"]
    state = at("practise", practise(100), mapping)
    assert state.next_update(practise(100)) is None
    for step in range(101, 110):
        assert state.step_limit(practise(step - 1)) == step
        assert state.step_limit(practise(step)) == step
        state.did_update(state.next_update(practise(step)))
        assert state.next_update(practise(step)) is None


# -- the operator
def test_the_operator_has_the_last_word():
    state = at("practise")
    ready = practise(20, online=20)
    state.command("hold")
    assert [state.directive()[word] for word in ("mode", "boundary")] == ["idle", "now"]
    assert state.waits_for(ready) == "the operator: held"
    assert state.advance(practise(5000)) == []
    state.command("resume")
    assert state.directive()["mode"] == "collect"
    assert state.next_update(ready) is not None
    state.command("next")
    assert state.advance(ready) == [("checkpoint", None)]
    state.command("goto", "clone")
    assert state.advance(ready) == []
    assert state.phase.name == "clone"
    state.command("stop")
    assert state.advance(ready) == [("checkpoint", None), ("publish", None)]
    assert state.phase is None
    state.command("goto", "evaluate")
    assert state.advance(ready) == []
    assert state.phase.name == "evaluate"


def test_an_unknown_command_is_refused():
    state = PlanState(load())
    for words, text in [(("nxt",), "'next'"), (("goto", "clon"), "'clone'"), (("hold", "on"), "say hold without 'on'")]:
        with pytest.raises(ConfigError, match=text):
            state.command(*words)
    assert state.advance(Progress()) == []


def test_a_budget_of_evaluation_ends_it_with_an_episode_and_never_within_one():
    state = at("evaluate", mapping=edited("phases.evaluate.until", ["episodes >= 50", "env_steps >= 2000"]))

    def seen(steps: int, finished: int) -> str | None:
        counts = PhaseCounts(env_steps=steps, episodes=finished // 1000, finished_steps=finished)
        state.advance(Progress({"evaluate": counts}))
        return state.at.phase

    assert seen(1999, 1000) == "evaluate"
    assert seen(2500, 1000) == "evaluate", "the second episode is still under way"
    assert seen(3000, 2000) is None
