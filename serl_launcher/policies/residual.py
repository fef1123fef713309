"""Builds what improves a policy that runs elsewhere: small edits of its actions, and critics that choose among them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from serl_client.errors import ConfigError
from torch import Tensor

from serl_launcher.networks.critics import Critic
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.policies.base import Acting
from serl_launcher.policies.chunk import Bounded
from serl_launcher.policies.editor import Editor
from serl_launcher.policies.improved import best
from serl_launcher.types import Observation


class BasePolicy(ABC):
    """A policy that is only asked: nothing of it is trained, saved or published.

    n_action_steps: n, actions of a chunk that run before the next one is asked for.
    inputs: names of the observations that it is asked with. scale: of its actions.
    """

    n_action_steps: int
    inputs: Sequence[str]
    scale: ActionScale

    @abstractmethod
    def ask(self, observation: Observation, task: Sequence[str]) -> tuple[Tensor, str]:
        """Return a chunk for each observation [B, n, A], in the robot's units, on the CPU; a row without one is NaN.

        observation: {name: [B, ...]}, on the CPU. The text says why rows have none; "": all have one.
        """


class Residual(Acting):
    """Of an action of the base and edits of it, the one with the largest value; one action per decision.

    Before the editor has learned anything (`has_edits`) the base acts alone, in practice and in evaluations. So the
    critics first learn what the base is worth.
    samples: n, edits of an action that are compared.
    """

    horizon = 1
    has_edits: Tensor  # bool []

    def __init__(self, scale: ActionScale, critic: Critic, editor: Editor, *, samples: int) -> None:
        super().__init__()
        if not 0 < editor.reach <= 1 or samples < 1:
            raise ConfigError(
                f"algo.reach={editor.reach}, algo.samples={samples}: say a reach of more than 0 and at most 1, and at "
                "least 1 sample"
            )
        self.scale, self.critic, self.editor, self.samples = scale, critic, editor, samples
        self.register_buffer("has_edits", torch.tensor(False))

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """[n, 1, A]: the noise of each edit."""
        return (self.samples, 1, len(self.scale.center))

    def choose(self, observation: Observation, base: Tensor, noise: Tensor) -> Tensor:
        """Return one action for each observation [B, 1, A]. base: [B, 1, A]. noise: [B, n, 1, A]."""
        edited, _ = self.edited(observation, base.expand(self.samples, -1, -1, -1), noise.transpose(0, 1))
        candidates = torch.cat([base.unsqueeze(0), edited])
        chosen = best(candidates, self.critic.mean_value(observation, candidates))
        return torch.where(self.has_edits, chosen, base)

    def edited(self, observation: Observation, base: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Edit actions [n, B, 1, A] within the bounds -> [n, B, 1, A], and the edits' log density [n, B]."""
        unit, density = self.editor(observation, self.scale.to_unit(base), noise)
        return self.scale.from_unit(Bounded.apply(unit, *self.scale.limits())), density  # type: ignore[arg-type]
