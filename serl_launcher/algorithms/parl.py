"""Policy-agnostic RL (PA-RL: Mark et al. 2024, arXiv 2412.06685): improve actions by the critic, then imitate them.

What acts, and backs up, are the policy's samples after the selection and the local steps of policies/improved.py. The
policy itself never sees a gradient of the critic: `update_candidates` improves chunks of stored steps and keeps them in
derived columns, `update_distil` imitates them with the policy's own loss. So any head and network can be trained.
For a step with the chunk a that was executed there, the worst of the k candidates gives way to a. Then all climb, and
one is drawn with
    (1) P(a_i) = softmax_i(Q(s, a_i) / temperature).
Kept columns serve many updates, because sampling a large policy costs most. Each has the number of critic updates that
it came from. They leave the buffer with their step, and are part of a checkpoint.
"""

from dataclasses import replace
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec
from torch import Tensor

from serl_launcher.algorithms.base import descend
from serl_launcher.algorithms.chunk_actor_critic import ActsByCritic, Parts, first_step
from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.improved import Improved, best
from serl_launcher.types import Batch, Metrics, Window

DRAWN = 2  # stream of a row's random numbers for the choice (1)
CANDIDATE, VERSION = "candidate", "candidate_version"  # derived columns
DERIVED = "derived."


class PARL(ActsByCritic):
    """Learn values (`update_critic`), improve chunks (`update_candidates`), and imitate these (`update_distil`).

    samples, kept, steps, step_size, proposal_noise: n, k, T, eta and the noise of Improved.
    temperature: of (1), in the units of the return. The other arguments are those of Parts. Raises ConfigError for a
        temperature of 0 or less, and for a policy that imitates positions.
    """

    changeable = ("samples", "kept", "steps", "step_size", "proposal_noise", "temperature")

    def __init__(
        self, spec: Spec, *, samples: int, kept: int, steps: int, step_size: float, proposal_noise: float,
        temperature: float, **parts: Any,
    ) -> None:  # fmt: skip
        if temperature <= 0:
            raise ConfigError(f"algo.temperature={temperature}: say more than 0; a small one takes the best candidate")
        made = Parts(spec, "parl", **parts)
        policy = made.policy
        if policy.imitation_target != "action":
            raise ConfigError("algo=parl improves actions, not positions: say policy.imitation_target=action")
        super().__init__(made, Improved(
            policy, made.critic, samples=samples, kept=kept, steps=steps, step_size=step_size,
            proposal_noise=proposal_noise,
        ))  # fmt: skip
        self._temperature, whole = temperature, self.windows["update_clone"].offsets
        self.derived = {CANDIDATE: Feature((policy.horizon, *spec.action.shape)), VERSION: Feature((), "int64")}
        now = {**dict.fromkeys((*policy.inputs, *self.windows["update_critic"].offsets), (0,)), "action": (0,)}
        del now["next_observation"]
        self.windows["update_candidates"] = Window({**now, **whole})
        self.windows["update_distil"] = Window({**now, **dict.fromkeys((DERIVED + CANDIDATE, DERIVED + VERSION), (0,))})

    @torch.no_grad()
    def update_candidates(self, batch: Batch) -> tuple[Metrics, dict[str, Tensor]]:
        """Improve one chunk for each row's first step; nothing is trained. Returns metrics and derived columns."""
        batch, improved = self.augment(batch), self.acting
        observation = first_step(batch.observation)
        sampled = improved.proposed(observation, batch.task, normal(batch.seed, improved.noise_shape))
        order = improved.value(observation, sampled).topk(improved.kept, 0).indices  # the best first
        kept = sampled.gather(0, order[..., None, None].expand(-1, -1, *sampled.shape[2:]))
        executed = torch.where(batch.valid.unsqueeze(-1), batch.action, kept[0])  # behind an end nothing was
        begun = torch.cat([kept[: max(1, improved.kept - 1)], executed.unsqueeze(0)])
        climbed = improved.ascend(observation, begun)
        value = improved.value(observation, climbed)  # [k, B]
        shares = (value / self._temperature).softmax(0).cumsum(0)
        index = (shares < uniform(batch.seed, (), DRAWN)).sum(0).clamp(max=len(shares) - 1)
        chosen = climbed[index, torch.arange(len(batch), device=index.device)]
        version = torch.full((len(batch),), self.critic_optimizer.steps, device=index.device)
        scale = self.policy.scale
        metrics = {
            "value_gained": (value - improved.value(observation, begun)).mean(),
            "moved": (scale.to_unit(climbed) - scale.to_unit(begun)).abs().mean(),
            "value_of_best": best(value, value).mean(),
        }
        return metrics, {CANDIDATE: chosen, VERSION: version}

    def update_distil(self, batch: Batch) -> Metrics:
        """Take one step down the policy's imitation loss of the candidates; the critics do not change."""
        batch = self.augment(_candidates(batch))
        metrics = descend(self.policy_optimizer, batch, self.imitation_loss)
        age = self.critic_optimizer.steps - batch.extras[DERIVED + VERSION].float().mean()
        return metrics | {"candidate_age": age}


def _candidates(batch: Batch) -> Batch:
    """Return the batch as windows of the candidates' H steps, all of them valid."""
    candidate = batch.extras[DERIVED + CANDIDATE][:, 0]  # [B, H, A]
    flags = torch.ones(candidate.shape[:2], dtype=torch.bool, device=candidate.device)
    length = torch.full_like(batch.length, candidate.shape[1])
    return replace(batch, action=candidate, valid=flags, length=length)
