"""Improves a policy's chunks by a critic before they act: best of n samples, and PA-RL's gradient steps.

PA-RL: Mark et al. 2024, "Policy Agnostic RL" (arXiv 2412.06685). Of n candidates a_1..a_n ~ pi(. | s) the k with the
largest Q = mean_e Q_e are kept. Each of them takes T steps, with actions scaled to [-1, 1] and clipped to the bounds:
    (1) a <- a + eta dQ(s, a) / da,
and is replaced by the one of its steps whose Q is largest. Of the k the one with the largest Q acts, and backs up. With
k = n and T = 0 this is the best of n, which Q-chunking uses (Li et al. 2025, arXiv 2507.07969).
"""

from collections.abc import Sequence

import torch
from serl_client.errors import ConfigError
from torch import Tensor

from serl_launcher.networks.critics import Critic
from serl_launcher.policies.base import ScaledPolicy
from serl_launcher.policies.wrapped import Wrapped
from serl_launcher.types import Observation


class Improved(Wrapped):
    """The chunk with the largest value among samples of `policy`, after some steps up the critic.

    critic: Q(s, a_1..a_h) of the first h actions of a chunk.
    samples: n. kept: k, of the best; None: all. steps: T. step_size: eta, of actions scaled to [-1, 1].
    proposal_noise: standard deviation added to samples, of actions scaled to [-1, 1]. A head without noise needs it.
    Raises ConfigError for other numbers, and for a head whose samples are all the same without proposal noise.
    """

    def __init__(
        self, policy: ScaledPolicy, critic: Critic, *, samples: int, kept: int | None = None, steps: int = 0,
        step_size: float = 0.0, proposal_noise: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(policy)
        kept = samples if kept is None else kept
        if not 1 <= kept <= samples or steps < 0 or step_size < 0 or proposal_noise < 0:
            raise ConfigError(
                f"algo: samples={samples}, kept={kept}, steps={steps}, step_size={step_size}, proposal_noise="
                f"{proposal_noise}: say 1 or more samples, 1 to that many kept, and the others not below zero"
            )
        if policy.is_deterministic and samples > 1 and not proposal_noise:
            name = type(getattr(policy, "head", policy)).__name__
            raise ConfigError(
                f"all samples of {name} are the same, so there is no best of {samples}: say algo.proposal_noise=0.1, "
                "algo.samples=1, or another head"
            )
        self.critic = critic
        self.samples, self.kept, self.steps, self.step_size = samples, kept, steps, step_size
        self.proposal_noise = proposal_noise

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[n, P]: the noise of each sample, and that of its proposal if there is one."""
        own = torch.Size(self.policy.noise_shape).numel()
        return (self.samples, own + self.policy.horizon * self.policy.size * bool(self.proposal_noise))

    def choose(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        candidates = self.improved(observation, self.proposed(observation, task, noise))
        return best(candidates, self.value(observation, candidates))

    def proposed(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        """Sample the candidates -> [n, B, H, A]. noise: [B, *noise_shape]."""
        own = torch.Size(self.policy.noise_shape).numel()
        noise = noise.transpose(0, 1)  # [n, B, P]
        found = self.policy.sample(
            observation, task=task, n=self.samples, noise=noise[..., :own].unflatten(-1, self.policy.noise_shape)
        )
        if not self.proposal_noise:
            return found
        scale = self.policy.scale
        moved = scale.to_unit(found) + self.proposal_noise * noise[..., own:].view_as(found)
        return scale.from_unit(moved.clamp(*scale.limits()))

    def improved(self, observation: Observation, candidates: Tensor) -> Tensor:
        """Keep the k best of the candidates [n, B, H, A], and climb -> [k, B, H, A]."""
        if self.kept < len(candidates):
            order = self.value(observation, candidates).topk(self.kept, 0).indices
            candidates = candidates.gather(0, order[..., None, None].expand(-1, -1, *candidates.shape[2:]))
        return self.ascend(observation, candidates)

    def ascend(self, observation: Observation, candidates: Tensor) -> Tensor:
        """Take the T steps (1), and return of each candidate [k, B, H, A] the step with the largest value."""
        if not self.steps:
            return candidates
        scale = self.policy.scale
        unit = scale.to_unit(candidates)
        found, most = unit, candidates.new_full(candidates.shape[:2], -torch.inf)
        for step in range(self.steps + 1):
            with torch.enable_grad():
                tried = unit.detach().requires_grad_()
                value = self.value(observation, scale.from_unit(tried))
                (slope,) = torch.autograd.grad(value.sum(), tried)
            is_better = value.detach() > most
            most = torch.where(is_better, value.detach(), most)
            found = torch.where(is_better[..., None, None], unit, found)
            if step < self.steps:
                unit = (unit + self.step_size * slope).clamp(*scale.limits())
        return scale.from_unit(found)

    def value(self, observation: Observation, candidates: Tensor) -> Tensor:
        """Return the critics' mean value of candidates [n, B, H, A] -> [n, B]."""
        return self.critic.mean_value(observation, candidates)


def best(candidates: Tensor, value: Tensor) -> Tensor:
    """Return of candidates [n, B, ...] those with the largest value [n, B] -> [B, ...]."""
    return candidates[value.argmax(0), torch.arange(candidates.shape[1], device=candidates.device)]
