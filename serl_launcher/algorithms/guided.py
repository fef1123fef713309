"""Critic-guided sampling: a diffusion or flow policy imitates, and the gradient of its critics leads its samples.

The policy is never trained by the critics; the formula and its two weights are those of policies/guidance.py. With
weight 0 and task_weight 1 the samples are the policy's own, bit by bit. Targets, (1) of judged.py, come from led
samples too, because these act.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor

from serl_launcher.algorithms.judged import Judged
from serl_launcher.networks.critics import Critic
from serl_launcher.networks.seeded_noise import uniform
from serl_launcher.policies.base import Policy
from serl_launcher.policies.chunk import NO_TASK, HeadPolicy
from serl_launcher.policies.guidance import Guidance
from serl_launcher.policies.wrapped import Wrapped
from serl_launcher.types import Batch, Metrics, Observation

SHARE = 0.01  # by which the mean |Q| follows that of a batch; more in the first updates
DROPPED = 3  # stream of a row's random numbers for leaving its task out


class Led(Wrapped):
    """Samples of `policy` that `critic` leads. critic_horizon: h, actions that it judges."""

    size: Tensor  # [], mean |Q| in training

    def __init__(
        self, policy: HeadPolicy, critic: Critic, *, critic_horizon: int, weight: float, task_weight: float
    ) -> None:
        super().__init__(policy)
        self.critic, self.critic_horizon = critic, critic_horizon
        self.weight, self.task_weight = weight, task_weight
        self.register_buffer("size", torch.ones(()))

    def choose(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        def value(chunk: Tensor) -> Tensor:
            return self.critic.judge(observation, chunk[None, :, : self.critic_horizon])[0]

        guidance = Guidance(value, self.size, self.weight, self.task_weight)
        return self.policy.led(observation, noise, guidance, task=task, without=[NO_TASK] * len(noise))


class Guided(Judged):
    """Imitate (`update_clone`), judge (`update_critic`), and act by samples that the critics lead.

    weight: w of guidance.py; the critics' slope. 0: the policy alone.
    task_weight: u there, of classifier-free guidance; 1: the condition alone.
    task_drop: share of rows that are imitated without their task; classifier-free guidance needs some.
    The other arguments are those of Judged. Raises ConfigError for a head that cannot be led, and for a task_weight
    other than 1 with a policy that reads no task, or that never learned without one.
    """

    changeable = ("weight", "task_weight")  # of the sampler alone: see config.changeable
    means = ("acts.size",)

    def __init__(self, spec: Spec, *, weight: float, task_weight: float, task_drop: float, **judged: Any) -> None:
        if not 0 <= task_drop < 1 or weight < 0:
            raise ConfigError(f"algo.task_drop={task_drop}, algo.weight={weight}: say a share below 1, and 0 or more")
        self._weights, self.task_drop = {"weight": weight, "task_weight": task_weight}, task_drop
        super().__init__(spec, **judged)

    def checked(self, policy: Policy) -> HeadPolicy:
        made = super().checked(policy)
        if not made.head.steers:
            raise ConfigError(
                f"algo=guided leads the steps of a sampler, which {type(made.head).__name__} does not have: say "
                "policy.head.path=linear with policy=flow, or policy=chunk with head=ddim or head=ddpm"
            )
        if self._weights["task_weight"] != 1 and not ((made.tasks or made.reads_words) and self.task_drop):
            raise ConfigError(
                "algo.task_weight other than 1 compares with samples without a task: say policy.tasks=[...] and "
                "algo.task_drop=0.1"
            )
        return made

    def around(self, policy: HeadPolicy, critic: Critic) -> Led:
        return Led(policy, critic, critic_horizon=self.critic_horizon, **self._weights)

    def calm(self, noise: Tensor) -> Tensor:
        return torch.zeros_like(noise) if self.policy.mode_at_zero else noise

    def update_critic(self, batch: Batch) -> Metrics:
        """Take one step of the critics and of their targets, and follow the size of their values."""
        metrics = super().update_critic(batch)
        before = self.critic_optimizer.steps - 1
        self.acting.size.lerp_(self.value(batch).abs().mean(), max(SHARE, 9 / (10 + before)))
        return metrics

    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the policy's imitation loss, with the task left out in a share of the rows."""
        if self.task_drop:
            dropped = uniform(batch.seed, (), DROPPED) < self.task_drop
            task = [
                NO_TASK if is_dropped else each for each, is_dropped in zip(batch.task, dropped.tolist(), strict=True)
            ]
            batch = replace(batch, task=tuple(task))
        return super().update_clone(batch)
