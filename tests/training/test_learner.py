"""The trainer stops anywhere and goes on as if it had not: weights, random numbers, plan, pace and orders."""

import copy
import logging
import shutil
from dataclasses import asdict

import numpy as np
import pytest
from serl_client import ConfigError, Outcome
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import RetakeError

from serl_launcher.replay.statistics import statistics
from serl_launcher.training import learner, presence
from serl_launcher.training.metrics import read
from tests.shared.clients import RawActor, push_episodes
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.data import make_segment
from tests.shared.models import differences

from .life import LEARNING, STEPS, Life, commands, found, leave, phase, plan_of, push


@pytest.mark.slow
@pytest.mark.parametrize("dies_after", [0, 4, 6, 17])
def test_a_trainer_that_was_stopped_acts_and_goes_on_bit_by_bit(tmp_path, spec, serve, live, dies_after):
    """Stopped after a checkpoint in the first phase, between two, or in the second; the data stay the same."""
    found(tmp_path / "straight", spec)
    shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    plan = plan_of(**LEARNING)
    straight = live(serve(tmp_path / "straight"), plan, seed=0, checkpoint_s=60.0).run()
    expected = straight.everything()

    server = serve(tmp_path / "stopped")
    first = live(server, plan, seed=0, dies_after=dies_after).run()
    before = copy.deepcopy(first.everything())
    second = live(server, plan, seed=1, dies_after=0)
    if dies_after:
        assert second.act() != first.act()
        assert differences(second.everything(), before)
        second.run()
        assert second.act() == first.act()
        assert not differences(second.everything(), before)
    third = live(server, plan, seed=2 if dies_after else 0, checkpoint_s=60.0).run()

    assert first.made + third.made == straight.made
    assert len(straight.made) == 30
    assert not differences(third.everything(), expected)
    assert third.act() == straight.act()
    assert third.learner.publisher.version["sha256"] == straight.learner.publisher.version["sha256"]
    assert third.learner.wall_s > first.learner.keeper.checkpoints.load()["wall_s"] - 60


@pytest.mark.slow
def test_a_trainer_that_dies_soon_after_each_change_of_phase_goes_on_from_there(server, live):
    """Its checkpoints are an hour apart, and it dies in the first update of each phase."""
    plan = plan_of(**LEARNING, last=phase(until="updates >= 3"))
    begun = [live(server, plan, checkpoint_s=3600.0, dies_after=made).run() for made in (6, 24)]
    assert [(life.phase, life.updates) for life in begun] == [("practise", 6), ("last", 30)]
    last = live(server, plan, checkpoint_s=3600.0).run()
    assert [len(life.made) for life in (*begun, last)] == [6, 24, 3]


@pytest.mark.slow
def test_an_update_has_the_batch_that_the_plan_gives_it_also_where_the_checkpoint_knew_no_such_option(server, live):
    plan = plan_of(warm=phase(updates=["update_critic", {"update": {"batch": 4}}], until="updates >= 6"))
    first = live(server, plan, dies_after=3).run()
    assert [(name, len(steps)) for name, steps in first.made] == [
        ("update_critic", 16), ("update", 4), ("update_critic", 16),
    ]  # fmt: skip
    kept = first.learner.keeper.checkpoints.load()["plan"]
    second, older = live(server, plan), copy.deepcopy(kept)
    for update in older["phase"]["updates"]:
        del update["batch"]
    (edit,) = second.learner.state.load_state_dict(older)
    assert edit.startswith("warm.updates: ")
    older["phase"]["updates"][1]["batch"] = 4
    assert not second.learner.state.load_state_dict(older)
    second.run()
    assert [len(steps) for _, steps in second.made] == [4, 16, 4]


@pytest.mark.slow
def test_an_update_that_sees_each_step_once_goes_on_where_it_was_over_a_restart(server, live):
    plan = plan_of(warm=phase(updates=[{"update_critic": {"order": "once"}}], until="updates >= 3"))
    lives = [live(server, plan, dies_after=dies_after).run() for dies_after in (1, None)]
    steps = [step for life in lives for _, seen in life.made for step in seen]
    assert len(steps) == 3 * 16
    assert steps == sorted({*steps})


@pytest.mark.slow
def test_a_run_that_has_learned_nothing_goes_on_with_another_algorithm(server, live):
    collected = plan_of(demonstrate=phase(updates=(), until="wall_s >= 0.1"))
    live(server, collected, config={"algo": {"discount": 0.97}}, seed=1).run()
    plan = plan_of(demonstrate=phase(updates=(), until="wall_s >= 0.1"), clone=phase(until="updates >= 3"))
    life = live(server, plan, config={"algo": {"discount": 0.99}}, seed=2)
    fresh = copy.deepcopy(life.algorithm.state_dict())
    life.begin()
    assert not differences(life.algorithm.state_dict(), fresh), "nothing of the other algorithm was taken"
    assert life.learner.state.phase.name == "demonstrate", "its plan begins at the beginning"


@pytest.mark.slow
def test_an_edit_of_the_current_phase_is_refused_unless_it_is_accepted(server, live):
    live(server, plan_of(**LEARNING), dies_after=10).run()
    edited = plan_of(**{**LEARNING, "practise": {**LEARNING["practise"], "until": "updates >= 12"}})
    with pytest.raises(ConfigError, match=r"'practise' was edited.*updates >= 12.*updates >= 24.*accept_plan=true"):
        live(server, edited).run()
    changed = live(server, edited, accept_plan=True).run()
    assert len(changed.made) == 8
    (change,) = changed.learner.changes
    assert (change["updates"], change["what"][:16]) == (10, "practise.until: ")
    (line,) = [line for line in read(changed.learner.monitor.metrics.path) if line["kind"] == "changed"]
    assert (line["updates"], line["what"]) == (10, change["what"])


@pytest.mark.slow
def test_another_plan_begins_with_what_was_learned_and_the_first_goes_on_if_that_is_all(server, live, caplog):
    first = live(server, plan_of(**LEARNING), dies_after=20).run()
    stood = first.learner.keeper.checkpoints.load()["plan"]["at"]
    look = plan_of(look=phase(updates=(), until="wall_s >= 0.1"))
    second = live(server, look, seed=1).run()
    assert (second.made, second.updates) == ([], 20)
    assert not differences(second.algorithm.state_dict(), first.algorithm.state_dict())
    assert second.act() == first.act()
    third = live(server, plan_of(**LEARNING), seed=2, dies_after=2).run()
    at = asdict(third.learner.state.at)
    assert 0.1 <= at["base"].pop("wall_s") - stood["base"].pop("wall_s") < third.learner.wall_s
    assert at | {"turn": None} == stood | {
        "updates": stood["updates"] + 2,
        "turn": None,
        "published_at": at["published_at"],
    }
    live(server, plan_of(more=phase(until="updates >= 3")), seed=3).run()
    caplog.set_level(logging.INFO)
    live(server, plan_of(**LEARNING), seed=4, dies_after=0).run()
    assert "the plan warm -> practise begins anew, with what more had learned" in caplog.text


# -- plan, pace and the operator


@pytest.mark.slow
def test_a_phase_without_data_says_so_and_leaves_that_behind(tmp_path, serve, live, connect):
    server = serve(tmp_path / "run", demo=0)
    paced = phase(start_when="online.steps >= 10", pace={"updates_per_step": 1, "tolerance": 0}, until="operator")
    plan = plan_of(clone=phase(mode="idle", into=None, data={"demo": 1.0}, until="updates >= 1"), practise=paced)
    life, shown = live(server, plan), []
    life.learner.monitor.console.show = shown.append
    life.begin()
    until(lambda: shown and shown[-1]["waits for"] == "data")
    client = connect(server)
    client.command("goto", "practise")
    until(lambda: client.state.directive["phase"] == "practise" and client.state.directive["paced"])
    until(lambda: shown[-1]["waits for"] == "env steps: pace")
    until(lambda: life.learner.director.limit is not None)
    client.command("next")
    leave(client, life)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["idle", "collect"])
def test_a_phase_whose_data_nobody_adds_is_refused_with_its_view(tmp_path, serve, live, monkeypatch, mode):
    monkeypatch.setattr(learner, "HOPE_S", 0.5)
    into = "online" if mode == "collect" else None
    plan = plan_of(clone=phase(mode=mode, into=into, data={"demo": 0.5, "online": 0.5}, until="updates >= 1"))
    with pytest.raises(ConfigError, match=r"phase clone cannot go on: update .* draws from demo"):
        live(serve(tmp_path / "run", demo=0), plan).run()


@pytest.mark.slow
def test_a_phase_that_no_actor_can_do_says_so_and_is_refused_with_its_name(server, live, join, monkeypatch):
    monkeypatch.setattr(presence, "SAY_S", 0.1)
    monkeypatch.setattr(presence, "HOPE_S", 1e9)
    plan = plan_of(teach=phase(updates=(), mode="teleop", into="demo", until=["demo.episodes >= 99", "operator"]))
    life, shown = live(server, plan), []
    life.learner.monitor.console.show = shown.append
    life.begin()
    join(server, paced=True, told=False)
    until(lambda: shown and "arm: it has no operator" in shown[-1]["waits for"])
    with Connection(server.address, m.Hello(m.PROTOCOL, "viewer", "desk")) as desk:
        until(lambda: [
            each for each in desk.call(m.Status(), PATIENCE).report["clients"]
            if "arm: it has no operator" in each.get("waits_for", "")
        ])  # fmt: skip
    monkeypatch.setattr(presence, "HOPE_S", 0.1)
    with pytest.raises(ConfigError, match=r"phase teach cannot go on without an actor that can do it \(arm: it has no"):
        life.end()


@pytest.mark.slow
def test_the_pace_is_kept_over_a_restart(live, connect, server):
    """Steps from before the start pay for nothing, each one after it for one update, also while the trainer is dead."""
    tolerance = 40  # what is owed never exceeds it
    pace = {"updates_per_step": 1, "tolerance": tolerance}
    plan = plan_of(practise=phase(start_when="online.steps >= 40", pace=pace, until="operator"))
    first = live(server, plan, dies_after=tolerance + STEPS).begin()
    until(lambda: first.updates == tolerance)
    client = connect(server)
    push(client, range(2))
    first.end()
    push(client, range(2, 3))
    second = live(server, plan, seed=1).begin()
    until(lambda: second.updates == tolerance + 3 * STEPS)
    push(client, range(3, 4))
    until(lambda: second.updates == tolerance + 4 * STEPS)
    client.command("next")
    leave(client, second)
    assert second.updates == tolerance + 4 * STEPS


@pytest.mark.slow
def test_what_actors_tell_of_a_persons_time_is_kept_over_a_restart(server, live, connect):
    plan = plan_of(practise=phase(until="operator"))
    life, client = live(server, plan).begin(), connect(server)
    client.report({"hand_resets": 2, "reset_s": 90.0, "waiting_s": 30.0})
    until(lambda: life.learner.person_time()["hand_resets"])
    client.command("next")
    leave(client, life)
    (written,) = [line for line in read(server.run_dir / "metrics.jsonl") if line["kind"] == "person"]
    for told in (written, live(server, plan).run().learner.person_time()):
        assert (told["hand_resets"], told["resets_min"], told["waiting_min"], told["takeovers_min"]) == (2, 1.5, 0.5, 0)


@pytest.mark.slow
def test_forged_episodes_neither_change_an_evaluation_nor_end_it(server, live, connect, spec):
    """3 honest failures, and 47 successes of one step by an actor that it is not for, in each way to stamp them."""
    plan = plan_of(evaluate=phase(updates=(), mode="evaluate", into="eval", until="episodes >= 50"))
    life = live(server, plan).begin()
    arm = connect(server)
    until(lambda: arm.state.directive["mode"] == "evaluate")
    told = arm.state.directive
    honest = {"directive": told["number"], "phase": "evaluate", "weights": told["weights"]}
    for number, stamp in enumerate((honest, {**honest, "directive": 2}, {**honest, "weights": 2**40})):
        name = f"mallory{number}"
        with RawActor(server.address, spec, name, session=f"{number}" * 32, outbox=name) as mallory:
            mallory.welcome()
            forged = (make_segment(f"{name}-{i}", 0, 0, 1, ends="terminated", **stamp) for i in range(47))
            mallory.push(0, *(record for each in forged for record in (each, Outcome(each.episode, True))))
            assert mallory.refused()
    push_episodes(arm, (1, 3, 5), **honest)
    assert arm.drain(PATIENCE)
    arm.command("next")
    leave(arm, life)
    found = life.learner.evaluations["evaluate"]
    assert (found["episodes"], found["successes"], len(found["trials"])) == (3, 0, 3)
    assert not life.learner.counters.starts, "no later checkpoint carries them on"


def test_evaluations_within_a_phase_are_of_one_version_each_also_where_the_trainer_dies_in_one(server, live, connect):
    """At 5 and 10 of 12 updates; an episode of practice comes late into the second."""
    evaluate = {"every_updates": 5, "until": "episodes >= 3"}
    plan = plan_of(practise=phase(evaluate=evaluate, publish={"every_updates": 1}, until="updates >= 12"))
    life = live(server, plan).begin()
    arm, told = connect(server), []
    for begun, numbers in enumerate(((0, 2, 3), (4, 5, 6))):
        until(lambda: arm.state.directive["mode"] == "evaluate" and arm.state.directive not in told)
        told.append(arm.state.directive)
        stamp = {"directive": told[-1]["number"], "phase": "practise.evaluate", "weights": told[-1]["weights"]}
        push_episodes(arm, numbers[:2], **stamp)
        if begun:
            push_episodes(arm, [9], directive=told[0]["number"] - 1, phase="practise", weights=1)
        else:
            assert arm.drain(PATIENCE)
            life.die()
            life = live(server, plan, seed=1).begin()
        push_episodes(arm, numbers[2:], **stamp)
        assert arm.drain(PATIENCE)
    leave(arm, life)
    assert (life.updates, [directive["episodes"] for directive in told]) == (12, [3, 3])
    results = life.learner.evaluations
    assert list(results) == ["practise.evaluate@5", "practise.evaluate@10"]
    for result, successes in zip(results.values(), (2, 2), strict=True):
        assert (result["episodes"], result["successes"], result["distinct_starts"]) == (3, successes, 3)
    one, two = results.values()
    assert one["weights_sha256"] != two["weights_sha256"]
    assert not {start for start, *_ in one["trials"]} & {start for start, *_ in two["trials"]}
    lines = [line for line in read(life.learner.monitor.metrics.path) if line["kind"] == "evaluation"]
    assert [(line["phase"], line["updates"]) for line in lines] == [("practise.evaluate", 5), ("practise.evaluate", 10)]


def test_an_evaluation_by_other_weights_than_the_trained_ones_ends_the_run(tmp_path, spec):
    run_dir, plan = found(tmp_path / "run", spec), plan_of(practise=phase(updates=(), until="episodes >= 12"))
    learner = Life(run_dir, None, spec, plan).learner
    learner.ranks.published()
    learner.publisher.version = {"version": 1}
    next(learner.ranks.algorithm.acting.parameters()).data.add_(1)
    with pytest.raises(RetakeError, match="the weights that practise ran are not the trained ones"):
        learner._evaluated(plan.phases["practise"], [1])
    assert not learner.evaluations


def test_the_scale_of_actions_and_states_is_fitted_to_the_source_that_the_plan_names(server, live):
    plan = plan_of(clone=phase(data={"demo": 1.0}, until="updates >= 2", on_begin=[{"fit_normalizer": "demo"}]))
    life = live(server, plan).run()
    fitted = statistics(life.learner.sources, "demo")
    rows = life.learner.sources.buffers["demo"]
    actions = rows.observed("action", None)
    assert len(actions) == 4 * STEPS
    np.testing.assert_allclose(fitted["high"]["action"], actions.max(0))
    np.testing.assert_allclose(fitted["mean"][STATE], rows.observed(STATE, None).mean(0), rtol=1e-5)
    means = [value for key, value in life.algorithm.state_dict().items() if key.endswith("state.mean")]
    assert means
    for mean in means:
        np.testing.assert_allclose(mean, fitted["mean"][STATE], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_while_a_scale_waits_for_a_persons_word_only_stop_ends_the_run(serve, tmp_path, live, connect, caplog, stops):
    fit = phase(data={"demo": 1.0}, until="operator", on_end=[{"fit_normalizer": "good"}])
    server = serve(tmp_path / "run", practise=0)
    life = live(server, plan_of(practise=fit, rest=phase(until="operator"))).begin()
    client = connect(server)
    client.push(make_segment("mine", ends="terminated", directive=client.state.directive["number"], phase="practise"))
    until(lambda: life.learner.sources.size("online")[1])
    for command in ("next", "hold", *["stop"] * stops):
        client.command(command)
    if stops:
        life.end()
        assert life.learner.state.phase is None, "and it is over: the same command does not wait again"
        assert client.state.directive["phase"] != "rest", "nobody began it"
        return
    until(lambda: len(commands(server.run_dir)) == 2 and "holds no step until a person judges" in caplog.text)
    client.push(Outcome("mine", True))
    until(lambda: life.phase == "rest" and life.learner.state.at.held)
