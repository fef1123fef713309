"""SAC through a flow policy over action chunks, such as PI0: what Hi-ORS calls sac_pi0 (arXiv 2510.26406).

An ensemble of critics learns Q(s, a_1..a_h) off policy, for the h actions of a chunk that run before the next chunk is
requested. The policy ascends Q by the gradient through all K steps of its own sampler. This is the deterministic policy
gradient (Silver et al. 2014), with the noise as part of the state. The policy is held near a frozen reference, which is
the policy after cloning, by the distance between their chunks from the same noise:
    (1) y = sum_{i < h} gamma^i r_i + gamma^h (1 - terminated) min_e Q'_e(s_h, pi(s_h; noise')),
    (2) L = -mean_e Q_e(s, pi(s; noise)) + distill_weight |pi(s; noise) - pi_ref(s; noise)|^2 / (H A) + alpha log pi.
The last term of (2) applies only to a policy with a `noise_level`, whose sampler is stochastic
(equation 5 of policies/heads/flow.py). There alpha holds the entropy at a target (Haarnoja et al. 2018b, arXiv
1812.05905, 18). As in HIL-SERL, (1) has no entropy term.
"""

from collections.abc import Callable
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import descend, frozen_copy, soft_update
from serl_launcher.algorithms.chunk_actor_critic import NEXT, ChunkActorCritic, Parts, PolicyFeatures, first_step
from serl_launcher.algorithms.sac import LogTemperature, hold_entropy
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Policy
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.policies.heads.flow import Flow
from serl_launcher.types import Batch, Metrics, Observation


class SACPI0(ChunkActorCritic):
    """Clone demonstrations, train critics, then improve the policy by the critics' gradient.

    `update_clone` imitates; the cloned policy becomes the reference. `update_critic` trains the critics alone. A plan
    needs some of these before `update`, which trains critics and policy: untrained critics would mislead the policy.

    policy: makes the policy from the Spec; its head must be a Flow.
    distill_weight: weight of the mean squared distance to the reference's actions, scaled to [-1, 1].
    initial_temperature, entropy_per_action: as in SAC, per number of a chunk; for a policy with a `noise_level` only.
    The other arguments are those of Parts; without an `encoder` the critics see the reference's features.
    """

    changeable = ("distill_weight", "entropy_per_action")

    def __init__(
        self, spec: Spec, *, distill_weight: float, initial_temperature: float, entropy_per_action: float,
        policy: Callable[[Spec], Policy], encoder: Callable[[Spec], ObservationEncoder] | None,
        optimizer: Callable[[nn.Module], Optimizer], **parts: Any,
    ) -> None:  # fmt: skip
        flow = _flow_policy(policy(spec))
        reference = frozen_copy(flow)
        made = Parts(
            spec, "sac_pi0", policy=lambda _: flow, encoder=encoder or (lambda _: PolicyFeatures(reference)),
            optimizer=lambda _: optimizer(_Trained(flow)), **parts,
        )  # fmt: skip
        super().__init__(made)
        self.reference, self.policy, self.critic = reference, flow, made.critic
        self.log_temperature = None
        if flow.head.log_noise_level is not None:
            self.log_temperature = LogTemperature(initial_temperature)
            self.temperature_optimizer = Optimizer(
                self.log_temperature, learning_rate=self.critic_optimizer.learning_rate
            )
            self.target_entropy = -entropy_per_action * flow.horizon * spec.action.shape[0]
        self.distill_weight = distill_weight
        self.windows["update"] = self.windows["update_critic"]

    def evaluation_noise(self, noise: Tensor) -> Tensor:
        return noise[:, :1]  # only the noise at which the sample starts: every flow needs it

    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the policy's imitation loss, then copy the policy to the reference."""
        metrics = super().update_clone(batch)
        soft_update(self.reference, self.policy, 1.0)
        return metrics

    def update(self, batch: Batch) -> Metrics:
        """Take one step of the critics, then one of the policy, and of the temperature if there is one."""
        batch = self.augment(batch)
        return self._update_critic(batch) | self._update_policy(batch)

    def _update_policy(self, batch: Batch) -> Metrics:
        metrics = descend(self.policy_optimizer, batch, self.policy_loss, "policy_gradient")
        if self.log_temperature is not None:
            metrics["temperature"] = hold_entropy(self.temperature_optimizer, metrics["entropy"], self.target_entropy)
        return metrics

    def imitation_losses(self, batch: Batch) -> Tensor:
        return self.policy_optimizer.forward(batch, True)[0]

    def following_action(self, batch: Batch, following: Observation) -> Tensor:
        return self.policy.rsample(following, seed=batch.seed, stream=NEXT, task=batch.task)[0]

    def policy_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (2). The critics give only their gradient by the action, so that their weights get no gradient."""
        observation = first_step(batch.observation)
        action, log_prob = self.policy_optimizer.forward(batch, False)  # [B, H, A], [B]
        with torch.no_grad():
            reference, _ = self.reference.rsample(observation, seed=batch.seed, task=batch.task)
        scale = self.policy.scale
        distance = (scale.to_unit(action) - scale.to_unit(reference)).square().mean((1, 2))
        value = self.value_by_action(observation, action)
        loss = self.distill_weight * distance - value
        metrics = {"distill": distance, "value_of_policy": value}
        if self.log_temperature is not None:
            loss = loss + self.log_temperature().detach().exp() * log_prob
            metrics["entropy"] = -log_prob
        loss = (batch.weight * loss).mean()
        return loss, {"policy_loss": loss.detach(), **{name: row.detach().mean() for name, row in metrics.items()}}


class _Trained(nn.Module):
    """The module that the policy's optimiser runs: the imitation loss, or chunks with a gradient."""

    def __init__(self, policy: HeadPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: Batch, imitates: bool) -> tuple[Tensor, Tensor | Metrics]:
        if imitates:
            return self.policy(batch)
        return self.policy.rsample(first_step(batch.observation), seed=batch.seed, task=batch.task)


def _flow_policy(policy: Policy) -> HeadPolicy:
    """Return the policy. Raises ConfigError unless its head is a Flow, or if it has a `max_delay`."""
    if not isinstance(policy, HeadPolicy) or not isinstance(policy.head, Flow):
        name = type(policy.head if isinstance(policy, HeadPolicy) else policy).__name__
        raise ConfigError(
            f"algo=sac_pi0 goes through the sampler of head=flow: say policy=flow or policy=pi0, not {name}"
        )
    if policy.max_delay:
        raise ConfigError("algo=sac_pi0 trains no continuation of chunks: say policy.max_delay=0; rtc guides them then")
    return policy
