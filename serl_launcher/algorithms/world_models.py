"""World Models: see by a VAE, remember by a recurrent network that predicts, act by a small controller that evolves.

Ha and Schmidhuber 2018, "World Models" (arXiv 1803.10122), with the constants of the code that its authors published.
One part after the other learns (config/plan/world_models.yaml):
    `update_vae`        V: pictures -> codes z, by squared error + max(divergence, half a nat for each number of z)
    `update_codes`      what V makes of each stored picture, once: the columns `derived.mean`, `derived.log_variance`
    `update_rnn`        M: h_t = LSTM(z_t, a_t), and a mixture of normals for z_{t+1} given h_t, by its likelihood
    `update_controller` C: a = tanh(W [z, h] + b), by CMA-ES on the returns of whole episodes (evolution.py)

The published weights hold a whole generation of controllers. An episode's first question chooses one of them that
still needs episodes, by its noise, and the carry holds it until the episode ends. Each row tells in the column
CANDIDATE which one acted, and how often before. So an episode counts if one candidate gave every action of it, from the
first step to its termination or the task's time limit. Any other is left out, and its candidate acts again. Once each
candidate has `rollouts` such episodes, the mean of their returns makes the next generation.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec
from torch import Tensor

from serl_launcher.algorithms.base import Algorithm, descend, uncounted
from serl_launcher.algorithms.evolution import CMAES
from serl_launcher.networks.mdn_rnn import LSTM, MDNRNN
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.networks.vae import VAE, Encoder, Pictures, drawn
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Acting
from serl_launcher.types import Batch, Carry, Decision, Metrics, Observation, Prefix, Window

log = logging.getLogger(__name__)

# What a row tells of who acted, int32: the generation (0: none), counted through all evolutions of a run; the index in
# it; and how many actions it gave in this episode before.
CANDIDATE = "candidate"
MEAN, LOG_VARIANCE = "derived.mean", "derived.log_variance"
RETURN, REMAINING = "episode.return", "episode.remaining"
NONE = -1  # no episode


class Actor(Acting):
    """What acts: V's encoder, M's memory, the controllers of a generation [P, A, F + 1], and their mean.

    It remembers its candidate, the last code and the LSTM's state. The first number of its noise chooses the candidate.
    remembers: False: the controller sees the code alone.
    """

    horizon = 1
    mode_at_zero = True
    population: Tensor  # [P, A, F + 1]
    mean: Tensor  # [A, F + 1]
    due: Tensor  # [P] int64, the candidates that still need episodes come first
    left: Tensor  # [] int64, how many these are
    generation: Tensor  # [] int64

    def __init__(
        self, pictures: Pictures, encoder: Encoder, lstm: LSTM, scale: ActionScale, *, population: int, remembers: bool
    ) -> None:
        super().__init__()
        self.pictures, self.encoder, self.lstm, self.scale = pictures, encoder, lstm, scale
        self.codes, self.remembers = encoder.mean.out_features, remembers
        shape = len(scale.low), self.codes + remembers * lstm.hidden + 1
        self.register_buffer("population", torch.zeros(population, *shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("due", torch.arange(population))
        self.register_buffer("left", torch.tensor(population))
        self.register_buffer("generation", torch.ones((), dtype=torch.int64))

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (1 + self.codes,)

    def pick_controller(self, noise: Tensor, explore: bool) -> tuple[Tensor, Tensor]:
        """Return for normal numbers [B] a candidate's CANDIDATE [B, 3] and its weights; those of the mean if it does
        not explore."""
        if not explore:
            return torch.zeros(len(noise), 3, dtype=torch.int32, device=noise.device), self.mean.expand(
                len(noise), *self.mean.shape
            )
        index = self.due[(torch.special.ndtr(noise) * self.left).long().clamp(max=self.left - 1)]
        told = torch.stack([self.generation.expand(len(noise)), index, torch.zeros_like(index)], 1)
        return told.int(), self.population[index]

    def control(self, controller: Tensor, code: Tensor, hidden: Tensor) -> Tensor:
        """Return actions [B, A] in [-1, 1] of controllers [B, A, F + 1] for codes and hidden states [B, ...]."""
        parts = [code, *([hidden] if self.remembers else []), torch.ones_like(code[:, :1])]
        return torch.einsum("baf,bf->ba", controller, torch.cat(parts, 1)).tanh()


class WorldModels(Algorithm):
    """Learn V, M and C one after the other; see above.

    cameras: whose pictures are seen, names without `observation.images.`; [all]: every camera. picture: pixels, height
        and width, to which they are resized. widths: channels of V's convolutions. codes: numbers of z.
    hidden: of the LSTM. mixtures: normal distributions for each number of the next z.
    episode_steps: T, the steps after which the task's time limit ends an episode. One that was truncated before did not
        reach its end: somebody held or stopped the run.
    remembers: False: the controller sees z alone.
    population: P, candidates of a generation; None: 4 + 3 ln of the controller's weights. rollouts: episodes of each.
    sigma: the first step size of the controller's weights, which begin at 0. diagonal: evolve variances alone.
    weight_penalty: what the mean square of a controller's weights takes of its return.
    vae_optimizer, rnn_optimizer: make the optimisers of V and M.

    If what belongs to the evolution, but for weight_penalty, is changed on a trained run, the evolution begins anew.
    V and M stay as they are.
    Raises ConfigError for cameras that the robot lacks, and for sizes that the parts do not take. `update_controller`
    raises it for a longer episode.
    """

    changeable = ("remembers", "population", "rollouts", "sigma", "diagonal", "weight_penalty")
    returns: Tensor  # [P, rollouts], of this generation's episodes
    told: Tensor  # [P, rollouts], the ids of their first steps, NONE: not yet
    earlier: Tensor  # [] int64, generations of earlier evolutions
    best: Tensor  # [], the largest mean return of a candidate of the last generation, and the mean over its candidates
    average: Tensor

    def __init__(
        self, spec: Spec, *, cameras: Sequence[str], picture: int, widths: Sequence[int], codes: int, hidden: int,
        mixtures: int, episode_steps: int, remembers: bool, population: int | None, rollouts: int, sigma: float,
        diagonal: bool, weight_penalty: float, vae_optimizer: Callable[..., Optimizer],
        rnn_optimizer: Callable[..., Optimizer],
    ) -> None:  # fmt: skip
        super().__init__()
        pictures, actions = Pictures(spec, cameras, picture), spec.action.shape[0]
        self.vae = VAE(pictures.channels, picture, widths, codes)
        self.rnn = MDNRNN(codes, actions, hidden, mixtures)
        size = actions * (codes + remembers * hidden + 1)
        self.evolution = CMAES(
            size, population=population, sigma=sigma, diagonal=diagonal, seed=torch.initial_seed()
        )  # fmt: skip
        self.actor = Actor(
            pictures, self.vae.encoder, self.rnn.lstm, ActionScale(spec.action), population=self.evolution.population,
            remembers=remembers,
        )  # fmt: skip
        self.episode_steps, self.weight_penalty, self._is_cut_told = episode_steps, weight_penalty, False
        self.vae_optimizer, self.rnn_optimizer = vae_optimizer(self.vae), rnn_optimizer(self.rnn)
        shape = self.evolution.population, rollouts
        self.register_buffer("returns", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("told", torch.full(shape, NONE))
        self.register_buffer("earlier", torch.zeros((), dtype=torch.int64))
        self.register_buffer("best", torch.zeros(()))
        self.register_buffer("average", torch.zeros(()))
        self._begin_generation()
        self.derived = {name: Feature((codes,), "float16") for name in ("mean", "log_variance")}
        seen: Mapping[str, tuple[int, ...]] = {**dict.fromkeys(pictures.names, (0,)), "action": (0,)}
        steps = tuple(range(episode_steps))
        whole = {"action": steps, CANDIDATE: steps, RETURN: (0,), REMAINING: (0,)}
        self.windows = {
            "update_vae": Window(seen),
            "update_codes": Window(seen),
            "update_rnn": Window(dict.fromkeys(("action", MEAN, LOG_VARIANCE), steps), starts="episode_start"),
            "update_controller": Window(whole, starts="episode_start"),
        }

    @property
    def acting(self) -> Actor:
        return self.actor

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool, prefix: Prefix | None = None,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """Encode what is seen, and let the episode's controller act. Without `explore` it is the generation's mean, and
        z the mean of its distribution."""
        actor = self.actor
        if carry is None:
            told, controller = actor.pick_controller(noise[:, 0], explore)
            hidden, cell = actor.lstm.begin(len(noise))
        else:
            told, controller, code, hidden, cell = carry
            action = actor.scale.to_unit(previous_action)
            _, (hidden, cell) = actor.lstm(code[:, None], action[:, None], (hidden, cell))
        mean, log_variance = actor.encoder(actor.pictures(observation))
        code = drawn(mean, log_variance, noise[:, 1:] * explore)
        action = actor.scale.from_unit(actor.control(controller, code, hidden))
        later = told + told.new_tensor([0, 0, 1]) * (told[:, :1] > 0)
        return Decision(action.unsqueeze(1), {CANDIDATE: told}), (later, controller, code, hidden, cell)

    def update_vae(self, batch: Batch) -> Metrics:
        """Take one step of V."""

        def loss(part: Batch) -> tuple[Tensor, Metrics]:
            error, divergence = self.vae_optimizer.forward(
                self._pictures(part), normal(part.seed, (self.actor.codes,))
            )  # [B] each
            means = {"picture_error": (part.weight * error).mean(), "divergence": (part.weight * divergence).mean()}
            return means["picture_error"] + means["divergence"], {name: each.detach() for name, each in means.items()}

        return descend(self.vae_optimizer, batch, loss, "vae_gradient")

    @torch.no_grad()
    def update_codes(self, batch: Batch) -> tuple[Metrics, Metrics]:
        """Encode pictures, and change nothing."""
        mean, log_variance = self.vae.encoder(self._pictures(batch))
        return {"encoded": batch.weight.sum()}, {"mean": mean.half(), "log_variance": log_variance.half()}

    def _pictures(self, batch: Batch) -> Tensor:
        return self.actor.pictures({name: batch.observation[name][:, 0] for name in self.actor.pictures.names})

    def update_rnn(self, batch: Batch) -> Metrics:
        """Take one step of M, with codes that are drawn anew."""

        def loss(part: Batch) -> tuple[Tensor, Metrics]:
            mean, log_variance = (part.extras[name].float() for name in (MEAN, LOG_VARIANCE))  # [B, T, codes]
            code = drawn(mean, log_variance, normal(part.seed, tuple(mean.shape[1:])))
            unlikely = self.rnn_optimizer.forward(code, self.actor.scale.to_unit(part.action[:, :-1]))  # [B, T - 1]
            share = part.weight[:, None] * part.valid[:, 1:]
            value = (share * unlikely).sum() / part.valid[:, 1:].sum().clamp(min=1)
            return value, {"code_unlikeliness": value.detach()}

        return descend(self.rnn_optimizer, batch, loss, "rnn_gradient")

    @uncounted
    def update_controller(self, batch: Batch) -> Metrics:
        """Take in the returns of whole episodes, and go on to the next generation when all candidates have theirs.

        counted: episodes of this batch that did.
        """
        whole = self._is_whole(batch).tolist()
        candidates = batch.extras[CANDIDATE][:, 0].tolist()
        values, ids, counted = batch.extras[RETURN][:, 0].tolist(), batch.step_id.tolist(), 0
        for is_whole, (generation, index, _), value, number in zip(whole, candidates, values, ids, strict=True):
            if is_whole and generation == int(self.actor.generation):
                counted += self._tell(index, value, number)
        device = batch.reward.device
        return {
            "counted": torch.tensor(float(counted), device=device), "generation": self.actor.generation.float(),
            "candidates_left": self.actor.left.float(), "generation_return": self.average.clone(),
            "generation_best": self.best.clone(), "sigma": self.evolution.sigma.float(),
        }  # fmt: skip

    def _is_whole(self, batch: Batch) -> Tensor:
        """Return for each row [B] whether one candidate gave all actions of an episode that has ended properly."""
        steps = torch.arange(batch.valid.shape[1], device=batch.valid.device)
        told = batch.extras[CANDIDATE]  # [B, T, 3]
        same = (told[..., :2] == told[:, :1, :2]).all(-1) & (told[..., 2] == steps) & ~batch.intervened
        ends = batch.terminated.any(1) | batch.truncated[:, -1]
        acted = (batch.weight > 0) & (told[:, 0, 0] > 0) & (same | ~batch.valid).all(1) & batch.valid[:, 0]
        longest = int((batch.extras[REMAINING][:, 0] * acted).max()) + 1
        if longest > self.episode_steps:
            raise ConfigError(
                f"an episode has {longest} steps, and algo.episode_steps={self.episode_steps}: begin another run with "
                f"algo.episode_steps={longest}, if that is the task's time limit"
            )
        if (acted & batch.truncated[:, :-1].any(1)).any() and not self._is_cut_told:
            self._is_cut_told = True
            log.warning(
                "an episode of %d steps was truncated before algo.episode_steps=%d and does not count; if that is the "
                "task's time limit, begin another run with algo.episode_steps=%d",
                longest, self.episode_steps, longest,
            )  # fmt: skip
        return acted & ends

    @torch.no_grad()
    def _tell(self, index: int, value: float, number: int) -> bool:
        """Note an episode's return. Returns False if it was noted before, or if its candidate has enough of them."""
        free = (self.told[index] == NONE).nonzero().flatten().tolist()
        if not free or number in self.told[index].tolist():
            return False
        self.told[index, free[0]], self.returns[index, free[0]] = number, value
        if (self.told == NONE).any():
            self._direct()
            return True
        value_of_each = self.returns.mean(1)
        self.best.copy_(value_of_each.max())
        self.average.copy_(value_of_each.mean())
        self.evolution.tell(self.weight_penalty * self.evolution.ask().square().mean(1) - value_of_each)
        self._begin_generation()
        return True

    @torch.no_grad()
    def _begin_generation(self) -> None:
        shape = self.actor.mean.shape
        self.actor.population.copy_(self.evolution.ask().view(-1, *shape))
        self.actor.mean.copy_(self.evolution.mean.view(shape))
        self.actor.generation.copy_(self.earlier + self.evolution.generation)
        self.told.fill_(NONE)
        self._direct()

    def _direct(self) -> None:
        """Let those candidates act that still need episodes."""
        needs = (self.told == NONE).any(1)
        self.actor.due.copy_((~needs).long().argsort(stable=True))
        self.actor.left.copy_(needs.sum())

    def load_state_dict(self, state: Mapping[str, Any], *rest: Any, **options: Any) -> Any:
        """Load a state. If its evolution has other sizes, or another first step, that of this object begins anew, with
        the next generation's number: no episode of before counts."""
        own = self.state_dict()
        search = [name for name in own if name.startswith(("evolution.", *SEARCH))]
        is_other = any(own[name].shape != state[name].shape for name in search)
        if is_other or state["evolution.begun"] != self.evolution.begun:
            before = state["actor.generation"].cpu()
            begun = {"earlier": before, "actor.generation": before + own["evolution.generation"].cpu()}
            state = {**state, **{name: own[name] for name in search}, **begun}
        return super().load_state_dict(state, *rest, **options)


SEARCH = ("returns", "told", "best", "average", *(
    f"actor.{name}" for name in ("population", "mean", "due", "left", "generation")
))  # fmt: skip
