"""What people look at is whole: rerun accepts every recording, every row is in it, and the live one stays at home."""

import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from serl_client import Feature, Spec
from serl_client.errors import ConfigError

from serl_launcher.datasets import recording
from tests.shared.common import PATIENCE, free_port, until

HIGH, WRIST = "observation.images.cam_high", "observation.images.cam_wrist"
INFO = {"id": "actor-1-7", "success": True, "discard": False, "phase": "practise", "weights": 5, "intervened": 3}


@pytest.fixture
def spec():
    images = {HIGH: Feature((32, 48, 3), "uint8"), WRIST: Feature((24, 24, 1), "uint8")}
    return Spec(
        {"observation.state": Feature((3,), names=("x", "y", "z")), **images},
        Feature((2,), low=-1, high=1, names=("left", "right")),
        fps=10.0, extras={"camera_age": Feature(()), "grid": Feature((2, 2))},
    )  # fmt: skip


def episode(spec, steps=12, final=True, seed=0):
    """Steps 4..6 are the human's."""
    generator = np.random.default_rng(seed)
    return {
        **{name: generator.integers(0, 255, (steps + final, *feature.shape)).astype(feature.dtype)
           for name, feature in spec.observation.items()},
        **{name: np.zeros((steps, *feature.shape), feature.dtype) for name, feature in spec.extras.items()},
        "action": generator.uniform(-1, 1, (steps, 2)).astype(np.float32),
        "reward": np.zeros(steps, np.float32),
        "intervened": np.isin(np.arange(steps), (4, 5, 6)),
        "chunk_start": np.arange(steps) % 4 == 0,
        "time": 1e5 + 0.1 * np.arange(steps),
    }  # fmt: skip


def rerun(tmp_path, *arguments):
    """(exit code, what rerun's program said): by way of a file, since it has hung on a pipe."""
    with open(tmp_path / "said", "w") as said:
        done = subprocess.run([recording._program(), *map(str, arguments)], stdin=subprocess.DEVNULL,
                              stdout=said, stderr=said, timeout=PATIENCE)  # fmt: skip
    return done.returncode, (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("final", [True, False])
def test_rerun_accepts_a_recording_and_finds_every_column_and_row_in_it(tmp_path, spec, final):
    rr = pytest.importorskip("rerun", reason="rerun-sdk is not installed (extra data)")
    path, rows = tmp_path / "recordings/7.rrd", episode(spec, steps=150, final=final)
    recording.record_episode(path, rows, INFO, spec)
    assert [file.name for file in path.parent.iterdir()] == ["7.rrd"]
    code, said = rerun(tmp_path, "rrd", "verify", path)
    assert (code, "verified without error" in said) == (0, True), said
    code, said = rerun(tmp_path, "rrd", "print", "-vv", path)
    assert code == 0
    columns = (
        "observation.state", HIGH, WRIST, "action", "reward", "intervened", "chunk_start", "camera_age", "mode",
        "outcome", "frame_index", "time", "EncodedImage:blob", "Scalars:scalars", "/viewport",
    )  # fmt: skip
    assert not [name for name in columns if name not in said]
    assert "/grid" not in said
    table = rr.dataframe.load_recording(path).view(index="frame_index", contents="/**").select().read_all()
    assert table["frame_index"].to_pylist() == list(range(150 + final))
    actions = [action for action in table["/action:Scalars:scalars"].to_pylist() if action is not None]
    np.testing.assert_allclose(actions, rows["action"], rtol=1e-6)
    assert sum(image is not None for image in table[f"/{HIGH}:EncodedImage:blob"].to_pylist()) == 150 + final
    assert [text for text in table["/mode:TextLog:text"].to_pylist() if text] == [["POLICY"], ["HUMAN"], ["POLICY"]]


@pytest.mark.slow
def test_a_thousand_recordings_need_no_thousand_threads(tmp_path, spec):
    pytest.importorskip("rerun", reason="rerun-sdk is not installed (extra data)")
    rows = episode(spec, steps=3)
    with recording.LiveViewer(spec, free_port()) as live:
        counted = []
        for number in range(20):
            recording.record_episode(tmp_path / "same.rrd", rows, {**INFO, "id": f"file-{number}"}, spec)
            assert live.show(rows, {**INFO, "id": f"live-{number}"})
            counted.append(len(os.listdir("/proc/self/task")))
        assert max(counted[10:]) <= max(counted[:10]) + 3  # a thread for each file would be ten more


def listening(port):
    """The addresses at which somebody listens on this port, in the kernel's hexadecimal words."""
    tables = (Path(f"/proc/net/{kind}").read_text().splitlines()[1:] for kind in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port}


def test_the_live_viewer_serves_on_loopback_alone_what_it_is_shown(tmp_path, spec):
    pytest.importorskip("rerun", reason="rerun-sdk is not installed (extra data)")
    rows, seen = episode(spec), tmp_path / "seen.rrd"
    with recording.LiveViewer(spec, free_port()) as live:
        port = int(live.url.split(":")[-1].split("/")[0])
        assert listening(port) == {"0100007F"}
        with pytest.raises(ConfigError, match=f"port {port} of the live viewer is taken"):
            recording.LiveViewer(spec, port)
        assert live.show({name: array[:6] for name, array in rows.items()}, INFO)
        assert live.show({name: array[6:] for name, array in rows.items()}, {**INFO, "start": 6})
        assert live.show(episode(spec, seed=1), {**INFO, "id": "actor-1-8"})
        viewer = subprocess.Popen(
            [recording._program(), live.url, "--bind", "127.0.0.1", "--port", str(free_port()), "--save", str(seen)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(lambda: seen.exists() and seen.stat().st_size > 50_000)
    assert viewer.wait(PATIENCE) == 0  # it ends with the server
    assert rerun(tmp_path, "rrd", "verify", seen)[0] == 0
    code, said = rerun(tmp_path, "rrd", "print", seen)
    assert code == 0
    assert not [word for word in ("actor-1-7", "actor-1-8", "/viewport") if word not in said]


@pytest.mark.parametrize(
    ("stopped_by", "flushes", "said"),
    [("SIGKILL", True, "has ended"), ("SIGSTOP", True, "takes nothing"), ("SIGSTOP", False, "takes nothing")],
)
def test_a_live_viewer_that_died_or_hangs_is_a_word_and_no_error(stopped_by, flushes, said, spec, caplog, monkeypatch):
    rerun = pytest.importorskip("rerun", reason="rerun-sdk is not installed (extra data)")
    monkeypatch.setattr(recording, "FLUSH_S", 0.5)
    if not flushes:  # what is on its way to a server that hangs counts as flushed at times
        monkeypatch.setattr(rerun.RecordingStream, "flush", lambda *_, **__: None)
    with recording.LiveViewer(spec, free_port()) as live:
        live._server.send_signal(getattr(signal, stopped_by))
        if stopped_by == "SIGKILL":
            live._server.wait()
        assert not live.show(episode(spec), INFO)
        assert live._server.poll() is not None
    assert said in caplog.text


def decoded(path):
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        return float(stream.average_rate), [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]


def near(pixels, colour):
    return np.abs(pixels.astype(int).reshape(-1, 3).mean(0) - colour).max() < 30


@pytest.mark.parametrize("success", [True, False, None])
def test_a_video_has_every_row_and_says_who_moved_and_how_it_ended(tmp_path, spec, success):
    pytest.importorskip("av", reason="av is not installed (extra data)")
    rows = episode(spec, steps=30)
    for name in recording.cameras(spec):
        rows[name][:] = 90
    path = tmp_path / "videos/7.mp4"
    assert recording.record_video(path, rows, {**INFO, "success": success}, spec)
    fps, images = decoded(path)
    assert (fps, len(images), [file.name for file in path.parent.iterdir()]) == (10.0, 31, ["7.mp4"])
    assert images[0].shape == (32 + 2 * recording.STRIP, 48 + 24, 3)
    bars = [(image[: recording.STRIP - 2], image[-recording.STRIP + 2 :]) for image in images]
    human = [number for number, (above, _) in enumerate(bars) if near(above[:, :6], recording.HUMAN)]
    policy = [number for number, (above, _) in enumerate(bars) if near(above, recording.POLICY)]
    assert human == [4, 5, 6]
    assert sorted(human + policy) == list(range(31))
    told = [number for number, (_, below) in enumerate(bars) if near(below, recording.OUTCOMES[success])]
    assert told == list(range(26, 31))
    assert near(images[3][12:36, 4:44], (90, 90, 90))


def test_a_video_takes_one_frame_at_a_time_and_any_size(tmp_path):
    pytest.importorskip("av", reason="av is not installed (extra data)")
    seen = []

    class Frame(np.ndarray): ...

    def many():
        for number in range(200):
            frame = np.full((33, 47, 3), number, np.uint8).view(Frame)
            seen.append(weakref.ref(frame))
            yield frame
            assert sum(reference() is not None for reference in seen) <= 3

    recording.write_mp4(tmp_path / "odd.mp4", many(), fps=29.97)
    fps, images = decoded(tmp_path / "odd.mp4")
    assert (len(images), images[0].shape) == (200, (34, 48, 3))
    assert fps == pytest.approx(29.97, abs=1e-3)
    with pytest.raises(ValueError, match="at least one frame"):
        recording.write_mp4(tmp_path / "none.mp4", iter(()), fps=10.0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["odd.mp4"]


def test_an_episode_without_cameras_has_a_recording_and_no_video(tmp_path):
    pytest.importorskip("rerun", reason="rerun-sdk is not installed (extra data)")
    blind = Spec({"observation.state": Feature((3,))}, Feature((2,), low=-1, high=1), fps=10.0)
    assert not recording.record_video(tmp_path / "7.mp4", episode(blind), INFO, blind)
    recording.record_episode(tmp_path / "7.rrd", episode(blind), INFO, blind)
    assert rerun(tmp_path, "rrd", "verify", tmp_path / "7.rrd")[0] == 0


def told(number, source="eval", discard=False):
    info = dict.fromkeys(recording.TOLD, 0) | {"id": f"episode-{number}", "number": number, "success": True}
    return SimpleNamespace(**info | {"source": source, "discard": discard})


@pytest.mark.parametrize(("episodes", "kept"), [("eval", ["3"]), ("all", ["2", "3"]), ("none", [])])
def test_the_sink_of_the_export_records_each_episode_once_and_shows_every_one(
    tmp_path, spec, episodes, kept, monkeypatch
):
    pytest.importorskip("rerun", reason="rerun-sdk is not installed (extra data)")
    pytest.importorskip("av", reason="av is not installed (extra data)")
    read, shown = [], []
    viewer = SimpleNamespace(show=lambda rows, info: shown.append(info["id"]) or True)
    monkeypatch.setattr(recording, "LiveViewer", lambda spec, port: viewer)
    for live in (None, 9876):  # the second is a restart
        sink = recording.Recordings(tmp_path, spec, episodes=episodes, live=live)
        for info in (told(2, "online"), told(3), told(4, discard=True)):
            sink(info, lambda number=info.number: read.append(str(number)) or episode(spec), spec)
    assert (read, shown) == ([*kept, "2", "3"], ["episode-2", "episode-3"])
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert files == {
        f"{kind}/{int(n):06d}.{end}" for n in kept for kind, end in (("recordings", "rrd"), ("videos", "mp4"))
    }


def test_without_rerun_and_av_a_run_goes_on_with_one_sentence_for_each(tmp_path, spec, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "rerun", None)
    monkeypatch.setitem(sys.modules, "av", None)
    sink = recording.Recordings(tmp_path, spec)
    sink(told(3), lambda: episode(spec), spec)
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["rerun is not installed", "av is not installed"]
    for ask, text in (
        (lambda: recording.record_episode(tmp_path / "7.rrd", episode(spec), INFO, spec), "rerun is not installed"),
        (lambda: recording.LiveViewer(spec, free_port()), "rerun is not installed"),
        (lambda: recording.Recordings(tmp_path, spec, live=free_port()), "rerun is not installed"),
        (lambda: recording.record_video(tmp_path / "7.mp4", episode(spec), INFO, spec), "av is not installed"),
    ):
        with pytest.raises(ConfigError, match=f"^{text}: install it with .*--extra data`$"):
            ask()
    with pytest.raises(ConfigError, match="record=some: say eval, all, none"):
        recording.Recordings(tmp_path, spec, episodes="some")
    assert not list(tmp_path.iterdir())
