"""Q-chunking (QC: Li et al. 2025, arXiv 2507.07969) and flow Q-learning (FQL: Park et al. 2025, arXiv 2502.02538).

A flow imitates all data, and critics learn the values of its chunks by (1) of chunk_actor_critic.py.
Q-chunking (qc.yaml) acts with the best of n samples, by the critics: the data's support is the only constraint.
FQL (fql.yaml) trains a second policy, mu, that makes a chunk from noise in one step. It climbs the critics, and stays
near the flow's chunk from the same noise:
    (2) L = alpha |mu(s, noise) - flow(s, noise)|^2 / (H A) - Q(s, mu(s, noise)) / mean_batch |Q|.
The divisor, so that alpha does not depend on the size of returns, is what its authors advise for new tasks.
As long as there are no values, as in a phase that clones, mu learns the first term alone: it acts as the flow would.
Over chunks this is what the first paper calls QC-FQL; with `policy.horizon=1` it is FQL.
"""

from collections.abc import Callable
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import descend
from serl_launcher.algorithms.chunk_actor_critic import NEXT, ActsByCritic, ChunkActorCritic, Parts, first_step
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.policies.heads.flow import Flow
from serl_launcher.policies.improved import Improved
from serl_launcher.types import Batch, Metrics, Observation


class QC(ActsByCritic):
    """Imitate all data (`update_clone`), learn values (`update_critic`), act with the best of `samples` chunks.

    samples, proposal_noise: as in Improved. The other arguments are those of Parts.
    """

    changeable = ("samples", "proposal_noise")

    def __init__(self, spec: Spec, *, samples: int, proposal_noise: float, **parts: Any) -> None:
        made = Parts(spec, "qc", **parts)
        super().__init__(made, Improved(made.policy, made.critic, samples=samples, proposal_noise=proposal_noise))


class FQL(ChunkActorCritic):
    """Imitate all data by a flow (`update_clone`), learn values (`update_critic`), and train the one-step policy that
    acts (`update_one_step`; before the first `update_critic`, `update_clone` does).

    policy: its head is a Flow. Makes the one-step policy too, whose head takes one step.
    distill_weight: alpha of (2). normalize_values: whether (2) has its divisor.
    one_step_optimizer: makes the one-step policy's optimiser.
    The other arguments are those of Parts.
    """

    changeable = ("distill_weight", "normalize_values")

    def __init__(
        self, spec: Spec, *, policy: Callable[[Spec], HeadPolicy], distill_weight: float, normalize_values: bool,
        one_step_optimizer: Callable[[nn.Module], Optimizer], **parts: Any,
    ) -> None:  # fmt: skip
        made = Parts(spec, "fql", policy=policy, **parts)
        head = made.policy.head
        if not isinstance(head, Flow) or head.log_noise_level is not None or head.is_deterministic:
            raise ConfigError(
                "algo=fql distils a flow that starts at noise and is sampled without more of it: say policy=flow"
            )
        super().__init__(made)
        self.policy, self.critic, self.one_step = made.policy, made.critic, policy(spec)
        assert isinstance(self.one_step.head, Flow)
        self.one_step.head.steps = 1
        self.one_step_optimizer = one_step_optimizer(_Sampled(self.one_step))
        self.distill_weight, self.normalize_values = distill_weight, normalize_values
        self.windows["update_one_step"] = self.windows["update_critic"]

    @property
    def acting(self) -> HeadPolicy:
        return self.one_step

    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the flow's imitation loss; before there are values, the one-step policy follows it."""
        batch = self.augment(batch)
        metrics = descend(self.policy_optimizer, batch, self.imitation_loss)
        if self.critic_optimizer.steps:
            return metrics
        return metrics | descend(self.one_step_optimizer, batch, self.distil_loss, "one_step_gradient")

    def update_one_step(self, batch: Batch) -> Metrics:
        """Take one step of the one-step policy down (2); critics and flow do not change."""
        return descend(self.one_step_optimizer, self.augment(batch), self.one_step_loss, "one_step_gradient")

    def following_action(self, batch: Batch, following: Observation) -> Tensor:
        return self.one_step.rsample(following, seed=batch.seed, stream=NEXT, task=batch.task)[0]

    def distil_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the first term of (2), without alpha."""
        loss = (batch.weight * self._distance(batch, self.one_step_optimizer.forward(batch))).mean()
        return loss, {"distill": loss.detach()}

    def one_step_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (2)."""
        action = self.one_step_optimizer.forward(batch)  # [B, H, A]
        distance = self._distance(batch, action)
        value = self.value_by_action(first_step(batch.observation), action)
        size = value.detach().abs().mean() + 1e-6 if self.normalize_values else 1.0
        loss = self.distill_weight * distance - value / size
        metrics = {"distill": distance.detach().mean(), "value_of_policy": value.detach().mean()}
        loss = (batch.weight * loss).mean()
        return loss, {"one_step_loss": loss.detach(), **metrics}

    def _distance(self, batch: Batch, action: Tensor) -> Tensor:
        """Return the mean square by which scaled actions [B, H, A] differ from the flow's of the same noise, [B]."""
        with torch.no_grad():
            flows, _ = self.policy.rsample(first_step(batch.observation), seed=batch.seed, task=batch.task)
        unit = self.policy.scale.to_unit
        return (unit(action) - unit(flows)).square().mean((1, 2))


class _Sampled(nn.Module):
    """The module that the one-step policy's optimiser runs: chunks with a gradient."""

    def __init__(self, policy: HeadPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: Batch) -> Tensor:
        return self.policy.rsample(first_step(batch.observation), seed=batch.seed, task=batch.task)[0]
