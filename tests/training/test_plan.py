"""A plan is refused at load or it can be followed; the run's place in it depends on nothing but what was accepted."""

import importlib.util
import json
import logging
import math
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from serl_client.errors import ConfigError

from serl_launcher.training.plan import Pace, Plan, Source, Update, View
from serl_launcher.training.plan_reader import load_plan
from serl_launcher.training.plan_state import PhaseCounts, PlanState, Progress, RateLimiter, SourceCounts

ROOT = Path(__file__).resolve().parents[2]
METHODS = {"update", "update_critic"}
PLAN = {
    "sources": {
        "demo": {"capacity": 500},
        "online": {"capacity": 2000},
        "success": {"of": ["online", "demo"], "keep": ["successful"], "min_length": 3, "fold": "train"},
    },
    "phases": {
        "demonstrate": {
            "actors": {"mode": "teleop", "into": "demo"},
            "until": ["demo.episodes >= 20", "operator"],
            "on_end": [{"fit_normalizer": "demo"}],
        },
        "clone": {
            "actors": {"mode": "idle"},
            "updates": ["update"],
            "data": {"demo": 1.0},
            "until": ["updates >= 4"],
            "on_end": ["checkpoint", "publish"],
        },
        "practise": {
            "actors": {"mode": "collect", "into": "online"},
            "updates": ["update_critic", "update"],
            "data": {"success": 3, "demo": 1},
            "start_when": "online.steps >= 10",
            "pace": {"updates_per_step": 2, "tolerance": 8},
            "publish": {"every_updates": 3},
            "until": ["unassisted_success[4] >= 0.75 and success[5] >= 0.6", "env_steps >= 1000", "wall_s >= 3600"],
            "on_end": ["checkpoint"],
        },
        "evaluate": {"actors": {"mode": "evaluate"}, "until": ["episodes >= 50"]},
    },
}


def edited(path: str, value: object) -> dict:
    """PLAN with the value at a dotted path replaced or, for None, removed."""
    plan = deepcopy(PLAN)
    *parents, key = path.split(".")
    node = plan
    for parent in parents:
        node = node[parent]
    if value is None:
        del node[key]
    else:
        node[key] = value
    return plan


def load(mapping: dict = PLAN, has_operator: bool = True) -> Plan:
    return load_plan(mapping, methods=METHODS, has_operator=has_operator)


def practise(
    steps: int = 0, episodes: int = 0, recent: tuple = (), online: int = 0, wall_s: float = 0.0, phase: str = "practise"
) -> Progress:
    counts = PhaseCounts(env_steps=steps, episodes=episodes, recent=recent)
    return Progress({phase: counts}, {"online": SourceCounts(online, episodes)}, wall_s)


def at(phase: str, progress: Progress | None = None, mapping: dict = PLAN) -> PlanState:
    """A state that stands at the beginning of `phase`."""
    state = PlanState(load(mapping))
    state.command("goto", phase)
    state.advance(progress or Progress())
    return state


# -- loading
def test_a_good_plan_is_read_in_full() -> None:
    plan = load()
    assert list(plan.phases) == ["demonstrate", "clone", "practise", "evaluate"]
    assert plan.sources["demo"] == Source(500)
    assert plan.views == {"success": View(("online", "demo"), ("successful",), 3, "train")}
    phase = plan.phases["practise"]
    assert phase.updates[0] == Update("update_critic", {"success": 0.75, "demo": 0.25})
    assert phase.data("update") == {"success": 0.75, "demo": 0.25}
    assert phase.pace == Pace(2.0, 8)
    assert plan.phases["demonstrate"].on_end == (("fit_normalizer", "demo"),)
    assert plan.notes == ()


@pytest.mark.parametrize(
    ("path", "value", "line", "nearest"),
    [
        ("phases.practise.actors.mode", "colect", "plan.phases.practise.actors.mode", "collect"),
        ("phases.practise.actors.into", "onlin", "plan.phases.practise.actors.into", "online"),
        ("phases.practise.updates", ["update_critc"], "plan.phases.practise.updates[0]", "update_critic"),
        ("phases.practise.data", {"sucess": 1.0}, "plan.phases.practise.data", "success"),
        ("phases.practise.until", ["operator", "env_step >= 5"], "plan.phases.practise.until[1]", "env_steps"),
        ("phases.practise.until", "sucess[20] >= 0.9", "plan.phases.practise.until[0]", "success"),
        ("phases.practise.until", "demos.episodes >= 9", "plan.phases.practise.until[0]", "demo"),
        ("phases.practise.until", "demo.episode >= 9", "plan.phases.practise.until[0]", "episodes"),
        ("phases.practise.start_when", "onlin.steps >= 9", "plan.phases.practise.start_when", "online"),
        ("phases.practise.pace", "fre", "plan.phases.practise.pace", "free"),
        ("phases.practise.pace", {"update_per_step": 1}, "plan.phases.practise.pace", "updates_per_step"),
        ("phases.practise.publish", {"every_update": 1}, "plan.phases.practise.publish", "every_updates"),
        ("phases.practise.on_end", ["checkpont"], "plan.phases.practise.on_end[0]", "checkpoint"),
        ("phases.practise.on_end", [{"fit_normalizer": "dem"}], "on_end[0].fit_normalizer", "demo"),
        ("phases.practise.untill", ["operator"], "plan.phases.practise", "until"),
        ("phases.practise.updates", [{"update": {"evry": 2}}], "plan.phases.practise.updates[0].update", "every"),
        ("sources.success.keep", ["succesful"], "plan.sources.success.keep[0]", "successful"),
        ("sources.success.of", ["onlin"], "plan.sources.success.of[0]", "online"),
        ("sources.success.fold", "trian", "plan.sources.success.fold", "train"),
        ("sources.success.rows", "intervend", "plan.sources.success.rows", "intervened"),
        ("sources.demo.capcity", 5, "plan.sources.demo", "capacity"),
        ("sources.demo.archive", "lerobt", "plan.sources.demo.archive", "lerobot"),
        ("phases.practise.on_begin", ["publsh"], "plan.phases.practise.on_begin[0]", "publish"),
        ("phase", {}, "plan", "phases"),
    ],
)
def test_a_typo_is_refused_with_its_line_and_the_nearest_right_word(path, value, line, nearest) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(edited(path, value))
    assert line in str(refusal.value)
    assert f"did you mean {nearest!r}?" in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("sources.demo.capacity", 0, "whole number >= 1"),
        ("sources.demo.capacity", True, "whole number >= 1"),
        ("sources.demo", 500, "should be a mapping"),
        ("sources.the-demo", {"capacity": 5}, "letters, digits"),
        ("phases.practise.data", {"demo": 0}, "positive number"),
        ("phases.practise.data", {}, "needs data"),
        ("phases.practise.pace", {"updates_per_step": 0, "tolerance": 8}, "positive number"),
        ("phases.practise.pace", {"updates_per_step": 2}, "'tolerance' is missing"),
        ("phases.practise.actors.explore", "yes", "true or false"),
        ("phases.practise.on_end", [{"checkpoint": "demo"}], "takes no value"),
        ("phases.practise.on_end", [["checkpoint"]], "'name' or 'name: ...'"),
        ("phases.practise.until", ["env_steps = 5"], "cannot read 'env_steps = 5'"),
        ("phases.practise.until", ["__import__('os').getpid() >= 5"], "cannot read"),
        ("phases.practise.until", ["success >= 0.9"], "success[20] >= 0.9"),
        ("phases.practise.until", ["success[900] >= 0.9"], "1 to 200 episodes"),
        ("phases.practise.until", None, "'until' is missing"),
        ("phases.practise.until", 5, "should be a list"),
        ("phases.practise.updates", None, "only a phase with updates has data"),
        ("phases.practise.updates", [{"update": {"from_updates": 9}}], "must begin at once"),
        ("phases.practise.updates", ["update", {"update": {"data": {"demo": 1}}}], "trains on the same data"),
        ("phases.clone.actors.into", "demo", "make no data"),
        ("phases.evaluate.actors.intervene", True, "takes over in mode 'collect', not in 'evaluate'"),
        ("phases.evaluate.on_begin", ["publish"], "only a phase with updates has"),
        ("sources.demo.dataset", 5, "the folder of a LeRobot dataset"),
        ("phases", {}, "nothing to do"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(path, value, text) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(edited(path, value))
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "until"),
    [
        ("phases.practise.until", []),
        ("phases.practise.until", ["success[20] > 1"]),
        ("phases.practise.until", ["online.steps > 2000"]),  # more than it holds
        ("phases.practise.until", ["demo.episodes >= 9"]),  # filled by another phase
        ("phases.practise.until", ["env_steps >= 9 and demo.episodes >= 9"]),
        ("phases.clone.until", ["env_steps >= 9"]),
        ("phases.clone.until", ["success[5] >= 0.1"]),
        ("phases.demonstrate.until", ["updates >= 9"]),
        ("phases.demonstrate.until", ["unassisted_success[5] >= 0.1"]),
        ("phases.evaluate.until", ["interventions >= 1"]),
    ],
)
def test_a_phase_that_can_never_end_is_refused(path, until) -> None:
    with pytest.raises(ConfigError, match="can never end"):
        load(edited(path, until))


def test_a_learner_that_would_wait_for_idle_actors_is_refused() -> None:
    with pytest.raises(ConfigError, match="no env steps to keep pace with"):
        load(edited("phases.clone.pace", {"updates_per_step": 1, "tolerance": 8}))
    with pytest.raises(ConfigError, match="nothing can meet it"):
        load(edited("phases.clone.start_when", "demo.episodes >= 9"))
    with pytest.raises(ConfigError, match="nothing can meet it"):
        load(edited("phases.practise.start_when", "updates >= 9"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sources.eval", {"capacity": 5}),
        ("sources.success.of", ["online", "eval"]),
        ("phases.practise.data", {"demo": 1, "eval": 1}),
        ("phases.practise.updates", [{"update": {"data": {"eval": 1}}}]),
        ("phases.practise.actors.into", "eval"),
        ("phases.evaluate.actors.into", "online"),
    ],
)
def test_evaluation_keeps_its_own_source_and_nothing_trains_on_it(path, value) -> None:
    with pytest.raises(ConfigError):
        load(edited(path, value))
    assert load().phases["evaluate"].actors.into == "eval"
    assert load().sources["eval"].capacity == 20_000
    assert load(edited("sources.eval", {"capacity": 300})).capacities["eval"] == 300


def test_without_an_operator_teleop_and_its_data_are_left_out() -> None:
    plan = load(edited("phases.clone", None), has_operator=False)
    assert list(plan.phases) == ["practise", "evaluate"]
    assert plan.phases["practise"].data("update") == {"success": 1.0}
    assert "demonstrate" in plan.notes[0]
    assert "practise trains without demo" in plan.notes[1]
    mapping = edited("phases.clone", None)
    mapping["sources"]["good"] = {"of": ["demo"], "keep": ["rewarded"]}  # a view of nothing but demonstrations
    mapping["phases"]["practise"]["data"] = {"success": 1, "good": 1}
    assert load(mapping, has_operator=False).phases["practise"].data("update") == {"success": 1.0}
    with pytest.raises(ConfigError, match=r"clone.data: only an operator fills demo"):
        load(has_operator=False)
    with pytest.raises(ConfigError, match="nothing to do without an operator"):
        load({**PLAN, "phases": {"demonstrate": PLAN["phases"]["demonstrate"]}}, has_operator=False)


def test_a_dataset_stands_in_for_the_operator() -> None:
    plan = edited("sources.demo.dataset", "/data/demonstrations")
    assert load_plan(plan, methods=METHODS, has_operator=False).phases["clone"].data("update") == {"demo": 1.0}


def test_what_a_phase_begins_with_is_done_once_and_before_its_first_update() -> None:
    plan = load(edited("phases.clone.on_begin", [{"fit_normalizer": "demo"}]))
    state = PlanState(plan)
    state.advance(demonstrated := Progress(sources={"demo": SourceCounts(300, 20)}))
    assert state.begin() == [("fit_normalizer", "demo")]
    resumed = PlanState(plan)
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    for each in (state, resumed):
        assert each.next_update(demonstrated) == "update"
        assert each.begin() == []


def test_an_operator_who_may_take_over_can_end_a_phase_by_it() -> None:
    plan = edited("phases.practise.until", ["interventions >= 5"])
    with pytest.raises(ConfigError, match="can never end"):
        load(plan)
    plan["phases"]["practise"]["actors"]["intervene"] = True
    assert load(plan).phases["practise"].actors.intervene


def test_an_update_may_have_data_of_its_own() -> None:
    mapping = edited("phases.practise.updates", ["update_critic", {"update": {"data": {"demo": 2}}}])
    phase = load(mapping).phases["practise"]
    assert phase.data("update") == {"demo": 1.0}
    assert phase.data("update_critic") == {"success": 0.75, "demo": 0.25}


def test_one_phase_can_be_run_alone() -> None:
    assert list(load().only("clone").phases) == ["clone"]
    with pytest.raises(ConfigError, match="did you mean 'clone'"):
        load().only("clon")


# -- what ends a phase
def test_phases_follow_each_other_and_say_what_is_to_be_done() -> None:
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


def test_late_data_do_not_advance_another_phase() -> None:
    state = at("practise")
    late = Progress({"demonstrate": PhaseCounts(env_steps=5000, episodes=300)})
    state.advance(late)
    assert state.phase.name == "practise"
    assert state.waits_for(late) == "the start: online.steps >= 10"


def test_a_phase_that_is_entered_again_counts_from_there() -> None:
    state = at("practise", practise(steps=999, episodes=90, recent=((True, False),) * 9, wall_s=3000))
    state.advance(practise(steps=1001, episodes=93, recent=((True, False),) * 9, wall_s=3001))
    assert state.phase.name == "practise"  # 2 steps, 3 episodes, 1 second
    state.advance(practise(steps=1001, episodes=93, wall_s=6600))
    assert state.phase.name == "evaluate"


def test_an_assisted_success_is_a_failure_for_the_unassisted_metric() -> None:
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


def test_the_directive_says_all_that_actors_need() -> None:
    assert at("practise").directive() == {
        "phase": "practise", "mode": "collect", "into": "online", "explore": True,
        "intervene": False, "episodes": None, "boundary": "episode",
    }  # fmt: skip
    evaluation = at("evaluate").directive()
    assert (evaluation["into"], evaluation["explore"], evaluation["episodes"]) == ("eval", False, 50)
    assert at("evaluate", mapping=edited("phases.evaluate.until", "episodes > 50")).directive()["episodes"] == 51
    quiet = edited("phases.practise.actors.explore", False)
    assert at("practise", mapping=quiet).directive()["explore"] is False


# -- updates
def test_only_updates_that_happened_are_counted() -> None:
    state = at("clone")
    for _ in range(9):  # the data were not ready: nothing is reported
        assert state.next_update(Progress()) == "update"
        assert state.advance(Progress()) == []
    assert state.updates == 0
    with pytest.raises(ValueError, match="'update' was due"):
        state.did_update("update_critic")


def test_updates_come_in_the_order_of_the_list() -> None:
    entries = ["update_critic", "update_critic", {"update": {"every": 2, "from_updates": 5}}]
    mapping = edited("phases.clone.updates", entries)
    state, names = at("clone", mapping=mapping), []
    for _ in range(12):
        names.append(state.next_update(Progress()))
        state.did_update(names[-1])
    critics = ["update_critic"] * 2
    assert names == [*critics * 4, "update", *critics[:1] * 3]  # not yet due after round 2
    assert state.at.updates == 12


def test_publication_is_due_once_in_so_many_updates() -> None:
    state, due, ready = at("practise"), [], practise(10, online=10)
    for update in range(1, 8):
        state.did_update(state.next_update(ready))
        if state.publish_due():
            due.append(update)
            state.did_publish()
        assert not state.publish_due()
    assert due == [3, 6]


# -- pace
@settings(deadline=None)
@given(
    ratio=st.sampled_from([0.1, 0.25, 0.7, 1.0, 1.5, 2.0, 4.0, 20.0]),
    tolerance=st.integers(0, 64),
    turns=st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=200),
    warm_up=st.integers(0, 300),
)
def test_neither_side_runs_further_ahead_than_the_tolerance(ratio, tolerance, turns, warm_up) -> None:
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


@settings(deadline=None)
@given(bursts=st.lists(st.integers(0, 2000), min_size=1, max_size=30), ratio=st.sampled_from([0.3, 1.0, 4.0]))
def test_catching_up_is_capped(bursts, ratio) -> None:
    bucket, steps, updates = RateLimiter(Pace(ratio, 16), uncounted_steps=0), 0, 0
    for burst in bursts:  # a real robot waits for nobody
        steps, before = steps + burst, updates
        while bucket.may_update(steps, updates):
            updates += 1
        assert updates - before <= 2 * 16 + 1 + ratio


def test_what_will_not_be_caught_up_is_logged(caplog) -> None:
    bucket = RateLimiter(Pace(1.0, 16), uncounted_steps=0)
    with caplog.at_level(logging.WARNING):
        assert bucket.may_update(1018, 0)
    assert "1000 updates will not be made up for" in caplog.text
    count = len(caplog.records)
    bucket.may_update(1019, 0)
    assert len(caplog.records) == count  # not for every step


def test_the_learner_starts_when_told_and_a_simulator_is_free_until_then() -> None:
    state = at("practise")
    assert state.step_limit(practise(500, online=9)) is None
    assert state.next_update(practise(500, online=9)) is None
    ready = practise(500, online=500)
    assert state.next_update(ready) == "update_critic"
    assert state.step_limit(ready) == 500 + 5  # 8 + 1 updates ahead at 2 a step; the first 500 pay for nothing
    made = 0
    while (name := state.next_update(ready)) is not None:
        state.did_update(name)
        made += 1
    assert made == 8
    assert state.waits_for(ready) == "env steps: pace"
    assert state.next_update(practise(502, online=0)) is not None  # started is started


def test_free_pace_and_phases_without_updates_limit_nobody() -> None:
    state = at("practise", mapping=edited("phases.practise.pace", "free"))
    assert state.step_limit(practise(900, online=900)) is None
    assert state.next_update(practise(900, online=900))
    assert at("evaluate").step_limit(practise(9, phase="evaluate")) is None
    assert at("evaluate").waits_for(Progress()) == "the actors: this phase has no updates"


def test_lockstep_is_one_update_for_each_step() -> None:
    mapping = edited("phases.practise.pace", "lockstep")
    del mapping["phases"]["practise"]["start_when"]
    state = at("practise", practise(100), mapping)
    assert state.next_update(practise(100)) is None
    for step in range(101, 110):
        assert state.step_limit(practise(step - 1)) == step
        assert state.step_limit(practise(step)) == step
        state.did_update(state.next_update(practise(step)))
        assert state.next_update(practise(step)) is None


# -- resume
def test_a_run_resumes_by_name_where_it_stood() -> None:
    state = at("practise", practise(100, wall_s=7))
    now = practise(130, online=130, wall_s=9)
    for _ in range(5):
        state.did_update(state.next_update(now))
    saved = json.loads(json.dumps(state.state_dict()))
    mapping = deepcopy(PLAN)
    clone = mapping["phases"]["clone"]
    mapping["phases"] = {"warm_up": clone, "more": clone, **mapping["phases"]}  # an index would now name another phase
    resumed = PlanState(load(mapping))
    resumed.load_state_dict(saved)
    assert resumed.at == state.at
    assert resumed.next_update(now) == state.next_update(now) == "update"
    assert resumed.step_limit(now) == state.step_limit(now)
    assert resumed.updates == 5
    resumed.advance(practise(1100, wall_s=9))
    assert resumed.phase.name == "evaluate"


def test_an_edited_current_phase_is_refused_unless_accepted() -> None:
    saved = at("practise").state_dict()
    edits = PlanState(load(edited("phases.practise.until", ["env_steps >= 77"])))
    with pytest.raises(ConfigError, match=r"'practise' was edited .*until was .*1000.* is \['env_steps >= 77'\]"):
        edits.load_state_dict(saved)
    edits.load_state_dict(saved, accept=True)
    edits.advance(practise(77))
    assert edits.phase.name == "evaluate"
    PlanState(load(edited("phases.clone.until", "updates >= 9"))).load_state_dict(saved)  # another phase is free


def test_a_checkpoint_in_a_phase_that_is_gone_is_refused() -> None:
    saved = at("practise").state_dict()
    with pytest.raises(ConfigError, match="no phase is called 'practise'"):
        PlanState(load(edited("phases.practise", None))).load_state_dict(saved, accept=True)


def test_a_restart_far_behind_its_data_does_not_train_for_minutes() -> None:
    state = at("practise")
    state.next_update(practise(10, online=10))
    resumed = PlanState(load())
    resumed.load_state_dict(state.state_dict())
    made, now = 0, practise(900, online=900)
    while (name := resumed.next_update(now)) is not None:
        resumed.did_update(name)
        made += 1
    assert made <= 2 * 8 + 3


def test_a_finished_plan_stays_finished() -> None:
    state = PlanState(load())
    state.command("stop")
    assert state.advance(Progress()) == [("fit_normalizer", "demo")]
    resumed = PlanState(load())
    resumed.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert resumed.directive()["mode"] == "stop"


# -- the operator
def test_the_operator_has_the_last_word() -> None:
    state = at("practise")
    ready = practise(20, online=20)
    state.command("hold")
    assert state.directive()["mode"] == "idle"
    assert state.directive()["boundary"] == "now"
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


def test_an_unknown_command_is_refused() -> None:
    state = PlanState(load())
    for words, text in [(("nxt",), "'next'"), (("goto", "clon"), "'clone'"), (("hold", "on"), "hold takes nothing")]:
        with pytest.raises(ConfigError, match=text):
            state.command(*words)
    assert state.advance(Progress()) == []


# -- the files
BASE = """
defaults: [algo: any, policy: any, plan: quickstart, _self_]
utd: 2
updates: [update_critic, update]
max_env_steps: 20000
baseline_episodes: 30
eval_episodes: 50
eval_steps: 10000
phase: null
learner: false
run_dir: runs/test
remembered: []
task: {has_operator: true}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config folder with the plans as they are and a stand-in for the rest; its algorithm has `update` alone."""
    shutil.copytree(ROOT / "config" / "plan", tmp_path / "plan")
    (tmp_path / "base.yaml").write_text(BASE)
    for path in ("algo/any.yaml", "algo/rejection.yaml", "algo/sac_pi0.yaml", "policy/any.yaml", "policy/flow.yaml"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("_target_: collections.OrderedDict")
    return tmp_path


def composed(config: Path, *overrides: str) -> Plan:
    with initialize_config_dir(str(config), version_base=None):
        return load(OmegaConf.to_container(compose("base", list(overrides)).plan, resolve=True))


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "config" / "plan").glob("*.yaml")])
def test_every_plan_of_the_repository_loads(config, name) -> None:
    with initialize_config_dir(str(config), version_base=None):
        mapping = OmegaConf.to_container(compose("base", [f"plan={name}"]).plan, resolve=True)
    assert load_plan(mapping, methods=None, has_operator=True).phases
    if name in ("collect", "hiors", "sac_pi0"):
        with pytest.raises(ConfigError, match="operator"):
            load_plan(mapping, methods=None, has_operator=False)
    else:
        assert load_plan(mapping, methods=None, has_operator=False).phases


def test_the_quickstart_measures_before_and_after_and_needs_lasting_success(config) -> None:
    plan = composed(config)
    assert list(plan.phases) == ["demonstrate", "baseline", "practise", "evaluate"]
    assert (plan.phases["baseline"].episodes, plan.phases["evaluate"].episodes) == (30, 50)
    state = PlanState(plan.only("practise"))
    peak = ((False, False),) * 5 + ((True, False),) * 95  # the last 95 in a row, and yet 95 % of 100
    lasting = (*peak[1:], (True, False))
    for steps, recent in ((7000, peak), (5999, lasting)):
        state.advance(practise(steps, episodes=100, recent=recent))
        assert state.phase is not None
    state.advance(practise(6000, episodes=101, recent=lasting))
    assert state.phase is None


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "config" / "plan").glob("*.yaml")])
def test_evaluations_are_as_long_as_the_words_of_the_config_say(config, name) -> None:
    words = [f"plan={name}", "baseline_episodes=3", "eval_episodes=7", "eval_steps=2000"]
    with initialize_config_dir(str(config), version_base=None):
        mapping = OmegaConf.to_container(compose("base", words).plan, resolve=True)
    plan = load_plan(mapping, methods=None, has_operator=True)
    for phase in (phase for phase in plan.phases.values() if phase.actors.mode == "evaluate"):
        episodes = 3 if phase.name == "baseline" else 7
        assert phase.until == (f"episodes >= {episodes}", "env_steps >= 2000")
        assert phase.episodes == episodes


def test_a_budget_of_evaluation_ends_it_with_an_episode_and_never_within_one() -> None:
    state = at("evaluate", mapping=edited("phases.evaluate.until", ["episodes >= 50", "env_steps >= 2000"]))

    def seen(steps: int, finished: int) -> str | None:
        counts = PhaseCounts(env_steps=steps, episodes=finished // 1000, finished_steps=finished)
        state.advance(Progress({"evaluate": counts}))
        return state.at.phase

    assert seen(1999, 1000) == "evaluate"
    assert seen(2500, 1000) == "evaluate", "the second episode is still under way"
    assert seen(3000, 2000) is None


def test_the_command_line_edits_a_phase_and_hydra_refuses_a_misspelt_one(config) -> None:
    plan = composed(config, "plan.phases.practise.until=[operator]", "utd=4")
    assert plan.phases["practise"].until == ("operator",)
    assert plan.phases["practise"].pace == Pace(4.0, 64)
    with pytest.raises(ConfigCompositionException, match="practis"):
        composed(config, "plan.phases.practis.until=[operator]")


@pytest.fixture
def tool(config, monkeypatch, capsys):
    """tools/plan.py on that folder: arguments -> (exit status, output, error)."""
    spec = importlib.util.spec_from_file_location("plan_tool", ROOT / "tools" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CONFIG", config)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plan.py", *arguments])
        return module.main(), *capsys.readouterr()

    return run


def test_the_tool_shows_the_timeline(tool) -> None:
    status, output, error = tool("show", "quickstart", "max_env_steps=123")
    assert (status, error) == (0, "")
    order = [output.index(text) for text in ("1. demonstrate", "2. baseline", "3. practise", "4. evaluate")]
    assert order == sorted(order)
    assert "env_steps >= 123" in output
    status, output, _ = tool("show", "quickstart", "phase=practise", "task.has_operator=false")
    assert "1. practise" in output
    assert "100% online" in output
    assert "note: practise trains without demo" in output


def test_the_tool_takes_a_file(tool, tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / "config" / "plan" / "evaluate.yaml").read_text())
    status, output, _ = tool("show", str(path), "plan.phases.evaluate.until=[episodes >= 7]")
    assert status == 0
    assert "episodes >= 7" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("show", "quikstart"), "did you mean 'quickstart'?"),
        (("show", "none.yaml"), "no such file"),
        (("show", "quickstart", "plan.phases.practis.until=[operator]"), "plan.phases.practis.until"),
        (("show", "quickstart", "phase=practis"), "did you mean 'practise'?"),
        (("show", "quickstart", "max_env_steps=${nothing}"), "nothing"),
        (("check", "quickstart"), "no update of the algorithm is called 'update_critic'; did you mean 'update'?"),
        (("check", "quickstart", "algo._target_=serl_launcher.algorithms.nothing.No"), "serl_launcher"),
    ],
)
def test_the_tool_says_what_is_wrong_in_one_sentence(tool, arguments, sentence) -> None:
    status, output, error = tool(*arguments)
    assert (status, output) == (1, "")
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "seconds"), [({}, {}), ({"on_silence": "keep"}, {"online": math.inf}),
                           ({"on_silence": {"truncate": 5}}, {"online": 5.0})],
)  # fmt: skip
def test_what_silence_does_to_an_open_episode_is_a_word_of_its_source(words, seconds):
    practise = {"actors": {"mode": "collect", "into": "online"}, "until": "operator"}
    plan = {"sources": {"online": {"capacity": 500, **words}}, "phases": {"practise": practise}}
    assert load_plan(plan, methods=None, has_operator=True).on_silence == seconds


@pytest.mark.parametrize("word", ["truncate", 60, {"truncate": -1}, {"cut": 5}])
def test_another_word_for_silence_is_refused_with_its_place(word):
    practise = {"actors": {"mode": "collect", "into": "online"}, "until": "operator"}
    plan = {"sources": {"online": {"capacity": 500, "on_silence": word}}, "phases": {"practise": practise}}
    with pytest.raises(ConfigError, match=r"plan\.sources\.online\.on_silence"):
        load_plan(plan, methods=None, has_operator=True)


def test_only_sources_that_a_phase_fills_or_looks_at_are_made():
    sources = {
        "demo": {"capacity": 500}, "online": {"capacity": 600}, "spare": {"capacity": 700},
        "bought": {"capacity": 800, "dataset": "folder"}, "good": {"of": "online", "keep": "successful"},
    }  # fmt: skip
    clone = {"actors": {"mode": "idle"}, "updates": ["update"], "data": {"good": 1.0}, "until": "updates >= 1"}
    teach = {"actors": {"mode": "teleop", "into": "demo"}, "until": "operator"}
    look = {"actors": {"mode": "evaluate"}, "until": "episodes >= 3"}

    def made(**phases):
        return load_plan({"sources": sources, "phases": phases}, methods=None, has_operator=True).capacities

    assert made(teach=teach) == {"demo": 500, "bought": 800}
    assert made(clone=clone) == {"online": 600, "bought": 800}
    assert made(teach=teach, look=look) == {"demo": 500, "bought": 800, "eval": 20_000}
