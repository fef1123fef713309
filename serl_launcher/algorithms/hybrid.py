"""HIL-SERL's hybrid: SAC moves the arm, a double DQN chooses the gripper's action, with a penalty for gripper use.

HIL-SERL: Luo et al. 2024, "Precise and Dexterous Robotic Manipulation via Human-in-the-Loop Reinforcement Learning"
(arXiv 2410.21845). A gripper either moves or stays, which no Gaussian says well. So one entry of the action is taken
from the arm, and a grasp critic Q(s, g) values its three actions g: -1, 0 and 1 in units of the scaled action, which
are the entry's low bound, its rest (ActionScale's zero) and its high bound. Double DQN: van Hasselt et al. 2016
(arXiv 1509.06461).
    (1) y = r - grasp_penalty [g != 0] + gamma (1 - terminated) Q'(s', argmax_g' Q(s', g')),
    (2) L = (Q(s, g) - y)^2, for the executed g.
The arm's policy and critics do not see the gripper's entry. A reward that depends on it is noise to them, as it is in
HIL-SERL.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec
from serl_client.words import check_choice
from torch import Tensor, nn

from serl_launcher.algorithms.base import critic_weight, frozen_copy, soft_update, value_target
from serl_launcher.algorithms.sac import SAC
from serl_launcher.networks.augment import Augment
from serl_launcher.networks.critics import Critic
from serl_launcher.networks.mlp import ActionScale, mlp
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Policy
from serl_launcher.policies.chunk import HeadPolicy
from serl_launcher.types import Batch, Metrics, Observation, Prefix

CHOICES = 3  # gripper actions, by index: -1, 0 and 1 of the scaled action
STAY = 1  # index of the one that moves nothing


class GraspCritic(nn.Module):
    """Q(observation, g) of each gripper action: one MLP behind an encoder of its own. hidden, layer_norm: as in mlp."""

    def __init__(self, encoder: ObservationEncoder, *, hidden: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.network = mlp(encoder.size, hidden, CHOICES, layer_norm=layer_norm)

    def forward(self, observation: Observation) -> Tensor:
        """Return the values [B, 3] of observation {name: [B, ...]}."""
        return self.network(self.encoder(observation))


class HybridPolicy(Policy):
    """Acts with a policy of the arm and with a copy of the grasp critic, so that its published weights are complete.

    arm: policy of the other entries, with `rsample` and `encoder`. action: the robot's, with all A entries.
    gripper: index of the gripper's entry. epsilon: share of the decisions with a gripper action drawn at random.
    The noise [1, A] has the arm's numbers first, then one for the gripper; zero noise gives the best gripper action.
    """

    horizon = 1
    mode_at_zero = True

    def __init__(
        self, arm: Policy, grasp_critic: GraspCritic, action: Feature, *, gripper: int, epsilon: float
    ) -> None:
        super().__init__()
        self.arm, self.grasp_critic = arm, frozen_copy(grasp_critic)
        self.scale = ActionScale(_part(action, [gripper]))
        self.inputs, self.size = arm.inputs, action.shape[0]
        self.gripper, self.epsilon = gripper, epsilon

    @property
    def encoder(self) -> ObservationEncoder:
        """The arm's."""
        return self.arm.encoder  # type: ignore[return-value]

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (self.horizon, self.size)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the arm's imitation loss [B]; the gripper's action has no density."""
        return self.arm(replace(batch, action=self.split(batch.action)[0]))

    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # fmt: skip
        values = self.grasp_critic(observation)  # [B, 3]
        noise = torch.randn(n, len(values), *self.noise_shape, device=values.device) if noise is None else noise
        arm = self.arm.sample(observation, task=task, noise=noise[..., :-1], prefix=prefix)  # [n, B, 1, A - 1]
        gripper = self.scale.from_unit(self._choose(values, noise[..., -1:]) - 1.0)
        return torch.cat([arm[..., : self.gripper], gripper, arm[..., self.gripper :]], -1)

    def rsample(self, observation: Observation, *, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the arm's entries alone, with a gradient -> [B, 1, A - 1], log_prob [B]. noise: [B, 1, A]."""
        return self.arm.rsample(observation, noise=noise[..., : self.size - 1])  # type: ignore[operator]

    def split(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Split actions [..., A] in the robot's units -> the arm's entries [..., A - 1], and the index of the gripper
        action that is nearest [...]."""
        before, gripper, behind = action.split([self.gripper, 1, self.size - 1 - self.gripper], -1)
        choice = self.scale.to_unit(gripper).squeeze(-1).clamp(-1, 1).round().long() + 1
        return torch.cat([before, behind], -1), choice

    def _choose(self, values: Tensor, noise: Tensor) -> Tensor:
        """Choose the best action, or with probability epsilon any of them. values: [B, 3]. noise: [n, B, 1, 1].

        Returns indices, shaped like the noise.
        """
        best = values.argmax(-1).view(-1, 1, 1).expand(noise.shape)
        if not self.epsilon:
            return best
        share = torch.erfc(noise.abs() / math.sqrt(2))  # uniform in 0 to 1, and 1 for zero noise
        drawn = (share * (CHOICES / self.epsilon)).long().clamp(max=CHOICES - 1)
        return torch.where(share < self.epsilon, drawn, best)


class Hybrid(SAC):
    """Maximise the return of arm and gripper together: SAC on the arm's entries, a double DQN on the gripper's.

    The grasp critic learns in `update` and in `update_critic`. What acts gets it in `update`, together with the policy.
    policy: makes the arm's policy from a Spec without the gripper's entry. The critics of `critic` have that Spec, too.
    grasp_critic: makes the grasp critic from an encoder, which is a copy of the policy's.
    gripper: index or name of the gripper's entry; None: the last one. Its rest must mean that the gripper stays.
    grasp_penalty: what a gripper action other than 0 costs, in units of the reward; the grasp critic alone sees it.
    epsilon: share of the decisions in practice with a random gripper action. HIL-SERL has none.
    discount, tau, learning_rate: as in SAC, for the grasp critic, too.
    initial_temperature, entropy_per_action, backup_entropy, augment: as in SAC, of the arm.
    Raises ConfigError for an action of one entry, an entry that is not there, a penalty below 0, an epsilon outside 0
    to 1, a policy of another kind, and if `augment` is given and the policy reads no images.
    """

    changeable = ("epsilon",)

    def __init__(
        self, spec: Spec, *, policy: Callable[[Spec], Policy], critic: Callable[..., Critic],
        grasp_critic: Callable[[ObservationEncoder], GraspCritic], gripper: int | str | None, grasp_penalty: float,
        epsilon: float, discount: float, tau: float, learning_rate: float, initial_temperature: float,
        entropy_per_action: float, backup_entropy: bool, augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        if grasp_penalty < 0 or not 0 <= epsilon <= 1:
            raise ConfigError(
                "algo=hybrid: grasp_penalty is what a move of the gripper costs, at least 0, and epsilon a share "
                f"between 0 and 1, not grasp_penalty={grasp_penalty}, epsilon={epsilon}"
            )
        entry = _entry(spec.action, gripper)
        others = [i for i in range(spec.action.shape[0]) if i != entry]
        arm_spec = replace(spec, action=_part(spec.action, others))
        arm = _with_density(policy(arm_spec))
        grasps = grasp_critic(copy.deepcopy(arm.encoder))  # type: ignore[arg-type]
        super().__init__(
            arm_spec, policy=lambda _: HybridPolicy(arm, grasps, spec.action, gripper=entry, epsilon=epsilon),
            critic=critic, discount=discount, tau=tau, learning_rate=learning_rate,
            initial_temperature=initial_temperature, entropy_per_action=entropy_per_action,
            backup_entropy=backup_entropy, augment=augment,
        )  # fmt: skip
        self.grasp_critic, self.target_grasp_critic = grasps, frozen_copy(grasps)
        self.grasp_optimizer = Optimizer(self.grasp_critic, learning_rate=learning_rate)
        self.grasp_penalty = grasp_penalty

    @torch.no_grad()
    def value(self, batch: Batch) -> Tensor:
        return super().value(replace(batch, action=self.policy.split(batch.action)[0]))

    def _update_critic(self, batch: Batch, noise: Tensor) -> Metrics:
        arm, choice = self.policy.split(batch.action)
        metrics = super()._update_critic(replace(batch, action=arm), noise)
        loss, value = self.grasp_loss(batch, choice)
        gradient = self.grasp_optimizer.step(loss)
        soft_update(self.target_grasp_critic, self.grasp_critic, self.tau)
        return {**metrics, "grasp_loss": loss.detach(), "grasp_value": value, "grasp_gradient": gradient}

    def _update_policy(self, batch: Batch, noise: Tensor) -> Metrics:
        soft_update(self.policy.grasp_critic, self.grasp_critic, 1.0)
        return super()._update_policy(batch, noise)

    def grasp_loss(self, batch: Batch, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the mean of (2) and of Q(s, g), both []. choice: index of the executed gripper action [B, 1]."""
        value = self.grasp_optimizer.forward(batch.observation).gather(-1, choice).squeeze(-1)  # [B]
        loss = critic_weight(batch) * (value - self.grasp_target(batch, choice)).square()
        return loss.mean(), value.detach().mean()

    @torch.no_grad()
    def grasp_target(self, batch: Batch, choice: Tensor) -> Tensor:
        """Compute (1) [B]. choice: index of the executed gripper action [B, 1]."""
        assert batch.next_observation is not None  # the window asks for it
        best = self.grasp_critic(batch.next_observation).argmax(-1, keepdim=True)
        value = self.target_grasp_critic(batch.next_observation).gather(-1, best).squeeze(-1)
        reward = batch.reward - self.grasp_penalty * (choice != STAY)
        return value_target(replace(batch, reward=reward), value, self.discount)


def _entry(action: Feature, gripper: int | str | None) -> int:
    """Return the index of the gripper's entry. Raises ConfigError if the action has no such entry, or has only one."""
    size = ActionScale(action).low.shape[0]  # which refuses a choice
    if size < 2:
        raise ConfigError(
            "algo=hybrid needs an arm beside the gripper, and this robot's action has one entry: say algo=rlpd"
        )
    if gripper is None:
        return size - 1
    if isinstance(gripper, str):
        return action.names.index(check_choice(gripper, action.names, "entry of the action", f"algo.gripper={gripper}"))
    if not 0 <= gripper < size:
        raise ConfigError(
            f"algo.gripper={gripper}: the entries of this robot's action are 0 to {size - 1}; null is the last one"
        )
    return gripper


def _part(action: Feature, entries: Sequence[int]) -> Feature:
    """Return the action with these entries alone."""
    low, high = (np.asarray(bound)[list(entries)] for bound in (action.low, action.high))
    neutral = None if action.neutral is None else action.neutral[list(entries)]
    return Feature((len(entries),), action.dtype, low=low, high=high, neutral=neutral)


def _with_density(policy: Policy) -> Policy:
    """Return the policy. Raises ConfigError for one without `rsample` or `encoder`, or with chunks of actions."""
    has_density = hasattr(policy, "rsample") and hasattr(policy, "encoder")
    if isinstance(policy, HeadPolicy) or not has_density or policy.horizon != 1:
        raise ConfigError(
            "algo=hybrid needs a policy of single actions with a density and an encoder: say policy=gaussian, not "
            f"{type(policy).__name__}"
        )
    return policy
