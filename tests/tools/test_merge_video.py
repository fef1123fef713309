"""A time-lapse shows every episode by name, its end included, and never holds more than a frame of each."""

import os
import sys
import weakref

import numpy as np
import pytest

from serl_launcher.datasets import recording
from tests.shared.tools import called, typed
from tools import merge_video


@pytest.fixture(autouse=True)
def av():
    return pytest.importorskip("av", reason="av is not installed (extra data)")


def video(path, frames, brightness=0):
    """Each frame is its number, and the last one white."""
    images = (np.full((32, 48, 3), brightness + number if number < frames - 1 else 255, np.uint8)
              for number in range(frames))  # fmt: skip
    recording.write_mp4(path, images, fps=10.0)


def read(av, path):
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_episodes_follow_each_other_by_name_with_every_nth_frame_and_the_last(tmp_path, av):
    video(tmp_path / "000002.mp4", 17, brightness=100)
    video(tmp_path / "000001.mp4", 20)
    out = tmp_path / "merged.mp4"
    for _ in range(2):  # its own output is no input
        assert called("merge_video", tmp_path, "--speed", 8, "--out", out) == (0, f"{out}: 2 episodes\n")
    shown = [round(float(image.mean())) for image in read(av, out)]
    assert shown == pytest.approx([0, 8, 16, 255, 100, 108, 255], abs=4)


def test_a_grid_shows_several_at_once_and_those_that_ended_stand_still(tmp_path, av):
    for number, frames in enumerate((4, 8, 4, 2, 2)):
        video(tmp_path / f"{number}.mp4", frames, brightness=50)
    status, said = called("merge_video", tmp_path, "--speed", 1, "--grid", "2x2", "--out", tmp_path / "grid.mp4")
    assert status == 0, said
    images = read(av, tmp_path / "grid.mp4")
    assert (len(images), images[0].shape) == (8 + 2, (64, 96, 3))
    quarters = [[image[y : y + 32, x : x + 48].mean() for y in (0, 32) for x in (0, 48)] for image in images]
    assert quarters[5] == pytest.approx([255, 55, 255, 255], abs=6)
    assert quarters[8] == pytest.approx([50, 0, 0, 0], abs=6)


def test_memory_does_not_grow_with_the_number_of_episodes(tmp_path, monkeypatch):
    for number in range(12):
        video(tmp_path / f"{number:02}.mp4", 30)
    alive, most, opened = [], [], []

    def watched(path, frames, fps):
        for frame in frames:
            alive.append(weakref.ref(frame))
            most.append(sum(reference() is not None for reference in alive))
            opened.append(sum(os.readlink(file).startswith(str(tmp_path)) for file in os.scandir("/proc/self/fd")))

    monkeypatch.setattr(merge_video, "write_mp4", watched)
    merge_video.merge([tmp_path], tmp_path / "out.mp4", speed=4, grid=(1, 2))
    assert len(most) == 6 * 9
    assert max(most) <= 2
    assert max(opened) == 2


def test_what_cannot_be_merged_is_said_in_one_sentence(tmp_path, monkeypatch):
    words = "merge_video", tmp_path, "--out", tmp_path / "out.mp4"
    assert called(*words) == (1, f"error: no .mp4 in {tmp_path}: evaluated episodes are in a run's folder videos\n")
    (tmp_path / "torn.mp4").write_bytes(b"\0" * 1000)
    status, said = typed(*words)
    assert (status, said.count("\n")) == (1, 1)
    assert "torn.mp4 is not a video that can be read" in said
    video(tmp_path / "torn.mp4", 3)
    (tmp_path / "torn.mp4").write_bytes((tmp_path / "torn.mp4").read_bytes().replace(b"avc1", b"zz99"))
    assert "no decoder of its codec" in called(*words)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["torn.mp4"]
    monkeypatch.setitem(sys.modules, "av", None)
    assert "av is not installed" in called(*words)[1]
