"""Flow matching over chunks of actions (Lipman et al. 2023, arXiv 2210.02747), in pi0's convention (arXiv 2410.24164).

Time t runs from 1 (noise) to 0 (action). With the chunk a, scaled to [-1, 1], and noise e ~ N(0, I):
    x_t = t e + (1 - t) a,    the network v(x_t, t, observation) learns    e - a,
with t = 0.001 + 0.999 b and b ~ Beta(1.5, 1), which dwells where there is most noise. A sample starts at t = 1 with
noise and takes `steps` Euler steps of x <- x - v / steps.
"""

import math
from collections.abc import Callable, Sequence

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor

from serl_launcher.networks.mlp import ActionScale, mlp
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.base import Policy, draw_noise
from serl_launcher.types import Batch, Metrics, Observation

FREQUENCIES = 16  # of the time features, from 1 to 100 turns


class FlowPolicy(Policy):
    """Chunks of `horizon` actions from an MLP over noisy chunk, time and encoded observation.

    `imitates` names what a chunk is made of: `action`, or an observation with the measured positions that the robot
    reached after each of these steps (Hi-ORS: what a human does to the arm is in it, whatever channel it came by).
    For that the action must be positions, too: its names must be among that observation's; else raises ConfigError.
    Noise chooses among the ways to do a task, and zeros lie between them: this policy always acts with noise.
    """

    frequencies: Tensor

    def __init__(
        self,
        spec: Spec,
        *,
        encoder: Callable[[Spec], ObservationEncoder],
        horizon: int,
        steps: int,
        hidden: Sequence[int],
        layer_norm: bool,
        imitates: str,
    ) -> None:
        super().__init__()
        self.encoder = encoder(spec)
        self.scale = ActionScale(spec.action)
        self.inputs, self.horizon, self.steps, self.imitates = self.encoder.inputs, horizon, steps, imitates
        self._entries = None if imitates == "action" else _entries(spec, imitates)
        size = horizon * spec.action.shape[0]
        self.network = mlp(size + 2 * FREQUENCIES + self.encoder.size, hidden, size, layer_norm=layer_norm)
        self.register_buffer("frequencies", torch.logspace(0, 2, FREQUENCIES), persistent=False)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (self.horizon, *self.scale.center.shape)

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        offsets = super().offsets
        if self._entries is not None:
            offsets[self.imitates] = (*offsets.get(self.imitates, ()), *range(1, self.horizon + 1))
        return offsets

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, Metrics]:
        """The mean squared error of the velocity over the steps that are valid, [B]; noise and time are drawn.

        The others are centred: the batch has zeros there, which may lie far outside of an action's bounds.
        """
        chunk = self.scale.to_unit(self._imitated(batch)) * batch.valid.unsqueeze(-1)  # [B, H, A]
        noise = draw_noise(tuple(chunk.shape), chunk.device, generator)
        source = chunk.device if generator is None else generator.device
        uniform = torch.rand(len(chunk), 1, 1, generator=generator, device=source).to(chunk.device)
        time = 0.001 + 0.999 * uniform ** (1 / 1.5)  # Beta(1.5, 1) by its inverse distribution function
        condition = self.encoder({name: batch.observation[name][:, :1] for name in self.inputs})  # [B, C]
        velocity = self._velocity(time * noise + (1 - time) * chunk, time[:, 0], condition)
        error = (velocity - (noise - chunk)).square().mean(-1) * batch.valid  # [B, H]
        return error.sum(-1) / batch.length, {}

    def sample(
        self,
        observation: Observation,
        *,
        n: int = 1,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        condition = self.encoder(observation)  # [B, C]
        count = len(condition)
        noise = draw_noise((n, count, *self.noise_shape), condition.device, generator) if noise is None else noise
        condition, chunk = condition.repeat(len(noise), 1), noise.flatten(0, 1)  # [n B, ...]
        for step in range(self.steps):
            time = torch.full((len(chunk), 1), 1 - step / self.steps, device=chunk.device)
            chunk = chunk - self._velocity(chunk, time, condition) / self.steps
        return self.scale.from_unit(chunk.clamp(-1, 1)).unflatten(0, noise.shape[:2])  # [n, B, H, A]

    def _velocity(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """v(x_t [B, H, A], t [B, 1], condition [B, C]) -> [B, H, A]."""
        angle = time * self.frequencies * math.tau / 4
        features = torch.cat([chunk.flatten(1), angle.sin(), angle.cos(), condition], -1)
        return self.network(features).view_as(chunk)

    def _imitated(self, batch: Batch) -> Tensor:
        if self._entries is None:
            return batch.action
        return batch.observation[self.imitates][:, -self.horizon :, self._entries]


def _entries(spec: Spec, name: str) -> list[int]:
    """Where in the observation `name` the entries of the action are."""
    names = list(spec.observation[name].names) if name in spec.observation else []
    missing = [entry for entry in spec.action.names or ("?",) if entry not in names]
    if missing:
        raise ConfigError(
            f"imitates={name} needs an action of measured positions, but {missing} of the action is not among its "
            f"names {names}: say imitates=action"
        )
    return [names.index(entry) for entry in spec.action.names]
