"""A run that goes on where it stood: by name, with what was due, and with what may be edited meanwhile."""

from copy import deepcopy

import pytest
from serl_client.errors import ConfigError

from serl_launcher.training.plan_state import PlanState

from .plans import PLAN, ROUNDS, at, edited, load, practise, resumed, train, won

LONGER = [text.replace("1000", "2000") for text in PLAN["phases"]["practise"]["until"]]


def test_a_run_resumes_by_name_where_it_stood():
    state = at("practise", practise(100, wall_s=7))
    now = practise(130, online=130, wall_s=9)
    for _ in range(5):
        state.did_update(state.next_update(now))
    mapping = deepcopy(PLAN)
    clone = mapping["phases"]["clone"]
    mapping["phases"] = {"warm_up": clone, "more": clone, **mapping["phases"]}  # an index would now name another phase
    kept = state.state_dict()
    del kept["phase"]["actors"]["policy"]  # a checkpoint of before there was a choice
    other = at("practise", mapping=mapping)
    other.load_state_dict(kept)
    assert other.at == state.at
    assert other.next_update(now) == state.next_update(now) == "update"
    assert other.step_limit(now) == state.step_limit(now)
    assert other.updates == 5
    other.advance(practise(1100, wall_s=9))
    assert other.phase.name == "evaluate"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("until", ["env_steps >= 77"]), ("until", [*LONGER, "updates >= 9"]), ("until", [*LONGER[:2], "operator"]),
        ("until", ["unassisted_success[4] >= 0.75", "success[5] >= 0.6 and env_steps >= 1000", "wall_s >= 3600"]),
        ("actors.explore", False), ("start_when", "online.steps >= 9"), ("updates", ["update"]),
    ],
)  # fmt: skip
def test_an_edit_of_the_current_phase_is_refused_unless_accepted(key, value):
    saved = at("practise").state_dict()
    edits = PlanState(load(edited(f"phases.practise.{key}", value)))
    what = key.partition(".")[0]
    with pytest.raises(ConfigError, match=rf"'practise' was edited .*practise\.{what}: .*Say accept_plan=true"):
        edits.load_state_dict(saved)
    (edit,) = edits.load_state_dict(saved, accept=True)
    assert edit.startswith(f"practise.{what}: ")
    PlanState(load(edited("phases.clone.until", "updates >= 9"))).load_state_dict(saved)  # another phase is free


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("until", LONGER), ("publish.every_updates", 7), ("pace.updates_per_step", 3), ("pace", "free"),
        ("evaluate", {"every_updates": 5, "until": "episodes >= 3"}),
    ],
)  # fmt: skip
def test_a_higher_bound_another_pace_and_publication_need_no_consent_and_are_told(key, value):
    saved = at("practise").state_dict()
    (edit,) = PlanState(load(edited(f"phases.practise.{key}", value))).load_state_dict(saved)
    assert edit.startswith(f"practise.{'publish_every' if 'publish' in key else key.partition('.')[0]}: ")


def test_a_plan_that_had_ended_goes_on_in_the_phase_whose_bound_was_raised():
    state = at("practise", practise(100))
    train(state, practise(130, online=130))
    made = state.updates
    state.advance(practise(1100, online=1000))
    state.advance(practise(1100, episodes=50, phase="evaluate"))
    assert state.phase is None
    assert resumed(state).phase is None
    longer = resumed(state, edited("phases.practise.until", LONGER), practise(1100, online=1000))
    assert (longer.phase.name, longer.updates, longer.at.base["env_steps"]) == ("practise", made, 100)
    assert longer.advance(practise(2099, online=1000)) == []
    longer.advance(practise(2100, online=1000))
    assert longer.phase.name == "evaluate"
    assert resumed(longer, edited("phases.practise.until", LONGER)).phase.name == "evaluate"
    for phase, until in (("demonstrate", ["demo.episodes >= 30", "operator"]), ("practise", LONGER[:2])):
        assert resumed(state, edited(f"phases.{phase}.until", until)).phase is None, "nothing that is over begins anew"
    assert resumed(state, edited("phases.evaluate.until", ["episodes >= 60"])).phase.name == "evaluate"


@pytest.mark.parametrize("stands", ["practise#2", "evaluate#3", None])
def test_what_is_repeated_goes_on_more_times_in_the_repetition_where_it_stands_or_after_the_last(stands):
    mapping = edited("repeat", ROUNDS)
    state, ended = at("practise#1", mapping=mapping), []
    while state.at.phase not in (stands, None):
        ended.append(state.at.phase)
        state.advance(over := won(*ended, steps=1000, successes=1))
    assert state.at.phase == stands
    assert resumed(state, mapping, over).at.phase == stands
    assert resumed(state, edited("repeat", {**ROUNDS, "times": 5}), over).at.phase == (stands or "practise#4")
    fewer = edited("repeat", {**ROUNDS, "times": 2})
    if stands != "evaluate#3":
        assert resumed(state, fewer, over).at.phase == stands
        return
    with pytest.raises(ConfigError, match=r"the plan does not have.* 'evaluate#3'.*did you mean 'evaluate#2'"):
        resumed(state, fewer, over)


def test_repetitions_that_a_condition_has_ended_stay_ended():
    mapping = edited("repeat", ROUNDS)
    state = at("evaluate#1", mapping=mapping)
    state.advance(won("evaluate#1"))
    assert state.phase is None
    assert resumed(state, edited("repeat", {**ROUNDS, "times": 5})).phase is None


def test_a_phase_that_does_not_evaluate_any_more_goes_on_where_it_was():
    mapping = edited("phases.practise.evaluate", {"every_env_steps": 100, "until": "episodes >= 50"})
    state = at("practise", mapping=mapping)
    train(state, practise(10, online=10))
    state.advance(practise(100))
    assert resumed(state, mapping).at.evaluates
    other = resumed(state, progress=practise(100))
    assert (other.at.evaluates, other.phase.name, other.at.updates) == (False, "practise", 8)
    with pytest.raises(ConfigError, match=r"practise\.start_when"):
        resumed(state, edited("phases.practise.start_when", "online.steps >= 9"))


@pytest.mark.parametrize("within", [False, True])
def test_an_evaluation_that_is_asked_for_in_another_unit_comes_at_the_next_multiple_of_it(within):
    asked = ({every: 10, "until": "episodes >= 50"} for every in ("every_env_steps", "every_updates"))
    mapping, other = (edited("phases.practise.evaluate", each) for each in asked)
    state, now = at("practise", mapping=mapping), practise(350, online=350)
    assert len(train(state, now)) == 8
    state.advance(now)
    state = resumed(state, other if within else mapping, now)
    state.command("next")
    state.advance(now)
    state = resumed(state, other, now)
    assert (state.advance(now), state.at.evaluates) == ([], False)
    train(state, now := practise(352, online=350))
    state.advance(now)
    assert state.at.evaluates


def test_a_checkpoint_in_a_phase_that_is_gone_is_refused():
    saved = at("practise").state_dict()
    with pytest.raises(ConfigError, match="no phase is called 'practise'"):
        PlanState(load(edited("phases.practise", None))).load_state_dict(saved, accept=True)


def test_after_a_restart_all_updates_that_were_due_are_made_up_for_and_later_ones_are_limited_as_before(caplog):
    state = at("practise")
    state.next_update(practise(10, online=10))
    ahead = practise(900, online=900)
    after = resumed(state, progress=ahead)
    assert len(train(after, ahead)) == 2 * (900 - 10) + 8  # all, and as far ahead as the tolerance
    assert (after.dropped, "too slow" in caplog.text) == (0, False)
    slow = practise(1800, online=900)
    assert len(train(after, slow)) <= 2 * 8 + 3
    assert after.dropped == resumed(after, progress=slow).dropped > 1700
    assert "the learner is too slow for a real robot" in caplog.text


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_with_another_pace_the_steps_before_keep_what_they_were_due_and_later_ones_get_the_new_one(ratio):
    state = at("practise")
    state.next_update(begin := practise(10, online=10))
    train(state, begin)
    train(state, now := practise(110, online=110))
    after = resumed(state, edited("phases.practise.pace.updates_per_step", ratio), now)
    assert after.next_update(now) is None
    assert len(train(after, practise(210, online=210))) <= 8 * 2 + 3 + ratio
    made = 0
    for steps in range(211, 311):
        made += len(train(after, practise(steps, online=steps)))
    assert made == pytest.approx(100 * ratio, abs=1)


def test_an_actor_that_only_evaluates_is_named_to_all_in_each_phase_of_the_plan():
    mapping = edited("phases.practise.evaluate", {"every_updates": 5, "until": ["episodes >= 3"], "by": "judge"})
    state = at("practise", mapping=mapping)
    assert (state.directive()["by"], state.directive()["without"]) == ("", ["judge"])
    assert at("demonstrate", mapping=mapping).directive()["without"] == ["judge"]
    state.at.updates = 5
    state.advance(practise())
    assert (state.phase.name, state.directive()["by"]) == ("practise.evaluate", "judge")
    assert "without" not in at("evaluate", mapping=mapping).directive(), "it takes part in an evaluation by all"
    everybodys = edited("phases.practise.evaluate", {"every_updates": 5, "until": ["episodes >= 3"]})
    kept = at("practise", mapping=everybodys).state_dict()
    for actors in (kept["phase"]["actors"], kept["phase"]["evaluate"]["phase"]["actors"]):
        del actors["by"]  # as an earlier version has kept it
    assert PlanState(load(everybodys)).load_state_dict(kept) == []
    (edit,) = PlanState(load(mapping)).load_state_dict(kept)
    assert edit.startswith("practise.evaluate"), "which needs no consent"
