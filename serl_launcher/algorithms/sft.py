"""Imitation of what the batch holds: supervised fine-tuning, and Hi-ORS rejection sampling, which is a plan around it.

Hi-ORS (arXiv 2510.26406) imitates, with the policy's own loss, the episodes of the newest policies that succeeded,
human corrections among them: L = E[1_m(episode) loss(row)]. Which episodes count is the plan's choice of data (a view
that keeps the successful ones); no value is learned.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.policies.base import Policy
from serl_launcher.types import Batch, Carry, Decision, IdleFilter, Metrics, Observation, Window
from serl_launcher.utils.distributed import gathered
from serl_launcher.utils.optim import Optimizer


class SFT(Algorithm):
    """Minimises the policy's loss of imitation; acts with the moving average of its weights.

    `average`: the share of the old average that each update keeps, at most. The k-th update keeps (1 + k) / (10 + k),
    so that the random weights of the beginning are soon forgotten. What is frozen exists once.
    `idle_filter`: {threshold, column, entries} as in types.IdleFilter; no window starts where the robot waits. Column
    None: what the policy imitates; threshold 0: windows start anywhere.
    `augment` changes the images of each batch; None: they stay as they are.
    Raises ConfigError for `augment` where the policy sees no images.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        policy: Callable[[Spec], Policy],
        optimizer: Callable[[nn.Module], Optimizer],
        average: float,
        idle_filter: Mapping[str, Any],
        augment: Callable[[], Augment] | None,
    ) -> None:
        super().__init__()
        self.policy = policy(spec)
        frozen = {id(weight): weight for weight in self.policy.parameters() if not weight.requires_grad}
        self.averaged = copy.deepcopy(self.policy, frozen).requires_grad_(False)
        self.optimizer = optimizer(self.policy)
        self.average = average
        self.augment = augmentation(augment, self.policy.inputs)
        self.windows = {"update": Window(self.policy.offsets, idle_filter=_stillness(self.policy, **idle_filter))}

    @property
    def acting(self) -> Policy:
        return self.averaged

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        noise = torch.zeros_like(noise) if self.averaged.mode_at_zero and not explore else noise
        return Decision(self.averaged.sample(observation, task=task, noise=noise.unsqueeze(0))[0]), carry

    def update(self, batch: Batch) -> Metrics:
        """One step down the loss, its rows weighted by the batch's weights."""
        batch = self.augment(batch) if self.augment else batch
        found = []
        for part in self.optimizer.parts(batch):
            loss, metrics = self.optimizer(part)  # [B]
            loss = (part.weight * loss).mean()
            gradient = self.optimizer.step(loss)
            found.append({"loss": loss.detach(), "gradient": gradient, **metrics})
        self._follow()
        means = {name: torch.stack([part[name] for part in found]).mean() for name in found[0]}
        return {**means, "gradient": found[-1]["gradient"]}

    @torch.no_grad()
    def _follow(self) -> None:
        before = self.optimizer.steps - 1
        average = min(self.average, (1 + before) / (10 + before))
        for averaged, current in zip(self.averaged.parameters(), self.policy.parameters(), strict=True):
            if current.requires_grad:
                with gathered([current]):
                    averaged.lerp_(current, 1 - average)


def _stillness(
    policy: Policy, *, threshold: float, column: str | None, entries: Sequence[int] | None
) -> IdleFilter | None:
    if not threshold:
        return None
    if column is None:
        column, entries = policy.imitation_target, policy.entries if entries is None else entries
    return IdleFilter(threshold, column, None if entries is None else tuple(entries))
