"""Flow matching over chunks of actions (Lipman et al. 2023, arXiv 2210.02747), in pi0's convention (arXiv 2410.24164).

Time t runs from 1 (noise) to 0 (action). With the chunk a, scaled to about [-1, 1], and noise e ~ N(0, I):
    (1) x_t = t e + (1 - t) a,
    (2) the network v(x_t, t, observation) learns  dx/dt = e - a,
    (3) with t = 0.001 + 0.999 b and b ~ Beta(1.5, 1), which draws mostly times with much noise.
A sample starts at t = 1 with noise and takes N Euler steps of
    (4) x <- x - v / N.
A policy with `max_delay` > 0 also learns to continue a chunk: the first d = 0..max_delay rows of (1) are at time 0,
where x_t = a, and have no loss. prefix.py says how samples continue one.
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
from serl_launcher.policies.prefix import ACTION, Rows, named, strength
from serl_launcher.types import Batch, Metrics, Observation, Prefix

FREQUENCIES = 16  # of the time features, from 1 to 100 turns
TIME, DELAY = 1, 2  # streams of a row's random numbers for time and delay; stream 0 is the noise

Velocity = Callable[[Tensor, float], Tensor]  # of a chunk [B, H, D] at a time


class FlowMatching(Policy):
    """The loss and the samplers of a velocity v(x_t, t, condition). A subclass adds the network.

    horizon: H, actions of a chunk. steps: N, Euler steps of the sampler.
    imitation_target: column that a chunk imitates: `action`, or an observation with the positions that the robot
        reached after each step (as in Hi-ORS). Such positions include every human correction, by whatever device. The
        action must be positions too, with names among the observation's names.
    width: D, numbers per action in the network: the Spec's A, then zeros without a loss.
    noise_level: initial s of (5), which is trained from there; None: the deterministic sampler (4), without a density.
    scale: how actions are scaled, see ActionScale. Samples stay within the Spec's bounds with every scale.
    max_delay: rows of the old chunk that the policy learns to continue, at most; below H. 0: it learns none, and its
        samples continue a chunk by guidance.

    This policy always acts with noise. The noise chooses among several ways to do a task; zero noise lies between them.
    Raises ConfigError if the action's names are not among those of `imitation_target`, and for another `max_delay`.
    """

    graph = "chunks"
    changeable = ("steps",)  # of the sampler alone: see config.changeable
    feature_size: int

    def __init__(
        self, spec: Spec, *, horizon: int, steps: int, imitation_target: str, width: int, noise_level: float | None,
        scale: str = "bounds", max_delay: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 0 <= max_delay < horizon:
            raise ConfigError(f"policy.max_delay={max_delay}: say 0, or fewer rows than policy.horizon={horizon}")
        self.max_delay, self.continues = max_delay, "trained" if max_delay else "guided"
        self.horizon, self.steps, self.imitation_target, self.width = horizon, steps, imitation_target, width
        self.size = spec.action.shape[0]  # A
        self.log_noise_level = None if noise_level is None else nn.Parameter(torch.tensor(math.log(noise_level)))
        self.entries = None if imitation_target == "action" else _entries(spec, imitation_target)
        self.scale = ActionScale(spec.action, scale, imitation_target, self.entries)

    def prepared(self, observation: Observation, task: Sequence[str]) -> Observation:
        """Add to the observation what `condition` needs of the task, so that the rest works on tensors alone."""
        return observation

    @abstractmethod
    def condition(self, prepared: Observation) -> Any:
        """Compute what the velocity depends on besides chunk and time, once for all steps of a sample."""

    @abstractmethod
    def repeated(self, condition: Any, n: int) -> Any:
        """Repeat the condition of B rows for n samples each -> [n B], in the order rows 0..B-1, n times."""

    @abstractmethod
    def features(self, observation: Observation) -> Tensor:
        """Encode the observation {name: [B, ...]} for a critic -> [B, feature_size]."""

    @abstractmethod
    def velocity(self, chunk: Tensor, time: Tensor, condition: Any) -> Tensor:
        """Compute v(x_t, t, condition) -> [B, H, D], for chunk x_t [B, H, D].

        time: t of each row [B, H], or [B, 1] for all rows. At most the first `max_delay` rows are at time 0.
        """

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[1, H, D]; with a noise level [1 + steps, H, D], one noise more for each step of the stochastic sampler."""
        return (1 if self.log_noise_level is None else 1 + self.steps, self.horizon, self.width)

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        offsets = super().offsets
        if self.entries is not None:
            offsets[self.imitation_target] = (*offsets.get(self.imitation_target, ()), *range(1, self.horizon + 1))
        return offsets

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Compute the velocity's mean squared error over the valid steps [B], (1) to (3).

        Steps after the episode's end become the centre of the action range: the batch has zeros there, which may lie
        far outside the action's bounds.
        """
        action = self.scale.to_unit(self._imitated(batch)) * batch.valid.unsqueeze(-1)  # [B, H, A]
        chunk = functional.pad(action, (0, self.width - self.size))  # [B, H, D]
        noise = normal(batch.seed, (self.horizon, self.width))
        time = 0.001 + 0.999 * uniform(batch.seed, (), TIME) ** (1 / 1.5)  # Beta(1.5, 1) by its inverse distribution
        time, counted, count = time.unsqueeze(1), batch.valid, batch.length  # [B, 1], [B, H], [B]
        if self.max_delay:
            delay = self._delay(batch)
            is_free = torch.arange(self.horizon, device=delay.device) >= delay.unsqueeze(1)
            time, counted, count = time * is_free, counted & is_free, count - delay
        t = time.unsqueeze(-1)
        observation = {name: batch.observation[name][:, 0] for name in self.inputs}
        condition = self.condition(self.prepared(observation, batch.task))
        velocity = self.velocity(t * noise + (1 - t) * chunk, time, condition)
        error = (velocity.float() - (noise - chunk))[..., : self.size].square().mean(-1) * counted  # [B, H]
        return error.sum(-1) / count, {}

    def _delay(self, batch: Batch) -> Tensor:
        """Draw how many rows of each window are the old chunk's [B]; at least one valid row is new."""
        drawn = (uniform(batch.seed, (), DELAY) * (self.max_delay + 1)).long()
        return torch.minimum(drawn, batch.length - 1)

    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # fmt: skip
        """Sample n chunks per observation -> [n, B, H, A], see Policy.sample.

        noise: [n, B, *noise_shape]; [n, B, 1, H, D], the initial noise alone, selects the deterministic sampler (4).
        """
        count, device = len(next(iter(observation.values()))), self.scale.center.device
        noise = torch.randn(n, count, *self.noise_shape, device=device) if noise is None else noise
        prepared = self.prepared(observation, task)
        if self.max_delay or prefix is not None:
            prepared = {**prepared, **named(prefix, count, self.horizon, self.size, device)}
        if prefix is None or self.max_delay:
            return self.chunks(prepared, noise)
        return self.guided(prepared, noise)

    def chunks(self, prepared: Observation, noise: Tensor) -> Tensor:
        """Do what `sample` does after `prepared`: tensors alone, so that it can be one CUDA graph."""
        condition = self.repeated(self.condition(prepared), len(noise))
        if not self.max_delay:
            chunk, _ = self._integrate(noise.flatten(0, 1), self._free(condition))
            return self._action(chunk).unflatten(0, noise.shape[:2])  # [n, B, H, A]
        rows = self._rows(prepared, len(noise))
        first = rows.first(self.max_delay)  # [B, H]

        def velocity(chunk: Tensor, t: float) -> Tensor:
            chunk = torch.where(first.unsqueeze(-1), rows.unit, chunk)
            return self.velocity(chunk, (~first).float() * t, condition).float()

        chunk, _ = self._integrate(noise.flatten(0, 1), velocity)
        return rows.kept(self._action(chunk)).unflatten(0, noise.shape[:2])

    def guided(self, prepared: Observation, noise: Tensor) -> Tensor:
        """Do what `chunks` does, guided by the old chunk: (1) of prefix.py. It is not recorded as a CUDA graph."""
        condition = self.repeated(self.condition(prepared), len(noise))
        free, rows = self._free(condition), self._rows(prepared, len(noise))
        weights = functional.pad(rows.weights().unsqueeze(-1).expand_as(rows.action), (0, self.width - self.size))

        def velocity(chunk: Tensor, t: float) -> Tensor:
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                found = free(chunk, t)
                guess = chunk - t * found
                (pull,) = torch.autograd.grad(guess, chunk, weights * (rows.unit - guess.detach()))
            return found.detach() - strength(t) * pull

        chunk, _ = self._integrate(noise.flatten(0, 1), velocity)
        return rows.kept(self._action(chunk)).unflatten(0, noise.shape[:2])

    def _rows(self, prepared: Observation, n: int) -> Rows:
        return Rows.of(prepared, self.scale.to_unit(prepared[ACTION]), n, self.width)

    def _free(self, condition: Any) -> Velocity:
        """Return the velocity of chunks that begin anew."""
        return lambda chunk, t: self.velocity(chunk, chunk.new_full((len(chunk), 1), t), condition).float()

    def rsample(
        self, observation: Observation, *, seed: Tensor, stream: int = 0, task: Sequence[str] = ()
    ) -> tuple[Tensor, Tensor]:
        """Sample one chunk per observation, with a gradient through all steps -> action [B, H, A], log_prob [B].

        seed, stream: see `normal`.
        log_prob is the log density of the last step of (5), given the steps before and without clipping. Minus its
        mean is a lower bound of the entropy, and falls with the noise level. Without a noise level it is zero.
        """
        condition = self.condition(self.prepared(observation, task))
        chunk, log_prob = self._integrate(normal(seed, self.noise_shape, stream), self._free(condition))
        bounded: Any = _Bounded.apply(chunk[..., : self.size], *self.scale.limits())
        return self.scale.from_unit(bounded), log_prob

    def _integrate(self, noise: Tensor, velocity_at: Velocity) -> tuple[Tensor, Tensor]:
        """Integrate noise [B, 1 or 1 + N, H, D] from t = 1 to t = 0 -> chunk [B, H, D], log_prob [B]."""
        chunk, log_prob = noise[:, 0], noise.new_zeros(len(noise))
        stochastic = noise.shape[1] > 1
        for step in range(self.steps):
            t = 1 - step / self.steps
            velocity = velocity_at(chunk, t)
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
    """A flow policy whose velocity is an MLP of noisy chunk, time and encoded observation.

    hidden, layer_norm: as in mlp. The other arguments are those of FlowMatching, with D = A. With `max_delay` the
    network also sees which of the first rows are at time 0; its time is that of the others.
    """

    frequencies: Tensor

    def __init__(
        self, spec: Spec, *, encoder: Callable[[Spec], ObservationEncoder], horizon: int, steps: int,
        hidden: Sequence[int], layer_norm: bool, imitation_target: str, noise_level: float | None,
        scale: str = "bounds", max_delay: int = 0,
    ) -> None:  # fmt: skip
        width = spec.action.shape[0]
        super().__init__(
            spec, horizon=horizon, steps=steps, imitation_target=imitation_target, width=width,
            noise_level=noise_level, scale=scale, max_delay=max_delay,
        )  # fmt: skip
        self.encoder = encoder(spec)
        self.inputs, self.feature_size = self.encoder.inputs, self.encoder.size
        inputs = horizon * width + 2 * FREQUENCIES + self.encoder.size + max_delay
        self.network = mlp(inputs, hidden, horizon * width, layer_norm=layer_norm)
        self.register_buffer("frequencies", torch.logspace(0, 2, FREQUENCIES), persistent=False)

    def condition(self, prepared: Observation) -> Tensor:
        return self.encoder(prepared)  # [B, C]

    def repeated(self, condition: Tensor, n: int) -> Tensor:
        return condition.repeat(n, 1)

    def features(self, observation: Observation) -> Tensor:
        return self.encoder(observation)

    def velocity(self, chunk: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        angle = time[:, -1:] * self.frequencies * math.tau / 4  # the last row is always a new one
        features = [chunk.flatten(1), angle.sin(), angle.cos(), condition]
        if self.max_delay:
            features.append((time.expand(-1, self.horizon)[:, : self.max_delay] == 0).float())
        return self.network(torch.cat(features, -1)).view_as(chunk)


class _Bounded(torch.autograd.Function):
    """Clip to [low, high]. A number outside keeps its gradient if a descent step leads back inside. Without that it
    would stay outside for ever."""

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
    """Return the indices of the action's entries in the observation `name`."""
    names = list(spec.observation[name].names) if name in spec.observation else []
    missing = [entry for entry in spec.action.names or ("?",) if entry not in names]
    if missing:
        raise ConfigError(
            f"imitation_target={name} has names {names}, which lack {missing} of the action: "
            "say imitation_target=action"
        )
    return [names.index(entry) for entry in spec.action.names]
