"""Builds the edit policy of EXPO (arXiv 2507.07986): small changes of chunks that another one proposes."""

from collections.abc import Sequence
from typing import Any

import torch
from serl_client.errors import ConfigError
from torch import Tensor, nn

from serl_launcher.networks.critics import Critic
from serl_launcher.networks.mlp import ActionScale, mlp
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.base import ScaledPolicy
from serl_launcher.policies.chunk import Bounded
from serl_launcher.policies.gaussian import squashed_log_prob
from serl_launcher.policies.improved import Improved, best
from serl_launcher.types import Observation

LOG_STD = (-5.0, 2.0)  # bounds of the log standard deviation, before the tanh


class Editor(nn.Module):
    """edit = reach * tanh(mean + std * noise), given the observation and the first h actions of a chunk.

    encoder: of observations. horizon: h. reach: largest edit of an action scaled to [-1, 1]. hidden: widths.
    """

    def __init__(
        self, encoder: ObservationEncoder, scale: ActionScale, *, horizon: int, reach: float, hidden: Sequence[int]
    ) -> None:
        super().__init__()
        numbers = horizon * len(scale.center)
        self.encoder, self.reach, self.horizon = encoder, reach, horizon
        self.network = mlp(encoder.size + numbers, hidden, 2 * numbers, layer_norm=True)

    def forward(self, observation: Observation, unit: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Edit n chunks for each observation: scaled [n, B, H, A] -> scaled [n, B, H, A], log density [n, B].

        noise: [n, B, h, A]. Only the first h actions change. The density is over edits scaled to [-1, 1].
        """
        features = self.encoder(observation).expand(len(unit), -1, -1)
        found = self.network(torch.cat([features, unit[:, :, : self.horizon].flatten(2)], -1))
        mean, log_std = found.unflatten(-1, (2, self.horizon, -1)).unbind(2)  # [n, B, h, A] each
        log_std = log_std.clamp(*LOG_STD)
        raw = mean + log_std.exp() * noise
        density = squashed_log_prob(*(each.flatten(0, 1) for each in (noise, log_std, raw))).view(noise.shape[:2])
        edited = unit[:, :, : self.horizon] + self.reach * raw.tanh()
        return torch.cat([edited, unit[:, :, self.horizon :]], 2), density


class Edited(Improved):
    """Of n samples of `policy` and an edit of each, the one with the largest value: the on-the-fly policy of EXPO."""

    def __init__(self, policy: ScaledPolicy, critic: Critic, editor: Editor, *, samples: int) -> None:
        super().__init__(policy, critic, samples=samples)
        if not 0 < editor.reach <= 1:
            raise ConfigError(f"algo.reach={editor.reach}: say more than 0 and at most 1")
        self.editor = editor

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[n, P + h A]: the noise of each sample, then that of its edit."""
        samples, own = super().noise_shape
        return (samples, own + self.editor.horizon * self.policy.size)

    def choose(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        own = super().noise_shape[1]
        sampled = self.proposed(observation, task, noise[..., :own])
        fresh = noise[..., own:].transpose(0, 1).unflatten(-1, (self.editor.horizon, -1))
        candidates = torch.cat([sampled, self.edited(observation, sampled, fresh)[0]])
        return best(candidates, self.value(observation, candidates))

    def edited(self, observation: Observation, chunks: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Edit chunks [n, B, H, A] within the bounds -> [n, B, H, A], and the edits' log density [n, B]."""
        scale = self.policy.scale
        unit, density = self.editor(observation, scale.to_unit(chunks), noise)
        bounded: Any = Bounded.apply(unit, *scale.limits())
        return scale.from_unit(bounded), density
