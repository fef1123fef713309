"""The real programs, started as a person starts them: they are killed in mid-run, and the run goes on to its end."""

import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import closing

import pytest
import safetensors.torch
import torch
from serl_client.keys import machine
from serl_client.spec import Spec

from serl_launcher.store.index import Index
from serl_launcher.store.layout import Layout
from tests.shared.common import ROOT
from tests.shared.programs import PROMPT, Programs

EVALUATED = 8
WORDS = [  # the quickstart on a task that needs no simulator, made short
    "task=fake", "utd=1", "algo.hidden=[32,32]", "policy.hidden=[32,32]", "checkpoint_s=0.5",
    'plan.phases.demonstrate.until=["demo.episodes >= 5"]',
    'plan.phases.baseline.until=["episodes >= 4"]',
    'plan.phases.practise.until=["env_steps >= 600", operator]',
    f'plan.phases.evaluate.until=["episodes >= {EVALUATED}"]',
]  # fmt: skip
LONG = [*WORDS, 'plan.phases.practise.until=["env_steps >= 15000", operator]']


@pytest.fixture
def programs(tmp_path):
    made = Programs(tmp_path)
    yield made
    made.end()


def assert_goes_on(before, after):
    """Nothing that was durable before is missing after, and no number went back."""
    assert all(after.episodes.get(name, 0) >= steps for name, steps in before.episodes.items())
    for then, now in ((before.directives, after.directives), (before.weights, after.weights)):
        assert now[: len(then)] == then
        assert [row[0] for row in now] == list(range(1, len(now) + 1))
    assert all(update >= before.checkpointed for _, _, update in after.weights[len(before.weights) :])
    assert after.checkpointed >= before.checkpointed > 0


def stored_steps(run_dir):
    """{episode number: [(index, directive, weights), ...]} in the order in which they lie in the store."""
    index, found = Index(run_dir / "store/index.sqlite"), defaultdict(list)
    for source in index.sources().values():
        assert source.tail == 0, "nothing was evicted"
        layout = Layout(Spec.from_dict(index.meta("spec")), source.capacity)
        for record in layout.steps(run_dir / "store" / source.name)[: source.head]:
            found[int(record["episode"])].append(tuple(int(record[name]) for name in ("index", "directive", "weights")))
    index.close()
    return found


def assert_whole(run_dir, *, cut):
    """Every step is what was acknowledged, every episode is whole and once.

    Without an end are at most the last one of each start of an actor, which the plan's end or a kill called off, and
    `cut` more. That last one stays open until its actor comes again.
    """
    checked = subprocess.run([sys.executable, ROOT / "tools/store.py", "verify", run_dir], capture_output=True)
    assert checked.returncode == 0, checked.stdout
    found = stored_steps(run_dir)
    with closing(sqlite3.connect(run_dir / "store/index.sqlite")) as index:
        rows = index.execute("SELECT number, session, steps, closed, final FROM episodes ORDER BY number").fetchall()
        outcomes = index.execute("SELECT count(*) FROM outcomes GROUP BY episode").fetchall()
    assert set(found) == {number for number, *_ in rows}
    stamps, last = defaultdict(list), {session: number for number, session, *_ in rows}
    for number, session, steps, closed, _ in rows:
        assert [index for index, _, _ in found[number]] == list(range(steps))
        assert closed or number == last[session]
        stamps[session] += [stamp for _, *stamp in found[number]]
    assert sum(not final for *_, final in rows) <= cut + len(last)
    assert all(count == (1,) for count in outcomes)
    for given in stamps.values():
        directives, versions = zip(*given, strict=True)
        assert list(directives) == sorted(directives)
        acted = [version for version in versions if version]
        assert acted == sorted(acted)
    assert not list((run_dir / "actors").glob("*/outbox/*.records")), "everything was delivered"


def assert_finished(programs, before):
    """The run's summary says what its store says, and goes on from what was there `before`."""
    summary = json.loads((programs.run_dir / "summary.json").read_text())
    with closing(sqlite3.connect(programs.run_dir / "store/index.sqlite")) as index:
        steps = index.execute("SELECT sum(steps) FROM episodes WHERE source != 'eval'").fetchone()[0]
    assert summary["env_steps"] == steps
    assert summary["updates"] >= before.checkpointed
    assert summary["eval"]["episodes"] == summary["eval"]["distinct_starts"] == EVALUATED
    assert summary["before"]["episodes"] == 4
    assert not {word for word in ("Traceback", "errors.log") if word in programs.said()}
    return summary


# -- killed


@pytest.mark.slow
def test_after_kill_9_of_each_process_and_of_all_the_run_goes_on_to_its_end(programs):
    """Server and inference are started again by the launcher. After the death of the trainer, which ends the launcher,
    of the launcher, which ends its children, and of the actor, a person gives the same command again."""
    learner, actor = programs.start("learner", *LONG), programs.start("actor", *LONG)
    for victims in (
        ["inference"], ["server"], ["actor"], ["trainer"], ["launcher"],
        ["launcher", "server", "trainer", "inference", "actor"],
    ):  # fmt: skip
        before = programs.practised(programs.facts().practised + 60)
        programs.kill(*victims)
        if "trainer" in victims or "launcher" in victims:
            assert programs.status(learner) != 0
            programs.until(lambda: not {"launcher", "server", "trainer", "inference"} & set(programs.alive()), PROMPT)
            learner = programs.start("learner", *LONG)
        if "actor" in victims:
            actor.wait()
            actor = programs.start("actor", *LONG)
        assert_goes_on(before, programs.practised(before.practised + 40))
    programs.order("next")
    assert programs.status(learner) == 0
    assert programs.status(actor) == 0
    assert_finished(programs, before)
    assert_whole(programs.run_dir, cut=1)


@pytest.mark.slow
def test_ctrl_c_and_sigterm_end_every_process_and_the_next_start_goes_on(programs):
    learner = programs.start("learner", *LONG)
    programs.until(lambda: "waiting for the first actor" in programs.said())
    interrupt(programs, learner, signal.SIGTERM, left=set())
    learner, actor = programs.start("learner", *LONG), programs.start("actor", *LONG)
    before = programs.practised(60)
    interrupt(programs, learner, signal.SIGINT, left={"actor"})
    interrupt(programs, actor, signal.SIGINT, left=set())
    learner, actor = programs.start("learner", *LONG), programs.start("actor", *LONG)
    assert_goes_on(before, programs.practised(before.practised + 40))
    programs.order("next")
    assert programs.status(learner) == 0
    assert programs.status(actor) == 0
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
    made = Programs(tmp_path_factory.mktemp("finished"))
    actor = made.start("actor", *WORDS)
    made.until(lambda: "learner: AWAY" in made.said())
    assert actor.poll() is None
    learner = made.start("learner", *WORDS)
    yield made, {"learner": made.status(learner), "actor": made.status(actor)}
    made.end()


@pytest.mark.slow
def test_an_actor_waits_for_its_learner_and_ends_with_it(finished):
    programs, statuses = finished
    assert statuses == {"learner": 0, "actor": 0}
    assert not programs.alive()
    assert_finished(programs, programs.facts())
    assert_whole(programs.run_dir, cut=0)


def evaluated(run_dir, phase="evaluate"):
    """{version: sha256} of the weights that acted in the evaluation's last directive."""
    with closing(sqlite3.connect(run_dir / "store/index.sqlite")) as index:
        last = index.execute("SELECT max(directive) FROM episodes WHERE phase = ?", (phase,)).fetchone()
        numbers = index.execute("SELECT number FROM episodes WHERE directive = ? AND source = 'eval'", last).fetchall()
        names = dict(index.execute("SELECT version, sha256 FROM weights").fetchall())
    steps = stored_steps(run_dir)
    versions = {version for (number,) in numbers for _, _, version in steps[number]}
    assert len(numbers) >= EVALUATED
    return {version: names[version] for version in versions}


@pytest.mark.slow
def test_the_weights_that_were_evaluated_are_the_trained_ones(finished):
    """By hash: of the summary, of the file, of what was trained, and of what acted in every step."""
    run_dir = finished[0].run_dir
    summary = json.loads((run_dir / "summary.json").read_text())
    file = run_dir / "weights" / f"{summary['eval']['weights_sha256']}.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem
    assert list(evaluated(run_dir).values()) == [file.stem]
    newest = max((run_dir / "checkpoints").glob("[0-9]*"))
    trained = torch.load(newest / "state.pt", weights_only=True)["algorithm"]
    acting = {name.removeprefix("policy."): value for name, value in trained.items() if name.startswith("policy.")}
    published = safetensors.torch.load_file(file)
    assert acting.keys() == published.keys()
    assert all(torch.equal(acting[name], published[name]) for name in acting)
    assert summary["updates"] == json.loads((newest / "manifest.json").read_text())["updates"]


@pytest.mark.slow
def test_a_finished_run_is_evaluated_again_with_the_trained_weights(finished):
    """By two actors: one asks the inference process, the other has the policy in its own."""
    programs = finished[0]
    trained = json.loads((programs.run_dir / "summary.json").read_text())
    words = [word for word in WORDS if "phases" not in word or "phases.evaluate" in word]
    words += ["plan=evaluate", "task.env.latency=0.005"]
    local = programs.start("actor", *words, "name=local", "inference=local")
    remote = programs.start("actor", *words, "name=remote")
    programs.until(lambda: all(re.search(rf"\[{name}\] \S+ \S+ IDLE", programs.said()) for name in ("local", "remote")))
    learner = programs.start("learner", *words)
    assert [programs.status(process) for process in (learner, local, remote)] == [0, 0, 0]
    again = json.loads((programs.run_dir / "evaluation.json").read_text())
    assert json.loads((programs.run_dir / "summary.json").read_text()) == trained
    assert again["eval"]["weights_sha256"] == trained["eval"]["weights_sha256"]
    assert again["eval"]["episodes"] == again["eval"]["distinct_starts"] == EVALUATED
    assert list(evaluated(programs.run_dir).values()) == [trained["eval"]["weights_sha256"]]
    assert again["updates"] == trained["updates"]
    names = {name.rsplit("-", 2)[0] for name in programs.facts().episodes}
    assert names == {machine(), "local", "remote"}
    assert_whole(programs.run_dir, cut=0)
    assert not {word for word in ("Traceback", "errors.log") if word in programs.said()}
