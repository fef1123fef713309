"""What an import makes of a dataset: each number and pixel is lerobot's after the change that was said."""

import hashlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from unittest.mock import Mock

import av
import cv2
import numpy as np
import pyarrow as pa
import pytest
from serl_client.episode import Stamp, join
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Feature, Spec

from serl_launcher.config import composed
from serl_launcher.datasets import lerobot_api
from serl_launcher.datasets.columns import became, digest
from serl_launcher.datasets.importer import _Import, import_datasets, open_datasets
from serl_launcher.datasets.pieces import pieces
from serl_launcher.datasets.reader import Dataset
from serl_launcher.datasets.units import Conversion
from serl_launcher.store.directives import DATASET
from serl_launcher.store.store import Store
from serl_launcher.training.plan import Change, Plan, PlanSource
from serl_launcher.training.plan_reader import plan_of
from tests.shared.common import CONFIG, STATE
from tests.shared.programs import Programs

from .exporting import bring, catalog
from .lerobots import CAMERA, as_of_last_year

pytest.importorskip("lerobot", reason="the extra `data` is not installed: . examples/install.sh --extra data")
pytestmark = pytest.mark.slow  # lerobot's writer, in a process of its own

SIDE, WRIST = f"{IMAGES}side", f"{IMAGES}wrist"
JOINTS = {"main_pan": "pan.pos", "main_lift": "lift.pos"}
RENAMED = {f"{IMAGES}up": CAMERA, SIDE: WRIST, **JOINTS}
AS_SO101 = Change(RENAMED, {"front": (0, 80, 480, 480)}, {"": (128, 128)}, 30)
KINDS = [
    ("low", Change()), ("video", Change()), ("image", Change()), ("odd", Change()), ("joined", Change()),
    ("replayed", Change()), ("so101", Change()), ("tasks", Change()), ("fast", Change()), ("so101", AS_SO101),
    ("so101", Change(RENAMED, {}, {"wrist": (120, 160)})), ("fast", Change(fps=30)), ("fast", Change(fps=120)),
    ("tasks", Change(fps=4)), ("odd", Change({"b": "c"}, {f"{IMAGES}first": (2, 3, 11, 13)}, fps=15)),
]  # fmt: skip


def episodes(dataset, spec=None):
    spec, stamp = spec or dataset.spec(), Stamp(1, DATASET, 0)
    return [join(list(episode.segments(spec, f"e{i}", stamp))) for i, episode in enumerate(dataset)]


def shown(rows, fps, to):
    """Which of lerobot's rows each step shows, of each episode and task: the newest one of its time."""
    found, slack = [], 0.05 / max(fps, to)
    for _, group in itertools.groupby(range(len(rows["task"])), lambda i: (rows["episode_index"][i], rows["task"][i])):
        own = [*group]
        since = rows["timestamp"][own].astype(float) - float(rows["timestamp"][own[0]])
        steps = itertools.takewhile(lambda s: s < since[-1] + 1 / fps - slack, (k / to for k in itertools.count()))  # noqa: B023
        found.append([own[max(i for i, time in enumerate(since) if time <= step + slack)] for step in steps])
    return found


def cut(image, crop, size):
    """One of lerobot's images, [C, H, W] from 0 to 1, as a camera of the run gives it."""
    top, left, height, width = crop or (0, 0, *image.shape[1:])
    part = np.rint(255 * image.transpose(1, 2, 0)[top : top + height, left : left + width]).astype(np.uint8)
    return cv2.resize(part, size[::-1], interpolation=cv2.INTER_AREA) if size else part


@pytest.mark.parametrize(("name", "change"), KINDS)
def test_each_number_and_pixel_is_lerobots_after_the_change_that_was_said(made, name, change):
    file = made[name].folder.with_suffix(".npz")
    if not file.exists():
        pytest.skip("lerobot decodes no video here: its torchcodec needs ffmpeg's libraries (apt-get install ffmpeg)")
    rows, dataset = np.load(file), Dataset(made[name].folder, change)
    expected, mine = shown(rows, made[name].fps, dataset.fps), episodes(dataset)
    assert [len(episode) for episode in mine] == [len(each) for each in expected] == dataset.lengths
    for episode, each in zip(mine, expected, strict=True):
        assert episode.task == rows["task"][each[0]]
        times = rows["timestamp"][each[0]] + np.arange(len(each)) / dataset.fps
        assert np.allclose(episode.time, times, atol=1e-3 / dataset.fps)
        assert np.array_equal(episode.action, rows["action"][each])
        if dataset.has("intervened"):
            assert np.array_equal(episode.intervened, rows[dataset.original("intervened")][each] == 1)
        for seen, array in episode.observation.items():
            theirs = rows[dataset.original(seen)][each]
            if seen in dataset.cameras:
                theirs = np.stack([cut(image, *change.of(seen)) for image in theirs])
                coded = dataset.info["features"][dataset.original(seen)]["dtype"] == "video"
                assert np.abs(array[: len(each)].astype(int) - theirs).max() <= 2 * coded, seen
            else:
                there = array[: len(each)].astype(theirs.dtype)  # lerobot gives float32
                assert np.array_equal(there, theirs.reshape(there.shape)), seen


@pytest.mark.parametrize("fps", [7, 30, 50, 120])
def test_rewards_and_ends_happen_once_at_any_rate(made, fps):
    dataset = Dataset(made["fast"].folder, Change(fps=fps))
    for number, episode in enumerate(episodes(dataset)):
        assert episode.terminated
        assert episode.reward.tolist() == [0.0] * (len(episode) - 1) + [float(number % 2 == 0)]
    assert [episode.success for episode in dataset] == [True, False]


@pytest.mark.parametrize("fps", [7, 25, 30, 50, 120])
def test_changes_per_step_lead_at_any_rate_where_they_led_at_the_datasets_own(made, fps):
    own, dataset = made["fast"], Dataset(made["fast"].folder, Change(fps=fps, deltas=("all",)))
    bounds = dataset.spec().action
    for before, episode in zip(own, dataset, strict=True):
        moved, steps = before.column("action"), episode.column("action")
        way = np.vstack([np.zeros((1, 2)), np.cumsum(moved, axis=0)])
        at = np.minimum(np.arange(len(steps) + 1) / fps, len(moved) / own.fps)
        at[-1] = len(moved) / own.fps
        expected = [np.interp(at, np.arange(len(way)) / own.fps, column) for column in way.T]
        assert np.allclose(np.diff(expected).T, steps, atol=1e-5)
        assert np.allclose(moved.sum(0), steps.sum(0), atol=1e-5)
        assert ((bounds.low <= steps) & (steps <= bounds.high)).all()


def test_an_entry_that_is_a_change_per_step_is_added_up_beside_one_that_is_held(made):
    words = [
        f"plan.sources.demo.dataset={made['odd'].folder}",
        "plan.sources.demo.fps=15",
        "plan.sources.demo.deltas=[b]",
    ]
    change = plan_of(composed(CONFIG, ["learner=true", "plan=sft", "task=fake", *words])).sources["demo"].change
    dataset = Dataset(made["odd"].folder, change)
    for before, episode in zip(made["odd"], dataset, strict=True):
        (held, added), (a, b) = before.column("action").T, episode.column("action").T
        assert np.array_equal(a, held[::2])
        assert np.allclose(b, np.add.reduceat(added, range(0, len(added), 2)), atol=1e-5)
    said = became(dataset, dataset.spec(), Conversion({}))["action"]
    assert said.startswith("b added up over each step, held until the next one")
    assert Conversion({}, change).mark != Conversion({}, replace(change, deltas=())).mark
    assert Conversion({}, Change(fps=15.0)).mark == "-asd7e57e99", "what an older version imported is known again"


def test_what_lerobots_rl_says_of_rewards_ends_and_interventions_is_kept(made):
    for number, episode in enumerate(episodes(made["replayed"])):
        assert episode.terminated
        assert episode.reward.tolist() == [0, 0, 0, 0, 0, number % 2 == 0]
        assert episode.intervened.tolist() == [False, True] * 3
    assert [episode.success for episode in made["replayed"]] == [True, False] * 6
    own = Dataset(made["replayed"].folder, Change({"complementary_info.discrete_penalty": "intervened"}))
    assert all(episode.intervened.all() for episode in episodes(own))


def test_a_dataset_of_lerobots_rl_trains_offline_to_online_as_it_is(tmp_path, made):
    with Programs(tmp_path) as programs:
        learner = programs.start(
            "learner", "task=fake", "plan=offline_to_online", "phase=offline", "batch_size=8",
            f"plan.sources.demo.dataset={made['replayed'].folder}", 'plan.phases.offline.until=["updates >= 3"]',
        )  # fmt: skip
        assert programs.status(learner, 300) == 0, programs.said()
    assert re.search(r"complementary_info.is_intervention +renamed to intervened, kept\n", programs.said())
    there = catalog(tmp_path / "run")
    assert [(e.steps, e.success, e.terminated, e.intervened, e.reward) for e in there] == [
        (6, 1, 1, 3, 1), (6, 0, 1, 3, 0)
    ] * 6  # fmt: skip


def as_so101(tmp_path):
    """A run of a robot with other names, smaller images and a higher rate."""
    names, axes = (*JOINTS.values(), "gripper.pos"), ("height", "width", "channel")
    image = Feature((128, 128, 3), "uint8", (*axes, "crop [0, 80, 480, 480]"))
    vector = Feature((3,), names=names[::-1], low=-1, high=101)
    seen = {STATE: Feature((3,), names=names[::-1]), CAMERA: image, WRIST: image}
    spec = Spec(seen, replace(vector, names=names), fps=30)
    Store.create(tmp_path / "run/store", spec, {"demo": 1000}).close()
    return spec


def test_the_words_that_a_refusal_names_make_the_dataset_usable(tmp_path, made, serving, caplog):
    spec, dataset, server = as_so101(tmp_path), made["so101"], serving()
    with pytest.raises(ConfigError, match=r"its rate is 15 fps, the run's 30; .* If it is, say .*; else take") as error:
        bring(server, dataset.folder)
    assert not catalog(tmp_path / "run")
    words = re.search(r"If it is, say (.*); else take", str(error.value))[1]
    words = ["learner=true", "plan=sft", "task=fake", "plan.sources.demo.capacity=1000", *shlex.split(words)]
    plan = plan_of(composed(CONFIG, [*words, f"plan.sources.demo.dataset={dataset.folder}"]))
    with caplog.at_level("INFO"):
        import_datasets(replace(plan, phases={}), server.run_dir, local=server.local, waits=False)
    assert [episode.steps for episode in catalog(tmp_path / "run")] == [12, 2, 8]
    kept = json.loads((tmp_path / "run/imported/demo.json").read_text())
    assert kept["robot_type"] == dataset.info["robot_type"] == "so101_follower"
    assert kept["info"] == dataset.info
    images = "cropped to [0, 80, 480, 480], resized from [480, 480] to [128, 128]"
    said = {
        STATE: "its entries are put in the run's order, its entries main_lift, main_pan are renamed",
        f"{IMAGES}up": f"renamed to {CAMERA}, {images}", SIDE: f"renamed to {WRIST}, {images}",
        "frame_index": "left out: a run numbers its steps anew", "intervened": "is not there: nobody intervened",
    }  # fmt: skip
    assert {name: kept["columns"][name] for name in said} == said
    assert all(re.search(f"  {re.escape(name)} +{re.escape(what)}\n", caplog.text) for name, what in said.items())
    assert "so101, resampled from 15 to 30 steps per second" in caplog.text
    change = plan.sources["demo"].change
    mine = episodes(Dataset(dataset.folder, change), spec)
    whole = [episode.column(STATE) for episode in dataset]
    for episode, state in zip(mine, whole, strict=True):
        assert np.array_equal(episode.observation[STATE], np.repeat(state, 2, axis=0)[:, ::-1])
    with pytest.raises(ConfigError, match="imported with another unit, calibration, rename, crop, size, fps or deltas"):
        bring(server, dataset.folder, change=replace(change, crop={}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            Change({"main_pam": "pan"}),
            "^rename, of .*so101: no column or entry is called 'main_pam'; did you mean 'main_pan'",
        ),
        (Change({f"{IMAGES}up": SIDE}), r"up, observation.images.side are all called observation.images.side"),
        (Change(size={"yp": (9, 9)}), r"^crop and size, of .*: no camera is called 'yp'; did you mean 'up'"),
        (
            Change(deltas=("lift",)),
            "^deltas, of .*so101: no entry of the action is called 'lift'; did you mean 'main_lift'",
        ),
        (Change(crop={"up": (0, 80, 481, 480)}), r"images.up: crop \[0, 80, 481, 480\] lies outside of an image of"),
    ],
)
def test_a_change_that_cannot_be_is_one_sentence(made, change, said):
    with pytest.raises(ConfigError, match=said):
        Dataset(made["so101"].folder, change)


def test_a_task_that_changes_begins_another_episode_without_an_outcome_of_its_own(made):
    dataset = made["tasks"]
    assert dataset.lengths == [3, 2, 3, 3, 3, 1]
    assert [episode.task for episode in dataset] == ["task 0", "task 1", "task 0", "task 0", "task 1", "task 2"]
    assert [episode.success for episode in dataset] == [None, True, False, None, None, True]
    assert str(dataset.episode(1).where).startswith("episode 0, rows 3 to 5, of ")


@pytest.mark.parametrize("times", [[0, 0.1, 0.1, 0.3], [0, 0.2, 0.1, 0.3], [0, 0.1, 1.3, 1.4], [0, 0.1, np.nan, 0.3]])
def test_rows_whose_times_go_wrong_are_not_resampled_and_say_why(times):
    (piece,) = pieces({"length": 4}, np.zeros(4), np.array(times), 10, 20)
    assert "its time stamps stand still, go back, or leap 10 periods" in piece.fault
    assert len(piece) == 4


@pytest.mark.parametrize("to", [4, 10, 25])
def test_a_gap_before_a_row_is_before_the_first_step_that_shows_it_or_a_later_one(to):
    (piece,) = pieces({"length": 9}, np.zeros(9), np.arange(9) / 10, 10 if to != 10 else 5, to)
    rows = pa.table({"gap": np.arange(9) == 4, "row": np.arange(9)})
    taken = piece.taken(rows)
    shown, gaps = taken["row"].to_numpy(), taken["gap"].to_numpy()
    assert gaps.tolist() == [at == np.flatnonzero(shown >= 4)[0] for at in range(len(shown))]


def test_depths_and_texts_are_left_out_with_the_reason(tmp_path, made):
    deep, name = shutil.copytree(made["odd"].folder, tmp_path / "deep"), f"{IMAGES}first"
    info = json.loads((deep / "meta/info.json").read_text())
    info["features"][name]["info"] = {"is_depth_map": True}
    (deep / "meta/info.json").write_text(json.dumps(info))
    dataset = Dataset(deep)
    assert dataset.cameras == [f"{IMAGES}front.rgb"]
    said = became(dataset, dataset.spec(), Conversion({}))
    assert said[name] == "left out: it holds depths"
    assert said["note"] == "left out: it holds neither numbers nor images (string)"
    assert said[f"{IMAGES}front.rgb"] == "kept"
    assert became(made["odd"], made["odd"].spec(), Conversion({}))[name] == "its channels come last"


def test_a_dataset_without_statistics_has_the_bounds_of_its_actions(tmp_path, low):
    bare = shutil.copytree(low.folder, tmp_path / "bare")
    (bare / "meta/stats.json").unlink()
    assert Dataset(bare).spec() == low.spec()


def hashes(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["so101", "image"])
def test_a_dataset_of_v21_is_converted_on_a_word_into_a_folder_beside_it(tmp_path, made, monkeypatch, name):
    old = as_of_last_year(made[name], tmp_path / "old")
    with monkeypatch.context() as full:
        full.setattr(subprocess, "run", Mock(side_effect=OSError("no room")))
        with pytest.raises(ConfigError, match=r"old-v3.0 cannot be written: no room. Make room there, or copy"):
            lerobot_api.converted(old)
    before = hashes(old)
    with pytest.raises(ConfigError, match=r"format v2.1, v3.0 is read here: a plan takes it by `convert: true`"):
        open_datasets(Plan({"demo": PlanSource(1000, dataset=str(old))}, {}, {}))
    plan = Plan({"demo": PlanSource(1000, dataset=str(old), convert=True)}, {}, {})
    for _ in range(2):
        found = open_datasets(plan)["demo"]
        assert found.folder == tmp_path / "old-v3.0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "old-v3.0"]
    assert hashes(old) == before
    for mine, theirs in zip(episodes(found), episodes(made[name]), strict=True):
        assert mine.task == theirs.task
        for column, array in mine.columns.items():
            if (files := sorted(old.glob(f"videos/*/{column}/*{mine.episode[1:]}.mp4"))) and column in found.cameras:
                with av.open(str(files[0])) as video:
                    decoded = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
                assert np.array_equal(array, np.stack(decoded)), column
            else:
                assert np.array_equal(array, theirs.columns[column]), column


@pytest.mark.usefixtures("quiet")
def test_a_conversion_is_of_the_dataset_that_is_there_and_made_by_each_learner_in_a_folder_of_its_own(
    tmp_path, made, monkeypatch
):
    old, other, run, apart = as_of_last_year(made["low"], tmp_path / "old"), tmp_path / "old-v3.0", subprocess.run, []

    def another_learner_is_first(command, **how):
        apart.append(command[-1])
        if len(apart) == 1:
            lerobot_api.converted(old)
        return run(command, **how)

    monkeypatch.setattr(subprocess, "run", another_learner_is_first)
    assert lerobot_api.converted(old) == other
    assert len({*apart}) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "old-v3.0"]
    kept = other / "meta" / lerobot_api.CONVERTED
    assert kept.read_text() == lerobot_api.fingerprint(old)
    kept.unlink()
    assert lerobot_api.converted(old) == other
    assert kept.exists(), "one that was made before this was noted is taken, and notes it"
    with open(old / "meta/episodes.jsonl", "a") as file:
        file.write("\n")
    with pytest.raises(
        ConfigError, match=r"old has changed since it was converted: remove .*old-v3.0, then run the same"
    ):
        lerobot_api.converted(old)
    shutil.rmtree(old)
    assert lerobot_api.converted(old) == other


def test_another_dataset_is_not_joined_with_one_that_was_in_its_place(tmp_path, serving, low, caplog, monkeypatch):
    """A run that was begun before that was noted goes on, and notes it. Episodes that are added come in."""
    place, server = shutil.copytree(low.folder, tmp_path / "low"), serving()
    bring(server, place)
    there, note = catalog(server.run_dir), server.run_dir / "imported/demo.json"
    kept, fewer = json.loads(note.read_text()), len(low.lengths) - 1
    (place / "meta/stats.json").unlink()
    unnoted = {name: value for name, value in kept.items() if name != "hash"}
    for before in (unnoted, kept | {"episodes": fewer, "hash": digest(low, fewer)}):
        note.write_text(json.dumps(before))
        bring(server, place)
        assert json.loads(note.read_text()) == kept
    note.write_text(json.dumps(kept | {"hash": "of another"}))
    bring(server, place)
    assert "has changed since source demo imported episodes of it: the run goes on with those" in caplog.text
    monkeypatch.setattr(_Import, "_missing", lambda brought: brought._hear() or ["an episode"])
    with pytest.raises(ConfigError, match=r"low has changed since source demo imported .* or use another run_dir"):
        bring(server, place)
    assert catalog(server.run_dir) == there


def test_a_robomimic_file_is_taken_as_it_is_or_refused():
    for words in ({"change": Change(fps=3)}, {"convert": True}):
        with pytest.raises(
            ConfigError, match="rename, crop, size, fps, deltas and convert are for datasets of LeRobot: leave"
        ):
            open_datasets(Plan({"demo": PlanSource(1000, dataset="low_dim.hdf5", **words)}, {}, {}))
