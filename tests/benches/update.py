"""One update of SAC and of RLPD, as their yamls have them, beside a minimal loop in torch: the same networks, batch,
fused optimiser and number of draws, and nothing else. An update of RLPD is one of the critics, then one of all.
Then how long training stands still while weights are published, beside one copy of as many bytes into memory in use.

Both run on one thread, in turn, on states of 8 numbers and actions of 7. The minimal loop neither normalises states nor
scales actions, refuses no gradient and shows nothing.
"""

import argparse
import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from serl_client import messages as m
from torch import Tensor
from torch.nn import functional

from serl_launcher.config import composed
from serl_launcher.optim.distributed import World
from serl_launcher.optim.optimizer import kernels
from serl_launcher.replay.batches import blank
from serl_launcher.training.build import build
from serl_launcher.training.ranks import Ranks
from serl_launcher.training.writers import Patience, Publisher
from serl_launcher.types import Batch
from tests.shared.common import CONFIG

from .paired import Figure, option, ratio, rounds, seconds
from .replay import SMALL, STATE

OPTIONS = {
    "--rounds": option(21, "(21)"), "--updates": option(50, "in each round (50)"),
    "--megabytes": option(200, "of weights that are published (200)"),
}  # fmt: skip


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    for name in ("sac", "rlpd"):
        config = composed(CONFIG, [f"algo={name}"])
        algorithm: Any = build(config, SMALL)
        batch = filled(config.batch_size, algorithm)
        minimal = Minimal(algorithm, batch)
        each = [getattr(algorithm, update) for update in config.updates]
        theirs = [getattr(minimal, update) for update in config.updates]
        contenders = {
            "ours": partial(seconds, partial(in_turn, each, batch), options.updates),
            "minimal": partial(seconds, partial(in_turn, theirs), options.updates),
        }
        measured = rounds(contenders, options.rounds, 2)
        value, beside = 1e3 * median(measured["ours"]), ratio(measured, "ours", "minimal")
        yield Figure(
            f"{name}, an update with a batch of {config.batch_size}", value, "ms", "a minimal loop", beside, "<= 1.1"
        )
    yield publishing(folder, options.megabytes, options.rounds)


def publishing(folder: Path, megabytes: int, count: int) -> Figure:
    """What Publisher.begin takes; the rest is done by a thread, which each round waits for."""
    tensors = {f"layer.{number}.weight": torch.randn(500, 500) for number in range(megabytes)}
    algorithm: Any = SimpleNamespace(acting=SimpleNamespace(published=lambda: tensors, parameters=tuple))
    versions = iter(range(1, 10**9))
    ranks, patience = Ranks(algorithm, World(), {}), Patience(folder)
    publisher = Publisher(folder / "weights", ranks, lambda _: m.Done(0, next(versions)), patience)
    source = torch.cat([tensor.flatten() for tensor in tensors.values()])
    target = torch.zeros_like(source)

    def ours() -> float:
        tensors["layer.0.weight"].add_(1)  # other weights than before are written
        taken = seconds(lambda: publisher.begin(0))
        publisher.finish()
        return taken

    measured = rounds({"ours": ours, "copy": partial(seconds, lambda: target.copy_(source))}, count, 2)
    value, beside = 1e3 * median(measured["ours"]), ratio(measured, "ours", "copy")
    return Figure(f"publishing {megabytes} MB: training stands still", value, "ms", "one copy", beside, "<= 1.5")


def in_turn(updates: list[Any], *arguments: Any) -> None:
    for update in updates:
        update(*arguments)


def filled(count: int, algorithm: Any) -> Batch:
    batch = blank(SMALL, algorithm.windows["update"], count)
    following: Any = batch.next_observation
    for column in (batch.observation[STATE], following[STATE], batch.reward):
        column.normal_()
    batch.action.uniform_(-1, 1)
    for column in (batch.valid, batch.length):
        column.fill_(1)
    batch.seed.random_()
    return batch


class Minimal:
    """SAC in as few lines of torch as it takes."""

    def __init__(self, algorithm: Any, batch: Batch) -> None:
        self.policy, self.critic = (copy.deepcopy(part.network) for part in (algorithm.policy, algorithm.critic))
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        rate = algorithm.critic_optimizer.learning_rate
        self.optimizers = [
            torch.optim.AdamW(weights, rate, weight_decay=0.0, fused=True)
            for weights in (self.policy.parameters(), self.critic.parameters(), [self.log_alpha])
        ]
        self.weights = list(self.critic.parameters()), list(self.target.parameters())
        self.discount, self.tau, self.backup = algorithm.discount, algorithm.tau, algorithm.backup_entropy
        self.bounds, self.entropy = algorithm.policy.log_std_bounds, algorithm.target_entropy
        self.count = algorithm.critic.num_critics
        following: Any = batch.next_observation
        self.state, self.next = batch.observation[STATE].flatten(1), following[STATE].flatten(1)
        self.action, self.reward = batch.action.flatten(1), batch.reward[:, 0]
        self.done = batch.terminated[:, 0].float()

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.policy(state).chunk(2, -1)
        log_std = log_std.clamp(*self.bounds)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        density = 2 * (raw + functional.softplus(-2 * raw)) - log_std - 0.5 * noise.square()
        return raw.tanh(), density.sum(-1)

    def value(self, critic: torch.nn.Module, state: Tensor, action: Tensor) -> Tensor:
        return critic(torch.cat([state, action], -1).expand(self.count, -1, -1))

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward(inputs=optimizer.param_groups[0]["params"])
        optimizer.step()

    def update_critic(self) -> None:
        with torch.no_grad():
            action, log_prob = self.act(self.next)
            value = self.value(self.target, self.next, action).amin(0)
            if self.backup:
                value -= self.log_alpha.exp() * log_prob
            target = self.reward + self.discount * (1 - self.done) * value
        loss = (self.value(self.critic, self.state, self.action) - target).square().sum(0).mean()
        self.step(self.optimizers[1], loss)
        with torch.no_grad():
            kernels._foreach_lerp_(self.weights[1], self.weights[0], self.tau)

    def update(self) -> None:
        self.update_critic()
        action, log_prob = self.act(self.state)
        value = self.value(self.critic, self.state, action).mean(0)
        self.step(self.optimizers[0], (self.log_alpha.detach().exp() * log_prob - value).mean())
        self.step(self.optimizers[2], -self.log_alpha * (log_prob.detach().mean() + self.entropy))
