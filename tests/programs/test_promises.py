"""What README promises, one test for each promise, with the real programs as a person starts them."""

import hashlib
import json
import os
import re
import shutil
import signal
from contextlib import closing

import pytest
import safetensors.torch
from serl_client.identity import machine

from serl_launcher.datasets import shards
from serl_launcher.training.facts import facts_of
from tests.shared import oracle
from tests.shared.arms import DRIVER, HOME, LIMITS, Log
from tests.shared.common import ROOT
from tests.shared.models import assert_same
from tests.shared.programs import Programs, facts
from tests.shared.servers import ServerProcess
from tests.shared.tools import typed

from .people import Person
from .test_run import EVALUATED, WORDS, assert_finished, assert_whole

pytestmark = pytest.mark.program

COUNTS = ("env_steps", "episodes", "assisted", "updates", "wall_s", "person")
DATA = pytest.mark.skipif(bool(shards.missing()), reason="needs the extra `data`")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The programs of a run from demonstrations to evaluation, whose actor was there long before its learner."""
    with Programs(tmp_path_factory.mktemp("finished")) as made:
        actor = made.start("actor", *WORDS)
        made.until(lambda: "learner: AWAY" in made.said())
        assert actor.poll() is None
        made.end_well(made.start("learner", *WORDS, *["export.sources=all"] * (not shards.missing())), actor)
        made.finish_export()
        yield made


def evaluated(run_dir):
    """(the steps of each episode of the evaluation's last directive, the sha256 of the weights that acted in them)."""
    found, names = oracle.whole(run_dir / "store"), facts(run_dir).weights
    rows = [row for row in found.episodes.values() if row["phase"] == "evaluate"]
    last = max(row["directive"] for row in rows)
    episodes = [found.steps[row["number"]] for row in rows if row["directive"] == last]
    assert len(episodes) >= EVALUATED
    (version,) = {int(step.record["weights"]) for steps in episodes for step in steps}
    return episodes, {number: sha256 for number, sha256, _ in names}[version]


def test_a_first_run_demonstrates_trains_and_evaluates_what_it_has_trained(finished):
    """By hash: of the summary, of the file, of what was trained, and of what acted in every step."""
    run_dir = finished.run_dir
    assert not finished.alive()
    summary = assert_finished(finished, finished.facts())
    assert_whole(run_dir, cut=0)
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    file = run_dir / "weights" / f"{summary['eval']['weights_sha256']}.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem == evaluated(run_dir)[1]
    newest = max((run_dir / "checkpoints").glob("[0-9]*"))
    trained = safetensors.torch.load_file(newest / "tensors.safetensors")
    prefix = "algorithm.policy."
    acting = {name.removeprefix(prefix): value for name, value in trained.items() if name.startswith(prefix)}
    assert_same(acting, safetensors.torch.load_file(file))
    assert summary["updates"] == json.loads((newest / "manifest.json").read_text())["updates"]
    told = facts_of(run_dir)
    assert {name: getattr(told, name) for name in COUNTS} == {name: summary[name] for name in COUNTS}
    assert [each.success.rate for each in told.evaluations] == [summary[name]["success"] for name in ("before", "eval")]
    assert f"report: {run_dir / 'report.html'}" in finished.said()
    assert f"sha256 {file.stem}" in (run_dir / "report.html").read_text()


@pytest.mark.slow
def test_a_finished_run_is_evaluated_elsewhere_by_several_actors_of_one_learner(finished, tmp_path):
    """On another machine, where nothing is that its actors kept, and on starts that nothing has seen. One of two
    actors asks the inference process, and has two environments; the other has the policy in its own process."""
    with Programs(tmp_path) as there:
        shutil.copytree(finished.run_dir, there.run_dir, ignore=shutil.ignore_patterns("actors"))
        trained = json.loads((there.run_dir / "summary.json").read_text())
        words = [word for word in WORDS if "phases" not in word or "phases.evaluate" in word]
        words += ["plan=evaluate", "task.env.latency=0.005"]
        actors = {"local": 1, "remote": 2}
        sides = [there.start("actor", *words, f"name={n}", f"inference={n}", f"envs={e}") for n, e in actors.items()]
        names = {"local", "remote/0", "remote/1"}
        there.until(lambda: all(re.search(rf"\[{name}\] \S+ \S+ IDLE", there.said()) for name in names))
        there.end_well(there.start("learner", *words), *sides)
    again = json.loads((there.run_dir / "evaluation.json").read_text())
    assert json.loads((there.run_dir / "summary.json").read_text()) == trained
    assert again["eval"]["episodes"] == again["eval"]["distinct_starts"] == EVALUATED
    episodes, acted = evaluated(there.run_dir)
    assert again["eval"]["weights_sha256"] == trained["eval"]["weights_sha256"] == acted
    assert again["updates"] == trained["updates"]
    seen = {steps[0].origin for steps in evaluated(finished.run_dir)[0]}
    assert not {steps[0].origin for steps in episodes} & seen
    assert {name.rsplit("-", 2)[0] for name in there.facts().episodes} == {machine(), *names}
    assert_whole(there.run_dir, cut=0)


@DATA
def test_what_a_run_wrote_as_lerobot_datasets_another_run_learns_from(finished, tmp_path):
    """Both runs hold the same demonstrations, step by step."""
    (dataset,) = sorted((finished.run_dir / "datasets/demo").glob("[0-9]*"))
    with Programs(tmp_path) as other:
        words = ["task=fake", "plan=sft", "phase=clone", "policy=flow", "policy.network.hidden=[32,32]"]
        words += [f"plan.sources.demo.dataset={dataset}", "batch_size=16", 'plan.phases.clone.until=["updates >= 5"]']
        other.end_well(other.start("learner", *words))
        assert "5 updates" in other.said()
    there, here = (demonstrated(run.run_dir) for run in (finished, other))
    assert len(there) >= 5
    assert here == there


def demonstrated(run_dir):
    """[[(seen, action, reward) of each step] of each demonstration]"""
    found = oracle.whole(run_dir / "store")
    return [
        [(step.origin, step.record["action"].tolist(), float(step.record["reward"])) for step in found.steps[number]]
        for number, row in sorted(found.episodes.items())
        if row["source"] == "demo" and not row["discard"]
    ]


def test_a_person_at_the_keys_demonstrates_takes_over_and_hands_back(tmp_path):
    """The plan of Hi-ORS; a robot PC needs no torch for it."""
    words = ["task=fake", "task.env.operator=keyboard", "task.env.verdict_by=operator", "task.env.clock=real"]
    with Person(tmp_path) as person:
        assert "libtorch" not in person.practised([*words, "task.env.max_steps=600"], has_programs=True)
    stored = person.episodes()
    assert all(episode.human.all() for episode in stored if episode.info.source == "demo")
    won = [episode for episode in stored if episode.info.source == "online" and episode.info.success]
    assert len(won) >= 2
    for episode in won:
        ((begin, end),) = episode.takeovers
        assert 0 < begin < end < episode.info.steps, "policy, person, policy"
        assert not episode.chunk_start[begin:end].any()
        assert episode.chunk_start[end:].any(), "the policy begins anew"
        assert episode.info.judged_by == "operator"


@pytest.mark.slow  # README's own commands do it in ./test.sh
def test_with_keys_another_machine_practises_a_task_of_gymnasium_and_without_one_it_is_told(tmp_path):
    words = ["task=gym", "task.env_id=Pendulum-v1", "algo=sac", "policy.hidden=[16,16]", "critic.hidden=[16,16]"]
    words += ["utd=0.1", "baseline_episodes=1", "eval_episodes=1", 'plan.phases.practise.until=["env_steps >= 250"]']
    made = typed("keys", "make", "left", "--role", "actor", "--keys", tmp_path / "keys")
    assert made[0] == 0
    with Programs(tmp_path) as programs:
        learner = programs.start("learner", *words, "host=0.0.0.0", f"keys={tmp_path}/keys")
        stranger = programs.start("actor", *words, "name=right")
        programs.until(lambda: "lets in only who has a key" in programs.said())
        assert programs.facts().episodes == {}
        os.killpg(stranger.pid, signal.SIGKILL)
        programs.end_well(programs.start("actor", *words, "ip=127.0.0.1", f"key={tmp_path}/keys/left.key"), learner)
        assert {name.rsplit("-", 2)[0] for name in programs.facts().episodes} == {"left"}
    assert_whole(programs.run_dir, cut=0)
    assert json.loads((programs.run_dir / "summary.json").read_text())["updates"] > 0


def test_an_arm_of_a_yaml_moves_after_its_owners_key_and_its_guard_holds_it_when_the_actor_is_killed(tmp_path):
    (tmp_path / "arm").mkdir()
    with closing(Log(tmp_path / "arm")) as log, Person(tmp_path, {"PYTHONPATH": str(ROOT)}) as person:
        words = [
            "task=lerobot", f"task.env.driver={DRIVER}", f"task.env.address={log.path}", "task.env.task=fold",
            "~task.env.options", f"+task.env.options={{log:{log.path}}}", "task.env.operator=none",
            f"+task.env.limits={word(LIMITS)}", f"+task.env.home={word(HOME)}", "task.env.home_speed=0.1",
            "task.has_operator=false",
        ]  # fmt: skip
        with closing(ServerProcess(person.run_dir)) as server:
            person.ports = server.port, person.ports[1]
            actor = person.act(*words)
            person.until(lambda: actor.poll() is not None or (person.run_dir / "store/index.sqlite").exists())
            assert actor.poll() is None, person.said()
            server.direct()
            while not log.of("recover"):  # a key that is pressed before the question is no answer
                log.wait(0.2)
                person.press(b"r")
            ready = log.of("recover")[0].time
            assert not [said for said in log.of("write") if said.time < ready]
            log.until(lambda calls: calls[-1].call == "write" and calls[-1].what[0] > 0.1)
            os.kill(actor.pid, signal.SIGKILL)
            log.until(lambda calls: calls[-1].call == "close")
        assert "shoulder: -57.3° to 57.3°" in person.said()
        assert "ready: the arm was connected anew: a person in the actor's terminal says" in person.said()
        points = [said.what for said in log.of("write")]
    assert max(point[0] for point in points) < HOME["shoulder"] - 0.1, "on its way home it stood still"
    assert len({tuple(point) for point in points[-3:]}) == 1


def word(value):
    return json.dumps(value).replace('"', "")
