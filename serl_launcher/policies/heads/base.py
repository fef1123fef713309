"""Defines the interface of policy heads: what a network learns about action chunks, and how chunks are sampled from it.

Loss and sampler are one object, so that they cannot be mismatched. A head sees chunks [B, H, D], scaled to about
[-1, 1], and a function of chunk and time; policies/chunk.py knows observations, units and old chunks. Time t runs from
1 (noise) to 0 (action).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

Predict = Callable[[Tensor, Tensor], Tensor]  # chunk [B, H, D] and times [B, times] -> float32 [B, H, outputs]
Slope = Callable[[Tensor], Tensor]  # of a value by the guessed chunk, [B, H, D] -> [B, H, D]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What B rows of a batch should become.

    chunk: [B, H, D], zero behind the episode's end and behind the robot's `size` numbers.
    seed: [B] int64, from which each row's random numbers come.
    first, end: [B] int64, the steps that are learned: first <= step < end. Steps before `first` are of an old chunk.
    size: A, numbers of the robot's action; the others of the D are padding.
    """

    chunk: Tensor
    seed: Tensor
    first: Tensor
    end: Tensor
    size: int


def asked(predict: Predict, chunk: Tensor, time: float) -> Tensor:
    """Ask the network for chunks [B, H, D] at one time for all."""
    return predict(chunk, chunk.new_full((len(chunk), 1), time))


class Head(nn.Module, ABC):
    """horizon: H, steps of a chunk. width: D, numbers of each step."""

    times = 1  # how many times the network reads
    mode_at_zero = False  # True: zero noise gives the most likely chunk
    is_deterministic = False  # True: the noise changes nothing
    is_velocity = False  # True: the network predicts noise minus action, as a pre-trained PI0 does
    guides = False  # True: it has `guided`, so that a chunk continues an old one that it did not learn to continue
    steers = False  # True: it has `steered`, so that a critic's slope leads its samples
    keeps_unit = False  # True: no number of a chunk is beyond [-1, 1]
    needs_forward_derivative = False  # True: the loss takes the network's forward-mode derivative

    def __init__(self, *, horizon: int, width: int) -> None:
        super().__init__()
        self.horizon, self.width = horizon, width

    @property
    def outputs(self) -> int:
        """Return how many numbers the network predicts for each step."""
        return self.width

    @property
    def passes(self) -> int:
        """Return how often a sample asks the network."""
        return 1

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Return the shape of one chunk's standard normal noise."""
        return (1, self.horizon, self.width)

    @abstractmethod
    def errors(self, predict: Predict, target: Target) -> Tensor:
        """Return the loss of each number of each chunk -> [B, H, D]. The policy averages over those that count."""

    @abstractmethod
    def sample(self, predict: Predict, noise: Tensor) -> Tensor:
        """Sample chunks [B, H, D] from noise [B, *noise_shape], by tensors alone: it may become one CUDA graph."""
