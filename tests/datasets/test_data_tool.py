"""tools/data.py: a check finds each fault that was planted and says nothing of sound data; a merge keeps all."""

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from serl_client.episode import Outcome, Segment, Stamp
from serl_client.spec import Feature, Spec

from serl_launcher.datasets import lerobot_api
from serl_launcher.datasets.inspection import inspect
from serl_launcher.store.layout import Layout
from serl_launcher.store.store import Store
from tests.shared.common import STATE, TOOLS
from tests.shared.tools import called

from .exporting import Run, opened, segment, writes_shards
from .lerobots import CAMERA

AGE = "age.front"
SPEC = Spec(
    {STATE: Feature((3,)), CAMERA: Feature((16, 16, 3), "uint8")}, Feature((2,), low=-1, high=1), fps=10.0,
    extras={AGE: Feature(())},
)  # fmt: skip
STEPS = 40


def sound(seed=0):
    """The arrays of one episode in which nothing is wrong."""
    rng = np.random.default_rng(seed)
    return {
        "state": rng.normal(size=(STEPS + 1, 3)).astype(np.float32),
        "image": rng.integers(40, 200, (STEPS + 1, 16, 16, 3), dtype=np.uint8),
        "action": rng.uniform(-0.9, 0.9, (STEPS, 2)).astype(np.float32),
        "time": np.arange(STEPS) / 10.0,
        "age": np.full(STEPS, 0.01, np.float32),
    }


def kept(run, *episodes, outcomes=True, ends=True, cut=(), ages=True):
    """A run's folder whose store holds these episodes; those in `cut` were truncated. ages: of the camera's images."""
    spec = SPEC if ages else replace(SPEC, extras={})
    store = Store.create(run / "store", spec, {"online": 1000})
    store.lives.hello("arm", "outbox", "session", [])
    directive, seq = store.direct({"phase": "practise", "into": "online"}), itertools.count()
    for number, arrays in enumerate(episodes):
        count = len(arrays["action"])
        seen = {STATE: arrays["state"], CAMERA: arrays["image"]}
        segment = Segment(
            f"e{number}", 0, "reach", Stamp(directive, "practise", 0),
            {name: array[: count + ends] for name, array in seen.items()}, arrays["action"],
            np.zeros(count, np.float32), np.zeros(count, bool), np.zeros(count, bool), arrays["time"],
            terminated=ends and number not in cut, truncated=number in cut, extras={AGE: arrays["age"]} if ages else {},
        )  # fmt: skip
        store.stage("session", next(seq), segment)
        if outcomes is True or number in (outcomes or ()):
            store.stage("session", next(seq), Outcome(f"e{number}", True))
    store.commit()
    store.close_session("session")
    store.commit()
    store.close()
    return run


def said(run, frozen=10):
    """({what is wrong}, {notes}) of a run."""
    found = inspect(run, frozen).found
    return tuple({what for is_wrong, what in found if is_wrong is kind} for kind in (True, False))


def test_of_sound_data_nothing_is_said(tmp_path):
    assert said(kept(tmp_path, sound(0), sound(1))) == (set(), set())


FROZEN = "image", np.s_[10:25], 100


def planted(number, name, where, value):
    """An episode with that value in some rows of one array."""
    arrays = sound(number)
    arrays[name][where] = value
    return arrays


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (("image", 7, 2), f"{CAMERA}: black images"),
        (("image", np.s_[7, :12], 255), f"{CAMERA}: saturated images"),
        (("time", np.s_[20:], np.arange(20, STEPS) / 10 + 0.5), "has gaps of more than 2 periods between its rows"),
        (("time", np.s_[:], np.arange(STEPS) / 10 * 1.5), "its rate is not 10 rows per second"),
        (("time", 20, 1.8), "time does not go forward"),
        (("age", 5, 0.5), f"{AGE}: images older than 3 periods"),
        (("action", (3, 1), 1.5), "has actions outside the bounds"),
    ],
)
def test_a_fault_in_one_episode_is_found_and_placed(tmp_path, fault, what):
    run = kept(tmp_path, sound(0), planted(1, *fault))
    assert said(run) == ({what}, set())
    assert inspect(run, 10).found[True, what] == ["online: e1"]


def test_values_that_are_no_numbers_are_found_in_a_store_of_before_they_were_refused(tmp_path):
    run, layout = kept(tmp_path, sound(0), sound(1)), Layout(SPEC, 1000)
    states = np.memmap(run / "store/online/rows", "float32", "r+", layout.blocks[STATE], (layout.rows, 3))
    states[STEPS + 1 + 9, 2] = np.nan
    states.flush()
    assert inspect(run, 10).found == {(True, f"{STATE} has values that are no numbers"): ["online: e1"]}


def test_images_that_stay_the_same_are_frozen_unless_their_age_says_that_they_are_new(tmp_path):
    aged = kept(tmp_path / "aged", sound(0), planted(1, *FROZEN))
    note = f"{CAMERA}: new images that show the same while the robot moves: does it see a plain surface?"
    assert said(aged) == (set(), {note})
    frozen = kept(tmp_path / "frozen", sound(0), planted(1, *FROZEN), ages=False)
    assert inspect(frozen, 10).found == {(True, f"{CAMERA}: frozen images"): ["online: e1"]}


def test_an_image_that_stays_the_same_while_the_robot_stands_still_is_not_frozen(tmp_path):
    standing = planted(0, *FROZEN)
    standing["state"][10:25] = standing["state"][10]
    assert said(kept(tmp_path / "standing", standing, ages=False)) == (set(), set())
    standing["state"][10:25] += 1e-2 * (1 - 0.5 ** np.arange(15))[:, None]  # it settles: no camera sees it
    assert said(kept(tmp_path / "settling", standing, ages=False)) == (set(), set())
    assert said(kept(tmp_path / "moving", planted(0, *FROZEN), ages=False), frozen=20) == (set(), set())


def test_a_missing_outcome_is_wrong_where_others_have_one(tmp_path):
    some = kept(tmp_path / "some", sound(0), sound(1), outcomes=[0])
    assert said(some) == ({"has no outcome"}, set())
    none = kept(tmp_path / "none", sound(0), sound(1), outcomes=False)
    assert said(none) == (set(), {"has no outcome"})


def test_an_episode_that_was_cut_off_before_it_was_judged_is_normal(tmp_path):
    """As the last one of an actor that is stopped, or of an evaluation."""
    run = kept(tmp_path, sound(0), sound(1), outcomes=[0], cut=[1])
    assert said(run) == (set(), {"was cut off before it was judged: normal where an actor was stopped"})
    assert called("data", "check", run)[0] == 0


def test_what_a_person_should_know_is_a_note(tmp_path):
    constant, bound = sound(), sound(1)
    constant["action"][:, 0] = 0.25
    bound["action"][:, 0], bound["action"][: STEPS - 5, 1] = 0.25, 1.0
    simulated = kept(tmp_path, constant | {"time": constant["time"] / 100}, bound, ends=False)
    assert said(simulated) == (set(), {
        "action[0] is always 0.25", "a simulated clock: times were not looked at", "without a final observation",
    })  # fmt: skip
    bound["action"][:, 1] = 1.0
    assert "action[1] is always 1" in said(kept(tmp_path / "other", bound))[1]
    bound["action"][0, 1] = 0.0
    assert "action[1] is at a bound in 98 % of the rows" in said(kept(tmp_path / "third", bound))[1]


@pytest.mark.parametrize(("name", "steps", "wrong"), [("e0", 10, set()), ("e1", 0, {"has one step"})])
def test_one_step_alone_is_wrong_but_not_as_the_rest_of_an_episode_that_the_store_had_to_cut(
    tmp_path, blind, name, steps, wrong
):
    run = Run(tmp_path, blind, capacity=40)  # an episode takes a quarter of it
    run.add(*([segment(blind, name, steps=steps, ends=None)] if steps else []))
    run.episodes(name, start=steps, steps=1)
    assert {what for what in said(tmp_path)[0] if "step" in what} == wrong
    assert inspect(tmp_path, 10).steps == steps + 1


def test_the_program_says_what_is_wrong_by_its_exit_status(tmp_path):
    good, bad = kept(tmp_path / "good", sound()), kept(tmp_path / "bad", planted(0, "image", 7, 2))
    for path, status, words in (
        (good, 0, "nothing to complain of"), (bad, 1, "black images"), (tmp_path, 1, "holds no LeRobot dataset")
    ):  # fmt: skip
        ended, text = called("data", "check", path)
        assert ended == status
        assert words in text
    assert "merge OUT SHARD..." in called("data", "--help")[1]


# -- datasets of LeRobot's writer


@writes_shards
def test_faults_of_a_dataset_are_found(made):
    assert not inspect(made["first"].folder, 10).wrong
    found = inspect(made["faulty"].folder, 10).found
    wrong = {what: places for (is_wrong, what), places in found.items() if is_wrong}
    assert wrong == {
        f"{CAMERA}: frozen images": ["episode 0"],
        "goes on after its end": ["episode 0"],
        "has no end: neither terminated nor truncated": ["episode 1"],
        "has one step": ["episode 2"],
    }


def merge(*words):
    """In a process of its own: LeRobot takes long to import, and warns."""
    command = [sys.executable, TOOLS / "data.py", "merge", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@writes_shards
@pytest.mark.usefixtures("quiet")
def test_a_merged_dataset_has_every_frame_and_lerobot_opens_it(made, tmp_path):
    out, shards = tmp_path / "merged", [made["first"], made["second"]]
    done = merge(out, *(shard.folder for shard in shards))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "merging 5 episodes, 54 frames of 2 datasets", "reading back: episode 5 of 5",
        f"{out}: 5 episodes, 54 frames of 2 datasets",
    ]  # fmt: skip
    assert not inspect(out, 10).wrong
    dataset, columns = opened(out)
    there = [(number, length) for shard in shards for number, length in enumerate(shard.lengths)]
    expected = [(number, step, f"task {number % 2}") for number, length in there for step in range(length)]
    tasks = dataset.meta.tasks.index[columns["task_index"]]
    assert [(*state[:2], task) for state, task in zip(columns[STATE], tasks, strict=True)] == expected
    assert not list(tmp_path.glob(".*.aside"))


@writes_shards
@pytest.mark.usefixtures("quiet")
def test_a_merge_of_several_video_files_shows_each_row_its_own_image_or_is_not_made(made, tmp_path, monkeypatch):
    """lerobot's showed rows those of other episodes, or none (issue 2328), before its PR 2550."""
    import pandas
    from lerobot.datasets.aggregate import aggregate_datasets

    first, second, many = made["first"].folder, made["second"].folder, tmp_path / "many"
    aggregate_datasets(["a/b", "a/c"], "a/d", [first, second], many, video_files_size_in_mb=1e-6)
    assert len(list(many.glob("videos/*/*/*.mp4"))) == 2
    status, said = called("data", "merge", tmp_path / "out", many, first)
    assert (status, "7 episodes, 75 frames of 2 datasets" in said) == (0, True), said
    aggregate = lerobot_api.merge

    def as_before(target, folders):
        aggregate(target, folders)
        [path] = target.glob("meta/episodes/*/*.parquet")
        table = pandas.read_parquet(path)
        table.loc[1, f"videos/{CAMERA}/from_timestamp"] = 0.0
        table.to_parquet(path)

    monkeypatch.setattr(lerobot_api, "merge", as_before)
    status, said = called("data", "merge", tmp_path / "other", many, first)
    assert status == 1
    assert f"{CAMERA} differs from {CAMERA} of episode 1 of {many}" in said
    assert not list(tmp_path.glob("other*"))


@writes_shards
@pytest.mark.usefixtures("quiet")
def test_a_merge_that_fails_or_gives_an_episode_another_task_is_one_sentence(low, tmp_path, monkeypatch):
    aggregate, other = lerobot_api.merge, shutil.copytree(low.folder, tmp_path / "low")

    def without_tasks(target, folders):
        aggregate(target, folders)
        (target / "meta/tasks.parquet").unlink()

    for merge, reason in (
        (without_tasks, "its task is '', that of episode 0 of "),
        (lambda *_: {}["task"], "LeRobot cannot merge these datasets (KeyError: 'task'): look each over"),
    ):
        monkeypatch.setattr(lerobot_api, "merge", merge)
        status, said = called("data", "merge", tmp_path / "out", low.folder, other)
        assert (status, reason in said) == (1, True), said
        assert not list(tmp_path.glob("out*"))


@writes_shards
def test_what_cannot_be_merged_is_said_and_nothing_is_left(made, tmp_path):
    first = made["first"].folder
    other = shutil.copytree(first, tmp_path / "other")
    info = json.loads((other / "meta/info.json").read_text())
    del info["features"]["next.success"]
    (other / "meta/info.json").write_text(json.dumps(info))
    measured = [shutil.copytree(first, tmp_path / unit) for unit in ("deg", "percent")]
    for folder in measured:
        info = json.loads((folder / "meta/info.json").read_text())
        info["features"]["action"]["units"] = [folder.name] * 2
        (folder / "meta/info.json").write_text(json.dumps(info))
    for words, reason in (
        ((first, first), "a dataset is named twice"),
        ((first, made["slow"].folder), "5 frames per second, not 10"),
        ((first, other), "next.success differs"),
        (measured, "action is in ['percent', 'percent'], not ['deg', 'deg']"),
        ((first, measured[0]), "write the same `units` into its meta/info.json"),
        ((first, tmp_path), "holds no LeRobot dataset"),
    ):
        done = merge(tmp_path / "out", *words)
        assert done.returncode == 1
        assert reason in done.stderr
        assert not (tmp_path / "out").exists()
    assert "is there already" in merge(other, first, made["second"].folder).stderr
