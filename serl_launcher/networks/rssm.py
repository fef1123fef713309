"""Builds Dreamer's recurrent state-space model (RSSM): a deterministic state that a GRU carries, and a categorical one.

Hafner et al. 2025, "Mastering diverse control tasks through world models" (Nature 640), with the constants of the
code that its authors published in 2025. A state is (deter [B, D], stoch [B, V, C]), V one-hot variables of C classes.
    (1) deter' = GRU(deter, stoch, action); prior p(stoch' | deter'); posterior q(stoch' | deter', tokens').
    (2) Each class has a probability of 0.99 softmax + 0.01 / C ("unimix").
DreamerV1 and V2 have other cells, layers and latent variables, which are here, too: V1's are normal, C = 1.
Nothing here asks for a value, so that a GPU can record it as a graph. Chance comes as uniform numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # deter [B, D], stoch [B, V, C]
Layers = Callable[[int, int, int], nn.Sequential]  # as `layers`

UNIMIX = 0.01
SPREAD = 1.1368  # makes the standard deviation of a normal that is cut at two of its own that of the whole one
EPSILON = 1e-4  # of RMSNorm


def initialised(weight: Tensor, fan_in: int, scale: float = 1.0) -> nn.Parameter:
    """Draw a weight from a normal of standard deviation scale / sqrt(fan_in), cut at two of its own; 0: zeros."""
    std = SPREAD * scale / math.sqrt(fan_in)
    return nn.Parameter(nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std) if scale else weight.zero_())


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """Make a linear layer whose bias begins at zero. scale: of its first outputs; 0: they are exactly zero."""
    layer = nn.Linear(inputs, outputs)
    layer.weight, layer.bias = initialised(layer.weight.data, inputs, scale), nn.Parameter(torch.zeros(outputs))
    return layer


def layers(inputs: int, width: int, count: int) -> nn.Sequential:
    """Make `count` layers [..., inputs] -> [..., width], each a linear one, RMSNorm and SiLU."""
    return _repeated(inputs, width, count, lambda: [nn.RMSNorm(width, EPSILON), nn.SiLU()])


def plain(inputs: int, width: int, count: int) -> nn.Sequential:
    """Make layers as `layers` does, each a linear one and ELU: DreamerV1 and V2."""
    return _repeated(inputs, width, count, lambda: [nn.ELU()])


def _repeated(inputs: int, width: int, count: int, behind: Callable[[], list[nn.Module]]) -> nn.Sequential:
    """Make `count` linear layers, each with these modules behind it."""
    made: list[nn.Module] = []
    for place in range(count):
        made += [linear(width if place else inputs, width), *behind()]
    return nn.Sequential(*made)


class BlockLinear(nn.Module):
    """A linear layer of `blocks` parts that do not see each other: [..., blocks, I / blocks] -> [..., O]."""

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        own = inputs // blocks
        self.weight = initialised(torch.empty(blocks, own, outputs // blocks), own)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("...gi,gio->...go", inputs, self.weight).flatten(-2) + self.bias


class BlockGRU(nn.Module):
    """Carry deter [B, D] one step on, from stoch [B, S] and action [B, A]; every block of D / blocks sees both."""

    def __init__(self, deter: int, stoch: int, action: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.inputs = nn.ModuleList(layers(size, hidden, 1) for size in (deter, stoch, action))
        self.hidden = BlockLinear(deter + 3 * hidden * blocks, deter, blocks)
        self.norm = nn.RMSNorm(deter, EPSILON)
        self.gates = BlockLinear(deter, 3 * deter, blocks)

    def forward(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        joined = torch.cat([part(each) for part, each in zip(self.inputs, (deter, stoch, action), strict=True)], -1)
        own = deter.unflatten(-1, (self.blocks, -1))
        seen = joined.unsqueeze(-2).expand(*own.shape[:-1], -1)  # [B, blocks, 3 hidden]
        hidden = nn.functional.silu(self.norm(self.hidden(torch.cat([own, seen], -1))))
        gates = self.gates(hidden.unflatten(-1, (self.blocks, -1))).unflatten(-1, (self.blocks, 3, -1))
        reset, candidate, update = (gate.flatten(-2) for gate in gates.unbind(-2))
        candidate, update = torch.tanh(reset.sigmoid() * candidate), (update - 1).sigmoid()
        return update * candidate + (1 - update) * deter


class PlainGRU(nn.Module):
    """DreamerV1's cell: inputs as BlockGRU's, a layer over stoch and action, then PyTorch's GRU. It has no blocks."""

    def __init__(self, deter: int, stoch: int, action: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.inputs = plain(stoch + action, hidden, 1)
        self.cell = nn.GRUCell(hidden, deter)

    def forward(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        return self.cell(self.inputs(torch.cat([stoch, action], -1)), deter)


class NormedGRU(nn.Module):
    """DreamerV2's cell: as PlainGRU, but one layer and LayerNorm before all gates, which begin by keeping the state."""

    def __init__(self, deter: int, stoch: int, action: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.inputs = plain(stoch + action, hidden, 1)
        self.gates, self.norm = nn.Linear(hidden + deter, 3 * deter, bias=False), nn.LayerNorm(3 * deter)

    def forward(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        hidden = self.inputs(torch.cat([stoch, action], -1))
        reset, candidate, update = self.norm(self.gates(torch.cat([hidden, deter], -1))).chunk(3, -1)
        candidate, update = torch.tanh(reset.sigmoid() * candidate), (update - 1).sigmoid()
        return update * candidate + (1 - update) * deter


class Latent(Protocol):
    """Describes how V latent variables are distributed and drawn. P numbers of each describe its distribution."""

    @property
    def dtype(self) -> str:
        """Of what is stored of a variable."""
        ...

    def numbers(self, classes: int) -> int:
        """Return P, how many numbers a network gives for each variable."""
        ...

    def size(self, classes: int) -> int:
        """Return C, the size of a drawn variable."""
        ...

    def described(self, numbers: Tensor) -> Tensor:
        """Return distributions [..., V, P] for what a network gave, [..., V, P]."""
        ...

    def drawn(self, described: Tensor, uniform: Tensor) -> Tensor:
        """Draw [..., V, C], differentiably, by uniform numbers [..., V] in (0, 1)."""
        ...

    def likeliest(self, described: Tensor) -> Tensor: ...

    def kl(self, one: Tensor, other: Tensor) -> Tensor:
        """Compute KL(one || other) of two distributions [..., V, P] -> [...], nats summed over the variables."""
        ...

    def kept(self, stoch: Tensor) -> Tensor:
        """Return what is stored of drawn variables [..., V, C]: [..., V], not all of them 0."""
        ...

    def restored(self, kept: Tensor, classes: int) -> Tensor:
        """Return drawn variables [..., V, C] for what was stored of them."""
        ...


@dataclass(frozen=True)
class Categorical:
    """One-hot variables. unimix: share of a uniform distribution in each, see (2). Described by log probabilities."""

    unimix: float
    dtype = "uint8"

    def numbers(self, classes: int) -> int:
        return classes

    def size(self, classes: int) -> int:
        return classes

    def described(self, numbers: Tensor) -> Tensor:
        if not self.unimix:
            return numbers.log_softmax(-1)
        return ((1 - self.unimix) * numbers.softmax(-1) + self.unimix / numbers.shape[-1]).log()

    def drawn(self, described: Tensor, uniform: Tensor) -> Tensor:
        """Draw as Latent says. The gradient is that of the probabilities ("straight-through")."""
        probs = described.exp()
        index = (uniform.unsqueeze(-1) > probs.detach().cumsum(-1)[..., :-1]).sum(-1)
        return one_hot(index, described.shape[-1]) + (probs - probs.detach())

    def likeliest(self, described: Tensor) -> Tensor:
        return one_hot(described.argmax(-1), described.shape[-1])

    def kl(self, one: Tensor, other: Tensor) -> Tensor:
        return (one.exp() * (one - other)).sum((-2, -1))

    def kept(self, stoch: Tensor) -> Tensor:
        return (stoch.argmax(-1) + 1).to(torch.uint8)

    def restored(self, kept: Tensor, classes: int) -> Tensor:
        return one_hot(kept.long() - 1, classes)


class Gaussian:
    """DreamerV1's normal variables, described by mean and standard deviation, which is at least 0.1."""

    LEAST = 0.1
    dtype = "float16"

    def numbers(self, classes: int) -> int:
        return 2

    def size(self, classes: int) -> int:
        return 1

    def described(self, numbers: Tensor) -> Tensor:
        mean, spread = numbers.unbind(-1)
        return torch.stack([mean, nn.functional.softplus(spread) + self.LEAST], -1)

    def drawn(self, described: Tensor, uniform: Tensor) -> Tensor:
        mean, std = described.unbind(-1)
        chance = torch.special.ndtri(uniform.clamp(1e-7, 1 - 1e-7))  # 0 and 1 would be infinite
        return (mean + std * chance).unsqueeze(-1)

    def likeliest(self, described: Tensor) -> Tensor:
        return described[..., :1]

    def kl(self, one: Tensor, other: Tensor) -> Tensor:
        (mean, std), (center, spread) = one.unbind(-1), other.unbind(-1)
        both = (std / spread).square() + ((mean - center) / spread).square()
        return (0.5 * (both - 1) - (std / spread).log()).sum(-1)

    def kept(self, stoch: Tensor) -> Tensor:
        return stoch.squeeze(-1).half()

    def restored(self, kept: Tensor, classes: int) -> Tensor:
        return kept.float().unsqueeze(-1)


class RSSM(nn.Module):
    """The model of (1).

    tokens: size of an encoded observation. actions: size of an action, which is near [-1, 1].
    deter, hidden: sizes of the deterministic state and of the layers. variables, classes: V and C. blocks: of the GRU.
    latent: of the variables. cell: BlockGRU, or another with its arguments. make: its other layers. depth: how many
        of them come before the prior.
    """

    def __init__(
        self, tokens: int, actions: int, *, deter: int, hidden: int, variables: int, classes: int, blocks: int,
        latent: Latent = Categorical(UNIMIX), cell: Callable[..., nn.Module] = BlockGRU, make: Layers = layers,
        depth: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.latent, self.shapes = latent, ((deter,), (variables, latent.size(classes)))
        stoch, described = variables * latent.size(classes), variables * latent.numbers(classes)
        self.size = deter + stoch  # of `features`
        self.gru = cell(deter, stoch, actions, hidden, blocks)
        self.prior_layers = nn.Sequential(make(deter, hidden, depth), linear(hidden, described))
        self.posterior_layers = nn.Sequential(make(deter + tokens, hidden, 1), linear(hidden, described))

    def begin(self, rows: int) -> State:
        """Return the state before an episode's first observation: zeros."""
        deter, stoch = (next(self.parameters()).new_zeros(rows, *shape) for shape in self.shapes)
        return deter, stoch

    def step(self, state: State, action: Tensor) -> Tensor:
        """Return deter' [B, D] after an action [B, A]. An action beyond 1 is scaled back to it."""
        deter, stoch = state
        return self.gru(deter, stoch.flatten(-2), action / action.detach().abs().clamp(min=1))

    def prior(self, deter: Tensor) -> Tensor:
        """Return the variables' distributions [..., V, P] of (1), from what was before."""
        return self._described(self.prior_layers(deter))

    def posterior(self, deter: Tensor, tokens: Tensor) -> Tensor:
        """Return the variables' distributions [..., V, P] of (1), from what was before and what is seen."""
        return self._described(self.posterior_layers(torch.cat([deter, tokens], -1)))

    def _described(self, numbers: Tensor) -> Tensor:
        return self.latent.described(numbers.unflatten(-1, (self.shapes[1][0], -1)))  # (2)

    def observe(
        self, state: State, action: Tensor, first: Tensor, tokens: Tensor, uniform: Tensor
    ) -> tuple[State, Tensor]:
        """Take in an observation; where `first` [B], state and action before it do not matter.

        action: [B, A], the one before it. tokens: [B, E]. uniform: [B, V].
        Returns the state after it and the posterior [B, V, P].
        """
        kept = (~first).to(action.dtype)
        deter, stoch = state
        deter = self.step((deter * kept[:, None], stoch * kept[:, None, None]), action * kept[:, None])
        posterior = self.posterior(deter, tokens)
        return (deter, self.latent.drawn(posterior, uniform)), posterior

    def observe_sequence(
        self, state: State, action: Tensor, first: Tensor, tokens: Tensor, uniform: Tensor
    ) -> tuple[State, Tensor]:
        """Take in T observations one after another; inputs as in `observe`, [B, T, ...] each.

        Returns the states (deter [B, T, D], stoch [B, T, V, C]) and the posteriors [B, T, V, P].
        """
        found = []
        for inputs in zip(*(each.unbind(1) for each in (action, first, tokens, uniform)), strict=True):
            state, posterior = self.observe(state, *inputs)
            found.append((*state, posterior))
        deter, stoch, posterior = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return (deter, stoch), posterior


def features(state: State) -> Tensor:
    """Join a state's two parts -> [..., D + V C]."""
    deter, stoch = state
    return torch.cat([deter, stoch.flatten(-2)], -1)


def one_hot(index: Tensor, classes: int) -> Tensor:
    """As torch's, in float32 and without asking for the largest index. No class has the index -1: zeros."""
    return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).float()
