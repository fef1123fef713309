"""Writes closed episodes as LeRobot v3.0 datasets ("shards": tables, video codec), and reads them back.

A shard holds a few episodes of one source. It is written aside, read back, compared with the store, synced and renamed,
so it is whole or not there. It is never changed: a later outcome makes a new version, which replaces it at once. Its
`retake.json` holds what LeRobot has no place for. Its columns are in names.py.
"""

import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature, Spec

from serl_launcher.datasets import footage, lerobot_api
from serl_launcher.datasets.episodes import Mismatch, Rows, end
from serl_launcher.datasets.names import COLUMNS, DONE, MANIFEST, OUTCOME, PHASE, STORED, SUCCESS, cameras, column
from serl_launcher.datasets.priority import ordinary_priority
from serl_launcher.datasets.reader import Dataset, Episode
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.files import sync_folder

log = logging.getLogger(__name__)

NEEDED = ("lerobot", "av", "torchcodec")
FORMAT = 4
PART = ".part"  # suffix of a folder that is being written, or that a dead writer left
OLD = ".old.part"  # suffix of the version before, where the file system cannot exchange two folders
CODECS = ("libsvtav1", "h264")  # in order of preference; see codec_for
WIDER = {"float16": "float32"}  # LeRobot's statistics fail on float16
VERDICT = ("success", "discard", "judged_by", "reward", "last_reward", "terminated", "truncated")  # can come late
MARK = (*VERDICT, "steps", "final")  # a shard that differs from the store in these is written again


def missing() -> list[str]:
    """Return the packages that writing shards needs and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


# -- one shard
def table(info: EpisodeInfo, rows: Rows, spec: Spec, phases: Sequence[str]) -> Rows:
    """Return the columns of an episode in a shard, {column: [T, ...]}, images included.

    rows: as from EpisodeReader.rows. phases: names of all phases of the run; the column `phase` holds indices into it.
    """
    length = info.steps
    last = np.arange(length) == length - 1
    success = info.success is not None and bool(info.success)
    outcome = -1 if info.success is None else int(success)
    made = {stored: rows[name] for name, stored in STORED.items()} | {
        DONE: last, SUCCESS: last & success,
        PHASE: np.full(length, phases.index(info.phase)), OUTCOME: np.full(length, outcome),
    }  # fmt: skip
    made = {name: array.reshape(length, 1).astype(COLUMNS[name].dtype) for name, array in made.items()}
    for name in [*spec.observation, "action", *spec.extras]:
        array = rows[name][:length]
        if name not in cameras(spec):
            array = np.asarray(array).astype(WIDER.get(array.dtype.name, array.dtype), copy=False)
            array = array.reshape(length, 1) if array.ndim == 1 else array
        made[column(name, spec)] = array
    return made


def features(spec: Spec, kind: str) -> dict[str, dict[str, Any]]:
    """Return LeRobot's description of the columns and `units`. kind: `video` or `image`, how images are stored."""
    seen = cameras(spec)
    described = {}
    for name, feature in {**spec.observation, "action": spec.action, **spec.extras}.items():
        names = ("height", "width", "channels") if name in seen else feature.names
        dtype = kind if name in seen else WIDER.get(feature.dtype, feature.dtype)
        entry = {"dtype": dtype, "shape": feature.shape or (1,), "names": list(names) or None}
        described[column(name, spec)] = entry | ({"units": list(feature.units)} if feature.units else {})
    described |= {name: {"dtype": f.dtype, "shape": f.shape, "names": None} for name, f in COLUMNS.items()}
    return described


def write(
    part: Path, spec: Spec, codec: str | None, episodes: Iterable[tuple[EpisodeInfo, Rows]],
    origins: Mapping[int, Episode] | None = None,
) -> list[tuple[EpisodeInfo, Rows]]:  # fmt: skip
    """Write a LeRobot dataset of these (info, table) into the folder `part`. Nothing is synced yet.

    codec: of videos; None: store images as PNG. Images are read step by step, each once.
    origins: {episode: where its videos are copied from}, of all that are written; None: they are encoded.
    Returns the episodes again, without images. Raises Gone if one leaves the store meanwhile, and Differs if an origin
    does not show an episode's images.
    """

    def copy(camera: str, images: Path, video: Path) -> None:
        footage.take((origins or {})[info.number], camera, images, video)

    remove(part)
    part.parent.mkdir(parents=True, exist_ok=True)
    kind = "video" if codec else "image"
    dataset = lerobot_api.create(part, whole(spec.fps), features(spec, kind), codec, copy=copy if origins else None)
    images, written = {column(name, spec) for name in cameras(spec)}, []
    for info, columns in episodes:
        for step in range(info.steps):
            dataset.add_frame({name: array[step] for name, array in columns.items()} | {"task": info.task})
        save(dataset)
        written.append((info, {name: array for name, array in columns.items() if name not in images}))
    dataset.finalize()
    remove(part / "images")
    return written


def save(dataset: Any) -> None:
    """Let a LeRobotDataset write the episode of which it has all frames."""
    with warnings.catch_warnings(), ordinary_priority():
        warnings.simplefilter("ignore")  # of LeRobot, about flags and arrays of one number
        dataset.save_episode(parallel_encoding=False)  # in this process: another one could outlive it


def keep(part: Path, rows: Rows) -> None:
    """Write each column of an episode into the folder `part` as a NumPy file. Nothing is synced yet."""
    for name, array in rows.items():
        with open(_column_file(part, name), "wb") as file:
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            np.lib.format.write_array_header_1_0(file, header)
            for row in array:
                file.write(np.asarray(row).tobytes())


def kept(folder: Path, info: EpisodeInfo, spec: Spec) -> Rows:
    """Read what `keep` wrote, as EpisodeReader.rows; images are mapped. info: of the episode, gives its last row.

    Raises OSError or ValueError if a column is missing or damaged.
    """
    names = *spec.observation, "action", *spec.extras, *STORED
    rows: Rows = {name: np.load(_column_file(folder, name), mmap_mode="c") for name in names}
    end(rows, info)
    return rows


def _column_file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '.')}.npy"


def verify(part: Path, spec: Spec, written: Sequence[tuple[EpisodeInfo, Rows]]) -> None:
    """Open a shard with LeRobot and compare it with `written`: lengths, every number, and the videos' frame counts.

    Raises Mismatch if they differ.
    """
    from datasets import config

    LeRobotDataset, lengths = lerobot_api.dataset_class(), [info.steps for info, _ in written]
    with tempfile.TemporaryDirectory(dir=part.parent, suffix=PART) as cache, _cached_in(config, cache):
        dataset = LeRobotDataset("retake/shard", root=part)
        there = [int(episode["length"]) for episode in dataset.meta.episodes]
        if (there, len(dataset)) != (lengths, sum(lengths)):
            raise Mismatch(f"{part}: its episodes have {there} steps, expected {lengths}")
        ends = np.cumsum(lengths)
        for index in {*(ends - lengths).tolist(), *(ends - 1).tolist()}:
            row = dataset[index]
            for name in cameras(spec):
                height, width, channels = spec.observation[name].shape
                if (shape := tuple(row[column(name, spec)].shape)) != (channels, height, width):
                    raise Mismatch(f"{part}: frame {index} of {name} is {shape}, expected {(channels, height, width)}")
        for key in dataset.meta.video_keys:
            videos = {part / dataset.meta.get_video_file_path(i, key) for i in range(len(lengths))}
            if (frames := sum(map(_frames, videos))) != sum(lengths):
                raise Mismatch(f"{part}: the videos of {key} have {frames} frames, expected {sum(lengths)}")
    _compare(part, written)


def _compare(part: Path, written: Sequence[tuple[EpisodeInfo, Rows]]) -> None:
    """Compare every number with our own reader, which is exact."""
    for episode, (info, columns) in zip(Dataset(part), written, strict=True):
        for name, expected in columns.items():
            stored = episode.column(name)
            if not np.array_equal(stored, expected, equal_nan=expected.dtype.kind == "f"):
                raise Mismatch(f"{part}: column {name} of {info.id} differs from the store")


def _frames(video: Path) -> int:
    import av

    count = 0
    with av.open(str(video)) as container:
        count += sum(packet.size > 0 for packet in container.demux(container.streams.video[0]))
    return count


@contextlib.contextmanager
def _cached_in(config: Any, folder: str) -> Iterator[None]:
    """Make the package `datasets` cache what it opens in `folder`, not in the user's home."""
    before, config.HF_DATASETS_CACHE = config.HF_DATASETS_CACHE, folder
    try:
        yield
    finally:
        config.HF_DATASETS_CACHE = before


def whole(fps: float) -> float:
    """Return a rate as LeRobot writes it: an int, if it is one."""
    return int(fps) if float(fps).is_integer() else fps


def codec_for(spec: Spec, like: Episode | None = None) -> str | None:
    """Return a codec in which this machine can write and read videos of these cameras.

    like: an episode whose codec is tried first, so that its dataset can be merged with ours.
    None: store images as PNG, because there is no such codec or the frame rate is no whole number; or no cameras.
    """
    if not cameras(spec):
        return None
    if not float(spec.fps).is_integer():
        log.warning("export: LeRobot's videos need a whole number of frames per second; images are stored as PNG")
        return None
    first = footage.joined([like]) if like else None
    reasons = []
    for codec in dict.fromkeys([*filter(None, [first]), *CODECS]):
        reason = next((why for name in cameras(spec) if (why := _unfit(codec, spec, spec.observation[name]))), None)
        if reason is None:
            return codec
        reasons.append(f"{codec}: {reason}")
    log.warning("export: no video can be written and read here; images are stored as PNG, which is slow to read. "
                "For videos: apt-get install ffmpeg. Reasons: %s", "; ".join(reasons))  # fmt: skip
    return None


def _unfit(codec: str, spec: Spec, feature: Feature) -> str | None:
    """Return why two frames of this shape cannot be encoded and decoded again; None if they can."""
    lerobot_api.dataset_class()
    from av.error import FFmpegError
    from lerobot.datasets.video_utils import decode_video_frames
    from PIL import Image

    fps = whole(spec.fps)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(2):
            Image.fromarray(np.full(feature.shape, 255 * i, np.uint8)).save(Path(folder) / f"frame-{i:06d}.png")
        try:
            video = Path(folder) / "probe.mp4"
            with ordinary_priority():
                lerobot_api.encode(folder, video, fps, codec)
            frames = decode_video_frames(video, [0.0, 1 / fps], 1e-3)
        except (FFmpegError, OSError, RuntimeError, ValueError, ImportError) as error:
            return (str(error).strip() or repr(error)).splitlines()[0]
    height, width, channels = feature.shape
    return None if tuple(frames.shape) == (2, channels, height, width) else f"frames came back as {frames.shape}"


# -- versions
def place(part: Path, target: Path) -> None:
    """Sync the folder `part` and put it in the place of `target` at once. Who has the old one open keeps it."""
    for folder, _, names in os.walk(part):
        for name in names:
            fd = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_folder(Path(folder))
    if not target.exists():
        os.rename(part, target)
    elif not _exchange(part, target):
        old = target.with_name(target.name + OLD)
        os.rename(target, old)
        os.rename(part, target)
        part = old
    for folder in target.parents[:3]:  # these may be new, up to the run's folder
        sync_folder(folder)
    remove(part)


def _exchange(part: Path, target: Path) -> bool:
    """Exchange the names of two folders. Returns False where the file system cannot."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(here, os.fsencode(part), here, os.fsencode(target), exchange) == 0


def drop(target: Path) -> None:
    """Remove a shard, at once."""
    os.rename(target, gone := target.with_name(target.name + PART))
    sync_folder(target.parent)
    remove(gone)


def remove(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what a killed export left unfinished, and restore an old version whose new one never took its place."""
    for left in sorted(folder.glob(f"*/*{OLD}")):
        target = left.with_name(left.name.removesuffix(OLD))
        if not target.exists():
            os.rename(left, target)
    for left in folder.glob(f"*/*{PART}"):
        remove(left)


def manifest(
    run: str, source: str, version: int, spec: Spec, phases: Sequence[str], codec: str | None, encodings: int,
    infos: Iterable[EpisodeInfo], left_out: Iterable[tuple[EpisodeInfo, str]],
) -> dict[str, Any]:  # fmt: skip
    """Return the content of `retake.json`.

    encodings: how often the images went through a codec. left_out: (episode, reason) of those not in the shard.
    """
    images = {"stored_as": "video" if codec else "image", "codec": codec, "lossy": encodings > 0}
    return {
        "format": FORMAT, "run": run, "source": source, "version": version, "fps": float(spec.fps),
        "images": images | {"encodings": encodings} if cameras(spec) else None,
        "final_observations": "not in this dataset: LeRobot has no row for them, the run's store has them",
        "phases": list(phases), "spec": spec.to_dict(), "episodes": [_entry(info) for info in infos],
        "left_out": [_entry(info) | {"why": why} for info, why in left_out],
    }  # fmt: skip


def _entry(info: EpisodeInfo) -> dict[str, Any]:
    flags = ("terminated", "truncated", "final", "discard", "continued")
    entry = {name: value for name, value in info._asdict().items() if name not in ("source", "closed", "first")}
    entry |= {name: bool(entry[name]) for name in flags}
    return entry | {"success": None if info.success is None else bool(info.success)}


def mark(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a shard holds of an episode, from its entry in the manifest: its verdict, what that makes of its
    last step, and its length."""
    return tuple(entry[name] for name in MARK)


def mark_now(info: EpisodeInfo) -> tuple[Any, ...]:
    """Return the `mark` that an episode would get if its shard was written now."""
    return mark(_entry(info))


def info_of(entry: Mapping[str, Any], source: str) -> EpisodeInfo:
    """Rebuild the EpisodeInfo of an episode that left the store, from its entry in the manifest."""
    fields = {name: value for name, value in entry.items() if name in EpisodeInfo._fields}
    return EpisodeInfo(**fields, source=source, first=-1, closed=True)


def read_manifest(shard: Path) -> dict[str, Any]:
    """Read a shard's `retake.json`. Raises ConfigError if there is none that this version reads."""
    try:
        found = json.loads((shard / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shard} is no shard of ours ({error}): move it out of {shard.parent.parent}") from None
    if found.get("format") != FORMAT:
        raise ConfigError(f"{shard / MANIFEST} has the format {found.get('format')}, this version reads {FORMAT}")
    return found


class _InOrder:
    """Gives images of an iterator by index, for `write`, which asks for them in order."""

    def __init__(self, images: Iterator[Array]) -> None:
        self._images, self._next = images, 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self
        assert index == self._next, "a video is decoded from its beginning"
        self._next += 1
        return next(self._images)


def rows_of(episode: Episode, info: EpisodeInfo, spec: Spec) -> Rows:
    """Read an episode from a shard, because the store has evicted it: as EpisodeReader.rows, without final observation.

    info: its EpisodeInfo, of which the last row gets reward and end.
    """
    images = set(cameras(spec))
    rows: Rows = {name: _InOrder(episode.images(column(name, spec))) for name in images}
    for name, feature in {**spec.observation, "action": spec.action, **spec.extras}.items():
        if name not in images:
            stored = episode.column(column(name, spec)).astype(feature.dtype)
            rows[name] = stored.reshape(info.steps, *feature.shape)
    rows |= {name: episode.column(stored).reshape(-1).copy() for name, stored in STORED.items()}
    end(rows, info)
    return rows
