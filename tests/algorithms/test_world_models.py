"""What a controller sees and remembers, which episodes count for which candidate, and how the evolution goes on."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from serl_client.errors import ConfigError

from serl_launcher.algorithms.world_models import CANDIDATE, NONE, REMAINING, RETURN
from serl_launcher.store.extras import with_extras
from tests.shared.models import CAMERA, algorithm_of, assert_same, batch, config_of, differences, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [
    "algo.widths=[4,4,4]", "algo.codes=3", "algo.hidden=4", "algo.episode_steps=5", "algo.population=4",
    "algo.rollouts=2",
]  # fmt: skip
PLAIN = robot(states=0, actions=2, shape=(16, 16, 3))
SPEC = with_extras(PLAIN, config_of("algo=world_models_tiny").extras)


def build(*words, spec=PLAIN, algo="world_models_tiny", seed=0):
    return algorithm_of(spec, f"algo={algo}", *(SMALL if "tiny" in algo else ()), *words, seed=seed)


def images(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {CAMERA: torch.randint(256, (rows, 16, 16, 3), generator=generator, dtype=torch.uint8)}


def decide(algorithm, rows=3, carry=None, *, explore=True, seed=3, previous=None):
    noise = torch.randn(64, *algorithm.acting.noise_shape, generator=torch.Generator().manual_seed(seed))[:rows]
    previous = torch.zeros(rows, 2) if previous is None else previous
    asked = {"task": ("",) * rows, "noise": noise, "explore": explore}
    return algorithm.act(images(rows, seed), previous, carry, **asked)


def episodes(algorithm, candidates, values, *, generation=None, length=5, ends="truncated", first_id=0):
    """The rows of whole episodes of these candidates."""
    window, steps = algorithm.windows["update_controller"], range(algorithm.episode_steps)
    rows = batch(SPEC, len(candidates), window=window, length=length, ends=ends)
    generation = int(algorithm.actor.generation) if generation is None else generation
    told = torch.tensor([[(generation, index, step) for step in steps] for index in candidates])
    extras = {
        CANDIDATE: (told * rows.valid[..., None]).int(), RETURN: torch.tensor(values).float()[:, None],
        REMAINING: torch.full((len(candidates), 1), length - 1),
    }  # fmt: skip
    return replace(rows, extras=extras, step_id=torch.arange(len(candidates)) + first_id)


def counted(algorithm, rows):
    return int(algorithm.update_controller(rows)["counted"])


def test_the_controller_has_as_many_weights_as_the_published_one():
    algorithm = build(algo="world_models", spec=robot(states=0, actions=3, shape=(96, 96, 3)))
    assert algorithm.actor.mean.numel() == algorithm.evolution.size == 867
    assert algorithm.actor.population.shape == (64, 3, 289)


# -- acting


def test_an_episode_keeps_its_candidate_whatever_is_published_meanwhile():
    algorithm = build()
    first, carry = decide(algorithm, 64)
    assert set(first.extras[CANDIDATE][:, 1].tolist()) == {0, 1, 2, 3}
    assert first.extras[CANDIDATE][:, [0, 2]].tolist() == [[1, 0]] * 64
    untouched = copy.deepcopy(carry)
    expected, _ = decide(algorithm, 64, untouched, seed=4)
    for _ in range(2):
        for index in range(4):
            algorithm.update_controller(episodes(algorithm, [index], [float(index)], first_id=10 * index + _))
    assert algorithm.actor.generation == 2
    second, carry = decide(algorithm, 64, carry, seed=4)
    assert torch.equal(second.action, expected.action)
    assert torch.equal(second.extras[CANDIDATE][:, :2], first.extras[CANDIDATE][:, :2])
    assert (second.extras[CANDIDATE][:, 2] == 1).all()
    assert (decide(algorithm, 64)[0].extras[CANDIDATE][:, 0] == 2).all()


def test_the_memory_takes_what_the_robot_did_and_each_row_is_alike_in_a_batch_and_alone():
    algorithm, moved = build(), torch.tensor([[2.0, -1.0], [0.5, 0.0], [-2.0, 2.0]])
    _, carry = decide(algorithm)
    together, (_, _, _, hidden, _) = decide(algorithm, carry=carry, previous=moved, seed=4)
    code = carry[2]
    expected, _ = algorithm.rnn.lstm(code[:, None], moved[:, None] / 2)  # the robot's reach is 2
    torch.testing.assert_close(hidden, expected[:, 0].detach())
    for row in range(3):
        noise = torch.randn(64, *algorithm.acting.noise_shape, generator=torch.Generator().manual_seed(4))[row, None]
        seen = {CAMERA: images(3, 4)[CAMERA][row, None]}
        alone, _ = algorithm.act(
            seen, moved[row, None], tuple(part[row, None] for part in carry), task=("",), noise=noise, explore=True
        )
        torch.testing.assert_close(together.action[row], alone.action[0])


def test_a_controller_sees_code_and_memory_or_the_code_alone():
    for remembers, inputs in ((True, 3 + 4), (False, 3)):
        algorithm = build(f"algo.remembers={str(remembers).lower()}")
        controller, code, hidden = torch.randn(2, 2, inputs + 1), torch.randn(2, 3), torch.randn(2, 4)
        seen = torch.cat([code, hidden][: 1 + remembers], 1)
        expected = (controller[:, :, :-1] @ seen[..., None]).squeeze(-1) + controller[:, :, -1]
        torch.testing.assert_close(algorithm.actor.control(controller, code, hidden), expected.tanh())


def test_an_evaluation_acts_with_the_mean_and_without_noise():
    algorithm = build()
    for index in range(4):
        algorithm.update_controller(episodes(algorithm, [index] * 2, [float(index)] * 2, first_id=9 * index))
    assert algorithm.evolution.generation == 2
    decision, carry = decide(algorithm, explore=False)
    assert not decision.extras[CANDIDATE].any()
    assert not carry[0].any()
    mean, _ = algorithm.vae.encoder(algorithm.actor.pictures(images(3, 3)))
    expected = algorithm.actor.control(algorithm.actor.mean.expand(3, 2, 8), mean, torch.zeros(3, 4))
    torch.testing.assert_close(decision.action[:, 0], 2 * expected.detach())
    assert decision.action.any()


# -- which episodes count


def spoiled(rows, place, value):
    extras = {**rows.extras, CANDIDATE: rows.extras[CANDIDATE].clone()}
    extras[CANDIDATE][place] = value
    return replace(rows, extras=extras)


def test_an_episode_counts_only_if_one_candidate_gave_all_of_its_actions_and_it_ended_properly(caplog):
    algorithm = build()

    def made(**options):
        return episodes(algorithm, [2], [1.0], **options)

    never = {
        "another candidate took over": spoiled(made(), (0, 2, 1), 1),
        "the memory was lost on the way": spoiled(made(), (0, slice(2, None), 2), torch.arange(3).int()),
        "a part that was cut off before": spoiled(made(), (0, slice(None), 2), torch.arange(3, 8).int()),
        "a step without an action of its own": spoiled(made(), (0, 1), 0),
        "a crash": made(ends=""),
        "a person held the run": made(length=4),
        "a person": replace(made(), intervened=torch.tensor([[False, True, False, False, False]])),
        "a row that repeats another": replace(made(), weight=torch.zeros(1)),
        "an earlier generation": made(generation=0),
        "a later generation": made(generation=2),
    }
    before = weights(algorithm)
    for rows in never.values():
        assert counted(algorithm, rows) == 0
    assert caplog.messages == [
        "an episode of 4 steps was truncated before algo.episode_steps=5 and does not count; if that is the task's "
        "time limit, begin another run with algo.episode_steps=4"
    ]
    assert_same(before, weights(algorithm))
    assert counted(algorithm, made(ends="terminated", length=2)) == 1
    assert counted(algorithm, made(ends="terminated", length=2)) == 0, "it was counted before"
    assert counted(algorithm, made(length=5, first_id=1)) == 1
    assert counted(algorithm, made(first_id=2)) == 0, "it has as many as it needs"
    assert algorithm.returns[2].tolist() == [1.0, 1.0]
    assert algorithm.actor.due[: algorithm.actor.left].tolist() == [0, 1, 3]
    with pytest.raises(ConfigError, match=r"has 9 steps, and algo\.episode_steps=5"):
        counted(algorithm, replace(made(), extras={**made().extras, REMAINING: torch.tensor([[8]])}))


def test_only_those_candidates_act_that_still_need_episodes():
    algorithm = build()
    algorithm.update_controller(episodes(algorithm, [0, 0, 3, 3, 1], [0.0] * 5))
    assert set(decide(algorithm, 64)[0].extras[CANDIDATE][:, 1].tolist()) == {1, 2}


def test_the_mean_of_a_candidates_returns_less_what_its_weights_take_is_what_evolution_sees():
    algorithm = build("algo.weight_penalty=0.5")
    population, told = algorithm.evolution.ask(), []
    tell, algorithm.evolution.tell = algorithm.evolution.tell, lambda cost: (told.append(cost), tell(cost))
    for order in ([3, 1, 0, 2], [2, 0, 1, 3]):
        ids = 0 if order[0] == 3 else 10
        algorithm.update_controller(episodes(algorithm, order, [2.0 * index + ids for index in order], first_id=ids))
    expected = 0.5 * population.square().mean(1) - (2.0 * torch.arange(4) + 5)
    torch.testing.assert_close(told, [expected])
    assert algorithm.average == 8.0
    assert algorithm.best == 11.0
    assert (algorithm.told == NONE).all()


@pytest.mark.slow
def test_evolution_finds_the_controller_that_the_returns_ask_for():
    """Every return is minus the squared distance of the controller that acted to a goal, as an episode would tell."""
    algorithm = build("algo.rollouts=1", "algo.weight_penalty=0", "algo.population=12")
    goal, number = torch.linspace(-1, 1, algorithm.evolution.size), 0

    def distance(controller):
        return float((controller.flatten() - goal).square().sum())

    begun = distance(algorithm.actor.mean)
    while algorithm.evolution.generation < 60:
        decision, (_, controller, *_) = decide(algorithm, 1, seed=number)
        told = decision.extras[CANDIDATE][0].tolist()
        assert counted(algorithm, episodes(algorithm, [told[1]], [-distance(controller[0])], first_id=number)) == 1
        number += 1
    assert number == 59 * 12, "each candidate acted once"
    assert distance(algorithm.actor.mean) < 0.1 * begun


# -- V and M


def rows_of(algorithm, name, seed=0, size=6):
    drawn = batch(SPEC, size, window=algorithm.windows[name], seed=seed, derived=algorithm.derived)
    generator = torch.Generator().manual_seed(seed)
    derived = {key: value for key, value in drawn.extras.items() if key.startswith("derived")}
    codes = {key: torch.randn(value.shape, generator=generator).half() for key, value in derived.items()}
    return replace(drawn, extras=drawn.extras | codes)


def test_each_update_moves_its_own_part_and_the_encoding_moves_none():
    algorithm = build()
    parts = {"update_vae": ("vae.", "actor.encoder."), "update_rnn": ("rnn.", "actor.lstm."), "update_codes": ()}
    for update, own in parts.items():
        before = weights(algorithm)
        getattr(algorithm, update)(rows_of(algorithm, update))
        moved = differences(before, weights(algorithm))
        assert all(name.startswith(own) for name in moved)
        assert bool(moved) == bool(own)


def test_what_is_encoded_is_what_the_actor_sees_and_what_lies_behind_an_episode_teaches_nothing():
    algorithm = build()
    rows = rows_of(algorithm, "update_codes")
    _, columns = algorithm.update_codes(rows)
    mean, log_variance = algorithm.vae.encoder(algorithm.actor.pictures({CAMERA: rows.observation[CAMERA][:, 0]}))
    torch.testing.assert_close(columns["mean"], mean.detach().half())
    torch.testing.assert_close(columns["log_variance"], log_variance.detach().half())
    other = build()
    short = replace(rows_of(algorithm, "update_rnn"), valid=(torch.arange(5) < 3).expand(6, 5))
    behind = {name: value + 5 * (torch.arange(5) >= 3)[:, None].half() for name, value in short.extras.items()}
    found = [each.update_rnn(rows) for each, rows in
             ((algorithm, short), (other, replace(short, extras=behind, action=short.action)))]  # fmt: skip
    assert found[0]["code_unlikeliness"] == found[1]["code_unlikeliness"]
    assert_same(algorithm.rnn.state_dict(), other.rnn.state_dict())


# -- resuming


def saved(algorithm):
    file = io.BytesIO()
    torch.save(algorithm.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.slow
def test_a_run_that_stops_between_any_two_updates_of_any_phase_goes_on_bit_by_bit():
    names = ["update_vae"] * 2 + ["update_codes"] + ["update_rnn"] * 2 + ["update_controller"] * 12
    straight, states = build(), []

    def made(algorithm, place):
        name = names[place]
        if name != "update_controller":
            return getattr(algorithm, name)(rows_of(algorithm, name, seed=place))
        chosen = decide(algorithm, 1, seed=place)[0].extras[CANDIDATE][0, 1]
        return algorithm.update_controller(episodes(algorithm, [int(chosen)], [float(place % 5)], first_id=place))

    for place in range(len(names)):
        states.append(saved(straight))
        made(straight, place)
    assert straight.evolution.generation == 2
    assert (straight.told != NONE).any(), "the last one stops within a generation"
    for place, state in enumerate(states):
        resumed = build(seed=1 + place)
        resumed.load_state_dict(state)
        for following in range(place, len(names)):
            made(resumed, following)
        assert_same(straight.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("word", ["remembers=false", "population=6", "rollouts=1", "diagonal=true", "sigma=0.7"])
def test_another_evolution_begins_anew_with_what_was_learned_to_see_and_to_remember(word):
    trained = build()
    trained.update_vae(rows_of(trained, "update_vae"))
    trained.update_rnn(rows_of(trained, "update_rnn"))
    trained.update_controller(episodes(trained, [0, 1, 2, 3] * 2, [0.0, 1.0, 2.0, 3.0] * 2))
    other = build(f"algo.{word}", seed=1)
    begun = {**weights(other.evolution), "population": other.actor.population.clone()}
    other.load_state_dict(saved(trained))
    assert_same(begun, {**weights(other.evolution), "population": other.actor.population})
    assert other.actor.left == other.evolution.population
    assert not counted(other, episodes(other, [0, 1], [9.0, 9.0], generation=1)), "a controller of before had it"
    assert other.actor.generation == trained.actor.generation + 1
    assert decide(other, 1)[0].extras[CANDIDATE][0, 0] == other.actor.generation
    assert counted(other, episodes(other, [0], [9.0])) == 1
    for part in ("vae", "rnn"):
        assert_same(getattr(other, part).state_dict(), getattr(trained, part).state_dict())
    assert torch.equal(other.actor.encoder.mean.weight, trained.vae.encoder.mean.weight)
    assert_same(other.vae_optimizer.state_dict(), trained.vae_optimizer.state_dict())
