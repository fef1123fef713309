"""Imitation of what the batch holds: supervised fine-tuning, and Hi-ORS rejection sampling, which is a plan around it.

Hi-ORS (arXiv 2510.26406) imitates, with the policy's own loss, the episodes of the newest policies that succeeded,
human corrections among them: L = E[1_m(episode) loss(row)]. Which episodes count is the plan's choice of data (a view
that keeps the successful ones); no value is learned.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from serl_client.spec import Spec
from torch import Tensor, nn

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.networks.augment import Augment, augmentation
from serl_launcher.policies.base import Policy
from serl_launcher.types import Batch, Carry, Decision, Metrics, Observation, Window
from serl_launcher.utils.distributed import gathered
from serl_launcher.utils.optim import Optimizer


class SFT(Algorithm):
    """Minimises the policy's loss of imitation; acts with the moving average of its weights.

    `average` is the share of the old average kept at each update; what is frozen exists once. `stillness`: no window
    starts where the robot stays still (see Window.stillness). `augment` changes the images of each batch; None: they
    stay as they are. Raises ConfigError for `augment` where the policy sees no images.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        policy: Callable[[Spec], Policy],
        optimizer: Callable[[nn.Module], Optimizer],
        average: float,
        stillness: float,
        augment: Callable[[], Augment] | None,
    ) -> None:
        super().__init__()
        self.policy = policy(spec)
        frozen = {id(weight): weight for weight in self.policy.parameters() if not weight.requires_grad}
        self.averaged = copy.deepcopy(self.policy, frozen).requires_grad_(False)
        self.optimizer = optimizer(self.policy)
        self.average = average
        self.augment = augmentation(augment, self.policy.inputs)
        self.windows = {"update": Window(self.policy.offsets, stillness=stillness)}

    @property
    def acting(self) -> Policy:
        return self.averaged

    @torch.no_grad()
    def act(
        self, observation: Observation, previous_action: Tensor, carry: Carry, *, task: Sequence[str], noise: Tensor,
        explore: bool,
    ) -> tuple[Decision, Carry]:  # fmt: skip
        noise = torch.zeros_like(noise) if self.averaged.mode_at_zero and not explore else noise
        return Decision(self.averaged.sample(observation, task=task, noise=noise.unsqueeze(0))[0]), carry

    def update(self, batch: Batch) -> Metrics:
        """One step down the loss, its rows weighted by the batch's weights."""
        batch = self.augment(batch) if self.augment else batch
        found = []
        for part in self.optimizer.parts(batch):
            loss, metrics = self.optimizer(part)  # [B]
            loss = (part.weight * loss).mean()
            gradient = self.optimizer.step(loss)
            found.append({"loss": loss.detach(), "gradient": gradient, **metrics})
        self._follow()
        means = {name: torch.stack([part[name] for part in found]).mean() for name in found[0]}
        return {**means, "gradient": found[-1]["gradient"]}

    @torch.no_grad()
    def _follow(self) -> None:
        for averaged, current in zip(self.averaged.parameters(), self.policy.parameters(), strict=True):
            if current.requires_grad:
                with gathered([current]):
                    averaged.lerp_(current, 1 - self.average)
