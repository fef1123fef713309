"""Images on the learner's side: they become features, augmentation leaves their meaning, and they are learned from."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from serl_client import ConfigError, Feature
from torch.nn import functional

from serl_launcher.networks.augment import Augment, augmentation, coloured, shifted
from serl_launcher.networks.mlp import StateEncoder
from serl_launcher.networks.vision import ObservationEncoder
from tests.shared.models import STATE, act, algorithm_of, batch, now, robot, weights

pytestmark = pytest.mark.usefixtures("one_thread")

HIGH, WRIST = "observation.images.cam_high", "observation.images.cam_wrist"
SIZE = 32
SPEC = robot(states=2, reach=1, shape=(SIZE, SIZE, 3), cameras=(WRIST, HIGH))
anything = partial(batch, SPEC, 6)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def observe(size, spec=SPEC):
    return now(batch(spec, size).observation)


def build(spec=SPEC, *overrides, seed=0):
    """The shipped RLPD from pixels, with weights that `seed` names."""
    words = ("algo=rlpd_pixels", "policy=gaussian_pixels", "policy.encoder.channels=[8,16,16]", *overrides)
    return algorithm_of(spec, *words, seed=seed)


# -- the encoder


@pytest.mark.parametrize(("high", "wrist"), [((32, 32, 3), (128, 128, 3)), ((48, 65, 3), (33, 40, 1))])
def test_images_of_any_size_become_features_beside_the_states(high, wrist):
    images = {WRIST: Feature(wrist, "uint8"), HIGH: Feature(high, "uint8")}
    spec = replace(SPEC, observation={STATE: Feature((2,)), **images})
    encoder = ObservationEncoder(spec, cameras="all", channels=[8, 16, 16, 32], latent=12)
    observation = observe(5, spec)
    features = encoder(observation)
    assert encoder.inputs == (STATE, HIGH, WRIST)
    assert features.shape == (5, encoder.size) == (5, 2 + 2 * 12)
    assert torch.equal(features[:, :2], observation[STATE])
    assert features[:, 2:].abs().max() < 1
    torch.testing.assert_close(encoder({name: value.unsqueeze(1) for name, value in observation.items()}), features)


def test_every_image_counts_and_counts_for_its_own_row_alone():
    encoder, observation = ObservationEncoder(SPEC, cameras=["all"], channels=[8, 16]), observe(4)
    before = encoder(observation)
    for name in (HIGH, WRIST):
        changed = {**observation, name: observation[name].clone()}
        changed[name][2] = 255 - changed[name][2]
        difference = (encoder(changed) - before).abs().amax(-1)
        assert difference[2] > 1e-3
        assert difference[[0, 1, 3]].max() < 1e-5


def test_cameras_are_chosen_by_name_and_without_any_it_is_the_encoder_of_states():
    encoder, observation = ObservationEncoder(SPEC), observe(4)
    assert encoder.inputs == (STATE,)
    assert not list(encoder.parameters())
    assert torch.equal(encoder(observation), StateEncoder(SPEC)(observation))
    assert ObservationEncoder(SPEC, cameras=["cam_wrist"]).inputs == (STATE, WRIST)
    assert ObservationEncoder(SPEC, cameras="cam_high").inputs == (STATE, HIGH)
    assert ObservationEncoder(SPEC, cameras=["cam_wrist", "cam_high"]).inputs == (STATE, HIGH, WRIST)
    with pytest.raises(ConfigError, match="no camera cam_low; name some of cam_high, cam_wrist"):
        ObservationEncoder(SPEC, cameras=["cam_high", "cam_low"])


def test_a_robot_that_only_sees_needs_no_states():
    spec = robot(states=0, cameras=(HIGH,))
    encoder = ObservationEncoder(spec, cameras="all", channels=[8], latent=7)
    assert encoder(observe(3, spec)).shape == (3, 7)
    with pytest.raises(ConfigError, match="float"):
        ObservationEncoder(spec)


@pytest.mark.parametrize(
    ("cameras", "options", "text"),
    [
        ((), {"cameras": "all"}, r"task\.cameras=true"),
        ((), {"cameras": ["cam_high"]}, r"task\.cameras=true"),
        *(((HIGH,), {"cameras": "all", "channels": channels}, "multiple of 8") for channels in ([], [8, 12], [0])),
    ],
)
def test_what_cannot_be_encoded_is_refused_with_what_to_say(cameras, options, text):
    with pytest.raises(ConfigError, match=text):
        ObservationEncoder(robot(cameras=cameras), **options)


# -- augmentation


def test_a_shift_moves_what_is_seen_and_repeats_the_border():
    images = torch.randint(256, (5, 2, SIZE, SIZE, 3), dtype=torch.uint8)
    down, right = torch.tensor([0, 4, -4, 3, -1]), torch.tensor([0, -4, 2, 0, 4])
    moved = shifted(images, down, right)
    assert moved.dtype == torch.uint8
    for i, (dy, dx) in enumerate(zip(down.tolist(), right.tolist(), strict=True)):
        padded = functional.pad(images[i].permute(0, 3, 1, 2).float(), (4, 4, 4, 4), mode="replicate")
        expected = padded[:, :, 4 - dy : 4 - dy + SIZE, 4 - dx : 4 - dx + SIZE].permute(0, 2, 3, 1).to(torch.uint8)
        assert torch.equal(moved[i], expected)


def offsets(before, after):
    """The (down, right) of each row's image at its first time step."""
    every = torch.cartesian_prod(torch.arange(-4, 5), torch.arange(-4, 5))
    found = [(shifted(before, *pair.expand(len(before), 2).T) == after).flatten(1).all(1) for pair in every]
    assert torch.stack(found).any(0).all()
    return every[torch.stack(found).int().argmax(0)].tolist()


def test_rows_cameras_and_the_next_observation_are_shifted_each_by_themselves():
    rows = batch(SPEC, 64)
    rows = replace(rows, next_observation=rows.observation)
    original = {name: value.clone() for name, value in rows.observation.items()}
    changed = Augment(4, 0.0, 0.0)(rows)
    drawn = [offsets(rows.observation[name], seen[name])
             for seen in (changed.observation, changed.next_observation) for name in (HIGH, WRIST)]  # fmt: skip
    for i, pairs in enumerate(drawn):
        assert all({pair[axis] for pair in pairs} == set(range(-4, 5)) for axis in (0, 1))
        assert all(sum(map(list.__eq__, pairs, other)) < 8 for other in drawn[:i])
    assert torch.equal(changed.observation[STATE], original[STATE])
    assert all(torch.equal(rows.observation[name], value) for name, value in original.items())  # nothing in place


def test_the_time_steps_of_one_window_are_changed_alike():
    rows = anything()
    still = {name: value.repeat_interleave(3, 1) for name, value in rows.observation.items()}
    changed = Augment(4, 0.5, 0.5)(replace(rows, observation=still)).observation[HIGH]
    assert not torch.equal(changed, still[HIGH])
    assert torch.equal(changed, changed[:, :1].expand_as(changed))


def test_the_rows_seeds_decide_and_a_batch_without_a_next_observation_is_changed_too():
    augment, rows = Augment(4, 0.2, 0.2), anything(next_observation=None)
    one, same, other = (augment(replace(rows, seed=rows.seed + seed)).observation[HIGH] for seed in (1000, 1000, 2000))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_brightness_scales_contrast_spreads_about_grey_and_both_stay_bytes():
    images = torch.tensor([0, 100, 200], dtype=torch.uint8).repeat(3, 1)
    changed = coloured(images, torch.tensor([1.0, 1.5, 1.0]), torch.tensor([1.0, 1.0, 0.5]))
    assert changed.tolist() == [[0, 100, 200], [0, 150, 255], [64, 114, 164]]


def test_colours_change_within_their_strength_and_without_any_strength_nothing_does():
    rows = batch(SPEC, 64)
    rows.observation[HIGH][:] = 100
    values = Augment(0, 0.2, 0.0)(rows).observation[HIGH].flatten(1).float()
    assert torch.equal(values.amin(1), values.amax(1))
    assert 80 <= values.min() < 90 < 110 < values.max() <= 120
    assert torch.equal(Augment(0, 0.0, 0.0)(rows).observation[WRIST], rows.observation[WRIST])


@pytest.mark.parametrize("options", [(-1, 0.0, 0.0), (4, 1.5, 0.0), (4, 0.0, -0.1)])
def test_an_augmentation_that_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match="augment: shift"):
        Augment(*options)


# -- soft actor-critic from pixels


def test_the_critics_train_the_convolutions_and_the_policy_has_a_copy():
    algorithm = build()
    before = weights(algorithm.policy.encoder)
    algorithm.update(anything())
    critics = weights(algorithm.critic.encoder)
    for name, value in weights(algorithm.policy.encoder).items():
        if name.startswith("trunks"):
            assert torch.equal(value, critics[name])
            assert not torch.equal(value, before[name])
        elif name.startswith("projections"):
            assert not torch.equal(value, critics[name])


def test_augmentation_for_a_policy_that_sees_nothing_is_refused():
    with pytest.raises(ConfigError, match="gaussian_pixels"):
        build(SPEC, "policy.encoder.cameras=[]")
    with pytest.raises(ConfigError, match="flow_pixels"):
        augmentation(partial(Augment, 4, 0.0, 0.0), ["observation.state"])


def places(size, generator):
    """Pictures of a bright block, [B, 1, H, W, 3], and where it is, within -1..1 [B, 2]."""
    corner = torch.randint(SIZE - 6, (size, 2), generator=generator)
    line = torch.arange(SIZE)
    inside = (line >= corner[..., None]) & (line < corner[..., None] + 6)  # [B, 2, SIZE]
    block = inside[:, 0, :, None] & inside[:, 1, None, :]
    return (60 + 150 * block).to(torch.uint8)[:, None, :, :, None].repeat(1, 1, 1, 1, 3), corner / (SIZE - 7) * 2 - 1


@pytest.mark.nightly
def test_a_policy_learns_to_reach_for_what_only_the_camera_sees():
    """One-step episodes: the reward is how near the action comes to the block."""
    spec, generator = robot(2, reach=1, shape=(SIZE, SIZE, 3), cameras=(HIGH,)), torch.Generator().manual_seed(1)
    algorithm = build(spec, "algo.learning_rate=3e-3", "algo.initial_temperature=0.01", "critic.num_critics=4")
    images, wanted = places(256, generator)

    def error():
        action = act(algorithm, {STATE: torch.zeros(256, 2), HIGH: images[:, 0]}, torch.zeros(256, 1, 2))[:, 0]
        return (action - wanted).norm(dim=-1).mean()

    for update in range(250):
        image, place = places(64, generator)
        rows = batch(spec, 64, ends="terminated", seed=update)
        rows.observation.update({STATE: torch.zeros(64, 1, 2), HIGH: image})
        algorithm.update(replace(rows, reward=-(rows.action[:, 0] - place).square().sum(-1, keepdim=True)))
        if update % 25 == 24 and error() < wanted.norm(dim=-1).mean() / 2:
            return
    raise AssertionError(f"the mean error is {error():.2f} after 250 updates")
