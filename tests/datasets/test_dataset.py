"""A LeRobot dataset that others made is a source of a run: whole, once, or refused in one sentence."""

import shutil

import numpy as np
import pytest
from serl_client.episode import Stamp, join
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec

from serl_launcher.datasets import footage
from serl_launcher.datasets.reader import Dataset
from serl_launcher.store.directives import DATASET
from tests.shared.common import STATE

from .lerobots import CAMERA

pytest.importorskip("lerobot", reason="the extra `data` is not installed: . examples/install.sh --extra data")
pytestmark = pytest.mark.slow  # lerobot's writer, in a process of its own


@pytest.fixture(params=["video", "image"])
def seen(request, made):
    return made[request.param]


def episodes(dataset, spec=None):
    spec, stamp = spec or dataset.spec(), Stamp(1, DATASET, 0)
    return [join(list(episode.segments(spec, f"e{i}", stamp))) for i, episode in enumerate(dataset)]


def test_the_rows_are_those_that_lerobot_reads(seen):
    """Both decode the same video, so they agree to the last bit or nearly: colours are converted by two programs."""
    file = seen.folder.with_suffix(".npz")
    if not file.exists():
        pytest.skip("lerobot decodes no video here: its torchcodec needs ffmpeg's libraries (apt-get install ffmpeg)")
    theirs, mine = np.load(file), episodes(seen)
    assert np.array_equal(theirs[STATE], np.concatenate([e.observation[STATE] for e in mine]))
    assert np.array_equal(theirs["action"], np.concatenate([e.action for e in mine]))
    assert np.allclose(theirs["timestamp"], np.concatenate([e.time for e in mine]))
    images = np.concatenate([e.observation[CAMERA] for e in mine])
    assert images.dtype == np.uint8
    assert images.shape == (31, 64, 64, 3)
    assert np.abs(theirs[CAMERA].transpose(0, 2, 3, 1) * 255 - images).max() <= 2


def test_what_a_dataset_does_not_say_is_not_made_up(low):
    whole = episodes(low)
    assert [len(episode) for episode in whole] == low.lengths == [12, 1, 30, 7]
    for episode in whole:
        assert not episode.ends
        assert len(episode.observation[STATE]) == len(episode)
        assert not episode.reward.any()
        assert not episode.intervened.any()
    assert [episode.success for episode in low] == [None] * 4
    assert [episode.task for episode in low] == ["task 0", "task 1", "task 0", "task 1"]


def test_a_video_that_ffmpeg_cannot_decode_is_refused_in_one_sentence(made, tmp_path):
    folder = shutil.copytree(made["video"].folder, tmp_path / "strange")
    for path in folder.rglob("*.mp4"):
        path.write_bytes(path.read_bytes().replace(b"av01", b"zz99"))
    episode = Dataset(folder).episode(0)
    for read in (lambda: list(episode.images(CAMERA)), lambda: footage.kinds(episode)):
        with pytest.raises(ConfigError, match=r"cannot be read.*no decoder of its codec"):
            read()


def test_an_end_that_a_dataset_names_is_kept(flagged):
    whole = episodes(flagged)
    assert [episode.terminated for episode in whole] == [True, True]
    assert [episode.success for episode in flagged] == [True, False]
    for episode in whole:
        assert episode.reward[-1] == episode.reward.sum() == 1
        final = episode.observation[STATE][-1]
        assert np.array_equal(final, episode.observation[STATE][-2])


def test_the_spec_is_the_datasets_with_bounds_around_its_actions(low, seen):
    spec = seen.spec()
    assert (spec.fps, spec.observation[CAMERA].shape, spec.observation[CAMERA].dtype) == (10, (64, 64, 3), "uint8")
    action = np.concatenate([episode.column("action") for episode in low])
    low_bound, high = low.spec().action.low, low.spec().action.high
    assert (low_bound < action.min(0)).all()
    assert (high > action.max(0)).all()
    assert (high - low_bound <= 1.2 * np.ptp(action, 0)).all()


@pytest.mark.parametrize(
    ("name", "observation", "fps", "said"),
    [
        ("low", {STATE: Feature((4,))}, 20, "its rate is 10 fps, the run's 20"),
        ("low", {STATE: Feature((5,))}, 10, "its observation.state is [4]"),
        ("low", {STATE: Feature((4,)), CAMERA: Feature((8, 8, 3), "uint8")}, 10, "it has no observation.images.front"),
        ("named", {STATE: Feature((4,), names=tuple("acbe"))}, 10, "holds a, b, c, d, the run's a, c, b, e"),
    ],
)
def test_what_differs_from_the_run_is_named(made, name, observation, fps, said):
    assert said in made[name].misfit(Spec(observation, Feature((2,), low=-1, high=1), fps=fps))
    assert made[name].misfit(made[name].spec()) == ""


def test_a_folder_without_a_whole_dataset_is_refused(tmp_path, low):
    with pytest.raises(ConfigError, match="holds no LeRobot dataset"):
        Dataset(tmp_path)
    half = shutil.copytree(low.folder, tmp_path / "half")
    shutil.rmtree(half / "meta/episodes")
    with pytest.raises(ConfigError, match="never finished"):
        Dataset(half)
    old = shutil.copytree(low.folder, tmp_path / "old")
    info = old / "meta/info.json"
    info.write_text(info.read_text().replace('"v3.0"', '"v2.1"'))
    with pytest.raises(ConfigError, match=r"format v2\.1, v3\.0 is read here"):
        Dataset(old)
    info.write_text('{"codebase_version": "v3.0"}')
    with pytest.raises(ConfigError, match=r"info.json is not LeRobot's .*fps"):
        Dataset(old)
    cut = shutil.copytree(low.folder, tmp_path / "cut")
    (cut / "data/chunk-000/file-000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot be read"):
        Dataset(cut).episode(0)
