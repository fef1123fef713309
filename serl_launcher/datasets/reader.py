"""Reads any LeRobot v3.0 dataset as the episodes of a run, from its tables and videos.

It needs only the folder: no hub, no torch. A dataset of others may lack columns:
- LeRobot has no observation after the last action. If the columns call an episode terminated, its last observation is
  repeated; no update uses that value. Any other episode counts as cut: it has no final observation, so windows that
  need one leave its last step out;
- without a column for it, the reward is 0, nobody intervened, and the outcome is unknown; but where each reward is 0
  or 1, an episode that ends with a 1 has succeeded, and any other has not.
"""

import importlib.util
import itertools
import math
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from serl_client.episode import COLUMNS, Segment, Stamp
from serl_client.errors import ConfigError
from serl_client.images import cut, cut_shape
from serl_client.names import MAX_NAME, cleaned
from serl_client.recorder import segment_rows
from serl_client.spec import Array, Feature, Spec

from serl_launcher.datasets import names, tables
from serl_launcher.datasets.lerobot_api import how_to_convert
from serl_launcher.datasets.pieces import Piece, pieces
from serl_launcher.datasets.tables import IMAGES, read_json, read_table, reading
from serl_launcher.training.plan import Change

NEEDED = ("pyarrow", "av", "PIL")
WIDENED = 0.05  # share of an action's range added on either side, because a dataset shows only what happened
WIDTH = 4  # characters that say how wide a number of a file's name is, at most
CONSTANT = 0.01  # half the range of an action that never changed, times its size if above 1


class Dataset:
    """Opens the folder of a dataset.

    change: what becomes of its rows here: names, images and rate are those after it.

    names: {column: its name here}. features: {name: Feature} of the columns that a store can hold, images as uint8
    [H, W, C]. fps: steps per second. lengths: steps of each episode; where the task changes, another one begins.
    Raises ConfigError if there is no LeRobot v3.0 dataset, or it is not whole, and for a change that cannot be.
    """

    def __init__(self, folder: Path, change: Change = Change()) -> None:  # noqa: B008 - it never changes
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise ConfigError(f"a dataset needs {', '.join(missing)}: {names.INSTALL}")
        self.folder, self.name = folder, folder.resolve().name
        self.change = change
        self._read: tuple[Any, ...] = (None, None, None)  # the file read last, its table, and the episode of each row
        with reading(folder):
            self._open()

    def _open(self) -> None:
        self.info, folder = read_json(self.folder, "meta/info.json"), self.folder
        version = str(self.info.get("codebase_version"))
        if not version.startswith("v3."):
            raise ConfigError(
                f"{folder} is of LeRobot's format {version}, v3.0 is read here: {how_to_convert(version)}"
            )
        try:
            self.recorded_fps = float(self.info["fps"])
            self.fps = self.change.fps or self.recorded_fps
            entries = dict(self.info["features"])
            made = {column: tables.feature(entry, self.change.rename) for column, entry in entries.items()}
        except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}: meta/info.json is not LeRobot's (no fps, or features): {error!r}") from None
        self.names = names.called(entries, self.change.rename, f"rename, of {folder}")
        self._entries = {self.names[column]: entry for column, entry in entries.items()}
        self._native = {self.names[name]: f for name, f in made.items() if f is not None}  # before images are cut
        self.features = {name: self._cut(name, feature) for name, feature in self._native.items()}
        names.check_cameras({*self.change.crop, *self.change.size} - {""}, self.cameras, f"crop and size, of {folder}")
        self.deltas = names.deltas(self.features.get("action"), self.change.deltas, f"deltas, of {folder}")
        self._episodes = self._read_episodes()
        frames = sum(episode["length"] for episode in self._episodes)
        if frames != self.info["total_frames"]:
            raise ConfigError(
                f"{folder} is not whole: its episodes have {frames:,} frames, meta/info.json says "
                f"{self.info['total_frames']:,}"
            )
        changing = self._changing()
        self.pieces = [
            piece for each in self._episodes for piece in self._pieces(each, each["episode_index"] in changing)
        ]
        self.lengths: list[int] = [len(piece) for piece in self.pieces]

    def _cut(self, name: str, feature: Feature) -> Feature:
        """Return what `crop` and `size` leave of a camera; another feature as it is."""
        crop, size = self.change.of(name) if name in self.cameras else (None, None)
        try:
            return Feature(cut_shape(feature.shape, crop, size), feature.dtype) if crop or size else feature
        except ValueError as error:
            raise ConfigError(f"{self.folder}, {name}: {error}") from None

    def _changing(self) -> set[int]:
        """Return the episodes within which the task changes."""
        found = set[int]()
        for episodes, tasks in self._numbers("episode_index", "task_index"):
            found.update(episodes[1:][(np.diff(episodes) == 0) & (np.diff(tasks) != 0)].tolist())
        return found

    def _pieces(self, entry: Mapping[str, Any], has_tasks: bool) -> list[Piece]:
        whole = Piece(entry, 0, entry["length"])
        if self.fps == self.recorded_fps and not has_tasks:
            return [whole]
        try:
            rows = self._rows(entry, {"episode_index", "task_index", "timestamp"}.__contains__)
        except ConfigError:  # `episode` tells of it, and the others are imported
            return [whole]
        tasks, times = (tables.numbers(rows[name], name) for name in ("task_index", "timestamp"))
        return pieces(entry, tasks, times.astype(np.float64), self.recorded_fps, self.fps)

    def episode(self, index: int) -> "Episode":
        """Read an episode, its images not yet. Raises ConfigError if rows are missing."""
        piece = self.pieces[index]
        with reading(self.folder):
            rows = self._rows(piece.entry)
            rows = rows.rename_columns([self.names.get(column, column) for column in rows.column_names])
            episode = Episode(self, piece, piece.taken(rows, self.deltas))
            if piece.fault:
                raise ConfigError(f"{episode.where}: {piece.fault}")
            return episode

    def _rows(self, entry: Mapping[str, Any], wanted: Callable[[str], bool] | None = None) -> Any:
        """Return the table of the rows of an episode, of its columns those that are `wanted`; None: all."""
        path = self._data(entry)
        if self._read[0] != (key := (path, wanted is None)):
            table = read_table(path, wanted or (lambda name: True))
            self._read = key, table, table["episode_index"].to_numpy()
        _, table, episodes = self._read
        rows = np.flatnonzero(episodes == entry["episode_index"])
        if not 0 < len(rows) == entry["length"] == rows[-1] - rows[0] + 1:
            raise ConfigError(
                f"{path} has {len(rows)} rows of episode {entry['episode_index']}, which has {entry['length']} frames: "
                "it should have one after the other for each"
            )
        return table.slice(rows[0], len(rows))

    def _data(self, entry: Mapping[str, Any]) -> Path:
        chunk, file = entry["data/chunk_index"], entry["data/file_index"]
        return self.path(self.info["data_path"], chunk_index=chunk, file_index=file)

    def _numbers(self, *columns: str) -> Iterator[list[Array]]:
        """Yield these columns of each data file, flat, but for files that cannot be read: `episode` tells of them."""
        for path in dict.fromkeys(map(self._data, self._episodes)):
            with suppress(ConfigError), reading(path):
                table = read_table(path, columns.__contains__)
                yield [tables.numbers(table[column], column) for column in columns]

    def original(self, name: str) -> str:
        """Return which column of the dataset has this name here."""
        return next(column for column, here in self.names.items() if here == name)

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
        return read_json(self.folder, names.MANIFEST) if (self.folder / names.MANIFEST).exists() else None

    def spec(self) -> Spec:
        """Return its robot's Spec. In a dataset of others, action bounds are a little wider than the actions in it.

        Raises ConfigError if it has no column `action` of numbers.
        """
        with reading(self.folder):
            changed = self.change != Change()
            return self._spec() if self.manifest is None or changed else Spec.from_dict(self.manifest.get("spec", {}))

    def _spec(self) -> Spec:
        action = self.features.get("action")
        if action is None or len(action.shape) != 1:
            raise ConfigError(f"{self.folder} has no column `action` of vectors: there is nothing to learn from it")
        found = [np.empty(0), *(array for (array,) in self._numbers(self.original("action")))]
        taken = np.concatenate(found).reshape(-1, *action.shape)
        taken = taken[np.isfinite(taken).all(1)]
        if not len(taken):
            raise ConfigError(f"{self.folder} has no action whose entries are all numbers: take another dataset")
        low, high = taken.min(0), taken.max(0)
        most = max(1.0, self.recorded_fps / self.fps)  # rows that are added up in a step
        low[self.deltas], high[self.deltas] = most * low[self.deltas].clip(max=0), most * high[self.deltas].clip(min=0)
        margin = np.where(high > low, np.maximum(WIDENED * (high - low), 1e-6), CONSTANT * np.maximum(1.0, np.abs(low)))
        action = Feature(action.shape, "float32", action.names, low - margin, high + margin, units=action.units)
        observation = {name: f for name, f in self.features.items() if name.startswith("observation.")}
        return Spec(observation, action, self.fps)

    def misfit(self, spec: Spec) -> str:
        """Return why its episodes do not fit a run with this Spec; empty if they do."""
        return names.misfit(self.described(spec), self.fps, spec)

    def described(self, spec: Spec) -> dict[str, Feature]:
        """Return what it has of the features of a run's Spec, by their names there."""
        called = {name: self.called(name, spec) for name in (*spec.observation, "action")}
        theirs = {**spec.observation, "action": spec.action}
        return {
            name: names.ordered(self.features[mine], theirs[name])
            for name, mine in called.items() if mine in self.features
        }  # fmt: skip

    def called(self, name: str, spec: Spec) -> str:
        """Return the column of a feature of a run's Spec. A shard of ours may have another name for it."""
        changed = names.column(name, spec)
        return changed if changed in self.features else name

    @property
    def cameras(self) -> list[str]:
        """The names of the features that are images."""
        return [name for name in self._native if self._entries[name]["dtype"] in IMAGES]

    def shape_of(self, camera: str) -> tuple[int, ...]:
        """Return the shape of a camera's images before they are cut."""
        return self._native[camera].shape

    @cached_property
    def is_judged(self) -> bool:
        """Whether its rewards are outcomes: each is 0 or 1, and no column says which episodes succeeded."""
        if not self.has(names.REWARD) or self.has(names.SUCCESS) or self.has(names.OUTCOME):
            return False
        rewards = [array for (array,) in self._numbers(self.original(names.REWARD))]
        return all(np.isin(array, (0, 1)).all() for array in rewards) and any(array.any() for array in rewards)

    def has(self, name: str) -> bool:
        return name in self.features

    def task(self, index: int) -> str:
        """Return the text of a task, empty if there is none with this index."""
        return self._tasks.get(index, "")

    @cached_property
    def _tasks(self) -> dict[int, str]:
        path = self.folder / "meta/tasks.parquet"
        with reading(path):
            rows = read_table(path).to_pylist() if path.exists() else []
            return {row.pop("task_index"): str(next(iter(row.values()), "")) for row in rows}

    def _read_episodes(self) -> list[dict[str, Any]]:
        paths = sorted((self.folder / "meta/episodes").glob("*/*.parquet"))
        if not paths:
            raise ConfigError(f"{self.folder} has no meta/episodes: its recording was never finished (finalize)")
        rows = [r for path in paths for r in read_table(path, lambda n: not n.startswith("stats/")).to_pylist()]
        return sorted(rows, key=lambda row: row["episode_index"])


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One episode of a dataset: which rows it has, and the table of its steps (a pyarrow.Table)."""

    dataset: Dataset
    piece: Piece
    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def entry(self) -> Mapping[str, Any]:
        """What meta/episodes says of it."""
        return self.piece.entry

    def has(self, name: str) -> bool:
        return self.dataset.has(name)

    def column(self, name: str) -> Array:
        """Return a column that is no image, [T, *shape]."""
        with reading(self.dataset.folder, self.where):
            return tables.numbers(self.rows[name], name).reshape(len(self), *self.dataset.features[name].shape)

    def flag(self, name: str) -> Array:
        """Return a column as bool [T]; all False if there is none."""
        return self.column(name).reshape(-1).astype(bool) if self.has(name) else np.zeros(len(self), bool)

    def images(self, name: str) -> Iterator[Array]:
        """Yield the T images of a camera, uint8 [H, W, C]. ConfigError: some are missing, or of another size."""
        dataset, column = self.dataset, self.dataset.original(name)
        shape, (crop, size) = dataset.shape_of(name), dataset.change.of(name)
        with reading(dataset.folder, self.where):
            if dataset.info["features"][column]["dtype"] == "video":
                found = tables.video_images(*self.video(name), dataset.recorded_fps, self.piece.shown)
            else:
                found = tables.still_images(self.rows[name], dataset.path, shape)
            for image in found:
                if image.shape != shape:
                    raise ConfigError(f"{self.where}: an image of {name} is {list(image.shape)}, not {list(shape)}")
                yield cut(image, crop, size) if crop or size else image

    def video(self, name: str) -> tuple[Path, float]:
        """Return the file that holds its video of a camera, and at which second of it this episode begins."""
        column, dataset = self.dataset.original(name), self.dataset
        chunk, file, begin = (
            self.entry[f"videos/{column}/{what}"] for what in ("chunk_index", "file_index", "from_timestamp")
        )
        path = dataset.path(dataset.info["video_path"], video_key=column, chunk_index=chunk, file_index=file)
        return path, begin + self.piece.begin / dataset.recorded_fps

    @property
    def where(self) -> str:
        """Which episode of which dataset this is, for messages."""
        piece, whole = self.piece, self.entry["length"]
        rows = f", rows {piece.begin} to {piece.end}," if piece.end - piece.begin < whole else ""
        return f"episode {self.entry['episode_index']}{rows} of {self.dataset.folder}"

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
        """Whether it succeeded: any of its steps did. None if no column says so, or another task follows."""
        if self.has(names.OUTCOME):
            return {0: False, 1: True}.get(self.column(names.OUTCOME).flat[-1])
        said = None
        if self.has(names.SUCCESS):
            said = bool(self.flag(names.SUCCESS).any())
        elif self.dataset.is_judged:
            said = bool(self.column(names.REWARD).flat[-1] > 0)
        return said if said or self.piece.is_last else None

    def segments(self, spec: Spec, id: str, stamp: Stamp) -> Iterator[Segment]:
        """Yield its steps as segments for a store of this Spec, which it must fit (see Dataset.misfit).

        id: of the episode there. stamp: of its segments.
        Raises ConfigError for an action or reward that is not finite, and for missing images.
        """
        count, length, task, ends = segment_rows(spec), len(self), self.task, self.terminated
        cameras = {name: self.images(name) for name in self.dataset.cameras if name in spec.observation}
        vectors = {
            name: self._vector(self.dataset.called(name, spec), feature)
            for name, feature in spec.observation.items() if name not in cameras
        }  # fmt: skip
        extras = {name: self._extra(self.dataset.called(name, spec), feature) for name, feature in spec.extras.items()}
        action, columns = self._vector("action", spec.action), self._columns()
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
        if (resampled := self.piece.resampled) is not None:  # steps of another rate: no chunk begins in them
            found["time"] = found["time"].reshape(-1).astype(np.float64) + resampled.late
            found |= {name: np.zeros(len(self)) for name in (names.CHUNK_START, names.CHUNK_DELAY)}
        return {name: found[name].reshape(-1).astype(dtype) for name, dtype in COLUMNS.items()}

    def _vector(self, name: str, feature: Feature) -> Array:
        """Return a column with the entries and in the shape of the run's feature, [T, *shape]."""
        values, order = self.column(name), names.order(self.dataset.features[name], feature)
        return (values if order is None else values[:, order]).reshape(len(self), *feature.shape)

    def _extra(self, name: str, feature: Feature) -> Array:
        """Return one of Spec.extras, [T, *shape]; zeros if the dataset has no such column."""
        shape = (len(self), *feature.shape)
        if not self.has(name) or math.prod(self.dataset.features[name].shape) != math.prod(feature.shape):
            return np.zeros(shape, feature.dtype)
        return self.column(name).reshape(shape).astype(feature.dtype)
