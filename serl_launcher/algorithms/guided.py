"""Critic-guided sampling: a diffusion or flow policy imitates, and the gradient of its critics leads its samples.

The policy is never trained by the critics; the formula and its two weights are those of policies/guidance.py. With
weight 0 and task_weight 1 the samples are the policy's own, bit by bit. The targets (1) of
chunk_actor_critic.py come from led samples too, because these act.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor

from serl_launcher.algorithms.chunk_actor_critic import ActsByCritic, Parts
from serl_launcher.networks.critics import Critic
from serl_launcher.networks.seeded_noise import uniform
from serl_launcher.policies.chunk import NO_TASK, HeadPolicy
from serl_launcher.policies.guidance import DROPPED, Guidance, pick_words
from serl_launcher.policies.wrapped import Wrapped
from serl_launcher.types import Batch, Metrics, Observation

SHARE = 0.01  # by which the mean |Q| moves towards a batch's; more in the first updates


class Led(Wrapped):
    """Samples of `policy` that `critic` leads."""

    policy: HeadPolicy  # type: ignore[assignment]
    size: Tensor  # [], mean |Q| in training

    def __init__(self, policy: HeadPolicy, critic: Critic, *, weight: float, task_weight: float) -> None:
        super().__init__(policy)
        self.critic, self.weight, self.task_weight = critic, weight, task_weight
        self.mode_at_zero = policy.mode_at_zero
        self.register_buffer("size", torch.ones(()))

    def choose(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        def value(chunk: Tensor) -> Tensor:
            return self.critic.mean_value(observation, chunk)

        guidance = Guidance(value, self.size, self.weight, self.task_weight)
        return self.policy.led(observation, noise, guidance, task=task, without=[NO_TASK] * len(noise))


class Guided(ActsByCritic):
    """Imitate (`update_clone`), learn values (`update_critic`), and act by samples that the critics lead.

    weight: w of guidance.py; the critics' slope. 0: the policy alone.
    task_weight: u there, of classifier-free guidance; 1: the condition alone.
    task_drop: share of rows that are imitated without their task; classifier-free guidance needs some.
    The other arguments are those of Parts. Raises ConfigError for a head that cannot be led, and for a task_weight
    other than 1 with a policy that reads no task, or that never learned without one.
    """

    changeable = ("weight", "task_weight", "task_drop")
    means = ("acts.size",)

    def __init__(self, spec: Spec, *, weight: float, task_weight: float, task_drop: float, **parts: Any) -> None:
        if not 0 <= task_drop < 1 or weight < 0:
            raise ConfigError(f"algo.task_drop={task_drop}, algo.weight={weight}: say a share below 1, and 0 or more")
        made = Parts(spec, "guided", **parts)
        policy = made.policy
        if not policy.head.steers:
            raise ConfigError(
                f"algo=guided leads the steps of a sampler, which {type(policy.head).__name__} does not have: say "
                "policy.head.path=linear with policy=flow, or policy=chunk with head=ddim or head=ddpm"
            )
        if task_weight != 1 and not ((policy.tasks or policy.reads_words) and task_drop):
            raise ConfigError(
                "algo.task_weight other than 1 compares with samples without a task: say policy.tasks=[...] and "
                "algo.task_drop=0.1"
            )
        super().__init__(made, Led(policy, made.critic, weight=weight, task_weight=task_weight))
        self.task_drop = task_drop

    def update_critic(self, batch: Batch) -> Metrics:
        """Take one step of the critics and of their targets, and update the mean size of their values."""
        metrics = super().update_critic(batch)
        before = self.critic_optimizer.steps - 1
        self.acting.size.lerp_(self.value(batch).abs().mean(), max(SHARE, 9 / (10 + before)))
        return metrics

    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the policy's imitation loss, with the task left out in a share of the rows."""
        if self.task_drop:
            dropped = uniform(batch.seed, (), DROPPED) < self.task_drop
            batch = replace(batch, task=pick_words(dropped, [NO_TASK] * len(batch), batch.task))
        return super().update_clone(batch)
