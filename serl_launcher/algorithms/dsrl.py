"""DSRL (Wagenmaker et al. 2025, arXiv 2506.15799): steer a frozen flow or diffusion by its noise, with SAC.

A cloned flow or DDIM turns noise w and observation s into a chunk. It is a black box from then on, which only needs to
be sampled, so it may be a PI0. A Gaussian policy chooses w within [-reach, reach] in place of N(0, I). This is the
variant with two critics ("noise aliasing"), which learns from any data, demonstrations too:
    Q(s, a)    learns values of executed chunks, by (1) of chunk_actor_critic.py with a' = flow(s', w'),
    Q_w(s, w)  learns Q(s, flow(s, w)) for w ~ N(0, I), clipped to the reach,
    (2) L = alpha log pi(w | s) - mean_e Q_w(s, w),
where alpha holds the entropy of w at a target, as in SAC.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import descend
from serl_launcher.algorithms.chunk_actor_critic import ActsByWrapped, Parts, PolicyFeatures, features_of, first_step
from serl_launcher.algorithms.sac import LogTemperature, hold_entropy
from serl_launcher.networks.critics import Critic
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import ScaledPolicy
from serl_launcher.policies.gaussian import GaussianPolicy
from serl_launcher.policies.wrapped import Wrapped
from serl_launcher.types import Batch, Metrics, Observation

TRIED, CHOSEN = 5, 6  # streams of a row's random numbers: the w of Q_w's loss, and that of (2)


class Steered(Wrapped):
    """Chunks of `policy` from noise that `noise_policy` chooses. rows: of noise, each for an equal part of a chunk."""

    mode_at_zero = True

    def __init__(self, policy: ScaledPolicy, noise_policy: GaussianPolicy, rows: int) -> None:
        super().__init__(policy)
        self.noise_policy, self.rows = noise_policy, rows

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.noise_policy.noise_shape

    def choose(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        steered = self.noise_policy.sample(observation, noise=noise.unsqueeze(0))[0, :, 0]
        return self.chunk(observation, task, steered)

    def chunk(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        """Return the chunks [B, H, A] that the policy makes of noise [B, rows * D]."""
        horizon = self.policy.noise_shape[-2]
        row = torch.arange(horizon, device=noise.device) * self.rows // horizon
        repeated = noise.unflatten(1, (self.rows, -1))[:, row]  # [B, H, D]
        return self.policy.sample(observation, task=task, noise=repeated[None, :, None])[0]


class DSRL(ActsByWrapped):
    """Imitate (`update_clone`) before practice; then learn values (`update_critic`) and steer (`update_noise`).

    `update_noise_critic` takes more steps of Q_w than the one of `update_noise`.

    noise_policy: makes the Gaussian policy over noise, from the Spec whose action is the noise. reach: its bounds.
    noise_rows: rows of noise for a chunk; 1: each action gets the same numbers; None: each its own.
    noise_optimizer: makes its optimiser, and that of Q_w.
    initial_temperature, entropy_per_action: as in SAC, per number of the noise.
    The other arguments are those of Parts. Raises ConfigError for a head whose noise is not one number for each of a
    chunk.
    """

    changeable = ("entropy_per_action",)

    def __init__(
        self, spec: Spec, *, noise_policy: Callable[..., GaussianPolicy], reach: float, noise_rows: int | None,
        noise_optimizer: Callable[[nn.Module], Optimizer], initial_temperature: float, entropy_per_action: float,
        encoder: Callable[[Spec], ObservationEncoder] | None, critic: Callable[..., Critic], **parts: Any,
    ) -> None:  # fmt: skip
        made = Parts(spec, "dsrl", encoder=encoder, critic=critic, **parts)
        policy = made.policy
        if policy.noise_shape[0] != 1 or policy.is_deterministic or policy.mode_at_zero:
            name = type(getattr(policy, "head", policy)).__name__
            raise ConfigError(
                f"algo=dsrl steers by the noise at which a sampler starts, and {name} has another: say policy=flow, or "
                "policy=chunk with head=ddim"
            )
        if (noise_rows is not None and not 1 <= noise_rows <= policy.horizon) or reach <= 0:
            raise ConfigError(
                f"algo.noise_rows={noise_rows}, algo.reach={reach}: say 1 to policy.horizon={policy.horizon} rows, "
                "or null, and a reach above 0"
            )
        rows = noise_rows or policy.horizon
        bound = np.full(rows * policy.width, reach, np.float32)
        noise_spec = replace(spec, action=Feature(bound.shape, low=-bound, high=bound))  # of a robot that acts by noise
        own = {} if encoder else {"encoder": lambda _: PolicyFeatures(policy)}
        chooser = noise_policy(noise_spec, **own)
        super().__init__(made, Steered(policy, chooser, rows))
        self.critic, self.reach = made.critic, reach
        self.noise_critic = critic(noise_spec, encoder=features_of(spec, policy, encoder), horizon=1)
        self.noise_critic_optimizer = noise_optimizer(self.noise_critic)
        self.noise_optimizer = noise_optimizer(chooser)
        self.log_temperature = LogTemperature(initial_temperature)
        self.temperature_optimizer = Optimizer(self.log_temperature, learning_rate=self.noise_optimizer.learning_rate)
        self.target_entropy = -entropy_per_action * rows * policy.width
        self.windows["update_noise"] = self.windows["update_noise_critic"] = self.windows["update_critic"]

    def update_noise_critic(self, batch: Batch) -> Metrics:
        """Take one step of Q_w; nothing else changes."""
        return descend(
            self.noise_critic_optimizer, self.augment(batch), self.noise_critic_loss, "noise_critic_gradient"
        )

    def update_noise(self, batch: Batch) -> Metrics:
        """Take one step of Q_w, one of the noise policy down (2), and one of the temperature."""
        batch = self.augment(batch)
        metrics = descend(self.noise_critic_optimizer, batch, self.noise_critic_loss, "noise_critic_gradient")
        metrics |= descend(self.noise_optimizer, batch, self.noise_loss, "noise_gradient")
        temperature = hold_entropy(self.temperature_optimizer, metrics["entropy"], self.target_entropy)
        return metrics | {"temperature": temperature}

    def noise_critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the loss of Q_w."""
        observation = first_step(batch.observation)
        tried = normal(batch.seed, self.acts.noise_shape, TRIED).clamp(-self.reach, self.reach)  # [B, 1, k]
        with torch.no_grad():
            value = self.critic.mean_value(observation, self.acts.chunk(observation, batch.task, tried[:, 0]))
        loss = self.noise_critic.loss(self.noise_critic_optimizer.forward(observation, tried), value)
        loss = (batch.weight * loss).mean()
        return loss, {"noise_critic_loss": loss.detach()}

    def noise_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (2)."""
        observation = first_step(batch.observation)
        policy: Any = self.noise_optimizer.module
        noise, density = policy.rsample(observation, noise=normal(batch.seed, self.acts.noise_shape, CHOSEN))
        value = self.noise_critic.mean_value(observation, noise)
        loss = (batch.weight * (self.log_temperature().detach().exp() * density - value)).mean()
        metrics = {"noise_loss": loss, "value_of_noise": value.mean(), "entropy": -density.mean()}
        return loss, {name: each.detach() for name, each in metrics.items()}
