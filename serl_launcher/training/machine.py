"""Tells of a run's folder what the machines did: control rate, weights' age, disk, errors. No torch."""

import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.spec import Spec

from serl_launcher.store.layout import Layout
from serl_launcher.store.schema import EpisodeInfo, Source

STEPS = 400  # newest steps of a source, by which the control rate is told
ERRORS_SHOWN, ERROR_BYTES = 5, 1 << 16  # of the end of errors.log
MACHINES = {  # what the learner notes as it goes: {name: (title, unit, what it is)}
    "rate": ("control rate", "Hz", "Steps per second of the slowest actor that moves."),
    "late": ("late steps", "", "Commands early or late by half a period, of all connected actors since their start."),
    "outbox": ("outboxes", "MB", "What actors hold and the learner has not stored yet: it grows on a slow network."),
    "age": ("age of the weights", "s", "Time since the newest weights were published."),
    "free": ("free disk", "GB", "Room that is left where the run's folder lies."),
}
BEGINNING = re.compile(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )", re.MULTILINE)  # of an error there


@dataclass(frozen=True, slots=True)
class Control:
    """How regularly the newest STEPS steps came. rate: steps per second; fps: what it should be; late: the share of
    steps that followed the one before by less than 0.5 or more than 1.5 periods."""

    rate: float
    fps: float
    late: float


def control_of(store: Path, spec: Spec, sources: Mapping[str, Source], newest: EpisodeInfo) -> Control | None:
    """Tell the control rate by the newest steps of an episode; None without two, or if they are not in the store."""
    if (source := sources.get(newest.source)) is None:
        return None
    try:
        steps = Layout(spec, source.capacity).steps(store / source.name)
    except (OSError, ValueError):
        return None
    numbers = np.arange(max(source.tail, source.head - STEPS), source.head)
    records = steps[numbers % source.capacity]
    times = records["time"][(records["number"] == numbers) & (records["episode"] == newest.number)]
    periods = np.diff(times) * spec.fps
    if not len(periods) or not np.isfinite(periods).all() or periods.sum() <= 0:
        return None
    late = float(((periods < 0.5) | (periods > 1.5)).mean())
    return Control(float(spec.fps / periods.mean()), spec.fps, late)


def machines_of(run_dir: Path, clients: Iterable[Mapping[str, Any]], weights: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of MACHINES as they are now, without those that nobody tells.

    clients: of the server's status. weights: the newest version of them.
    """
    actors = [client for client in clients if client["role"] == "actor"]
    rates, age = [rate for each in actors if (rate := counted(each, "rate"))], weights_age(run_dir, weights)
    return {
        **({"rate": round(min(rates), 2)} if rates else {}), **({} if age is None else {"age": round(age, 1)}),
        **({"late": sum(counted(each, "late") for each in actors)} if actors else {}),
        **({"outbox": round(sum(counted(each, "outbox") for each in actors) / 1e6, 3)} if actors else {}),
        "free": round(shutil.disk_usage(run_dir).free / 1e9, 2),
    }  # fmt: skip


def counted(client: Mapping[str, Any], name: str) -> float:
    """Return a number of an actor's report; 0 where there is none, because an actor may report anything."""
    value = client.get(name, 0)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


def weights_age(run_dir: Path, weights: Mapping[str, Any]) -> float | None:
    """Return the seconds since a version of the weights was published; None: it is not there."""
    file = run_dir / "weights" / f"{weights.get('sha256')}.safetensors"
    return max(0.0, time.time() - file.stat().st_mtime) if file.exists() else None


def disk_of(run_dir: Path) -> tuple[dict[str, int], int]:
    """Return the bytes that each part of a run's folder has on disk, and those that are free there."""
    if not run_dir.is_dir():
        return {}, 0
    parts: dict[str, int] = {}
    for folder, _, names in os.walk(run_dir):
        part = Path(folder).relative_to(run_dir).parts[:1]
        for name in names:
            with suppress(OSError):  # it is gone
                size = os.lstat(os.path.join(folder, name)).st_blocks * 512
                parts[part[0] if part else "files"] = parts.get(part[0] if part else "files", 0) + size
    return parts, shutil.disk_usage(run_dir).free


def errors_of(path: Path) -> list[str]:
    """Return the newest errors of errors.log: when, what failed, and the last line of its traceback."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - ERROR_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    said = [[line for line in each.splitlines() if line.strip()] for each in BEGINNING.split(text)[1:]]
    return [f"{lines[0]}: {lines[-1]:.200}" for lines in said if len(lines) > 1][-ERRORS_SHOWN:]
