"""Improve a policy that runs elsewhere and stays as it is, such as a policy server, by small edits of its actions.

ResFiT (Ankile et al. 2025, "Residual Off-Policy RL for Finetuning Behavior Cloning Policies", arXiv 2509.19301): the
base's chunks run open loop, n actions of each. At every step a small policy, which sees the state and the base's action
b, corrects it. It learns off policy from few steps, because b is stored with each of them and the base is not asked
again. As in EXPO (arXiv 2507.07986; see expo.py) the edit policy e changes an action by at most `reach`, and of b and
some edits of it the one with the largest value acts, and backs up:
    (1) y = sum_{i < k} gamma^i r_i + gamma^k (1 - terminated) Q'(s_k, a'), a' chosen from b_k and edits of it,
    (2) L = alpha log e(d | s, b) - mean_e Q_e(s, b + d),
where alpha holds the entropy of d at a target.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, critic_loss, descend, frozen_copy, soft_update, value_target
from serl_launcher.algorithms.chunk_actor_critic import NEXT, first_step
from serl_launcher.algorithms.expo import EDIT
from serl_launcher.algorithms.sac import LogTemperature, hold_entropy
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.networks.critics import Critic, Target
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.chunk import Bounded
from serl_launcher.policies.editor import Editor
from serl_launcher.policies.residual import BasePolicy, Residual
from serl_launcher.types import Batch, Carry, Decision, Metrics, Observation, Prefix, Window

BASE, HAS_BASE = "base_action", "has_base"  # columns: b, and whether there is one


class ResFiT(Algorithm):
    """Learn values (`update_critic`) and edits (`update_edit`) of a base policy's actions.

    policy: makes the base from the Spec. samples, reach: as in Residual. hidden: widths of the edit policy.
    n_step: k, rewards before the critics' value in (1).
    encoder: makes that of the critics, and that of the edit policy.
    critic_optimizer: makes the critics' optimiser. edit_optimizer: makes the edit policy's.
    critic, discount, tau, initial_temperature, entropy_per_action, augment: as in SAC.

    A row without `has_base` was not the base's: a person drove, or a demonstration or another algorithm gave it. There
    the executed action counts as b, so that it is judged, and edits of it are tried, as in EXPO.
    Raises ConfigError for a policy that is trained here, and for a k below 1.
    """

    changeable = ("samples", "entropy_per_action")

    def __init__(
        self, spec: Spec, *, policy: Callable[[Spec], BasePolicy], critic: Callable[..., Critic], samples: int,
        reach: float, hidden: Sequence[int], n_step: int, encoder: Callable[[Spec], ObservationEncoder],
        critic_optimizer: Callable[[nn.Module], Optimizer], edit_optimizer: Callable[[nn.Module], Optimizer],
        initial_temperature: float, entropy_per_action: float, discount: float, tau: float,
        augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.base = policy(spec)
        if not isinstance(self.base, BasePolicy):
            name = type(self.base).__name__
            raise ConfigError(f"algo=residual improves a policy that runs elsewhere: say policy=server, not {name}")
        if n_step < 1:
            raise ConfigError(f"algo.n_step={n_step}: say a whole number from 1 on")
        seen, scale = encoder(spec), self.base.scale
        made = critic(spec, encoder=seen, horizon=1, scale=scale)
        editor = Editor(encoder(spec), scale, horizon=1, reach=reach, hidden=hidden)
        self.acts = Residual(scale, made, editor, samples=samples)
        self.target_critic = frozen_copy(made)
        self.critic_optimizer, self.edit_optimizer = critic_optimizer(made), edit_optimizer(editor)
        self.log_temperature = LogTemperature(initial_temperature)
        self.temperature_optimizer = Optimizer(self.log_temperature, learning_rate=self.edit_optimizer.learning_rate)
        self.target_entropy = -entropy_per_action * spec.action.shape[0]
        self.n_step, self.discount, self.tau = n_step, discount, tau
        self.augment = augmentation(augment, seen.inputs)
        steps, columns = tuple(range(n_step + 1)), ("action", BASE, HAS_BASE)
        self.windows = {
            "update_critic": Window({**dict.fromkeys(seen.inputs, (0, n_step)), **dict.fromkeys(columns, steps)}),
            "update_edit": Window(dict.fromkeys((*seen.inputs, *columns), (0,))),
        }

    @property
    def acting(self) -> Residual:
        return self.acts

    @property
    def critic(self) -> Critic:
        return self.acts.critic

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool, prefix: Prefix | None = None,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """Edit the base's action of this step; see Algorithm.act. The carry is the base's chunk {chunk: [B, n, A]} and
        how many actions of it have run {used: [B]}. An evaluation takes samples, too."""
        rows, most = len(noise), self.base.n_action_steps
        if carry is None:
            chunk, used = noise.new_zeros(rows, most, noise.shape[-1]), torch.full((rows,), most, device=noise.device)
        else:
            chunk, used = carry["chunk"].clone(), carry["used"]
        trouble, due = "", used >= most
        if due.any():
            asked = {name: observation[name][due].cpu() for name in self.base.inputs}
            words = [said for said, is_due in zip(task, due.tolist(), strict=True) if is_due]
            found, trouble = self.base.ask(asked, words)
            chunk[due] = found.to(chunk)
            used = used.masked_fill(due, 0)
        base = chunk[torch.arange(rows, device=used.device), used].clamp(self.acts.scale.low, self.acts.scale.high)
        action = self.acts.choose(observation, base.unsqueeze(1), noise)
        extras = {BASE: base, HAS_BASE: torch.ones_like(used, dtype=torch.bool).unsqueeze(1)}
        return Decision(action, extras, trouble), {"chunk": chunk, "used": used + 1}

    def update_critic(self, batch: Batch) -> Metrics:
        """Take one step of the critics and of their targets; the edits do not change."""
        metrics = descend(self.critic_optimizer, self.augment(batch), self.critic_loss, "critic_gradient")
        soft_update(self.target_critic, self.critic, self.tau)
        return metrics

    def update_edit(self, batch: Batch) -> Metrics:
        """Take one step of the edit policy down (2), and one of the temperature. From the first one on edits act."""
        metrics = descend(self.edit_optimizer, self.augment(batch), self.edit_loss, "edit_gradient")
        self.acts.has_edits.fill_(True)
        temperature = hold_entropy(self.temperature_optimizer, metrics["entropy"], self.target_entropy)
        return metrics | {"temperature": temperature}

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the critics' loss against (1). Where truncation leaves b_k unknown it has weight zero."""
        prediction = self.critic_optimizer.forward(first_step(batch.observation), batch.action[:, :1])
        return critic_loss(batch, self.critic, prediction, self.target(batch))

    @torch.no_grad()
    def target(self, batch: Batch) -> Target:
        """Compute the target (1)."""
        following = {name: value[:, -1] for name, value in batch.observation.items()}
        noise = normal(batch.seed, self.acts.noise_shape, NEXT)
        action = self.acts.choose(following, base_of(batch)[:, -1:], noise)
        steps = replace(
            batch, reward=batch.reward[:, :-1], terminated=batch.terminated[:, :-1],
            length=batch.length.clamp(max=self.n_step),
        )  # fmt: skip
        return self.target_critic.target(
            following, action, lambda value: value_target(steps, value, self.discount), self.generator
        )

    def edit_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute (2)."""
        observation, scale = first_step(batch.observation), self.acts.scale
        base = scale.to_unit(base_of(batch))
        fresh = normal(batch.seed, base.shape[1:], EDIT)
        unit, density = self.edit_optimizer.forward(observation, base.unsqueeze(0), fresh.unsqueeze(0))
        bounded: Any = Bounded.apply(unit[0], *scale.limits())
        value = self.critic.mean_value(observation, scale.from_unit(bounded))
        alpha = self.log_temperature().detach().exp()
        loss = (batch.weight * (alpha * density[0] - value)).mean()
        metrics = {"edit_loss": loss, "entropy": -density.mean(), "value_of_edit": value.mean()}
        metrics["edit"] = (unit[0] - base).abs().mean()
        return loss, {name: each.detach() for name, each in metrics.items()}

    @torch.no_grad()
    def value(self, batch: Batch) -> Tensor:
        return self.critic.mean_value(first_step(batch.observation), batch.action[:, :1])


def base_of(batch: Batch) -> Tensor:
    """Return b of each step [B, T, A]: the base's action, or where there is none the executed one."""
    return torch.where(batch.extras[HAS_BASE], batch.extras[BASE], batch.action)
