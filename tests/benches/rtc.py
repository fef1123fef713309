"""What a delay costs a policy of chunks, and what real-time chunking gains: the simulated arm, by seed.

For each seed: demonstrations by the scripted operator (their draw is part of the seed), and two clones of them after
equally many updates: one learned with `policy.max_delay` to continue chunks, the other did not. Both act on the same
starts, with answers that come so many steps late, naively (`chunks=async`) and with `chunks=rtc`: the first is trained
for it, the second guided. The first answer of an episode is waited for. A jump is the distance between the actions
before and at a border, all entries in -1..1.

Each finished cell is written to --out, with seed, commit and figures. The next call goes on at the first missing one.
Prints the table of docs/chunks.md.
"""

import argparse
import copy
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client import messages as m
from serl_client.chunks import RULES
from serl_client.controller import asked
from serl_client.network import Answer
from serl_client.spec import Array

from robot_infra.env import RobotEnv
from robot_infra.robots import sim_arm
from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.config import composed
from serl_launcher.training.build import build
from serl_launcher.types import Batch
from serl_launcher.utils.report import wilson
from tests.shared.common import CONFIG, ROOT

from .paired import option

STATE = "observation.state"
MAX_STEPS, NOISE = 60, 0.2  # as in config/task/sim_arm.yaml
N_ACTION_STEPS, MAX_DELAY = 4, 4
FIRST_START = 1_000_000  # seeds of starts; demonstrations have smaller ones
NETS = {"learned to continue": [f"policy.max_delay={MAX_DELAY}"], "did not": []}
WAYS = {"naive": "async", "rtc": "rtc"}
OPTIONS = {
    "--out": option(ROOT / "docs/chunks.json", "file of the finished cells (docs/chunks.json)"),
    "--seeds": option([0, 1, 2], "of demonstrations, nets, noise and starts (0 1 2)"),
    "--starts": option(100, "for each cell (100)"), "--demonstrations": option(60, "episodes (60)"),
    "--updates": option(2000, "of each clone (2000)"), "--delays": option([0, 1, 2, 3], "steps (0 1 2 3)"),
}  # fmt: skip


def measure(folder: Path, options: argparse.Namespace) -> str:
    """Return the table; `options.out` has what it is made of."""
    torch.set_num_threads(1)
    cells = json.loads(options.out.read_text()) if options.out.exists() else []
    env = sim_arm.make(max_steps=MAX_STEPS, noise=NOISE, clock="simulated")
    for seed in options.seeds:
        for net, words in NETS.items():
            clone: Algorithm | None = None
            for key in keys(seed, net, options.delays):
                if any(key.items() <= cell.items() for cell in cells):
                    continue
                clone = clone or cloned(env, seed, words, options)
                found = tried(env, PolicyHost(copy.deepcopy(clone), env.spec, "cpu"), key, options.starts)
                cells.append({**key, "commit": commit(), **found})
                options.out.write_text("[\n" + ",\n".join(json.dumps(cell) for cell in cells) + "\n]\n")
                print(json.dumps(cells[-1]), flush=True)
    return "\n".join(table(cells, options.delays))


def keys(seed: int, net: str, delays: list[int]) -> Iterator[dict[str, Any]]:
    """What names each cell of a seed and a net. Without a delay both ways are the same."""
    for delay in delays:
        for way in WAYS if delay else ("naive",):
            yield {"seed": seed, "net": net, "way": way, "delay": delay}


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


# -- the clones
def cloned(env: RobotEnv, seed: int, words: list[str], options: argparse.Namespace) -> Algorithm:
    """A flow policy after so many updates on this seed's demonstrations."""
    torch.manual_seed(seed)
    algorithm = build(composed(CONFIG, ["algo=sft", "policy=flow", *words]), env.spec)
    episodes = [demonstration(env, 1000 * seed + number) for number in range(options.demonstrations)]
    columns = {STATE: np.concatenate([e[0] for e in episodes]), "action": np.concatenate([e[1] for e in episodes])}
    kinds = {"mean": np.mean, "std": np.std, "low": np.min, "high": np.max}
    algorithm.set_statistics({kind: {name: of(c, 0) for name, c in columns.items()} for kind, of in kinds.items()})
    windows, generator = Windows.of(episodes, algorithm.acting.horizon), np.random.default_rng(seed)
    update: Any = algorithm
    for number in range(options.updates):
        update.update(windows.batch(generator.integers(len(windows.state), size=256), number))
    return algorithm


def demonstration(env: RobotEnv, seed: int) -> tuple[Array, Array]:
    """The states [T, S] and actions [T, A] of one episode."""
    observation, rows, ended = env.reset(seed, teleop=True), [], False
    while not ended:
        step = env.step(None)
        rows.append((observation[STATE], step.executed))
        observation, ended = step.observation, step.terminated or step.truncated
    states, actions = zip(*rows, strict=True)
    return np.stack(states), np.stack(actions).astype(np.float32)


@dataclass(frozen=True)
class Windows:
    """Every window of the demonstrations: state [N, S], action [N, H, A] with zeros behind the end, valid [N, H]."""

    state: Array
    action: Array
    valid: Array

    @classmethod
    def of(cls, episodes: list[tuple[Array, Array]], horizon: int) -> "Windows":
        states, actions, valid = [], [], []
        for state, action in episodes:
            padded = np.concatenate([action, np.zeros((horizon, action.shape[1]), np.float32)])
            places = np.arange(len(action))[:, None] + np.arange(horizon)
            states.append(state)
            actions.append(padded[places])
            valid.append(places < len(action))
        return cls(np.concatenate(states), np.concatenate(actions), np.concatenate(valid))

    def batch(self, rows: Array, number: int) -> Batch:
        state, action, valid = (torch.from_numpy(each[rows]) for each in (self.state, self.action, self.valid))
        never, size = torch.zeros_like(valid), len(rows)
        return Batch(
            {STATE: state.unsqueeze(1)}, action, valid.float(), valid, never, never, never, valid.sum(1),
            torch.ones(size), torch.arange(size), torch.arange(size) + 1_000_000 * number,
        )  # fmt: skip


# -- with a delay
class Delayed:
    """A Source whose answers come `delay` steps after their question; `now` is the step, set by the loop."""

    def __init__(self, host: PolicyHost, delay: int) -> None:
        self.host, self.delay, self.now = host, delay, 0
        self._answer: Answer | None = None

    def ask(
        self, observation: Mapping[str, Array], *, step: int, seed: int, previous_action: Array | None, reset: bool,
        explore: bool, task: str, prefix: Array | None = None, committed: int = 0,
    ) -> None:  # fmt: skip
        arrays = asked(observation, previous_action, prefix)
        question = m.InferenceRequest(step, seed, reset, explore, task, arrays, committed)
        self.host.check(question)
        act = self.host.answer([Question(b"", question)])[0]
        self._answer = Answer(step, act.version, act.arrays["action"], {})

    def wait_answer(self, step: int, timeout: float) -> Answer | None:
        """The robot stands still until the answer to step 0."""
        if self._answer is None or (self._answer.step and self.now < self._answer.step + self.delay):
            return None
        answer, self._answer = self._answer, None
        return answer

    def forget(self) -> None:
        self._answer = None


def tried(env: RobotEnv, host: PolicyHost, key: Mapping[str, Any], starts: int) -> dict[str, Any]:
    """The figures of one cell."""
    source = Delayed(host, key["delay"])
    controller = RULES[WAYS[key["way"]]](source, deadline=0.0, n_action_steps=N_ACTION_STEPS)
    successes, held, jumps = 0, 0, []
    for number in range(starts):
        seed = FIRST_START + 1000 * key["seed"] + number
        observation, before, step, ended = env.reset(seed), None, 0, False
        controller.begin(f"{seed}", {"explore": True, "weights": None}, env.task)
        while not ended:
            source.now = step
            action = controller.act(observation, step=step, previous_action=before, reset=step == 0)
            held += action is None
            if controller.chunk_start and before is not None and action is not None:
                jumps.append(float(np.linalg.norm(action - before)))
            done = env.step(action)
            observation, before, step = done.observation, done.executed, step + 1
            ended = done.terminated or done.truncated
            successes += bool(ended and done.success)
    p50, p95 = np.quantile(jumps, (0.5, 0.95))
    return {
        "starts": starts, "successes": successes, "held": held, "borders": len(jumps), "jump_p50": round(float(p50), 3),
        "jump_p95": round(float(p95), 3),
    }  # fmt: skip


# -- the table
def table(cells: list[dict[str, Any]], delays: list[int]) -> Iterator[str]:
    """Markdown: one line for each net, way and delay, all seeds together."""
    yield "| net | `chunks` | delay, steps | success | 95 % interval | by seed | jump p50 | jump p95 |"
    yield "|---|---|---|---|---|---|---|---|"
    for net in NETS:
        for delay in delays:
            for way in WAYS:
                part = [c for c in cells if (c["net"], c["way"], c["delay"]) == (net, way, delay)]
                if not part:
                    continue
                count, of = (sum(cell[name] for cell in part) for name in ("successes", "starts"))
                low, high = wilson(count, of)
                seeds = ", ".join(str(cell["successes"]) for cell in part)
                p50, p95 = (float(np.mean([cell[name] for cell in part])) for name in ("jump_p50", "jump_p95"))
                yield (
                    f"| {net} | {WAYS[way]} | {delay} | {count} of {of} | {low:.0%} to {high:.0%} | {seeds} "
                    f"| {p50:.2f} | {p95:.2f} |"
                )
