"""Actor-critic over chunks: what algorithms share with a policy over chunks and critics Q(s, a_1..a_h).

The critics judge the h actions of a chunk that run. They learn off policy, with the target
    (1) y = sum_{i < h} gamma^i r_i + gamma^h (1 - terminated) Q'(s_h, a'),
where a' is a sample of what acts: the policy, or a policy around it. Q' is the target ensemble. The critics get no
action beyond the h that run: the data never show the outcome of such actions, so a policy would climb their errors.
Windows begin at any step: the h actions executed from there count as a chunk, even if they come from two chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, critic_loss, descend, frozen_copy, soft_update, value_target
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.networks.critics import Critic, Target
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Policy, ScaledPolicy
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.policies.wrapped import Wrapped
from serl_launcher.types import Batch, Metrics, Observation, Window

SAMPLING = ("dsrl", "expo", "parl", "qc")  # algorithms that only sample the policy, and have it imitate
NEXT = 1  # stream of a row's random numbers for the action that follows; stream 0 is of the present one


class Parts:
    """The policy, the critics and their optimisers, of which a ChunkActorCritic is made.

    algo: the algorithm's name. policy: makes the policy from the Spec, for one observation and without `max_delay`: one
        with any head, or any ScaledPolicy for an algorithm of SAMPLING.
    critic_horizon: h, actions of a chunk that the critics judge; cut to the chunk's length H.
    encoder: makes the critics' encoder, trained with them; None: the features of the policy, which they do not train.
    optimizer: makes the policy's optimiser. critic_optimizer: makes the critics'.
    critic, discount, tau, augment: as in SAC.
    Raises ConfigError for a policy of another kind, and if `augment` is given and nothing reads images.
    """

    def __init__(
        self, spec: Spec, algo: str, *, policy: Callable[[Spec], Policy], critic_horizon: int,
        encoder: Callable[[Spec], "ObservationEncoder | PolicyFeatures"] | None, critic: Callable[..., Critic],
        optimizer: Callable[[nn.Module], Optimizer], critic_optimizer: Callable[[nn.Module], Optimizer],
        discount: float, tau: float, augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        self.policy: Any = _checked(policy(spec), algo)
        features, horizon = features_of(spec, self.policy, encoder), min(critic_horizon, self.policy.horizon)
        self.critic = critic(spec, encoder=features, horizon=horizon, scale=self.policy.scale)
        self.policy_optimizer, self.critic_optimizer = optimizer(self.policy), critic_optimizer(self.critic)
        self.discount, self.tau = discount, tau
        self.augment = augmentation(augment, {*self.policy.inputs, *features.inputs})


class ChunkActorCritic(Algorithm):
    """Base of actor-critic algorithms over chunks. `update_clone` imitates; `update_critic` learns (1).

    A subclass makes the Parts, and keeps their `policy` and `critic` under these names. If the policy is a part of what
    acts, it derives from ActsByWrapped instead; if both are, from ActsByCritic.
    """

    policy: HeadPolicy
    critic: Critic

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        policy, critic, encoder = parts.policy, parts.critic, parts.critic.encoder
        self.discount, self.tau, self.augment = parts.discount, parts.tau, parts.augment
        self.policy_optimizer, self.critic_optimizer = parts.policy_optimizer, parts.critic_optimizer
        self.target_critic = frozen_copy(critic, *[encoder] * isinstance(encoder, PolicyFeatures))
        now = dict.fromkeys((*policy.inputs, *encoder.inputs), (0,))
        actions = {"action": tuple(range(critic.horizon)), "next_observation": (critic.horizon,)}
        self.windows = {"update_critic": Window({**now, **actions}), "update_clone": Window(policy.offsets)}

    @property
    def acting(self) -> Any:
        return self.policy

    # -- updates
    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the policy's imitation loss; the critics do not change."""
        return descend(self.policy_optimizer, self.augment(batch), self.imitation_loss)

    def update_critic(self, batch: Batch) -> Metrics:
        """Take one step of the critics and of their targets; the policy does not change."""
        return self._update_critic(self.augment(batch))

    def _update_critic(self, batch: Batch) -> Metrics:
        metrics = descend(self.critic_optimizer, batch, self.critic_loss, "critic_gradient")
        soft_update(self.target_critic, self.critic, self.tau)
        return metrics

    def imitation_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        loss = (batch.weight * self.imitation_losses(batch)).mean()
        return loss, {"loss": loss.detach()}

    def imitation_losses(self, batch: Batch) -> Tensor:
        """Return the imitation loss of each row [B]."""
        return self.policy_optimizer.forward(batch)[0]

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the critics' loss against (1). Chunks that truncation cut short have weight zero."""
        prediction = self.critic_optimizer.forward(first_step(batch.observation), self.executed(batch))  # [E, B, ...]
        return critic_loss(batch, self.critic, prediction, self.target(batch))

    @torch.no_grad()
    def target(self, batch: Batch) -> Target:
        """Compute the target (1)."""
        assert batch.next_observation is not None  # the window asks for it
        following = first_step(batch.next_observation)
        action = self.following_action(batch, following)
        return self.target_critic.target(
            following, action, lambda value: value_target(batch, value, self.discount), self.generator
        )

    def following_action(self, batch: Batch, following: Observation) -> Tensor:
        """Return a' of (1), [B, H, A], without a gradient."""
        noise = normal(batch.seed, self.acting.noise_shape, NEXT)
        return self.acting.sample(following, task=batch.task, noise=noise.unsqueeze(0))[0]

    def value_by_action(self, observation: Observation, action: Tensor) -> Tensor:
        """Compute mean_e Q_e(s, a) [B] with a gradient with respect to the action [B, H, A] alone."""
        tried = action.detach().requires_grad_()
        value = self.critic.mean_value(observation, tried)
        (slope,) = torch.autograd.grad(value.sum(), tried)
        return value.detach() + (slope * (action - tried.detach())).sum((1, 2))

    @torch.no_grad()
    def value(self, batch: Batch) -> Tensor:
        return self.critic.mean_value(first_step(batch.observation), self.executed(batch))

    def executed(self, batch: Batch) -> Tensor:
        """Return the executed chunks [B, h, A]. After an episode's end they have the zero of the action's scale:
        the batch has zeros there in the robot's units, which may lie far outside the bounds."""
        return torch.where(batch.valid.unsqueeze(-1), batch.action, self.critic.scale.center)


class ActsByWrapped(ChunkActorCritic):
    """Base of algorithms that act by a policy around the imitating one, saved as its part. acts: that policy."""

    def __init__(self, parts: Parts, acts: Wrapped) -> None:
        super().__init__(parts)
        self.acts: Any = acts

    @property
    def policy(self) -> HeadPolicy:  # type: ignore[override]
        return self.acts.policy

    @property
    def acting(self) -> Any:
        return self.acts


class ActsByCritic(ActsByWrapped):
    """Base of algorithms whose critics help to choose actions: `acts` holds them, too."""

    @property
    def critic(self) -> Critic:  # type: ignore[override]
        return self.acts.critic


def _checked(policy: Policy, algo: str) -> ScaledPolicy:
    """Return the policy. Raises ConfigError for one without chunks, with a history, or with a `max_delay`."""
    if not isinstance(policy, ScaledPolicy if algo in SAMPLING else HeadPolicy):
        name = type(policy).__name__
        raise ConfigError(f"algo={algo} needs a policy with a head: say policy=flow or policy=chunk, not {name}")
    if len(policy.offsets["action"]) != policy.horizon:
        raise ConfigError(
            f"algo={algo} judges chunks as they are learned, and this one acts with {policy.horizon} of "
            f"{len(policy.offsets['action'])} actions: say the same number as policy.options={{n_action_steps: ...}}"
        )
    if policy.history > 1:
        raise ConfigError(f"algo={algo} has critics of one observation: say policy.history=1")
    if policy.max_delay:
        raise ConfigError(f"algo={algo} trains no continuation of chunks: say policy.max_delay=0")
    return policy


def features_of(
    spec: Spec, policy: Policy, encoder: Callable[[Spec], "ObservationEncoder | PolicyFeatures"] | None
) -> Any:
    """Make an encoder of observations; None: return the policy's features, untrained."""
    if encoder is not None:
        return encoder(spec)
    if not isinstance(policy, HeadPolicy):
        raise ConfigError(f"{type(policy).__name__} has no features for critics: leave algo.encoder as it is")
    return PolicyFeatures(policy)


class PolicyFeatures(nn.Module):
    """A policy's features, untrained: {name: [B, ...]} -> [B, size]. The policy is not a submodule of this module."""

    def __init__(self, policy: HeadPolicy) -> None:
        super().__init__()
        self._policy = (policy,)
        self.inputs, self.size = policy.inputs, policy.feature_size

    @torch.no_grad()
    def forward(self, observation: Observation) -> Tensor:
        return self._policy[0].features(observation)


def first_step(observation: Observation) -> dict[str, Tensor]:
    """Select the first time step: {name: [B, To, ...]} -> {name: [B, ...]}."""
    return {name: value[:, 0] for name, value in observation.items()}
