"""tools/data.py: a check finds each fault that was planted and says nothing of sound data; a merge keeps all."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from serl_client.episode import Outcome, Segment, Stamp
from serl_client.spec import Feature, Spec

from serl_launcher.datasets.inspection import inspect
from serl_launcher.store.layout import Layout
from serl_launcher.store.store import Store

ROOT = Path(__file__).resolve().parents[2]
STATE, CAMERA, AGE = "observation.state", "observation.images.front", "age.front"
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


def kept(run, *episodes, outcomes=True, ends=True, cut=()):
    """A run's folder whose store holds these episodes; those in `cut` were truncated."""
    store = Store.create(run / "store", SPEC, {"online": 1000})
    store.hello("arm", "outbox", "session", [])
    directive, seq = store.direct({"mode": "collect", "into": "online"}), itertools.count()
    for number, arrays in enumerate(episodes):
        count = len(arrays["action"])
        seen = {STATE: arrays["state"], CAMERA: arrays["image"]}
        segment = Segment(
            f"e{number}", 0, "reach", Stamp(directive, "practise", 1),
            {name: array[: count + ends] for name, array in seen.items()}, arrays["action"],
            np.zeros(count, np.float32), np.zeros(count, bool), np.zeros(count, bool), arrays["time"],
            terminated=ends and number not in cut, truncated=number in cut, extras={AGE: arrays["age"]},
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


def black(arrays):
    arrays["image"][7] = 2


def saturated(arrays):
    arrays["image"][7, :12] = 255


def frozen(arrays):
    arrays["image"][10:25] = arrays["image"][10]


def late(arrays):
    arrays["time"][20:] += 0.5


def slow(arrays):
    arrays["time"] *= 1.5


def backwards(arrays):
    arrays["time"][20] = arrays["time"][18]


def old(arrays):
    arrays["age"][5] = 0.5


def outside(arrays):
    arrays["action"][3, 1] = 1.5


def single(arrays):
    for name in ("action", "time", "age"):
        arrays[name] = arrays[name][:1]


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (black, f"{CAMERA}: black images"),
        (saturated, f"{CAMERA}: saturated images"),
        (frozen, f"{CAMERA}: frozen images"),
        (late, "has gaps of more than 2 periods between its rows"),
        (slow, "its rate is not 10 rows per second"),
        (backwards, "time does not go forward"),
        (old, f"{AGE}: images older than 3 periods"),
        (outside, "has actions outside the bounds"),
        (single, "has one step"),
    ],
)
def test_a_fault_in_one_episode_is_found_and_placed(tmp_path, plant, what):
    faulty = sound(1)
    plant(faulty)
    run = kept(tmp_path, sound(0), faulty)
    assert said(run) == ({what}, set())
    assert inspect(run, 10).found[True, what] == ["online: e1"]


def test_values_that_are_no_numbers_are_found_in_a_store_of_before_they_were_refused(tmp_path):
    run, layout = kept(tmp_path, sound(0), sound(1)), Layout(SPEC, 1000)
    states = np.memmap(run / "store/online/rows", "float32", "r+", layout.blocks[STATE], (layout.rows, 3))
    states[STEPS + 1 + 9, 2] = np.nan
    states.flush()
    assert inspect(run, 10).found == {(True, f"{STATE} has values that are no numbers"): ["online: e1"]}


def test_an_image_that_stays_the_same_while_the_robot_stands_still_is_not_frozen(tmp_path):
    standing = sound()
    frozen(standing)
    standing["state"][10:25] = standing["state"][10]
    assert said(kept(tmp_path / "standing", standing)) == (set(), set())
    standing["state"][10:25] += 1e-2 * (1 - 0.5 ** np.arange(15))[:, None]  # it settles: no camera sees it
    assert said(kept(tmp_path / "settling", standing)) == (set(), set())
    moving = sound()
    frozen(moving)
    assert said(kept(tmp_path / "moving", moving), frozen=20) == (set(), set())


def test_a_missing_outcome_is_wrong_where_others_have_one(tmp_path):
    some = kept(tmp_path / "some", sound(0), sound(1), outcomes=[0])
    assert said(some) == ({"has no outcome"}, set())
    none = kept(tmp_path / "none", sound(0), sound(1), outcomes=False)
    assert said(none) == (set(), {"has no outcome"})


def test_an_episode_that_was_cut_off_before_it_was_judged_is_normal(tmp_path):
    """As the last one of an actor that is stopped, or of an evaluation."""
    run = kept(tmp_path, sound(0), sound(1), outcomes=[0], cut=[1])
    assert said(run) == (set(), {"was cut off before it was judged: normal where an actor was stopped"})
    assert program("check", run).returncode == 0


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


def program(*words):
    return subprocess.run([sys.executable, ROOT / "tools/data.py", *words], capture_output=True, text=True)


def test_the_program_says_what_is_wrong_by_its_exit_status(tmp_path):
    faulty = sound()
    black(faulty)
    good, bad = program("check", kept(tmp_path / "good", sound())), program("check", kept(tmp_path / "bad", faulty))
    assert (good.returncode, bad.returncode) == (0, 1)
    assert "nothing to complain of" in good.stdout
    assert "black images" in bad.stdout
    nothing = program("check", tmp_path)
    assert nothing.returncode == 1
    assert "holds no LeRobot dataset" in nothing.stderr
    assert "merge OUT SHARD..." in program("--help").stdout


# -- datasets of LeRobot's writer

MAKE = """
import os, sys
from pathlib import Path
os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

def make(name, lengths, begin, faulty=False, fps=10):
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "observation.images.front": {"dtype": "video", "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    }
    data = LeRobotDataset.create("a/b", fps=fps, features=features, root=Path(sys.argv[1]) / name)
    rng = np.random.default_rng(0)
    for episode, length in enumerate(lengths, begin):
        for step in range(length):
            image = np.full((64, 64, 3), 60, np.uint8)
            shown = min(step, 8) if faulty and episode == begin else step
            image[8 * (shown % 8) : 8 * (shown % 8) + 8, shown % 50 :] = 180
            done = step == length - 1 and not (faulty and episode == begin + 1)
            data.add_frame({
                "observation.state": np.array([episode, step], np.float32), "observation.images.front": image,
                "action": rng.uniform(-1, 1, 2).astype(np.float32), "task": f"task {episode % 3}",
                "next.done": np.array([done]), "next.success": np.array([done]),
            })
        data.save_episode()
    data.finalize()

make("a", [12, 9], 0)
make("b", [20, 5, 8], 2)
make("faulty", [30, 7, 1], 5, faulty=True)
make("slow", [4], 8, fps=5)
"""
OPEN = """
import os, sys, json
os.environ["HF_HUB_OFFLINE"] = "1"
from lerobot.datasets.lerobot_dataset import LeRobotDataset
try:
    import torchcodec
    backend = "torchcodec"
except (ImportError, OSError, RuntimeError):  # it finds no libraries of ffmpeg; av has its own
    backend = "pyav"
data = LeRobotDataset("a/b", root=sys.argv[1], video_backend=backend)
rows = [data[i] for i in range(len(data))]
tasks = [row["task"] for row in rows]
print(json.dumps([[row["observation.state"].tolist() for row in rows], tasks]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("lerobot", reason="the extra `data` is not installed: uv sync --inexact --extra data")
    made = tmp_path_factory.mktemp("datasets")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MAKE, made], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return made


def test_faults_of_a_dataset_are_found(folder):
    assert not inspect(folder / "a", 10).wrong
    found = inspect(folder / "faulty", 10).found
    wrong = {what: places for (is_wrong, what), places in found.items() if is_wrong}
    assert wrong == {
        f"{CAMERA}: frozen images": ["episode 0"],
        "has no end: neither terminated nor truncated": ["episode 1"],
        "has one step": ["episode 2"],
    }


@pytest.mark.slow
def test_a_merged_dataset_has_every_frame_and_lerobot_opens_it(folder):
    out = folder / "merged"
    done = program("merge", out, folder / "a", folder / "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "merging 5 episodes, 54 frames of 2 datasets", "reading back: episode 5 of 5",
        f"{out}: 5 episodes, 54 frames of 2 datasets",
    ]  # fmt: skip
    assert not inspect(out, 10).wrong
    lengths = [12, 9, 20, 5, 8]
    expected = [[episode, step] for episode, length in enumerate(lengths) for step in range(length)]
    opened = subprocess.run([sys.executable, "-W", "ignore", "-c", OPEN, out], capture_output=True, text=True)
    assert opened.returncode == 0, opened.stderr[-3000:]
    states, tasks = json.loads(opened.stdout.splitlines()[-1])
    assert states == expected
    assert tasks == [f"task {episode % 3}" for episode, _ in expected]
    assert not list(folder.glob("*.part"))


@pytest.mark.slow
def test_what_cannot_be_merged_is_said_and_nothing_is_left(folder, tmp_path):
    other = shutil.copytree(folder / "a", tmp_path / "other")
    info = json.loads((other / "meta/info.json").read_text())
    del info["features"]["next.success"]
    (other / "meta/info.json").write_text(json.dumps(info))
    for words, reason in (
        ((folder / "a", folder / "a"), "a dataset is named twice"),
        ((folder / "a", folder / "slow"), "5 frames per second, not 10"),
        ((folder / "a", other), "next.success differs"),
        ((folder / "a", tmp_path), "holds no LeRobot dataset"),
    ):
        done = program("merge", tmp_path / "out", *words)
        assert done.returncode == 1
        assert reason in done.stderr
        assert not (tmp_path / "out").exists()
    done = program("merge", folder / "b", folder / "a", folder / "b")
    assert "is there already" in done.stderr
