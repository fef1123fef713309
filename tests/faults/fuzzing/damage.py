"""A store whose files were damaged: it is opened, read, drawn from and written to, or it says clearly why not."""

import shutil
import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from serl_client import Outcome
from serl_client.errors import ConfigError, Refused

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.store import layout
from serl_launcher.store.store import Store
from serl_launcher.types import Window
from tools.store import damaged

from .mutations import EPOCH, SPEC, segment, spoiled_bytes

WINDOW = Window({"observation.state": (0,), "action": (0, 1), "next_observation": (2,)})
FILES = ("index.sqlite", "index.sqlite", "index.sqlite", "index.sqlite-wal", "online/rows", "online/steps",
         "online/published", "online/published", "demo/steps")  # fmt: skip
EPISODES = 12


def make(chance: Random, number: int) -> Any:
    """[file, way, seed]: what is damaged, and how."""
    return [chance.choice(FILES), chance.randrange(6), chance.getrandbits(32)]


def template(scratch: Path) -> Path:
    """A store with some episodes, copied while it is open, so that its log of writes is there too."""
    folder = scratch / "template"
    if folder.exists():
        return folder
    store = Store.create(scratch / "live" / "store", SPEC, {"online": 200, "demo": 40})
    number = store.direct({"mode": "collect", "into": "online", "phase": "practise"})
    store.lives.hello("arm", "o" * 32, EPOCH, [])
    seq = 0
    for episode in range(EPISODES):
        for start in (0, 2, 4):
            store.stage(EPOCH, seq, segment(start, episode=f"e{episode}", directive=number, ends=start == 4))
            seq += 1
        store.stage(EPOCH, seq, Outcome(f"e{episode}", episode % 2 == 0))
        seq += 1
        if episode % 4 == 3:
            store.commit()
        if episode == EPISODES // 2:
            store.probe()
    store.commit()
    shutil.copytree(scratch / "live" / "store", folder)
    store.close()
    return folder


def damage(path: Path, way: int, seed: int) -> None:
    chance = Random(seed)
    data = path.read_bytes() if path.exists() else b""
    if way == 0:
        path.unlink(missing_ok=True)
    elif way == 1:
        path.write_bytes(data[: chance.randrange(len(data) + 1)])
    elif way == 2 and data:  # a page of something else
        at = chance.randrange(len(data)) // 512 * 512
        path.write_bytes(data[:at] + chance.choice((bytes(512), chance.randbytes(512))) + data[at + 512 :])
    else:
        for _ in range(chance.choice((1, 1, 3, 20))):
            data = spoiled_bytes(chance, data)[: 1 << 20] if way == 5 else _flipped(chance, data)
        path.write_bytes(data)


def _flipped(chance: Random, data: bytes) -> bytes:
    at = chance.randrange(len(data)) if data else 0
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if data else data


def run(case: Any, scratch: Path) -> str:
    """Raises ConfigError for what is refused at opening."""
    name, way, seed = case
    folder = scratch / "run" / "store"
    shutil.rmtree(scratch / "run", ignore_errors=True)
    shutil.copytree(template(scratch), folder)
    damage(folder / name, way, seed)
    store = Store(folder)
    try:
        bad = sum(1 for source in store.index.sources().values() for _ in damaged(folder, store.index, source))
        for source, state in store.sources.items():
            replay = ReplayBuffer(folder / source, layout.Layout(store.spec, state.capacity))
            replay.refresh()
            replay.draw(8, WINDOW, np.random.default_rng(seed), None)
        number = store.direct({"mode": "collect", "into": "online", "phase": "practise"})
        store.lives.hello("arm", "o" * 32, "d" * 32, [])
        store.stage("d" * 32, 0, segment(episode="new", directive=number))
        store.commit()
    except Refused:  # a letter of the stored Spec became another one: actors are told so
        return "another Spec"
    except (sqlite3.Error, OSError) as error:  # the server says DEGRADED
        return f"opened, then {type(error).__name__}"
    finally:
        store.close()
    whole = sum(source.head - source.tail for source in store.sources.values()) >= EPISODES * 6
    return "damage found" if bad else "sound" if whole else "fewer steps"


DECLARED = (ConfigError,)
