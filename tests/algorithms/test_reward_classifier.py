"""What the reward classifier learns, from labels that are known, and what its probabilities mean."""

import copy
from dataclasses import replace

import pytest
import torch
from serl_client import Feature

from serl_launcher.algorithms.reward_classifier import REMAINING, STAGE, SUCCESS, balanced
from serl_launcher.types import Decision
from tests.shared.models import STATE, algorithm_of, assert_same, batch, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = robot(states=2, cameras=())


def build(*words, seed=0, spec=SPEC):
    words += ("algo.hidden=[32]", "algo.optimizer.learning_rate=3e-3", "algo.calibration_optimizer.learning_rate=0.05")
    return algorithm_of(spec, "algo=reward_classifier", *words, seed=seed)


def rows(algorithm, seed, size=512, share=0.1):
    """Each row is an episode of its own: a success, which `share` of them are, has a positive first state."""
    made = batch(SPEC, size, window=algorithm.windows["update"], seed=seed)
    state = made.next_observation[STATE]
    shows = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share
    state[:, 0, 0] = state[:, 0, 0].abs() * torch.where(shows, 1.0, -1.0)
    return replace(made, extras={**made.extras, SUCCESS: shows[:, None], REMAINING: torch.zeros(size, 1).long()})


def scores(algorithm, batch):
    return algorithm.acting({STATE: batch.next_observation[STATE][:, 0]})


@pytest.mark.slow
def test_it_tells_success_of_states_that_it_has_not_seen_and_is_calibrated():
    algorithm = build()
    for seed in range(150):
        algorithm.update(rows(algorithm, seed))
    before = weights(algorithm.acting.logit)
    for seed in range(150, 300):
        metrics = algorithm.update_calibration(rows(algorithm, seed))
    assert_same(before, weights(algorithm.acting.logit))
    unseen = rows(algorithm, 1000, 4096)
    found, shows = scores(algorithm, unseen)[:, 0], unseen.extras[SUCCESS][:, 0]
    assert ((found > 0.5) == shows).float().mean() > 0.97
    assert found.mean().item() == pytest.approx(shows.float().mean().item(), abs=0.02)
    assert metrics["recall"] > 0.8
    assert metrics["false_alarms"] < 0.02
    state = {STATE: unseen.next_observation[STATE][:, 0]}
    decision, _ = algorithm.act(state, unseen.action[:, 0], None, task=(), noise=torch.zeros(4096, 1), explore=True)
    assert isinstance(decision, Decision)
    assert torch.equal(decision.extras["reached"][:, 0], found)
    assert not decision.action.any(), "the middle of the bounds"


@pytest.mark.slow
def test_from_labels_by_lot_it_learns_nothing():
    algorithm = build("algo._target_=tools.studies.reward.Shuffled")
    for seed in range(150):
        made = rows(algorithm, seed)
        made = replace(made, step_id=made.step_id + 512 * seed)  # each row is an episode that was not there before
        (algorithm.update if seed < 100 else algorithm.update_calibration)(made)
    unseen = rows(algorithm, 1000, 4096)
    found, shows = scores(algorithm, unseen), unseen.extras[SUCCESS][:, 0]
    assert abs(found[shows].mean() - found[~shows].mean()) < 0.2


@pytest.mark.slow
def test_calibration_undoes_the_balance_of_the_labels():
    algorithm = build()
    for seed in range(60):
        algorithm.update(rows(algorithm, seed, share=0.5))
    for seed in range(200):
        algorithm.update_calibration(rows(algorithm, seed, share=0.02))
    rare = rows(algorithm, 1000, 8192, share=0.02)
    assert scores(algorithm, rare).mean().item() == pytest.approx(0.02, abs=0.01)


def test_the_last_rows_of_a_success_show_it_and_those_before_them_are_unknown():
    algorithm = build()
    algorithm.positive, algorithm.unsure = 2, 3
    made = batch(SPEC, 16, window=algorithm.windows["update"])
    assert STAGE not in algorithm.windows["update"].offsets, "no robot tells of stages where there is one"
    left, won = torch.arange(8).repeat(2)[:, None], torch.arange(16)[:, None] < 8
    made = replace(made, extras={SUCCESS: won, REMAINING: left})
    assert algorithm.labels(made)[:, 0].tolist() == [1, 1] + [0] * 14
    assert algorithm.is_known(made)[:, 0].tolist() == [True] * 2 + [False] * 3 + [True] * 11


def test_stages_before_success_are_learned_from_their_column_each_for_itself():
    algorithm = build("task.stages=3", spec=replace(SPEC, extras={STAGE: Feature((), "int32")}))
    for seed in range(150):
        made = rows(algorithm, seed)
        reached = made.next_observation[STATE][:, :, 1]  # [B, 1]: the second state shows the stages, the first success
        stage = (reached > 0).int() + (reached > 0.7).int()
        made = replace(made, extras={**made.extras, STAGE: stage})
        (algorithm.update if seed < 100 else algorithm.update_calibration)(made)
    labels = algorithm.labels(made)
    success = made.extras[SUCCESS]
    assert labels.tolist() == torch.cat([(stage >= 1) | success, (stage >= 2) | success, success], 1).float().tolist()
    assert ((scores(algorithm, made) > 0.5) == labels).float().mean(0).min() > 0.95


@pytest.mark.parametrize("focus", [0, 0.5, 2])
def test_a_row_of_which_it_is_sure_has_a_finite_gradient(focus):
    algorithm = build(f"algo.focus={focus}")
    torch.nn.init.constant_(algorithm.acting.logit.head[-1].bias, -40.0)
    assert algorithm.update(rows(algorithm, 0))["gradient"].isfinite()


@pytest.mark.parametrize("labels", [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_both_labels_weigh_a_half_where_there_are_both(labels):
    label = torch.tensor([labels, [1, 0, 1, 0]]).float().T  # [B, n]: another stage does not change it
    weight = balanced(label, torch.tensor([[1.0], [1.0], [0.0], [1.0]]))
    assert weight.sum(0).tolist() == [1, 1]
    assert not weight[2].any()
    if 0 < sum(labels) < 4:
        assert (weight * label)[:, 0].sum() == 0.5
    assert not balanced(label, torch.zeros(4, 1)).any()


def test_it_goes_on_bit_by_bit_from_its_state():
    straight, resumed = build(), build(seed=1)
    straight.update(rows(straight, 0))
    straight.update_calibration(rows(straight, 1))
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for algorithm in (straight, resumed):
        algorithm.update(rows(algorithm, 2))
        algorithm.update_calibration(rows(algorithm, 3))
    assert_same(straight.state_dict(), resumed.state_dict())
