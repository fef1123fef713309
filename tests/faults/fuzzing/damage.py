"""A store, and what reads it: it is opened, read, drawn from and written to, or it says clearly why not."""

import shutil
import sqlite3
import tempfile
from pathlib import Path

import numpy as np
from serl_client import Outcome
from serl_client.errors import Refused

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.store import layout
from serl_launcher.store.store import Store
from serl_launcher.types import Window
from tools.store import damaged

from .mutations import EPOCH, SPEC, segment

WINDOW = Window({"observation.state": (0,), "action": (0, 1), "next_observation": (2,)})
EPISODES = 12


def write(folder: Path) -> None:
    """Leave a store with some episodes in a folder: it is copied while it is open, with its log of writes."""
    with tempfile.TemporaryDirectory() as live:
        store = Store.create(Path(live) / "store", SPEC, {"online": 200, "demo": 40})
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
        shutil.copytree(Path(live) / "store", folder, dirs_exist_ok=True)
        store.close()


def read(folder: Path) -> str:
    """Raises ConfigError for what is refused at opening."""
    store = Store(folder)
    try:
        bad = sum(1 for source in store.index.sources().values() for _ in damaged(folder, store.index, source))
        for source, state in store.sources.items():
            replay = ReplayBuffer(folder / source, layout.Layout(store.spec, state.capacity))
            replay.refresh()
            replay.draw(8, WINDOW, np.random.default_rng(0), None)
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
