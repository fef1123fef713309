"""The real programs, started as a person starts them: they are killed in mid-run, and the run goes on to its end."""

import hashlib
import json
import os
import re
import shutil
import signal
from collections import Counter, defaultdict

import pytest
import safetensors.torch
from serl_client.keys import machine

from tests.shared import oracle
from tests.shared.models import assert_same
from tests.shared.programs import PROMPT, Programs

EVALUATED = 8
WORDS = [  # the quickstart on a task that needs no simulator, made short
    "task=fake", "utd=1", "critic.hidden=[32,32]", "policy.hidden=[32,32]", "checkpoint_s=0.5",
    'plan.phases.demonstrate.until=["demo.episodes >= 5"]',
    'plan.phases.baseline.until=["episodes >= 4"]',
    'plan.phases.practise.until=["env_steps >= 600", operator]',
    f'plan.phases.evaluate.until=["episodes >= {EVALUATED}"]',
]  # fmt: skip
LONG = [*WORDS, 'plan.phases.practise.until=["env_steps >= 15000", operator]']


def assert_goes_on(before, after):
    """Nothing that was durable before is missing after, and no number went back."""
    assert all(after.episodes.get(name, 0) >= steps for name, steps in before.episodes.items())
    for then, now in ((before.directives, after.directives), (before.weights, after.weights)):
        assert now[: len(then)] == then
        assert [row[0] for row in now] == list(range(1, len(now) + 1))
    first, *later = [update for _, _, update in after.weights[len(before.weights) :]] or [before.checkpointed]
    assert first >= min(before.checkpointed, before.weights[-1][2])  # it was perhaps written beside that checkpoint
    assert all(update >= before.checkpointed for update in later)
    assert after.checkpointed >= before.checkpointed > 0


def assert_whole(run_dir, *, cut):
    """Every step is what was acknowledged, every episode is whole and once.

    Without an end are at most the last one of each start of an actor, which the plan's end or a kill called off, and
    `cut` more. That last one stays open until its actor comes again.
    """
    found = oracle.whole(run_dir / "store")
    assert not any(source["tail"] for source in found.sources.values()), "nothing was evicted"
    rows = sorted(found.episodes.values(), key=lambda row: row["number"])
    assert found.steps.keys() == {row["number"] for row in rows}
    stamps, last = defaultdict(list), {row["session"]: row["number"] for row in rows}
    for row in rows:
        steps = found.steps[row["number"]]
        assert [step.index for step in steps] == list(range(row["steps"]))
        assert row["closed"] or row["number"] == last[row["session"]]
        stamps[row["session"]] += [(int(step.record["directive"]), int(step.record["weights"])) for step in steps]
    assert sum(not row["final"] for row in rows) <= cut + len(last)
    assert set(Counter(outcome["episode"] for outcome in found.outcomes).values()) == {1}
    for given in stamps.values():
        directives, versions = zip(*given, strict=True)
        assert list(directives) == sorted(directives)
        acted = [version for version in versions if version]
        assert acted == sorted(acted)
    assert not list((run_dir / "actors").glob("*/outbox/*.records")), "everything was delivered"


def assert_finished(programs, before):
    """The run's summary says what its store says, and goes on from what was there `before`."""
    summary = json.loads((programs.run_dir / "summary.json").read_text())
    episodes = oracle.whole(programs.run_dir / "store").episodes.values()
    assert summary["env_steps"] == sum(row["steps"] for row in episodes if row["source"] != "eval")
    assert summary["updates"] >= before.checkpointed
    assert summary["eval"]["episodes"] == summary["eval"]["distinct_starts"] == EVALUATED
    assert summary["before"]["episodes"] == 4
    assert not {word for word in ("Traceback", "errors.log") if word in programs.said()}
    return summary


# -- killed


@pytest.mark.slow
def test_killed_or_interrupted_in_any_process_and_in_all_the_run_goes_on_to_its_end(programs):
    """Server and inference are started again by the launcher. After the death of the trainer, which ends the launcher,
    of the launcher, which ends its children, and of the actor, a person gives the same command again."""
    learner = programs.start("learner", *LONG)
    programs.until(lambda: "waiting for the first actor" in programs.said())
    interrupt(programs, learner, signal.SIGTERM, left=set())
    learner, actor = programs.start("learner", *LONG), programs.start("actor", *LONG)
    for victims in (
        ["inference"], ["server"], ["actor"], ["trainer"], ["launcher"], ["Ctrl-C"],
        ["launcher", "server", "trainer", "inference", "actor"],
    ):  # fmt: skip
        before = programs.practised(programs.facts().practised + 40)
        if victims == ["Ctrl-C"]:
            interrupt(programs, learner, signal.SIGINT, left={"actor"})
            interrupt(programs, actor, signal.SIGINT, left=set())
        else:
            programs.kill(*victims)
        if {"trainer", "launcher"} & set(victims):
            assert programs.status(learner) != 0
            programs.until(lambda: not {"launcher", "server", "trainer", "inference"} & set(programs.alive()), PROMPT)
        if learner.poll() is not None:
            learner = programs.start("learner", *LONG)
        if "actor" in victims or actor.poll() is not None:
            actor.wait()
            actor = programs.start("actor", *LONG)
        assert_goes_on(before, programs.practised(before.practised + 20))
    programs.order("next")
    assert [programs.status(side) for side in (learner, actor)] == [0, 0]
    assert_finished(programs, before)
    assert_whole(programs.run_dir, cut=1)


def interrupt(programs, process, number, *, left):
    """Signal a program as a terminal does; only the programs `left` are there soon after."""
    os.killpg(process.pid, number)
    assert process.wait(PROMPT) not in (0, None)
    programs.until(lambda: set(programs.alive()) == left, PROMPT)


# -- not killed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(programs, exit statuses) of a run whose actor was there long before its learner."""
    with Programs(tmp_path_factory.mktemp("finished")) as made:
        actor = made.start("actor", *WORDS)
        made.until(lambda: "learner: AWAY" in made.said())
        assert actor.poll() is None
        learner = made.start("learner", *WORDS)
        yield made, [made.status(learner), made.status(actor)]


@pytest.mark.slow
def test_an_actor_waits_for_its_learner_and_ends_with_it(finished):
    programs, statuses = finished
    assert statuses == [0, 0]
    assert not programs.alive()
    assert_finished(programs, programs.facts())
    assert_whole(programs.run_dir, cut=0)


def evaluated(run_dir):
    """(the steps of each episode of the evaluation's last directive, the sha256 of the weights that acted in them)."""
    found, names = oracle.whole(run_dir / "store"), Programs(run_dir.parent).facts().weights
    rows = [row for row in found.episodes.values() if row["phase"] == "evaluate"]
    last = max(row["directive"] for row in rows)
    episodes = [found.steps[row["number"]] for row in rows if row["directive"] == last]
    assert len(episodes) >= EVALUATED
    (version,) = {int(step.record["weights"]) for steps in episodes for step in steps}
    return episodes, {number: sha256 for number, sha256, _ in names}[version]


@pytest.mark.slow
def test_the_weights_that_were_evaluated_are_the_trained_ones(finished):
    """By hash: of the summary, of the file, of what was trained, and of what acted in every step."""
    run_dir = finished[0].run_dir
    summary = json.loads((run_dir / "summary.json").read_text())
    file = run_dir / "weights" / f"{summary['eval']['weights_sha256']}.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem == evaluated(run_dir)[1]
    newest = max((run_dir / "checkpoints").glob("[0-9]*"))
    trained = safetensors.torch.load_file(newest / "tensors.safetensors")
    prefix = "algorithm.policy."
    acting = {name.removeprefix(prefix): value for name, value in trained.items() if name.startswith(prefix)}
    assert_same(acting, safetensors.torch.load_file(file))
    assert summary["updates"] == json.loads((newest / "manifest.json").read_text())["updates"]


@pytest.mark.slow
def test_a_finished_run_is_evaluated_again_elsewhere_with_the_trained_weights(finished, tmp_path):
    """On another machine, where nothing is that its actors kept, and on starts that nothing has seen. One of two
    actors asks the inference process, and has two environments; the other has the policy in its own process."""
    here, there = finished[0], Programs(tmp_path)
    shutil.copytree(here.run_dir, there.run_dir, ignore=shutil.ignore_patterns("actors"))
    trained = json.loads((there.run_dir / "summary.json").read_text())
    words = [word for word in WORDS if "phases" not in word or "phases.evaluate" in word]
    words += ["plan=evaluate", "task.env.latency=0.005"]
    here.run_dir.rename(here.run_dir.with_name("moved"))
    try:
        actors = {"local": 1, "remote": 2}
        sides = [there.start("actor", *words, f"name={n}", f"inference={n}", f"envs={e}") for n, e in actors.items()]
        names = {"local", "remote/0", "remote/1"}
        there.until(lambda: all(re.search(rf"\[{name}\] \S+ \S+ IDLE", there.said()) for name in names))
        sides.append(there.start("learner", *words))
        assert [there.status(side) for side in sides] == [0, 0, 0]
    finally:
        there.end()
        here.run_dir.with_name("moved").rename(here.run_dir)
    again = json.loads((there.run_dir / "evaluation.json").read_text())
    assert json.loads((there.run_dir / "summary.json").read_text()) == trained
    assert again["eval"]["episodes"] == again["eval"]["distinct_starts"] == EVALUATED
    episodes, acted = evaluated(there.run_dir)
    assert again["eval"]["weights_sha256"] == trained["eval"]["weights_sha256"] == acted
    assert again["updates"] == trained["updates"]
    assert not {steps[0].origin for steps in episodes} & {steps[0].origin for steps in evaluated(here.run_dir)[0]}
    assert {name.rsplit("-", 2)[0] for name in there.facts().episodes} == {machine(), *names}
    assert_whole(there.run_dir, cut=0)
    assert not {word for word in ("Traceback", "errors.log") if word in there.said()}
