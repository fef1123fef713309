"""Datasets that LeRobot's own writer makes, and reads."""

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

def read(root):  # as lerobot reads it
    data = LeRobotDataset("a/b", root=root)
    rows = [data[i] for i in range(len(data))]
    names = (STATE, CAMERA, "action", "timestamp")
    np.savez(f"{root}.npz", **{name: np.stack([row[name].numpy() for row in rows]) for name in names})

folder = Path(sys.argv[1])
for name, options in json.loads(sys.argv[2]).items():
    make(folder / name, **options)
    if list(options) == ["lengths", "camera"]:
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
    "faulty": {"lengths": [30, 7, 1], "camera": "video", "flags": True, "still": 8, "open": [1], "early": [0]},
}
