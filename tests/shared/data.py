"""A tiny Spec, and segments whose content tells where they belong."""

import dataclasses

import numpy as np
from serl_client import Feature, Outcome, Segment, Spec, Stamp
from serl_client.episode import COLUMNS

from .common import STATE

ACTION = 2  # numbers
BAD_NAMES = ("x" * 201, "arm\n", "\x1b[2J", "\u202egnp")  # of anything that a client names


def tiny_spec(**changes):
    """A state of 8 numbers, an action of 2 in [-1, 1], 10 steps/s; `changes` are fields of Spec."""
    return Spec(**{
        "observation": {STATE: Feature((8,))}, "action": Feature((ACTION,), low=-1, high=1), "fps": 10.0, **changes
    })  # fmt: skip


def make_segment(episode="e0", key=0, start=0, steps=4, *, ends="", **stamp):
    """Every observation is [key, index, key, index, ...] and every reward is the index: a mixed row shows at once."""
    rows = np.arange(start, start + steps + bool(ends), dtype=np.float32)
    return dataclasses.replace(
        blank_segment(tiny_spec(), episode, start, steps, ends=ends, **stamp),
        observation={STATE: np.stack([np.full_like(rows, key), rows] * 4, axis=1)},
        action=np.full((steps, ACTION), 0.5, np.float32),
        reward=rows[:steps].copy(),
        chunk_start=np.arange(start, start + steps) % 4 == 0,
        time=rows[:steps].astype(np.float64),
    )


def blank_segment(spec, episode, start=0, steps=2, *, ends="", directive=1, phase="practise", weights=0):
    """One that fits any Spec; every number of its observations is its start, all other columns are zeros."""

    def made(features, rows, value=0):
        return {name: np.full((rows, *feature.shape), value, feature.dtype) for name, feature in features.items()}

    columns = {name: np.zeros(steps, dtype) for name, dtype in COLUMNS.items()}
    return Segment(
        episode, start, "reach", Stamp(directive, phase, weights),
        made(spec.observation, steps + bool(ends), start), made({"": spec.action}, steps)[""], **columns,
        terminated=ends == "terminated", truncated=ends == "truncated", extras=made(spec.extras, steps),
    )  # fmt: skip


def make_episode(name, key=0, *, steps=8, success=None, **stamp):
    """The records of one episode as a runner pushes them: its first half, its outcome, the half that ends it."""
    half = steps // 2
    return [
        make_segment(name, key, 0, half, **stamp),
        Outcome(name, key % 2 == 0 if success is None else success),
        make_segment(name, key, half, steps - half, ends="terminated", **stamp),
    ]


def changed(segment, column, value, row=None):
    """The segment with `value` in this row of a column; None: in the middle."""
    array = np.array(segment.columns[column])
    array[len(array) // 2 if row is None else row] = value
    for group in ("observation", "extras"):
        if column in (there := getattr(segment, group)):
            return dataclasses.replace(segment, **{group: {**there, column: array}})
    return dataclasses.replace(segment, **{column: array})
