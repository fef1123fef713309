"""What every policy offers: a loss, samples, and what it publishes to those who act."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from serl_launcher.types import Batch, Metrics, Observation


class Policy(nn.Module, ABC):
    """Maps observations to chunks of H actions in the robot's units.

    A policy whose samples have a gradient has `rsample(...) -> (action [B, H, A], log_prob [B])`; one that is a
    tractable density also `log_prob(observation, action [B, H, A]) -> [B]`. Algorithms that need them refuse others.
    Densities are over actions scaled to [-1, 1], so that an entropy means the same in radians and metres.
    `task` are the B tasks in words; most policies do not read them.
    """

    inputs: tuple[str, ...]  # the observations that it reads
    horizon: int  # H, the number of actions of one decision
    imitation_target = "action"  # the column that a chunk is made of
    entries: Sequence[int] | None = None  # of that column, flattened, that are imitated; None: all
    mode_at_zero = False  # noise of zeros gives the most likely action, which is what acts where nothing is explored
    precision = torch.float32  # of its products; weights that are trained are float32 in any case
    graph: str | None = (
        None  # the method (inputs {name: tensor}, noise) that a GPU may run as one graph, if there is one
    )

    @property
    @abstractmethod
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of the standard normal noise of one decision: the same noise gives the same action anywhere."""

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        """What the batch of `forward` holds, as Window.offsets."""
        return {**dict.fromkeys(self.inputs, (0,)), "action": tuple(range(self.horizon))}

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss of imitating the batch, one per row [B], and metrics; chance comes from the rows' seeds."""

    @abstractmethod
    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None
    ) -> Tensor:
        """n chunks per observation {[B, ...]} -> [n, B, H, A]; `noise` [n, B, *noise_shape] is drawn unless given."""

    def compile_layers(self) -> None:
        """Fuse what is done often, before a GPU makes graphs of it."""

    def published(self) -> dict[str, Tensor]:
        """What whoever acts has to be sent."""
        return self.state_dict()

    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what another process published, in place. Raises RuntimeError when it is of another policy."""
        self.load_state_dict(tensors)
