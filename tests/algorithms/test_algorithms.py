"""What every algorithm promises, found by its yaml: it composes, updates, learns a toy task and resumes bit by bit.

Its policy is the one that the yaml chooses.
"""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from serl_client import ConfigError, Feature

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.replay.batches import blank
from serl_launcher.training.counters import value_error
from serl_launcher.types import Window
from tests.shared.models import CAMERA, CONFIG, REACH, STATE, act, assert_same, batch, config_of, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

ALGORITHMS = sorted(path.stem for path in (CONFIG / "algo").glob("*.yaml"))
ALGORITHMS.remove("reward_classifier")  # nobody acts with it: test_reward_classifier.py
SPEC = robot(states=2, shape=(8, 8, 3))
IMAGE = torch.arange(8 * 8 * 3, dtype=torch.uint8).view(8, 8, 3)  # what the toy's camera always sees
FITTED = {
    "mean": {STATE: np.array([1.0, -2.0]), "action": np.zeros(2)},
    "std": {STATE: np.array([0.5, 0.0]), "action": np.full(2, REACH)},
    "low": {"action": np.full(2, -REACH)}, "high": {"action": np.full(2, REACH)},
}  # fmt: skip
EVOLVED = (  # of one that sees, predicts and evolves
    "algo.picture=32", "algo.widths=[4,4,4]", "algo.codes=3", "algo.hidden=4", "algo.episode_steps=3",
    "algo.population=6", "algo.rollouts=2",
)  # fmt: skip
RATES = [  # options that make an algorithm learn the toy in few updates
    "algo.learning_rate", *(f"algo.{part}optimizer.learning_rate" for part in (
        "", "critic_", "value_", "one_step_", "edit_", "noise_", "policy_",
    )),
]  # fmt: skip
TOY = {  # what else an algorithm may have: a short chunk, nothing cloned to stay near, no schedule
    "algo.distill_weight": 0.0, "algo.optimizer.warmup": 0, "policy.horizon": 2, "policy.head.steps": 3,
    "critic.values.low": -20.0, "critic.values.high": 0.0, "algo.samples": 8, "algo.kept": 4, "algo.steps": 3,
    "algo.step_size": 0.05, "algo.temperature": 0.1, "algo.share": 0.05,
}  # fmt: skip
TINY = ("policy=pi0_tiny", "policy.gemma.depth=2", "policy.prompt_tokens=8", "head.steps=5")
PLANNED = (  # the sizes of one that plans
    "algo.model.latent=16", "algo.model.hidden=[32,32]", "algo.model.encoder_hidden=[32]", "algo.hidden=[32,32]",
    "algo.mppi.samples=32", "algo.mppi.prior_samples=4", "algo.mppi.elites=8", "algo.mppi.iterations=3",
)  # fmt: skip
IMAGINED = (  # of one that learns in imagination
    "algo.deter=16", "algo.hidden=8", "algo.units=8", "algo.length=3", "algo.imagined=2", "algo.optimizer.warmup=0",
)  # fmt: skip
CRITICS = sorted(path.stem for path in (CONFIG / "critic").glob("*.yaml"))
DREAMERS = {name for name in ALGORITHMS if name.startswith("dreamer")}  # states are not normalised
PICTURES = {"world_models", "world_models_tiny"}  # no states are seen
TAUGHT = (  # where a toy says nothing: recap needs many rows of each kind (test_recap), dreamer longer episodes
    "recap", *DREAMERS, "tdmpc2_tiny", "td_mpc_squared",  # (test_dreamer), and these are tdmpc2 in other sizes
    *PICTURES,  # whole episodes (test_world_models)
)  # fmt: skip
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def chosen(name):
    """The config of config/algo/<name>.yaml with what it chooses by itself."""
    return config_of(f"algo={name}")


def tiny(name):
    """The words that make an algorithm small which is too large for the toy."""
    config = chosen(name)
    sizes = {"gemma": TINY, "mppi": PLANNED, "imagined": IMAGINED, "rollouts": EVOLVED}
    return next((words for key, words in sizes.items() if key in config.policy or key in config.algo), ())


JUDGED = [name for name in ALGORITHMS if hasattr(get_class(chosen(name).algo._target_), "update_critic")]


def build(name, *overrides, seed=0):
    """The algorithm of config/algo/<name>.yaml with its own policy, tiny if need be, and the config around it."""
    config = config_of(f"algo={name}", *tiny(name), *overrides)
    torch.manual_seed(seed)
    return instantiate(config.algo)(SPEC), config


def faster(*words):
    """The words that make an algorithm learn the toy in few updates."""
    config = config_of(*words)
    own = {**dict.fromkeys(RATES, 3e-3), **TOY}
    if "head" in config.policy and OmegaConf.is_interpolation(config.policy, "head"):
        del own["policy.head.steps"]  # it is a word of the group
    return [f"{option}={value}" for option, value in own.items() if OmegaConf.select(config, option) is not None]


def toy_batch(window, generator=None, size=64, noise=0.7):
    """One-step episodes: the best action is minus the state, and the behaviour is that action with noise."""
    state = torch.rand(size, 1, 2, generator=generator) * 2 - 1
    action = (-state + noise * torch.randn(size, 1, 2, generator=generator)).clamp(-REACH, REACH)
    seen = {STATE: state, CAMERA: IMAGE.expand(size, 1, *IMAGE.shape)}
    seen = {name: seen[name].repeat_interleave(len(at), 1) for name, at in window.offsets.items() if name in seen}
    reward = -(state + action).square().sum(-1).expand(-1, window.horizon)
    drawn = batch(
        SPEC, size, window=window, observation=seen, action=action.repeat(1, window.horizon, 1), reward=reward,
        next_observation=seen if "next_observation" in window.offsets else None,
        seed=int(torch.randint(2**20, (), generator=generator)),
    )  # fmt: skip
    known = {"return": reward, "success": reward > -0.05, "remaining": torch.zeros_like(reward, dtype=torch.int64)}
    known["index"] = known["remaining"]
    extras = {
        f"episode.{name}": column[:, : len(window.offsets[f"episode.{name}"])]
        for name, column in known.items() if f"episode.{name}" in window.offsets
    }  # fmt: skip
    planned = [name for name in window.offsets if name.startswith("behaviour_")]
    extras |= dict.fromkeys(planned, torch.zeros_like(drawn.action))  # no planner chose these actions
    if "candidate" in window.offsets:  # those of the first generation, in turn
        steps = torch.arange(window.horizon).expand(size, -1)
        extras["candidate"] = torch.stack([steps * 0 + 1, torch.arange(size)[:, None] % 6 + steps * 0, steps], -1).int()
    return replace(drawn, terminated=drawn.valid, extras=extras)


def train(algorithm, config, rounds, generator=None):
    generator = generator or torch.Generator().manual_seed(1)
    climbs = hasattr(algorithm, "planner") or (hasattr(algorithm, "critic") and not hasattr(algorithm, "update_policy"))
    noise = 0.7 if climbs else 0.05  # who only imitates has to be shown how
    columns, state = {}, generator.get_state()
    for _ in range(rounds):
        for update in config.updates:
            window = algorithm.windows[update]
            derived = [name for name in window.offsets if name.startswith("derived.")]
            if derived:  # of the rows of the update before
                generator.set_state(state)
            state = generator.get_state()
            rows = toy_batch(window, generator, noise=noise)
            if window.joins and not columns:  # which may be unknown
                columns = {
                    key: blank(SPEC, window, 64, algorithm.derived).extras[f"derived.{key}"]
                    for key in algorithm.derived
                }
            kept = {name: columns[name.removeprefix("derived.")] for name in derived}
            kept = {
                name: each[:, :1] if window.joins else torch.stack([each] * len(window.offsets[name]), 1)
                for name, each in kept.items()
            }
            found = getattr(algorithm, update)(replace(rows, extras={**rows.extras, **kept}))
            metrics, columns = found if isinstance(found, tuple) else (found, columns)
    return metrics


def seen(state):
    return {STATE: state, CAMERA: IMAGE.expand(len(state), *IMAGE.shape)}


def saved(algorithm):
    """The state as a checkpoint returns it."""
    file = io.BytesIO()
    torch.save(algorithm.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - DREAMERS))
def test_an_algorithm_of_continuous_actions_refuses_a_choice_and_says_which_takes_it(name):
    action = Feature((4,), low=0, high=1, one_hot=True)
    with pytest.raises(
        ConfigError, match=r"takes one of 4 actions, and the algorithm gives continuous ones: say plan=dr"
    ):
        instantiate(config_of(f"algo={name}", *tiny(name)).algo)(replace(SPEC, action=action))


# -- what algorithms share


def test_a_window_names_the_steps_of_one_episode():
    assert Window({STATE: (-1, 0), "action": (0, 1, 2), "next_observation": (3,)}).horizon == 3
    for offsets in ({STATE: (0,)}, {"action": (1, 2)}, {"action": (0, 1), "next_observation": (1,)}):
        with pytest.raises(ValueError, match="window"):
            Window(offsets)


class Valued(Algorithm):
    """Learns values in an update of another name than `update`, and nothing else."""

    def __init__(self):
        super().__init__()
        self.windows = {"update_critic": Window({"action": (0,)}), "update_policy": Window({"action": (0, 1)})}

    acting = act = property(None)

    def value(self, rows):
        return torch.full((len(rows),), 2.0)

    def beginnings(self, episodes, window, discount):
        """What ReplayMixture has: rows, and the return of each."""
        assert window == self.windows["update_critic"]
        return toy_batch(window, size=len(episodes)), torch.tensor([1.0, 5.0])


def test_an_algorithm_without_an_update_of_that_name_reports_how_far_its_values_are():
    algorithm = Valued()
    assert value_error(algorithm, algorithm, ["a", "b"], "cpu") == {"value_error": 2.0, "value_bias": -1.0}


# -- every algorithm


@every_algorithm
def test_updates_are_finite_and_acting_needs_only_the_published_weights_and_the_noise(name):
    learner, config = build(name)
    metrics = train(learner, config, rounds=1)
    assert len(config.updates) == max(config.utd, 1)
    assert metrics
    assert all(not value.requires_grad and value.isfinite() for value in metrics.values())
    assert all(parameter.isfinite().all() for parameter in learner.parameters())
    actor, _ = build(name, seed=1)
    actor.acting.load_state_dict(learner.acting.state_dict())
    state = seen(torch.randn(5, 2))
    assert torch.equal(act(learner, state, explore=True), act(actor, state, explore=True))
    assert not torch.equal(act(actor, state, explore=True), act(actor, state, 1, explore=True))
    assert torch.equal(act(actor, state), act(actor, state, 1)) == actor.acting.mode_at_zero
    assert not act(actor, state).requires_grad


@pytest.mark.parametrize("name", JUDGED)
def test_only_the_critic_learns_from_update_critic(name):
    algorithm, _ = build(name)
    acting = {
        name: weight for name, weight in algorithm.acting.named_parameters() if not name.startswith("critic.")
    }  # fmt: skip
    before, critics = {name: weight.clone() for name, weight in acting.items()}, weights(algorithm.critic)
    algorithm.update_critic(toy_batch(algorithm.windows["update_critic"]))
    assert_same(before, acting)
    assert any(not torch.equal(value, critics[key]) for key, value in weights(algorithm.critic).items())
    assert all(weight.grad is None for weight in acting.values())


@pytest.mark.parametrize("name", ["sft", "rejection", "sac_pi0"])
def test_parts_of_a_batch_make_the_step_of_the_whole(name):
    words = [f"++algo.optimizer.{option}" for option in ("learning_rate=1e-3", "grad_clip_norm=0.1")]
    ways = [build(name, *words, f"++algo.optimizer.accumulation={n}") for n in (1, 2, 4)]
    metrics = [train(algorithm, config, 3) for algorithm, config in ways]
    learned = [dict(algorithm.named_parameters()) for algorithm, _ in ways]
    for way in (1, 2):
        torch.testing.assert_close(metrics[way], metrics[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(learned[way], learned[0], atol=1e-5, rtol=1e-3)


@every_algorithm
@pytest.mark.gpu
def test_updates_and_acting_run_on_a_gpu(name):
    algorithm, config = build(name)
    algorithm.to("cuda")
    for update in config.updates:
        metrics = getattr(algorithm, update)(toy_batch(algorithm.windows[update]).to("cuda"))
        assert all(value.device.type == "cuda" for value in metrics.values())
    algorithm.load_state_dict(saved(algorithm))
    observation = {column: value.to("cuda") for column, value in seen(torch.zeros(5, 2)).items()}
    noise = torch.zeros(5, *algorithm.acting.noise_shape, device="cuda")
    assert act(algorithm, observation, noise, explore=True).device.type == "cuda"


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - DREAMERS - PICTURES))
def test_states_are_normalised_alike_in_every_network_and_it_is_published(name):
    algorithm, _ = build(name)
    state = torch.randn(3, 2)
    plain = act(algorithm, seen(state))
    algorithm.set_statistics(FITTED)
    shifted = state * torch.tensor([0.5, 1.0]) + torch.tensor([1.0, -2.0])  # a constant is centred, not scaled
    torch.testing.assert_close(act(algorithm, seen(shifted)), plain)
    for buffers in (algorithm.state_dict(), algorithm.acting.state_dict()):
        means = [value.tolist() for key, value in buffers.items() if key.endswith("state.mean")]
        assert means
        assert all(mean == [1.0, -2.0] for mean in means)


COLOURS = ("algo.augment.brightness=0.2", "algo.augment.contrast=0.2")
SCHEDULE = tuple(
    f"++algo.optimizer.{option}" for option in ("warmup=2", "decay=4", "grad_clip_norm=1.0", "accumulation=2")
)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, ()) for name in ALGORITHMS),
        ("sac_pi0", ("policy.head.noise_level=0.3",)),
        ("rlpd_pixels", COLOURS),
        ("sft", SCHEDULE),
    ],
)
def test_a_resumed_run_goes_on_bit_by_bit(name, overrides):
    overrides = (*faster(f"algo={name}"), *overrides)  # small
    straight, config = build(name, *overrides)
    rounds = 3 if config.algo.get("augment") is None else 1  # images take longer
    half = {kind: {name: value / 2 for name, value in columns.items()} for kind, columns in FITTED.items()}
    straight.set_statistics(half)  # else a scale of actions is what it begins as
    if hasattr(straight, "update_clone"):  # so that policy and reference differ, and are not what they began as
        straight.update_clone(toy_batch(straight.windows["update_clone"]))
    train(straight, config, rounds)
    resumed, _ = build(name, *overrides, seed=1)
    resumed.load_state_dict(saved(straight))
    assert_same(straight.state_dict(), resumed.state_dict())
    for algorithm in (straight, resumed):
        train(algorithm, config, rounds, torch.Generator().manual_seed(2))
    assert_same(straight.state_dict(), resumed.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [*((name, ()) for name in ALGORITHMS if name not in TAUGHT), *(("sac", (f"critic={name}",)) for name in CRITICS)],
)
def test_a_toy_task_is_learned(name, words):
    algorithm, config = build(name, *words, *faster(f"algo={name}", *words))
    state, generator = torch.rand(256, 2, generator=torch.Generator().manual_seed(9)) * 2 - 1, torch.Generator()

    def error():
        found = (act(algorithm, seen(state))[:, 0] + state)[
            :, : 1 if name == "hybrid" else 2
        ]  # its gripper is discrete
        return found.norm(dim=-1).mean()

    # the critics of the first see random features here, as nothing was cloned; the second imitates with noise
    near = 0.3 if name in ("sac_pi0_pixels", "iql") else 0.2
    limit = min(near, error() / 2)  # who always stands still is 0.77 away
    for _ in range(10):
        train(algorithm, config, 25, generator)
        if error() < limit:
            return
    raise AssertionError(f"the mean error is {error():.2f} after 250 rounds, not below {limit:.2f}")
