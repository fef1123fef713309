"""Records episodes for people to look at: rerun recordings, a live viewer, and mp4 videos.

`Recordings` is a sink of the export process; it calls the rest of this file.
"""

import contextlib
import functools
import importlib.util
import io
import logging
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.closing import Closing
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature, Spec

from serl_launcher.datasets.names import is_image
from serl_launcher.store.files import replaced
from serl_launcher.supervisor import killed_with_parent

APPLICATION = "retake"
FLAGS = ("reward", "intervened", "chunk_start")
JPEG_QUALITY = 85
EPISODES = ("eval", "all", "none")
TOLD = (
    "id", "number", "source", "task", "phase", "weights", "steps", "reward", "intervened", "success",
    "discard", "judged_by",
)  # fmt: skip
SENT = 64  # images that are sent to rerun at once
LOOPBACK = "127.0.0.1"
MEMORY = "512MB"  # that the live viewer's server keeps, for viewers that connect late
START_S = 10.0  # seconds for the live viewer's server to start
FLUSH_S = 5.0  # seconds; a viewer that takes nothing must not delay the export

STRIP = 8  # pixels of the bars above and below the picture
END_S = 0.5  # seconds before the end in which the lower bar shows the outcome
POLICY, HUMAN = (0, 160, 60), (255, 140, 0)
HATCH = 8  # pixels: HUMAN is also hatched, for eyes that do not tell green from orange
OUTCOMES = {True: (0, 200, 0), False: (220, 0, 0), None: (120, 120, 120)}

log = logging.getLogger(__name__)


def cameras(spec: Spec) -> list[str]:
    """Return the names of the observations that are images: uint8 [H, W, 1 or 3]."""
    return [name for name, f in sorted(spec.observation.items()) if is_image(f) and f.shape[2] in (1, 3)]


class Recordings:
    """Writes `recordings/<number>.rrd` and, if there are cameras, `videos/<number>.mp4` of each closed episode.

    episodes: "eval" (those of evaluations), "all" or "none". Discarded episodes are left out; existing files stay.
    live: port of a live viewer, which shows every episode; None: no viewer. If rerun-sdk or av is missing, it logs so
    and makes only the other kind of file. Raises ConfigError if the live viewer cannot start.
    """

    def __init__(self, run_dir: Path, spec: Spec, *, episodes: str = "eval", live: int | None = None) -> None:
        if episodes not in EPISODES:
            raise ConfigError(f"record={episodes}: say {', '.join(EPISODES)}")
        self._folder, self._episodes = run_dir, episodes
        self._makers: list[tuple[str, Callable[..., Any], Callable[[], Any]]]
        self._makers = [("recordings/{:06d}.rrd", record_episode, _rerun)]
        if cameras(spec):
            self._makers.append(("videos/{:06d}.mp4", record_video, _av))
        if episodes != "none":
            self._makers = [maker for maker in self._makers if _works(maker[2])]
        self._live = None if live is None else LiveViewer(spec, live)

    def __call__(self, info: Any, rows: Callable[[], Mapping[str, Array]], spec: Spec) -> None:
        """Record an episode. info: its EpisodeInfo. rows: reads it from the store."""
        if info.discard:
            return
        told = {name: getattr(info, name) for name in TOLD}
        paths = {}
        if self._episodes == "all" or (self._episodes == "eval" and info.source == "eval"):
            named = {self._folder / name.format(info.number): make for name, make, _ in self._makers}
            paths = {path: make for path, make in named.items() if not path.exists()}
        if paths or self._live:
            found = rows()
            for path, make in paths.items():
                make(path, found, told, spec)
            if self._live and not self._live.show(found, told):
                self._live = None


def _works(load: Callable[[], Any]) -> bool:
    try:
        load()
    except ConfigError as error:
        log.warning("%s", error)
        return False
    return True


# -- rerun
def record_episode(path: Path, rows: Mapping[str, Array], info: Mapping[str, Any], spec: Spec) -> None:
    """Write one whole episode as a rerun recording (.rrd), aside and renamed.

    rows: {name: [T, ...]} of the Spec's observations (T + 1 rows where there is a final one), action, reward,
    intervened, chunk_start, time and extras. info: id, and what else to show beside it (success, discard, phase,
    weights, intervened). Timelines: `frame_index`, and `time` in seconds since the first row. Entities have the names
    of the columns; `mode` says POLICY or HUMAN where it changes, `outcome` holds the info. Features that are neither
    images nor vectors are left out. Raises ConfigError without rerun-sdk.
    """
    rr = _rerun()
    layout = _layout(tuple(cameras(spec)), tuple(_plots(spec)))
    stream = rr.RecordingStream(APPLICATION, recording_id=info["id"])
    data = stream.binary_stream()
    try:
        _send(stream, rows, info, spec, begin=float(rows["time"][0]))
        content = layout + data.read()  # a file may hold several recordings, one behind the other
    finally:
        _release(stream)
    with replaced(path) as aside:
        aside.write_bytes(content)


class LiveViewer(Closing):
    """Serves episodes to rerun viewers, on loopback only: `rerun rerun+http://127.0.0.1:<port>/proxy`.

    The server is rerun's own program as a child process, because the one inside the SDK (`serve_grpc`, 0.26) listens
    on every address of the machine. It dies with the thread that made this, and keeps the newest MEMORY of data.
    Raises ConfigError without rerun-sdk, and if the port is taken.
    """

    def __init__(self, spec: Spec, port: int = 9876) -> None:
        self.spec, self.url = spec, f"rerun+http://{LOOPBACK}:{port}/proxy"
        self._rr = _rerun()
        self._episode, self._begin = "", 0.0
        if _listens(port):
            raise ConfigError(f"port {port} of the live viewer is taken: set live to another one")
        self._server = subprocess.Popen(
            [_program(), "--serve-grpc", "--bind", LOOPBACK, "--port", str(port), "--server-memory-limit", MEMORY],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=killed_with_parent,
        )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not _listens(port):
            if self._server.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise ConfigError(f"rerun does not serve: run `rerun --serve-grpc --port {port}` to see why")
            time.sleep(0.05)

    def show(self, rows: Mapping[str, Array], info: Mapping[str, Any]) -> bool:
        """Show an episode, or its rows from `info["start"]` on if it comes in pieces; see `record_episode`.

        Returns False, and logs why, if the server has ended or takes nothing.
        """
        if self._server.poll() is not None:
            log.warning("live viewer: its server has ended, so it shows nothing more; recordings go on")
            return False
        layout = None if self._episode else _blueprint(tuple(cameras(self.spec)), tuple(_plots(self.spec)))
        if info["id"] != self._episode:
            self._episode, self._begin = info["id"], float(rows["time"][0])
        stream = self._rr.RecordingStream(APPLICATION, recording_id=info["id"])
        stream.connect_grpc(self.url, default_blueprint=layout)
        _send(stream, rows, info, self.spec, begin=self._begin)
        try:
            stream.flush(timeout_sec=FLUSH_S)
        except (RuntimeError, ValueError) as error:
            self._give_up(str(error))
        ends = threading.Thread(target=_release, args=(stream,), daemon=True)
        ends.start()
        ends.join(FLUSH_S)
        if ends.is_alive():  # rerun waits without end for a server that hangs
            self._give_up("it does not end an episode")
            ends.join(FLUSH_S)
        return self._server.poll() is None

    def _give_up(self, reason: str) -> None:
        log.warning("live viewer: it takes nothing (%s), so its server is ended; recordings go on", reason)
        self.close()  # else its queue would grow

    def close(self) -> None:
        """End the server. Viewers keep what they have."""
        self._server.kill()
        self._server.wait()


def _send(stream: Any, rows: Mapping[str, Array], info: Mapping[str, Any], spec: Spec, begin: float) -> None:
    import rerun as rr

    length, start = len(rows["action"]), int(info.get("start", 0))
    times = np.r_[rows["time"], rows["time"][-1] + 1.0 / spec.fps] - begin  # of T + 1 rows: the final one has none

    def indexes(span: range) -> list[Any]:
        return [
            rr.TimeColumn("frame_index", sequence=np.arange(span.start, span.stop) + start),
            rr.TimeColumn("time", duration=times[span.start : span.stop]),
        ]

    def plot(name: str, values: Array, labels: tuple[str, ...]) -> None:
        stream.log(name, rr.SeriesLines(names=labels or [name]), static=True, strict=True)
        table = np.asarray(values, np.float64).reshape(len(values), -1)
        stream.send_columns(name, indexes(range(len(values))), rr.Scalars.columns(scalars=table), strict=True)

    title = {True: "success", False: "failure", None: "not judged"}[info.get("success")]
    stream.send_recording_name(f"{info['id']} {title}")
    lines = [f"- **{name}**: {value}" for name, value in info.items()]
    document = rr.TextDocument("\n".join([f"# {title}", *lines]), media_type="text/markdown")
    stream.log("outcome", document, static=True, strict=True)
    for name, feature in _plots(spec).items():
        plot(name, rows[name], _labels(feature))
    for name in cameras(spec):
        for first in range(0, len(rows[name]), SENT):
            span = range(first, min(first + SENT, len(rows[name])))
            pictures = [_jpeg(rows[name][index]) for index in span]
            columns = rr.EncodedImage.columns(blob=pictures, media_type=["image/jpeg"] * len(span))
            stream.send_columns(name, indexes(span), columns, strict=True)
    human = np.asarray(rows["intervened"], bool)
    for index in np.flatnonzero(np.r_[True, human[1:] != human[:-1]]) if length else ():
        said = rr.TextLog.columns(text=["HUMAN" if human[index] else "POLICY"])
        stream.send_columns("mode", indexes(range(int(index), int(index) + 1)), said, strict=True)


def _plots(spec: Spec) -> dict[str, Feature]:
    features = {**spec.observation, "action": spec.action, **spec.extras}
    vectors = {name: feature for name, feature in features.items() if len(feature.shape) <= 1}
    return vectors | {name: Feature(()) for name in FLAGS}


def _labels(feature: Feature) -> tuple[str, ...]:
    if feature.names or not feature.shape:
        return feature.names
    return tuple(str(index) for index in range(feature.shape[0]))


def _blueprint(pictures: tuple[str, ...], plots: tuple[str, ...]) -> Any:
    """Lay out the viewer: cameras and outcome left; one plot per vector, and one of the flags, right."""
    import rerun.blueprint as rrb

    views = [rrb.Spatial2DView(origin=name, name=name) for name in pictures]
    told = rrb.Horizontal(rrb.TextDocumentView(origin="outcome", name="outcome"), rrb.TextLogView(origin="mode"))
    lines = [rrb.TimeSeriesView(origin=name, name=name) for name in plots if name not in FLAGS]
    lines.append(rrb.TimeSeriesView(origin="/", contents=[f"/{name}" for name in FLAGS], name=", ".join(FLAGS)))
    left = rrb.Vertical(rrb.Grid(*views), told, row_shares=[3, 1]) if views else told
    return rrb.Blueprint(rrb.Horizontal(left, rrb.Vertical(*lines)), collapse_panels=True)


@functools.cache
def _layout(pictures: tuple[str, ...], plots: tuple[str, ...]) -> bytes:
    """Return the blueprint as a file's content. Made once, because rerun (0.26) keeps two threads for each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layout.rbl")
        _blueprint(pictures, plots).save(APPLICATION, str(path))
        return path.read_bytes()


def _release(stream: Any) -> None:
    """End a stream's threads, because rerun keeps them as long as the process."""
    import rerun_bindings

    stream.disconnect()
    del stream
    rerun_bindings.flush_and_cleanup_orphaned_recordings()


def _jpeg(image: Array) -> bytes:
    from PIL import Image  # rerun-sdk brings it

    encoded = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(encoded, "JPEG", quality=JPEG_QUALITY)
    return encoded.getvalue()


def _rerun() -> Any:
    try:
        import rerun
    except ImportError:
        raise ConfigError("rerun is not installed: install it with `. examples/install.sh --extra data`") from None
    return rerun


def _program() -> str:
    """Return the path of rerun's own program. Killing the Python script around it would leave it running."""
    found = importlib.util.find_spec("rerun_cli")
    if found is None or found.origin is None:
        raise ConfigError("rerun's program is not installed: install it with `. examples/install.sh --extra data`")
    return str(Path(found.origin).with_name("rerun"))


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
        return True
    return False


# -- mp4
def record_video(path: Path, rows: Mapping[str, Array], info: Mapping[str, Any], spec: Spec) -> bool:
    """Write an episode as an mp4, cameras side by side. Returns False without cameras. ConfigError: av is missing."""
    names = cameras(spec)
    if names:
        write_mp4(path, frames(rows, info.get("success"), names, spec.fps), spec.fps)
    return bool(names)


def frames(rows: Mapping[str, Array], success: bool | None, names: list[str], fps: float) -> Iterator[Array]:
    """Yield a frame [H, W, 3] uint8 of each row.

    The bar above is green for POLICY and hatched orange for HUMAN. The bar below shows the outcome in the last END_S
    seconds: green success, red failure, grey not judged.
    """
    human = np.asarray(rows["intervened"], bool)
    count = min(len(rows[name]) for name in names)
    end = count - max(1, round(END_S * fps))
    for index in range(count):
        picture = _beside([rows[name][index] for name in names])
        above, below = np.zeros((2, STRIP, picture.shape[1], 3), np.uint8)
        intervened = human[min(index, len(human) - 1)]
        above[:] = HUMAN if intervened else POLICY
        if intervened:
            above[:, np.arange(above.shape[1]) // HATCH % 2 == 1] = 0
        if index >= end:
            below[:] = OUTCOMES[success]
        yield np.concatenate([above, picture, below])


def write_mp4(path: Path, frames: Iterable[Array], fps: float) -> None:
    """Encode frames [H, W, 3] uint8 of one size, one at a time: H.264, yuv420p, written aside and renamed.

    fps: frames per second. An odd size is padded with a black line. Raises ConfigError without av, and ValueError
    without any frame.
    """
    av = _av()
    written = 0
    with replaced(path) as aside, av.open(str(aside), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.pix_fmt, stream.options = "yuv420p", {"preset": "veryfast", "crf": "23"}
        stream.thread_count = 1  # the trainer needs the cores
        for frame in frames:
            even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)))
            stream.height, stream.width = even.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
            written += 1
        if not written:
            raise ValueError(f"{path.name}: a video needs at least one frame")
        container.mux(stream.encode())


def _beside(images: list[Array]) -> Array:
    height = max(image.shape[0] for image in images)
    colour = [np.broadcast_to(image, (*image.shape[:2], 3)) for image in images]
    return np.concatenate([np.pad(i, ((0, height - i.shape[0]), (0, 0), (0, 0))) for i in colour], axis=1)


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise ConfigError("av is not installed: install it with `. examples/install.sh --extra data`") from None
    return av
