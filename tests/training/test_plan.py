"""A plan is refused at load or it can be followed; the run's place in it depends on nothing but what was accepted."""

import math
import re

import pytest
from serl_client.errors import ConfigError

from serl_launcher.training.plan import Pace, PlanSource, Update, View
from serl_launcher.training.plan_reader import load_plan

from .plans import METHODS, PLAN, edited, load

COLLECT = {"mode": "collect", "into": "online"}


def look(every, until="episodes >= 3", unit="updates"):
    return {f"every_{unit}": every, "until": until}


def twice(*phases, **more):
    return {"phases": [*phases], "times": 2, **more}


# -- loading
def test_a_good_plan_is_read_in_full():
    plan = load()
    assert list(plan.phases) == ["demonstrate", "clone", "practise", "evaluate"]
    assert plan.sources["demo"] == PlanSource(500)
    assert plan.views == {"success": View(("online", "demo"), ("successful",), 3, "train")}
    phase = plan.phases["practise"]
    assert phase.updates[0] == Update("update_critic", {"success": 0.75, "demo": 0.25})
    assert phase.update("update").data == {"success": 0.75, "demo": 0.25}
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
        ("sources.success.split", "trian", "plan.sources.success.split", "train"),
        ("sources.success.start_steps", "intervend", "plan.sources.success.start_steps", "intervened"),
        ("sources.demo.capcity", 5, "plan.sources.demo", "capacity"),
        ("sources.demo.archive", "lerobt", "plan.sources.demo.archive", "lerobot"),
        ("phases.practise.on_begin", ["publsh"], "plan.phases.practise.on_begin[0]", "publish"),
        ("phases.practise.evaluate", {"every_update": 5}, "plan.phases.practise.evaluate", "every_updates"),
        ("phases.practise.evaluate", look(5, "episode >= 3"), "plan.phases.practise.evaluate.until[0]", "episodes"),
        ("repeat", {"phases": ["practice"], "times": 2}, "plan.repeat.phases[0]", "practise"),
        ("repeat", {"phases": ["practise"], "time": 2}, "plan.repeat", "times"),
        ("repeat", twice("practise", until="sucess[5] >= 1"), "plan.repeat.until[0]", "success"),
        ("phase", {}, "plan", "phases"),
    ],
)
def test_a_typo_is_refused_with_its_line_and_the_nearest_right_word(path, value, line, nearest):
    with pytest.raises(ConfigError, match=rf"{re.escape(line)}.*did you mean {nearest!r}\?"):
        load(edited(path, value))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("sources.demo.capacity", 0, "whole number >= 1"),
        ("sources.demo.capacity", True, "whole number >= 1"),
        ("sources.demo", 500, "should be a mapping"),
        ("sources.the-demo", {"capacity": 5}, "letters, digits"),
        ("phases.practise.data", {"demo": -1}, "positive number"),
        ("phases.practise.data", {"demo": False}, "positive number"),
        ("phases.practise.data", {"demo": 0}, "needs data"),
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
        ("phases.practise.updates", ["update", {"update": {"batch": 8}}], "in equal batches"),
        ("phases.practise.updates", [{"update": {"batch": 0}}], "whole number >= 1"),
        ("phases.practise.updates", [{"update": {"order": "twice"}}], "no order is called 'twice'"),
        ("phases.practise.updates", ["update", {"update": {"order": "once"}}], "in the same order"),
        *(("phases.practise.until", until, "can never end") for until in (
            [], ["seen"], ["success[20] > 1"], ["online.steps > 2000"],  # more than it holds
            ["demo.episodes >= 9"], ["env_steps >= 9 and demo.episodes >= 9"],  # filled by another phase
        )),
        ("phases.clone.until", ["env_steps >= 9"], "can never end"),
        ("phases.clone.until", ["success[5] >= 0.1"], "can never end"),
        ("phases.demonstrate.until", ["updates >= 9"], "can never end"),
        ("phases.demonstrate.until", ["unassisted_success[5] >= 0.1"], "can never end"),
        ("phases.evaluate.until", ["interventions >= 1"], "can never end"),
        ("phases.clone.actors", {"mode": "evaluate"}, "nothing trains in it: train in a phase of its own"),
        ("phases.practise.start_when", "seen", "nothing can meet it"),
        ("phases.clone.actors.into", "demo", "make no data"),
        ("phases.evaluate.actors.intervene", True, "takes over in mode 'collect', not in 'evaluate'"),
        ("phases.evaluate.actors.policy", "random", "for mode 'collect', not 'evaluate'"),
        ("phases.practise.actors.by", "judge", "is of mode 'evaluate', and names the actor"),
        ("phases.evaluate.actors.by", 7, "is of mode 'evaluate', and names the actor"),
        ("phases.practise.actors", {**COLLECT, "policy": "random", "explore": True}, "without 'explore'"),
        ("phases.evaluate.on_begin", ["publish"], "only a phase with updates has"),
        ("sources.demo.dataset", 5, "the folder of a LeRobot dataset"),
        ("phases", {}, "nothing to do"),
        ("phases.clone.pace", {"updates_per_step": 1, "tolerance": 8}, "no env steps to keep pace with"),
        ("phases.clone.start_when", "demo.episodes >= 9", "nothing can meet it"),
        ("phases.practise.start_when", "updates >= 9", "nothing can meet it"),
        ("phases.practise.evaluate", {"until": "episodes >= 3"}, "either every_env_steps or every_updates"),
        ("phases.practise.evaluate", look(5) | {"every_env_steps": 5}, "either every_env_steps or every_updates"),
        ("phases.practise.evaluate", {"every_updates": 5}, "'until' is missing"),
        ("phases.practise.evaluate", look(0), "whole number >= 1"),
        ("phases.practise.evaluate", look(5, "updates >= 3"), "can never end"),
        ("phases.clone.evaluate", look(5, unit="env_steps"), "make no env steps: say every_updates"),
        ("phases.demonstrate.evaluate", look(5), "only a phase with updates has"),
        ("phases.evaluate.evaluate", look(5), "only a phase with updates has"),
        *((f"phases.{name}", PLAN["phases"]["clone"], "has no '.' and no '#'") for name in ("clone#2", "#")),
        ("repeat", {"phases": ["practise"]}, "'times' is missing"),
        ("repeat", twice("practise") | {"times": 0}, "whole number >= 1"),
        *(("repeat", twice(*names), "one another in the plan: demonstrate, clone, practise, evaluate") for names in (
            [], ["clone", "evaluate"], ["evaluate", "practise"], ["practise", "practise"],
        )),
        *(("repeat", twice("practise", "evaluate", until=f"{unit} >= 9"), f"{unit} is of one phase, and not of all")
          for unit in ("env_steps", "episodes", "updates", "wall_s")),
        ("repeat", twice("practise", until="operator"), "'success[20] >= 0.9', or what a source holds"),
        ("repeat", twice("practise", until="success[5] > 1"), "nothing in practise meets 'success[5] > 1'"),
        ("repeat", twice("practise", "evaluate", until="demo.steps >= 9"), "nothing in practise, evaluate meets"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_a_reason(path, value, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        load(edited(path, value))


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
def test_evaluation_keeps_its_own_source_and_nothing_trains_on_it(path, value):
    with pytest.raises(ConfigError):
        load(edited(path, value))
    assert load().phases["evaluate"].actors.into == "eval"
    assert load().sources["eval"].capacity == 20_000
    assert load(edited("sources.eval", {"capacity": 300})).capacities["eval"] == 300


def test_without_an_operator_teleop_and_its_data_are_left_out():
    plan = load(edited("phases.clone", None), has_operator=False)
    assert list(plan.phases) == ["practise", "evaluate"]
    assert plan.phases["practise"].update("update").data == {"success": 1.0}
    assert "demonstrate" in plan.notes[0]
    assert "practise trains without demo" in plan.notes[1]
    mapping = edited("phases.clone", None)
    mapping["sources"]["good"] = {"of": ["demo"], "keep": ["rewarded"]}  # a view of nothing but demonstrations
    mapping["phases"]["practise"]["data"] = {"success": 1, "good": 1}
    assert load(mapping, has_operator=False).phases["practise"].update("update").data == {"success": 1.0}
    with pytest.raises(ConfigError, match=r"clone.data: only an operator fills demo"):
        load(has_operator=False)
    with pytest.raises(ConfigError, match="nothing to do without an operator"):
        load({**PLAN, "phases": {"demonstrate": PLAN["phases"]["demonstrate"]}}, has_operator=False)


def test_a_dataset_stands_in_for_the_operator():
    plan = edited("sources.demo.dataset", "/data/demonstrations")
    assert load_plan(plan, methods=METHODS, has_operator=False).phases["clone"].update("update").data == {"demo": 1.0}


def test_an_operator_who_may_take_over_can_end_a_phase_by_it():
    plan = edited("phases.practise.until", ["interventions >= 5"])
    with pytest.raises(ConfigError, match="can never end"):
        load(plan)
    plan["phases"]["practise"]["actors"]["intervene"] = True
    assert load(plan).phases["practise"].actors.intervene
    del plan["phases"]["clone"]
    with pytest.raises(ConfigError, match="can never end without an operator"):
        load(plan, has_operator=False)


def test_an_update_may_have_data_of_its_own():
    mapping = edited("phases.practise.updates", ["update_critic", {"update": {"data": {"demo": 2}}}])
    phase = load(mapping).phases["practise"]
    assert phase.update("update").data == {"demo": 1.0}
    assert phase.update("update_critic").data == {"success": 0.75, "demo": 0.25}


def test_a_share_of_zero_takes_a_source_out_of_a_plan_that_another_one_begins_with():
    assert load(edited("phases.practise.data.demo", 0)).phases["practise"].update("update").data == {"success": 1.0}


def test_one_phase_can_be_run_alone():
    assert list(load().only("clone").phases) == ["clone"]
    with pytest.raises(ConfigError, match="did you mean 'clone'"):
        load().only("clon")
    plan = edited("repeat", twice("practise", "evaluate"))
    plan["phases"]["practise"]["evaluate"] = look(5)
    alone = load(plan).only("practise")
    assert (list(alone.phases), alone.repeat) == (["practise"], None)
    assert alone.phases["practise"].evaluate.phase.name == "practise.evaluate"


def test_repeated_phases_stand_in_the_plan_once_for_each_time_between_the_others():
    mapping = edited("repeat", twice("clone", "practise", until=["online.episodes >= 9", "success[5] >= 0.8"]))
    mapping["phases"]["practise"]["evaluate"] = look(5)
    plan = load(mapping)
    assert list(plan.phases) == ["demonstrate", "clone#1", "practise#1", "clone#2", "practise#2", "evaluate"]
    assert plan.outline == ["demonstrate", "clone#1", "practise#1", "evaluate"]
    assert plan.phases["practise#2"].evaluate.phase.name == "practise#2.evaluate"
    assert plan.phases["practise#2"].named("practise#1") == plan.phases["practise#1"]
    assert plan.capacities == load().capacities
    mapping["repeat"]["phases"] = ["demonstrate", "clone", "practise"]
    mapping["sources"]["demo"]["dataset"] = "/data/demonstrations"
    left = load(mapping, has_operator=False)
    assert list(left.phases) == ["clone#1", "practise#1", "clone#2", "practise#2", "evaluate"]
    mapping["repeat"] = twice("demonstrate")
    assert list(load(mapping, has_operator=False).phases) == ["clone", "practise", "evaluate"]


@pytest.mark.parametrize(
    ("word", "seconds"),
    [(None, {}), ("keep", {"online": math.inf}), ({"truncate": 5}, {"online": 5.0}),
     *((word, None) for word in ("truncate", 60, {"truncate": -1}, {"cut": 5}))],
)  # fmt: skip
def test_what_silence_does_to_an_open_episode_is_a_word_of_its_source(word, seconds):
    words = {} if word is None else {"on_silence": word}
    practise = {"actors": COLLECT, "until": "operator"}
    plan = {"sources": {"online": {"capacity": 500, **words}}, "phases": {"practise": practise}}
    if seconds is not None:
        assert load_plan(plan, methods=None, has_operator=True).on_silence == seconds
        return
    with pytest.raises(ConfigError, match=r"plan\.sources\.online\.on_silence"):
        load_plan(plan, methods=None, has_operator=True)


def test_the_unit_of_a_dataset_is_a_word_of_its_source():
    practise = {"actors": COLLECT, "until": "operator"}
    for word in (None, "degrees", "percent", "radians", "deg"):
        plan = {"sources": {"online": {"capacity": 500, "units": word}}, "phases": {"practise": practise}}
        if word != "deg":
            assert load_plan(plan, methods=None, has_operator=True).sources["online"].units == word
    with pytest.raises(ConfigError, match=r"plan\.sources\.online\.units.*degrees"):
        load_plan(plan, methods=None, has_operator=True)


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        ("calibration", 7, "should be lerobot's calibration file, not 7"),
        ("rename", {"a": 7}, r"\.a: should be the name in the run, not 7"),
        ("rename", 7, "should be a mapping, not 7"),
        ("crop", {"front": [1, 2]}, r"\.front should be 4 whole numbers"),
        ("size", [128.0, 128], "should be 2 whole numbers"),
        ("fps", "fast", "should be a positive number"),
        ("convert", 1, "should be true or false"),
    ],
)
def test_what_a_source_says_of_its_dataset_is_checked(word, value, said):
    practise = {"actors": COLLECT, "until": "operator"}
    plan = {"sources": {"online": {"capacity": 500, word: value}}, "phases": {"practise": practise}}
    with pytest.raises(ConfigError, match=rf"plan\.sources\.online\.{word}.*{said}"):
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
