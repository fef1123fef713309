"""PI0 is the paper's model, and what decides its action and what trains is what it is asked for."""

import logging
import math

import pytest
import torch
from hydra.utils import instantiate
from serl_client import ConfigError
from torch import nn
from transformers import GemmaConfig, GemmaModel, SiglipVisionConfig
from transformers import SiglipVisionModel as Siglip

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.heads.flow import TIME
from serl_launcher.policies.pi0 import TOKENS, WORDS, fitted
from tests.policies import test_relative as relative
from tests.shared import pi0
from tests.shared.models import REACH, STATE, now, robot
from tests.shared.pi0 import LEFT, ROWS, TASKS, TOP, WIDTH, action_of, batch_of, gradients, make, observation_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]  # its import alone takes seconds


def point_of(policy):
    """x_t [B, H, D] and t [B]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, policy.horizon, policy.width, generator=generator), torch.linspace(1, 0.01, ROWS)


def velocity_of(policy, observation):
    """The velocity at point_of."""
    chunk, time = point_of(policy)
    return policy.velocity(chunk, time[:, None], policy.condition(policy.prepared(observation, TASKS)))


def assert_close(one, other, tolerance=1e-5):
    torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


# -- the model is the paper's
def joint_velocity(policy, observation, chunk, time, lacking=()):
    """The velocity by one pass over prefix and suffix side by side, written from the paper, without a cache and without
    the layers' own code; the tokens of the cameras `lacking` are masked."""
    prepared = policy.prepared(observation, TASKS)
    cameras, there = [], []
    for name in policy.inputs[1:]:
        cameras.append(policy._seen(observation[name]))
        there.append(torch.full(cameras[-1].shape[:2], name not in lacking))
    words = policy.language.embed_tokens.weight[prepared[TOKENS]] * math.sqrt(WIDTH)
    prefix = torch.cat([*cameras, words], 1)
    angle = time.double()[:, None] * math.tau / (4e-3 * 1000 ** torch.linspace(0, 1, WIDTH // 2, dtype=torch.float64))
    features = torch.cat([angle.sin(), angle.cos()], 1).float()[:, None].expand(-1, policy.horizon, -1)
    action = policy.action_time_in(torch.cat([policy.action_in(chunk), features], -1))
    action = policy.action_time_out(action * action.sigmoid())
    state = torch.zeros(len(chunk), 32)
    state[:, :5] = (observation[STATE] - policy.state.mean) / policy.state.std
    suffix = torch.cat([policy.state_projection(state)[:, None], action], 1)
    block = torch.tensor([0] * prefix.shape[1] + [1] + [2] * policy.horizon)
    there = torch.cat([*there, prepared[WORDS], torch.ones(suffix.shape[:2], dtype=torch.bool)], 1)
    mask = (block[None, :] <= block[:, None]) & there[:, None, :]
    streams = [prefix, suffix]
    for layers in zip(policy.language.layers, policy.expert.layers, strict=True):
        streams = joint_layer(layers, streams, mask, there.cumsum(1) - 1)
    return policy.action_out(rms_norm(policy.expert.norm.weight, streams[1])[:, 1:])


def joint_layer(layers, streams, mask, positions):
    """One layer of both stacks: each with its own weights, all tokens in one attention."""
    normed = [rms_norm(layer.input_layernorm.weight, x) for layer, x in zip(layers, streams, strict=True)]
    keys, values = (
        torch.cat([getattr(layer.self_attn, name)(x) for layer, x in zip(layers, normed, strict=True)], 1)
        for name in ("k_proj", "v_proj")
    )  # [B, T, head_dim]: one head for all
    found, start = [], 0
    for layer, x, n in zip(layers, streams, normed, strict=True):
        rows, start = slice(start, start + x.shape[1]), start + x.shape[1]
        if layer.self_attn.q_proj is None:  # nobody reads the backbone's last output
            found.append(None)
            continue
        queries = layer.self_attn.q_proj(n).unflatten(-1, (pi0.HEADS, pi0.HEAD_DIM))
        scores = torch.einsum("bthd,bsd->bhts", turned(queries, positions[:, rows]), turned(keys, positions))
        scores = (scores / math.sqrt(pi0.HEAD_DIM)).masked_fill(~mask[:, None, rows], -math.inf)
        heard = torch.einsum("bhts,bsd->bthd", scores.softmax(-1), values).flatten(2)
        x = x + layer.self_attn.o_proj(heard)
        inner = rms_norm(layer.post_attention_layernorm.weight, x)
        gate = layer.mlp.gate_proj(inner)
        gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        found.append(x + layer.mlp.down_proj(gate * layer.mlp.up_proj(inner)))
    return found


def rms_norm(weight, x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)


def turned(x, positions):
    """Rotary embedding of [B, T, (heads,) head_dim] at positions [B, T] (Su et al. 2021)."""
    angle = positions[..., None] / 10_000 ** (torch.arange(0, pi0.HEAD_DIM, 2) / pi0.HEAD_DIM)
    angle = angle.view(*positions.shape, *[1] * (x.ndim - 3), -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def test_the_cached_path_is_the_joint_forward_of_the_paper():
    policy = make(LEFT, TOP)
    observation = observation_of(policy)
    ours, joint = velocity_of(policy, observation), joint_velocity(policy, observation, *point_of(policy))
    assert_close(ours, joint)
    ours, joint = (gradients(policy, velocity.square().mean()) for velocity in (ours, joint))
    for name, gradient in joint.items():
        assert_close(ours[name], gradient)


def test_the_loss_is_that_of_the_joint_forward_at_the_rows_noise_and_time():
    policy = make(LEFT)
    rows = batch_of(policy)
    noise, time = normal(rows.seed, (8, 8)), 0.001 + 0.999 * uniform(rows.seed, (), TIME) ** (1 / 1.5)
    action = torch.cat([rows.action / REACH, torch.zeros(ROWS, 8, 6)], -1)
    t = time[:, None, None]
    error = joint_velocity(policy, now(rows.observation), t * noise + (1 - t) * action, time) - (noise - action)
    assert_close(policy(rows)[0], error[..., :2].square().mean((1, 2)))


def test_the_keys_and_values_of_the_prefix_are_those_of_transformers_own_model():
    policy = make(LEFT)
    observation = observation_of(policy)
    prepared = policy.prepared(observation, TASKS)
    words = policy.language.embed_tokens(prepared[TOKENS]) * math.sqrt(WIDTH)
    prefix, there = torch.cat([policy._seen(observation[LEFT]), words], 1), policy.condition(prepared).there
    model = GemmaModel(GemmaConfig(**pi0.TEXT, attn_implementation="sdpa"))
    model.load_state_dict(policy.language.state_dict(), strict=False)
    if not hasattr(model.embed_tokens, "embed_scale"):  # transformers 4 scales all that comes in
        prefix = prefix / math.sqrt(WIDTH)
    mask = there[:, None, None, :].expand(-1, 1, prefix.shape[1], -1)
    cache = model(
        inputs_embeds=prefix, attention_mask=mask, position_ids=there.cumsum(1) - 1, use_cache=True
    ).past_key_values
    for (keys, values), layer in zip(policy.condition(prepared).layers, cache.layers, strict=True):
        real = there[:, None, :, None]
        assert_close(keys * real, layer.keys * real, 2e-5)
        assert_close(values * real, layer.values * real, 2e-5)


def test_image_tokens_are_those_of_a_plain_tower():
    policy = make(LEFT)
    tower = Siglip(SiglipVisionConfig(**pi0.VISION))
    getattr(tower, "vision_model", tower).load_state_dict(policy.vision.state_dict())
    image = torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8)
    features = tower(pixel_values=image.permute(0, 3, 1, 2) / 255.0 * 2 - 1).last_hidden_state
    assert_close(policy._seen(image), features @ policy.image_projection.weight.T + policy.image_projection.bias)


def test_images_keep_their_shape_and_black_bars_fill_the_square():
    image = torch.rand(2, 3, 48, 64) * 2 - 1
    inside = fitted(image, 64, antialias=True)
    assert torch.equal(inside[:, :, 8:56], image)
    assert (inside[:, :, :8] == -1).all()
    assert (inside[:, :, 56:] == -1).all()
    shrunk = fitted(torch.full((1, 3, 128, 96), 0.5), 64, antialias=True)
    torch.testing.assert_close(shrunk[:, :, :, 8:56], torch.full((1, 3, 64, 48), 0.5))
    assert (shrunk[:, :, :, :8] == -1).all()
    assert fitted(torch.zeros(1, 3, 30, 97), 64, antialias=True).shape == (1, 3, 64, 64)


@torch.no_grad()
def test_relative_chunks_are_what_openpis_transforms_make_of_the_same_network():
    ours, plain = (pi0.make(spec=relative.SPEC, scale="std", relative=names) for names in (["wrist", "elbow"], []))
    for scale in (ours.relative.scale, plain.scale):
        scale.set_statistics(relative.STATISTICS)
    rows = relative.rows_of(ours, ROWS, task=TASKS)
    torch.testing.assert_close(ours(rows)[0], plain(relative.delta_actions(rows))[0])
    seen = now(rows.observation)
    moved = relative.offset(seen[STATE])
    assert_close(action_of(ours, seen), action_of(plain, seen) + moved)
    assert moved.abs().max() > 0.1


@pytest.mark.parametrize("shape", [(56, 56), (224, 224), (480, 640), (640, 480)], ids=str)
def test_images_of_every_size_are_fitted_as_lerobot_does(shape):
    lerobot = pytest.importorskip("lerobot.policies.pi0.modeling_pi0", reason="the extra `data` is not installed")
    image = torch.rand(2, 3, *shape) * 2 - 1
    theirs = lerobot.resize_with_pad_torch(image, 224, 224)
    assert_close(fitted(image, 224, antialias=False), theirs)


# -- cameras and states
def test_a_camera_that_is_left_out_is_one_whose_tokens_are_masked():
    both, one = make(LEFT, TOP), make(TOP)
    one.load_state_dict(both.state_dict())
    observation = observation_of(both)
    masked = joint_velocity(both, observation, *point_of(both), lacking=[LEFT])
    assert_close(velocity_of(one, observation), masked)
    assert (velocity_of(both, observation) - masked).abs().max() > 1e-2


def test_cameras_are_read_in_the_order_in_which_they_are_named():
    policies = [make(LEFT, TOP, cameras=cameras) for cameras in (["all"], ["left", "top"], ["top", "left"])]
    observation = observation_of(policies[0])
    by_name, named, turned_round = (velocity_of(policy, observation) for policy in policies)
    assert torch.equal(by_name, named)
    assert (named - turned_round).abs().max() > 1e-3
    swapped = {**observation, LEFT: observation[TOP], TOP: observation[LEFT]}
    assert torch.equal(velocity_of(policies[2], swapped), named)


def test_cameras_that_the_robot_lacks_are_left_out_with_a_word_but_not_all_of_them(caplog):
    with caplog.at_level(logging.WARNING):
        policy = make(TOP, cameras=["left", "top", "right"])
    assert policy.inputs == (STATE, TOP)
    assert [record.getMessage() for record in caplog.records] == [
        "policy.cameras: this robot has no camera left, right; it has top: name those"
    ]
    with pytest.raises(ConfigError, match="this robot has no camera tpo; it has left, top: name those"):
        make(LEFT, TOP, cameras=["tpo"])


@pytest.mark.parametrize("options", [{}, {"cameras": ["left"]}], ids=["all", "named"])
def test_a_robot_without_cameras_acts_by_state_and_task(options):
    policy = make(**options)
    assert policy.inputs == (STATE,)
    assert not any(name.startswith(("vision", "image")) for name in policy.state_dict())
    observation = observation_of(policy)
    assert_close(velocity_of(policy, observation), joint_velocity(policy, observation, *point_of(policy)))


def test_what_does_not_fit_is_refused():
    for options, text in (
        ({"width": 1}, r"action has 2 numbers and its state 5: policy\.width=1"),
        ({"state_size": 4}, r"policy\.state_size=4 must be at least that"),
        ({"freeze": ["eyes"]}, r"no part eyes; name some of vision, language, expert"),
        ({"precision": "half"}, r"precision=half: say one of float32, bfloat16"),
        ({"weights": "/nowhere"}, r"weights=/nowhere: no such file"),
    ):
        with pytest.raises(ConfigError, match=text):
            make(**options)
    with pytest.raises(ConfigError, match="nothing for a state policy"):
        instantiate(pi0.policy_config("pi0_tiny"))(robot(states=0))


# -- what decides the action
def test_samples_of_one_prefix_are_those_drawn_one_by_one():
    policy = make(LEFT)
    observation = observation_of(policy)
    noise = torch.randn(2, ROWS, *policy.noise_shape)
    together = policy.sample(observation, task=TASKS, noise=noise)
    assert together.shape == (2, ROWS, 8, 2)
    for row, task in enumerate(TASKS):
        single = {name: value[row : row + 1] for name, value in observation.items()}
        for sample in range(2):
            alone = policy.sample(single, task=[task], noise=noise[sample : sample + 1, row : row + 1])
            assert_close(alone[0, 0], together[sample, row])


def test_noise_task_state_and_every_camera_decide_the_action_and_nothing_else_does():
    policy = make(LEFT, TOP)
    observation = observation_of(policy)
    action, other = action_of(policy), observation_of(policy, seed=1)
    assert torch.equal(action, action_of(policy))
    assert not torch.equal(action, action_of(policy, seed=1))
    assert not torch.equal(action, action_of(policy, task=("lift the cube", *TASKS[1:])))
    for name in policy.inputs:
        assert not torch.equal(action, action_of(policy, {**observation, name: other[name]})), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_padding_of_the_prompt_changes_nothing(precision):
    short, long = (make(LEFT, prompt_tokens=tokens, precision=precision) for tokens in (24, 48))
    observation = observation_of(short)
    tolerance = 1e-5 if precision == "float32" else 3e-2
    assert_close(velocity_of(short, observation), velocity_of(long, observation), tolerance)


# -- precision, memory, compilation
def test_bfloat16_is_near_float32_in_training_and_in_acting():
    exact, rough = make(LEFT), make(LEFT, precision="bfloat16")
    observation = observation_of(exact)
    velocity = velocity_of(exact, observation)
    size = velocity.square().mean().sqrt()
    assert (velocity_of(rough, observation) - velocity).square().mean().sqrt() < 2e-2 * size
    rows = batch_of(exact)
    torch.testing.assert_close(rough(rows)[0], exact(rows)[0], rtol=2e-2, atol=0)
    action = action_of(exact)
    for weight in rough.parameters():
        weight.data = weight.data.bfloat16()
    assert (velocity_of(rough, observation) - velocity).square().mean().sqrt() < 2e-2 * size
    assert (action_of(rough) - action).abs().mean() < 2e-2 * action.abs().mean()


def test_computing_the_layers_again_changes_no_loss_and_no_gradient_and_keeps_less():
    losses, found, kept = [], [], []
    for checkpointing in (False, True):
        policy, sizes = make(LEFT, checkpointing=checkpointing), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=sizes: to.append(x.numel()) or x, lambda x: x):
            losses.append(policy(batch_of(policy))[0])
        kept.append(sum(sizes))
        found.append(gradients(policy, losses[-1].mean()))
    assert torch.equal(*losses)
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())
    assert kept[1] < 0.25 * kept[0]


@pytest.mark.parametrize(
    "precision", [pytest.param("float32", marks=pytest.mark.slow), pytest.param("bfloat16", marks=pytest.mark.nightly)]
)
def test_a_sample_is_one_graph_without_a_break(precision):
    policy = make(LEFT, precision=precision, steps=2, gemma={"depth": 2}, vision={"depth": 1})
    prepared = policy.prepared(observation_of(policy), TASKS)
    noise = torch.randn(2, ROWS, *policy.noise_shape)
    with torch.no_grad():
        compiled = torch.compile(policy.chunks, fullgraph=True, backend="eager")(prepared, noise)
        assert torch.equal(compiled, policy.chunks(prepared, noise))


# -- what trains
PROJECTIONS = ("state_projection", "action_in", "action_time_in", "action_time_out", "action_out")


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, ("vision", "image_projection", "language", "expert")),
        ({"freeze": ["vision"]}, ("language", "expert")),
        ({"freeze": ["vision", "language"]}, ("expert",)),
        ({"freeze": ["expert"]}, ("vision", "image_projection", "language")),
    ],
)
def test_what_is_not_frozen_trains_and_all_that_trains_has_a_use(options, trained):
    policy = make(LEFT, **options)
    expected = {name for name, _ in policy.named_parameters() if name.split(".")[0] in (*trained, *PROJECTIONS)}
    assert {name for name, weight in policy.named_parameters() if weight.requires_grad} == expected
    found = gradients(policy, policy(batch_of(policy))[0].mean())
    assert found.keys() == expected
    assert all(gradient.any() for gradient in found.values())


def test_low_rank_updates_of_both_stacks_are_trained():
    adapted = instantiate(pi0.policy_config("pi0_tiny"))(pi0.spec_of(LEFT), lora=2)
    trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    stacks = [name for name in trained if not name.startswith(PROJECTIONS)]
    assert all("lora_" in name and name.startswith(("language.", "expert.")) for name in stacks)
    assert len(stacks) == 2 * (7 * pi0.DEPTH + 7 * (pi0.DEPTH - 1) + 2)  # of the last layer keys and values alone
    pi0.randomise(nn.ParameterList(trained[name] for name in stacks))
    assert all(gradient.any() for gradient in gradients(adapted, adapted(batch_of(adapted))[0].mean()).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi0", "pi0_expert", "pi0_lora"])
def test_at_full_size_it_has_the_weights_of_pi0_base_that_are_read(name):
    """PaliGemma 3B and the expert of 300M, without the backbone's last queries and last MLP, and without lm_heads."""
    with torch.device("meta"):
        policy = instantiate(pi0.policy_config(name))(pi0.spec_of(LEFT, TOP, states=14, actions=14))
    sizes = {part: sum(weight.numel() for weight in module.parameters()) for part, module in policy.named_children()}
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    total = sum(sizes.values())
    if name == "pi0":
        assert 3.1e9 < total == trained < 3.3e9, f"{total:,} weights: {sizes}"
        assert sizes["vision"] == pytest.approx(412e6, rel=0.01)
        layers = 1982e6 - (2 * 2048**2 + 3 * 2048 * 16384)
        assert sizes["language"] == pytest.approx(layers + 257152 * 2048, rel=0.001)
        assert sizes["expert"] == pytest.approx(311e6, rel=0.002)
    elif name == "pi0_expert":
        assert trained == pytest.approx(315e6, rel=0.01), f"{trained:,} of {total:,}"
    else:
        assert trained < 0.01 * total, f"{trained:,} of {total:,}"
