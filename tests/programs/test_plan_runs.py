"""Plans whose rows, rewards and metrics are looked at. All runs in threads of this process."""

import re
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file

from robot_infra.cameras import gl
from serl_launcher.algorithms.sft import SFT
from serl_launcher.datasets.episodes import open_run
from serl_launcher.training.metrics import read
from serl_launcher.training.report import read as summary_of
from serl_launcher.types import Decision
from tests.shared import oracle
from tests.shared.common import ROOT, STATE
from tests.shared.here import start
from tests.shared.tools import called

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "same_loggers")]

SAC_PI0 = [
    "task=fake", "plan=sac_pi0", "policy.head.steps=3", "policy.network.hidden=[64,64]", "critic.hidden=[64,64]",
    "batch_size=32",
    'plan.phases.demonstrate.until=["demo.episodes >= 6"]', 'plan.phases.clone.until=["updates >= 15"]',
    'plan.phases.baseline.until=["episodes >= 4"]', 'plan.phases.warm_up.start_when="online.episodes >= 3"',
    'plan.phases.warm_up.until=["updates >= 20"]', 'plan.phases.practise.until=["updates >= 40"]',
    'plan.phases.evaluate.until=["episodes >= 6"]', "log=false",
]  # fmt: skip
CAMERAS, SIZE = ("cam_high", "cam_wrist"), 32
PIXELS = [
    "task=sim_arm_pixels", f"task.image_size={SIZE}", "plan=hiors", "algo=rejection_pixels", "policy=flow_pixels",
    "policy.encoder.channels=[8,8,16]", "policy.network.hidden=[64,64]", "policy.head.steps=4", "batch_size=32",
    "algo.augment.shift=1", "plan.sources.demo.capacity=2000", "plan.sources.online.capacity=2000", "log=false",
    "+plan.sources.check={capacity: 500}",  # demonstrations that nothing trains on
    '+plan.phases.check={actors:{mode:teleop,into:check},until:["check.episodes >= 3"]}', "~plan.phases.baseline",
    'plan.phases.clone.until=["updates >= 60"]', 'plan.phases.practise.start_when="online.episodes >= 1"',
    'plan.phases.demonstrate.until=["demo.episodes >= 4"]', 'plan.phases.practise.until=["episodes >= 2"]',
    'plan.phases.evaluate.until=["episodes >= 1"]',
]  # fmt: skip


def test_sac_pi0_updates_what_each_phase_says_and_says_how_far_values_are_from_the_returns(tmp_path):
    start(tmp_path, SAC_PI0)
    lines = list(read(tmp_path / "metrics.jsonl"))
    ended = [line["phase"] for line in lines if line["kind"] == "episode"]
    least = {"demonstrate": 6, "baseline": 4, "warm_up": 3, "evaluate": 6}
    assert all(ended.count(phase) >= count for phase, count in least.items())
    updates = [line for line in lines if line["kind"] == "update"]
    cloned, practised = ([line for line in updates if name in line] for name in ("loss", "policy_loss"))
    assert cloned
    assert all(line["updates"] <= 15 for line in cloned)
    assert all(line["updates"] > 35 for line in practised)
    assert {"critic_loss", "value", "distill", "value_of_policy", "value_error", "value_bias"} <= practised[-1].keys()
    assert not {"entropy", "temperature"} & practised[-1].keys()
    found = {line["phase"]: line for line in lines if line["kind"] == "evaluation"}
    assert found.keys() == {"baseline", "evaluate"}
    assert all(0 <= abs(line["value_bias"]) <= line["value_error"] < 2 for line in found.values())
    assert summary_of(tmp_path / "summary.json")["updates"] == 75


@pytest.mark.skipif(not gl.backend(), reason="this machine can draw no camera images")
def test_every_row_has_both_images_and_their_ages_and_the_run_can_be_asked_what_its_policy_looks_at(tmp_path):
    start(tmp_path, PIXELS)
    found = oracle.whole(tmp_path / "store")
    names = found.spec["observation"][STATE]["names"]
    assert not any(name.startswith(("block", "way")) for name in names)
    for name, source in found.sources.items():
        columns = oracle.rows(tmp_path / "store" / name / "rows", found.spec, oracle.slots(source["capacity"]))
        steps = [step.record for number in found.steps for step in found.steps[number]]
        for camera in CAMERAS:
            images = columns[f"observation.images.{camera}"][: source["row_head"]]
            assert images.shape[1:] == (SIZE, SIZE, 3)
            assert (images.reshape(len(images), -1).std(1) > 5).all()  # none is black
            assert all(record[f"age.{camera}"] == 0 for record in steps), "time stands still between two steps"
    status, said = called("inputs", "--run-dir", tmp_path, "--source", "check")
    assert status == 0
    assert "successful episodes of check" in said
    assert "all cameras shuffled" in said


@pytest.mark.skipif(not gl.backend(), reason="this machine can draw no camera images")
def test_a_run_through_a_frozen_backbone_publishes_the_rest_and_goes_on_after_its_end(tmp_path):
    pytest.importorskip("torchvision")
    other = {"algo=rejection_pixels": "algo=rejection_frozen", "policy=flow_pixels": "policy=flow_frozen"}
    left_out = ("policy.encoder.channels", "algo.augment", "+plan")
    words = [other.get(word, word) for word in PIXELS if not word.startswith(left_out)]
    words += ["policy.encoder.backbone.stages=1", "policy.encoder.backbone.features=32"]
    start(tmp_path, words)
    assert summary_of(tmp_path / "summary.json")["updates"] > 60
    sizes = {file.stat().st_size for file in (tmp_path / "weights").glob("*.safetensors")}
    assert sizes
    assert max(sizes) < 1_000_000, "a ResNet18 alone has 45 MB"
    before = summary_of(tmp_path / "summary.json")["updates"]
    start(
        tmp_path,
        ["plan.phases.practise.until=['episodes >= 4']" if "practise.until" in word else word for word in words],
    )
    assert summary_of(tmp_path / "summary.json")["updates"] > before


@pytest.mark.nightly
def test_a_person_who_takes_over_mends_what_a_clone_of_one_sided_demonstrations_cannot(tmp_path):
    """README's run with a person, as it stands there."""
    pytest.importorskip("mujoco")
    (words,) = re.findall(r"^\./start\.sh (plan=hiors .*) run_dir=", (ROOT / "README.md").read_text(), re.MULTILINE)
    start(tmp_path, [*words.split(), "log=false"])
    summary = summary_of(tmp_path / "summary.json")
    clone, practised = (summary[name]["wilson95"] for name in ("before", "eval"))
    assert clone[1] < practised[0], "more than the starts vary by"
    assert summary["assisted"] > 0


# -- columns that an algorithm adds
COLUMNS = [
    "task=fake", "plan=hiors", "policy=flow", "policy.network.hidden=[32,32]", "policy.head.steps=2", "batch_size=16",
    "policy.history=2", 'plan.phases.demonstrate.until=["demo.episodes >= 2"]', "~plan.phases.baseline",
    'plan.phases.clone.until=["updates >= 10"]', 'plan.phases.practise.start_when="online.episodes >= 1"',
    'plan.phases.practise.until=["episodes >= 2"]', 'plan.phases.evaluate.until=["episodes >= 1"]', "log=false",
]  # fmt: skip


class Noting(SFT):
    """Also says the first action of each chunk, and how far the arm has moved between what it sees."""

    def act(self, observation, *rest, **options):
        decision, carry = super().act(observation, *rest, **options)
        state = observation["observation.state"]
        assert state.shape[1] == 2
        return Decision(decision.action, {"first": decision.action[:, 0], "moved": state[:, 1] - state[:, 0]}), carry


def test_what_an_algorithm_decides_besides_actions_lies_in_the_rows_on_which_it_acted(tmp_path):
    extras = ["+extras.first=action", "+extras.moved={shape: [6]}"]
    start(tmp_path, [*COLUMNS, f"algo._target_={__name__}.Noting", *extras])
    spec, readers, episodes = open_run(tmp_path)
    assert spec.extras["first"].shape == spec.action.shape
    policys = 0
    for episode in episodes:
        rows = readers[episode.source].rows(episode)
        begins, theirs = np.flatnonzero(rows["chunk_start"]), rows["intervened"]
        assert not rows["first"][theirs].any(), "a person decides nothing"
        np.testing.assert_allclose(rows["first"][begins], rows["action"][begins], atol=1e-6)
        for row in begins[begins > 0]:
            moved = rows["observation.state"][row] - rows["observation.state"][row - 1]
            np.testing.assert_allclose(rows["moved"][row], moved, atol=1e-6)
        policys += len(begins)
    assert policys > 5


# -- verdicts of a person alone
VERDICTS = [
    "task=fake", "task.env.verdict_by=operator", "task.env.max_steps=30", "task.verdict.success=2.0",
    "critic.hidden=[16,16]", "policy.hidden=[16,16]", "batch_size=16", "log=false", "~plan.phases.baseline",
    'plan.phases.demonstrate.until=["demo.episodes >= 3"]', 'plan.phases.practise.start_when="online.steps >= 60"',
    'plan.phases.practise.until=["env_steps >= 100"]', 'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


def test_rlpd_learns_from_the_verdicts_of_a_person_where_no_judge_gives_a_reward(tmp_path):
    start(tmp_path, VERDICTS)
    found = oracle.whole(tmp_path / "store")
    records = [step.record for steps in found.steps.values() for step in steps]
    assert not any(float(record["reward"]) for record in records), "what is stored is what the judge said: nothing"
    assert {row["judged_by"] for row in found.outcomes} == {"operator"}
    _, readers, infos = open_run(tmp_path)
    shown = {info.id: (readers[info.source].rows(info), info) for info in infos if info.success is not None}
    assert {bool(info.success) for _, info in shown.values()} == {True, False}, "demonstrations succeed, practice fails"
    for rows, info in shown.values():
        assert rows["reward"].tolist() == [0.0] * (info.steps - 1) + [2.0 if info.success else 0.0]
        assert rows["terminated"].tolist() == [False] * (info.steps - 1) + [True]
        assert not rows["truncated"].any()
    late = [row for row in found.episodes.values() if row["truncated"] and row["success"] == 0]
    assert late, "failure is said between two episodes"
    lines = list(read(tmp_path / "metrics.jsonl"))
    returns = {line["return"] for line in lines if line["kind"] == "episode" and line["phase"] == "demonstrate"}
    assert returns == {2.0}


# -- actions that are several choices at once
CHOICES = [
    "task=gym", "plan=from_scratch", "algo=sac", "algo.discount=0.5", "algo.initial_temperature=0.1", "batch_size=64",
    "critic.hidden=[64,64]", "policy.hidden=[64,64]", "random_steps=200", "max_env_steps=1000", "eval_episodes=20",
    "log=false",
]  # fmt: skip
RIGHT = {  # task: its actions, and which is right for what is seen, a point of a square
    "Digits-v0": (spaces.MultiDiscrete([3, 2]), lambda x, y: [int(1.5 * x + 1.5), int(y > 0)]),
    "Flags-v0": (spaces.MultiBinary(3), lambda x, y: [x > 0, y > 0, x > y]),
}


class Choices(gymnasium.Env):
    """Ten points, one after another; the reward is the share of the choices that are right."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, task):
        self.action_space, self._right = RIGHT[task]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = 10
        return self._look(), {}

    def step(self, action):
        reward, self._left = float(np.mean(action == np.array(self._right(*self._point)))), self._left - 1
        return self._look(), reward, self._left == 0, False, {}

    def _look(self):
        self._point = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self._point


for _task in RIGHT:
    gymnasium.register(_task, partial(Choices, _task))


@pytest.mark.nightly
@pytest.mark.parametrize("task", RIGHT)
def test_sac_learns_several_choices_at_once_as_numbers(tmp_path, task):
    start(tmp_path, [*CHOICES, f"task.env_id={task}"])
    assert summary_of(tmp_path / "summary.json")["eval"]["return_mean"] > 8, "of 10; three seeds had 9.4 or more"


# -- World Models, from the first drifting step to the evaluation
POPULATION, ROLLOUTS, UPDATES = 4, 2, 20
WORLD_MODELS = [
    "task=puck", "task.env.max_steps=12", "plan=world_models", "algo=world_models_tiny", "algo.widths=[4,4,4]",
    "algo.codes=3", "algo.hidden=4", "algo.episode_steps=12", f"algo.population={POPULATION}",
    f"algo.rollouts={ROLLOUTS}", "batch_size=8", "random_steps=60", "max_env_steps=1000", "log=false",
    'plan.phases.see.until=["updates >= 3"]', 'plan.phases.predict.until=["updates >= 3"]',
    f'plan.phases.evolve.until=["updates >= {UPDATES}"]', 'plan.phases.evaluate.until=["episodes >= 2"]',
]  # fmt: skip


def kept(run_dir):
    """What the newest checkpoint has of the evolution."""
    newest = max((run_dir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    tensors = load_file(newest / "tensors.safetensors")
    return {
        name: tensors[f"algorithm.{name}"] for name in ("evolution.generation", "returns", "told", "evolution.mean")
    }


def expected(episodes, count):
    """What the first `count` of (candidate's generation, its index, return) tell: (generation, returns)."""
    generation, told = 1, [[] for _ in range(POPULATION)]
    for of, index, value in episodes[:count]:
        if of == generation and len(told[index]) < ROLLOUTS:
            told[index].append(value)
        if all(len(each) == ROLLOUTS for each in told):
            generation, told = generation + 1, [[] for _ in range(POPULATION)]
    return generation, told


def test_each_return_is_told_of_the_candidate_that_acted_and_no_episode_twice(tmp_path):
    start(tmp_path, WORLD_MODELS)
    _, readers, episodes = open_run(tmp_path)
    played = []
    for episode in episodes:
        rows = readers[episode.source].rows(episode)
        told, drifts = rows["candidate"], episode.source != "online"
        np.testing.assert_array_equal(told[:, 2], np.arange(len(told)) * (not drifts))
        assert (told[:, :2] == told[0, :2]).all()
        assert drifts == (told[0, 0] == 0)
        if not drifts:
            assert len(told) == 12
            played.append((*told[0, :2].tolist(), float(rows["reward"].sum())))
    assert len(played) >= UPDATES
    assert max(of for of, *_ in played) >= 2
    state = kept(tmp_path)
    generation, told = expected(played, UPDATES)
    assert state["evolution.generation"] == generation >= 2
    np.testing.assert_allclose([value for each in told for value in each],
                               state["returns"][state["told"] >= 0], rtol=1e-5)  # fmt: skip
    assert [len(each) for each in told] == (state["told"] >= 0).sum(1).tolist()
    lines = list(read(tmp_path / "metrics.jsonl"))
    shown = [line["generation"] for line in lines if "generation" in line]
    assert shown[-1] == generation

    start(tmp_path, [*WORLD_MODELS, "phase=evolve", "plan.phases.evolve.until=[seen]"], acts=False)
    generation, told = expected(played, len(played))
    again = kept(tmp_path)
    assert again["evolution.generation"] == generation, "the new phase saw all episodes again"
    assert [len(each) for each in told] == (again["told"] >= 0).sum(1).tolist()


# -- a run whose owner changes their mind
PRACTICE = [
    "task=fake", "plan=from_scratch", "algo=sac", "critic.hidden=[16,16]", "policy.hidden=[16,16]",
    "random_steps=50", "eval_episodes=2", "log=false",
]  # fmt: skip


def test_a_run_that_is_over_is_trained_longer_and_otherwise_and_tells_what_was_changed(tmp_path, caplog):
    start(tmp_path, [*PRACTICE, "max_env_steps=150", "batch_size=16"])
    first = summary_of(tmp_path / "summary.json")
    changed = {"max_env_steps": 400, "batch_size": 8, "algo.learning_rate": 1e-4, "utd": 2}
    start(tmp_path, [*PRACTICE, *(f"{name}={value}" for name, value in changed.items())])
    second = summary_of(tmp_path / "summary.json")
    made = second["env_steps"] - first["env_steps"]
    assert 100 < made < 400, "each phase has as many more steps as were allowed when it ended"
    in_phase, tolerance = 250, 64 + 1  # steps of an episode that goes on behind the end of its phase train nothing
    least = first["updates"] - tolerance + 2 * in_phase - tolerance  # ahead at the first end, behind at the second
    assert least <= second["updates"] <= first["env_steps"] + 2 * made + 64
    assert second["updates_dropped"] == 0
    assert second["eval"]["weights_sha256"] == second["weights_sha256"] != first["eval"]["weights_sha256"]
    (change,) = second["changes"]
    assert change["updates"] == first["updates"]
    for text in ("env_steps >= 400", "'updates_per_step': 2", "algo.learning_rate: 0.0001, 0.001", "batch_size: 8, 16"):
        assert text in change["what"]
    assert oracle.whole(tmp_path / "store").sources["online"]["capacity"] == 150
    assert f"changed since the checkpoint (now, then): {change['what']}" in caplog.text


CLONED = [
    "task=fake", "plan=hiors", "policy.network.hidden=[32,32]", "policy.head.steps=2", "batch_size=16", "log=false",
    'plan.phases.demonstrate.until=["demo.episodes >= 2"]', "~plan.phases.baseline", "~plan.phases.practise",
    'plan.phases.clone.until=["updates >= 10"]', 'plan.phases.evaluate.until=["episodes >= 1"]',
]  # fmt: skip
IMPROVED = [
    "task=fake", "algo=sac_pi0", "policy.network.hidden=[32,32]", "policy.head.steps=2", "critic.hidden=[16,16]",
    "batch_size=16", "eval_episodes=1", "log=false",
]  # fmt: skip


def published(run_dir):
    """Return the newest weights that a run has published."""
    return load_file(max((run_dir / "weights").glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns))


def test_a_run_begins_with_a_clone_and_its_demonstrations_and_goes_on_without_them(tmp_path, caplog):
    last, new, data = (tmp_path / name for name in ("last", "new", "data"))
    start(last, CLONED)
    assert called("data", "export", last, "--source", "demo", "--episodes", "1")[0] == 0
    assert called("data", "merge", data, *sorted((last / "datasets/demo").iterdir())[:1])[0] == 0
    before = {path: path.read_bytes() for path in last.rglob("*") if path.is_file()}

    start(new, [*IMPROVED, "plan=evaluate", f"from={last}"])
    assert {path: path.read_bytes() for path in last.rglob("*") if path.is_file()} == before
    cloned, first = published(last), published(new)
    assert cloned.keys() == first.keys()
    assert all(torch.equal(cloned[name], first[name]) for name in cloned)

    last.rename(tmp_path / "away")
    training = ["plan=sft", "plan.phases.clone.updates=[update_clone]", 'plan.phases.clone.until=["updates >= 5"]']
    start(new, [*IMPROVED, *training, f"plan.sources.demo.dataset={data}"])
    assert summary_of(new / "summary.json")["updates"] == 5
    assert "the normalisers stay those of from=" in caplog.text
    trained = published(new)
    same = {name for name in cloned if torch.equal(cloned[name], trained[name])}
    assert {"encoder.state.mean", "encoder.state.std", "scale.center", "scale.half_range"} <= same, "not of `data`"
    assert not any("weight" in name for name in same)
