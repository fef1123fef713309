#!/usr/bin/env python
"""Proves for each algorithm that a learner that is killed goes on as if nothing had happened, bit by bit.

resume.py [--algorithms qc parl ...] [--kills 3] [--updates 120] [--out runs/resume]

Each algorithm trains twice on copies of the same demonstrations, with a checkpoint after each update: once without a
disturbance, and once killed by `kill -9`, with all its processes, at --kills random moments. Both must end with equal
weights, targets, optimisers, random states and derived columns. Exit status 1 if one differs. About 20 s for each.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from serl_launcher.config import composed, groups
from serl_launcher.training.checkpoint import STATE, TENSORS
from tools.processes import kill, start
from tools.studies.runs import ROOT, TRAIN, copied, demonstrations, phase, ports, run

KEPT = ("algorithm", "sources")
CONFIG = ROOT / "config"
NEEDS = ("_pixels", "_pi0", "world_models")  # of cameras, the extra `vla` or time: others of these classes are tried
SMALL = ["batch_size=16", "checkpoint_s=0", "log=false"]
EVOLVED = "world_models_tiny"  # it learns from pictures, and from the returns of those who have acted
SIZES = {"policy.hidden": "[16,16]", "policy.network.hidden": "[16,16]", "critic.hidden": "[16,16]",
         "algo.samples": "4", "algo.kept": "2", "algo.steps": "2", "policy.head.steps": "2", "algo.model.latent": "16",
         "algo.model.hidden": "[16,16]", "algo.deter": "64", "algo.length": "8", "algo.imagined": "4"}  # fmt: skip


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    names = [name for name in groups(CONFIG)["algo"] if not name.endswith(NEEDS)]
    parser.add_argument("--algorithms", nargs="+", choices=names, default=names)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=Path("runs/resume"))
    options = parser.parse_args()
    moments, folder, failed = random.Random(options.seed), options.out.resolve(), []
    rows = "algo=td_mpc_squared"  # with the columns that it wants; others do not read them
    begun = demonstrations(folder / "demonstrations", 0, 4, rows, task="fake", actor=["task.env.clock=simulated"])
    for name in options.algorithms:
        words = words_of(name, options.updates)
        first = played(folder / "played") if name == EVOLVED else begun
        undisturbed, killed = (copied(first, folder / f"{name}-{kind}", forgets=True) for kind in ("whole", "killed"))
        train(undisturbed, words)
        times = 0
        while times < options.kills and train(killed, words, dies_after=moments.uniform(0.2, 1.5)):
            times += 1
        train(killed, words)
        wrong = list(differences(state(undisturbed), state(killed))) if times else ["it was never killed"]
        failed += [name] * bool(wrong)
        print(
            f"{name}: killed {times} times, " + (f"{len(wrong)} differ: {wrong[:3]}" if wrong else "equal"), flush=True
        )
    sys.exit(f"not equal: {', '.join(failed)}" if failed else 0)


def words_of(name: str, updates: int) -> list[str]:
    """Return the words of a learner that trains on the demonstrations alone, by all updates of the algorithm."""
    if name == EVOLVED:
        turns = {"see": updates // 3, "predict": updates // 3, "evolve": updates // 3}
        plan = [f"plan.phases.{each}.until=['updates >= {count}']" for each, count in turns.items()]
        idle = ["plan.phases.evolve.actors={mode: idle, into: null}", "~plan.phases.drift", "~plan.phases.evaluate"]
        return [*SMALL, f"algo={EVOLVED}", "task=puck", "plan=world_models", *plan, *idle]
    config = composed(CONFIG, ["learner=true", "plan=sft", f"algo={name}", "task=fake", "run_dir=/nowhere"])
    read = {word.partition("=")[0] for word in config.remembered}  # groups
    sizes = [
        f"{option}={value}" for option, value in SIZES.items()
        if option.split(".")[0] in read and OmegaConf.select(config, option) is not None
    ]  # fmt: skip
    rounds = "actors: {mode: idle}, updates: ${updates}, data: {demo: 1.0}, on_begin: [{fit_normalizer: demo}], "
    plan = ["plan=sft", "~plan.phases.clone", "~plan.phases.evaluate"]
    train = phase("train", f"{rounds}until: ['updates >= {updates}']")
    return [*SMALL, "task=fake", *plan, f"algo={name}", *sizes, train]


def played(folder: Path) -> Path:
    """Return a run of pucks that drifted, and of 60 episodes of controllers that nobody has trained."""
    if not (folder / "summary.json").exists():
        learned = [f"~plan.phases.{each}" for each in ("see", "encode", "predict", "evaluate")]
        until = "plan.phases.evolve.until=['updates >= 60']"
        run(folder, "plan=world_models", f"algo={EVOLVED}", until, "random_steps=2000", *learned, task="puck")
    return folder


def train(folder: Path, words: Sequence[str], dies_after: float | None = None) -> bool:
    """Run the learner, to its end or until so many seconds after its first update. Returns whether it was killed."""
    command = [*TRAIN, "learner=true", f"run_dir={folder}", *ports(), *words]
    before = newest(folder)
    with open(folder.with_suffix(".log"), "a") as log:
        learner = start(command, log)
        if dies_after is not None:
            while learner.poll() is None and newest(folder) <= before:
                time.sleep(0.02)
            time.sleep(dies_after)
            is_killed = learner.poll() is None
            kill(learner)
            return is_killed
        if status := learner.wait():
            sys.exit(f"{folder}: the learner ended with status {status}; see {log.name}")
    return False


def newest(folder: Path) -> int:
    """Return the updates of the newest checkpoint; 0 if there is none."""
    found = list((folder / "checkpoints").glob("[0-9]*/manifest.json"))
    return json.loads(max(found).read_text())["updates"] if found else 0


def state(folder: Path) -> Any:
    """Return what the newest checkpoint holds of the algorithm and of the replay buffer."""
    place = max((folder / "checkpoints").glob("[0-9]*/manifest.json")).parent
    whole = torch.load(place / STATE, weights_only=True)
    tensors = {name: value for name, value in load_file(place / TENSORS).items() if name.startswith(KEPT)}
    return {"tensors": tensors, **{name: whole[name] for name in KEPT}}


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield the places where two trees differ."""
    if isinstance(one, dict):
        for name in {*one, *other}:
            yield from differences(one.get(name), other.get(name), f"{where}.{name}")
    elif isinstance(one, list | tuple):
        for i, (mine, its) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, its, f"{where}.{i}")
    elif not (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other):
        yield where


if __name__ == "__main__":
    main()
