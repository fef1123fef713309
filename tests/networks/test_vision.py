"""Images on the learner's side: they become features, augmentation leaves their meaning, and they are learned from."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from serl_client import ConfigError, Feature, Spec
from serl_client import messages as m
from torch.nn import functional

from serl_launcher.acting.server import PolicyHost, Question
from serl_launcher.networks.augment import Augment, augmentation, coloured, shifted
from serl_launcher.networks.mlp import StateEncoder
from serl_launcher.networks.vision import ImageTrunk, ObservationEncoder
from serl_launcher.store import weights
from serl_launcher.types import Batch

CONFIG = Path(__file__).parents[2] / "config"
STATE, HIGH, WRIST = "observation.state", "observation.images.cam_high", "observation.images.cam_wrist"
SIZE = 32


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def robot(high=(SIZE, SIZE, 3), wrist=(SIZE, SIZE, 3)):
    images = {WRIST: wrist, HIGH: high}
    observation = {STATE: Feature((2,)), **{n: Feature(shape, "uint8") for n, shape in images.items() if shape}}
    return Spec(observation, Feature((2,), low=-1, high=1), fps=10.0)


@pytest.fixture
def spec():
    return robot()


def observe(spec, *leading, generator=None):
    return {
        name: torch.randint(256, (*leading, *feature.shape), generator=generator, dtype=torch.uint8)
        if feature.dtype == "uint8" else torch.randn(*leading, *feature.shape, generator=generator)
        for name, feature in spec.observation.items()
    }  # fmt: skip


def batch_of(observation, action, reward, following=None, seed=0):
    size, flags = len(action), torch.ones(len(action), 1, dtype=torch.bool)
    return Batch(
        observation, action.unsqueeze(1), reward.unsqueeze(1), flags, flags, ~flags, ~flags,
        torch.ones(size, dtype=torch.int64), torch.ones(size), torch.arange(size), torch.arange(size) + 1000 * seed,
        following or observation,
    )  # fmt: skip


def anything(spec, size=6, steps=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    now, following = (observe(spec, size, steps, generator=generator) for _ in range(2))
    return batch_of(
        now, torch.rand(size, 2, generator=generator), torch.rand(size, generator=generator), following, seed
    )


def build(spec, *overrides, seed=0):
    """The shipped RLPD from pixels, with weights that `seed` names."""
    torch.manual_seed(seed)
    words = ["+algo=rlpd_pixels", "+policy=gaussian_pixels", "policy.encoder.channels=[8,16,16]", *overrides]
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        return instantiate(compose(overrides=words).algo)(spec)


# -- the encoder


@pytest.mark.parametrize(("high", "wrist"), [((32, 32, 3), (128, 128, 3)), ((48, 65, 3), (33, 40, 1))])
def test_images_of_any_size_become_features_beside_the_states(high, wrist):
    spec = robot(high, wrist)
    encoder = ObservationEncoder(spec, cameras="all", channels=[8, 16, 16, 32], latent=12)
    observation = observe(spec, 5)
    features = encoder(observation)
    assert encoder.inputs == (STATE, HIGH, WRIST)
    assert features.shape == (5, encoder.size) == (5, 2 + 2 * 12)
    assert torch.equal(features[:, :2], observation[STATE])
    assert features[:, 2:].abs().max() < 1
    torch.testing.assert_close(encoder({name: value.unsqueeze(1) for name, value in observation.items()}), features)


def test_every_image_counts_and_counts_for_its_own_row_alone(spec):
    encoder, observation = ObservationEncoder(spec, cameras=["all"], channels=[8, 16]), observe(spec, 4)
    before = encoder(observation)
    for name in (HIGH, WRIST):
        changed = {**observation, name: observation[name].clone()}
        changed[name][2] = 255 - changed[name][2]
        difference = (encoder(changed) - before).abs().amax(-1)
        assert difference[2] > 1e-3
        assert difference[[0, 1, 3]].max() < 1e-5


def test_without_cameras_it_is_the_encoder_of_states(spec):
    encoder, observation = ObservationEncoder(spec), observe(spec, 4)
    assert encoder.inputs == (STATE,)
    assert not list(encoder.parameters())
    assert torch.equal(encoder(observation), StateEncoder(spec)(observation))


def test_cameras_are_chosen_by_name(spec):
    assert ObservationEncoder(spec, cameras=["cam_wrist"]).inputs == (STATE, WRIST)
    assert ObservationEncoder(spec, cameras="cam_high").inputs == (STATE, HIGH)
    assert ObservationEncoder(spec, cameras=["cam_wrist", "cam_high"]).inputs == (STATE, HIGH, WRIST)
    with pytest.raises(ConfigError, match="no camera cam_low; it has cam_high, cam_wrist"):
        ObservationEncoder(spec, cameras=["cam_high", "cam_low"])


@pytest.mark.parametrize("cameras", ["all", ["cam_high"]])
def test_a_robot_without_cameras_is_told_how_to_get_them(cameras):
    with pytest.raises(ConfigError, match=r"task\.cameras=true"):
        ObservationEncoder(robot(None, None), cameras=cameras)


def test_a_robot_that_only_sees_needs_no_states():
    spec = Spec({HIGH: Feature((SIZE, SIZE, 3), "uint8")}, Feature((2,), low=-1, high=1), fps=10.0)
    encoder = ObservationEncoder(spec, cameras="all", channels=[8], latent=7)
    assert encoder(observe(spec, 3)).shape == (3, 7)
    with pytest.raises(ConfigError, match="float"):
        ObservationEncoder(spec)


@pytest.mark.parametrize("channels", [[], [8, 12], [0]])
def test_channels_that_cannot_be_grouped_are_refused(spec, channels):
    with pytest.raises(ConfigError, match="multiple of 8"):
        ObservationEncoder(spec, cameras="all", channels=channels)


@pytest.mark.parametrize(("shape", "size"), [((64, 64, 3), 4 * 4 * 16), ((50, 33, 1), 4 * 3 * 16)])
def test_a_trunk_takes_images_of_any_shape_and_says_how_much_it_makes_of_them(shape, size):
    trunk = ImageTrunk(shape, [8, 8, 16, 16])
    assert trunk(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, trunk.size) == (2, size)


# -- augmentation


def test_a_shift_moves_what_is_seen_and_repeats_the_border(spec):
    images = observe(spec, 5, 2)[HIGH]
    down, right = torch.tensor([0, 4, -4, 3, -1]), torch.tensor([0, -4, 2, 0, 4])
    moved = shifted(images, down, right)
    assert moved.dtype == torch.uint8
    for i, (dy, dx) in enumerate(zip(down.tolist(), right.tolist(), strict=True)):
        padded = functional.pad(images[i].permute(0, 3, 1, 2).float(), (4, 4, 4, 4), mode="replicate")
        expected = padded[:, :, 4 - dy : 4 - dy + SIZE, 4 - dx : 4 - dx + SIZE].permute(0, 2, 3, 1).to(torch.uint8)
        assert torch.equal(moved[i], expected)


def offsets(before, after):
    """The (down, right) of each row's image at its first time step."""
    every = [(dy, dx) for dy in range(-4, 5) for dx in range(-4, 5)]
    return [
        next(pair for pair in every if torch.equal(shifted(old[None], *torch.tensor(pair)[:, None])[0], new))
        for old, new in zip(before, after, strict=True)
    ]


def test_rows_cameras_and_the_next_observation_are_shifted_each_by_themselves(spec):
    batch = anything(spec, size=64)
    batch = replace(batch, next_observation=batch.observation)
    original = copy.deepcopy(batch.observation)
    changed = Augment(4, 0.0, 0.0)(batch)
    drawn = [offsets(batch.observation[name], seen[name])
             for seen in (changed.observation, changed.next_observation) for name in (HIGH, WRIST)]  # fmt: skip
    for i, pairs in enumerate(drawn):
        assert all({pair[axis] for pair in pairs} == set(range(-4, 5)) for axis in (0, 1))
        assert all(sum(map(tuple.__eq__, pairs, other)) < 8 for other in drawn[:i])
    assert torch.equal(changed.observation[STATE], original[STATE])
    assert all(torch.equal(batch.observation[name], value) for name, value in original.items())  # nothing in place


def test_the_time_steps_of_one_window_are_changed_alike(spec):
    batch = anything(spec, steps=3)
    still = {name: value[:, :1].expand_as(value) for name, value in batch.observation.items()}
    changed = Augment(4, 0.5, 0.5)(replace(batch, observation=still)).observation[HIGH]
    assert not torch.equal(changed, still[HIGH])
    assert torch.equal(changed, changed[:, :1].expand_as(changed))


def test_the_rows_seeds_decide_and_a_batch_without_a_next_observation_is_changed_too(spec):
    augment, batch = Augment(4, 0.2, 0.2), replace(anything(spec), next_observation=None)
    one, same, other = (
        augment(replace(batch, seed=batch.seed + seed)).observation[HIGH] for seed in (1000, 1000, 2000)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_brightness_scales_contrast_spreads_about_grey_and_both_stay_bytes():
    images = torch.tensor([0, 100, 200], dtype=torch.uint8).repeat(3, 1)
    changed = coloured(images, torch.tensor([1.0, 1.5, 1.0]), torch.tensor([1.0, 1.0, 0.5]))
    assert changed.tolist() == [[0, 100, 200], [0, 150, 255], [64, 114, 164]]


def test_colours_change_within_their_strength_and_without_any_strength_nothing_does(spec):
    batch = anything(spec, size=64)
    grey = {name: torch.full_like(value, 100) if name == HIGH else value for name, value in batch.observation.items()}
    batch = replace(batch, observation=grey)
    values = Augment(0, 0.2, 0.0)(batch).observation[HIGH].flatten(1).float()
    assert torch.equal(values.amin(1), values.amax(1))
    assert 80 <= values.min() < 90 < 110 < values.max() <= 120
    assert torch.equal(Augment(0, 0.0, 0.0)(batch).observation[WRIST], batch.observation[WRIST])


@pytest.mark.parametrize("options", [(-1, 0.0, 0.0), (4, 1.5, 0.0), (4, 0.0, -0.1)])
def test_an_augmentation_that_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match="augment: shift"):
        Augment(*options)


# -- soft actor-critic from pixels


def test_an_update_with_two_cameras_and_colours_is_finite_and_resumes_bit_by_bit(spec):
    colours = ("algo.augment.brightness=0.2", "algo.augment.contrast=0.2")
    straight, resumed = build(spec, *colours), build(spec, *colours, seed=1)
    metrics = straight.update(anything(spec))
    assert all(value.isfinite() for value in metrics.values())
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for algorithm in (straight, resumed):
        algorithm.update(anything(spec, seed=1))
    one, other = straight.state_dict(), resumed.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in one.items() if isinstance(value, torch.Tensor))
    assert torch.equal(straight.generator.get_state(), resumed.generator.get_state())


def test_the_critics_train_the_convolutions_and_the_policy_has_a_copy(spec):
    algorithm = build(spec)
    before = copy.deepcopy(algorithm.policy.encoder.state_dict())
    algorithm.update(anything(spec))
    now, critics = algorithm.policy.encoder.state_dict(), algorithm.critic.encoder.state_dict()
    for name, value in now.items():
        if name.startswith("trunks"):
            assert torch.equal(value, critics[name])
            assert not torch.equal(value, before[name])
        elif name.startswith("projections"):
            assert not torch.equal(value, critics[name])


def test_augmentation_for_a_policy_that_sees_nothing_is_refused(spec):
    with pytest.raises(ConfigError, match="gaussian_pixels"):
        build(spec, "policy.encoder.cameras=[]")
    with pytest.raises(ConfigError, match="flow_pixels"):
        augmentation(partial(Augment, 4, 0.0, 0.0), ["observation.state"])


def test_published_weights_let_an_actor_see(spec, tmp_path):
    learner, host = build(spec), PolicyHost(build(spec, seed=1), spec, "cpu")
    learner.update(anything(spec))
    sha256, _ = weights.write(tmp_path, safetensors.torch.save(learner.acting.state_dict()))
    host.load(1, weights.path(tmp_path, sha256))
    seen = {name: value.numpy() for name, value in observe(spec).items()}  # as a robot has it: [H, W, 3]
    dark = {**seen, WRIST: np.zeros_like(seen[WRIST])}
    questions = [
        Question(actor, m.InferenceRequest(0, 0, True, False, "", arrays))
        for actor, arrays in ((b"a", seen), (b"b", dark))
    ]
    for question in questions:
        host.check(question.ask)
    answers = [answer.arrays["action"] for answer in host.answer(questions)]
    batch = {name: torch.stack([torch.as_tensor(q.ask.arrays[name]) for q in questions]) for name in spec.observation}
    nothing = {"noise": torch.zeros(2, 1, 2), "explore": False, "task": ["", ""]}
    decision, _ = learner.act(batch, torch.zeros(2, 2), None, **nothing)
    np.testing.assert_array_equal(np.stack(answers), decision.action.numpy())
    assert not np.allclose(*answers)


def places(size, generator):
    """Pictures of a bright block, [B, 1, H, W, 3], and where it is, within -1..1 [B, 2]."""
    corner = torch.randint(SIZE - 6, (size, 2), generator=generator)
    line = torch.arange(SIZE)
    inside = (line >= corner[..., None]) & (line < corner[..., None] + 6)  # [B, 2, SIZE]
    block = inside[:, 0, :, None] & inside[:, 1, None, :]
    return (60 + 150 * block).to(torch.uint8)[:, None, :, :, None].repeat(1, 1, 1, 1, 3), corner / (SIZE - 7) * 2 - 1


def test_a_policy_learns_to_reach_for_what_only_the_camera_sees():
    """One-step episodes: the reward is how near the action comes to the block."""
    spec, generator = robot(wrist=None), torch.Generator().manual_seed(1)
    algorithm = build(spec, "algo.learning_rate=3e-3", "algo.initial_temperature=0.01")
    for update in range(250):
        image, place = places(64, generator)
        action = torch.rand(64, 2, generator=generator) * 2 - 1
        observation = {STATE: torch.zeros(64, 1, 2), HIGH: image}
        algorithm.update(batch_of(observation, action, -(action - place).square().sum(-1), seed=update))
    image, place = places(256, generator)
    observation = {STATE: torch.zeros(256, 2), HIGH: image[:, 0]}
    nothing = {"noise": torch.zeros(256, 1, 2), "explore": False, "task": [""] * 256}
    action = algorithm.act(observation, torch.zeros(256, 2), None, **nothing)[0].action[:, 0]
    error = (action - place).norm(dim=-1).mean()
    assert error < place.norm(dim=-1).mean() / 2
