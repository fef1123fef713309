"""Implicit Q-learning (IQL) over chunks: offline RL without the value of an action that the data lack.

Kostrikov et al. 2021, "Offline Reinforcement Learning with Implicit Q-Learning" (arXiv 2110.06169). A state value V(s)
learns an upper expectile of the values of the data's actions, in place of a maximum over all actions:
    (1) L_V = |tau - 1(u < 0)| u^2 with u = Q'(s, a_1..a_h) - V(s),
    (2) y = sum_{i < h} gamma^i r_i + gamma^h (1 - terminated) V(s_h), the target of Q.
With tau = 0.5 these are values of the behaviour, towards tau = 1 those of the best actions in the data. The policy
imitates the better actions by its own imitation loss, whatever its head:
    (3) L = min(exp(beta (Q'(s, a_1..a_h) - V(s))), 100) L_imitation(s, a_1..a_H).
Q' is the target of the ensemble, of the h actions that run. A window that truncation cut within these h actions has
weight zero in (1) to (3): its value is not known.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import critic_weight, descend, value_target
from serl_launcher.algorithms.chunk_actor_critic import ChunkActorCritic, Parts, features_of, first_step
from serl_launcher.networks.critics import Critic, Target
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.types import Batch, Metrics, Observation, Window

LARGEST = 100.0  # weight of an imitated window, as in the paper's code


class IQL(ChunkActorCritic):
    """`update_critic` takes (1), then (2); `update_policy` takes (3). The policy itself acts.

    expectile: tau of (1), between 0 and 1. beta: of (3), per unit of the return; 0 imitates all windows alike.
    critic: makes Q, and V with one member and no actions. Critics that classify learn (1) by their own loss, with the
        same factors: its minimum is the expectile, too, and for two_hot that of symlog(Q').
    encoder, critic_optimizer: as in Parts; V has one of each, too. The other arguments are those of Parts.
    Raises ConfigError for other numbers than these.
    """

    changeable = ("expectile", "beta")

    def __init__(
        self, spec: Spec, *, expectile: float, beta: float, encoder: Callable[[Spec], ObservationEncoder] | None,
        critic: Callable[..., Critic], critic_optimizer: Callable[[nn.Module], Optimizer], **parts: Any,
    ) -> None:  # fmt: skip
        if not 0 < expectile < 1 or beta < 0:
            raise ConfigError(
                "algo=iql: say an algo.expectile between 0 and 1, such as 0.7, and an algo.beta of at least 0, not "
                f"expectile={expectile}, beta={beta}"
            )
        made = Parts(spec, "iql", encoder=encoder, critic=critic, critic_optimizer=critic_optimizer, **parts)
        super().__init__(made)
        self.policy, self.critic = made.policy, made.critic
        self.expectile, self.beta = expectile, beta
        features = features_of(spec, self.policy, encoder)
        self.state_critic = critic(spec, encoder=features, horizon=0, num_critics=1)
        self.state_optimizer = critic_optimizer(self.state_critic)
        offsets = self.policy.offsets
        unread = [name for name in features.inputs if name not in self.policy.inputs]
        self.windows["update_policy"] = Window({**offsets, **{name: (0, *offsets.get(name, ())) for name in unread}})

    def update_critic(self, batch: Batch) -> Metrics:
        """Take one step of V, one of the critics, and one of their targets; the policy does not change."""
        batch = self.augment(batch)
        metrics = descend(self.state_optimizer, batch, self.state_loss, "state_gradient")
        return metrics | self._update_critic(batch)

    def update_policy(self, batch: Batch) -> Metrics:
        """Take one step of the policy down (3); the critics do not change."""
        return descend(self.policy_optimizer, self.augment(batch), self.policy_loss, "policy_gradient")

    def state_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (1)."""
        prediction = self.state_optimizer.forward(first_step(batch.observation), batch.action)  # [1, B] or [1, B, K]
        target = self.target_value(batch)
        value = self.state_critic.values.mean(prediction.detach())[0]
        factor = (self.expectile - (target < value).float()).abs()
        loss = (critic_weight(batch) * factor * self.state_critic.loss(prediction, target)).mean()
        return loss, {"state_loss": loss.detach(), "state_value": value.mean()}

    def policy_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (3) for windows of H actions."""
        run = slice(self.critic.horizon)
        begin = replace(
            batch, action=batch.action[:, run], valid=batch.valid[:, run], terminated=batch.terminated[:, run]
        )
        with torch.no_grad():
            advantage = self.target_value(begin) - self.state_value(batch.observation)
        factor = (self.beta * advantage).exp().clamp(max=LARGEST)
        loss = (critic_weight(begin) * factor * self.imitation_losses(batch)).mean()
        metrics = {"policy_loss": loss.detach(), "advantage": advantage.mean(), "imitation_weight": factor.mean()}
        return loss, metrics

    @torch.no_grad()
    def target(self, batch: Batch) -> Target:
        """Compute (2)."""
        assert batch.next_observation is not None  # the window asks for it
        return value_target(batch, self.state_value(batch.next_observation), self.discount)

    @torch.no_grad()
    def target_value(self, batch: Batch) -> Tensor:
        """Return Q' of the batch's h actions [B]."""
        target = self.target_critic.target(
            first_step(batch.observation), self.executed(batch), lambda value: value, self.generator
        )
        return target if isinstance(target, Tensor) else (target.values * target.shares).sum(0)

    def state_value(self, observation: Observation) -> Tensor:
        """Return V [B] of the first of the observations {name: [B, To, ...]}."""
        return self.state_critic.state_value(first_step(observation))[0]
