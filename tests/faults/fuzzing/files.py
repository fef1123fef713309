"""Files and folders that a disk, a tool or a stranger has damaged: their reader names them in one sentence, or reads.

Each kind is written once, whole. A case replaces some of its files: their bytes are spoiled, or the trees, tables and
groups that they hold.
"""

import functools
import io
import json
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import av
import h5py
import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
from PIL import Image
from pyarrow import parquet
from serl_client import Outcome, Stamp
from serl_client import messages as m
from serl_client.errors import ConfigError, MessageError, RetakeError
from serl_client.keys import ROLES
from serl_client.outbox import Outbox

from serl_launcher import config
from serl_launcher.acting.host import PolicyHost
from serl_launcher.datasets.reader import Dataset
from serl_launcher.datasets.robomimic import RobomimicFile
from serl_launcher.replay.verdicts import WHERE, rewards_of_run
from serl_launcher.service.access import AllowList
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.metrics import MetricsLog, read
from tools import keys

from . import damage
from .mutations import EPOCH, NASTY, SPEC, segment, spoiled_bytes, spoiled_tree
from .targets import Target

STEPS, EPISODES, FPS = 4, 3, 10
STAMP = Stamp(1, "dataset", 0)
CHANGES = {"plan.phases"}  # of a config, after a checkpoint


def target(share: float, write: Callable[[Path], None], read: Callable[[Path], str]) -> Target:
    """Files that `write` leaves in a folder, for `read`, which raises ConfigError alone, and names the folder then."""

    @functools.cache
    def whole() -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.name != "lock"]
            found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
            read(Path(folder))  # it is whole
            return found

    def make(chance: Random, number: int) -> dict[str, bytes | None]:
        name = chance.choice(list(whole()))
        if chance.random() < 0.1:
            return {name: None}
        if chance.random() < 0.1:  # one that stands where none of ours has this name
            return {str(Path(name).with_name(f"x{Path(name).suffix}")): whole()[name]}
        return {name: spoiled(chance, Path(name).suffix, whole()[name])}

    def run(case: dict[str, bytes | None], scratch: Path) -> str:
        folder = scratch / "files"
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in {**whole(), **case}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if data is not None:
                (folder / name).write_bytes(data)
                (folder / name).chmod(0o600)
        try:
            return read(folder)
        except RetakeError as error:
            if not any(name in str(error) for name in (str(folder), *(Path(name).name for name in case))):
                raise AssertionError(f"which file is it? {error}") from error
            raise

    return Target(share, make, run, (ConfigError,), writes=True)


def spoiled(chance: Random, kind: str, data: bytes) -> bytes:
    """The bytes of a file of this kind, or what they stand for, with something else somewhere."""
    if kind in FORMS and chance.random() < 0.7:
        form = chance.choice(list(FORMS[kind]))
        try:
            made = FORMS[kind][form](chance, data)
        except Exception as error:  # no such file can be written
            formed[f"{kind}, {form}"][type(error).__name__] += 1
        else:
            formed[f"{kind}, {form}"][WRITTEN] += 1
            return made
    return spoiled_bytes(chance, data)


def _json(chance: Random, data: bytes) -> bytes:
    lines = data.decode().splitlines() if data.startswith(b'{"kind"') else [data.decode()]
    at = chance.randrange(len(lines))
    lines[at] = json.dumps(spoiled_tree(chance, json.loads(lines[at])), default=str)
    return "\n".join(lines).encode()


def _yaml(chance: Random, data: bytes) -> bytes:
    tree = config.OmegaConf.to_container(config.OmegaConf.create(data.decode()))
    return json.dumps(spoiled_tree(chance, tree), default=str).encode()


def _values(chance: Random, data: bytes) -> bytes:
    return _written(spoiled_tree(chance, parquet.read_table(io.BytesIO(data)).to_pylist()))


def _column(chance: Random, data: bytes) -> bytes:
    """One whose values are all of another kind."""
    rows = parquet.read_table(io.BytesIO(data)).to_pylist()
    name, value = chance.choice(sorted(rows[0])), chance.choice(NASTY)
    return _written([{**row, name: value} for row in rows])


def _written(rows: Any) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def _groups(way: Callable[[Random, h5py.File, str], object], chance: Random, data: bytes) -> bytes:
    memory = io.BytesIO(data)
    with h5py.File(memory, "r+") as file:
        way(chance, file, chance.choice(_names(file)))
    return memory.getvalue()


def _names(file: h5py.File) -> list[str]:
    names = list[str]()
    file.visit(names.append)
    return names


def _attribute(chance: Random, file: h5py.File, name: str) -> None:
    file[name].attrs[chance.choice(["num_samples", "success", "env_args", "task"])] = chance.choice(NASTY)


def _instead(make: Callable[[Random, h5py.File], Any]) -> Callable[[Random, h5py.File, str], None]:
    """Something else where a group or an array was."""

    def put(chance: Random, file: h5py.File, name: str) -> None:
        made = make(chance, file)
        del file[name]
        file[name] = made

    return put


def _huge(chance: Random, file: h5py.File, name: str) -> None:
    del file[name]
    file.create_dataset(name, chance.choice([(2**40, 2), (STEPS, 2**40), (2**30,)]), "f8", chunks=True)


KINDS = ("f8", "f4", "i8", "u1", "S3", "V4", "c16", "?", "O")
EMPTY = ((), (0,), (STEPS,), (STEPS, 2), (STEPS, 0))
GROUPS: dict[str, Callable[[Random, h5py.File, str], object]] = {
    "an attribute": _attribute, "gone": lambda chance, file, name: file.pop(name),
    "a value": _instead(lambda chance, file: chance.choice(NASTY)),
    "zeros": _instead(lambda chance, file: np.zeros(chance.choice(EMPTY), chance.choice(KINDS))),
    "a group": lambda chance, file, name: (file.pop(name), file.create_group(name)),
    "a link outside": _instead(
        lambda chance, file: h5py.ExternalLink(chance.choice(["/etc/passwd", "whole.hdf5"]), "/data")
    ),
    "a link": _instead(lambda chance, file: h5py.SoftLink(chance.choice(_names(file)))), "a huge one": _huge,
}  # fmt: skip
FORMS: dict[str, dict[str, Callable[[Random, bytes], bytes]]] = {
    ".json": {"values": _json}, ".jsonl": {"values": _json}, ".key": {"values": _json}, ".yaml": {"values": _yaml},
    ".parquet": {"values": _values, "a column": _column},
    ".hdf5": {name: functools.partial(_groups, way) for name, way in GROUPS.items()},
}  # fmt: skip
WRITTEN = "written"
formed: defaultdict[str, Counter[str]] = defaultdict(Counter)  # {form: {WRITTEN, or the error instead: how often}}


# -- datasets of others
def write_lerobot(folder: Path) -> None:
    """As LeRobot writes it, with a camera whose images lie in the table and one whose images are a video."""
    count, still, image = EPISODES * STEPS, io.BytesIO(), np.zeros((16, 16, 3), np.uint8)
    Image.fromarray(image).save(still, "PNG")
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": {"motors": ["a", "b"]}},
        "observation.images.still": {"dtype": "image", "shape": [16, 16, 3], "names": ["height", "width", "channels"]},
        "observation.images.film": {"dtype": "video", "shape": [16, 16, 3], "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    }  # fmt: skip
    info = {
        "codebase_version": "v3.0", "fps": FPS, "total_frames": count, "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }  # fmt: skip
    rows = [
        {
            "observation.state": [0.5, 1.0], "observation.images.still": {"bytes": still.getvalue(), "path": None},
            "action": [0.1, -0.1], "next.reward": 0.0, "next.done": i % STEPS == STEPS - 1, "timestamp": i / FPS,
            "task_index": 0, "episode_index": i // STEPS, "frame_index": i % STEPS, "index": i,
        }
        for i in range(count)
    ]  # fmt: skip
    film = {f"videos/observation.images.film/{what}": 0 for what in ("chunk_index", "file_index")}
    episodes = [
        {"episode_index": i, "length": STEPS, "data/chunk_index": 0, "data/file_index": 0, **film,
         "videos/observation.images.film/from_timestamp": i * STEPS / FPS}
        for i in range(EPISODES)
    ]  # fmt: skip
    tables = {
        "data/chunk-000/file-000": rows, "meta/episodes/chunk-000/file-000": episodes,
        "meta/tasks": [{"task_index": 0, "task": "reach"}],
    }  # fmt: skip
    for name, table in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/stats.json").write_text(json.dumps({"action": {"min": [-1, -1], "max": [1, 1]}}))
    path = folder / "videos/observation.images.film/chunk-000/file-000.mp4"
    path.parent.mkdir(parents=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", FPS, width=16, height=16)
        for _ in range(count):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
        container.mux(stream.encode())


def _take(dataset: Dataset | RobomimicFile) -> str:
    spec = dataset.spec()
    if dataset.misfit(spec):
        return "of another robot"
    for index, length in enumerate(dataset.lengths):
        episode = dataset.episode(index)
        assert episode.success in (None, False, True)
        segments = list(episode.segments(spec, "e", STAMP))
        assert sum(map(len, segments)) == length
        for each in segments:
            try:
                each.check(spec)
            except ValueError:  # the importer names the episode
                return "values that cannot be"
    return "taken"


def _write_robomimic(folder: Path) -> None:
    with h5py.File(folder / "low_dim.hdf5", "w") as file:
        for i in range(EPISODES):
            demo = file.create_group(f"data/demo_{i}")
            demo["actions"], demo["rewards"], demo["dones"] = np.zeros((STEPS, 2)), np.ones(STEPS), np.ones(STEPS)
            for group in ("obs", "next_obs"):
                demo[f"{group}/state"] = np.zeros((STEPS, 3))
                demo.create_dataset(f"{group}/eye_image", data=np.zeros((STEPS, 4, 4, 3), "u1"), compression="gzip")
            demo.attrs["num_samples"] = STEPS
        file["data"].attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": 20}})
        file["mask/all"] = np.array([b"demo_%d" % i for i in range(EPISODES)])


def _read_robomimic(folder: Path) -> str:
    return _take(RobomimicFile(f"{folder / 'low_dim.hdf5'}:all"))


# -- an actor's
def _write_outbox(folder: Path) -> None:
    box = Outbox(folder, 1 << 20)
    box.bind("r")
    for seq in range(9):
        record = Outcome(f"e{seq // 3}", True) if seq % 3 == 2 else segment(seq % 3 * 2, episode=f"e{seq // 3}")
        assert box.append(EPOCH, seq, m.encode_record(seq, record))
    box.close()


def _read_outbox(folder: Path) -> str:
    box = Outbox(folder, 1 << 20)
    try:
        for session, (seq, end) in box.sessions.items():
            while seq < end:
                after, data = box.read(session, seq, 1 << 20, alone=True)
                try:
                    assert [number for number, _ in m.records(*data)] == list(range(seq, after))
                    seq = after
                except MessageError:  # so says the learner, once
                    box.recheck(session, after)
                    again = box.read(session, seq, 1 << 20, alone=True)[1]
                    assert [number for number, _ in m.records(*again)] == list(range(seq, after))
                    seq = after
            box.acknowledge(session, end)
        return "sent"
    finally:
        box.close()


# -- a run's
def _checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder, spec=SPEC, config={"algo": {"discount": 0.9}}, changeable=CHANGES)


def _write_checkpoints(folder: Path) -> None:
    for value in range(2):
        state = {"w": torch.full((3,), float(value)), "n": [1, "a"]}
        _checkpoints(folder).stage(value + 1, state, pinned="reach" * value)()


def _read_checkpoints(folder: Path) -> str:
    checkpoints = _checkpoints(folder)
    state = checkpoints.load()
    assert state is not None
    assert state["w"].tolist() in ([0.0] * 3, [1.0] * 3)
    assert state["n"] == [1, "a"]
    checkpoints.stage(3, state)()
    return "whole" if state["w"][0] else "the one before"


def _write_config(folder: Path) -> None:
    made = {
        "run_dir": "runs/a", "learner": True, "remembered": ["algo=sac"],
        "task": {"_target_": "robot_infra.robots.wall.Wall", "verdict": {"success": 1.0, "failure": 0.0}},
    }  # fmt: skip
    config.OmegaConf.save(config.OmegaConf.create(made), folder / "config.yaml")


def _read_config(folder: Path) -> str:
    config.saved(folder)
    try:
        rewards_of_run(folder)
    except ConfigError as error:
        if WHERE not in str(error):  # a setting is named as one of the command line is
            raise
    return "read"


def _write_keys(folder: Path) -> None:
    with keys.locked(folder, is_new=True):
        keys.make(folder, "arm", "actor")


def _read_keys(folder: Path) -> str:
    allowed = AllowList(folder)
    owners = [allowed.find(entry["public"]) for entry in allowed.entries()]
    shown = [allowed.bearer(allowed.api_key(owner.name)) for owner in owners if owner.role in ROLES]
    return "read" if shown else "nobody"


def _write_metrics(folder: Path) -> None:
    log = MetricsLog(folder / "metrics.jsonl")
    log.once("episode", "e0", {"return": 1.0})
    log.write("update", {"loss": 0.5, "updates": 1})


def _read_metrics(folder: Path) -> str:
    log = MetricsLog(folder / "metrics.jsonl")
    log.once("episode", "e0", {"return": 1.0})
    log.write("update", {"updates": 2})
    assert [*read(log.path)][-1]["updates"] >= 2  # more: what is damaged tells of a later one
    return "read"


def _write_weights(folder: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(4, 3), "b": torch.zeros(3)}, folder / "w.safetensors")


def _read_weights(folder: Path) -> str:
    host: Any = PolicyHost.__new__(PolicyHost)
    host._layout = {"w": torch.Size((4, 3)), "b": torch.Size((3,))}
    host._on = _Here
    try:
        host.read(folder / "w.safetensors")
    except FileNotFoundError:  # inference asks for the next one
        return "gone"
    return "read"


class _Here:
    copies = staticmethod(dict)


FILES = {
    "lerobot": target(0.002, write_lerobot, lambda folder: _take(Dataset(folder))),
    "robomimic": target(0.0004, _write_robomimic, _read_robomimic),
    "outbox": target(0.01, _write_outbox, _read_outbox),
    "checkpoints": target(0.002, _write_checkpoints, _read_checkpoints),
    "config": target(0.002, _write_config, _read_config),
    "keys": target(0.005, _write_keys, _read_keys),
    "metrics": target(0.005, _write_metrics, _read_metrics),
    "safetensors": target(0.006, _write_weights, _read_weights),
    "store": target(0.0003, damage.write, damage.read),
}
