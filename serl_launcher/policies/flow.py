"""Flow matching over chunks of actions (Lipman et al. 2023, arXiv 2210.02747), in pi0's convention (arXiv 2410.24164).

Time t runs from 1 (noise) to 0 (action). With the chunk a, scaled to about [-1, 1], and noise e ~ N(0, I):
    (1) x_t = t e + (1 - t) a,
    (2) the network v(x_t, t, observation) learns  dx/dt = e - a,
    (3) with t = 0.001 + 0.999 b and b ~ Beta(1.5, 1), which dwells where there is most noise.
A sample starts at t = 1 with noise and takes N Euler steps of
    (4) x <- x - v / N.
A policy with a `noise_level` s is sampled stochastically, with the same marginals (Flow-GRPO, Liu et al. 2025,
arXiv 2505.05470, equations 7 to 9): with sigma_t = s sqrt(t / (1 - t)) and fresh noise z at each step,
    (5) x <- x - (v + sigma_t^2 / (2 t) (x + (1 - t) v)) / N + sigma_t sqrt(1 / N) z.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn
from torch.nn import functional

from serl_launcher.networks.mlp import ActionScale, mlp
from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.networks.vision import ObservationEncoder
from serl_launcher.policies.base import Policy
from serl_launcher.types import Batch, Metrics, Observation

FREQUENCIES = 16  # of the time features, from 1 to 100 turns
TIME = 1  # stream of a row's chance; 0 is the noise


class FlowMatching(Policy):
    """The loss and the samplers of a velocity v(x_t, t, condition); a subclass gives the network.

    `imitation_target` names what a chunk is made of: `action`, or an observation with the measured positions that the
    robot reached after each of these steps (Hi-ORS: what a human does to the arm is in it, whatever channel it came
    by). For that the action must be positions, too: its names must be among that observation's; else raises
    ConfigError. `scale` says by what actions are scaled (see ActionScale); samples keep within the Spec's bounds in any
    case. `width` D is how many numbers the network sees of each action: the Spec's A and then zeros, of which no loss
    is taken. Noise chooses among the ways to do a task, and zeros lie between them: this policy always acts with noise.
    With a `noise_level`, which is learned from there, (5) makes samples of which a density can be told; None: (4)."""

    graph = "chunks"
    feature_size: int

    def __init__(
        self,
        spec: Spec,
        *,
        horizon: int,
        steps: int,
        imitation_target: str,
        width: int,
        noise_level: float | None,
        scale: str = "bounds",
    ) -> None:
        super().__init__()
        self.horizon, self.steps, self.imitation_target, self.width = horizon, steps, imitation_target, width
        self.size = spec.action.shape[0]  # A
        self.log_noise_level = None if noise_level is None else nn.Parameter(torch.tensor(math.log(noise_level)))
        self.entries = None if imitation_target == "action" else _entries(spec, imitation_target)
        self.scale = ActionScale(spec.action, scale, imitation_target, self.entries)

    def prepared(self, observation: Observation, task: Sequence[str]) -> Observation:
        """The observation with what `condition` needs of the task; all that follows is tensors and no words."""
        return observation

    @abstractmethod
    def condition(self, prepared: Observation) -> Any:
        """What the velocity depends on besides chunk and time, computed once for all steps of a sample."""

    @abstractmethod
    def repeated(self, condition: Any, n: int) -> Any:
        """The condition of B rows for n samples of each, [n B]: rows 0..B-1, then again."""

    @abstractmethod
    def features(self, observation: Observation) -> Tensor:
        """What a critic may look at instead of the observation {[B, ...]} -> [B, feature_size]."""

    @abstractmethod
    def velocity(self, chunk: Tensor, time: Tensor, condition: Any) -> Tensor:
        """v(x_t [B, H, D], t [B], condition) -> [B, H, D]."""

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[1 (and one for each step of the stochastic sampler), H, D]."""
        return (1 if self.log_noise_level is None else 1 + self.steps, self.horizon, self.width)

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        offsets = super().offsets
        if self.entries is not None:
            offsets[self.imitation_target] = (*offsets.get(self.imitation_target, ()), *range(1, self.horizon + 1))
        return offsets

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The mean squared error of the velocity over the steps that are valid, [B]: (1) to (3).

        The others are centred: the batch has zeros there, which may lie far outside of an action's bounds.
        """
        action = self.scale.to_unit(self._imitated(batch)) * batch.valid.unsqueeze(-1)  # [B, H, A]
        chunk = functional.pad(action, (0, self.width - self.size))  # [B, H, D]
        noise = normal(batch.seed, (self.horizon, self.width))
        time = 0.001 + 0.999 * uniform(batch.seed, (), TIME) ** (1 / 1.5)  # Beta(1.5, 1) by its inverse distribution
        t = time[:, None, None]
        observation = {name: batch.observation[name][:, 0] for name in self.inputs}
        condition = self.condition(self.prepared(observation, batch.task))
        velocity = self.velocity(t * noise + (1 - t) * chunk, time, condition)
        error = (velocity.float() - (noise - chunk))[..., : self.size].square().mean(-1) * batch.valid  # [B, H]
        return error.sum(-1) / batch.length, {}

    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None
    ) -> Tensor:
        """As in Policy; noise with its first part alone, [n, B, 1, H, D], leaves the others out: (4)."""
        count, device = len(next(iter(observation.values()))), self.scale.center.device
        noise = torch.randn(n, count, *self.noise_shape, device=device) if noise is None else noise
        return self.chunks(self.prepared(observation, task), noise)

    def chunks(self, prepared: Observation, noise: Tensor) -> Tensor:
        """`sample` after its preparation: one graph of tensors."""
        condition = self.repeated(self.condition(prepared), len(noise))
        chunk, _ = self._integrate(noise.flatten(0, 1), condition)
        return self._action(chunk).unflatten(0, noise.shape[:2])  # [n, B, H, A]

    def rsample(
        self, observation: Observation, *, seed: Tensor, stream: int = 0, task: Sequence[str] = ()
    ) -> tuple[Tensor, Tensor]:
        """One chunk per observation, with a gradient through all steps -> action [B, H, A], log_prob [B].

        log_prob is the log density of the last step of (5), given those before and cut to no bounds: minus its mean is
        a lower bound of the entropy, and falls with the noise level. Without one no density can be told, and it
        is zero.
        """
        condition = self.condition(self.prepared(observation, task))
        chunk, log_prob = self._integrate(normal(seed, self.noise_shape, stream), condition)
        bounded: Any = _Bounded.apply(chunk[..., : self.size], *self.scale.limits())
        return self.scale.from_unit(bounded), log_prob

    def _integrate(self, noise: Tensor, condition: Any) -> tuple[Tensor, Tensor]:
        """From noise [B, 1 or 1 + N, H, D] at t = 1 to a chunk at t = 0 -> [B, H, D], log_prob [B]."""
        chunk, log_prob = noise[:, 0], noise.new_zeros(len(noise))
        stochastic = noise.shape[1] > 1
        for step in range(self.steps):
            t = 1 - step / self.steps
            velocity = self.velocity(chunk, chunk.new_full((len(chunk),), t), condition).float()
            if not stochastic:
                chunk = chunk - velocity / self.steps  # (4)
                continue
            assert self.log_noise_level is not None
            sigma = self.log_noise_level.exp() * math.sqrt(t / max(1 - t, 1 / self.steps))  # finite at t = 1
            chunk = chunk - (velocity + sigma**2 / (2 * t) * (chunk + (1 - t) * velocity)) / self.steps
            fresh, std = noise[:, 1 + step], sigma / math.sqrt(self.steps)
            chunk = chunk + std * fresh  # (5)
            density = -0.5 * fresh.square() - std.log() - 0.5 * math.log(math.tau)
            log_prob = density[..., : self.size].sum((-2, -1))
        return chunk, log_prob

    def _action(self, chunk: Tensor) -> Tensor:
        return self.scale.from_unit(chunk[..., : self.size].clamp(*self.scale.limits()))

    def _imitated(self, batch: Batch) -> Tensor:
        if self.entries is None:
            return batch.action
        return batch.observation[self.imitation_target][:, -self.horizon :, self.entries]


class FlowPolicy(FlowMatching):
    """Chunks of `horizon` actions from an MLP over noisy chunk, time and encoded observation."""

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
        imitation_target: str,
        noise_level: float | None,
        scale: str = "bounds",
    ) -> None:
        options = {
            "horizon": horizon,
            "steps": steps,
            "imitation_target": imitation_target,
            "noise_level": noise_level,
            "scale": scale,
        }
        super().__init__(spec, width=(width := spec.action.shape[0]), **options)
        self.encoder = encoder(spec)
        self.inputs, self.feature_size = self.encoder.inputs, self.encoder.size
        self.network = mlp(
            horizon * width + 2 * FREQUENCIES + self.encoder.size, hidden, horizon * width, layer_norm=layer_norm
        )
        self.register_buffer("frequencies", torch.logspace(0, 2, FREQUENCIES), persistent=False)

    def condition(self, prepared: Observation) -> Tensor:
        return self.encoder(prepared)  # [B, C]

    def repeated(self, condition: Tensor, n: int) -> Tensor:
        return condition.repeat(n, 1)

    def features(self, observation: Observation) -> Tensor:
        return self.encoder(observation)

    def velocity(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        angle = time.unsqueeze(1) * self.frequencies * math.tau / 4
        features = torch.cat([chunk.flatten(1), angle.sin(), angle.cos(), condition], -1)
        return self.network(features).view_as(chunk)


class _Bounded(torch.autograd.Function):
    """Cuts to [low, high]. The gradient of a number outside passes if a step down it leads back, or it would stay
    there."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, low: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, low, high)
        return inputs.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inputs, low, high), (gradient,) = ctx.saved_tensors, gradients
        leads_away = ((inputs > high) & (gradient < 0)) | ((inputs < low) & (gradient > 0))
        return gradient.masked_fill(leads_away, 0.0), None, None


def _entries(spec: Spec, name: str) -> list[int]:
    """Where in the observation `name` the entries of the action are."""
    names = list(spec.observation[name].names) if name in spec.observation else []
    missing = [entry for entry in spec.action.names or ("?",) if entry not in names]
    if missing:
        raise ConfigError(
            f"imitation_target={name} needs an action of measured positions, but {missing} of the action is not "
            f"among its "
            f"names {names}: say imitation_target=action"
        )
    return [names.index(entry) for entry in spec.action.names]
