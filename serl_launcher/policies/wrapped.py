"""Wraps a policy for acting together with the networks that improve, steer or condition it."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from serl_launcher.policies.base import Acting, Policy, ScaledPolicy
from serl_launcher.types import Batch, Metrics, Observation, Prefix


class Wrapped(Policy):
    """A policy that imitates as `policy` does and samples otherwise: a subclass says how, for one chunk each.

    Its weights, and what is published of them, are those of all its parts, by the part's name.
    """

    def __init__(self, policy: ScaledPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.horizon, self.history, self.inputs = policy.horizon, policy.history, policy.inputs
        self.tasks = policy.tasks
        self.imitation_target, self.entries = policy.imitation_target, policy.entries
        self.frozen = {f"policy.{name}" for name in policy.frozen}

    @property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        return self.policy.offsets

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.policy.noise_shape

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.policy(batch)

    @abstractmethod
    def choose(self, observation: Observation, task: Sequence[str], noise: Tensor) -> Tensor:
        """Return one chunk for each observation [B, H, A]. noise: [B, *noise_shape]."""

    def sample(
        self, observation: Observation, *, task: Sequence[str] = (), n: int = 1, noise: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> Tensor:  # fmt: skip
        """Sample n chunks, see Policy.sample. These policies do not continue a chunk, so there is no prefix."""
        if noise is None:
            count, device = len(next(iter(observation.values()))), self.policy.scale.center.device
            noise = torch.randn(n, count, *self.noise_shape, device=device)
        return torch.stack([self.choose(observation, task, each) for each in noise])

    def compile_layers(self) -> None:
        self.policy.compile_layers()

    def published(self) -> dict[str, Tensor]:
        found = {name: tensor for name, tensor in self.state_dict().items() if name.partition(".")[0] in self._buffers}
        for name, part in self.named_children():
            tensors = part.published() if isinstance(part, Acting) else part.state_dict()
            found |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        return found

    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            if buffer is not None:
                buffer.copy_(tensors[name])
        for name, part in self.named_children():
            own = {key[len(name) + 1 :]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
            part.load_published(own) if isinstance(part, Acting) else part.load_state_dict(own)
