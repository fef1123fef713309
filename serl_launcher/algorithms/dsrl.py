"""DSRL (Wagenmaker et al. 2025, arXiv 2506.15799): steer a frozen flow or diffusion by its noise, with SAC.

A cloned flow or DDIM turns noise w and observation s into a chunk. It is a black box from then on, which only needs to
be sampled, so it may be a PI0. A Gaussian policy chooses w within [-reach, reach] in place of N(0, I). This is the
variant with two critics ("noise aliasing"), which learns from any data, demonstrations too:
    Q(s, a)    judges executed chunks, by (1) of judged.py with a' = flow(s', w'),
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
from serl_launcher.algorithms.judged import Judged, PolicyFeatures, present
from serl_launcher.algorithms.sac import LogTemperature, hold_entropy
from serl_launcher.networks.critics import Critic
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Policy
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.policies.gaussian import GaussianPolicy
from serl_launcher.policies.wrapped import Wrapped
from serl_launcher.types import Batch, Metrics, Observation

TRIED, CHOSEN = 5, 6  # streams of a row's random numbers: the w of Q_w's loss, and that of (2)


class Steered(Wrapped):
    """Chunks of `policy` from noise that `noise_policy` chooses. rows: of noise, each for an equal part of a chunk."""

    mode_at_zero = True

    def __init__(self, policy: HeadPolicy, noise_policy: GaussianPolicy, rows: int) -> None:
        super().__init__(policy)
        self.noise_policy, self.rows = noise_policy, rows

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.noise_policy.noise_shape

    def choose(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        chosen = self.noise_policy.sample(observation, noise=noise.unsqueeze(0))[0, :, 0]
        return self.chunk(observation, task, chosen)

    def chunk(self, observation: Observation, task: Sequence[str], chosen: Tensor) -> Tensor:
        """Return the chunks [B, H, A] that the policy makes of noise [B, rows * D]."""
        horizon = self.policy.horizon
        row = torch.arange(horizon, device=chosen.device) * self.rows // horizon
        noise = chosen.unflatten(1, (self.rows, -1))[:, row]  # [B, H, D]
        return self.policy.sample(observation, task=task, noise=noise[None, :, None])[0]


class DSRL(Judged):
    """Imitate (`update_clone`) before practice; then judge (`update_critic`) and steer (`update_noise`).

    noise_policy: makes the Gaussian policy over noise, from the Spec whose action is the noise. reach: its bounds.
    noise_rows: rows of noise for a chunk; 1: each action gets the same numbers; None: each its own.
    noise_optimizer: makes its optimiser, and that of Q_w.
    initial_temperature, entropy_per_action: as in SAC, per number of the noise.
    The other arguments are those of Judged. Raises ConfigError for a head whose noise is not one number for each of a
    chunk.
    """

    def __init__(
        self, spec: Spec, *, noise_policy: Callable[..., GaussianPolicy], reach: float, noise_rows: int | None,
        noise_optimizer: Callable[[nn.Module], Optimizer], critic: Callable[..., Critic], initial_temperature: float,
        entropy_per_action: float, **judged: Any,
    ) -> None:  # fmt: skip
        self._spec, self._noise_policy, self.reach, self._rows = spec, noise_policy, reach, noise_rows
        encoder = judged["encoder"]
        self._has_encoder = encoder is not None
        super().__init__(spec, critic=critic, **judged)
        features: Any = encoder(spec) if encoder else PolicyFeatures(self.policy)
        self.noise_critic = critic(self.noise_spec(self.policy), encoder=features, horizon=1)
        self.noise_critic_optimizer = noise_optimizer(self.noise_critic)
        self.noise_optimizer = noise_optimizer(self.acting.noise_policy)
        self.log_temperature = LogTemperature(initial_temperature)
        self.temperature_optimizer = Optimizer(self.log_temperature, learning_rate=self.noise_optimizer.learning_rate)
        self.target_entropy = -entropy_per_action * self.acting.rows * self.policy.width
        self.windows["update_noise"] = self.windows["update_critic"]

    def checked(self, policy: Policy) -> HeadPolicy:
        made = super().checked(policy)
        if made.noise_shape[0] != 1 or made.head.is_deterministic or made.mode_at_zero:
            raise ConfigError(
                f"algo=dsrl steers by the noise at which a sampler starts, and {type(made.head).__name__} has another: "
                "say policy=flow, or policy=chunk with head=ddim"
            )
        if (self._rows is not None and not 1 <= self._rows <= made.horizon) or self.reach <= 0:
            raise ConfigError(
                f"algo.noise_rows={self._rows}, algo.reach={self.reach}: say 1 to policy.horizon={made.horizon} rows, "
                "or null, and a reach above 0"
            )
        return made

    def noise_spec(self, policy: HeadPolicy) -> Spec:
        """Return the Spec of a robot whose action is the noise."""
        bound = np.full((self._rows or policy.horizon) * policy.width, self.reach, np.float32)
        return replace(self._spec, action=Feature(bound.shape, low=-bound, high=bound))

    def around(self, policy: HeadPolicy, critic: Critic) -> Steered:
        own = {} if self._has_encoder else {"encoder": lambda _: PolicyFeatures(policy)}
        chooser = self._noise_policy(self.noise_spec(policy), **own)
        return Steered(policy, chooser, self._rows or policy.horizon)

    def update_noise(self, batch: Batch) -> Metrics:
        """Take one step of Q_w, one of the noise policy down (2), and one of the temperature."""
        batch = self.augment(batch)
        metrics, critic_gradient = descend(self.noise_critic_optimizer, batch, self.noise_critic_loss)
        more, gradient = descend(self.noise_optimizer, batch, self.noise_loss)
        temperature = hold_entropy(self.temperature_optimizer, more["entropy"], self.target_entropy)
        gradients = {"noise_critic_gradient": critic_gradient, "noise_gradient": gradient}
        return metrics | more | gradients | {"temperature": temperature}

    def noise_critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the loss of Q_w."""
        observation = present(batch.observation)
        tried = normal(batch.seed, self.acting.noise_shape, TRIED).clamp(-self.reach, self.reach)  # [B, 1, k]
        with torch.no_grad():
            chunk = self.acting.chunk(observation, batch.task, tried[:, 0])[:, : self.critic_horizon]
            value = self.critic.value(observation, chunk).mean(0)
        loss = self.noise_critic.loss(self.noise_critic_optimizer(observation, tried), value)
        loss = (batch.weight * loss).mean()
        return loss, {"noise_critic_loss": loss.detach()}

    def noise_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (2)."""
        observation = present(batch.observation)
        policy: Any = self.noise_optimizer.module
        chosen, density = policy.rsample(observation, noise=normal(batch.seed, self.acting.noise_shape, CHOSEN))
        value = self.noise_critic.value(observation, chosen).mean(0)
        loss = (batch.weight * (self.log_temperature().detach().exp() * density - value)).mean()
        metrics = {"noise_loss": loss, "value_of_noise": value.mean(), "entropy": -density.mean()}
        return loss, {name: each.detach() for name, each in metrics.items()}
