#!/usr/bin/env python
"""Takes what a run has learned out of Retake.

policy.py export RUN FOLDER    writes the newest published policy into FOLDER, which must not be there yet:
                               a policy of lerobot as a `pretrained_model`, which lerobot's own programs load, and
                               with --lerobot a PI0 of ours, too;
                               any other as a program that torch alone runs, with reader.py beside it, which shows how
"""

import argparse
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.error_log import in_one_sentence
from serl_launcher.policies.base import Policy
from serl_launcher.policies.lerobot import LeRobotPolicy
from serl_launcher.store.index import Index
from tools.inputs import published

READER = Path(__file__).with_name("policy_reader.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("export", help="write the newest published policy into a folder")
    command.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    command.add_argument("--lerobot", action="store_true", help="write a PI0 of ours as lerobot's pi0")
    command.add_argument("--task", default="", help="the task in words, for a policy that reads them (none)")
    options = parser.parse_args()
    with in_one_sentence():
        print(export(options.run, options.folder, options.task, lerobot=options.lerobot))


def export(run: Path, folder: Path, task: str, *, lerobot: bool) -> str:
    """Write the run's newest published policy into a new folder. Returns what was written, in one sentence."""
    if not (run / "store/index.sqlite").exists():
        raise ConfigError(f"there is no run in {run}: name the folder that a learner was given as run_dir")
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name a new folder")
    with closing(Index(run / "store/index.sqlite")) as index:
        spec = Spec.from_dict(index.meta("spec"))
        policy, version = published(run, spec, index.weights(1))
    if not isinstance(policy, Policy):
        raise ConfigError(f"{type(policy).__name__} plans at each step, and is no policy that a file could hold")
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    if isinstance(policy, LeRobotPolicy) or lerobot:
        if isinstance(policy, LeRobotPolicy):
            policy.save(beside)
        else:
            save_pi0(policy, spec, beside)
        how = f"lerobot loads it, as in `lerobot-rollout --policy.path={folder}`"
    else:
        save(policy, spec, task, beside)
        how = f"`python {folder / 'reader.py'}` asks it once"
    beside.rename(folder)
    return f"{folder}: {type(policy).__name__}, weights {version['version']} ({version['sha256'][:12]}); {how}"


def save_pi0(policy: Policy, spec: Spec, folder: Path) -> None:
    """Write our PI0 as lerobot's."""
    from serl_launcher.policies.pi0 import PI0  # needs transformers
    from serl_launcher.policies.pi0_lerobot import save as save_there

    if not isinstance(policy, PI0):
        raise ConfigError(f"lerobot has no {type(policy).__name__}: leave --lerobot out")
    save_there(policy, spec, folder)


class Program(nn.Module):
    """A policy that does one task, asked for one observation."""

    def __init__(self, policy: Policy, task: str) -> None:
        super().__init__()
        self.policy, self._task = policy, (task,)

    def forward(self, observation: dict[str, Tensor], noise: Tensor) -> Tensor:
        """observation: {name: [1, ...]}, or [1, history, ...]. noise: [1, *noise_shape]. Returns [1, H, A]."""
        return self.policy.sample(observation, task=self._task, noise=noise.unsqueeze(0))[0]


def save(policy: Policy, spec: Spec, task: str, folder: Path) -> None:
    """Write policy.pt2, policy.json and reader.py."""
    if policy.tasks and task not in policy.tasks:
        raise ConfigError(f"this policy knows {', '.join(map(repr, policy.tasks))}: say --task and one of these")
    times = (policy.history,) if policy.history > 1 else ()
    features = {name: spec.observation[name] for name in policy.inputs}
    observation = {
        name: torch.zeros(1, *times, *feature.shape, dtype=getattr(torch, feature.dtype))
        for name, feature in features.items()
    }
    noise = torch.zeros(1, *policy.noise_shape)
    with torch.no_grad():
        torch.export.save(torch.export.export(Program(policy, task), (observation, noise)), folder / "policy.pt2")
    told: dict[str, Any] = {
        "task": task, "fps": spec.fps, "history": policy.history, "horizon": policy.horizon,
        "noise_shape": list(policy.noise_shape), "mode_at_zero": policy.mode_at_zero,
        "observation": {
            name: {"shape": [*times, *feature.shape], "dtype": feature.dtype, "units": list(feature.units)}
            for name, feature in features.items()
        },
        "action": {
            "names": list(spec.action.names), "units": list(spec.action.units), "shape": list(spec.action.shape),
            "low": np.asarray(spec.action.low).tolist(), "high": np.asarray(spec.action.high).tolist(),
        },
    }  # fmt: skip
    (folder / "policy.json").write_text(json.dumps(told, indent=1))
    shutil.copy(READER, folder / "reader.py")


if __name__ == "__main__":
    main()
