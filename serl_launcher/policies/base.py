"""Defines the interface of policies: a loss that imitates, samples, and what is published for acting."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from serl_launcher.networks.mlp import ActionScale
from serl_launcher.types import Batch, Measured, Metrics, Observation, Prefix


class Acting(nn.Module, ABC):
    """The part of an algorithm that chooses actions: a policy, a planner, a critic. Its weights are sent to actors.

    It holds every network that `Algorithm.act` needs. Weights have its `precision` there; buffers keep theirs.
    """

    horizon: int  # H, actions of one decision
    history = 1  # To, observations of a decision
    tasks: Sequence[str] = ()  # the only tasks that it may be asked to do, in words; empty: any
    mode_at_zero = False  # True: zero noise gives the most likely action, which acts without exploration
    precision = torch.float32  # of matrix products; trained weights are always float32
    frozen: Set[str] = frozenset()  # names of the weights that are never trained, and not published
    continues: str | None = None  # how a chunk continues the one under way: trained, guided (prefix.py); None: not
    max_delay = 0  # actions of that one which it has learned to continue
    graph: str | None = None  # name of a method (inputs {name: tensor}, noise) that a GPU may run as one CUDA graph

    @property
    @abstractmethod
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of one decision's standard normal noise. Equal noise gives equal actions in every process."""

    def compile_layers(self) -> None:
        """Compile the layers, before CUDA graphs are captured."""

    def published(self) -> dict[str, Tensor]:
        """Return the tensors that an acting process needs, by name."""
        return self.state_dict()

    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        """Load, in place, tensors that another process published. Raises RuntimeError if they are of another module."""
        self.load_state_dict(tensors)


class Policy(Acting):
    """Map observations to chunks of H actions in the robot's units.

    A policy whose samples have a gradient also has `rsample(...) -> (action [B, H, A], log_prob [B])`. A policy with a
    tractable density also has `log_prob(observation, action [B, H, A]) -> [B]`. Algorithms that need these methods
    refuse other policies. Densities are over actions scaled to [-1, 1], so that an entropy means the same in radians
    and metres. `task` is always B tasks in words; most policies do not read them.
    """

    inputs: tuple[str, ...]  # names of the observations that it reads
    imitation_target = "action"  # column that a chunk imitates
    entries: Sequence[int] | None = None  # indices of that column's flattened values that are imitated; None: all

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        """The columns and steps of the batch of `forward`, as in Window.offsets."""
        return {**dict.fromkeys(self.inputs, tuple(range(1 - self.history, 1))), "action": tuple(range(self.horizon))}

    @property
    def measured(self) -> Measured:
        """What of windows it has to know statistics of, besides those of each column."""
        return {}

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the imitation loss of each row [B], and metrics. Random numbers come from the rows' seeds."""

    @abstractmethod
    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # fmt: skip
        """Sample n chunks per observation -> [n, B, H, A], in the robot's units.

        observation: {name: [B, ...]}, or [B, To, ...] for a policy with `history` To > 1.
        noise: [n, B, *noise_shape], standard normal; None: drawn here.
        prefix: the chunks under way, only for a policy that `continues` them. The committed actions come back as they
            are.
        """


class ScaledPolicy(Policy):
    """A policy whose chunks may be judged, chosen, edited and steered from outside: its actions have a scale."""

    scale: ActionScale
    size: int  # A, numbers of an action
    width: int  # D, numbers of an action's noise
    reads_words = False  # True: any words of a task change what it does; False: those of `tasks` alone, if at all

    @property
    @abstractmethod
    def is_deterministic(self) -> bool:
        """Whether all samples for one observation are the same."""
