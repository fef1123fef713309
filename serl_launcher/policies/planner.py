"""Plans actions in a learned world model (MPPI, model predictive control): it searches for the best.

MPPI, model predictive path integral control (Williams et al. 2015, arXiv 1509.01149), as TD-MPC2 has it (Hansen et al.
2024, arXiv 2310.16828): sequences of H actions are sampled about the last plan, and the prior, a small policy, gives
some. The model says their rewards and the critics what follows. The best ones, the elites, give the next mean and
standard deviation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.networks.latent import LatentModel, initialise, normed
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.policies.base import Acting
from serl_launcher.policies.gaussian import squashed_log_prob
from serl_launcher.types import Observation

LOG_STD = (-10.0, 2.0)  # of the prior, before the tanh


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a search found, for B rows, in actions within [-1, 1].

    mean, std: [B, H, A], of the last iteration's elites. elite: [B, H, A], one of these, drawn by its weight.
    weights: [B, K], of the elites; each row sums to 1.
    """

    mean: Tensor
    std: Tensor
    elite: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class MPPI:
    """Searches action sequences [H, A] within [-1, 1].

    horizon: H, actions of a sequence. samples: N, sequences of an iteration, of which the prior gives `prior_samples`.
    elites: K, the best of them. iterations: how often the samples are drawn anew about the elites.
    temperature: per unit of value, how much more a better elite weighs. std_low, std_high: bounds of the standard
    deviation, which begins at the higher one.
    Raises ConfigError for sizes that make no search.
    """

    changeable: ClassVar[tuple[str, ...]] = (
        "samples", "prior_samples", "elites", "iterations", "temperature", "std_low", "std_high",
    )  # fmt: skip

    horizon: int
    samples: int
    prior_samples: int
    elites: int
    iterations: int
    temperature: float
    std_low: float
    std_high: float

    def __post_init__(self) -> None:
        sizes = min(self.horizon, self.iterations, self.elites)
        if sizes < 1 or not self.elites <= self.samples >= self.prior_samples >= 0:
            raise ConfigError(
                f"algo.mppi: horizon={self.horizon}, iterations={self.iterations}, elites={self.elites}, prior_samples="
                f"{self.prior_samples}, samples={self.samples}: say at least 1 of each (0 prior_samples are "
                "allowed), and no more elites or prior_samples than samples"
            )

    def noise_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a row's noise for actions of `size` numbers."""
        return (self.iterations, self.samples - self.prior_samples, self.horizon, size)

    def search(
        self, value: Callable[[Tensor], Tensor], mean: Tensor, prior: Tensor, noise: Tensor, choice: Tensor
    ) -> Plan:
        """Search from a mean [B, H, A].

        value: maps sequences [B, N, H, A] to what they are worth [B, N]. prior: [B, prior_samples, H, A].
        noise: [B, *noise_shape], standard normal. choice: [B], standard normal, draws the elite.
        """
        std = torch.full_like(mean, self.std_high)
        elites = weights = mean.unsqueeze(1)
        for drawn in noise.unbind(1):
            sampled = (mean.unsqueeze(1) + std.unsqueeze(1) * drawn).clamp(-1, 1)
            sequences = torch.cat([prior, sampled], 1)  # [B, N, H, A]
            values, best = value(sequences).topk(self.elites, 1)
            elites = sequences.take_along_dim(best[:, :, None, None], 1)  # [B, K, H, A]
            weights = (self.temperature * (values - values[:, :1])).softmax(1)
            share = weights[:, :, None, None]
            mean = (share * elites).sum(1)
            std = (share * (elites - mean.unsqueeze(1)).square()).sum(1).sqrt().clamp(self.std_low, self.std_high)
        uniform = (1 + torch.erf(choice / math.sqrt(2))) / 2
        place = (weights.cumsum(1) < uniform.unsqueeze(1)).sum(1).clamp(max=self.elites - 1)
        return Plan(mean, std, elites[torch.arange(len(place), device=place.device), place], weights)


def shifted(mean: Tensor) -> Tensor:
    """Return the mean [B, H, A] from which the next step's search begins: later by one, with zero as its last."""
    return torch.cat([mean[:, 1:], torch.zeros_like(mean[:, :1])], 1)


class Prior(nn.Module):
    """The policy of a planner: tanh(mean + std * noise) of a latent, whose layers are those of the model."""

    def __init__(self, latent: int, hidden: Sequence[int], size: int) -> None:
        super().__init__()
        self.network = normed(latent, hidden, 2 * size)
        self.network.apply(initialise)

    def forward(self, latent: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions in [-1, 1] for latents and noise of the same rows [..., A], and their log density [...]."""
        mean, log_std = self.gaussian(latent)
        raw = mean + log_std.exp() * noise
        rows = [part.flatten(0, -2).unsqueeze(1) for part in (noise, log_std, raw)]
        return raw.tanh(), squashed_log_prob(*rows).unflatten(0, raw.shape[:-1])

    def gaussian(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation [..., A], before the tanh."""
        mean, log_std = self.network(latent).chunk(2, -1)
        low, high = LOG_STD
        return mean, low + (high - low) * (log_std.tanh() + 1) / 2


class Planner(Acting):
    """Plans with a LatentModel and its prior, or acts with the prior alone; one action per decision.

    mppi: the search. plan: False: act with the prior. discount: per step, of what follows.
    """

    horizon = 1

    def __init__(
        self, spec: Spec, *, model: Callable[[Spec], LatentModel], hidden: Sequence[int], mppi: Callable[[], MPPI],
        plan: bool, discount: float,
    ) -> None:  # fmt: skip
        super().__init__()
        size = spec.action.shape[0]
        self.model, self.scale, self.mppi = model(spec), ActionScale(spec.action), mppi()
        self.prior = Prior(self.model.latent, hidden, size)
        self.plans, self.discount, self.mode_at_zero = plan, discount, not plan
        steps = self.mppi.horizon
        self._shapes = {
            "explore": (size,), "choice": (), "critics": (self.model.critics.members,),
            "last": (self.mppi.samples, size), "prior": (steps, self.mppi.prior_samples, size),
            "search": self.mppi.noise_shape(size),
        }  # fmt: skip

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (sum(map(math.prod, self._shapes.values())) if self.plans else math.prod(self._shapes["explore"]),)

    def begun(self, rows: int) -> Tensor:
        """Return the mean of an episode's first search, zero [rows, H, A]."""
        return self.scale.center.new_zeros(rows, self.mppi.horizon, *self.scale.center.shape)

    def propose(self, observation: Observation, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return an action [B, A] of the prior, its mode and standard deviation, in [-1, 1]. noise: [B, A]."""
        mean, log_std = self.prior.gaussian(self.model.encode(observation))
        std = log_std.exp()
        return (mean + std * noise).tanh(), mean.tanh(), std

    def search(self, observation: Observation, mean: Tensor, noise: Tensor, *, explore: bool) -> tuple[Tensor, Plan]:
        """Return an action [B, A] in [-1, 1], and its plan.

        mean: [B, H, A], from which the search begins. noise: [B, *noise_shape].
        explore: True: the action has noise of the plan's standard deviation.
        """
        parts = dict(
            zip(self._shapes, noise.split([math.prod(shape) for shape in self._shapes.values()], 1), strict=True)
        )
        drawn = {name: part.view(len(part), *self._shapes[name]) for name, part in parts.items()}
        latent = self.model.encode(observation)
        prior = self._prior(latent, drawn["prior"])
        judges = drawn["critics"].topk(min(2, self.model.critics.members), 1).indices  # [B, 2], any two of them

        def value(sequences: Tensor) -> Tensor:
            return self.value(latent, sequences, drawn["last"], judges)

        plan = self.mppi.search(value, mean, prior, drawn["search"], drawn["choice"])
        action = plan.elite[:, 0]
        if explore:
            action = action + plan.std[:, 0] * drawn["explore"]
        return action.clamp(-1, 1), plan

    def value(self, latent: Tensor, sequences: Tensor, noise: Tensor, judges: Tensor) -> Tensor:
        """Return the discounted rewards of sequences [B, N, H, A] and what two critics say of the end -> [B, N].

        latent: [B, L]. noise: [B, N, A], of the prior's action at the end. judges: [B, 2], the critics' places. Behind
        a step at which the model sees a termination nothing counts.
        """
        path = latent.unsqueeze(1).expand(-1, sequences.shape[1], -1)
        total = torch.zeros_like(sequences[..., 0, 0])
        factor = torch.ones_like(total)
        for action in sequences.unbind(2):
            total = total + factor * self.model.reward(path, action)
            path = self.model.following(path, action)
            factor = factor * self.discount
            if self.model.terminations is not None:
                factor = factor * (self.model.terminations(path).squeeze(-1) <= 0)  # a probability of 0.5
        mean, log_std = self.prior.gaussian(path)
        action = (mean + log_std.exp() * noise).tanh()
        said = self.model.judge(path.flatten(0, 1), action.flatten(0, 1)).unflatten(1, total.shape)  # [E, B, N]
        return total + factor * said.take_along_dim(judges.T.unsqueeze(-1), 0).mean(0)

    def _prior(self, latent: Tensor, noise: Tensor) -> Tensor:
        """Return sequences [B, n, H, A] that the prior takes in the model. noise: [B, H, n, A]."""
        path = latent.unsqueeze(1).expand(-1, noise.shape[2], -1)
        actions = []
        for drawn in noise.unbind(1):
            mean, log_std = self.prior.gaussian(path)
            actions.append((mean + log_std.exp() * drawn).tanh())
            path = self.model.following(path, actions[-1])
        return torch.stack(actions, 2)
