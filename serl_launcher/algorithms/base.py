"""What every algorithm offers to the learner that trains it and to whoever acts with it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from serl_launcher.networks.mlp import ActionScale, StateEncoder, Statistics
from serl_launcher.policies.base import Policy
from serl_launcher.types import Batch, Carry, Decision, Observation, Window
from serl_launcher.utils.optim import Optimizer


class Algorithm(nn.Module, ABC):
    """Networks, optimisers and random numbers of one method; its state_dict holds all three, so that a resumed run
    continues bit by bit.

    An update is any method `(batch) -> metrics` whose name begins with `update`: one step of training, whose metrics
    are scalars without a gradient on the module's device. `windows` names what the batch of each holds. Chance in
    a row comes from its seed (networks/seeded_noise.py), any other from `generator`, which lives on the CPU and is
    seeded from torch's global one, as the weights are."""

    windows: dict[str, Window]
    discount: float = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(torch.initial_seed() ^ 1)  # not drawn: see training/memory.py

    @property
    @abstractmethod
    def acting(self) -> Policy:
        """All that `act` needs; what it publishes is sent to actors."""

    @abstractmethod
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """What to do for B observations {[B, ...]} and tasks in words, without a gradient.

        previous_action [B, A] is what the robot really did; `carry` is what the last call returned, None at an
        episode's start; `noise` [B, *noise_shape] is used if `explore`, and by a policy that needs it to be at its best
        (see Policy.mode_at_zero).
        """

    def value(self, batch: Batch) -> Tensor | None:
        """What it expects as the return of these rows, discounted by `discount` each row, [B]; None: it learns no
        values. The batch has the window of `update`, or of the first update where none has that name."""
        return None

    def only_acting(self) -> None:
        """Drop all that `act` does not need: optimisers, and every network but the acting one. It cannot be trained
        any more."""
        acting = self.acting
        for name in [name for name, child in self.named_children() if child is not acting]:
            delattr(self, name)
        for name in [name for name, item in vars(self).items() if isinstance(item, Optimizer)]:
            delattr(self, name)
        self.requires_grad_(False)

    def set_statistics(self, statistics: Statistics) -> None:
        """Freeze in every network how states are normalised and how actions are scaled."""
        for module in self.modules():
            if isinstance(module, StateEncoder | ActionScale):
                module.set_statistics(statistics)

    def get_extra_state(self) -> dict[str, Any]:
        optimizers = {name: item.state_dict() for name, item in vars(self).items() if isinstance(item, Optimizer)}
        return {"generator": self.generator.get_state(), "optimizers": optimizers}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        for name, optimizer in state["optimizers"].items():
            getattr(self, name).load_state_dict(optimizer)


def value_target(batch: Batch, next_value: Tensor, discount: float) -> Tensor:
    """y = sum_{i < length} discount^i r_i + discount^length (1 - terminated) V(next_observation) -> [B].

    next_value [B] is V at the batch's next_observation. Truncation does not end a value: only `terminated` does.
    """
    discounts = discount ** torch.arange(batch.reward.shape[1], device=batch.reward.device)
    rewards = (batch.reward * discounts).sum(1)  # past the episode's end both columns are zero
    return rewards + discount**batch.length * ~batch.terminated.any(1) * next_value


def critic_weight(batch: Batch) -> Tensor:
    """The rows' weights [B], zero for a row that truncation cut short: the actions it did not run are unknown."""
    return batch.weight * (batch.valid.all(1) | batch.terminated.any(1))
