"""Cal-QL (calibrated CQL): critics value actions that a dataset lacks low; for offline-to-online RL.

Cal-QL: Nakamoto et al. 2023, "Calibrated Offline RL Pre-Training for Efficient Online Fine-Tuning" (arXiv 2303.05479).
It is CQL (Kumar et al. 2020, "Conservative Q-Learning", arXiv 2006.04779, the variant CQL(H)) with a lower bound. The
loss of SAC's critics has one more term, for each critic:
    (1) alpha mean [log(1/M sum_m exp Q(s, a_m)) - Q(s, a)],
where a is the batch's action. The M = 3 n + 1 actions are a itself, n uniform ones, n ~ pi(. | s) and n ~ pi(. | s').
This lowers the values of actions that the data lack. CQL lowers them without end, and practice first has to unlearn it.
Cal-QL stops at the return to go G of the row:
    (2) in (1), max(Q(s, a_m), G) stands for Q(s, a_m) where a_m is of the policy.
Uniform actions have no such bound, and no action is weighted by its density. Both are as in the code of Policy Agnostic
RL (Mark et al. 2024, arXiv 2412.06685). Where a time limit ended an episode, G lacks the rewards that would have
followed; it is still a lower bound if these are not negative.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor

from serl_launcher.algorithms.base import critic_loss, soft_update
from serl_launcher.algorithms.sac import SAC
from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.types import Batch, Metrics

RETURN = "episode.return"
COMPARED = 2  # stream of a row's random numbers for the actions of (1); stream 0 is SAC's


class CalQL(SAC):
    """SAC whose critics also take (1), on any mixture of a dataset and own episodes.

    cql_alpha: alpha of (1). cql_samples: n of (1).
    calibrated: True: (2) holds; no row of an open episode is drawn, because its return is not known. False: plain CQL.
    The other arguments are those of SAC. Raises ConfigError for a negative alpha and for less than one sample.
    """

    changeable = ("cql_alpha", "cql_samples", "calibrated")

    def __init__(self, spec: Spec, *, cql_alpha: float, cql_samples: int, calibrated: bool, **sac: Any) -> None:
        if cql_alpha < 0 or cql_samples < 1:
            raise ConfigError(
                "algo=calql: say an algo.cql_alpha of at least 0, and one or more algo.cql_samples, not "
                f"cql_alpha={cql_alpha}, cql_samples={cql_samples}"
            )
        super().__init__(spec, **sac)
        self.cql_alpha, self.cql_samples, self.calibrated = cql_alpha, cql_samples, calibrated
        if calibrated:
            for name, window in self.windows.items():
                offsets = {**window.offsets, RETURN: window.offsets["action"]}
                self.windows[name] = replace(window, offsets=offsets, discount=self.discount)

    def _update_critic(self, batch: Batch, noise: Tensor) -> Metrics:
        target = self.target(batch, noise)
        actions = torch.cat([batch.action.unsqueeze(0), self.compared(batch)])  # [M, B, 1, A]
        prediction = self.critic_optimizer.forward(batch.observation, actions)  # [E, M, B] or [E, M, B, K]
        loss, metrics = critic_loss(batch, self.critic, prediction[:, 0], target)
        conservative = (batch.weight * self.gap(batch, self.critic.values.mean(prediction)).sum(0)).mean()
        gradient = self.critic_optimizer.step(loss + self.cql_alpha * conservative)
        soft_update(self.target_critic, self.critic, self.tau)
        return {**metrics, "conservative_loss": conservative.detach(), "critic_gradient": gradient}

    @torch.no_grad()
    def compared(self, batch: Batch) -> Tensor:
        """Draw the actions of (1) that are not the batch's, [3 n, B, 1, A]: the uniform ones come first."""
        assert batch.next_observation is not None  # the window asks for it
        count = self.cql_samples
        unit = 2 * uniform(batch.seed, (count, *batch.action.shape[1:]), COMPARED) - 1  # [B, n, 1, A]
        noise = normal(batch.seed, (2, count, *self.policy.noise_shape), COMPARED).movedim(0, 2)  # [2, n, B, 1, A]
        return torch.cat([
            self.critic.scale.from_unit(unit).transpose(0, 1),
            self.policy.sample(batch.observation, task=batch.task, noise=noise[0]),
            self.policy.sample(batch.next_observation, task=batch.task, noise=noise[1]),
        ])  # fmt: skip

    def gap(self, batch: Batch, values: Tensor) -> Tensor:
        """Compute the bracket of (1), with (2), for each critic and row [E, B].

        values: [E, M, B], of the batch's action, then of those of `compared`.
        """
        if self.calibrated:
            others, policys = values.split([1 + self.cql_samples, 2 * self.cql_samples], 1)
            values = torch.cat([others, torch.maximum(policys, batch.extras[RETURN][:, 0])], 1)
        return values.logsumexp(1) - math.log(values.shape[1]) - values[:, 0]
