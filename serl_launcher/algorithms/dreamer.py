"""DreamerV3: learn a world model from sequences, and actor and critic from what the model imagines.

Hafner et al. 2025, "Mastering diverse control tasks through world models" (Nature 640), with the constants of the
code that its authors published in 2025. Per row t of a sequence, summed and averaged over all rows:
    (1) world model: reconstruction + reward + continue + max(1, KL(sg(q) || p)) + 0.1 max(1, KL(q || sg(p))), with
        prior p and posterior q of networks/rssm.py.
    (2) R_t = r_{t+1} + c_{t+1} ((1 - lambda) v_{t+1} + lambda R_{t+1}), over H imagined steps from every row.
    (3) policy: w_t (-log pi(a_t) (R_t - v_t) / max(1, S) - 3e-4 entropy), where S, the range from the 5th to the 95th
        percentile of R, is an average over updates, and w_t the product of c up to t.
    (4) value: w_t (CE(R_t) + CE(value of a slow copy)); on the replayed rows themselves 0.3 of the same,
        with R_t of (2) over their rewards, in which an imagined return takes the place of v_{t+1}.
The model's prediction c that an episode goes on includes the discount, 1 - 1 / `discount_steps`.

DreamerV1 and V2 do some of this by other rules (dreamer_rules.py). Their policies climb the returns through the model:
    (3') w_t (-R_t - entropy_scale entropy), with a gradient that reaches each action through all that follows it.

A sequence is T + 1 rows of joined episodes. Row 0 says what is remembered at its beginning, and the T others are
learned from. The states that an update computes, row 0's too, are kept as derived columns, with which later
sequences begin.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm, descend, frozen_copy, soft_update
from serl_launcher.algorithms.dreamer_rules import RULES
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.returns import lambda_return
from serl_launcher.networks.rssm import RSSM, BlockGRU, State, features, linear
from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.networks.world_heads import DEPTHS, Choice, Decoder, Encoder, Inputs, Normal
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Acting
from serl_launcher.types import Batch, Carry, Decision, Metrics, Observation, Prefix, Window

INDEX, DETER, STOCH = "episode.index", "derived.deter", "derived.stoch"
POSTERIOR, IMAGINED, ACTIONS = 0, 1, 2  # streams of the rows' random numbers
VALUE_LAYERS = 3  # layers of value and policy; reward and continue have one


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Joined episodes as the model sees them: with each observation comes what led to it. [B, T + 1, ...] each."""

    action: Tensor  # before the observation, near [-1, 1]; it does not matter where `first`
    reward: Tensor  # for that action
    first: Tensor  # the observation begins an episode
    terminal: Tensor  # the action ended the episode for good
    last: Tensor  # no step of the same episode follows


class OneHot(nn.Module):
    """Takes the place of ActionScale where an action is a choice: the robot's and the network's are the same."""

    def to_unit(self, action: Tensor) -> Tensor:
        return action

    def from_unit(self, action: Tensor) -> Tensor:
        return action

    def executed(self, action: Tensor) -> Tensor:
        return action


def rows_of(batch: Batch, scale: ActionScale | OneHot) -> Rows:
    """Shift what follows an observation in a Batch to the observation that it leads to."""
    first = batch.valid & (batch.extras[INDEX] == 0)
    action, reward, terminal = (
        torch.cat([torch.zeros_like(column[:, :1]), column[:, :-1]], 1)
        for column in (scale.to_unit(batch.action), batch.reward, batch.terminated)
    )
    last = ~batch.valid | torch.cat([first[:, 1:], torch.zeros_like(first[:, :1])], 1)
    return Rows(action, reward * ~first, first, terminal & ~first, last)


class Actor(Acting):
    """What acts: it remembers an RSSM state. The first V numbers of its noise choose the latent variables."""

    horizon = 1
    mode_at_zero = True

    def __init__(self, encoder: Encoder, rssm: RSSM, policy: Normal | Choice, scale: ActionScale | OneHot) -> None:
        super().__init__()
        self.encoder, self.rssm, self.policy, self.scale = encoder, rssm, policy, scale

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (self.rssm.shapes[1][0] + self.policy.chances,)


class Dreamer(Algorithm):
    """Learn a world model and, in it, a policy; see above. An action may be continuous, or a choice (Feature.one_hot).

    variant: v3, v2 or v1, a key of RULES. remembers: False: each action sees its own observation alone, to measure what
    memory is worth; training is the same.
    cameras: whose images are seen, names without `observation.images.`; [all]: every camera; []: vectors alone.
    deter, hidden, variables, classes, blocks: of the RSSM. units: width of the other layers. depth: of convolutions.
    length: T, rows of a sequence. imagined: H, steps.
    discount_steps: the discount is 1 - 1 / this. lambda_: of (2). entropy_scale, replay_value_scale: of (3) and (4).
    slow_share: share by which the slow value moves towards the value after each `slow_every` updates of the controller.
        range_share: that by which S moves, at each update.
    optimizer: makes the optimiser of all networks.
    Raises ConfigError as Inputs does, for another variant, for sizes that no blocks make, and for choices with v1.
    """

    low: Tensor
    high: Tensor
    controlled: Tensor  # [] int64, updates of the controller
    means = ("low", "high")
    changeable = (
        "remembers", "imagined", "lambda_", "entropy_scale", "replay_value_scale", "slow_share", "slow_every",
        "range_share",
    )  # fmt: skip

    def __init__(
        self, spec: Spec, *, variant: str, remembers: bool, cameras: Sequence[str], deter: int, hidden: int,
        variables: int, classes: int, blocks: int, units: int, depth: int, length: int, imagined: int,
        discount_steps: float, lambda_: float, entropy_scale: float, replay_value_scale: float, slow_share: float,
        slow_every: int, range_share: float, optimizer: Callable[[nn.Module], Optimizer],
    ) -> None:  # fmt: skip
        super().__init__()
        if variant not in RULES:
            raise ConfigError(f"algo.variant={variant}: say one of {', '.join(RULES)}")
        self.rules = rules = RULES[variant]
        inputs, actions, chooses = Inputs(spec, cameras, rules.squash), spec.action.shape[0], spec.action.one_hot
        if chooses and rules.noise:
            raise ConfigError(f"algo.variant={variant} adds noise to actions, and this robot takes one of {actions}: "
                              "say algo.variant=v2 or v3")  # fmt: skip
        if (deter % blocks and (rules.cell is BlockGRU or inputs.images)) or (
            inputs.images and depth * DEPTHS[-1] % blocks
        ):
            raise ConfigError(
                f"algo: deter={deter}, and with cameras {DEPTHS[-1]} times depth={depth}, should be multiples of "
                f"blocks={blocks}"
            )
        encoder = Encoder(inputs, units=units, depth=depth, make=rules.layers)
        rssm = RSSM(
            encoder.size, actions, deter=deter, hidden=hidden, variables=variables, classes=classes, blocks=blocks,
            latent=rules.latent, cell=rules.cell, make=rules.layers, depth=rules.prior_layers,
        )  # fmt: skip
        policy = (Choice if chooses else Normal)(rssm.size, units, VALUE_LAYERS, actions, rules.layers)
        self.actor = Actor(encoder, rssm, policy, OneHot() if chooses else ActionScale(spec.action))
        self.decoder = Decoder(
            inputs, deter, rssm.size - deter, units=units, depth=depth, blocks=blocks, make=rules.layers
        )
        self.reward = rules.scalar(rssm.size, units, 1, rules.layers)
        self.going_on = nn.Sequential(rules.layers(rssm.size, units, 1), linear(units, 1))
        self.value_head = rules.scalar(rssm.size, units, VALUE_LAYERS, rules.layers)
        self.slow_value = frozen_copy(self.value_head)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))
        self.register_buffer("controlled", torch.zeros((), dtype=torch.int64))
        self.climbs, self.remembers = rules.climbs and not chooses, remembers
        self.discount, self.lambda_ = 1 - 1 / discount_steps, lambda_
        self.length, self.imagined, self.entropy_scale = length, imagined, entropy_scale
        self.replay_value_scale, self.range_share = replay_value_scale, range_share
        self.slow_share, self.slow_every = slow_share, slow_every
        self.optimizer = optimizer(self)
        self.derived = {"deter": Feature((deter,), "float16"), "stoch": Feature((variables,), rules.latent.dtype)}
        every = dict.fromkeys((*inputs.names, "action", INDEX), tuple(range(length + 1)))
        window = Window({**every, DETER: (0,), STOCH: (0,)}, joins=True)
        self.windows = dict.fromkeys(("update", "update_world_model", "update_controller"), window)

    @property
    def acting(self) -> Actor:
        return self.actor

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool, prefix: Prefix | None = None,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """Take the observation into the state, which is the carry, and choose one action. Without `explore`, both are
        the likeliest ones."""
        actor, rssm, policy, rows = self.actor, self.actor.rssm, self.actor.policy, len(previous_action)
        state = rssm.begin(rows) if carry is None else carry
        first = torch.full((rows,), carry is None, device=noise.device)
        latent, noise = noise.split([rssm.shapes[1][0], policy.chances], 1)
        action, tokens = actor.scale.to_unit(previous_action), actor.encoder(observation)
        (deter, stoch), posterior = rssm.observe(state, action, first, tokens, torch.special.ndtr(latent))
        state = (deter, stoch if explore else rssm.latent.likeliest(posterior))
        described = policy(features(state))
        if explore and isinstance(policy, Normal):
            described = policy.widened(described, self.rules.noise)
        chosen = (policy.drawn(described, noise) if explore else policy.likeliest(described)).clamp(-1, 1)
        return Decision(actor.scale.from_unit(chosen).unsqueeze(1)), state if self.remembers else None

    def update(self, batch: Batch) -> tuple[Metrics, Metrics]:
        """Take one step down the sum of all losses. The replayed rows' value loss reaches the model, too."""
        return self._descend(batch, model=True, controller=True)

    def update_world_model(self, batch: Batch) -> tuple[Metrics, Metrics]:
        """Take one step down (1)."""
        return self._descend(batch, model=True, controller=False)

    def update_controller(self, batch: Batch) -> Metrics:
        """Take one step down (3) and (4); the model does not change."""
        return self._descend(batch, model=False, controller=True)[0]

    def _descend(self, batch: Batch, *, model: bool, controller: bool) -> tuple[Metrics, Metrics]:
        found: list[State] = []

        def loss(part: Batch) -> tuple[Tensor, Metrics]:
            value, metrics, states = self.optimizer.forward(part, model, controller)
            found.append(states)
            return value, metrics

        metrics = descend(self.optimizer, batch, loss)
        if controller and self.rules.slow != "nothing":
            self._update_slow_value()
        deter, stoch = (torch.cat(each) for each in zip(*found, strict=True))
        columns = {"deter": deter.half(), "stoch": self.rules.latent.kept(stoch)}
        return metrics, columns

    def _update_slow_value(self) -> None:
        """Count an update of the controller; after each `slow_every` of them move the slow value towards the value."""
        self.controlled += 1
        if self.slow_every == 1 or int(self.controlled) % self.slow_every == 0:  # int: waits for the device
            soft_update(self.slow_value, self.value_head, self.slow_share)

    def forward(self, batch: Batch, model: bool, controller: bool) -> tuple[Tensor, Metrics, State]:
        """Compute the losses of these parts -> their sum [], metrics, and the states after all rows, detached."""
        rows, rssm = rows_of(batch, self.actor.scale), self.actor.rssm
        start = self.remembered(batch)
        after = {name: value[:, 1:] for name, value in batch.observation.items()}
        chance = uniform(batch.seed, (self.length + 1, rssm.shapes[1][0]), POSTERIOR)[:, 1:]
        with torch.set_grad_enabled(model and torch.is_grad_enabled()):
            tokens = self.actor.encoder(flat(after)).unflatten(0, (len(batch), -1))
            states, posterior = rssm.observe_sequence(start, rows.action[:, 1:], rows.first[:, 1:], tokens, chance)
        losses, metrics = batch.weight.new_zeros(()), Metrics()
        if model:
            losses, metrics = self.world_losses(batch, rows, states, posterior)
        if controller:
            more, told = self.controller_losses(batch, rows, states)
            losses, metrics = losses + more, metrics | told
        deter, stoch = (torch.cat([one[:, None], other.detach()], 1) for one, other in zip(start, states, strict=True))
        return losses, metrics, (deter, stoch)

    @torch.no_grad()
    def remembered(self, batch: Batch) -> State:
        """Return the state after row 0: the one that an earlier update has kept, else what this row alone tells."""
        rssm, seen = self.actor.rssm, {name: value[:, 0] for name, value in batch.observation.items()}
        first, action = batch.valid.new_ones(len(batch)), torch.zeros_like(batch.action[:, 0])
        chance = uniform(batch.seed, (rssm.shapes[1][0],), POSTERIOR)
        (deter, stoch), _ = rssm.observe(rssm.begin(len(batch)), action, first, self.actor.encoder(seen), chance)
        kept = batch.extras[STOCH][:, 0]  # [B, V], zeros: none is known
        is_stored, old = (kept != 0).any(1, keepdim=True), rssm.latent.restored(kept, rssm.shapes[1][1])
        deter = torch.where(is_stored, batch.extras[DETER][:, 0].float(), deter)
        return deter, torch.where(is_stored[..., None], old, stoch)

    def world_losses(self, batch: Batch, rows: Rows, states: State, posterior: Tensor) -> tuple[Tensor, Metrics]:
        """Compute (1) [], and its parts."""
        (deter, stoch), joined = states, features(states)  # [B, T, ...]
        after = {name: value[:, 1:] for name, value in batch.observation.items()}
        seen = self.decoder(deter.flatten(0, 1), stoch.flatten(0, 1), flat(after)).view(deter.shape[:2])
        goes_on = (~rows.terminal[:, 1:]).float() * self.discount
        dynamics, representation = self.rules.divergence(posterior, self.actor.rssm.prior(deter))
        parts = {
            "reconstruction": self.rules.reconstruction * seen,
            "reward_loss": self.reward.loss(self.reward(joined), rows.reward[:, 1:]),
            "continue_loss": F.binary_cross_entropy_with_logits(
                self.going_on(joined).squeeze(-1), goes_on, reduction="none"
            ),
            "dynamics": dynamics,
            "representation": representation,
        }
        means = {name: (batch.weight[:, None] * part).mean() for name, part in parts.items()}
        shares = {"dynamics": self.rules.dynamics, "representation": self.rules.representation}
        loss = torch.stack([shares.get(name, 1.0) * value for name, value in means.items()]).sum()
        return loss, {name: value.detach() for name, value in means.items()}

    def controller_losses(self, batch: Batch, rows: Rows, states: State) -> tuple[Tensor, Metrics]:
        """Compute (3) or (3'), + (4), [], and metrics."""
        weight, policy = batch.weight.repeat_interleave(self.length), self.actor.policy
        start = (states[0].flatten(0, 1).detach(), states[1].flatten(0, 1).detach())
        judge = self.slow_value if self.rules.slow == "target" else self.value_head
        model = (self.actor.rssm, self.reward, self.going_on, judge)
        with torch.set_grad_enabled(self.climbs and torch.is_grad_enabled()), frozen(*model):
            imagined, action = self.imagine(start, batch.seed)
            value = judge.mean(judge(imagined))  # [B T, H + 1]
            reward, goes_on = self.reward.mean(self.reward(imagined)), self.going_on(imagined).squeeze(-1).sigmoid()
            never = torch.zeros_like(value[:, 1:], dtype=torch.bool)
            returns = lambda_return(
                reward[:, 1:], value[:, 1:], never, never, discount=goes_on[:, 1:], share=self.lambda_
            )  # (2)
        joined, weight = imagined[:, :-1].detach(), weight[:, None] * goes_on.detach().cumprod(1)[:, :-1]
        described, scale = policy(joined), self.range_of(returns.detach()) if self.rules.normalises else 1.0
        spread = policy.entropy(described)
        gain = returns if self.climbs else policy.log_density(described, action) * (returns - value[:, :-1]) / scale
        policy_loss = (weight * -(gain + self.entropy_scale * spread)).mean()
        value_loss = (weight * self.value_losses(joined, returns.detach())).mean()
        loss = policy_loss + value_loss
        told = {
            "policy_loss": policy_loss, "value_loss": value_loss, "entropy": spread.mean(),
            "imagined_return": returns.mean(), "imagined_reward": reward.mean(),
        }  # fmt: skip
        if self.replay_value_scale:
            replayed = self.replay_losses(rows, states, returns[:, 0].detach().view(states[0].shape[:2]))
            told["replay_value"] = (batch.weight[:, None] * replayed).mean()
            loss = loss + self.replay_value_scale * told["replay_value"]
        return loss, {name: value.detach() for name, value in told.items()}

    def value_losses(self, joined: Tensor, returns: Tensor) -> Tensor:
        """Compute (4) for features [..., F] and returns [...]: two terms, the first alone if the slow value is no
        anchor."""
        logits = self.value_head(joined)
        loss = self.value_head.loss(logits, returns)
        if self.rules.slow != "anchor":
            return loss
        with torch.no_grad():
            slow = self.slow_value.mean(self.slow_value(joined))
        return loss + self.value_head.loss(logits, slow)

    def replay_losses(self, rows: Rows, states: State, imagined: Tensor) -> Tensor:
        """Compute (4) of the replayed rows [B, T - 1]. imagined: return from each, [B, T]."""
        last, terminal, reward = (each[:, 2:] for each in (rows.last, rows.terminal, rows.reward))
        returns = lambda_return(reward, imagined[:, 1:], terminal, last, discount=self.discount, share=self.lambda_)
        return (~rows.last[:, 1:-1]).float() * self.value_losses(features(states)[:, :-1], returns)

    def imagine(self, state: State, seed: Tensor) -> tuple[Tensor, Tensor]:
        """Follow policy and model for H steps from states of B T rows; seed: of the B sequences.

        Returns the features [B T, H + 1, F] and the actions [B T, H, A]. A gradient reaches each action through the
        states that follow it, not through the state that it was chosen in.
        """
        rssm, policy, (steps, rows) = self.actor.rssm, self.actor.policy, (self.imagined, self.length)
        latent = uniform(seed, (rows, steps, rssm.shapes[1][0]), IMAGINED).flatten(0, 1)
        noise = normal(seed, (rows, steps, policy.chances), ACTIONS).flatten(0, 1)
        found, actions = [features(state)], list[Tensor]()
        for step in range(steps):
            actions.append(policy.drawn(policy(found[-1].detach()), noise[:, step]))
            deter = rssm.step(state, self.actor.scale.executed(actions[-1]))
            state = (deter, rssm.latent.drawn(rssm.prior(deter), latent[:, step]))
            found.append(features(state))
        return torch.stack(found, 1), torch.stack(actions, 1)

    @torch.no_grad()
    def range_of(self, returns: Tensor) -> Tensor:
        """Return max(1, S) of (3), after these returns have moved it."""
        self.low.lerp_(returns.quantile(0.05), self.range_share)
        self.high.lerp_(returns.quantile(0.95), self.range_share)
        return (self.high - self.low).clamp(min=1)

    @torch.no_grad()
    def value(self, batch: Batch) -> Tensor:
        return self.value_head.mean(self.value_head(features(self.remembered(batch))))


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Make what is computed within no function of these modules' weights: a gradient passes through them alone."""
    weights = [weight for module in modules for weight in module.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


def flat(observation: Any) -> dict[str, Tensor]:
    """Join the first two axes of observations, {name: [B, T, ...]} -> [B T, ...]."""
    return {name: value.flatten(0, 1) for name, value in observation.items()}
