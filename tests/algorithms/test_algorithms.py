"""What every algorithm, head, network and critic of config/ promises, found by its yaml.

It composes, learns, acts with what it published, and resumes bit by bit. Each yaml of a group is tried with what
base.yaml and the algorithm choose of the others.
"""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from serl_client import ConfigError, Feature
from serl_client import messages as m

from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.algorithms.chunk_actor_critic import SAMPLING
from serl_launcher.config import changeable, groups
from serl_launcher.optim.optimizer import Optimizer
from serl_launcher.store import weights as store
from serl_launcher.store.extras import with_extras
from serl_launcher.training import build as training
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.types import Window
from tests.shared.common import CONFIG, STATE
from tests.shared.lerobot_policies import ACT_WORD, DIFFUSION_WORD
from tests.shared.models import CAMERA, REACH, act, assert_same, batch, config_of, differences, robot, weights
from tests.shared.policy_servers import still

pytestmark = pytest.mark.usefixtures("one_thread")

OFFERED = groups(CONFIG)
ALGORITHMS = [name for name in OFFERED["algo"] if name not in ("reward_classifier", "judge")]  # nobody acts with it
SPEC = robot(states=2, shape=(8, 8, 3))
IMAGE = torch.arange(8 * 8 * 3, dtype=torch.uint8).view(8, 8, 3)  # what the toy's camera always sees
FITTED = {
    "mean": {STATE: np.array([1.0, -2.0]), "action": np.zeros(2)},
    "std": {STATE: np.array([0.5, 0.0]), "action": np.full(2, REACH)},
    "low": {"action": np.full(2, -REACH)}, "high": {"action": np.full(2, REACH)},
}  # fmt: skip
SIZES = {  # wherever an algorithm has them, of this kind
    "hidden": [16, 16], "steps": 2, "num_critics": 3, "channels": [8, 8], "encoder_hidden": [16], "latent": 16,
    "samples": 16, "prior_samples": 4, "elites": 4, "deter": 16, "units": 8, "length": 3, "imagined": 2,
    "widths": [4, 4, 4], "picture": 32, "codes": 3, "episode_steps": 3, "population": 4,
}  # fmt: skip
PI0 = ("policy=pi0_tiny", "policy.gemma.depth=1", "policy.vision.depth=1")
CHUNKS = ("algo=sft", "policy=chunk")
SCHEDULE = tuple(
    f"++algo.optimizer.{option}" for option in ("warmup=2", "decay=4", "grad_clip_norm=1.0", "accumulation=2")
)
SMALLER = {name for names in OFFERED.values() for name in names if name.endswith("_tiny")}
LARGE = {name.removesuffix("_tiny") for name in SMALLER}


QUICK = ("sac", "sft", "iql", "hybrid", "tdmpc2_tiny", "flow", "mse")  # choices that are tried in ./test.sh, too


def case(*words):
    is_slow = words[-1].partition("=")[2] not in QUICK or any("pi0" in word for word in words)
    return pytest.param(words, marks=[pytest.mark.slow] * is_slow, id="-".join(words[-2:]))


CASES = [
    *(case(*CHUNKS, f"head={name}") for name in OFFERED["head"]),
    *(case(*CHUNKS, f"network={name}") for name in OFFERED["network"] if name not in LARGE),
    *(case("algo=rlpd", f"critic={name}") for name in OFFERED["critic"]),
    *(case(f"algo={name}") for name in ALGORITHMS),
    *(case("policy=lerobot", "policy.type=diffusion", DIFFUSION_WORD, f"algo={name}") for name in SAMPLING),
    case("algo=sac_pi0", "policy.head.noise_level=0.3"),
    case("algo=rlpd_pixels", "algo.augment.brightness=0.2", "algo.augment.contrast=0.2"),
    case("algo=sft", *SCHEDULE),
    *(case(*PI0, "algo.encoder=null", *words) for words in (  # what improves a PI0, whose features its critics see
        ("algo.noise_rows=1", "algo=dsrl"), ("algo=recap",), ("algo=expo",)
    )),
]  # fmt: skip
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
TOY_SIZES = {  # words that make an algorithm small which is too large for the toy
    "gemma": ("policy=pi0_tiny", "policy.gemma.depth=2", "policy.prompt_tokens=8", "head.steps=5"),
    "mppi": (
        "algo.model.latent=16", "algo.model.hidden=[32,32]", "algo.model.encoder_hidden=[32]", "algo.hidden=[32,32]",
        "algo.mppi.samples=32", "algo.mppi.prior_samples=4", "algo.mppi.elites=8", "algo.mppi.iterations=3",
    ),
    "options": (ACT_WORD, "algo.optimizer.learning_rate=3e-3"),
}  # fmt: skip
DREAMERS = {name for name in ALGORITHMS if name.startswith("dreamer")}  # states are not normalised
PICTURES = {"world_models", "world_models_tiny"}  # no states are seen
TAUGHT = (  # where a toy says nothing: recap needs many rows of each kind (test_recap), dreamer longer episodes
    "recap", *DREAMERS, "tdmpc2_tiny", "td_mpc_squared",  # (test_dreamer), and these are tdmpc2 in other sizes
    *PICTURES,  # whole episodes (test_world_models)
    "residual",  # it begins at what a server does (test_residual)
    *(name for name in ALGORITHMS if name.endswith("_published")),  # others in other sizes
)  # fmt: skip


def chosen(name):
    """The config of config/algo/<name>.yaml with what it chooses by itself."""
    return config_of(f"algo={name}")


def class_of(name):
    """The class of config/algo/<name>.yaml, read from the file: to compose each would hold up every collection."""
    text = (CONFIG / f"algo/{name}.yaml").read_text()
    target = re.search(r"^  _target_: (\S+)", text, re.MULTILINE)
    return get_class(target[1]) if target else class_of(re.search(r"^defaults: \[(\w+)", text, re.MULTILINE)[1])


JUDGED = [name for name in ALGORITHMS if hasattr(class_of(name), "update_critic")]


def small(*words):
    """The config of these words with small networks."""
    of_pi0 = dict.fromkeys(("algo=rejection_pi0", "algo=rejection_published", "algo=recap_published"), PI0)
    more = {**of_pi0, "algo=rejection_lerobot": (ACT_WORD,)}.get(words[0], ())
    more = (f"policy.url={still(2)}",) if words[0] == "algo=residual" else more
    config = copy.deepcopy(config_of("ranks=1", "batch_size=8", *more, *words))
    OmegaConf.resolve(config)
    shrink(config.algo)
    return config


def shrink(node):
    for name in node:
        if name in SIZES and isinstance(node[name], ListConfig) == isinstance(SIZES[name], list):
            node[name] = SIZES[name]
        elif isinstance(node[name], DictConfig):
            shrink(node[name])


def build(name, *overrides, seed=0):
    """The algorithm of config/algo/<name>.yaml with its own policy, small, and the config around it."""
    config = small(f"algo={name}", *overrides)
    torch.manual_seed(seed)
    return instantiate(config.algo)(SPEC), config


def update(algorithm, spec, seed, device="cpu"):
    """Make each update once; return the metrics of all."""
    found = {}
    for name, window in algorithm.windows.items():
        rows = batch(spec, 2, window=window, seed=seed, ends="terminated", derived=algorithm.derived)
        made = getattr(algorithm, name)(rows.to(device))
        found[name], columns = made if isinstance(made, tuple) else (made, {})
        for column, values in columns.items():  # as ReplayMixture.derive takes them
            steps = rows.valid if window.joins else rows.step_id
            assert values.shape == (*steps.shape, *algorithm.derived[column].shape)
        assert all(value.isfinite() and not value.requires_grad for value in found[name].values()), name
    return found


def answers(host, explores=True):
    observation = {name: np.ones(feature.shape, feature.dtype) for name, feature in SPEC.observation.items()}
    asked = [m.InferenceRequest(0, seed, True, explores, "", observation) for seed in range(4)]
    replies = host.answer([Question(b"arm%d" % each.seed, each) for each in asked])
    return np.stack([reply.arrays["action"] for reply in replies])


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
    returns = {"episode.return": reward} if "episode.return" in window.offsets else {}
    return replace(drawn, terminated=drawn.valid, extras={**drawn.extras, **returns})


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
            kept = {
                name: torch.stack([columns[name.removeprefix("derived.")]] * len(window.offsets[name]), 1)
                for name in derived
            }
            found = getattr(algorithm, update)(replace(rows, extras={**rows.extras, **kept}))
            metrics, columns = found if isinstance(found, tuple) else (found, columns)
    return metrics


def seen(state):
    return {STATE: state, CAMERA: IMAGE.expand(len(state), *IMAGE.shape)}


@pytest.mark.parametrize("name", ["sac", "sft", "hybrid", "iql", "tdmpc2", "world_models_tiny"])
def test_an_algorithm_of_continuous_actions_refuses_a_choice_and_says_which_takes_it(name):
    action = Feature((4,), low=0, high=1, one_hot=True)
    with pytest.raises(
        ConfigError, match=r"takes one of 4 actions, and the algorithm gives continuous ones: say plan=dr"
    ):
        instantiate(small(f"algo={name}").algo)(replace(SPEC, action=action))


# -- what algorithms share


def test_a_window_names_the_steps_of_one_episode():
    assert Window({STATE: (-1, 0), "action": (0, 1, 2), "next_observation": (3,)}).horizon == 3
    for offsets in ({STATE: (0,)}, {"action": (1, 2)}, {"action": (0, 1), "next_observation": (1,)}):
        with pytest.raises(ValueError, match="window"):
            Window(offsets)


def test_an_algorithm_that_forgets_to_say_how_its_planner_acts_is_told():
    algorithm, _ = build("tdmpc2_tiny")
    with pytest.raises(NotImplementedError, match="TDMPC2: Planner has no samples, so write `act`"):
        Algorithm.act(algorithm, {}, torch.zeros(1, 2), None, task=("",), noise=torch.zeros(1, 1), explore=True)


# -- every algorithm


@pytest.mark.parametrize("words", CASES)
def test_every_part_starts_learns_acts_with_what_it_published_and_resumes_bit_by_bit(words, tmp_path):
    config = small(*words)
    spec = with_extras(SPEC, config.extras)

    def built(seed):
        torch.manual_seed(seed)
        return training.build(config, spec)

    learner, resumed = built(1), built(2)
    plan_of(config, set(learner.windows))
    assert len(config.updates) == max(config.utd, 1) or words[-1].endswith("_published")  # see test_published
    half = {kind: {name: value / 2 for name, value in columns.items()} for kind, columns in FITTED.items()}
    learner.set_statistics(half)  # else a scale of actions is what it begins as
    assert update(learner, spec, 1)
    assert all(parameter.isfinite().all() for parameter in learner.parameters())
    checkpoints = Checkpoints(tmp_path / "checkpoints", spec=spec, config={})
    checkpoints.stage(1, {"algorithm": learner.state_dict()})()
    resumed.load_state_dict(checkpoints.load()["algorithm"])
    assert_same(learner.state_dict(), resumed.state_dict())
    assert_same(update(learner, spec, 2), update(resumed, spec, 2))
    assert_same(learner.state_dict(), resumed.state_dict())
    sha256, _ = store.write(tmp_path, safetensors.torch.save(learner.acting.published()))
    host, there = PolicyHost(built(3), spec, "cpu"), PolicyHost(learner, spec, "cpu")
    left = [*learner.children(), *(each for each in vars(learner).values() if isinstance(each, Optimizer))]
    assert all(each is learner.acting for each in left), "who acts holds nothing else"
    before = answers(host)
    host.load(1, store.path(tmp_path, sha256))
    assert np.isfinite(answers(host, explores=False)).all()
    assert np.array_equal(answers(host), answers(there))
    assert not np.array_equal(answers(host), before)
    state = seen(torch.randn(5, 2))
    is_calm = learner.acting.mode_at_zero or "head=flow_zero" in words
    assert torch.equal(act(learner, state), act(learner, state, 1)) == is_calm
    assert not act(learner, state).requires_grad


EACH = [pytest.param(each, marks=[pytest.mark.slow] * (each not in ("sac", "sft"))) for each in ALGORITHMS]


@pytest.mark.parametrize("name", EACH)
def test_a_run_that_resumes_with_other_rates_and_weights_of_losses_takes_its_state_and_learns_by_these(name):
    config = small(f"algo={name}")
    spec, options = with_extras(SPEC, config.extras), changeable(config, "algo") - {"algo.task_weight"}  # needs tasks
    algorithms = [training.build(config, spec)]
    for option in options:
        value = OmegaConf.select(config, option)
        if isinstance(value, float) or option.endswith("learning_rate"):
            OmegaConf.update(config, option, (value or 1e-3) / 2)  # null: what the policy brings
    algorithms += [training.build(config, spec), training.build(config, spec)]
    algorithms[0].set_statistics(FITTED)
    update(algorithms[0], spec, 1)
    state = copy.deepcopy(algorithms[0].state_dict())
    for algorithm in algorithms:
        algorithm.load_state_dict(state)
        assert update(algorithm, spec, 2)
    assert_same(algorithms[1].state_dict(), algorithms[2].state_dict())
    assert differences(algorithms[0].state_dict(), algorithms[1].state_dict())
    assert any(option.endswith("learning_rate") for option in options)


@pytest.mark.parametrize("name", EACH)
def test_the_memory_of_every_algorithm_is_counted_for_a_robot_with_one_action(name):
    """torch keeps the value of a fake tensor with one element: what copies it under the memory check fails there."""
    config = small(f"algo={name}")
    action = Feature((2 if name == "hybrid" else 1,), low=-REACH, high=REACH)  # one of them is the gripper's
    training.check_memory(config, with_extras(replace(SPEC, action=action), config.extras), "cpu", 1)


@pytest.mark.parametrize("name", JUDGED)
def test_only_the_critic_learns_from_update_critic(name):
    algorithm, config = build(name)
    spec = with_extras(SPEC, config.extras)
    acting = {name: each for name, each in algorithm.acting.named_parameters() if not name.startswith("critic.")}
    before, critics = copy.deepcopy(acting), weights(algorithm.critic)
    algorithm.update_critic(batch(spec, window=algorithm.windows["update_critic"], derived=algorithm.derived))
    assert_same(before, acting)
    assert differences(critics, weights(algorithm.critic))
    assert all(weight.grad is None for weight in acting.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "rejection", "sac_pi0"])
def test_parts_of_a_batch_make_the_step_of_the_whole(name):
    words = [f"++algo.optimizer.{option}" for option in ("learning_rate=1e-3", "grad_clip_norm=0.1")]
    ways = [build(name, *words, f"++algo.optimizer.accumulation={n}") for n in (1, 2, 4)]
    metrics = [train(algorithm, config, 3) for algorithm, config in ways]
    learned = [dict(algorithm.named_parameters()) for algorithm, _ in ways]
    for way in (1, 2):
        torch.testing.assert_close(metrics[way], metrics[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(learned[way], learned[0], atol=1e-5, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_and_acting_run_on_a_gpu(name):
    algorithm, config = build(name)
    algorithm.to("cuda")
    metrics = update(algorithm, with_extras(SPEC, config.extras), 1, "cuda")
    assert all(value.device.type == "cuda" for found in metrics.values() for value in found.values())
    algorithm.load_state_dict(algorithm.state_dict())
    observation = {column: value.to("cuda") for column, value in seen(torch.zeros(5, 2)).items()}
    noise = torch.zeros(5, *algorithm.acting.noise_shape, device="cuda")
    assert act(algorithm, observation, noise, explore=True).device.type == "cuda"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - DREAMERS - PICTURES - {"rejection_pi0", "rejection_lerobot"}))
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(pytest.param(name, (), marks=pytest.mark.slow if name in ("sac", "sft") else pytest.mark.nightly)
          for name in ALGORITHMS if name not in TAUGHT),
        *(pytest.param("sac", (f"critic={name}",), marks=pytest.mark.nightly) for name in OFFERED["critic"]),
    ],
)  # fmt: skip
def test_a_toy_task_is_learned(name, words):
    config = chosen(name)
    sizes = next((more for key, more in TOY_SIZES.items() if key in config.policy or key in config.algo), ())
    words = (f"algo={name}", *sizes, *words)
    config = config_of(*words, *faster(*words))
    torch.manual_seed(0)
    algorithm = instantiate(config.algo)(SPEC)
    state, generator = torch.rand(256, 2, generator=torch.Generator().manual_seed(9)) * 2 - 1, torch.Generator()

    def error():
        found = act(algorithm, seen(state))[:, 0] + state
        return found[:, : 1 if name == "hybrid" else 2].norm(dim=-1).mean()  # its gripper is discrete

    # the critics of the first see random features here, as nothing was cloned; the second imitates with noise
    near = 0.3 if name in ("sac_pi0_pixels", "iql") else 0.2
    limit = min(near, error() / 2)  # who always stands still is 0.77 away
    for _ in range(10):
        train(algorithm, config, 25, generator)
        if error() < limit:
            return
    raise AssertionError(f"the mean error is {error():.2f} after 250 rounds, not below {limit:.2f}")
