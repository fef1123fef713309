"""Defines the interface of algorithms, and what they share: target networks (EMA, tau), critic loss."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from serl_client.spec import Feature
from torch import Tensor, nn

from serl_launcher.networks.critics import Critic, Target
from serl_launcher.networks.mlp import Normaliser, Statistics
from serl_launcher.optim.distributed import gathered
from serl_launcher.optim.optimizer import Optimizer, kernels
from serl_launcher.policies.base import Acting, Policy
from serl_launcher.types import Batch, Carry, Decision, Measured, Metrics, Observation, Prefix, Window

Copied = TypeVar("Copied", bound=nn.Module)
Update = TypeVar("Update", bound=Callable[..., Any])


def uncounted(update: Update) -> Update:
    """Mark an update that the memory check does not run: it asks for values, or takes long (evolution strategies)."""
    update.is_uncounted = True  # type: ignore[attr-defined]
    return update


class Algorithm(nn.Module, ABC):
    """The networks, optimisers and random state of one method. Its state_dict holds all three, so that a resumed run
    continues bit by bit.

        class Cloning(Algorithm):
            def __init__(self, spec, *, policy, optimizer):
                super().__init__()
                self.policy = policy(spec)
                self.optimizer = optimizer(self.policy)
                self.windows = {"update": Window(self.policy.offsets)}

            @property
            def acting(self):
                return self.policy

            def update(self, batch):
                loss = self.optimizer.forward(batch)[0].mean()
                self.optimizer.step(loss)
                return {"loss": loss.detach()}

    An update is a method `(batch) -> metrics` whose name begins with `update`. It takes one training step and returns
    scalar metrics without a gradient, on the module's device. It may return `(metrics, columns)`: what it has
    computed of each row's first step, {name in `derived`: [B, ...]}. Random numbers of a row come from the row's seed
    (networks/seeded_noise.py). All others come from `generator`, on the CPU, seeded from torch's global generator.
    Before training each update is run on rows of zeros to count its memory, unless it is `uncounted`.
    """

    windows: dict[str, Window]  # name of an update: the columns and steps of its batch
    discount: float = 1.0  # per step
    derived: Mapping[str, Feature] = MappingProxyType({})  # columns that updates compute of steps; see Window
    changeable: Sequence[str] = ("tau", "augment")  # options that a trained run may change; see config.changeable
    means: Sequence[str] = ()  # names of buffers that are running means over batches: several ranks average them
    lowest: Sequence[str] = ()  # names of buffers that only ever fall: of several ranks the least one counts

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(torch.initial_seed() ^ 1)  # not drawn: see training/memory.py

    @property
    @abstractmethod
    def acting(self) -> Acting:
        """All networks that `act` uses. Its `published()` weights are sent to actors."""

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool, prefix: Prefix | None = None,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        """Choose actions for B observations, {name: [B, ...]} or [B, history, ...], without a gradient.

        previous_action: [B, A], the action that the robot executed last, in its units.
        carry: what the last call returned; None at an episode's start.
        noise: [B, *noise_shape], standard normal.
        explore: True: sample as in practice. False: act as in an evaluation, with `evaluation_noise`.
        prefix: the chunks under way, if the acting policy continues them; None: chunks begin anew.
        Returns the Decision, with action [B, H, A] in the robot's units, and the carry of the next call.

        This takes a sample of the policy. An algorithm whose acting part is no Policy, such as a planner, has an `act`
        of its own.
        """
        policy, noise = self.acting, noise if explore else self.evaluation_noise(noise)
        if not isinstance(policy, Policy):
            raise NotImplementedError(f"{type(self).__name__}: {type(policy).__name__} has no samples, so write `act`")
        action = policy.sample(observation, task=task, noise=noise.unsqueeze(0), prefix=prefix)[0]
        return Decision(action), carry

    def evaluation_noise(self, noise: Tensor) -> Tensor:
        """Return the noise with which an evaluation acts: none, unless the policy always acts with noise."""
        return torch.zeros_like(noise) if self.acting.mode_at_zero else noise

    def value(self, batch: Batch) -> Tensor | None:
        """Estimate the return of each row [B], discounted by `discount` per step; None: no values are learned.

        The batch has the window of `update`, or of the first update if none has that name.
        """
        return None

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        return {name: item for name, item in vars(self).items() if isinstance(item, Optimizer)}

    @property
    def unkept(self) -> list[str]:
        """Names of attributes that learn, and that its state_dict lacks: torch's optimisers, plain lists of modules."""
        learns = (nn.Module, Optimizer, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)

        def members(value: Any) -> Iterable[Any]:
            return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]

        own = vars(self).keys() - vars(nn.Module()).keys() - self.optimizers.keys()
        return sorted(name for name in own if any(isinstance(each, learns) for each in members(vars(self)[name])))

    def only_acting(self) -> None:
        """Delete what `act` does not need: the optimisers, and all networks but the acting one. Training is no longer
        possible."""
        acting = self.acting
        for name in [*(name for name, child in self.named_children() if child is not acting), *self.optimizers]:
            delattr(self, name)
        self.requires_grad_(False)

    def set_statistics(self, statistics: Statistics) -> None:
        """Set, in every network, how states are normalised and actions are scaled."""
        for module in self.modules():
            if isinstance(module, Normaliser):
                module.set_statistics(statistics)

    @property
    def measured(self) -> Measured:
        """What its policies have to know statistics of, besides those of each column."""
        policies = [module for module in self.modules() if isinstance(module, Policy)]
        return {name: each for policy in policies for name, each in policy.measured.items()}

    def get_extra_state(self) -> dict[str, Any]:
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {"generator": self.generator.get_state(), "optimizers": optimizers}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        for name, optimizer in state["optimizers"].items():
            getattr(self, name).load_state_dict(optimizer)


def frozen_copy(module: Copied, *shared: nn.Module) -> Copied:
    """Copy a module that only `soft_update` changes from then on: a target, a reference or an average.

    It shares with the original the weights that are frozen there, and the modules in `shared`.
    """
    frozen = (weight for weight in module.parameters() if not weight.requires_grad)
    return copy.deepcopy(module, {id(each): each for each in (*frozen, *shared)}).requires_grad_(False)


@torch.no_grad()
def soft_update(target: nn.Module, source: nn.Module, share: float) -> None:
    """Move each weight of `target` by this share towards the same weight of `source`, if that is trained.

    With share 1 it becomes equal. Weights that ZeRO-3 shards are made whole one at a time.
    """
    both = zip(target.parameters(), source.parameters(), strict=True)
    pairs = [(weight, trained) for weight, trained in both if trained.requires_grad]
    is_sharded = any(hasattr(trained, "ds_id") for _, trained in pairs)
    for group in [[pair] for pair in pairs] if is_sharded else [pairs] if pairs else []:
        weights, trained = (list(column) for column in zip(*group, strict=True))
        with gathered(trained):
            kernels._foreach_lerp_(weights, trained, share)


def descend(
    optimizer: Optimizer, batch: Batch, loss: Callable[[Batch], tuple[Tensor, Metrics]], gradient: str = "gradient"
) -> Metrics:
    """Take one step down the mean loss over the optimiser's parts of a batch.

    loss: maps a part to its mean loss [] and metrics. Returns the mean of the metrics, and by the name `gradient` the
    gradient's norm.
    """
    found, norm = [], torch.zeros(())
    for part in optimizer.parts(batch):
        value, metrics = loss(part)
        norm = optimizer.step(value)
        found.append(metrics)
    return {name: torch.stack([metrics[name] for metrics in found]).mean() for name in found[0]} | {gradient: norm}


def value_target(batch: Batch, next_value: Tensor, discount: float) -> Tensor:
    """y = sum_{i < length} discount^i r_i + discount^length (1 - terminated) V(next_observation) -> [..., B].

    next_value: [..., B], V at the batch's next_observation. Only `terminated` ends the value; `truncated` does not.
    """
    discounts = float(discount) ** torch.arange(batch.reward.shape[1], device=batch.reward.device)
    rewards = batch.reward @ discounts  # past the episode's end the reward is zero
    return rewards + discount**batch.length * ~batch.terminated.any(1) * next_value


def critic_weight(batch: Batch) -> Tensor:
    """Return the rows' weights [B], with zero for a window that truncation cut short: the actions that would have
    followed are unknown."""
    return batch.weight * (batch.valid.all(1) | batch.terminated.any(1))


def critic_loss(batch: Batch, critic: Critic, prediction: Tensor, target: Target) -> tuple[Tensor, Metrics]:
    """Compute the ensemble's mean loss [] against a target, and metrics. Windows cut short have weight zero."""
    loss = (critic_weight(batch) * critic.loss(prediction, target)).mean()
    metrics = {"critic_loss": loss.detach(), "value": critic.values.mean(prediction.detach()).mean()}
    outside = critic.values.outside(target)
    return loss, metrics if outside is None else {**metrics, "targets_outside": outside}
