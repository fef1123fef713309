"""Reads robomimic's HDF5 files as the episodes of a run, and writes a run's episodes as such a file. No torch.

A file holds `data/demo_<number>`: `actions` [T, A], `rewards`, `dones` [T], and `obs` and `next_obs` with the same keys
[T, ...]. An image's key ends with `_image`; it is `observation.images.<name>` here, any other key `observation.<key>`.
`mask/<key>` names a part of the demonstrations.

Files differ in what `dones` means (the task's end, the end of the recording, or both). So a demonstration counts as
terminated if its last step is done and has a reward. Files that we write say it themselves, in attributes that
robomimic ignores. Without `next_obs` there is no observation after the last action: see reader.py for what follows.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.episode import COLUMNS, Segment, Stamp
from serl_client.errors import ConfigError
from serl_client.names import MAX_NAME, cleaned
from serl_client.recorder import segment_rows
from serl_client.spec import DTYPES, Array, Feature, Spec

from serl_launcher.datasets.episodes import Gone, Rows, open_run
from serl_launcher.datasets.names import is_image, misfit
from serl_launcher.datasets.tables import reading
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.files import replaced

SUFFIXES = (".hdf5", ".h5")
DEMO = re.compile(r"demo_(\d+)")
OBSERVATION, IMAGES, IMAGE = "observation.", "observation.images.", "_image"
RATIO = 2000  # bytes that one byte of a file unpacks to, at most (gzip: 1032)
GYM = 2  # robomimic's number of an environment that is not robosuite's
LOOK_S = 30  # of computing, and one more for each 4 MB; 42,000 arrays in 235 MB take 5 s
LOOK = """
import resource
import sys

import h5py

seconds, most = int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_CPU)[1]
resource.setrlimit(resource.RLIMIT_CPU, (seconds if most == resource.RLIM_INFINITY else min(seconds, most), most))


def look(name, node):
    dict(node.attrs)
    if isinstance(node, h5py.Dataset):
        if node.chunks:
            node.id.get_num_chunks()
        if node.dtype.hasobject and node.size < 1_000_000:  # texts, which lie elsewhere in the file
            node[()]


with h5py.File(sys.argv[1], "r") as file:
    file.visititems(look)
"""


def is_file(name: str) -> bool:
    """Return whether a dataset of this name is a robomimic file, with or without `:<mask>`."""
    return Path(name.partition(":")[0]).suffix in SUFFIXES


class RobomimicFile:
    """Opens a file, `path` or `path:mask`, as the importer needs it; see reader.Dataset.

    features: {name: Feature} of observations and action. fps: steps per second; None: the file does not say it.
    lengths: steps of each demonstration, by its number. Raises ConfigError for a file that is damaged, of another kind,
    or without observations, for an unknown mask, and without h5py.
    """

    def __init__(self, name: str) -> None:
        path, _, mask = name.partition(":")
        self.folder, self.name = Path(path), Path(path).stem + f"-{mask}" * bool(mask)
        _check_ends(self.folder)
        with _reading(self.folder) as file:
            _check_own(file, self.folder)
            data = _group(file, "data", self.folder)
            self._demos = _chosen(file, mask, self.folder, [demo for demo in data if DEMO.fullmatch(demo)])
            self.env_args = _arguments(data, self.folder)
            self.lengths = [_length(data[demo], f"{self.folder}: {demo}") for demo in self._demos]
            first = data[self._demos[0]]
            for demo in self._demos:
                if _shapes(data[demo]) != _shapes(first):
                    raise ConfigError(f"{self.folder}: {demo} has other keys or shapes than {self._demos[0]}")
            self.features = {_feature_name(key, array): _feature(array) for key, array in first["obs"].items()}
            self.features["action"] = Feature(first["actions"].shape[1:])
            self.features = {name: feature for name, feature in self.features.items() if feature.dtype in DTYPES}
            rate = self.env_args.get("env_kwargs", {}).get("control_freq")
            self.fps = float(rate) if isinstance(rate, int | float) and rate > 0 else None

    def spec(self) -> Spec:
        """Return the robot's Spec. The action's bounds are -1 and 1, or wider if actions in the file are."""
        if self.fps is None:
            raise ConfigError(f"{self.folder} does not say its control_freq: start an actor of its robot first")
        with _reading(self.folder) as file:
            spans = [np.stack([a.min(0), a.max(0)]) for a in (file["data"][demo]["actions"][:] for demo in self._demos)]
            low, high = np.min(spans, 0)[0], np.max(spans, 0)[1]
            action = Feature(self.features["action"].shape, low=np.minimum(low, -1), high=np.maximum(high, 1))
            return Spec({n: f for n, f in self.features.items() if n != "action"}, action, self.fps)

    def misfit(self, spec: Spec) -> str:
        """Return why its demonstrations do not fit a run with this Spec; empty if they do."""
        return misfit(self.described(spec), self.fps or spec.fps, spec)

    def described(self, spec: Spec) -> dict[str, Feature]:
        """Return its features, which have the names of the run's."""
        return self.features

    def episode(self, index: int) -> "Demonstration":
        return Demonstration(self, self._demos[index], self.lengths[index])


class Demonstration:
    """Reads one demonstration of a file, its observations not before `segments` yields them."""

    def __init__(self, file: RobomimicFile, demo: str, length: int) -> None:
        self._file, self._demo, self._length = file, demo, length
        self.where = f"{demo} of {file.folder}"
        with _reading(file.folder) as opened_file:
            group = opened_file["data"][demo]
            self.action = group["actions"][:]
            self.reward, self._done = (_column(group, name, length) for name in ("rewards", "dones"))
            self.intervened = _column(group, "intervened", length).astype(bool)
            self._has_rewards, self._has_next = "rewards" in group, "next_obs" in group
            self._said = dict(group.attrs)
            self.success, self.terminated = self._success(), self._terminated()
            if not (np.isfinite(self.action).all() and np.isfinite(self.reward).all()):
                raise ConfigError(f"{self.where} has an action or a reward that is no number")

    def _success(self) -> bool | None:
        """Whether it succeeded: any of its steps has a reward. None where rewards are shaped, or there are none."""
        if "success" in self._said:
            return {0: False, 1: True}.get(int(self._said["success"]))
        shaped = self._file.env_args.get("env_kwargs", {}).get("reward_shaping")
        return None if shaped or not self._has_rewards else bool((self.reward > 0).any())

    def _terminated(self) -> bool:
        """Whether the task ended it, not a limit of time."""
        if "terminated" in self._said:
            return bool(self._said["terminated"])
        return bool(self._done[-1] and (self.reward[-1] > 0 or not self._has_rewards))

    def segments(self, spec: Spec, id: str, stamp: Stamp) -> Iterator[Segment]:
        """Yield its steps as segments for a store of this Spec, which it must fit (see RobomimicFile.misfit).

        id: of the episode there. stamp: of its segments. Raises ConfigError for rows that are missing or damaged.
        """
        count, length, terminated = segment_rows(spec), self._length, self.terminated
        extras = {name: np.zeros((length, *f.shape), f.dtype) for name, f in spec.extras.items()}
        columns = {name: np.zeros(length, dtype) for name, dtype in COLUMNS.items()}
        columns |= {"reward": self.reward.astype(np.float32), "time": np.arange(length) / spec.fps}
        columns |= {"intervened": self.intervened}
        with _reading(self._file.folder) as file:
            group = file["data"][self._demo]
            for start in range(0, length, count):
                stop = min(start + count, length)
                ends = stop == length and (terminated or self._has_next)
                seen = {n: self._seen(group, n, f, slice(start, stop), ends) for n, f in spec.observation.items()}
                yield Segment(
                    id, start, cleaned(str(self._said.get("task", "")))[:MAX_NAME], stamp, seen,
                    np.array(self.action[start:stop], spec.action.dtype),
                    **{name: column[start:stop].copy() for name, column in columns.items()},
                    terminated=ends and terminated, truncated=ends and not terminated,
                    extras={name: array[start:stop].copy() for name, array in extras.items()},
                )  # fmt: skip

    def _seen(self, group: Any, name: str, feature: Feature, rows: slice, ends: bool) -> Array:
        """Return an observation's rows, and the one after them if they end the episode."""
        key = _key(name)
        array = group["obs"][key][rows]
        if ends:
            last = group["next_obs"][key][self._length - 1] if self._has_next else array[-1]
            array = np.concatenate([array, last[None]])
        return np.array(array, feature.dtype).reshape(-1, *feature.shape)


def write(run_dir: Path, out: Path, source: str | None, like: Path | None) -> tuple[int, int]:
    """Write the closed episodes of a run that nobody discarded as a robomimic file; return (demonstrations, steps).

    source: of this one alone; None: all. like: a file whose env_args are kept; None: they name the rate alone.
    `mask/successful` names those that succeeded. Raises ConfigError if there are no such episodes, or `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already: name a new file")
    if not (run_dir / "store/index.sqlite").exists():
        raise ConfigError(f"there is no store in {run_dir}: name the folder of a run")
    spec, readers, infos = open_run(run_dir)
    if source is not None and source not in readers:
        raise ConfigError(f"{run_dir} has no source {source}; there are {', '.join(readers)}")
    wanted = [i for i in infos if i.closed and not i.discard and i.steps and i.source in readers]
    wanted = [info for info in wanted if source in (None, info.source)]
    arguments = RobomimicFile(str(like)).env_args if like else _plain_arguments(run_dir, spec)
    successful, lengths = list[str](), list[int]()
    with replaced(out) as aside, closing(_h5py().File(aside, "w")) as file:
        data = file.create_group("data")
        for info in wanted:
            try:
                rows = readers[info.source].rows(info)
            except Gone:  # the learner is running
                continue
            _add(data.create_group(f"demo_{len(lengths)}"), info, rows, spec)
            successful += [f"demo_{len(lengths)}"] * bool(info.success)
            lengths.append(info.steps)
        if not lengths:
            raise ConfigError(f"{run_dir} holds no closed episodes to write")
        data.attrs["total"], data.attrs["env_args"] = sum(lengths), json.dumps(arguments)
        file.create_dataset("mask/successful", data=np.array(successful, "S"))
    return len(lengths), sum(lengths)


def _add(group: Any, info: EpisodeInfo, rows: Rows, spec: Spec) -> None:
    """Write one episode into its group. Numbers become float64, as robomimic has them."""
    length = info.steps
    group.attrs["num_samples"], group.attrs["task"] = length, info.task
    group.attrs["terminated"] = info.terminated
    group.attrs["success"] = -1 if info.success is None else int(info.success)
    group["actions"], group["rewards"] = rows["action"].astype(np.float64), rows["reward"].astype(np.float64)
    group["dones"], group["intervened"] = rows["terminated"].astype(np.int64), rows["intervened"].astype(np.int64)
    for name, feature in spec.observation.items():
        array = np.asarray(rows[name])
        array = array.astype(np.float64) if array.dtype.kind == "f" else array
        packed: dict[str, Any] = {"compression": "gzip"} if is_image(feature) else {}
        group.create_dataset(f"obs/{_key(name)}", data=array[:length], **packed)
        if info.final:
            group.create_dataset(f"next_obs/{_key(name)}", data=array[1:], **packed)


def _plain_arguments(run_dir: Path, spec: Spec) -> dict[str, Any]:
    return {"env_name": run_dir.resolve().name, "type": GYM, "env_kwargs": {"control_freq": spec.fps}}


def _feature_name(key: str, array: Any) -> str:
    is_camera = key.endswith(IMAGE) and array.dtype == np.uint8 and array.ndim == 4
    return f"{IMAGES}{key.removesuffix(IMAGE)}" if is_camera else f"{OBSERVATION}{key}"


def _key(name: str) -> str:
    """Return the key of an observation: `_feature_name` reversed."""
    if name.startswith(IMAGES):
        return name.removeprefix(IMAGES) + IMAGE
    return name.removeprefix(OBSERVATION)


def _feature(array: Any) -> Feature:
    return Feature(array.shape[1:], "float32" if array.dtype == np.float64 else array.dtype.name)


def _h5py() -> Any:
    try:
        import h5py
    except ModuleNotFoundError:
        raise ConfigError("a robomimic file needs h5py: run `. examples/install.sh --extra h5py` here") from None
    return h5py


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Open a file to read it. Raises ConfigError if that fails, or if what is read then is damaged or missing."""
    h5py = _h5py()
    with reading(path, f"the robomimic file {path}"), h5py.File(path, "r") as file:
        yield file


def _check_ends(path: Path) -> None:
    """Raise ConfigError if libhdf5 crashes, or never returns, on a file: a process of its own looks first.

    Where Python's error is what such a file sets off, the process that reads it says so.
    """
    _h5py()
    with reading(path, f"the robomimic file {path}"):
        seconds = LOOK_S + (path.stat().st_size >> 22)
    ended = subprocess.run([sys.executable, "-Ic", LOOK, path, str(seconds)], capture_output=True, check=False)
    if ended.returncode < 0:
        ended_by = signal.Signals(-ended.returncode).name  # SIGXCPU: it did not come back
        raise ConfigError(f"the robomimic file {path} cannot be read: who looked at it was ended by {ended_by}")


def _check_own(file: Any, path: Path) -> None:
    """Raise ConfigError unless the file holds all of its data itself, and not much more than its own size."""
    h5py, room = _h5py(), RATIO * path.stat().st_size

    def fault(name: str, link: Any) -> str | None:
        nonlocal room
        if isinstance(link, h5py.ExternalLink):
            return f"{name} lies in another file: copy it into this one"
        node: Any = file.get(name) if isinstance(link, h5py.HardLink) else None
        if isinstance(node, h5py.Dataset):
            if node.is_virtual or node.external:
                return f"the rows of {name} lie in other files: copy them into this one"
            if (room := room - node.nbytes) < 0:
                return f"{name} has the shape {list(node.shape)}, and no file of this size holds that"
        return None

    if found := file.visititems_links(fault):
        raise ConfigError(f"{path}: {found}")


def _group(file: Any, name: str, path: Path) -> Any:
    found = file.get(name)
    if not isinstance(found, _h5py().Group):
        raise ConfigError(f"{path} is no robomimic file: it has no group {name!r}")
    return found


def _chosen(file: Any, mask: str, path: Path, demos: Sequence[str]) -> list[str]:
    """Return the demonstrations of a mask, or all, in the order of their numbers. Raises ConfigError for none."""
    if mask:
        masks = dict(file["mask"]) if "mask" in file else {}
        if mask not in masks:
            raise ConfigError(f"{path} has no mask {mask!r}; there are {', '.join(masks) or 'none'}")
        named = {name.decode() for name in np.asarray(masks[mask][:], "S").tolist()}
        if lost := named - set(demos):
            raise ConfigError(f"{path}: mask {mask} names {min(lost)}, which is not there")
        demos = sorted(named)
    if not demos:
        raise ConfigError(f"{path} holds no demonstrations" + f" of mask {mask!r}" * bool(mask))
    return sorted(demos, key=lambda demo: int(demo.removeprefix("demo_")))


def _arguments(data: Any, path: Path) -> dict[str, Any]:
    """Return the env_args of a file; empty if it has none."""
    try:
        found = json.loads(data.attrs.get("env_args", "{}"))
        if isinstance(found, dict) and isinstance(found.get("env_kwargs", {}), dict):
            return found
    except (ValueError, TypeError):
        pass
    raise ConfigError(f"{path}: env_args is no JSON object with env_kwargs")


def _length(demo: Any, where: str) -> int:
    """Return the steps of a demonstration. Raises ConfigError unless each of its arrays has a row for each."""
    if "obs" not in demo:
        raise ConfigError(f"{where} has no obs, only states: make them with robomimic's dataset_states_to_obs.py")
    if "actions" not in demo or demo["actions"].ndim != 2 or not len(demo["actions"]):
        raise ConfigError(f"{where} has no actions [T, A]")
    length = len(demo["actions"])
    columns = {name: demo[name] for name in ("rewards", "dones", "intervened") if name in demo}
    seen = {f"{g}/{key}": array for g in ("obs", "next_obs") if g in demo for key, array in demo[g].items()}
    for name, array in {**columns, **seen}.items():
        if not array.shape or len(array) != length:
            raise ConfigError(f"{where} has {length} actions, and {name} has the shape {list(array.shape)}")
    if demo.attrs.get("num_samples", length) != length:
        raise ConfigError(f"{where} has {length} actions, and says that it has {demo.attrs['num_samples']}")
    return length


def _shapes(demo: Any) -> dict[str, tuple[int, ...]]:
    return {key: array.shape[1:] for key, array in demo["obs"].items()} | {"action": demo["actions"].shape[1:]}


def _column(group: Any, name: str, length: int) -> Array:
    return np.asarray(group[name][:], np.float64).reshape(length) if name in group else np.zeros(length)
