"""Trains critics Q(s, a_1..a_h) of action chunks, by n-step targets: shared by QC, PA-RL, EXPO, DSRL, IQL.

The critics learn off policy, with the target
    (1) y = sum_{i < h} gamma^i r_i + gamma^h (1 - terminated) Q'(s_h, a'),
where a' is what acts: the policy, or whatever improves its samples. Q' is the target of the ensemble. They judge no
action beyond the h that run, because the data never show its outcome and what climbs them would climb their errors.
Windows begin at any step: the h actions executed from there count as a chunk, even if they come from two chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, critic_loss, descend, follow, frozen_copy, value_target
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.networks.critics import Critic, Target
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Policy
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.policies.wrapped import Wrapped
from serl_launcher.types import Batch, Metrics, Observation, Window

NEXT = 1  # stream of a row's random numbers for the action that follows; stream 0 is of the present one


class Judged(Algorithm):
    """Base of algorithms with a policy over chunks and critics. `update_clone` imitates; `update_critic` takes (1).

    policy: makes the policy from the Spec, with any head, for one observation and without `max_delay`.
    critic_horizon: h, actions of a chunk that the critics judge; cut to the chunk's length H.
    encoder: makes the critics' encoder, trained with them; None: the features of the policy, which they do not train.
    optimizer: makes the policy's optimiser. critic_optimizer: makes the critics'.
    critic, discount, tau, augment: as in SAC.

    A subclass says what acts (`around`), and which policies it takes (`checked`). Raises ConfigError for a policy of
    another kind, and if `augment` is given and nothing reads images.
    """

    policy: HeadPolicy
    critic: Critic

    def __init__(
        self, spec: Spec, *, policy: Callable[[Spec], Policy], critic_horizon: int,
        encoder: Callable[[Spec], ObservationEncoder] | None, critic: Callable[..., Critic],
        optimizer: Callable[[nn.Module], Optimizer], critic_optimizer: Callable[[nn.Module], Optimizer],
        discount: float, tau: float, augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.discount, self.tau = discount, tau
        made = self.checked(policy(spec))
        self.critic_horizon = min(critic_horizon, made.horizon)
        seen = self.seen(made)
        features: Any = encoder(spec) if encoder else PolicyFeatures(seen)
        judges = critic(spec, encoder=features, horizon=self.critic_horizon, scale=made.scale)
        self.acts = self.around(made, judges)
        held = () if self.acts is None else tuple(self.acts.children())
        for name, part in (("policy", made), ("critic", judges)):
            # what is a part of another child has a second name here, and is saved once
            object.__setattr__(self, name, part) if part in held else setattr(self, name, part)
        self.target_critic = frozen_copy(judges, seen)
        self.policy_optimizer = optimizer(self.trained(made))
        self.critic_optimizer = critic_optimizer(judges)
        self.augment = augmentation(augment, {*made.inputs, *features.inputs})
        now = dict.fromkeys((*made.inputs, *features.inputs), (0,))
        actions = {"action": tuple(range(self.critic_horizon))}
        window = Window({**now, **actions, "next_observation": (self.critic_horizon,)})
        self.windows = {"update_critic": window, "update_clone": Window(made.offsets)}

    # -- what a subclass may have otherwise
    def checked(self, policy: Policy) -> HeadPolicy:
        """Return the policy. Raises ConfigError, which says what to say instead, if the algorithm cannot use it."""
        name = type(self).__name__.lower()
        if not isinstance(policy, HeadPolicy):
            raise ConfigError(f"algo={name} needs chunks: say policy=flow or policy=chunk, not {type(policy).__name__}")
        if policy.history > 1:
            raise ConfigError(f"algo={name} has critics of one observation: say policy.history=1")
        if policy.max_delay:
            raise ConfigError(f"algo={name} trains no continuation of chunks: say policy.max_delay=0")
        return policy

    def seen(self, policy: HeadPolicy) -> HeadPolicy:
        """Return the policy whose features the critics see if they have no encoder of their own."""
        return policy

    def around(self, policy: HeadPolicy, critic: Critic) -> Wrapped | None:
        """Return the policy around this one that acts; None: this one does."""
        return None

    def trained(self, policy: HeadPolicy) -> nn.Module:
        """Return the module that the policy's optimiser runs."""
        return policy

    @property
    def acting(self) -> Any:
        return self.policy if self.acts is None else self.acts

    # -- updates
    def update_clone(self, batch: Batch) -> Metrics:
        """Take one step down the policy's imitation loss; the critics do not change."""
        metrics, gradient = descend(self.policy_optimizer, self.augment(batch), self.imitation_loss)
        return metrics | {"gradient": gradient}

    def update_critic(self, batch: Batch) -> Metrics:
        """Take one step of the critics and of their targets; the policy does not change."""
        return self._update_critic(self.augment(batch))

    def _update_critic(self, batch: Batch) -> Metrics:
        metrics, gradient = descend(self.critic_optimizer, batch, self.critic_loss)
        follow(self.target_critic, self.critic, self.tau)
        return metrics | {"critic_gradient": gradient}

    def imitation_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        loss = (batch.weight * self.imitated(batch)).mean()
        return loss, {"loss": loss.detach()}

    def imitated(self, batch: Batch) -> Tensor:
        """Return the imitation loss of each row [B]."""
        return self.policy_optimizer(batch)[0]

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the critics' loss against (1). Chunks that truncation cut short have weight zero."""
        prediction = self.critic_optimizer(present(batch.observation), self.executed(batch))  # [E, B] or [E, B, K]
        return critic_loss(batch, self.critic, prediction, self.target(batch))

    @torch.no_grad()
    def target(self, batch: Batch) -> Target:
        """Compute the target (1)."""
        assert batch.next_observation is not None  # the window asks for it
        following = present(batch.next_observation)
        action = self.following_action(batch, following)[:, : self.critic_horizon]
        return self.target_critic.target(
            following, action, lambda value: value_target(batch, value, self.discount), self.generator
        )

    def following_action(self, batch: Batch, following: Observation) -> Tensor:
        """Return a' of (1), [B, H, A], without a gradient."""
        noise = normal(batch.seed, self.acting.noise_shape, NEXT)
        return self.acting.sample(following, task=batch.task, noise=noise.unsqueeze(0))[0]

    def climbed(self, observation: Observation, action: Tensor) -> Tensor:
        """Compute mean_e Q_e(s, a) [B] with a gradient with respect to the action [B, H, A] alone."""
        tried = action.detach().requires_grad_()
        value = self.critic.value(observation, tried[:, : self.critic_horizon]).mean(0)
        (slope,) = torch.autograd.grad(value.sum(), tried)
        return value.detach() + (slope * (action - tried.detach())).sum((1, 2))

    @torch.no_grad()
    def value(self, batch: Batch) -> Tensor:
        return self.critic.value(present(batch.observation), self.executed(batch)).mean(0)

    def executed(self, batch: Batch) -> Tensor:
        """Return the chunks [B, h, A], with the centre of the action range after an episode's end: the batch has
        zeros there, which may lie far outside its bounds."""
        return torch.where(batch.valid.unsqueeze(-1), batch.action, self.critic.scale.center)


class PolicyFeatures(nn.Module):
    """A policy's features, untrained: {name: [B, ...]} -> [B, size]. The policy is not a submodule of this module."""

    def __init__(self, policy: HeadPolicy) -> None:
        super().__init__()
        self._policy = (policy,)
        self.inputs, self.size = policy.inputs, policy.feature_size

    @torch.no_grad()
    def forward(self, observation: Observation) -> Tensor:
        return self._policy[0].features(observation)


def present(observation: Observation) -> dict[str, Tensor]:
    """Select the first time step: {name: [B, To, ...]} -> {name: [B, ...]}."""
    return {name: value[:, 0] for name, value in observation.items()}
