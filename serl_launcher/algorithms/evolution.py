"""CMA-ES, an evolution strategy: search for the vector of least cost, when all that is known of a vector is its cost.

Hansen 2016, "The CMA Evolution Strategy: A Tutorial" (arXiv 1604.00772), with its default constants and its negative
weights; equation numbers here are of that paper. `diagonal`: variances alone, learned faster by (n + 2) / 3 (Ros and
Hansen 2008, "A Simple Modification in CMA-ES Achieving Linear Time and Space Complexity").
"""

import math

import numpy as np
import torch
from serl_client.errors import ConfigError
from torch import Tensor, nn

from serl_launcher.networks.seeded_noise import normal


class CMAES(nn.Module):
    """A normal distribution over vectors [n] that moves towards those of least cost. All of its state is in buffers.

    Each generation is a pure function of the state and `seed`: `ask` gives the same candidates until `tell` is called.
    size: n. population: P, candidates of a generation; None: 4 + 3 ln n. sigma: the first step size, in each
    direction; the first mean is 0.
    Raises ConfigError for fewer than 4 candidates, and for a step size that is not positive.
    """

    mean: Tensor  # [n]
    sigma: Tensor  # []
    covariance: Tensor  # [n, n]; [n] if diagonal
    scales: Tensor  # [n], roots of its eigenvalues, as they were when they were last computed
    axes: Tensor  # [n, n], its eigenvectors; [0] if diagonal
    path: Tensor  # [n], of the mean
    sigma_path: Tensor  # [n], likewise in coordinates in which the distribution is round
    generation: Tensor  # [] int64, from 1 on
    decomposed: Tensor  # [] int64, the generation of `scales` and `axes`
    seed: Tensor  # [] int64
    begun: Tensor  # [], the first step size

    def __init__(self, size: int, *, population: int | None, sigma: float, diagonal: bool, seed: int) -> None:
        super().__init__()
        self.size, self.diagonal = size, diagonal
        self.population = population or 4 + int(3 * math.log(size))
        if self.population < 4 or not sigma > 0:
            raise ConfigError(f"algo.population={self.population}, algo.sigma={sigma}: say 4 or more, and more than 0")
        self._constants()
        wide, ones = torch.float64, torch.ones(size, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(size, dtype=wide))
        self.register_buffer("sigma", torch.full((), sigma, dtype=wide))
        self.register_buffer("begun", self.sigma.clone())
        self.register_buffer("covariance", ones.clone() if diagonal else torch.eye(size, dtype=wide))
        self.register_buffer("scales", ones.clone())
        self.register_buffer("axes", torch.empty(0, dtype=wide) if diagonal else torch.eye(size, dtype=wide))
        self.register_buffer("path", torch.zeros(size, dtype=wide))
        self.register_buffer("sigma_path", torch.zeros(size, dtype=wide))
        self.register_buffer("generation", torch.ones((), dtype=torch.int64))
        self.register_buffer("decomposed", torch.zeros((), dtype=torch.int64))
        scrambled = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(2))
        self.register_buffer("seed", torch.tensor(scrambled))  # so that seeds side by side share no generation

    def _constants(self) -> None:
        """Compute the constants of the tutorial's table 1 from n and P."""
        n, raw = self.size, math.log((self.population + 1) / 2) - np.log(np.arange(1, self.population + 1))
        good, bad = raw.clip(min=0), -raw.clip(max=0)
        self._mass = mass = good.sum() ** 2 / (good**2).sum()  # mu_eff
        bad_mass = bad.sum() ** 2 / max((bad**2).sum(), 1e-12)
        self._path_rate = (4 + mass / n) / (n + 4 + 2 * mass / n)  # c_c
        self._sigma_rate = (mass + 2) / (n + mass + 5)  # c_sigma
        self._damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (n + 1)) - 1) + self._sigma_rate
        faster = (n + 2) / 3 if self.diagonal else 1.0
        self._rank_one = min(1.0, faster * 2 / ((n + 1.3) ** 2 + mass))  # c_1
        rank_many = faster * 2 * (0.25 + mass + 1 / mass - 2) / ((n + 2) ** 2 + mass)
        self._rank_many = min(1 - self._rank_one, rank_many)  # c_mu
        most = min(
            1 + self._rank_one / self._rank_many, 1 + 2 * bad_mass / (mass + 2),
            (1 - self._rank_one - self._rank_many) / (n * self._rank_many),
        )  # fmt: skip
        self._recombination = good / good.sum()  # of the best ones
        self._weights = self._recombination - most * bad / max(bad.sum(), 1e-12)  # [P], (53)
        self._expected = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))  # length of a normal vector

    def ask(self) -> Tensor:
        """Return this generation's candidates [P, n] float64."""
        return self.mean + self.sigma * self._spread(self._noise())  # (40)

    def _noise(self) -> Tensor:
        return normal((self.seed + self.generation).view(1), (self.population, self.size))[0].double()

    def _spread(self, noise: Tensor) -> Tensor:
        """Map round noise [P, n] to steps of this covariance."""
        return noise * self.scales if self.diagonal else noise * self.scales @ self.axes.T

    @torch.no_grad()
    def tell(self, cost: Tensor) -> None:
        """Go on to the next generation by what the candidates of this one have cost, [P]."""
        noise = self._noise()[cost.argsort(stable=True)]  # the best first
        steps = self._spread(noise)
        best, weights = (torch.as_tensor(each, device=noise.device) for each in (self._recombination, self._weights))
        moved, round_step = best @ steps, best @ noise
        if not self.diagonal:
            round_step = self.axes @ round_step
        self.mean += self.sigma * moved
        rate = self._sigma_rate
        self.sigma_path.mul_(1 - rate).add_(round_step, alpha=math.sqrt(rate * (2 - rate) * self._mass))  # (43)
        length = self.sigma_path.norm() / self._expected
        grown = 1 - (1 - rate) ** (2 * self.generation)
        is_short = (length / grown.sqrt() < 1.4 + 2 / (self.size + 1)).double()  # h_sigma
        rate = self._path_rate
        self.path.mul_(1 - rate).add_(is_short * math.sqrt(rate * (2 - rate) * self._mass) * moved)  # (45)
        lost = (1 - is_short) * rate * (2 - rate)
        round_length = noise.square().sum(1)
        weights = torch.where(weights < 0, weights * self.size / round_length, weights)  # (46)
        keep = 1 + self._rank_one * lost - self._rank_one - self._rank_many * float(self._weights.sum())
        if self.diagonal:
            one, many = self.path.square(), weights @ steps.square()
        else:
            one, many = torch.outer(self.path, self.path), steps.T @ (weights[:, None] * steps)
        self.covariance.mul_(keep).add_(one, alpha=self._rank_one).add_(many, alpha=self._rank_many)  # (47)
        self.sigma *= ((self._sigma_rate / self._damping) * (length - 1)).exp()  # (44)
        self.generation += 1
        self._decompose()

    def _decompose(self) -> None:
        """Compute axes and scales, as often as the covariance changes enough to be worth it (section B.2)."""
        if self.diagonal:
            self.scales.copy_(self.covariance.sqrt())
            return
        every = 1 / (10 * self.size * (self._rank_one + self._rank_many))
        if int(self.generation - self.decomposed) > every:
            self.decomposed.copy_(self.generation)
            self.covariance.copy_((self.covariance + self.covariance.T) / 2)
            values, axes = torch.linalg.eigh(self.covariance)
            self.axes.copy_(axes)
            self.scales.copy_(values.clamp(min=1e-20).sqrt())
