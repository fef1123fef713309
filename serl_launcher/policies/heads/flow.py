"""Flow-matching head over action chunks (Lipman et al. 2023, arXiv 2210.02747), in pi0's convention (arXiv 2410.24164).

Time t runs from 1 (noise) to 0 (action). With the chunk a, scaled to about [-1, 1], and noise e ~ N(0, I):
    (1) x_t = t e + (1 - t) a,
    (2) the network v(x_t, t, observation) learns  dx/dt = e - a,
    (3) with t = 0.001 + 0.999 b and b ~ Beta(1.5, 1), which draws mostly times with much noise; or b ~ U(0, 1).
A sample starts at t = 1 with noise and takes N Euler steps of
    (4) x <- x - v / N.
A policy with `max_delay` > 0 also learns to continue a chunk: the first d = 0..max_delay rows of (1) are at time 0,
where x_t = a, and have no loss. prefix.py says how samples continue one.
A head with a `noise_level` s is sampled stochastically, with the same marginals (Flow-GRPO, Liu et al. 2025,
arXiv 2505.05470, equations 7 to 9): with sigma_t = s sqrt(t / (1 - t)) and fresh noise z at each step,
    (5) x <- x - (v + sigma_t^2 / (2 t) (x + (1 - t) v)) / N + sigma_t sqrt(1 / N) z.
The trigonometric path (Albergo and Vanden-Eijnden 2023, arXiv 2209.15571) replaces (1) and (2): with c = pi t / 2,
    (6) x_t = sin(c) e + cos(c) a,  dx/dt = pi / 2 (cos(c) e - sin(c) a).
A critic leads samples (policies/guidance.py): with the guess a' = x_t - t v of the action, and its slope g(a'),
    (7) v <- v - g(a'),  which moves the guess by t g.
Heun's method replaces (4): the mean of v at both ends of a step, the far one reached by (4). Its last step is (4),
because the far end would be t = 0, which (3) does not draw.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from serl_client.errors import ConfigError
from torch import Tensor, nn

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.heads.base import Head, Predict, Slope, Target, asked
from serl_launcher.policies.prefix import strength

TIME = 1  # stream of a row's random numbers for its time; stream 0 is the noise
PATHS, SOLVERS, STARTS = ("linear", "trigonometric"), ("euler", "heun"), ("noise", "zero")
TIMES = {"beta": 1 / 1.5, "uniform": 1.0}  # b of (3) is this power of a uniform number: its inverse distribution

Velocity = Callable[[Tensor, float], Tensor]  # of a chunk [B, H, D] at a time


class Flow(Head):
    """The loss and the samplers of a velocity.

    steps: N, steps of the sampler. path: linear (1) or trigonometric (6). solver: euler or heun.
    times: beta or uniform, of (3).
    start: noise; or zero: each sample begins at x = 0, ignores the noise, and goes to one mode for each observation.
    noise_level: initial s of (5), which is trained from there; None: the deterministic sampler (4), without a density.

    Zero noise is no mode: noise chooses among several ways to do a task, and zero noise lies between them.
    Raises ConfigError for other words, and for a noise level with what (5) is not made for.
    """

    changeable = ("steps", "solver", "times")  # of the sampler and the loss alone: see config.changeable
    is_velocity = True

    def __init__(
        self, *, horizon: int, width: int, steps: int, path: str = "linear", solver: str = "euler",
        start: str = "noise", noise_level: float | None = None, times: str = "beta",
    ) -> None:  # fmt: skip
        super().__init__(horizon=horizon, width=width)
        options = {"path": (path, PATHS), "solver": (solver, SOLVERS), "start": (start, STARTS)}
        for name, (value, allowed) in options.items():
            if value not in allowed:
                raise ConfigError(f"head.{name}={value}: say one of {', '.join(allowed)}")
            if noise_level is not None and value != allowed[0]:
                raise ConfigError(f"head.noise_level goes with head.{name}={allowed[0]} alone, not with {value}")
        if times not in TIMES:
            raise ConfigError(f"head.times={times}: say one of {', '.join(TIMES)}")
        if steps < 1:
            raise ConfigError(f"head.steps={steps}: say 1 or more")
        self.steps, self.path, self.solver, self.start, self._power = steps, path, solver, start, TIMES[times]
        self.is_deterministic, self.guides, self.steers = start == "zero", path == "linear", path == "linear"
        self.log_noise_level = None if noise_level is None else nn.Parameter(torch.tensor(math.log(noise_level)))

    @property
    def passes(self) -> int:
        return self.steps if self.solver == "euler" else 2 * self.steps - 1

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[1, H, D]; with a noise level [1 + steps, H, D], one noise more for each step of the stochastic sampler."""
        return (1 if self.log_noise_level is None else 1 + self.steps, self.horizon, self.width)

    def errors(self, predict: Predict, target: Target) -> Tensor:
        """Compute the velocity's squared errors, (1) to (3) or (6)."""
        noise = normal(target.seed, (self.horizon, self.width))
        time = 0.001 + 0.999 * uniform(target.seed, (), TIME) ** self._power
        time = time.unsqueeze(1)
        t = time.unsqueeze(-1)
        if self.path == "linear":
            return (predict(t * noise + (1 - t) * target.chunk, time) - (noise - target.chunk)).square()
        sine, cosine = (math.pi / 2 * t).sin(), (math.pi / 2 * t).cos()
        velocity = math.pi / 2 * (cosine * noise - sine * target.chunk)
        return (predict(sine * noise + cosine * target.chunk, time) - velocity).square()

    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        """Sample chunks. noise: [B, *noise_shape]; [B, 1, H, D], the initial noise alone, selects the sampler (4)."""
        return self.rsample(predict, noise)[0]

    def rsample(self, predict: Predict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample with a gradient through all steps -> chunk [B, H, D], log densities [B, H, D].

        They are those of the last step of (5), given the steps before; without a noise level they are zero.
        """
        return self._integrate(noise, partial(asked, predict))

    def guided(self, predict: Predict, noise: Tensor, old: Tensor, weights: Tensor) -> Tensor:
        """Do what `sample` does, guided by an old chunk, (1) of prefix.py. old, weights: y and W, [B, H, D]."""
        free = partial(asked, predict)

        def velocity(chunk: Tensor, t: float) -> Tensor:
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                found = free(chunk, t)
                guess = chunk - t * found
                (pull,) = torch.autograd.grad(guess, chunk, weights * (old - guess.detach()))
            return found.detach() - strength(t) * pull

        return self._integrate(noise, velocity)[0]

    def steered(self, predict: Predict, noise: Tensor, slope: Slope) -> Tensor:
        """Do what `sample` does, led by a slope: (7)."""
        free = partial(asked, predict)

        def velocity(chunk: Tensor, t: float) -> Tensor:
            found = free(chunk, t)
            return found - slope(chunk - t * found)

        return self._integrate(noise, velocity)[0]

    def _integrate(self, noise: Tensor, velocity_at: Velocity) -> tuple[Tensor, Tensor]:
        """Integrate noise [B, 1 or 1 + N, H, D] from t = 1 to t = 0 -> chunk [B, H, D], log densities [B, H, D]."""
        chunk = torch.zeros_like(noise[:, 0]) if self.start == "zero" else noise[:, 0]
        density = torch.zeros_like(chunk)
        stochastic = noise.shape[1] > 1
        for step in range(self.steps):
            t = 1 - step / self.steps
            velocity = velocity_at(chunk, t)
            if not stochastic:
                if self.solver == "heun" and step + 1 < self.steps:
                    velocity = (velocity + velocity_at(chunk - velocity / self.steps, t - 1 / self.steps)) / 2
                chunk = chunk - velocity / self.steps  # (4)
                continue
            assert self.log_noise_level is not None
            sigma = self.log_noise_level.exp() * math.sqrt(t / max(1 - t, 1 / self.steps))  # finite at t = 1
            chunk = chunk - (velocity + sigma**2 / (2 * t) * (chunk + (1 - t) * velocity)) / self.steps
            fresh, std = noise[:, 1 + step], sigma / math.sqrt(self.steps)
            chunk = chunk + std * fresh  # (5)
            density = -0.5 * fresh.square() - std.log() - 0.5 * math.log(math.tau)
        return chunk, density
