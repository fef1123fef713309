"""Checks of this machine: Python and its packages, disk, memory, processors, GPU, OpenGL and programs."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from serl_client.errors import ConfigError

from robot_infra.cameras import gl
from serl_launcher.datasets import importer
from serl_launcher.datasets.export import recorded, wanted
from serl_launcher.launcher import ranks_of, writable
from serl_launcher.networks import compiler
from serl_launcher.store import layout
from serl_launcher.store.layout import Layout
from serl_launcher.training import metrics
from serl_launcher.training.forecast import lasting
from serl_launcher.training.plan_reader import plan_of

from .common import ROOT, Finding, Run, said

MODULES = {"hydra-core": "hydra", "rerun-sdk": "rerun"}  # where a package's module has a name of its own
SIMULATED = ("robot_infra.tasks.sim_arm.", "robot_infra.tasks.gym.")
SYNCS = 50
BLOCK = 4 << 20
BLOCKS = 16
SLOW_SYNC = 0.05  # seconds
LEAST_OUTBOX = 120.0  # seconds of data that an outbox should take
PROCESS = 0.7e9  # bytes that torch takes in each process


def _has_datasets(config: DictConfig) -> bool:
    """Whether LeRobot datasets or recordings are read or written."""
    sources = config.plan.get("sources", {}).values()
    kept = any(source.get("archive", "none") != "none" or source.get("dataset") for source in sources)
    recorded = config.record != "none" or config.live is not None
    return bool(config.learner) and (kept or recorded or config.export.sources == "all")


def _trains(config: DictConfig) -> bool:
    return bool(config.learner) or config.inference == "local"


EXTRAS: dict[str, Callable[[DictConfig], bool]] = {  # extras of pyproject.toml, and which runs need them
    "learner": _trains,
    "sim": lambda config: bool(config.actor) and str(config.task.env._target_).startswith(SIMULATED),
    "data": _has_datasets,
    "wandb": lambda config: bool(config.learner) and config.log in ("wandb", "wandb-online"),
    "tensorboard": lambda config: bool(config.learner) and config.log == "tensorboard",
    "vla": lambda config: (
        _trains(config)
        and (".pi0." in str(config.policy._target_) or config.ranks not in ("auto", 1) or config.nodes > 1)
    ),
}


def packages(run: Run) -> Iterator[Finding]:
    """Python and the packages that this run needs, against pyproject.toml."""
    required = SpecifierSet(importlib.metadata.metadata("retake")["Requires-Python"])
    if platform.python_version() not in required:
        yield Finding(
            "FAIL",
            f"Python {platform.python_version()}, and {required} is needed",
            "run `. examples/install.sh --python 3.11` here",
        )
    extras = ["", *(extra for extra, needs in EXTRAS.items() if needs(run.config))]
    requirements = [Requirement(text) for text in importlib.metadata.requires("retake") or ()]
    needed = {
        item.name: extra for extra in extras for item in requirements
        if (item.marker is None) == (not extra) and (item.marker is None or item.marker.evaluate({"extra": extra}))
    }  # fmt: skip
    missing = [name for name in needed if importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is None]
    if missing:
        words = "".join(f" --extra {extra}" for extra in extras if extra)
        yield Finding("FAIL", f"not installed: {', '.join(missing)}", f"run `. examples/install.sh{words}` here")
        return
    tested = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    others = [
        f"{item.name} {found} (tested: {item.specifier})" for item in map(Requirement, tested)
        if item.name in needed and (item.marker is None or item.marker.evaluate())
        and (found := importlib.metadata.version(item.name)) not in item.specifier
    ]  # fmt: skip
    if others:
        yield Finding(
            "WARN", f"other versions than those tested: {', '.join(others)}", "run `. examples/install.sh` here"
        )
    what = ", ".join(extra for extra in extras if extra) or "the base"
    yield Finding("ok", f"Python {platform.python_version()}; {len(needed)} packages for {what}")


def plan(run: Run) -> Iterator[Finding]:
    """Whether the launcher would take the words of this run."""
    metrics.check(run.config.log)
    run.config.ranks = ranks_of(run.config)
    found = plan_of(run.config)
    importer.open_datasets(found)
    recorded(run.config)
    exported = wanted(run.config, found)
    yield Finding("ok", f"phases {', '.join(found.phases)}; exported: {', '.join(exported) or 'none'}")


def processors(run: Run) -> Iterator[Finding]:
    """Whether other programs take the processors."""
    load, count = os.getloadavg()[0], len(os.sched_getaffinity(0))
    busy = load > count
    advice = "close other programs: a control loop next to them will be late" if busy else ""
    yield Finding("WARN" if busy else "ok", f"{count} processors, load {load:.1f}", advice)


def memory(run: Run) -> Iterator[Finding]:
    """Memory of the machine, against the processes of this side."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    processes = run.config.ranks + 1 if run.side == "learner" else run.config.inference == "local"
    needed = PROCESS * processes + 8 * run.rate + 0.2e9  # the queue holds 2 s, and is full twice at the worst
    if needed > free:
        advice = "close other programs, or take a machine with more memory"
        yield Finding("FAIL", f"{said(free)} of memory are free, and about {said(needed)} are needed", advice)
        return
    yield Finding("ok", f"{said(free)} of memory are free, about {said(needed)} are needed before any training")


def disk(run: Run) -> Iterator[Finding]:
    """Room for the store or the outbox, and how fast the disk makes things durable."""
    folder = writable(run.folder)
    yield _store_room(run, folder) if run.side == "learner" else _outbox_room(run, folder)
    if shutil.disk_usage(folder).free < 2 * BLOCK * BLOCKS:
        return
    p50, p99, rate = durable(folder)
    text = f"fdatasync p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms; {rate / 1e6:.0f} MB/s written and synced"
    if rate < 2 * run.rate:
        yield Finding("FAIL", f"{text}; an actor makes {said(run.rate)}/s", "choose a run_dir on a faster disk")
    elif run.side == "learner" and p99 > SLOW_SYNC:
        yield Finding("WARN", text, "acknowledgements will be slow: choose a run_dir on an SSD of this machine")
    else:
        yield Finding("ok", text)


def _store_room(run: Run, folder: Path) -> Finding:
    sources: Any = OmegaConf.to_container(run.config.plan.sources)
    capacities = {name: int(source["capacity"]) for name, source in sources.items()}
    if (folder / "store" / "index.sqlite").exists():
        return Finding("ok", f"the store in {folder} is there, with all its room")
    if run.spec is None:
        steps = ", ".join(f"{name} {capacity:,}" for name, capacity in capacities.items())
        advice = "nothing to do yet: the store is made when the first actor comes, and refuses what does not fit"
        return Finding("WARN", f"the robot's Spec is not known yet, so neither is the room for {steps} steps", advice)
    try:
        spec = run.spec
        text = layout.check_space(folder, {name: Layout(spec, capacity) for name, capacity in capacities.items()})
    except ConfigError as error:
        return Finding("FAIL", *str(error).split(". ", 1))
    return Finding("ok", text)


def _outbox_room(run: Run, folder: Path) -> Finding:
    free, wanted = shutil.disk_usage(folder).free, run.config.outbox_gb * 1e9
    room = min(free, wanted)
    lasts = f", {lasting(room / run.rate / 60)} without a learner" if run.rate else ""
    text = f"the outbox may take {said(wanted)}, {said(free)} are free on the disk of {folder}{lasts}"
    if room < LEAST_OUTBOX * run.rate or free < BLOCK:
        return Finding("FAIL", text, "make room there, choose another run_dir=..., or a larger outbox_gb=...")
    if free < wanted:
        return Finding("WARN", text, f"make room there, or say outbox_gb={free / 2e9:.1f}")
    return Finding("ok", text)


def durable(folder: Path) -> tuple[float, float, float]:
    """(p50, p99) seconds of an fdatasync after 4 KiB, and the bytes/s of large writes that are synced at the end."""
    block, times = os.urandom(BLOCK), []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(SYNCS):
            file.write(block[:4096])
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(BLOCKS):
            file.write(block)
        os.fdatasync(file.fileno())
        rate = BLOCK * BLOCKS / (time.perf_counter() - begin)
    return float(np.quantile(times, 0.5)), float(np.quantile(times, 0.99)), rate


def gpu(run: Run) -> Iterator[Finding]:
    """Whether torch sees the GPU that is here, and whether training fits."""
    if importlib.util.find_spec("torch") is None or not _trains(run.config):
        return
    import torch

    from serl_launcher.training.build import check_memory, device_of

    there = _nvidia()
    if (there or str(run.config.device).startswith("cuda")) and (lacks := compiler.lacking()):
        advice = "apt-get install gcc python3-dev, then look again: without them PI0 answers more slowly"
        yield Finding("WARN", f"kernels for the GPU cannot be compiled: {lacks} is missing", advice)
    device = device_of(run.config)
    if device == "cpu" and there:
        advice = "install the torch for this driver, or a newer driver; device=cpu trains without the GPU"
        state = "ok" if run.config.device == "cpu" else "FAIL"
        yield Finding(state, f"torch {torch.__version__} does not see {there}", advice if state == "FAIL" else "")
    elif device == "cpu":
        yield Finding("ok", f"torch {torch.__version__}, no GPU: the CPU does it, with threads={run.config.threads}")
    else:
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        yield Finding("ok", f"torch {torch.__version__} on {name}, {said(free)} of {said(total)} free")
    if run.side == "learner" and run.spec is not None:
        need = check_memory(run.config, run.spec, device, run.config.ranks * run.config.nodes)
        yield Finding("ok", f"training takes {need}")


def _nvidia() -> str:
    """The first GPU that the driver names; empty without one."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.partition("\n")[0]


def graphics(run: Run) -> Iterator[Finding]:
    """Whether a simulator's cameras can be drawn here."""
    wanted = OmegaConf.select(run.config, "task.cameras")
    if wanted in (None, False):
        return
    if found := gl.choose_backend(wanted):
        yield Finding("ok", f"images are drawn with {found}")
    else:
        yield Finding("WARN", "neither EGL nor OSMesa draws an image here", "apt-get install libegl1 libosmesa6")


def programs(run: Run) -> Iterator[Finding]:
    """What is not Python."""
    wanted = {"tmux": "start_tmux.sh shows learner and actor without it in one terminal"}
    if EXTRAS["data"](run.config):
        wanted["ffmpeg"] = "videos of datasets need its libraries"
    for name, use in wanted.items():
        if place := shutil.which(name):
            yield Finding("ok", place)
        else:
            yield Finding("WARN", f"{name} is not installed: {use}", f"apt-get install {name}")
