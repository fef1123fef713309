"""PA-RL's candidates lie beside their steps, and leave with them."""

import copy

import pytest
import torch
from hydra.utils import instantiate

from serl_launcher.replay.mixture import ReplayMixture
from tests.shared.models import config_of

from .made import STATE

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ("policy.network.hidden=[16,16]", "critic.hidden=[16,16]", "policy.horizon=2", "algo.samples=2", "algo.kept=2")


@pytest.mark.slow
def test_candidates_survive_eviction_and_a_resumed_reader_and_are_those_of_their_steps(store, spec, whole):
    algorithm = instantiate(config_of("algo=parl", "n_action_steps=1", *SMALL).algo)(spec)

    def reader():
        made = ReplayMixture(store.folder, spec, {"online": 200}, {}, seed=0, derived=algorithm.derived)
        made.update(store.index.catalog(0, 10_000)[1])
        return made

    def steps(batch):
        return [tuple(map(int, row)) for row in batch.observation[STATE][:, 0, :2]]

    whole(range(15), 10)
    first, made = reader(), {}
    while len(made) < 15 * 9:  # all but those behind which a chunk of two has no second step
        drawn = copy.deepcopy(first.sample(64, algorithm.windows["update_candidates"], {"online": 1.0}))
        columns = algorithm.update_candidates(drawn)[1]
        first.derive(drawn.step_id, columns)
        made |= dict(zip(steps(drawn), columns["candidate"], strict=True))
    kept = first.state_dict()
    whole(range(15, 30), 10)  # of 200 steps: the first ten episodes and more are gone
    second = reader()
    second.load_state_dict(kept)
    drawn = second.sample(400, algorithm.windows["update_distil"], {"online": 1.0})
    gone = second.buffers["online"].tail
    assert gone >= 100
    assert set(steps(drawn)) == {step for step in made if 10 * step[0] + step[1] >= gone}
    for step, candidate in zip(steps(drawn), drawn.extras["derived.candidate"][:, 0], strict=True):
        torch.testing.assert_close(candidate, made[step])
