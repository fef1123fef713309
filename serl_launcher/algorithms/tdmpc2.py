"""TD-MPC2, TD-MPC and TD-M(PC)^2: learn a latent world model with its critics, in which a planner searches.

TD-MPC2: Hansen et al. 2024, "TD-MPC2: Scalable, Robust World Models for Continuous Control" (arXiv 2310.16828);
equation numbers here are of that paper. TD-M(PC)^2: Lin et al. 2025, "TD-M(PC)^2: Improving Temporal Difference MPC
Through Policy Constraint" (arXiv 2502.03550): the prior stays near what the planner did, so that the critics are not
asked of actions that nobody has tried.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor
from torch.nn import functional

from serl_launcher.algorithms.base import Algorithm, frozen_copy, soft_update
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.networks.latent import LatentModel
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.planner import MPPI, Planner, shifted
from serl_launcher.types import Batch, Carry, Decision, Metrics, Observation, Prefix, Window

BEHAVIOUR = ("behaviour_mean", "behaviour_std")  # columns: what the planner searched, in actions within [-1, 1]
WIDE = 7.389  # exp(2), the standard deviation of actions that no planner chose
STD_LOW = 0.05  # of the planner's actions, as the prior sees them
LARGE = 61.0  # dimensions of the action for which the weight of the behaviour holds
SPREAD = 2.0  # up to this scale of the values the prior is free of the behaviour


class TDMPC2(Algorithm):
    """Learn a latent model from windows of H steps, and a prior that climbs its critics; act by planning in it.

    model: makes the model from the Spec. mppi: makes the search; its horizon is H. hidden: widths of the prior.
    plan: False: act with the prior alone.
    weights: of the model's losses: `consistency`, `reward`, `value` and `termination`. rho: per step, what a later
        step of a window counts.
    entropy: weight of the prior's entropy. behaviour: weight of the behaviour in the prior's loss; 0: none, and the
        columns BEHAVIOUR are not needed.
    discount: per step. tau: share by which the target critics, and the values' scale, move at each update.
    optimizer: makes the model's. policy_optimizer: makes the prior's. augment: of images; None: they stay as they are.
    Raises ConfigError for optimisers that take a batch in parts.
    """

    changeable, means = ("plan", "weights", "rho", "entropy"), ("value_scale",)
    value_scale: Tensor  # [], of the values between the 5th and the 95th percentile, at least 1

    def __init__(
        self, spec: Spec, *, model: Callable[[Spec], LatentModel], mppi: Callable[[], MPPI], hidden: Sequence[int],
        plan: bool, weights: Mapping[str, float], rho: float, entropy: float, behaviour: float, discount: float,
        tau: float, optimizer: Callable[..., Optimizer], policy_optimizer: Callable[..., Optimizer],
        augment: Callable[[], Augment] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.planner = Planner(spec, model=model, hidden=hidden, mppi=mppi, plan=plan, discount=discount)
        self.target_critics = frozen_copy(self.planner.model.critics)
        self.optimizer = optimizer(self.planner.model)
        self.policy_optimizer = policy_optimizer(self.planner.prior)
        if max(self.optimizer.accumulation, self.policy_optimizer.accumulation) > 1:
            raise ConfigError(
                "algo=tdmpc2 takes a batch whole: leave accumulation out, and say a smaller batch_size=..."
            )
        self.weights = dict(weights)
        self.rho, self.entropy, self.behaviour, self.discount, self.tau = rho, entropy, behaviour, discount, tau
        self.size = spec.action.shape[0]
        self.augment = augmentation(augment, self.planner.model.inputs)
        self.register_buffer("value_scale", torch.ones(()))
        steps = range(self.planner.mppi.horizon)
        observed = dict.fromkeys(self.planner.model.inputs, (*steps, len(steps)))
        planned = dict.fromkeys(BEHAVIOUR if behaviour else (), tuple(steps))
        self.windows = {"update": Window({**observed, "action": tuple(steps), **planned})}

    @property
    def acting(self) -> Planner:
        return self.planner

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool, prefix: Prefix | None = None,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """Plan from the last plan's mean, which is the carry [B, H, A]; see Algorithm.act."""
        if not self.planner.plans:
            action, mean, std = self.planner.propose(observation, noise if explore else self.evaluation_noise(noise))
        else:
            begun = self.planner.begun(len(noise)) if carry is None else carry
            action, plan = self.planner.search(observation, begun, noise, explore=explore)
            mean, std, carry = plan.elite[:, 0], plan.std[:, 0], shifted(plan.mean)
        extras: dict[str, Tensor] = dict(zip(BEHAVIOUR, (mean, std), strict=True)) if self.behaviour else {}
        return Decision(self.planner.scale.from_unit(action).unsqueeze(1), extras), carry

    def update(self, batch: Batch) -> Metrics:
        """Take one step of the model and its critics, then one of the prior, and move the target critics."""
        batch = self.augment(batch)
        loss, latents, metrics = self.model_loss(batch)
        gradient = self.optimizer.step(loss)
        policy_loss, policy_metrics = self.policy_loss(batch, latents)
        policy_gradient = self.policy_optimizer.step(policy_loss)
        soft_update(self.target_critics, self.planner.model.critics, self.tau)
        gradients = {"model_gradient": gradient, "policy_gradient": policy_gradient}
        return metrics | policy_metrics | gradients

    def model_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Metrics]:
        """Compute (3), with targets (4). Returns the mean loss [], latents [B, H+1, L] without a gradient, metrics."""
        model, action = self.planner.model, self.planner.scale.to_unit(batch.action)
        with torch.no_grad():
            later = {name: batch.observation[name][:, 1:] for name in model.inputs}
            encoded = model.encode_steps(later)  # [B, H, L]
            target = self.target(batch, encoded)
        first = {name: batch.observation[name][:, 0] for name in model.inputs}
        latents, rewards, values, logits = self.optimizer.forward(first, action, self.generator)
        errors = {
            "consistency": (latents[:, 1:] - encoded).square().mean(-1),
            "reward": model.values.loss(rewards, batch.reward),
            "value": model.values.loss(values, target).mean(0),
        }
        if logits is not None:
            ends = batch.terminated.float()
            errors["termination"] = functional.binary_cross_entropy_with_logits(logits, ends, reduction="none")
        share = self._share(batch.valid, batch.weight)
        losses = {name: (share * error).sum(1).mean() for name, error in errors.items()}
        loss = torch.stack([self.weights[name] * each for name, each in losses.items()]).sum()
        metrics = {f"{name}_loss": each.detach() for name, each in losses.items()}
        return loss, latents.detach(), {**metrics, "value": model.values.mean(values.detach()).mean()}

    @torch.no_grad()
    def target(self, batch: Batch, following: Tensor) -> Tensor:
        """Compute (4) of each step [B, H]: the reward, and the lower of two target critics at the prior's action."""
        model = self.planner.model
        noise = normal(batch.seed, (following.shape[1], self.size))
        action, _ = self.planner.prior(following, noise)
        values = model.judge_by(self.target_critics, following.flatten(0, 1), action.flatten(0, 1))  # [E, B H]
        lowest = values[self._two()].amin(0).unflatten(0, following.shape[:2])
        return batch.reward + self.discount * ~batch.terminated * lowest

    def policy_loss(self, batch: Batch, latents: Tensor) -> tuple[Tensor, Metrics]:
        """Compute (6), the prior's mean loss [], over the values' scale; with `behaviour` also that of TD-M(PC)^2.

        latents: [B, H+1, L]. No gradient goes into critics or model: the optimiser differentiates by the prior alone.
        """
        noise = normal(batch.seed, (latents.shape[1], self.size), stream=1)
        action, log_prob = self.policy_optimizer.forward(latents, noise)  # [B, H+1, A], [B, H+1]
        values = self.planner.model.judge(latents.flatten(0, 1), action.flatten(0, 1))[self._two()].mean(0)
        values = values.unflatten(0, latents.shape[:2])
        self._rescale(values[:, 0].detach())
        entropy = -log_prob
        ahead = torch.cat([torch.ones_like(batch.valid[:, :1]), batch.valid], 1)
        share = self._share(ahead, batch.weight)
        loss = -(share * (values / self.value_scale + self.entropy * self.size * entropy)).sum(1).mean()
        metrics = {"entropy": entropy.detach().mean(), "value_scale": self.value_scale.clone()}
        if self.behaviour:
            strange = self.behaviour_loss(batch, action[:, :-1])
            metrics["behaviour_loss"] = strange.detach()
            loss = loss + self.behaviour * self.size / LARGE * strange
        return loss, {**metrics, "policy_loss": loss.detach()}

    def behaviour_loss(self, batch: Batch, action: Tensor) -> Tensor:
        """Compute how strange the prior's actions [B, H, A] would be to the planner that acted [].

        It is -log N(action; mean, std) of the stored plan, times the actions' dimensions and over the values' scale; 0
        while that scale is at most SPREAD. Steps that no planner chose count as their action with a wide deviation.
        """
        mean, std = (batch.extras[name] for name in BEHAVIOUR)  # [B, H, A]
        is_known = (std > 0) & ~batch.intervened.unsqueeze(-1)
        mean = torch.where(is_known, mean, self.planner.scale.to_unit(batch.action))
        std = torch.where(is_known, std.clamp(min=STD_LOW), WIDE)
        density = torch.distributions.Normal(mean, std, validate_args=False).log_prob(action).sum(-1)  # [B, H]
        strange = -(self._share(batch.valid, batch.weight) * density).sum(1).mean() * self.size / self.value_scale
        return strange * (self.value_scale > SPREAD)

    @torch.no_grad()
    def value(self, batch: Batch) -> Tensor:
        model = self.planner.model
        first = {name: batch.observation[name][:, 0] for name in model.inputs}
        return model.judge(model.encode(first), self.planner.scale.to_unit(batch.action[:, 0])).mean(0)

    def _share(self, valid: Tensor, weight: Tensor) -> Tensor:
        """Return what each step [B, T] counts: rho^t / T, and nothing behind the episode's end."""
        steps = torch.arange(valid.shape[1], device=valid.device)
        return weight.unsqueeze(1) * valid * self.rho**steps / len(steps)

    def _two(self) -> Tensor:
        """Draw the places of two critics."""
        two = torch.randperm(self.planner.model.critics.members, generator=self.generator)[:2]
        return two.to(self.value_scale.device, non_blocking=True)

    def _rescale(self, values: Tensor) -> None:
        """Move the scale towards the values' [B] range."""
        low, high = (values.quantile(share) for share in (0.05, 0.95))
        self.value_scale.lerp_((high - low).clamp(min=1.0), self.tau)
