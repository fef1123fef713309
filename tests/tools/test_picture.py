"""The moving picture shows what a run's store holds: the simulator repeats it, or the picture is refused."""

import json
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from serl_client import Outcome, Segment, Stamp
from serl_client.errors import ConfigError
from serl_client.starts import evaluation_seed, training_seed

from robot_infra.cameras import gl
from robot_infra.tasks.sim_arm import FPS, make
from serl_launcher.store.store import Store
from tests.shared.common import ROOT, STATE
from tests.shared.tools import called

pytest.importorskip("mujoco", reason="needs the extra `sim`")
Image = pytest.importorskip("PIL.Image", reason="needs Pillow, which the extra `learner` brings")
from tools import picture  # noqa: E402

SEED = 3


def recorded(env, number, drive, directive, phase, practise=False):
    """An episode as an actor records it: 12 rows of standing still, or the scripted operator's pick.

    In practice the operator picks after standing still; else it is an evaluation.
    """
    seed = training_seed(SEED, "A", number) if practise else evaluation_seed(0, number)
    rows = [env.reset(seed, teleop=drive, intervene=practise)[STATE]]
    steps = []
    while not steps or not (steps[-1].terminated or len(steps) == (40 if drive or practise else 12)):
        steps.append(env.step(None))
        rows.append(steps[-1].observation[STATE])
    done = bool(steps[-1].terminated)
    zeros = np.zeros(len(steps), bool)
    return Segment(
        f"arm-{phase}-{number}", 0, env.task, Stamp(directive, phase, 0), {STATE: np.stack(rows)},
        np.stack([step.executed for step in steps]), np.array([step.reward for step in steps], np.float32),
        np.array([practise and step.intervened for step in steps]), zeros, np.arange(len(steps)) / FPS,
        terminated=done, truncated=not done,
        extras={name: np.stack([step.extras[name] for step in steps]) for name in env.spec.extras},
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Makes a run of the arm that was evaluated once for each word: `drive` whether it picks up the block.

    practised: an episode of practice with a takeover comes after the first evaluation.
    """

    def make_run(*evaluated, spoil=lambda segment: None, practised=False):
        env = make(max_steps=60, noise=0.0, clock="simulated")
        store = Store.create(tmp_path / "store", env.spec, {"eval": 500, "online": 500}, ())
        (tmp_path / "config.yaml").write_text(f"seed: {SEED}\n")
        store.lives.hello("arm", "outbox", "A", [])
        sequence = count()

        def stage(segment):
            for record in (segment, Outcome(segment.episode, bool(segment.terminated), judged_by="judge")):
                store.stage("A", next(sequence), record)

        for phase, drive in enumerate(evaluated):
            directive = store.direct({"into": "eval", "phase": f"phase{phase}"})
            for number in range(2):
                segment = recorded(env, number, drive, directive, f"phase{phase}")
                spoil(segment)
                stage(segment)
            if practised and not phase:
                directive = store.direct({"into": "online", "phase": "practise"})
                stage(recorded(env, 7, False, directive, "practise", practise=True))
        store.commit()
        store.close()
        return tmp_path

    return make_run


@pytest.mark.slow
def test_the_picture_shows_the_first_evaluation_beside_the_last(run):
    if not gl.backend():
        pytest.skip("this machine can draw no images")
    out = run(False, False, True) / "both.gif"
    status, said = called("picture", out.parent, "--out", out, "--size", 64, "--seconds", 3)
    assert status == 0, said
    assert said.startswith(f"{out}: 30 frames, ")
    with Image.open(out) as animation:
        assert animation.size == (128, 64 + picture.BAR)
        shown = [np.asarray(image.convert("RGB"), int) for image in ticks(animation)]
    assert len(shown) == 30
    moved = np.stack([np.abs(image - shown[0])[picture.BAR + 8 : -8].mean(axis=(0, 2)) for image in shown[:12]])
    assert moved[:, 72:120].max() > 3 * moved[:, 8:56].max()  # it stood still before training


def ticks(animation):
    """What is seen in each tick of the robot; frames that are alike are stored once, and shown longer."""
    for number in range(animation.n_frames):
        animation.seek(number)
        for _ in range(round(animation.info["duration"] * FPS / 1000)):
            yield animation.copy()


def blind(size=4):
    """A scene that draws nothing."""
    return SimpleNamespace(arm=picture.guarded(), draw=lambda: np.zeros((size, size, 3), np.uint8))


@pytest.mark.slow
def test_between_them_practice_is_framed_where_the_operator_drives(run):
    """The policy stands still, so that after 12 steps without progress the script takes over."""
    folder = run(False, True, practised=True)
    (rows,) = picture.takeovers(folder)
    assert not rows["intervened"][:12].any()
    assert rows["intervened"].any()
    assert rows["success"]
    shown = picture.part(blind(64), [rows], picture.POLICY, 100)
    assert len(shown) == len(rows["action"]) + picture.PAUSE
    frames = [tuple(image[picture.BAR, 0]) for image in shown]
    driven = [frame == picture.ORANGE for frame in frames]
    assert driven[: -picture.PAUSE] == rows["intervened"].tolist()
    assert frames[-picture.PAUSE :] == [picture.GREEN] * picture.PAUSE


def test_a_run_in_which_nobody_took_over_has_no_such_part(run):
    assert picture.takeovers(run(False, True)) == []


@pytest.mark.slow
def test_what_the_simulator_does_not_repeat_is_refused(run):
    def shift(segment):
        segment.action[5, 0] += 0.5

    (_, first), _ = picture.evaluations(run(False, True, spoil=shift))
    with pytest.raises(ConfigError, match="does not repeat this run"):
        list(picture.played(blind(), first[0]))
    with pytest.raises(ConfigError, match="no start that this run gives"):
        picture.start(picture.guarded(), first[0][STATE][0] + 1, range(3))


def test_captions_equal_the_table_of_the_run(run):
    results = {name: {"success": share, "episodes": 30} for name, share in (("before", 0.0), ("eval", 0.9))}
    folder = run(False, True)
    (folder / "summary.json").write_text(json.dumps(results))
    (before, _), (after, _) = picture.evaluations(folder)
    assert (before, after) == ("before training: 0 of 30 picked up", "after training: 27 of 30 picked up")


def test_captions_count_what_the_store_holds_and_an_episodes_end_stands_still_and_tells_how_it_ended(run):
    (before, first), (after, last) = picture.evaluations(run(False, True))
    assert (before, after) == ("before training: 0 of 2 picked up", "after training: 2 of 2 picked up")
    assert [len(rows["action"]) for rows in first] == [12, 12]
    assert all(rows["terminated"][-1] for rows in last)
    for rows, succeeded in ((first[0], False), (last[1], True)):
        shown = [success for _, success in picture.played(blind(), rows)]
        assert shown == [None] * len(rows["action"]) + [succeeded] * picture.PAUSE


def test_a_run_without_two_evaluations_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="holds no store"):
        picture.evaluations(tmp_path / "none")
    with pytest.raises(ConfigError, match="has 1 phases with evaluated episodes; a picture needs two"):
        picture.evaluations(run(True))


def test_the_readme_shows_a_small_moving_picture_of_a_run():
    path = ROOT / "docs/pictures/before_after.gif"
    assert f"({path.relative_to(ROOT)})" in (ROOT / "README.md").read_text()
    assert path.stat().st_size < 1_500_000
    with Image.open(path) as animation:
        assert 5 <= len(list(ticks(animation))) / FPS <= 8
