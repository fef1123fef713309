"""Behaviour cloning (SFT), also Hi-ORS rejection sampling, with a moving average (EMA) of weights.

Hi-ORS (arXiv 2510.26406) imitates the successful episodes of the newest policies, human corrections included, with the
policy's own loss: L = E[1_m(episode) loss(row)]. The plan selects these episodes by a view with `keep: [successful]`.
No value is learned.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, descend, frozen_copy, soft_update
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Policy
from serl_launcher.types import Batch, IdleFilter, Metrics, Window


class SFT(Algorithm):
    """Minimise the policy's imitation loss; act with the exponential moving average (EMA) of its weights.

    ema_decay: share of the old average that an update keeps, 0 to 1. Update k, counted from 0, keeps
        min(ema_decay, (1 + k) / (10 + k)), so that the initial random weights are soon forgotten.
    idle_filter: {threshold, column, entries} as in types.IdleFilter; no window starts where the robot stands still.
        column None: the column that the policy imitates. threshold 0: windows start at any step.
    augment: makes the image augmentation; None: images stay as they are.

    Policy and average share frozen weights. Raises ConfigError for a policy that is not trained here, and if `augment`
    is given and the policy reads no images.
    """

    changeable = ("ema_decay", "idle_filter")

    def __init__(
        self, spec: Spec, *, policy: Callable[[Spec], Policy], optimizer: Callable[[nn.Module], Optimizer],
        ema_decay: float, idle_filter: Mapping[str, Any], augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.policy = policy(spec)
        if not isinstance(self.policy, Policy):
            raise ConfigError(f"{type(self.policy).__name__} is not trained here: say algo=residual, or policy=flow")
        self.averaged = frozen_copy(self.policy)
        kinds = nn.BatchNorm1d | nn.BatchNorm2d  # their buffers are means over batches
        self._counts = any(isinstance(each, kinds) for each in self.policy.modules())
        self.optimizer = optimizer(self.policy)
        self.ema_decay = ema_decay
        self.augment = augmentation(augment, self.policy.inputs)
        self.windows = {"update": Window(self.policy.offsets, idle_filter=_idle_filter(self.policy, **idle_filter))}

    @property
    def acting(self) -> Policy:
        return self.averaged

    def update(self, batch: Batch) -> Metrics:
        """Take one step down the mean loss, weighted by the batch's `weight`."""
        metrics = descend(self.optimizer, self.augment(batch), self.loss)
        before = self.optimizer.steps - 1
        soft_update(self.averaged, self.policy, 1 - min(self.ema_decay, (1 + before) / (10 + before)))
        if self._counts:
            for copied, own in zip(self.averaged.buffers(), self.policy.buffers(), strict=True):
                copied.copy_(own)
        return metrics

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the mean imitation loss, weighted by the batch's `weight`."""
        loss, metrics = self.optimizer.forward(batch)  # [B]
        loss = (batch.weight * loss).mean()
        return loss, {"loss": loss.detach(), **metrics}


def _idle_filter(
    policy: Policy, *, threshold: float, column: str | None, entries: Sequence[int] | None
) -> IdleFilter | None:
    if not threshold:
        return None
    if column is None:
        column, entries = policy.imitation_target, policy.entries if entries is None else entries
    return IdleFilter(threshold, column, None if entries is None else tuple(entries))
