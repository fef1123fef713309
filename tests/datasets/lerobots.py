"""Datasets that LeRobot's own writer makes, and reads; and one of them as LeRobot wrote it last year."""

import json
import shutil

import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from serl_launcher.datasets import lerobot_api
from serl_launcher.datasets.priority import ordinary_priority

CAMERA = "observation.images.front"

MAKE = """
import json, os, sys
from pathlib import Path
os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

STATE, CAMERA = "observation.state", "observation.images.front"

def make(root, lengths, camera=None, flags=False, names=None, fps=10, still=1000, open=(), early=(), size=64):
    # still: the last row that is shown. open, early: episodes that have no end, or one in their midst, too
    features = {
        STATE: {"dtype": "float32", "shape": (4,), "names": names},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }
    if camera:
        features[CAMERA] = {"dtype": camera, "shape": (size, size, 3), "names": ["height", "width", "channels"]}
    if flags:
        features["next.reward"] = {"dtype": "float32", "shape": (1,), "names": None}
        features |= {f"next.{name}": {"dtype": "bool", "shape": (1,), "names": None} for name in ("done", "success")}
    data = LeRobotDataset.create("a/b", fps=fps, features=features, root=root, robot_type="so_follower")
    rng = np.random.default_rng(0)
    for episode, length in enumerate(lengths):
        for step in range(length):
            state = np.array([episode, step, rng.normal(), rng.normal()], np.float32)
            frame = {STATE: state, "action": np.clip(state[2:], -1, 1), "task": f"task {episode % 2}"}
            if camera:
                shown, frame[CAMERA] = min(step, still), np.zeros((size, size, 3), np.uint8)
                frame[CAMERA][:, :, episode % 3], frame[CAMERA][: shown + 1, :, 1] = 8 * shown % 250, 200
            if flags:
                last = step == length - 1 and episode not in open
                frame["next.reward"] = np.array([float(last)], np.float32)
                done = last or (step == 3 and episode in early)
                frame["next.done"], frame["next.success"] = np.array([done]), np.array([last and episode % 2 == 0])
            data.add_frame(frame)
        data.save_episode()
    data.finalize()

def record(root, fps, columns, lengths, robot=None, task_rows=1000):
    # columns: {name: [dtype, shape, names]}. task_rows: rows of each task
    features = {name: {"dtype": dtype, "shape": tuple(s), "names": n} for name, (dtype, s, n) in columns.items()}
    data = LeRobotDataset.create("a/b", fps=fps, features=features, root=root, robot_type=robot, use_videos=True)
    rng = np.random.default_rng(0)
    for episode, length in enumerate(lengths):
        for step in range(length):
            frame = {"task": f"task {step // task_rows}"}
            for name, (dtype, shape, _) in columns.items():
                if dtype in ("image", "video"):
                    frame[name] = np.full(shape, 8 * step, np.uint8)
                    half = [slice(None), slice(shape[1] // 2)] if shape[0] == 3 else [slice(shape[0] // 2)]
                    frame[name][tuple(half)] = 60 + 9 * step + episode
                elif dtype == "string":
                    frame[name] = f"row {step}"
                elif name in ("next.reward", "next.done"):  # of each other episode, and of its last row
                    frame[name] = np.array([step == length - 1 and (dtype == "bool" or episode % 2 == 0)], dtype)
                else:
                    frame[name] = (rng.random(shape) * (2 if dtype == "bool" else 100)).astype(dtype)
            data.add_frame(frame)
        data.save_episode()
    data.finalize()

def replayed(root):  # what lerobot.rl saves of its replay buffer
    import torch
    from lerobot.rl.buffer import ReplayBuffer
    buffer = ReplayBuffer(100, device="cpu", state_keys=[STATE, CAMERA], storage_device="cpu", use_drq=False)
    for episode in range(12):
        for step in range(6):
            state, last = {STATE: torch.rand(1, 4), CAMERA: torch.rand(1, 3, 32, 48)}, step == 5
            more = {"is_intervention": torch.tensor([float(step % 2)]), "discrete_penalty": torch.tensor([-0.02])}
            buffer.add(state, 2 * torch.rand(1, 3) - 1, float(last and episode % 2 == 0), state, last, False, more)
    buffer.to_lerobot_dataset("a/b", fps=10, root=root)

def joined(root, first, second):
    from lerobot.datasets.aggregate import aggregate_datasets
    roots = [folder / name for name in (first, second)]
    aggregate_datasets(["a/b"] * 2, "a/c", roots=roots, aggr_root=root)

def read(root):  # as lerobot reads it
    data = LeRobotDataset("a/b", root=root)
    rows = [data[i] for i in range(len(data))]
    names = [name for name, value in rows[0].items() if not isinstance(value, str)]
    tasks = np.array([row["task"] for row in rows])
    np.savez(f"{root}.npz", task=tasks, **{name: np.stack([row[name].numpy() for row in rows]) for name in names})

folder = Path(sys.argv[1])
for name, options in json.loads(sys.argv[2]).items():
    by = {"record": record, "replayed": replayed, "joined": joined}.get(options.pop("by", ""), make)
    by(folder / name, **options)
    if "flags" not in options and "names" not in options and len(options.get("lengths", ())) < 9:
        try:
            read(folder / name)
        except (RuntimeError, ImportError) as error:
            print(name, error)
"""

KINDS = {
    "low": {"lengths": [12, 1, 30, 7]},
    "long": {"lengths": [97] * 60},
    "named": {"lengths": [3], "names": ["a", "b", "c", "d"]},
    "flagged": {"lengths": [5, 9], "flags": True},
    "video": {"lengths": [11, 20], "camera": "video"},
    "image": {"lengths": [11, 20], "camera": "image"},
    "first": {"lengths": [12, 9], "camera": "video", "flags": True},
    "second": {"lengths": [20, 5, 8], "camera": "video", "flags": True},
    "pictures": {"lengths": [12, 9], "camera": "image", "flags": True},
    "small": {"lengths": [4], "camera": "video", "flags": True, "size": 32},
    "slow": {"lengths": [4], "camera": "video", "flags": True, "fps": 5},
    # 15 fps and the names of another recording, for a run of 30 fps
    "so101": {
        "by": "record",
        "fps": 15,
        "lengths": [6, 1, 4],
        "robot": "so101_follower",
        "columns": {
            "observation.state": ["float32", [3], ["main_pan", "main_lift", "gripper.pos"]],
            "action": ["float32", [3], ["main_pan", "main_lift", "gripper.pos"]],
            "observation.images.up": ["video", [480, 640, 3], ["height", "width", "channels"]],
            "observation.images.side": ["video", [480, 640, 3], ["height", "width", "channels"]],
        },
    },
    "odd": {
        "by": "record",
        "fps": 30,
        "lengths": [5, 7],
        "columns": {
            "observation.flag": ["bool", [1], None],
            "observation.count": ["int64", [3], None],
            "observation.matrix": ["float64", [2, 3], None],
            "note": ["string", [1], None],
            "observation.images.front.rgb": ["image", [24, 32, 3], ["height", "width", "channels"]],
            "observation.images.first": ["image", [3, 24, 32], ["channels", "height", "width"]],
            "action": ["float32", [2], ["a", "b"]],
        },
    },
    "fast": {
        "by": "record",
        "fps": 50,
        "lengths": [10, 3],
        "columns": {
            "observation.state": ["float32", [2], None],
            "action": ["float32", [2], None],
            "next.reward": ["float32", [1], None],
            "next.done": ["bool", [1], None],
            "intervention": ["bool", [1], None],
        },
    },
    "tasks": {
        "by": "record",
        "fps": 10,
        "lengths": [5, 3, 7],
        "task_rows": 3,
        "columns": {
            "observation.state": ["float32", [2], None],
            "action": ["float32", [2], None],
            "next.reward": ["float32", [1], None],
            "observation.images.front": ["video", [64, 64, 3], None],
        },
    },
    "replayed": {"by": "replayed"},
    "joined": {"by": "joined", "first": "video", "second": "video"},
    "faulty": {"lengths": [30, 7, 1], "camera": "video", "flags": True, "still": 8, "open": [1], "early": [0]},
}


def as_of_last_year(dataset, folder):
    """Write a dataset in the format v2.1: a file for each episode and camera."""
    entries = [row for path in dataset.folder.glob("meta/episodes/*/*") for row in parquet.read_table(path).to_pylist()]
    tables = pa.concat_tables(parquet.read_table(path) for path in sorted(dataset.folder.glob("data/*/*")))
    videos = [name for name in dataset.cameras if dataset.info["features"][name]["dtype"] == "video"]
    count, chunk = len(entries), "chunk-{episode_chunk:03d}"
    file = "episode_{episode_index:06d}"
    info = {key: value for key, value in dataset.info.items() if not key.endswith("_files_size_in_mb")} | {
        "codebase_version": "v2.1", "total_chunks": 1, "total_videos": count * len(videos), "chunks_size": 1000,
        "data_path": f"data/{chunk}/{file}.parquet",
        "video_path": f"videos/{chunk}/{{video_key}}/{file}.mp4" if videos else None,
    }  # fmt: skip
    stats: dict = {}
    for entry in entries:
        for name, value in ((name, value) for name, value in entry.items() if name.startswith("stats/")):
            _, column, kind = name.rsplit("/", 2) if name.count("/") == 2 else ("", *name.split("/")[1:])
            stats.setdefault(entry["episode_index"], {}).setdefault(column, {})[kind] = value
    (folder / "meta").mkdir(parents=True)
    lines = {
        "tasks": [{"task_index": i, "task": dataset.task(i)} for i in range(dataset.info["total_tasks"])],
        "episodes": [{name: entry[name] for name in ("episode_index", "tasks", "length")} for entry in entries],
        "episodes_stats": [{"episode_index": i, "stats": stats[i]} for i in stats],
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    for name, rows in lines.items():
        (folder / f"meta/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for entry in entries:
        place = {"episode_chunk": 0, "episode_index": entry["episode_index"]}
        path = folder / info["data_path"].format(**place)
        path.parent.mkdir(parents=True, exist_ok=True)
        own = tables.slice(entry["dataset_from_index"], entry["length"])
        parquet.write_table(own, path)
        for name in videos:
            path = folder / info["video_path"].format(**place, video_key=name)
            for number, image in enumerate(dataset.episode(entry["episode_index"]).images(name)):
                still = folder.with_name("stills") / path.stem / f"frame-{number:06d}.png"
                still.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(still)
            with ordinary_priority():
                lerobot_api.encode(still.parent, path, round(dataset.fps), "libsvtav1")
            shutil.rmtree(folder.with_name("stills"))
    return folder
