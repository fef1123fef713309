"""An ACT of lerobot on the simulated arm with cameras: who trains it, and what takeovers add."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.studies import runs
from tools.studies.cells import Study

SIDE: dict[str, Any] = {"task": "sim_arm_pixels"}
THEIRS, OURS = "lerobot-train", "cloned here"
MORE, HIORS = "as many human rows", "hi-ors"
OPTIONS = {  # 11.4 million weights, 11.2 of them the smallest ResNet that lerobot's ACT takes
    "chunk_size": 8, "n_action_steps": 8, "dim_model": 64, "n_heads": 4, "dim_feedforward": 128, "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1, "latent_dim": 8, "optimizer_lr": 1e-4, "optimizer_lr_backbone": 1e-4,
}  # fmt: skip
PLAIN = ["algo=rejection_lerobot", "algo.idle_filter.threshold=0", "batch_size=8"]


def act(cell: Namespace) -> Mapping[str, Any]:
    """Does an ACT learn here what it learns from lerobot-train, and do takeovers add to it? (docs/guides/lerobot.md)

    A draw is a seed with its own --demonstrations on sim_arm_pixels.
    act      lerobot-train makes --updates on the exported demonstrations, the control; Retake makes as many on the
             same ones, with lerobot's class, optimiser and batches of 8. Hypothesis, said before the first cell: the
             interval of the paired difference holds 0.
    act_more both begin with a clone of --updates made here. hi-ors: --practice updates while the arm practises and a
             script takes over. as many human rows, the control: demonstrations are added until there are as many
             human rows as hi-ors was driven, then as many updates of cloning. Hypothesis: hi-ors succeeds more often.
    An evaluation on --starts distinct starts follows.
    """
    begun = runs.demonstrations(cell.folder / "demonstrations", cell.seed, cell.demonstrations, **SIDE)
    if cell.way == THEIRS:
        made = evaluated(cell, lerobot_trained(cell, begun))
        return {"successes": runs.successes(made, cell.starts)[-1], "draw": runs.draw(begun)}
    clone = cloned(cell, begun)
    if cell.way == OURS:
        return {"successes": runs.successes(clone, cell.starts)[-1], "draw": runs.draw(begun)}
    improved = practised(cell, clone)
    rows = runs.effort(improved)["driven_by_the_operator"]
    made = improved if cell.way == HIORS else demonstrated(cell, clone, rows)
    counted = runs.effort(improved) if cell.way == HIORS else {"env_steps": 0, "driven_by_the_operator": rows}
    return {"successes": runs.successes(made, cell.starts)[-1], **counted, "draw": runs.draw(begun)}


def options() -> str:
    inside = ", ".join(f"{name}: {value}" for name, value in OPTIONS.items())
    return f"policy.options={{{inside}, pretrained_backbone_weights: null}}"


def cloned(cell: Namespace, begun: Path) -> Path:
    """Return the run that has cloned the demonstrations, and was evaluated."""
    words = ["plan=sft", *PLAIN, options(), "algo.ema_decay=0", f"seed={cell.seed}", f"eval_episodes={cell.starts}"]
    words += [f"plan.phases.clone.until=['updates >= {cell.updates}']", *cell.words]
    return runs.finished(cell.folder / "cloned", *words, of=begun, forgets=True, **SIDE)


def lerobot_trained(cell: Namespace, begun: Path) -> Path:
    """Return the pretrained model that lerobot-train makes of the demonstrations."""
    dataset, out = cell.folder / "dataset", cell.folder / "lerobot"
    model = out / f"checkpoints/{cell.updates:06d}/pretrained_model"
    if not dataset.exists():
        command = [sys.executable, runs.ROOT / "tools/data.py", "export", begun, "--plain", dataset]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    if not model.exists():
        words = [f"--policy.{name}={value}" for name, value in OPTIONS.items()]
        command = [
            sys.executable, "-m", "lerobot.scripts.lerobot_train", "--dataset.repo_id=retake/draw",
            f"--dataset.root={dataset}", "--policy.type=act", "--policy.device=cpu", "--policy.push_to_hub=false",
            "--policy.pretrained_backbone_weights=null", *words, f"--steps={cell.updates}", "--batch_size=8",
            f"--save_freq={cell.updates}", "--eval_freq=0", "--num_workers=1", f"--seed={cell.seed}",
            "--wandb.enable=false", f"--output_dir={out}",
        ]  # fmt: skip
        with open(cell.folder / "lerobot.log", "a") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
    return model


def evaluated(cell: Namespace, model: Path) -> Path:
    """Return the run that has evaluated lerobot's model."""
    words = ["plan=evaluate", *PLAIN, f"policy.path={model}", f"seed={cell.seed}", f"eval_episodes={cell.starts}"]
    return runs.finished(cell.folder / "lerobot-evaluated", *words, *cell.words, **SIDE)


def practised(cell: Namespace, clone: Path) -> Path:
    """Return the run in which the arm practised, and the operator took over."""
    body = runs.practice(
        f"updates >= {cell.practice}", "{success: 0.5, demo: 0.5}", "[update]", pace="1.0", intervene=True,
        start="online.episodes >= 5",
    )  # fmt: skip
    old = runs.without("demonstrate", "clone", "baseline", "practise", "evaluate")
    words = ["plan=hiors", *PLAIN, options(), "algo.ema_decay=0", f"seed={cell.seed}", *old]
    return runs.finished(cell.folder / HIORS, *words, *runs.turns([body], cell.starts), *cell.words, of=clone, **SIDE)


def demonstrated(cell: Namespace, clone: Path, rows: int) -> Path:
    """Return the run that has cloned for as long, with as many more rows of demonstrations."""
    there = sum(episode.steps for episode in runs.episodes(clone, "demo"))
    more = f"actors: {{mode: teleop, into: demo}}, until: ['demo.steps >= {there + rows}']"
    body = runs.training(f"updates >= {cell.practice}", "{demo: 1.0}", "[update]")
    old = runs.without("clone", "evaluate")
    words = ["plan=sft", *PLAIN, options(), "algo.ema_decay=0", f"seed={cell.seed}", *old]
    words += [runs.phase("more", more), *runs.turns([body], cell.starts), *cell.words]
    return runs.finished(cell.folder / "demonstrated", *words, of=clone, **SIDE)


SETTINGS = {"demonstrations": 20, "updates": 2000, "starts": 50}
STUDIES = {
    "act": Study(act, SETTINGS, {way: {"way": way} for way in (THEIRS, OURS)}, control=THEIRS),
    "act_more": Study(
        act, {**SETTINGS, "practice": 1500}, {way: {"way": way} for way in (MORE, HIORS)}, control=MORE,
        more={"human rows": lambda cell: cell["driven_by_the_operator"]},
    ),
}  # fmt: skip
