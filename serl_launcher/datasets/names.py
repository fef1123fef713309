"""Names the columns of LeRobot datasets that we write (shards.py) and read (reader.py).

What one row of a shard holds besides observations, action and the Spec's extras (images: video, which loses a little):
    next.reward: of the step that begins in this row
    next.done: the episode ends with this step
    next.terminated: the task ended with this step: success, or a failure that nothing can follow
    next.truncated: the episode was cut with this step: by time, a person, or a fault
    next.success: the episode ends with this step, and succeeded
    intervened: a person drove
    chunk_start: a new chunk of the policy began here
    gap: time passed without a step just before this one
    chunk_delay: where a chunk starts, how many of its first actions were skipped as too late
    time: when the observation was there, seconds of the robot's clock
    weights_version: number of the weights that acted
    directive: number of the directive under which the step was made
    phase: index into `phases` in the file retake.json beside the dataset
    outcome: of the whole episode: -1 unknown, 0 failure, 1 success

LeRobot has no row for the observation after the last action: it stays in the store.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Feature, Spec
from serl_client.words import check_choice

from serl_launcher.datasets.tables import entry_names
from serl_launcher.training.plan import ALL

MANIFEST = "retake.json"  # the file in which a shard says what LeRobot has no place for
LEFT_OUT = "left_out"  # folder beside those of the sources: the episodes that no shard takes, as NumPy files
INSTALL = "run `. examples/install.sh --extra data` here"
REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
TERMINATED, TRUNCATED = "next.terminated", "next.truncated"
INTERVENED, CHUNK_START, GAP, CHUNK_DELAY, TIME = "intervened", "chunk_start", "gap", "chunk_delay", "time"
WEIGHTS_VERSION, DIRECTIVE, PHASE, OUTCOME = "weights_version", "directive", "phase", "outcome"
ENDS = (DONE, SUCCESS, TERMINATED, TRUNCATED)
FLAG, NUMBER = Feature((1,), "bool"), Feature((1,), "int64")
COLUMNS = {
    REWARD: Feature((1,)), DONE: FLAG, TERMINATED: FLAG, TRUNCATED: FLAG, SUCCESS: FLAG,
    INTERVENED: FLAG, CHUNK_START: FLAG, GAP: FLAG, CHUNK_DELAY: NUMBER, TIME: Feature((1,), "float64"),
    WEIGHTS_VERSION: NUMBER, DIRECTIVE: NUMBER, PHASE: NUMBER, OUTCOME: NUMBER,
}  # fmt: skip
STORED = {  # a step's field in the store: its column in a shard
    "reward": REWARD, "terminated": TERMINATED, "truncated": TRUNCATED,
    **{name: name for name in (INTERVENED, CHUNK_START, GAP, CHUNK_DELAY, TIME, WEIGHTS_VERSION, DIRECTIVE)},
}  # fmt: skip
KNOWN = {  # a column of lerobot's, or of HIL-SERL's: its name here
    "complementary_info.is_intervention": INTERVENED,  # lerobot.rl
    "is_intervention": INTERVENED,
    "intervention": INTERVENED,  # lerobot-rollout
}
RESERVED = {*COLUMNS, "timestamp", "frame_index", "episode_index", "index", "task_index", "task"}


def is_image(feature: Feature) -> bool:
    """Return whether an observation is an image: the images of a whole episode may not fit into memory."""
    return feature.dtype == "uint8" and len(feature.shape) == 3


def cameras(spec: Spec) -> list[str]:
    """Return the names of the observations that LeRobot stores as images: uint8 [H, W, 3]."""
    return [
        name for name, f in spec.observation.items()
        if name.startswith("observation.images.") and f.dtype == "uint8" and len(f.shape) == 3 and f.shape[2] == 3
    ]  # fmt: skip


def column(name: str, spec: Spec) -> str:
    """Return the column of a feature of the Spec.

    It has the feature's name, unless LeRobot or we use that one. Only an image may have "image" in its column's name.
    """
    if name not in cameras(spec):
        name = name.replace("image", "picture")
    name = name.replace("/", ".")
    return f"extras.{name}" if name in RESERVED else name


def called(entries: Mapping[str, Mapping[str, Any]], rename: Mapping[str, str], where: str) -> dict[str, str]:
    """Return {column of info.json's features: its name here}, by `rename`, else as it is KNOWN, else its own.

    where: the setting. Raises ConfigError for a rename of nothing, or of two columns to the same name.
    """
    parts = {part for entry in entries.values() for part in entry_names(entry)}
    for name in rename:
        check_choice(name, [*entries, *parts], "column or entry", where)
    found = {column: rename.get(column, column) for column in entries}
    for column, name in KNOWN.items():
        if found.get(column) == column and name not in found.values():
            found[column] = name
    for name in set(found.values()):
        if len(columns := [column for column in found if found[column] == name]) > 1:
            raise ConfigError(f"{where}: {', '.join(columns)} are all called {name}: name one of them so")
    return found


def check_cameras(said: Iterable[str], cameras: Collection[str], where: str) -> None:
    """Raise ConfigError if one of the names that are said, with or without `observation.images.`, is no camera's."""
    short = [camera.removeprefix(IMAGES) for camera in cameras]
    for name in said:
        check_choice(name, [*short, *cameras], "camera", where)


def deltas(action: Feature | None, said: Sequence[str], where: str) -> list[int]:
    """Return which entries of an action are said to be changes per step. Raises ConfigError for a name that is none."""
    if action is None or not said:
        return []
    if ALL in said:
        return list(range(action.shape[0]))
    for name in said:
        check_choice(name, [*action.names, ALL], "entry of the action", where)
    return [action.names.index(name) for name in said]


def order(mine: Feature, theirs: Feature) -> list[int] | None:
    """Return which entries of a vector, in which order, are those of another one; None: all, as they are."""
    if not theirs.names or mine.names == theirs.names or not {*theirs.names} <= {*mine.names}:
        return None
    are_vectors = mine.shape == (len({*mine.names}),) and theirs.shape == (len(theirs.names),)
    return [mine.names.index(name) for name in theirs.names] if are_vectors else None


def ordered(mine: Feature, theirs: Feature) -> Feature:
    """Return a feature with the entries of another one, where it has them by name; else as it is."""
    if (found := order(mine, theirs)) is None:
        return mine
    units = tuple(mine.units[i] for i in found) if mine.units else ()
    return replace(mine, shape=theirs.shape, names=theirs.names, units=units)


def misfit(features: Mapping[str, Feature], fps: float, spec: Spec) -> str:
    """Return why a dataset with these features and this rate does not fit a run with this Spec; empty if it does.

    Units are no part of it: those may be converted (units.py).
    """
    wrong = [f"its rate is {fps:g} fps, the run's {spec.fps:g}"] * (fps != spec.fps)
    for name, theirs in {**spec.observation, "action": spec.action}.items():
        mine = features.get(name)
        if mine is None:
            wrong.append(f"it has no {name}")
        elif (mine.shape or (1,)) != (theirs.shape or (1,)):
            wrong.append(f"its {name} is {list(mine.shape)}, the run's {list(theirs.shape)}")
        elif not np.can_cast(mine.dtype, theirs.dtype, "same_kind"):
            wrong.append(f"its {name} is {mine.dtype}, the run's {theirs.dtype}")
        elif mine.names and theirs.names and mine.names != theirs.names:
            wrong.append(f"its {name} holds {', '.join(mine.names)}, the run's {', '.join(theirs.names)}")
    return "; ".join(wrong)
