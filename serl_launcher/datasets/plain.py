"""Writes a run's episodes as one LeRobot dataset with the columns and the robot of the dataset that the run began with.

LeRobot merges only datasets with the same columns, so this one can be merged with that one. Videos are copied from the
run's shards, so they went through a codec once.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.console import throttled
from serl_client.errors import ConfigError
from serl_client.identity import IMPORTED
from serl_client.spec import Spec

from serl_launcher.datasets import footage, lerobot_api, robomimic, shards
from serl_launcher.datasets.episodes import Mismatch
from serl_launcher.datasets.inspection import mistimed
from serl_launcher.datasets.names import KNOWN, column
from serl_launcher.datasets.reader import Dataset, Episode

log = throttled(__name__)

INDICES = ("timestamp", "frame_index", "episode_index", "index", "task_index")  # LeRobot makes these itself
INSTEAD = "merge the run's shards without it (tools/data.py merge)"
Columns = Mapping[str, str]  # column of a dataset: that of another one which holds the same


@dataclass(frozen=True, slots=True)
class Plain:
    """What a plain dataset holds. failures: episodes that failed. left: those that came from a dataset, not in it."""

    episodes: int
    frames: int
    failures: int
    left: int


def write(out: Path, folders: Sequence[Path], imported: Mapping[str, Mapping[str, Any]], successes: bool) -> Plain:
    """Write the episodes of shards into the new folder `out`, but for those that came from a LeRobot dataset.

    folders: of the shards of one run. imported: {source that a dataset fills: its words in the plan}; the first of
    LeRobot tells the columns and the robot. successes: only episodes that succeeded.
    Raises ConfigError if `out` is there, nothing is left to write, or the run has no such columns.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already: name a new folder")
    known = {source: words for source, words in imported.items() if not robomimic.is_file(words["dataset"])}
    episodes, failures, left = [], 0, 0
    for dataset in map(Dataset, folders):
        for episode, entry in zip(dataset, (dataset.manifest or {})["episodes"], strict=True):
            if entry["actor"].startswith(IMPORTED) and entry["actor"].removeprefix(IMPORTED) in known:
                left += 1
            elif entry["success"] or not successes:
                failures += entry["success"] is False
                episodes.append(episode)
    if not episodes:
        raise ConfigError(
            "the run has no episode of its own to write: let it practise first"
            + f"; {left} came from a dataset" * bool(left)
        )
    words = next(iter(known.values()), None)
    if words and words.get("calibration"):
        raise ConfigError(
            f"{words['dataset']} is in percent, and the run has made degrees of them: both together teach nothing; "
            f"{INSTEAD}"
        )
    rename = (words or {}).get("rename") or {}
    _write(out, episodes, Dataset(Path(words["dataset"])) if words else None, KNOWN | rename)
    return Plain(len(episodes), sum(map(len, episodes)), failures, left)


def _write(out: Path, episodes: Sequence[Episode], like: Dataset | None, rename: Columns) -> None:
    spec, part = episodes[0].dataset.spec(), out.with_name(out.name + shards.PART)
    features, called = _columns(episodes[0].dataset, like, spec, rename)
    has_videos = any(entry["dtype"] == "video" for entry in features.values())
    copied = footage.joined(episodes) if has_videos else None
    codec = _codec(spec, like, copied) if has_videos else None
    copies = codec is not None and codec == copied
    if has_videos and not copies:
        log.warning("the images are encoded once more: the videos of the run's shards are of another kind")

    def copy(camera: str, _: Path, video: Path) -> None:
        footage.copy(episode, called[camera], video)

    out.parent.mkdir(parents=True, exist_ok=True)
    shards.remove(part)
    robot, fps = like.info.get("robot_type") if like else None, shards.whole(spec.fps)
    try:
        made = lerobot_api.create(part, fps, features, codec, robot, copy if copies else None)
        for episode in episodes:
            if wrong := mistimed(episode):
                log.warning("%s %s: LeRobot will show its rows at %g per second", episode.where, wrong[0], fps)
            for row in _rows(episode, features, called):
                made.add_frame({**row, "task": episode.task})
            shards.save(made)
        made.finalize()
        shards.remove(part / "images")
        if like is not None:
            _describe(part, like, features)
        for written, episode in zip(Dataset(part), episodes, strict=True):
            check_same(written, episode, called, has_images=copies or not has_videos)
        shards.place(part, out)
    finally:
        shards.remove(part)


def _columns(
    shard: Dataset, like: Dataset | None, spec: Spec, rename: Columns
) -> tuple[dict[str, Any], Columns]:  # fmt: skip
    """Return the features of the plain dataset, as in info.json, and the column of a shard that each one is.

    rename: {column or entry of `like`: its name in the run}.
    """
    vectors = {name: column(name, spec) for name in (*spec.observation, "action", *spec.extras)}
    if like is None:
        called = {vectors[name]: vectors[name] for name in (*spec.observation, "action")}
        ours = ("units", "info")
        features = {n: {k: v for k, v in shard.info["features"][n].items() if k not in ours} for n in called}
    elif like.fps != spec.fps:
        raise ConfigError(f"{like.folder} has {like.fps:g} rows per second, the run {spec.fps:g}; {INSTEAD}")
    else:
        features = {name: entry for name, entry in like.info["features"].items() if name not in INDICES}
        called = {name: vectors.get(here := rename.get(name, name), here) for name in features}
    source = like or shard
    for name in features:
        there, here = source.features.get(source.names[name]), shard.features.get(called[name])
        if there is None or here is None:
            raise ConfigError(f"the run has no {name}, as {source.folder} has: take that column out of it")
        if (there.shape or (1,)) != (here.shape or (1,)):
            raise ConfigError(
                f"{name} of {source.folder} is {list(there.shape)}, that of the run {list(here.shape)}; {INSTEAD}"
            )
        if here.names and there.names and (mine := [rename.get(n, n) for n in there.names]) != [*here.names]:
            raise ConfigError(f"{name} of {source.folder} holds {mine}, that of the run {[*here.names]}; {INSTEAD}")
    return {name: {**entry, "shape": tuple(entry["shape"])} for name, entry in features.items()}, called


def _codec(spec: Spec, like: Dataset | None, copied: str | None) -> str:
    """Return the encoder of the videos of `like`, if they can be copied, or encoded here. Raises ConfigError if not."""
    first = like.episode(0) if like else None
    codec = footage.joined([first]) if first else copied or shards.codec_for(spec)
    if codec is None or codec not in (copied, shards.codec_for(spec, first)):
        raise ConfigError(
            "videos like those of the dataset that the run began with cannot be written here (LeRobot merges AV1 and "
            f"H.264 alone, and needs their encoder); {INSTEAD}"
        )
    return codec


def _rows(episode: Episode, features: Mapping[str, Any], called: Columns) -> Iterator[dict[str, Any]]:
    """Yield the rows of an episode of a shard, {column of the plain dataset: value}."""
    columns: dict[str, Iterator[Any]] = {}
    for name, entry in features.items():
        mine = called[name]
        if mine in episode.dataset.cameras:
            columns[name] = episode.images(mine)
        else:
            columns[name] = iter(episode.column(mine).reshape(len(episode), *entry["shape"]).astype(entry["dtype"]))
    for _ in range(len(episode)):
        yield {name: next(values) for name, values in columns.items()}


def _describe(part: Path, like: Dataset, features: Mapping[str, Any]) -> None:
    """Let info.json describe each column as `like` does, to the letter: LeRobot compares them."""
    mine, theirs = (footage.kinds(dataset.episode(0)) for dataset in (Dataset(part), like))
    for name, (codec, *size) in mine.items():
        if (codec, *size[:3]) != theirs[name][:4]:
            raise ConfigError(f"the videos of {name} are {codec}, {size[:3]}, not as those of {like.folder}; {INSTEAD}")
    path = part / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"] |= features
    path.write_text(json.dumps(info, indent=4))


def check_same(written: Episode, original: Episode, called: Columns, *, has_images: bool = True) -> None:
    """Raise Mismatch unless an episode has the task of the original one, and each column holds what that one's does, in
    its own type.

    called: {column of `original` by that of `written`}. has_images: whether each pixel is the same, too; else there
    are as many images.
    """
    if written.task != original.task:
        raise Mismatch(f"{written.where}: its task is {written.task!r}, that of {original.where} {original.task!r}")
    for name, feature in written.dataset.features.items():
        if name in INDICES:
            continue
        mine = called[written.dataset.original(name)]
        if name in written.dataset.cameras:
            pairs = zip(written.images(name), original.images(mine), strict=True)
            is_same = all(np.array_equal(*pair) or not has_images for pair in pairs)
        else:
            stored, expected = written.column(name), original.column(mine).astype(feature.dtype)
            is_same = np.array_equal(stored.ravel(), expected.ravel(), equal_nan=stored.dtype.kind == "f")
        if not is_same:
            raise Mismatch(f"{written.where}: {name} differs from {mine} of {original.where}")
