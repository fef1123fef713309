"""Reads any LeRobot v3.0 dataset as the episodes of a run, from its tables and videos.

It needs only the folder: no hub, no torch. A dataset of others may lack columns:
- LeRobot has no observation after the last action. If the columns call an episode terminated, its last observation is
  repeated; no update uses that value. Any other episode counts as cut: it has no final observation, so windows that
  need one leave its last step out;
- without a column for it, the reward is 0, nobody intervened, and the outcome is unknown.
"""

import importlib.util
import io
import itertools
import json
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from serl_client.episode import COLUMNS, Segment, Stamp
from serl_client.errors import ConfigError, RetakeError
from serl_client.names import MAX_NAME, cleaned
from serl_client.recorder import segment_rows
from serl_client.spec import DTYPES, Array, Feature, Spec

from serl_launcher.datasets import lerobot_api, names

NEEDED = ("pyarrow", "av", "PIL")
IMAGES = ("image", "video")
WIDENED = 0.05  # share of an action's range added on either side, because statistics show only what happened
WIDTH = 4  # characters that say how wide a number of a file's name is, at most
CONSTANT = 0.01  # half the range of an action that never changed, times its size if above 1


class Dataset:
    """Opens the folder of a dataset.

    features: {name: Feature} of the columns that a store can hold, images as uint8 [H, W, C]. fps: steps per second.
    lengths: steps of each episode. Raises ConfigError if there is no LeRobot v3.0 dataset, or it is not whole.
    """

    def __init__(self, folder: Path) -> None:
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise ConfigError(f"a dataset needs {', '.join(missing)}: {names.INSTALL}")
        self.folder, self.name = folder, folder.resolve().name
        self._table: tuple[Path, Any] | None = None  # the table that was read last
        with reading(folder):
            self._open()

    def _open(self) -> None:
        self.info, folder = _json(self.folder, "meta/info.json"), self.folder
        version = str(self.info.get("codebase_version"))
        if not version.startswith("v3."):
            raise ConfigError(
                f"{folder} is of LeRobot's format {version}, v3.0 is read here: convert it with "
                f"python -m {lerobot_api.converter()}"
            )
        try:
            self.fps = float(self.info["fps"])
            self.features = {name: made for name, entry in self.info["features"].items() if (made := _feature(entry))}
        except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}: meta/info.json is not LeRobot's (no fps, or features): {error!r}") from None
        self._episodes = self._read_episodes()
        self.lengths: list[int] = [episode["length"] for episode in self._episodes]
        if sum(self.lengths) != self.info["total_frames"]:
            raise ConfigError(
                f"{folder} is not whole: its episodes have {sum(self.lengths):,} frames, meta/info.json says "
                f"{self.info['total_frames']:,}"
            )

    def episode(self, index: int) -> "Episode":
        """Read an episode, its images not yet. Raises ConfigError if rows are missing."""
        entry = self._episodes[index]
        with reading(self.folder):
            chunk, file = entry["data/chunk_index"], entry["data/file_index"]
            path = self.path(self.info["data_path"], chunk_index=chunk, file_index=file)
            if self._table is None or self._table[0] != path:
                self._table = path, _parquet(path)
            table = self._table[1]
            rows = np.flatnonzero(table["episode_index"].to_numpy() == entry["episode_index"])
            if not 0 < len(rows) == entry["length"] == rows[-1] - rows[0] + 1:
                raise ConfigError(
                    f"{path} has {len(rows)} rows of episode {index}, which has {entry['length']} frames: it should "
                    "have one after the other for each"
                )
            return Episode(self, entry, table.slice(rows[0], len(rows)))

    def path(self, template: str, **numbers: int | str) -> Path:
        """Return the path of a file, as a template of info.json names it. Raises ConfigError if that leaves the folder.

        Only a template's text is checked: the files of a downloaded dataset may be links to a cache elsewhere.
        """
        for _, name, width, _ in string.Formatter().parse(template):
            if name is not None and (name not in numbers or len(width or "") > WIDTH):
                raise ConfigError(f"{self.folder}: meta/info.json has the path {template!r}, which names no file")
        named = PurePath(template.format(**numbers))
        if named.is_absolute() or ".." in named.parts:
            raise ConfigError(f"{self.folder}: the dataset names the file {str(named)!r}, which is not in its folder")
        return self.folder / named

    def __iter__(self) -> Iterator["Episode"]:
        return (self.episode(index) for index in range(len(self.lengths)))

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """The `retake.json` of a shard of ours; None for a dataset of others."""
        return _json(self.folder, names.MANIFEST) if (self.folder / names.MANIFEST).exists() else None

    def spec(self) -> Spec:
        """Return its robot's Spec. In a dataset of others, action bounds are a little wider than the actions in it.

        Raises ConfigError if it has no column `action`, or no statistics of it.
        """
        with reading(self.folder):
            return self._spec() if self.manifest is None else Spec.from_dict(self.manifest.get("spec", {}))

    def _spec(self) -> Spec:
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
        action = Feature(action.shape, "float32", action.names, low - margin, high + margin, units=action.units)
        observation = {name: f for name, f in self.features.items() if name.startswith("observation.")}
        return Spec(observation, action, self.fps)

    def misfit(self, spec: Spec) -> str:
        """Return why its episodes do not fit a run with this Spec; empty if they do."""
        return names.misfit(self.described(spec), self.fps, spec)

    def described(self, spec: Spec) -> dict[str, Feature]:
        """Return what it has of the features of a run's Spec, by their names there."""
        called = {name: self.called(name, spec) for name in (*spec.observation, "action")}
        return {name: self.features[mine] for name, mine in called.items() if mine in self.features}

    def called(self, name: str, spec: Spec) -> str:
        """Return the column of a feature of a run's Spec. A shard of ours may have another name for it."""
        changed = names.column(name, spec)
        return changed if changed in self.features else name

    @property
    def cameras(self) -> list[str]:
        """The names of the features that are images."""
        return [name for name in self.features if self.info["features"][name]["dtype"] in IMAGES]

    def task(self, index: int) -> str:
        """Return the text of a task, empty if there is none with this index."""
        return self._tasks.get(index, "")

    @cached_property
    def _tasks(self) -> dict[int, str]:
        path = self.folder / "meta/tasks.parquet"
        with reading(path):
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
    """One episode of a dataset: its entry in meta/episodes, and its rows of the table (a pyarrow.Table)."""

    dataset: Dataset
    entry: Mapping[str, Any]
    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def has(self, name: str) -> bool:
        return name in self.dataset.features

    def column(self, name: str) -> Array:
        """Return a column that is no image, [T, *shape]."""
        import pyarrow as pa

        with reading(self.dataset.folder, self.where):
            values = self.rows[name].combine_chunks()
            while (extended := isinstance(values, pa.ExtensionArray)) or pa.types.is_nested(values.type):
                values = values.storage if extended else values.flatten()
            array = values.to_numpy(zero_copy_only=False)
            if values.null_count or array.dtype.kind not in "biuf":
                raise ValueError(f"{name} has rows that are no number")
            return array.reshape(len(self), *self.dataset.features[name].shape)

    def flag(self, name: str) -> Array:
        """Return a column as bool [T]; all False if there is none."""
        return self.column(name).reshape(-1).astype(bool) if self.has(name) else np.zeros(len(self), bool)

    def images(self, name: str) -> Iterator[Array]:
        """Yield the T images of a camera, uint8 [H, W, C]. ConfigError: some are missing, or of another size."""
        feature = self.dataset.info["features"][name]
        shape = self.dataset.features[name].shape
        with reading(self.dataset.folder, self.where):
            frames = self._video(name) if feature["dtype"] == "video" else self._stills(name, shape)
            for image in frames:
                if image.shape != shape:
                    raise ConfigError(f"{self.where}: an image of {name} is {list(image.shape)}, not {list(shape)}")
                yield image

    @property
    def where(self) -> str:
        """Which episode of which dataset this is, for messages."""
        return f"episode {self.entry['episode_index']} of {self.dataset.folder}"

    @property
    def task(self) -> str:
        with reading(self.dataset.folder, self.where):
            return cleaned(self.dataset.task(int(self.rows["task_index"][0].as_py())))[:MAX_NAME]

    @property
    def terminated(self) -> bool:
        """Whether its columns say that the task ended it, not a cut."""
        if self.has(names.TERMINATED):
            return bool(self.flag(names.TERMINATED)[-1])
        return bool(self.flag(names.DONE)[-1] or self.flag(names.SUCCESS)[-1]) and not self.flag(names.TRUNCATED)[-1]

    @property
    def success(self) -> bool | None:
        """Whether it succeeded: any of its steps did. None if no column says so."""
        if self.has(names.OUTCOME):
            return {0: False, 1: True}.get(self.column(names.OUTCOME).flat[-1])
        return bool(self.flag(names.SUCCESS).any()) if self.has(names.SUCCESS) else None

    def segments(self, spec: Spec, id: str, stamp: Stamp) -> Iterator[Segment]:
        """Yield its steps as segments for a store of this Spec, which it must fit (see Dataset.misfit).

        id: of the episode there. stamp: of its segments.
        Raises ConfigError for an action or reward that is not finite, and for missing images.
        """
        count, length, task, ends = segment_rows(spec), len(self), self.task, self.terminated
        cameras = {name: self.images(name) for name in self.dataset.cameras if name in spec.observation}
        vectors = {
            name: self.column(self.dataset.called(name, spec)).reshape(length, *feature.shape)
            for name, feature in spec.observation.items() if name not in cameras
        }  # fmt: skip
        extras = {name: self._extra(self.dataset.called(name, spec), feature) for name, feature in spec.extras.items()}
        action, columns = self.column("action"), self._columns()
        if not (np.isfinite(action).all() and np.isfinite(columns["reward"]).all()):
            raise ConfigError(
                f"{self.where} has an action or a reward that is no number: find it with tools/data.py check"
            )
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
        """Return the columns of every row, [T]; zeros for one that the dataset lacks, but for the time."""
        called = names.STORED if self.has(names.TIME) else {**names.STORED, "time": "timestamp"}
        there = {name for name in COLUMNS if name == "time" or self.has(called[name])}
        found = {name: self.column(called[name]) if name in there else np.zeros(len(self)) for name in COLUMNS}
        return {name: found[name].reshape(-1).astype(dtype) for name, dtype in COLUMNS.items()}

    def _extra(self, name: str, feature: Feature) -> Array:
        """Return one of Spec.extras, [T, *shape]; zeros if the dataset has no such column."""
        shape = (len(self), *feature.shape)
        if not self.has(name) or math.prod(self.dataset.features[name].shape) != math.prod(feature.shape):
            return np.zeros(shape, feature.dtype)
        return self.column(name).reshape(shape).astype(feature.dtype)

    def _stills(self, name: str, shape: tuple[int, ...]) -> Iterator[Array]:
        from PIL import Image

        for cell in self.rows[name]:
            still = cell.as_py()
            source = io.BytesIO(still["bytes"]) if still["bytes"] else self.dataset.path(still["path"])
            with Image.open(source) as image:
                if image.size != shape[1::-1]:  # before it is unpacked: it may say that it is a gigabyte
                    raise ConfigError(f"{self.where}: an image of {name} is {[*image.size[::-1], 3]}, not {[*shape]}")
                yield np.asarray(image.convert("RGB"))

    def video(self, name: str) -> tuple[Path, float]:
        """Return the file that holds its video of a camera, and at which second of it this episode begins."""
        chunk, file, begin = (
            self.entry[f"videos/{name}/{what}"] for what in ("chunk_index", "file_index", "from_timestamp")
        )
        template = self.dataset.info["video_path"]
        return self.dataset.path(template, video_key=name, chunk_index=chunk, file_index=file), begin

    def _video(self, name: str) -> Iterator[Array]:
        """Decode the episode's frames in order, from its first one on."""
        import av
        from av.error import FFmpegError

        path, begin = self.video(name)
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
    """Return the Feature of one column of info.json; None for one that a store cannot hold, such as texts."""
    shape, names = tuple(entry["shape"]), entry.get("names")
    if isinstance(names, Mapping):  # older ones: {"motors": [...]}
        names = next(iter(names.values()), None)
    names = tuple(map(str, names)) if isinstance(names, Sequence) and not isinstance(names, str) else ()
    if entry["dtype"] in IMAGES:
        first = names[0] if names else ""
        return Feature((*shape[1:], shape[0]) if first.startswith("channel") else shape, "uint8")
    if entry["dtype"] not in DTYPES:
        return None
    with suppress(ConfigError, TypeError):  # others may mean something else by `units`: then it is unsaid
        return Feature(shape, entry["dtype"], names, units=entry.get("units", ()))
    return Feature(shape, entry["dtype"], names)


@contextmanager
def reading(path: Path, part: str = "") -> Iterator[None]:
    """Turn whatever a damaged file sets off into a ConfigError that names `path`, or the `part` of it that is read.

    No list of such errors would be whole: they come from readers of JSON, Parquet, HDF5, images and videos.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RetakeError) and str(path) in str(error):
            raise
        said = " ".join(str(error).split())
        raise ConfigError(f"{part or path} cannot be read ({type(error).__name__}): {said}") from error


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return found
    except (OSError, RecursionError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} holds no LeRobot dataset: {name} cannot be read ({reason})") from None


def _parquet(path: Path, without: str | None = None) -> Any:
    """Read a table, without the columns whose names begin with `without`."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = [name for name in parquet.read_schema(path).names if not (without and name.startswith(without))]
        return parquet.ParquetFile(path).read(columns=names)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Was its recording finished (finalize)?") from None
