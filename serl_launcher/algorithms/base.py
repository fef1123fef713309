"""The interface of every algorithm: training for the learner, acting for inference."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from serl_launcher.networks.mlp import ActionScale, StateEncoder, Statistics
from serl_launcher.policies.base import Policy
from serl_launcher.types import Batch, Carry, Decision, Observation, Prefix, Window
from serl_launcher.utils.optim import Optimizer, kernels


class Algorithm(nn.Module, ABC):
    """The networks, optimisers and random state of one method. Its state_dict holds all three, so that a resumed run
    continues bit by bit.

    An update is a method `(batch) -> metrics` whose name begins with `update`. It takes one training step and returns
    scalar metrics without a gradient, on the module's device. Random numbers of a row come from the row's seed
    (networks/seeded_noise.py). All others come from `generator`, on the CPU, seeded from torch's global generator.
    """

    windows: dict[str, Window]  # name of an update: the columns and steps of its batch
    discount: float = 1.0  # per step

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(torch.initial_seed() ^ 1)  # not drawn: see training/memory.py

    @property
    @abstractmethod
    def acting(self) -> Policy:
        """The policy that `act` uses. Its `published()` weights are sent to actors."""

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool, prefix: Prefix | None = None,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """Choose actions for B observations {name: [B, ...]}, without a gradient.

        previous_action: [B, A], the action that the robot executed last, in its units.
        carry: what the last call returned; None at an episode's start.
        noise: [B, *noise_shape], standard normal.
        explore: True: sample as in practice. False: act as in an evaluation, with the noise of `calm`.
        prefix: the chunks under way, if the acting policy continues them; None: chunks begin anew.
        Returns the Decision, with action [B, H, A] in the robot's units, and the carry of the next call.
        """
        noise = noise if explore else self.calm(noise)
        action = self.acting.sample(observation, task=task, noise=noise.unsqueeze(0), prefix=prefix)[0]
        return Decision(action), carry

    def calm(self, noise: Tensor) -> Tensor:
        """Return the noise with which an evaluation acts: none, unless the policy always acts with noise."""
        return torch.zeros_like(noise) if self.acting.mode_at_zero else noise

    def value(self, batch: Batch) -> Tensor | None:
        """Estimate the return of each row [B], discounted by `discount` per step; None: no values are learned.

        The batch has the window of `update`, or of the first update if none has that name.
        """
        return None

    def only_acting(self) -> None:
        """Delete what `act` does not need: the optimisers, and all networks but the acting one. Training is no longer
        possible."""
        acting = self.acting
        for name in [name for name, child in self.named_children() if child is not acting]:
            delattr(self, name)
        for name in [name for name, item in vars(self).items() if isinstance(item, Optimizer)]:
            delattr(self, name)
        self.requires_grad_(False)

    def set_statistics(self, statistics: Statistics) -> None:
        """Set, in every network, how states are normalised and actions are scaled."""
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


@torch.no_grad()
def follow(target: nn.Module, learned: nn.Module, share: float) -> None:
    """Move each weight of `target` by this share towards the one of the same place in `learned`."""
    kernels._foreach_lerp_(list(target.parameters()), list(learned.parameters()), share)


def frozen(policy: nn.Module) -> dict[int, nn.Parameter]:
    """Return the frozen weights by id, for copy.deepcopy: a copy shares them with the policy."""
    return {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}


def value_target(batch: Batch, next_value: Tensor, discount: float) -> Tensor:
    """y = sum_{i < length} discount^i r_i + discount^length (1 - terminated) V(next_observation) -> [B].

    next_value: [B], V at the batch's next_observation. Only `terminated` ends the value; `truncated` does not.
    """
    discounts = discount ** torch.arange(batch.reward.shape[1], device=batch.reward.device)
    rewards = batch.reward @ discounts  # past the episode's end the reward is zero
    return rewards + discount**batch.length * ~batch.terminated.any(1) * next_value


def critic_weight(batch: Batch) -> Tensor:
    """Return the rows' weights [B], with zero for a window that truncation cut short: the actions that would have
    followed are unknown."""
    return batch.weight * (batch.valid.all(1) | batch.terminated.any(1))
