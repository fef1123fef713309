"""Actor-critic through a flow policy, over chunks of actions: what Hi-ORS calls sac_pi0 (arXiv 2510.26406).

An ensemble of critics learns Q(s, a_1..a_h) off policy, for the h actions of a chunk that run before the next chunk is
requested. The policy ascends Q by the gradient through all K steps of its own sampler. This is the deterministic policy
gradient (Silver et al. 2014), with the noise as part of the state. The policy is held near a frozen reference, which is
the policy after cloning, by the distance between their chunks from the same noise:
    (1) y = sum_{i < h} gamma^i r_i + gamma^h (1 - terminated) min_e Q'_e(s_h, pi(s_h; noise')),
    (2) L = -mean_e Q_e(s, pi(s; noise)) + distill_weight |pi(s; noise) - pi_ref(s; noise)|^2 / (H A) + alpha log pi.
The critics judge no action beyond the h that run, because the data never show its outcome and the policy would ascend
the critics' errors. The last term of (2) applies only to a policy with a `noise_level`, whose sampler is stochastic
(equation 5 of policies/heads/flow.py). There alpha holds the entropy at a target (Haarnoja et al. 2018b, arXiv
1812.05905, 18). As in HIL-SERL, (1) has no entropy term.
"""

from collections.abc import Callable
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, critic_loss, descend, follow, frozen_copy, value_target
from serl_launcher.algorithms.sac import LogTemperature, hold_entropy
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.networks.critics import Critic, Target
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.base import Policy
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.policies.heads.flow import Flow
from serl_launcher.types import Batch, Metrics, Observation, Window
from serl_launcher.utils.optim import Optimizer


class SACPI0(Algorithm):
    """Clone demonstrations, train critics, then improve the policy by the critics' gradient.

    `update_clone` imitates; the cloned policy becomes the reference. `update_critic` trains the critics alone. A plan
    needs some of these before `update`, which trains critics and policy: untrained critics would mislead the policy.
    Windows begin at any step: the h actions executed from there count as a chunk, even if they come from two chunks.

    policy: makes the policy from the Spec; its head must be a Flow.
    critic_horizon: h, actions of a chunk that the critics judge; cut to the chunk's length H.
    encoder: makes the critics' encoder, trained with them; None: the frozen features of the reference.
    optimizer: makes the policy's optimiser. critic_optimizer: makes the critics'.
    critic, discount, tau, augment: as in SAC.
    distill_weight: weight of the mean squared distance to the reference's actions, scaled to [-1, 1].
    initial_temperature, entropy_per_action: as in SAC, per number of a chunk; for a policy with a `noise_level` only.
    Raises ConfigError for a policy with another head, and if `augment` is given and nothing reads images.
    """

    def __init__(
        self, spec: Spec, *, policy: Callable[[Spec], Policy], critic_horizon: int,
        encoder: Callable[[Spec], ObservationEncoder] | None, critic: Callable[..., Critic],
        optimizer: Callable[[nn.Module], Optimizer], critic_optimizer: Callable[[nn.Module], Optimizer],
        discount: float, tau: float, distill_weight: float, initial_temperature: float, entropy_per_action: float,
        augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.policy, head = _flow(policy(spec))
        self.critic_horizon = min(critic_horizon, self.policy.horizon)
        self.reference = frozen_copy(self.policy)
        features: Any = encoder(spec) if encoder else ReferenceFeatures(self.reference)
        self.critic = critic(spec, encoder=features, horizon=self.critic_horizon, scale=self.policy.scale)
        self.target_critic = frozen_copy(self.critic, self.reference)
        self.policy_optimizer = optimizer(_Trained(self.policy))
        self.critic_optimizer = critic_optimizer(self.critic)
        self.log_temperature = None
        if head.log_noise_level is not None:
            self.log_temperature = LogTemperature(initial_temperature)
            self.temperature_optimizer = Optimizer(
                self.log_temperature, learning_rate=self.critic_optimizer.learning_rate
            )
            self.target_entropy = -entropy_per_action * self.policy.horizon * spec.action.shape[0]
        self.discount, self.tau, self.distill_weight = discount, tau, distill_weight
        self.augment = augmentation(augment, {*self.policy.inputs, *features.inputs})
        now = dict.fromkeys((*self.policy.inputs, *features.inputs), (0,))
        window = Window(
            {**now, "action": tuple(range(self.critic_horizon)), "next_observation": (self.critic_horizon,)}
        )
        self.windows = {"update_clone": Window(self.policy.offsets), "update_critic": window, "update": window}

    @property
    def acting(self) -> HeadPolicy:
        return self.policy

    def calm(self, noise: Tensor) -> Tensor:
        return noise[:, :1]  # only the noise at which the sample starts: every flow needs it

    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the policy's imitation loss, then copy the policy to the reference."""
        metrics, gradient = descend(self.policy_optimizer, self.augment(batch), self.imitation_loss)
        follow(self.reference, self.policy, 1.0)
        return metrics | {"gradient": gradient}

    def update_critic(self, batch: Batch) -> Metrics:
        """Take one step of the critics and of their targets; the policy does not change."""
        return self._update_critic(self.augment(batch))

    def update(self, batch: Batch) -> Metrics:
        """Take one step of the critics, then one of the policy, and of the temperature if there is one."""
        batch = self.augment(batch)
        return self._update_critic(batch) | self._update_policy(batch)

    def _update_critic(self, batch: Batch) -> Metrics:
        metrics, gradient = descend(self.critic_optimizer, batch, self.critic_loss)
        follow(self.target_critic, self.critic, self.tau)
        return metrics | {"critic_gradient": gradient}

    def _update_policy(self, batch: Batch) -> Metrics:
        metrics, gradient = descend(self.policy_optimizer, batch, self.policy_loss)
        metrics["policy_gradient"] = gradient
        if self.log_temperature is not None:
            metrics["temperature"] = hold_entropy(self.temperature_optimizer, metrics["entropy"], self.target_entropy)
        return metrics

    def imitation_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, _ = self.policy_optimizer(batch, True)  # [B]
        loss = (batch.weight * loss).mean()
        return loss, {"loss": loss.detach()}

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the critics' loss against (1). Chunks that truncation cut short have weight zero."""
        prediction = self.critic_optimizer(_now(batch.observation), self._executed(batch))  # [E, B] or [E, B, K]
        return critic_loss(batch, self.critic, prediction, self.target(batch))

    @torch.no_grad()
    def target(self, batch: Batch) -> Target:
        """Compute the target (1)."""
        assert batch.next_observation is not None  # the window asks for it
        following = _now(batch.next_observation)
        action, _ = self.policy.rsample(following, seed=batch.seed, stream=1, task=batch.task)
        return self.target_critic.target(
            following, action[:, : self.critic_horizon], lambda value: value_target(batch, value, self.discount),
            self.generator,
        )  # fmt: skip

    def policy_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (2). The critics give only their gradient by the action, so that their weights get no gradient."""
        observation = _now(batch.observation)
        action, log_prob = self.policy_optimizer(batch, False)  # [B, H, A], [B]
        with torch.no_grad():
            reference, _ = self.reference.rsample(observation, seed=batch.seed, task=batch.task)
        scale = self.policy.scale
        distance = (scale.to_unit(action) - scale.to_unit(reference)).square().mean((1, 2))
        value = self._climbed(observation, action)
        loss = self.distill_weight * distance - value
        metrics = {"distill": distance, "value_of_policy": value}
        if self.log_temperature is not None:
            loss = loss + self.log_temperature().detach().exp() * log_prob
            metrics["entropy"] = -log_prob
        loss = (batch.weight * loss).mean()
        return loss, {"policy_loss": loss.detach(), **{name: row.detach().mean() for name, row in metrics.items()}}

    def _climbed(self, observation: Observation, action: Tensor) -> Tensor:
        """Compute mean_e Q_e(s, a) [B] with a gradient with respect to the action [B, H, A] alone."""
        tried = action.detach().requires_grad_()
        value = self.critic.value(observation, tried[:, : self.critic_horizon]).mean(0)
        (slope,) = torch.autograd.grad(value.sum(), tried)
        return value.detach() + (slope * (action - tried.detach())).sum((1, 2))

    @torch.no_grad()
    def value(self, batch: Batch) -> Tensor:
        return self.critic.value(_now(batch.observation), self._executed(batch)).mean(0)

    def _executed(self, batch: Batch) -> Tensor:
        """Return the chunks [B, h, A], with the centre of the action range after an episode's end: the batch has
        zeros there, which may lie far outside its bounds."""
        return torch.where(batch.valid.unsqueeze(-1), batch.action, self.critic.scale.center)


class ReferenceFeatures(nn.Module):
    """The features of a frozen policy: {name: [B, ...]} -> [B, size]. The policy is not a submodule of this module."""

    def __init__(self, policy: HeadPolicy) -> None:
        super().__init__()
        self._policy = (policy,)
        self.inputs, self.size = policy.inputs, policy.feature_size

    @torch.no_grad()
    def forward(self, observation: Observation) -> Tensor:
        return self._policy[0].features(observation)


class _Trained(nn.Module):
    """The module that the policy's optimiser runs: the imitation loss, or chunks with a gradient."""

    def __init__(self, policy: HeadPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: Batch, imitates: bool) -> tuple[Tensor, Tensor | Metrics]:
        if imitates:
            return self.policy(batch)
        return self.policy.rsample(_now(batch.observation), seed=batch.seed, task=batch.task)


def _flow(policy: Policy) -> tuple[HeadPolicy, Flow]:
    """Return the policy and its head. Raises ConfigError for a policy that has no gradient through its samples."""
    if not isinstance(policy, HeadPolicy) or not isinstance(policy.head, Flow):
        name = type(policy.head if isinstance(policy, HeadPolicy) else policy).__name__
        raise ConfigError(
            f"algo=sac_pi0 goes through the sampler of head=flow: say policy=flow or policy=pi0, not {name}"
        )
    if policy.history > 1:
        raise ConfigError("algo=sac_pi0 has critics of one observation: say policy.history=1")
    if policy.max_delay:
        raise ConfigError("algo=sac_pi0 trains no continuation of chunks: say policy.max_delay=0; rtc guides them then")
    return policy, policy.head


def _now(observation: Observation) -> dict[str, Tensor]:
    """Select the first time step: {name: [B, To, ...]} -> {name: [B, ...]}."""
    return {name: value[:, 0] for name, value in observation.items()}
