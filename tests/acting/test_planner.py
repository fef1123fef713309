"""Who acts need not be a policy: a critic that tries some actions and takes the best has no samples and no imitation
loss, and is trained, counted, published, loaded and asked like any other."""

import copy

import numpy as np
import pytest
import torch

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.networks.mlp import ActionScale, StateEncoder, mlp
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.policies.base import Acting, Policy
from serl_launcher.training import budget, memory
from serl_launcher.types import Decision, Window
from tests.shared.common import STATE
from tests.shared.inference import published
from tests.shared.models import batch

from .toy import ask

TRIED = 16  # actions of one decision


class Planner(Acting):
    """Scores TRIED random actions by its network, and takes the best."""

    horizon = 1
    mode_at_zero = True

    def __init__(self, spec):
        super().__init__()
        self.encoder, self.scale = StateEncoder(spec), ActionScale(spec.action)
        self.network = mlp(self.encoder.size + spec.action.shape[0], [16], 1, layer_norm=False)

    @property
    def noise_shape(self):
        return (TRIED, *self.scale.center.shape)

    def score(self, observation, action):
        """Actions [B, n, A] -> [B, n]."""
        seen = self.encoder(observation).unsqueeze(1).expand(-1, action.shape[1], -1)
        return self.network(torch.cat([seen, self.scale.to_unit(action)], -1)).squeeze(-1)

    def best(self, observation, noise):
        tried = self.scale.from_unit(noise.tanh())  # [B, n, A]
        return tried[torch.arange(len(tried)), self.score(observation, tried).argmax(1)].unsqueeze(1)


class Plans(Algorithm):
    """Learns the next reward, and plans one step ahead."""

    def __init__(self, spec):
        super().__init__()
        self.planner = Planner(spec)
        self.optimizer = Optimizer(self.planner.network, learning_rate=1e-3)
        self.windows = {"update": Window({STATE: (0,), "action": (0,)})}

    @property
    def acting(self):
        return self.planner

    def update(self, batch):
        now = {name: value[:, 0] for name, value in batch.observation.items()}
        error = self.planner.score(now, batch.action).squeeze(1) - batch.reward[:, 0]
        loss = (batch.weight * error.square()).mean()
        self.optimizer.step(loss)
        return {"loss": loss.detach()}

    def act(self, observation, previous_action, carry, *, noise, explore, **_):
        return Decision(self.planner.best(observation, noise if explore else self.calm(noise))), carry


def test_a_planner_without_samples_is_counted_trained_published_loaded_and_asked(spec, tmp_path):
    learner, actor = Plans(spec), Plans(spec)
    assert memory.needed(lambda: Plans(spec), spec, 8, 1, 0).activations > 0
    assert budget.of_acting(lambda: Plans(spec)).swapped > 0
    assert learner.update(batch(spec, 8, window=learner.windows["update"]))["loss"].isfinite()
    reference, host = copy.deepcopy(learner), PolicyHost(actor, spec, "cpu")
    assert not isinstance(host.acting, Policy)
    assert not hasattr(actor, "optimizer")
    before = host.answer([Question(b"arm", ask(seed=5, explore=True, key=0.3))])[0].arrays["action"]
    host.load(3, published(tmp_path, learner))
    (answer,) = host.answer([Question(b"arm", ask(seed=5, explore=True, key=0.3))])
    noise = torch.randn(reference.planner.noise_shape, generator=torch.Generator().manual_seed(5)).unsqueeze(0)
    expected = reference.planner.best({STATE: torch.full((1, 8), 0.3)}, noise)[0]
    assert answer.version == 3
    assert not np.array_equal(answer.arrays["action"], before)
    assert np.array_equal(answer.arrays["action"], expected.detach().numpy())


def test_an_algorithm_that_forgets_to_say_how_its_planner_acts_is_told(spec):
    class Forgets(Plans):
        act = Algorithm.act

    with pytest.raises(NotImplementedError, match="Planner has no samples, so write `act`"):
        PolicyHost(Forgets(spec), spec, "cpu").answer([Question(b"arm", ask())])
