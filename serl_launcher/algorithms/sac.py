"""Soft actor-critic (SAC: temperature, target entropy) and RLPD, which is SAC with demonstrations.

SAC: Haarnoja et al. 2018b, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905); equation numbers here
are of that paper. RLPD: Ball et al. 2023, "Efficient Online Reinforcement Learning with Offline Data" (arXiv
2302.02948): an ensemble of critics with LayerNorm, a target from a random subset of them, and several critic updates
per policy update. Images: DrQ (Kostrikov et al. 2020, arXiv 2004.13649): random shifts, and convolutions that the
critics alone train. The policy keeps a copy of the convolutions, so that its published weights are complete.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, critic_loss, frozen_copy, soft_update, value_target
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.networks.critics import Critic, Target
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Policy
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.types import Batch, Metrics, Window


class LogTemperature(nn.Module):
    """log alpha, where the temperature alpha > 0 weights the entropy; `initial` is alpha's first value."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        return self.log_alpha


def hold_entropy(optimizer: Optimizer, entropy: Tensor, target: float) -> Tensor:
    """Take one step of a LogTemperature down (18), in log alpha, and return alpha as it was before."""
    log_alpha = optimizer.forward()
    optimizer.step(log_alpha * (entropy - target))
    return log_alpha.detach().exp()


class SAC(Algorithm):
    """Maximise return + alpha * entropy, off policy, with an ensemble of critics.

    policy: makes the policy from the Spec; it needs `rsample` and an `encoder`, of which the critics begin with a copy.
    critic: makes the critics from the Spec; see Critic.
    discount: per step. tau: share by which the target critics move towards the critics at each update.
    learning_rate: of policy, critics and temperature. initial_temperature: initial alpha.
    entropy_per_action: alpha holds the entropy at minus this per dimension of the action, scaled to [-1, 1].
    backup_entropy: True: the target includes the entropy of the next action.
    augment: makes the image augmentation; None: images stay as they are.
    Raises ConfigError for a policy without a density, and if `augment` is given and the policy reads no images.
    """

    changeable = ("learning_rate", "entropy_per_action")

    def __init__(
        self, spec: Spec, *, policy: Callable[[Spec], Policy], critic: Callable[..., Critic], discount: float,
        tau: float, learning_rate: float, initial_temperature: float, entropy_per_action: float, backup_entropy: bool,
        augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.policy: Any = policy(spec)  # a Policy with rsample and encoder, which the base class does not declare
        has_density = hasattr(self.policy, "rsample") and hasattr(self.policy, "encoder")
        if isinstance(self.policy, HeadPolicy) or not has_density:  # its density is not of the action
            raise ConfigError(
                "algo=sac and algo=rlpd need a policy with a density and an encoder: say policy=gaussian, or "
                f"algo=sac_pi0 with policy=flow, not {type(self.policy).__name__}"
            )
        horizon, encoder = self.policy.horizon, copy.deepcopy(self.policy.encoder)
        self.critic = critic(spec, encoder=encoder, horizon=horizon)
        self.target_critic = frozen_copy(self.critic)
        self.policy.encoder.trunks.requires_grad_(False)
        self.log_temperature = LogTemperature(initial_temperature)
        self.policy_optimizer = Optimizer(self.policy, learning_rate=learning_rate)
        self.critic_optimizer = Optimizer(self.critic, learning_rate=learning_rate)
        self.temperature_optimizer = Optimizer(self.log_temperature, learning_rate=learning_rate)
        self.discount, self.tau = discount, tau
        self.target_entropy = -entropy_per_action * horizon * spec.action.shape[0]
        self.backup_entropy = backup_entropy
        self.augment = augmentation(augment, self.policy.inputs)
        window = Window({**self.policy.offsets, "next_observation": (horizon,)})
        self.windows = {"update": window, "update_critic": window}

    @property
    def acting(self) -> Policy:
        return self.policy

    def evaluation_noise(self, noise: Tensor) -> Tensor:
        return torch.zeros_like(noise)

    def update(self, batch: Batch) -> Metrics:
        """Take one step of the critics, then one of the policy and of the temperature."""
        batch, noise = self.augment(batch), self._noise(batch, 2)
        return self._update_critic(batch, noise[0]) | self._update_policy(batch, noise[1])

    def update_critic(self, batch: Batch) -> Metrics:
        """Take one step of the critics and of their targets; the policy does not change."""
        return self._update_critic(self.augment(batch), self._noise(batch, 1)[0])

    def _noise(self, batch: Batch, count: int) -> tuple[Tensor, ...]:
        """Draw the noise of the next actions, and with `count` 2 of the present ones at once: [B, 1, A] each."""
        return normal(batch.seed, (count, *self.policy.noise_shape)).unbind(1)

    def _update_critic(self, batch: Batch, noise: Tensor) -> Metrics:
        target = self.target(batch, noise)
        prediction = self.critic_optimizer.forward(batch.observation, batch.action)  # [E, B] or [E, B, K]
        loss, metrics = critic_loss(batch, self.critic, prediction, target)  # (5)
        gradient = self.critic_optimizer.step(loss)
        soft_update(self.target_critic, self.critic, self.tau)
        return {**metrics, "critic_gradient": gradient}

    def _update_policy(self, batch: Batch, noise: Tensor) -> Metrics:
        soft_update(self.policy.encoder.trunks, self.critic.encoder.trunks, 1.0)
        loss, log_prob = self.policy_loss(batch, noise)
        gradient = self.policy_optimizer.step(loss)
        entropy = -log_prob.detach().mean()
        temperature = hold_entropy(self.temperature_optimizer, entropy, self.target_entropy)
        return {
            "policy_loss": loss.detach(), "policy_gradient": gradient, "entropy": entropy, "temperature": temperature,
        }  # fmt: skip

    @torch.no_grad()
    def value(self, batch: Batch) -> Tensor:
        return self.critic.mean_value(batch.observation, batch.action)

    @torch.no_grad()
    def target(self, batch: Batch, noise: Tensor) -> Target:
        """Compute the soft Bellman target of (5), with the soft value of (3). noise: of the next actions, [B, 1, A]."""
        assert batch.next_observation is not None  # the window asks for it
        action, log_prob = self.policy.rsample(batch.next_observation, noise=noise)

        def backup(value: Tensor) -> Tensor:
            soft = value - self.log_temperature().exp() * log_prob if self.backup_entropy else value
            return value_target(batch, soft, self.discount)

        return self.target_critic.target(batch.next_observation, action, backup, self.generator)

    def policy_loss(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Compute alpha log pi(f(noise; s) | s) - Q(s, f(noise; s)), (9), with Q the ensemble's mean as in RLPD.

        noise: [B, 1, A]. Returns the mean loss [] and log pi [B].
        """
        action, log_prob = self.policy.rsample(batch.observation, noise=noise)
        value = self.critic.mean_value(batch.observation, action)
        loss = self.log_temperature().detach().exp() * log_prob - value
        return (batch.weight * loss).mean(), log_prob
