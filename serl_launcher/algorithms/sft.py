"""Imitation of the batch's actions: supervised fine-tuning, and the loss of Hi-ORS rejection sampling.

Hi-ORS (arXiv 2510.26406) imitates the successful episodes of the newest policies, human corrections included, with the
policy's own loss: L = E[1_m(episode) loss(row)]. The plan selects these episodes by a view with `keep: [successful]`.
No value is learned.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from serl_client.spec import Spec
from torch import nn

from serl_launcher.algorithms.base import Algorithm, frozen
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.policies.base import Policy
from serl_launcher.types import Batch, IdleFilter, Metrics, Window
from serl_launcher.utils.distributed import gathered
from serl_launcher.utils.optim import Optimizer


class SFT(Algorithm):
    """Minimise the policy's imitation loss; act with the exponential moving average (EMA) of its weights.

    ema_decay: share of the old average that an update keeps, 0 to 1. Update k, counted from 0, keeps
        min(ema_decay, (1 + k) / (10 + k)), so that the initial random weights are soon forgotten.
    idle_filter: {threshold, column, entries} as in types.IdleFilter; no window starts where the robot stands still.
        column None: the column that the policy imitates. threshold 0: windows start at any step.
    augment: makes the image augmentation; None: images stay as they are.

    Policy and average share frozen weights. Raises ConfigError if `augment` is given and the policy reads no images.
    """

    def __init__(
        self, spec: Spec, *, policy: Callable[[Spec], Policy], optimizer: Callable[[nn.Module], Optimizer],
        ema_decay: float, idle_filter: Mapping[str, Any], augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.policy = policy(spec)
        self.averaged = copy.deepcopy(self.policy, frozen(self.policy)).requires_grad_(False)
        self.optimizer = optimizer(self.policy)
        self.ema_decay = ema_decay
        self.augment = augmentation(augment, self.policy.inputs)
        self.windows = {"update": Window(self.policy.offsets, idle_filter=_idle_filter(self.policy, **idle_filter))}

    @property
    def acting(self) -> Policy:
        return self.averaged

    def update(self, batch: Batch) -> Metrics:
        """Take one step down the mean loss, weighted by the batch's `weight`."""
        found = []
        for part in self.optimizer.parts(self.augment(batch)):
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
        decay = min(self.ema_decay, (1 + before) / (10 + before))
        for averaged, current in zip(self.averaged.parameters(), self.policy.parameters(), strict=True):
            if current.requires_grad:
                with gathered([current]):
                    averaged.lerp_(current, 1 - decay)


def _idle_filter(
    policy: Policy, *, threshold: float, column: str | None, entries: Sequence[int] | None
) -> IdleFilter | None:
    if not threshold:
        return None
    if column is None:
        column, entries = policy.imitation_target, policy.entries if entries is None else entries
    return IdleFilter(threshold, column, None if entries is None else tuple(entries))
