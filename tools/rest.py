"""Shows what CarRacing does at rest: with the middle of the bounds, the neutral action, and the published map.

A controller that gives 0, and the drift of `policy: brownian`, act for --steps steps on the tracks of --seeds. The
published map of a controller's three numbers u in [-1, 1] is steering u, gas (u + 1) / 2, brake clip(u, 0, 1)
(Ha and Schmidhuber 2018, carracing/model.py of WorldModelsExperiments). Needs the extra `carracing`.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from serl_client.controller import BrownianPolicy
from serl_client.spec import Array, Feature, Spec

from robot_infra.tasks.gym import GymEnv
from serl_launcher.config import composed
from serl_launcher.networks.mlp import ActionScale

CONFIG = Path(__file__).parents[1] / "config"
Act = Callable[[], Array]


def published(unit: Array) -> Array:
    return np.array([unit[0], (unit[1] + 1) / 2, np.clip(unit[2], 0, 1)], np.float32)


def zero(action: Feature) -> Act:
    return lambda: ActionScale(action).from_unit(torch.zeros(3)).numpy()


def drift(spec: Spec, seed: int, mapped: Callable[[Array], Array] = lambda action: action) -> Act:
    policy = BrownianPolicy(spec, seed)
    policy.begin(f"drift-{seed}", {}, "")

    def act() -> Array:
        action = policy.act({}, step=0, previous_action=None, reset=False)
        assert action is not None
        return mapped(action)

    return act


def driven(env: GymEnv, act: Act, seed: int, steps: int) -> tuple[float, float]:
    """Return the last speed of an episode, and its return."""
    env.reset(seed)
    rewards = [env.step(act()).reward for _ in range(steps)]
    return float(np.hypot(*env._env.unwrapped.car.hull.linearVelocity)), float(np.sum(rewards))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    neutral = [*composed(CONFIG, ["task=carracing"]).task.env.neutral]
    with GymEnv("CarRacing-v3", neutral=neutral) as env:
        said = env.spec
        unsaid = replace(said, action=replace(said.action, neutral=None))
        unit = replace(said, action=Feature((3,), low=np.array(-1), high=np.array(1)))
        for name, act in (
            ("zero, middle of the bounds", lambda seed: zero(unsaid.action)),
            (f"zero, neutral {neutral}", lambda seed: zero(said.action)),
            ("zero, published", lambda seed: lambda: published(np.zeros(3))),
            ("drift, middle of the bounds", lambda seed: drift(unsaid, seed)),
            (f"drift, neutral {neutral}", lambda seed: drift(said, seed)),
            ("drift, published", lambda seed: drift(unit, seed, published)),
        ):
            found = np.array([driven(env, act(seed), seed, args.steps) for seed in range(args.seeds)])
            print(f"{name:32} speed {found[:, 0].mean():6.1f}  return {found[:, 1].mean():6.1f}", flush=True)


if __name__ == "__main__":
    main()
