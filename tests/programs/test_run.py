"""The real programs, started as a person starts them: they are killed in mid-run, and the run goes on to its end."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from tests.shared import oracle

EVALUATED = 4
WORDS = [  # the quickstart on a task that needs no simulator, made short
    "task=fake", "utd=1", "critic.hidden=[32,32]", "policy.hidden=[32,32]", "checkpoint_s=0.5",
    'plan.phases.demonstrate.until=["demo.episodes >= 5"]',
    'plan.phases.baseline.until=["episodes >= 4"]', "batch_size=64",
    'plan.phases.practise.until=["env_steps >= 250", operator]',
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
    assert set(Counter(outcome["episode"] for outcome in found.outcomes).values()) <= {1}
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


LEARNER = {"launcher", "server", "trainer", "inference"}
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP, "plan.py stop": None}
SIGNALS[SYSTEMD := "SIGTERM to all"] = signal.SIGTERM  # KillMode=control-group


@pytest.mark.parametrize(
    "strikes",
    [
        pytest.param([{*LEARNER, "actor"}], marks=pytest.mark.program, id="all at once"),
        pytest.param(["Ctrl-C", "plan.py stop", SYSTEMD], marks=pytest.mark.slow, id="stopped"),
        pytest.param(
            ["SIGTERM", "SIGHUP", {"inference"}, {"server"}, {"actor"}, {"trainer"}, {"launcher"}],
            marks=pytest.mark.nightly, id="each",
        ),
    ],
)  # fmt: skip
def test_killed_or_interrupted_in_any_process_and_in_all_the_run_goes_on_to_its_end(programs, strikes):
    """Server and inference are started again by the launcher. After the death of the trainer, which ends the launcher,
    of the launcher, which ends its children, and of the actor, a person gives the same command again."""
    learner = programs.start("learner", *LONG)
    if "SIGTERM" in strikes:  # before there is a robot
        programs.until(lambda: "waiting for the first actor" in programs.said())
        interrupt(programs, learner, signal.SIGTERM, left=set())
        learner = programs.start("learner", *LONG)
    actor = programs.start("actor", *LONG)
    for victims in strikes:
        before = programs.practised(programs.facts().practised + 40)
        if isinstance(victims, str):
            for name in {*LEARNER} - {"launcher"} if victims == SYSTEMD else ():
                os.kill(programs.alive()[name], signal.SIGTERM)
            interrupt(programs, learner, SIGNALS[victims], left={"actor"})
            interrupt(programs, actor, SIGNALS[victims] or signal.SIGINT, left=set())
            stopped = re.findall(r"stopped after (\d+) updates", programs.said())[-1]
        else:
            programs.kill(*victims)
        if {"trainer", "launcher"} & set(victims):
            assert programs.status(learner) != 0
            programs.until(lambda: not LEARNER & set(programs.alive()))
        if learner.poll() is not None:
            learner = programs.start("learner", *LONG)
            if isinstance(victims, str):
                programs.until(
                    lambda line=f"resumed in phase practise after {stopped} updates": line in programs.said()
                )
        if "actor" in victims or actor.poll() is not None:
            actor.wait()
            actor = programs.start("actor", *LONG)
        assert_goes_on(before, programs.practised(before.practised + 20))
    programs.order("next")
    assert [programs.status(side) for side in (learner, actor)] == [0, 0]
    assert_finished(programs, before)
    assert_whole(programs.run_dir, cut=1)


ROUNDS = [
    *WORDS, "+plan.phases.practise.evaluate={every_env_steps: 100, until: ['episodes >= 100000']}",
    "+plan.repeat={phases: [practise, evaluate], times: 2}",
]  # fmt: skip
ENDLESS = [  # what may be edited: the evaluation within practice ends and does not come again, and practice goes on
    "+plan.phases.practise.evaluate={every_env_steps: 1000000, until: ['episodes >= 5']}",
    "plan.phases.practise.until=['env_steps >= 1000000', operator]",
]


@pytest.mark.nightly
def test_killed_in_an_evaluation_within_practice_and_in_its_second_round_the_run_goes_on_there_and_for_a_third(
    programs,
):
    def begun(phase):
        last = f'"phase": "{phase}"'
        programs.until(lambda: programs.facts().directives and last in programs.facts().directives[-1][1])

    def killed(learner, *words):
        programs.kill("trainer")
        assert programs.status(learner) != 0
        programs.until(lambda: not LEARNER & set(programs.alive()))
        return programs.start("learner", *ROUNDS, *words)

    learner, actor = programs.start("learner", *ROUNDS), programs.start("actor", *ROUNDS)
    begun("practise#1.evaluate")
    programs.until(lambda: len(rows(programs, "practise#1.evaluate")) > 5)
    learner = killed(learner, *ENDLESS)
    programs.until(lambda: "resumed in phase practise#1.evaluate after" in programs.said())
    begun("practise#1")
    programs.practised(programs.facts().practised + 20)
    programs.order("next")
    begun("practise#2")
    before = programs.practised(programs.facts().practised + 40)
    learner = killed(learner, *ENDLESS, "+plan.repeat={phases: [practise, evaluate], times: 3}")
    programs.until(lambda: "resumed in phase practise#2 after" in programs.said())
    assert_goes_on(before, programs.practised(before.practised + 20))
    for phase in ("practise#2", "practise#3"):
        begun(phase)
        programs.practised(programs.facts().practised + 20)
        programs.order("next")
    assert [programs.status(side) for side in (learner, actor)] == [0, 0]
    summary = assert_finished(programs, before)
    assert_whole(programs.run_dir, cut=3)
    results = [*summary["during"], {"phase": "evaluate#3", **summary["eval"]}]
    counted = [("practise#1.evaluate", 5), *((f"evaluate#{time}", EVALUATED) for time in (1, 2, 3))]
    assert [(result["phase"], result["episodes"]) for result in results] == counted
    acted = {version: sha256 for version, sha256, _ in programs.facts().weights}
    for result in results:
        assert result["distinct_starts"] == result["episodes"] == len(result["trials"])
        assert {acted[row["weights"]] for row in rows(programs, result["phase"])} == {result["weights_sha256"]}
    assert len({result["weights_sha256"] for result in results}) == len(results)


@pytest.mark.nightly
def test_an_actor_that_does_nothing_else_evaluates_alone_also_after_a_stop_and_the_report_names_it(programs):
    within = "+plan.phases.practise.evaluate={every_env_steps: 700, until: ['episodes >= 3'], by: judge}"
    ends = 'plan.phases.practise.until=["env_steps >= 2000", operator]'  # fewer may all come between two looks
    words = [*WORDS, within, ends, "+plan.phases.evaluate.actors.by=judge"]
    learner = programs.start("learner", *words)
    actors = [programs.start("actor", *words, f"name={name}") for name in ("arm", "judge")]
    programs.until(lambda: programs.facts().practised >= 100)
    interrupt(programs, learner, signal.SIGINT, left={"actor"})
    programs.end_well(programs.start("learner", *words), *actors)
    summary = json.loads((programs.run_dir / "summary.json").read_text())
    assert {(each["phase"], each["episodes"]) for each in summary["during"]} == {("practise.evaluate", 3)}
    whose = {"demonstrate": "arm", "practise": "arm", "practise.evaluate": "judge", "evaluate": "judge"}
    for phase, name in whose.items():
        assert {row["id"].partition("-")[0] for row in rows(programs, phase)} == {name}, phase
    assert "evaluate, by judge alone" in (programs.run_dir / "report.html").read_text()


def rows(programs, phase):
    """The episodes of a phase that have ended."""
    with oracle.opened(programs.run_dir / "store") as index:
        return index.execute("SELECT * FROM episodes WHERE phase = ? AND closed", (phase,)).fetchall()


def interrupt(programs, process, number, *, left):
    """Signal a program as a terminal does, or (None) by tools/plan.py; then only the programs `left` are there."""
    if number:
        os.killpg(process.pid, number)
    else:
        subprocess.run([sys.executable, "tools/plan.py", "stop", programs.run_dir], check=True)
    assert (programs.status(process) == 0) is ("learner=true" in process.args), "a learner has lost nothing"
    programs.until(lambda: set(programs.alive()) == left)
