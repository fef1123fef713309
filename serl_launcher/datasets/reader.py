"""Reads a LeRobot v3.0 dataset, whoever made it, as the episodes of a run, from its tables and videos.

Nothing but the folder is needed: no hub, no torch. Of what others wrote we know less than of our own, and say no more:
- LeRobot has no observation after the last action. An episode that its columns call terminated gets the last one
  again, whose value nobody asks for. Any other is one that was cut: all its steps are there, it has no final
  observation, and windows that ask for one leave its last step out;
- without columns of reward, intervention or outcome the reward is 0, nobody took over, and the outcome is unknown.
"""

import importlib.util
import io
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.episode import MAX_NAME, Segment, Stamp
from serl_client.errors import ConfigError
from serl_client.recorder import segment_rows
from serl_client.spec import DTYPES, Array, Feature, Spec

from serl_launcher.datasets.names import (
    CHUNK_DELAY,
    CHUNK_START,
    DONE,
    GAP,
    INSTALL,
    INTERVENED,
    MANIFEST,
    OUTCOME,
    REWARD,
    SUCCESS,
    TERMINATED,
    TIME,
    TRUNCATED,
    column,
)  # fmt: skip

NEEDED = ("pyarrow", "av", "PIL")
IMAGES = ("image", "video")
WIDENED = 0.05  # of the range of each action, on either side: the statistics are of what happened, not of what may
CONSTANT = 0.01  # half the range that is given to an action which never changed, of its size where that is above 1


class Dataset:
    """A dataset's folder, opened: `features` {name: Feature} of what can be stored, images as uint8 [H, W, C]; `fps`;
    `lengths`, the steps of each episode. Raises ConfigError when there is no LeRobot v3.0 dataset, or it is not whole.
    """

    def __init__(self, folder: Path) -> None:
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise ConfigError(f"a dataset needs {', '.join(missing)}: {INSTALL}")
        self.folder, self.name = folder, folder.resolve().name
        self.info = _json(folder, "meta/info.json")
        version = str(self.info.get("codebase_version"))
        if not version.startswith("v3."):
            raise ConfigError(
                f"{folder} is of LeRobot's format {version}, v3.0 is read here: convert it with "
                "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
            )
        try:
            self.fps = float(self.info["fps"])
            self.features = {name: made for name, entry in self.info["features"].items() if (made := _feature(entry))}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}: meta/info.json is not LeRobot's (no fps, or features): {error!r}") from None
        self._episodes = self._read_episodes()
        self.lengths: list[int] = [episode["length"] for episode in self._episodes]
        if sum(self.lengths) != self.info["total_frames"]:
            raise ConfigError(
                f"{folder} is not whole: its episodes have {sum(self.lengths):,} frames, meta/info.json says "
                f"{self.info['total_frames']:,}"
            )
        self._table: tuple[Path, Any] | None = None  # the newest that was read

    def episode(self, index: int) -> "Episode":
        """Its rows, without images. Raises ConfigError when they are not all there."""
        entry = self._episodes[index]
        template, chunk, file = self.info["data_path"], entry["data/chunk_index"], entry["data/file_index"]
        path = self.folder / template.format(chunk_index=chunk, file_index=file)
        if self._table is None or self._table[0] != path:
            self._table = path, _parquet(path)
        table = self._table[1]
        rows = np.flatnonzero(table["episode_index"].to_numpy() == entry["episode_index"])
        if len(rows) != entry["length"]:
            raise ConfigError(f"{path} has {len(rows)} rows of episode {index}, which has {entry['length']} frames")
        return Episode(self, entry, table.slice(rows[0], len(rows)))

    def __iter__(self) -> Iterator["Episode"]:
        return (self.episode(index) for index in range(len(self.lengths)))

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """What a shard of ours says of itself; None: others made this."""
        return _json(self.folder, MANIFEST) if (self.folder / MANIFEST).exists() else None

    def spec(self) -> Spec:
        """What its robot saw and did; where others made it, the action has bounds a little wider than what happened."""
        if self.manifest is not None:
            return Spec.from_dict(self.manifest.get("spec", {}))
        action = self.features.get("action")
        if action is None or len(action.shape) != 1:
            raise ConfigError(f"{self.folder} has no column `action` of vectors: there is nothing to learn from it")
        statistics = _json(self.folder, "meta/stats.json").get("action", {})
        try:
            low, high = (np.array(statistics[name], np.float64).reshape(action.shape) for name in ("min", "max"))
        except (KeyError, ValueError):
            raise ConfigError(f"{self.folder}/meta/stats.json has no min and max of the action") from None
        constant = CONSTANT * np.maximum(1.0, np.abs(low))
        margin = np.where(high > low, np.maximum(WIDENED * (high - low), 1e-6), constant)
        action = Feature(action.shape, "float32", action.names, low - margin, high + margin)
        observation = {name: f for name, f in self.features.items() if name.startswith("observation.")}
        return Spec(observation, action, self.fps)

    def misfit(self, spec: Spec) -> str:
        """What keeps its episodes out of a run with this Spec; empty if nothing does."""
        wrong = [f"its rate is {self.fps:g} fps, the run's {spec.fps:g}"] * (self.fps != spec.fps)
        for name, theirs in {**spec.observation, "action": spec.action}.items():
            mine = self.features.get(self.called(name, spec))
            if mine is None:
                wrong.append(f"it has no {name}")
            elif mine.shape != (theirs.shape or (1,)):
                wrong.append(f"its {name} is {list(mine.shape)}, the run's {list(theirs.shape)}")
            elif not np.can_cast(mine.dtype, theirs.dtype, "same_kind"):
                wrong.append(f"its {name} is {mine.dtype}, the run's {theirs.dtype}")
            elif mine.names and theirs.names and mine.names != theirs.names:
                wrong.append(f"its {name} holds {', '.join(mine.names)}, the run's {', '.join(theirs.names)}")
        return "; ".join(wrong)

    def called(self, name: str, spec: Spec) -> str:
        """What a feature of a run's Spec is called here: in a shard of ours it may have had to change its name."""
        changed = column(name, spec)
        return changed if changed in self.features else name

    @property
    def cameras(self) -> list[str]:
        """The features that are images."""
        return [name for name in self.features if self.info["features"][name]["dtype"] in IMAGES]

    def task(self, index: int) -> str:
        return self._tasks.get(index, "")

    @cached_property
    def _tasks(self) -> dict[int, str]:
        path = self.folder / "meta/tasks.parquet"
        rows = _parquet(path).to_pylist() if path.exists() else []
        return {row.pop("task_index"): str(next(iter(row.values()), "")) for row in rows}

    def _read_episodes(self) -> list[dict[str, Any]]:
        paths = sorted((self.folder / "meta/episodes").glob("*/*.parquet"))
        if not paths:
            raise ConfigError(f"{self.folder} has no meta/episodes: its recording was never finished (finalize)")
        rows = [row for path in paths for row in _parquet(path, without="stats/").to_pylist()]
        return sorted(rows, key=lambda row: row["episode_index"])


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One episode of a dataset: its entry in meta/episodes, and its rows of the table."""

    dataset: Dataset
    entry: Mapping[str, Any]
    rows: Any

    def __len__(self) -> int:
        return self.entry["length"]

    def has(self, name: str) -> bool:
        return name in self.dataset.features

    def column(self, name: str) -> Array:
        """[T, *shape] of a feature that is no image."""
        import pyarrow as pa

        values = self.rows[name].combine_chunks()
        while (extended := isinstance(values, pa.ExtensionArray)) or pa.types.is_nested(values.type):
            values = values.storage if extended else values.flatten()
        array = values.to_numpy(zero_copy_only=False)
        return array.reshape(len(self), *self.dataset.features[name].shape)

    def flag(self, name: str) -> Array:
        """[T] bool: the column, or nothing but False."""
        return self.column(name).reshape(-1).astype(bool) if self.has(name) else np.zeros(len(self), bool)

    def images(self, name: str) -> Iterator[Array]:
        """uint8 [H, W, C], T of them. Raises ConfigError when the video has not all."""
        feature = self.dataset.info["features"][name]
        shape = self.dataset.features[name].shape
        frames = self._video(name) if feature["dtype"] == "video" else self._stills(name)
        for image in frames:
            if image.shape != shape:
                raise ConfigError(f"{self.where}: an image of {name} is {list(image.shape)}, not {list(shape)}")
            yield image

    @property
    def where(self) -> str:
        """For sentences: which episode of which dataset this is."""
        return f"episode {self.entry['episode_index']} of {self.dataset.folder}"

    @property
    def task(self) -> str:
        return self.dataset.task(int(self.rows["task_index"][0].as_py()))[:MAX_NAME]

    @property
    def terminated(self) -> bool:
        """Whether its own columns call its end one of the task's, and not a cut."""
        if self.has(TERMINATED):
            return bool(self.flag(TERMINATED)[-1])
        return bool(self.flag(DONE)[-1] or self.flag(SUCCESS)[-1]) and not self.flag(TRUNCATED)[-1]

    @property
    def success(self) -> bool | None:
        """What its columns say of the whole episode: it succeeded when any of its steps did; None: nothing."""
        if self.has(OUTCOME):
            return {0: False, 1: True}.get(int(self.column(OUTCOME).flat[-1]))
        return bool(self.flag(SUCCESS).any()) if self.has(SUCCESS) else None

    def segments(self, spec: Spec, id: str, stamp: Stamp) -> Iterator[Segment]:
        """Its steps for a store of that Spec, which `misfit` has nothing against. Raises ConfigError for an action or
        a reward that is no number, and for images that are not there."""
        count, length, task, ends = segment_rows(spec), len(self), self.task, self.terminated
        cameras = {name: self.images(name) for name in self.dataset.cameras if name in spec.observation}
        vectors = {
            name: self.column(self.dataset.called(name, spec)).reshape(length, *feature.shape)
            for name, feature in spec.observation.items() if name not in cameras
        }  # fmt: skip
        extras = {name: self._extra(self.dataset.called(name, spec), feature) for name, feature in spec.extras.items()}
        action, columns = self.column("action"), self._columns()
        if not (np.isfinite(action).all() and np.isfinite(columns["reward"]).all()):
            raise ConfigError(f"{self.where} has an action or a reward that is no number: tools/data.py check finds it")
        for start in range(0, length, count):
            stop = min(start + count, length)
            ending = ends and stop == length
            seen = {name: array[start:stop] for name, array in vectors.items()}
            seen |= {name: np.stack(list(itertools.islice(f, stop - start))) for name, f in cameras.items()}
            if ending:
                seen = {name: np.concatenate([array, array[-1:]]) for name, array in seen.items()}
            yield Segment(
                id, start, task, stamp,
                {name: np.array(array, spec.observation[name].dtype) for name, array in seen.items()},
                np.array(action[start:stop], spec.action.dtype),
                **{name: column[start:stop].copy() for name, column in columns.items()}, terminated=ending,
                extras={name: array[start:stop].copy() for name, array in extras.items()},
            )  # fmt: skip

    def _columns(self) -> dict[str, Any]:
        reward = self.column(REWARD) if self.has(REWARD) else np.zeros(len(self))
        time = self.column(TIME if self.has(TIME) else "timestamp")
        delay = self.column(CHUNK_DELAY) if self.has(CHUNK_DELAY) else np.zeros(len(self))
        return {
            "reward": reward.reshape(-1).astype(np.float32), "intervened": self.flag(INTERVENED),
            "chunk_start": self.flag(CHUNK_START), "time": time.reshape(-1).astype(np.float64), "gap": self.flag(GAP),
            "chunk_delay": delay.reshape(-1).astype(np.uint16),
        }  # fmt: skip

    def _extra(self, name: str, feature: Feature) -> Array:
        """[T, *shape] of what a row has besides; zeros where the dataset has no such column."""
        shape = (len(self), *feature.shape)
        if not self.has(name) or math.prod(self.dataset.features[name].shape) != math.prod(feature.shape):
            return np.zeros(shape, feature.dtype)
        return self.column(name).reshape(shape).astype(feature.dtype)

    def _stills(self, name: str) -> Iterator[Array]:
        from PIL import Image

        for cell in self.rows[name]:
            still = cell.as_py()
            source = io.BytesIO(still["bytes"]) if still["bytes"] else self.dataset.folder / still["path"]
            with Image.open(source) as image:
                yield np.asarray(image.convert("RGB"))

    def _video(self, name: str) -> Iterator[Array]:
        """Decoded from its first frame on, one after the other."""
        import av
        from av.error import FFmpegError

        chunk, file, begin = (
            self.entry[f"videos/{name}/{what}"] for what in ("chunk_index", "file_index", "from_timestamp")
        )
        path = self.dataset.folder / self.dataset.info["video_path"].format(
            video_key=name, chunk_index=chunk, file_index=file
        )
        found, fps = 0, self.dataset.fps
        try:
            with av.open(str(path)) as container:
                stream = container.streams.video[0]
                assert stream.time_base is not None
                container.seek(int(begin / stream.time_base), stream=stream)
                for frame in container.decode(stream):
                    place = round((frame.time - begin) * fps)
                    if place == found < len(self):
                        yield frame.to_ndarray(format="rgb24")
                        found += 1
                    elif place >= found:
                        break
        except (FFmpegError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if found < len(self):
            raise ConfigError(f"{path} has no frame {found} of {self.where}: the dataset is not whole")


def _feature(entry: Mapping[str, Any]) -> Feature | None:
    """What info.json says of one column; None for what has no place in a store, such as texts."""
    shape, names = tuple(entry["shape"]), entry.get("names")
    if isinstance(names, Mapping):  # older ones: {"motors": [...]}
        names = next(iter(names.values()), None)
    names = tuple(map(str, names)) if isinstance(names, Sequence) and not isinstance(names, str) else ()
    if entry["dtype"] in IMAGES:
        first = names[0] if names else ""
        return Feature((*shape[1:], shape[0]) if first.startswith("channel") else shape, "uint8")
    return Feature(shape, entry["dtype"], names) if entry["dtype"] in DTYPES else None


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} holds no LeRobot dataset: {name} cannot be read ({reason})") from None


def _parquet(path: Path, without: str | None = None) -> Any:
    """The table, without the columns whose names begin with `without`."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = [name for name in parquet.read_schema(path).names if not (without and name.startswith(without))]
        return parquet.ParquetFile(path).read(columns=names)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Was its recording finished (finalize)?") from None
