"""Makes the files of a new store, and tells whether one is there."""

import sqlite3
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from serl_client.errors import ConfigError
from serl_client.spec import Spec

from serl_launcher.store.files import allocate, make_folder, sync_folder
from serl_launcher.store.index import Index
from serl_launcher.store.schema import Source

INDEX = "index.sqlite"
MAKING = "index.making"  # there while a store is made
NEW = "index.new"  # its index until then
FILES = ("*/rows", "*/steps", "*/published", "index.sqlite-*")


def is_there(folder: Path) -> bool:
    """Return whether a store lies here. Raises ConfigError for files without their index: nobody can read them, and a
    new store would overwrite them."""
    if (folder / INDEX).exists():
        return True
    if (folder / MAKING).exists():  # somebody died while making it, before anything could be stored
        return False
    if left := [path for pattern in FILES for path in folder.glob(pattern)]:
        raise ConfigError(
            f"{folder} holds {left[0].relative_to(folder)}, but no index.sqlite, without which nobody can read it: "
            "bring that file back, or begin another run_dir. Nothing was changed"
        )
    return False


def capacities_there(folder: Path, asked: Mapping[str, int]) -> dict[str, int]:
    """Return the capacity of each source: what a store that lies here was made with, else what is asked. Changes
    nothing. Raises ConfigError for a store that cannot be read."""
    if not is_there(folder):
        return dict(asked)
    with closing(Index(folder / INDEX)) as index:
        there = index.sources()
    return {name: there[name].capacity if name in there else steps for name, steps in asked.items()}


def run_of(folder: Path) -> str:
    """Return the id of the run whose store lies here; empty where none can be read. Changes nothing."""
    with suppress(ConfigError, OSError, sqlite3.Error):
        if is_there(folder):
            with closing(Index(folder / INDEX)) as index:
                return str(index.meta("run"))
    return ""


def make_store(folder: Path, spec: Spec, capacities: Mapping[str, int]) -> None:
    """Make a new store. MAKING is there from before its first file until its last has its name. The index gets its own
    last: who sees it sees a whole store."""
    make_folder(folder)
    (folder / MAKING).touch()
    for left in (path for pattern in (NEW, *FILES) for path in folder.glob(pattern)):  # no step is in them
        left.unlink()
    index = Index(folder / NEW, writes=True)
    index.set_meta("run", uuid.uuid4().hex)
    index.set_meta("spec", spec.to_dict())
    index.put(*(Source(name, capacity) for name, capacity in capacities.items()))
    index.commit()  # SQLite has synced the folder by now, so the files below are never there without MAKING
    index.close()
    allocate(folder, spec, capacities)
    (folder / NEW).rename(folder / INDEX)
    sync_folder(folder)
    (folder / MAKING).unlink()
