"""What every algorithm promises, found by its yaml: it composes, updates, learns a toy task and resumes bit by bit."""

import copy
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from serl_client import ConfigError, Feature, Spec

from serl_launcher.algorithms.base import Algorithm, critic_weight, value_target
from serl_launcher.training.counters import value_error
from serl_launcher.types import Batch, Window

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Path(__file__).parents[2] / "config"
ALGORITHMS = sorted(path.stem for path in (CONFIG / "algo").glob("*.yaml"))
IMAGE = torch.arange(8 * 8 * 3, dtype=torch.uint8).view(8, 8, 3)  # what the toy's camera always sees
REACH = 2.0  # the toy's actions lie within -REACH..REACH
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@pytest.fixture
def spec():
    """A point in the plane, with a picture that says nothing of it, and that no state policy looks at."""
    observation = {"observation.state": Feature((2,)), "observation.images.top": Feature(tuple(IMAGE.shape), "uint8")}
    return Spec(observation, Feature((2,), low=-REACH, high=REACH), fps=10.0)


def build(name, spec, *overrides, seed=0):
    """The algorithm of config/algo/<name>.yaml, with cameras if it is made for them, and the config around it."""
    kind = "flow" if name.startswith(("rejection", "sac_pi0")) else "gaussian"
    kind = "pi0_tiny" if name == "rejection_pi0" else kind + "_pixels" * name.endswith("_pixels")
    words = [f"+algo={name}", f"+policy={kind}", "+n_action_steps=4", *overrides]
    torch.manual_seed(seed)
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose(overrides=words)
    return instantiate(config.algo)(spec), config


def faster(name):
    """The words that make an algorithm learn the toy in few updates."""
    if name.startswith("sac_pi0"):  # nothing was cloned that it should stay near, and the toy has one action
        rates = ["algo.optimizer.learning_rate=1e-3", "algo.critic_optimizer.learning_rate=3e-3"]
        return [*rates, "algo.distill_weight=0.0", "policy.steps=3", "policy.horizon=1"]
    if name == "rejection_pi0":
        return [
            "algo.optimizer.learning_rate=3e-3",
            "algo.optimizer.warmup=0",
            "policy.cameras=[]",
            "algo.augment=null",
        ]
    return [f"algo.{'' if name.startswith(('sac', 'rlpd')) else 'optimizer.'}learning_rate=3e-3"]


def toy_batch(window, spec, generator, size=64, noise=0.7):
    """One-step episodes: the best action is minus the state, and the behaviour is that action with noise."""
    state = torch.rand(size, 2, generator=generator) * 2 - 1
    action = (-state + noise * torch.randn(size, 2, generator=generator)).clamp(-REACH, REACH)
    steps, flags = (size, window.horizon), torch.ones(size, window.horizon, dtype=torch.bool)
    image = IMAGE.expand(size, 1, *IMAGE.shape)
    observation = {
        column: (image if "images" in column else state.unsqueeze(1)).repeat_interleave(len(offsets), 1)
        for column, offsets in window.offsets.items() if column in spec.observation
    }  # fmt: skip
    return Batch(
        observation=observation,
        action=action.unsqueeze(1).repeat(1, window.horizon, 1),
        reward=-(state + action).square().sum(-1, keepdim=True).expand(steps),
        valid=flags, terminated=flags, truncated=~flags, intervened=~flags,
        length=torch.full((size,), window.horizon), weight=torch.ones(size), step_id=torch.arange(size),
        seed=torch.randint(2**62, (size,), generator=generator),
        next_observation=observation if "next_observation" in window.offsets else None,
    )  # fmt: skip


def train(algorithm, config, spec, rounds, seed=1):
    generator = torch.Generator().manual_seed(seed)
    noise = 0.7 if hasattr(algorithm, "critic") else 0.05  # who only imitates has to be shown how
    for _ in range(rounds):
        for update in config.updates:
            metrics = getattr(algorithm, update)(toy_batch(algorithm.windows[update], spec, generator, noise=noise))
    return metrics


def act(algorithm, observation, explore=False, seed=0):
    noise = torch.randn(
        len(observation["observation.state"]), *algorithm.acting.noise_shape,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    image = IMAGE.expand(len(noise), *IMAGE.shape)
    observation, previous = {"observation.images.top": image, **observation}, torch.zeros(len(noise), 2)
    decision, _ = algorithm.act(observation, previous, None, task=[""] * len(noise), noise=noise, explore=explore)
    return decision.action


def error(algorithm):
    """How far the actions without noise are from the best ones, in the mean."""
    state = torch.rand(256, 2, generator=torch.Generator().manual_seed(9)) * 2 - 1
    return (act(algorithm, {"observation.state": state})[:, 0] + state).norm(dim=-1).mean().item()


def saved(algorithm):
    """The state as a checkpoint returns it."""
    file = io.BytesIO()
    torch.save(algorithm.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def leaves(tree):
    if isinstance(tree, dict):
        return {f"{key}.{name}": leaf for key, branch in tree.items() for name, leaf in leaves(branch).items()}
    if isinstance(tree, list):
        return leaves(dict(enumerate(tree)))
    return {"": tree}


def assert_same(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        same = torch.equal(leaf, other[name]) if isinstance(leaf, torch.Tensor) else leaf == other[name]
        assert same, name


@every_algorithm
def test_one_round_of_updates_is_finite(name, spec):
    algorithm, config = build(name, spec)
    metrics = train(algorithm, config, spec, rounds=1)
    assert len(config.updates) == config.utd
    assert metrics
    assert all(not value.requires_grad and value.isfinite() for value in metrics.values())
    assert all(parameter.isfinite().all() for parameter in algorithm.parameters())


@every_algorithm
def test_a_toy_task_is_learned(name, spec):
    algorithm, config = build(name, spec, *faster(name))
    before = error(algorithm)
    train(algorithm, config, spec, rounds=250)
    assert error(algorithm) < min(0.2, before / 2)


@every_algorithm
def test_a_resumed_run_goes_on_bit_by_bit(name, spec):
    straight, config = build(name, spec)
    train(straight, config, spec, rounds=3)
    resumed, _ = build(name, spec, seed=1)
    resumed.load_state_dict(saved(straight))
    for algorithm in (straight, resumed):
        train(algorithm, config, spec, rounds=3, seed=2)
    assert_same(straight.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name.startswith(("sac", "rlpd"))])
def test_only_the_critic_learns_from_update_critic(name, spec):
    algorithm, _ = build(name, spec)
    before = copy.deepcopy(algorithm.acting.state_dict())
    critics = copy.deepcopy(algorithm.critic.state_dict())
    algorithm.update_critic(toy_batch(algorithm.windows["update_critic"], spec, torch.Generator()))
    assert_same(before, algorithm.acting.state_dict())
    assert any(not torch.equal(value, critics[key]) for key, value in algorithm.critic.state_dict().items())
    assert all(parameter.grad is None for parameter in algorithm.acting.parameters())


@every_algorithm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_updates_and_acting_run_on_a_gpu(name, spec):
    algorithm, config = build(name, spec)
    algorithm.to("cuda")
    for update in config.updates:
        batch = toy_batch(algorithm.windows[update], spec, torch.Generator()).to("cuda")
        assert all(value.device.type == "cuda" for value in getattr(algorithm, update)(batch).values())
    algorithm.load_state_dict(saved(algorithm))
    image = IMAGE.expand(5, *IMAGE.shape).to("cuda")
    observation = {"observation.state": torch.zeros(5, 2, device="cuda"), "observation.images.top": image}
    noise = torch.zeros(5, *algorithm.acting.noise_shape, device="cuda")
    previous = torch.zeros(5, 2, device="cuda")
    assert (
        algorithm.act(observation, previous, None, task=[""] * 5, noise=noise, explore=True)[0].action.device.type
        == "cuda"
    )


@every_algorithm
def test_acting_needs_only_the_published_weights_and_the_noise(name, spec):
    learner, config = build(name, spec)
    train(learner, config, spec, rounds=1)
    actor, _ = build(name, spec, seed=1)
    actor.acting.load_state_dict(learner.acting.state_dict())
    observation = {"observation.state": torch.randn(5, 2)}
    assert torch.equal(act(learner, observation, explore=True), act(actor, observation, explore=True))
    assert not torch.equal(act(actor, observation, explore=True), act(actor, observation, explore=True, seed=1))
    assert torch.equal(act(actor, observation), act(actor, observation, seed=1)) == actor.acting.mode_at_zero
    assert not act(actor, observation).requires_grad


@every_algorithm
def test_states_are_normalised_alike_in_every_network_and_it_is_published(name, spec):
    algorithm, _ = build(name, spec)
    fitted = {
        "mean": {"observation.state": np.array([1.0, -2.0]), "action": np.zeros(2)},
        "std": {"observation.state": np.array([0.5, 0.0]), "action": np.full(2, REACH)},
        "low": {"action": np.full(2, -REACH)}, "high": {"action": np.full(2, REACH)},
    }  # fmt: skip
    state = torch.randn(3, 2)
    plain = act(algorithm, {"observation.state": state})
    algorithm.set_statistics(fitted)
    shifted = state * torch.tensor([0.5, 1.0]) + torch.tensor([1.0, -2.0])  # a constant is centred, not scaled
    torch.testing.assert_close(act(algorithm, {"observation.state": shifted}), plain)
    for buffers in (algorithm.state_dict(), algorithm.acting.state_dict()):
        means = [value for key, value in buffers.items() if key.endswith("state.mean")]
        assert means
        assert all(value.tolist() == [1.0, -2.0] for value in means)


def rows(length, terminated, truncated):
    """One row of three steps with the rewards 1, 2, 4, of which the last are past the episode's end."""
    valid = torch.arange(3) < length
    last = torch.arange(3) == length - 1
    observation = {"observation.state": torch.zeros(1, 1, 2)}
    return Batch(
        observation, torch.zeros(1, 3, 2), (torch.tensor([1.0, 2.0, 4.0]) * valid)[None], valid[None],
        (last & terminated)[None], (last & truncated)[None], torch.zeros(1, 3, dtype=torch.bool),
        torch.tensor([length]), torch.tensor([0.5]), torch.tensor([0]), torch.tensor([0]), observation,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("length", "terminated", "truncated", "target", "weight"),
    [
        (3, False, False, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 8, 0.5),
        (3, False, True, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 8, 0.5),  # a time limit ends no value
        (3, True, False, 1 + 0.5 * 2 + 0.25 * 4, 0.5),
        (2, True, False, 1 + 0.5 * 2, 0.5),  # the actions after success do not matter
        (2, False, True, 1 + 0.5 * 2 + 0.25 * 8, 0.0),  # what the actions after the cut would have done is unknown
    ],
)
def test_targets_keep_termination_and_truncation_apart(length, terminated, truncated, target, weight):
    batch = rows(length, terminated, truncated)
    assert value_target(batch, torch.tensor([8.0]), discount=0.5).tolist() == [target]
    assert critic_weight(batch).tolist() == [weight]


def test_rows_without_weight_do_not_move_the_critic(spec):
    algorithm, _ = build("sac", spec)
    batch = toy_batch(algorithm.windows["update"], spec, torch.Generator())
    cut = replace(batch, weight=torch.zeros(len(batch)))
    before = copy.deepcopy(algorithm.critic.state_dict())
    assert algorithm.update_critic(cut)["critic_gradient"] == 0
    assert_same(before, algorithm.critic.state_dict())


def test_the_target_of_soft_actor_critic_is_the_papers(spec):
    overrides = ("algo.num_critics=4", "algo.num_target_critics=2", "algo.discount=0.5", "algo.initial_temperature=0.3")
    algorithm, _ = build("sac", spec, *overrides)
    batch = toy_batch(algorithm.windows["update"], spec, torch.Generator())
    batch = replace(batch, terminated=torch.zeros(64, 1, dtype=torch.bool))
    generator = torch.Generator().set_state(algorithm.generator.get_state())
    target = algorithm.target(batch)
    with torch.no_grad():
        action, log_prob = algorithm.policy.rsample(batch.next_observation, seed=batch.seed, stream=1)
        pair = torch.randperm(4, generator=generator)[:2]
        value = algorithm.target_critic(batch.next_observation, action)[pair].min(0).values - 0.3 * log_prob
    torch.testing.assert_close(target, batch.reward[:, 0] + 0.5 * value)


def test_target_networks_follow_by_tau_alone(spec):
    algorithm, _ = build("sac", spec, "algo.tau=0.25")
    before = [parameter.clone() for parameter in algorithm.target_critic.parameters()]
    algorithm.update_critic(toy_batch(algorithm.windows["update"], spec, torch.Generator()))
    for old, new, critic in zip(
        before, algorithm.target_critic.parameters(), algorithm.critic.parameters(), strict=True
    ):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * critic)


def test_soft_actor_critic_refuses_a_policy_without_a_density(spec):
    with pytest.raises(ConfigError, match="density"):
        build("sac", spec, "policy._target_=serl_launcher.networks.mlp.StateEncoder", "~policy.encoder",
              "~policy.hidden", "~policy.layer_norm", "~policy.log_std_low", "~policy.log_std_high")  # fmt: skip


@pytest.mark.parametrize("name", ["sac", "rlpd"])
def test_soft_actor_critic_refuses_a_policy_without_an_encoder_and_names_what_to_say(name, spec):
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose(overrides=[f"+algo={name}", "+policy=pi0_tiny", "+n_action_steps=4"])
    with pytest.raises(ConfigError, match="policy=gaussian, or algo=sac_pi0 with"):
        instantiate(config.algo)(spec)


def test_a_window_names_the_steps_of_one_episode():
    assert Window({"observation.state": (-1, 0), "action": (0, 1, 2), "next_observation": (3,)}).horizon == 3
    for offsets in ({"observation.state": (0,)}, {"action": (1, 2)}, {"action": (0, 1), "next_observation": (1,)}):
        with pytest.raises(ValueError, match="window"):
            Window(offsets)


def test_a_batch_moves_with_all_its_columns():
    batch = rows(3, False, False).to("meta")
    assert batch.action.device.type == batch.observation["observation.state"].device.type == "meta"


class Valued(Algorithm):
    """Learns values in an update of another name than `update`, and nothing else."""

    def __init__(self):
        super().__init__()
        self.windows = {"update_critic": Window({"action": (0,)}), "update_policy": Window({"action": (0, 1)})}

    @property
    def acting(self):
        raise NotImplementedError

    def act(self, *_, **__):
        raise NotImplementedError

    def value(self, batch):
        return torch.full((len(batch),), 2.0)


def test_an_algorithm_without_an_update_of_that_name_reports_how_far_its_values_are(spec):
    algorithm, asked = Valued(), []

    class Stored:
        def beginnings(self, episodes, window, discount):
            asked.append(window)
            return toy_batch(window, spec, torch.Generator(), size=len(episodes)), torch.tensor([1.0, 5.0])

    assert value_error(Stored(), algorithm, ["a", "b"], "cpu") == {"value_error": 2.0, "value_bias": -1.0}
    assert asked == [algorithm.windows["update_critic"]]
