"""What a judge makes of a reward model's numbers, and which images the model is shown."""

import copy
from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate

from serl_launcher.algorithms.judge import INDEX, platt, spread_over
from serl_launcher.algorithms.reward_classifier import REACHED, REMAINING, SUCCESS
from serl_launcher.policies.reward_model import RewardModel
from tests.shared.models import CAMERA, assert_same, batch, config_of, robot

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = robot(states=2, shape=(4, 4, 3))


class Bright(RewardModel):
    """Says how bright the newest image is, or what its `says` says of the images. **Assumed:** a real one has the same
    shapes and is as deterministic; one in 16 bits is not, to its rounding."""

    inputs = (CAMERA,)

    def __init__(self, spec, *, frames=1, says=None):
        self.frames, self.says, self.asked = frames, says, []

    def score(self, images, task):
        seen = images[CAMERA]
        assert seen.shape[1:] == (self.frames, 4, 4, 3)
        assert len(task) == len(seen)
        self.asked.append(seen[:, :, 0, 0, 0])
        return self.says(seen) if self.says else seen[:, -1, 0, 0, 0].float() / 25 - 5


def build(*words, **model):
    config = config_of("algo=judge", *words)
    return instantiate(config.algo, model=lambda spec: Bright(spec, **model))(SPEC)


def rows(algorithm, seed, size=64, share=0.3):
    """Each row is an episode of its own; a success, which `share` of them are, is bright at its end."""
    made = batch(SPEC, size, window=algorithm.windows["update_calibration"], seed=seed)
    shows = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share
    image = made.observation[CAMERA]
    image[:, -1] = torch.where(shows[:, None, None, None], 200 + image[:, -1] // 5, image[:, -1] // 3)
    extras = {SUCCESS: shows[:, None], REMAINING: torch.zeros(size, 1).long(), INDEX: torch.zeros(size, 1).long()}
    return replace(made, extras={**made.extras, **extras}, step_id=torch.arange(size) + size * seed)


def says(algorithm, made):
    image = made.observation[CAMERA][:, -1]
    nothing = torch.zeros(len(image), 2)
    task = ("reach",) * len(image)
    decision, carry = algorithm.act({CAMERA: image}, nothing, None, task=task, noise=nothing, explore=True)
    return decision.extras[REACHED][:, 0], decision, carry


def test_a_model_that_sees_success_becomes_a_probability_that_a_threshold_tells():
    algorithm = build()
    for seed in range(8):
        metrics = algorithm.update_calibration(rows(algorithm, seed))
    assert metrics["scored"] == 512
    assert (metrics["recall"], metrics["false_alarms"]) == (1, 0)
    unseen = rows(algorithm, 100)
    found, decision, carry = says(algorithm, unseen)
    assert ((found > 0.9) == unseen.extras[SUCCESS][:, 0]).all()
    assert carry is None
    assert not decision.action.any(), "the middle of the bounds"


@pytest.mark.parametrize("knows", ["nothing", "the opposite", "one number"])
def test_a_model_that_does_not_see_success_says_its_share_and_no_threshold_is_reached(knows):
    ways = {
        "nothing": lambda seen: 20 * torch.randn(len(seen)),
        "the opposite": lambda seen: -seen[:, -1, 0, 0, 0].float(),
        "one number": lambda seen: torch.full((len(seen),), 13.8),
    }
    torch.manual_seed(0)
    algorithm = build(says=ways[knows])
    for seed in range(16):
        algorithm.update_calibration(rows(algorithm, seed))
    found, _, _ = says(algorithm, rows(algorithm, 100))
    assert found.max() < 0.5
    assert found.mean() == pytest.approx(0.3, abs=0.05)


def test_before_it_is_calibrated_it_says_that_nothing_is_success():
    algorithm = build()
    assert says(algorithm, rows(algorithm, 0))[0].max() < 1e-9
    algorithm.update_calibration(rows(algorithm, 0, share=0.0))
    assert says(algorithm, rows(algorithm, 0))[0].max() < 1e-9, "of failures alone nothing is learned"


def test_the_fit_is_that_of_most_likelihood():
    random = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(4000, generator=random, dtype=torch.float64) + 100
    shows = torch.rand(4000, generator=random) < torch.sigmoid(1.5 * (z - 101))
    target = torch.where(shows, 0.9999, 0.0001).double()
    a, b = platt(z, target)
    found = torch.tensor([a, b], dtype=torch.float64, requires_grad=True)
    torch.nn.functional.binary_cross_entropy_with_logits(found[0] * z + found[1], target).backward()
    assert found.grad.abs().max() < 1e-6
    assert a == pytest.approx(1.5, rel=0.1)
    apart = platt(torch.tensor([0.0, 1, 2, 3]).double(), torch.tensor([1 / 4, 1 / 4, 3 / 4, 3 / 4]).double())
    assert 0 < apart[0] < 10, "finite where a threshold tells all"


def test_each_row_is_asked_of_once_and_a_late_verdict_counts():
    algorithm = build()
    made = rows(algorithm, 0)
    algorithm.update_calibration(made)
    lost = replace(made, extras={**made.extras, SUCCESS: torch.zeros(64, 1, dtype=torch.bool)})
    metrics = algorithm.update_calibration(lost)
    assert [len(asked) for asked in algorithm.model.asked] == [64]
    assert metrics["recall"] == 0, "there are no successes any more"


def test_rows_of_which_nobody_knows_are_not_asked_of():
    algorithm = build("algo.positive=2", "algo.unsure=3")
    left = torch.arange(8).repeat(8)[:, None]
    made = rows(algorithm, 0, share=1.1)
    made = replace(made, extras={**made.extras, REMAINING: left})
    shows, is_known = algorithm.labels(made)
    assert shows[:8].tolist() == [True] * 2 + [False] * 6
    assert is_known[:8].tolist() == [True] * 2 + [False] * 3 + [True] * 3
    algorithm.update_calibration(made)
    assert len(algorithm.model.asked[0]) == 40


def test_of_a_stored_row_it_is_shown_its_episode_up_to_there_evenly_spread():
    algorithm = build("algo.kept=8", "algo.every=4", frames=4)
    (window,) = algorithm.windows.values()
    after = [1, 3, 4, 5, 20, 28, 60]  # numbers of the observations behind the rows
    shown = torch.tensor([[max(0, t - 1 + back) for back in window.offsets[CAMERA]] for t in after])
    image = shown[:, :, None, None, None].expand(-1, -1, 4, 4, 3).to(torch.uint8)
    algorithm.model.score(algorithm._stored({CAMERA: image}, torch.tensor(after)[:, None] - 1), ("",) * len(after))
    assert algorithm.model.asked[0].tolist() == [
        [0, 0, 1, 1], [0, 0, 3, 3], [0, 0, 4, 4], [0, 1, 1, 5], [0, 8, 12, 20], [0, 8, 20, 28], [32, 40, 52, 60],
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, 5, 37, 200])
def test_of_an_episode_under_way_it_is_shown_the_first_image_the_newest_and_some_evenly_between(length):
    algorithm = build("algo.kept=8", frames=4)
    carry = None
    for at in range(length):
        now = torch.full((2, 4, 4, 3), at, dtype=torch.uint8)
        words = {"task": ("", ""), "noise": torch.zeros(2, 1), "explore": False}
        _, carry = algorithm.act({CAMERA: now}, torch.zeros(2, 2), carry, **words)
        first, *between, newest = (int(each) for each in algorithm.model.asked[-1][0])
        assert (first, newest) == (0, at)
        for place, each in enumerate(between, 1):
            assert abs(each - at * place / 3) <= max(1, at / 4)
    assert torch.equal(algorithm.model.asked[-1][0], algorithm.model.asked[-1][1])


def test_a_whole_episode_is_scored_as_its_rows_are():
    algorithm = build(frames=3)
    seen = torch.arange(10)[:, None, None, None].expand(-1, 4, 4, 3).to(torch.uint8)
    assert algorithm.episode_scores({CAMERA: seen.numpy()}, "reach").shape == (10, 1)
    assert algorithm.model.asked[9].tolist() == [[0, 4, 9]]
    assert spread_over(5, 1) == [4]


def test_it_goes_on_bit_by_bit_from_its_state_and_asks_of_no_row_again():
    straight, resumed = build(), build()
    straight.update_calibration(rows(straight, 0))
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for algorithm in (straight, resumed):
        algorithm.update_calibration(rows(algorithm, 0))
        algorithm.update_calibration(rows(algorithm, 1))
    assert len(resumed.model.asked) == 1
    assert_same(straight.state_dict(), resumed.state_dict())
