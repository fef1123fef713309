"""A reward model that anybody may have written, in place of lerobot's. **Assumed:** a real one takes longer, and is not
right so often; what it says is as deterministic."""

import torch

from serl_launcher.policies.reward_model import RewardModel
from tests.shared.common import STATE


class Near(RewardModel):
    """Says how near the fake arm's point is to its goal, and how much nearer than in the first of three."""

    inputs = (STATE,)
    frames = 3

    def __init__(self, spec, **options):
        assert STATE in spec.observation

    def score(self, images, task):
        assert set(task) == {"reach the goal"}
        left = images[STATE][:, :, 4:6].norm(dim=-1)  # [B, 3]
        return (torch.minimum(left[:, 0], left[:, 1]) - 5 * left[:, 2]).cpu()
