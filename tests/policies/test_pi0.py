"""PI0 is the paper's model, begins with the checkpoints of others, and sends what those who act need."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from serl_client import ConfigError, Feature, Spec
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, GemmaModel, PaliGemmaConfig, SiglipVisionConfig
from transformers import PaliGemmaForConditionalGeneration as PaliGemma
from transformers import SiglipVisionModel as Siglip

from serl_launcher.networks.seeded_noise import normal, uniform
from serl_launcher.policies.flow import TIME
from serl_launcher.policies.pi0 import FROZEN, TOKENS, WORDS, fitted
from serl_launcher.policies.pi0_checkpoint import load_pretrained
from serl_launcher.types import Batch

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Path(__file__).parents[2] / "config"
STATE, LEFT, TOP = "observation.state", "observation.images.left", "observation.images.top"
TASKS = ("push the cube", "go", "")
ROWS, WIDTH, DEPTH, HEADS, HEAD_DIM = 3, 96, 3, 4, 24  # of pi0_tiny, but for the rows
TEXT = {
    "hidden_size": WIDTH, "intermediate_size": 192, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": HEAD_DIM, "vocab_size": 258,
}  # fmt: skip
VISION = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 8, "vision_use_head": False,
}  # fmt: skip
TOWER = {"image": VISION["image_size"], "patch": VISION["patch_size"]}


@pytest.fixture(scope="module")
def configs():
    """configs(name) is config/policy/<name>.yaml."""
    known = {}

    def read(name):
        if name not in known:
            with initialize_config_dir(str(CONFIG), version_base="1.3"):
                known[name] = compose(overrides=[f"+policy={name}"]).policy
        return known[name]

    return read


@pytest.fixture
def make(configs):
    """make(*cameras, **options) is pi0_tiny with random weights, norms and biases among them."""

    def made(*cameras, seed=0, **options):
        torch.manual_seed(seed)
        config = configs("pi0_tiny")
        pinned = {"gemma": {}, "vision": TOWER}
        sizes = {name: {**config[name], **pinned[name], **options.pop(name, {})} for name in pinned}
        policy = instantiate(config)(spec_of(*cameras), **sizes, **options)
        randomise(policy)
        return policy

    return made


def spec_of(*cameras, states=5, actions=2):
    images = {camera: Feature((48, 64, 3), "uint8") for camera in cameras}
    return Spec({STATE: Feature((states,)), **images}, Feature((actions,), low=-2, high=2), fps=10.0)


def randomise(module):
    """Weights of order one over the root of their inputs; norms and biases, too, say something."""
    for weight in module.parameters():
        scale = 0.3 if weight.ndim < 2 else weight[0].numel() ** -0.5
        nn.init.normal_(weight, std=scale)


def observation_of(policy, seed=0, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    observation = {STATE: torch.randn(rows, 5, generator=generator)}
    for name in policy.inputs[1:]:
        observation[name] = torch.randint(0, 256, (rows, 48, 64, 3), generator=generator, dtype=torch.uint8)
    return observation


def batch_of(policy, rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    flags = torch.ones(rows, policy.horizon, dtype=torch.bool)
    action = torch.rand(rows, policy.horizon, 2, generator=generator) * 4 - 2
    observation = {name: value.unsqueeze(1) for name, value in observation_of(policy, rows=rows).items()}
    return Batch(
        observation, action, torch.zeros(flags.shape), flags, ~flags, ~flags, ~flags, flags.sum(1), torch.ones(rows),
        torch.arange(rows), torch.arange(rows), task=TASKS[:rows],
    )  # fmt: skip


def point_of(policy, rows=ROWS):
    """x_t [B, H, D] and t [B]."""
    generator = torch.Generator().manual_seed(0)
    chunk = torch.randn(rows, policy.horizon, policy.width, generator=generator)
    return chunk, torch.linspace(1, 0.01, rows)


def velocity_of(policy, observation, task=TASKS):
    """The velocity at point_of, and the gradient of the mean of its square for each weight."""
    rows = len(observation[STATE])
    condition = policy.condition(policy.prepared(observation, task[:rows]))
    return policy.velocity(*point_of(policy, rows), condition)


def gradients(policy, loss):
    weights = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    return dict(zip(weights, torch.autograd.grad(loss, weights.values()), strict=True))


def action_of(policy, observation=None, task=TASKS, seed=0, n=1):
    observation = observation_of(policy) if observation is None else observation
    shape = n, len(observation[STATE]), *policy.noise_shape
    with torch.no_grad():
        return policy.sample(
            observation, task=task, noise=torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        )


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
        queries = layer.self_attn.q_proj(n).unflatten(-1, (HEADS, HEAD_DIM))
        scores = torch.einsum("bthd,bsd->bhts", turned(queries, positions[:, rows]), turned(keys, positions))
        scores = (scores / math.sqrt(HEAD_DIM)).masked_fill(~mask[:, None, rows], -math.inf)
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
    angle = positions[..., None] / 10_000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = angle.view(*positions.shape, *[1] * (x.ndim - 3), -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def test_the_cached_path_is_the_joint_forward_of_the_paper(make):
    policy = make(LEFT, TOP)
    observation = observation_of(policy)
    ours, joint = velocity_of(policy, observation), joint_velocity(policy, observation, *point_of(policy))
    assert_close(ours, joint)
    ours, joint = (gradients(policy, velocity.square().mean()) for velocity in (ours, joint))
    for name, gradient in joint.items():
        assert_close(ours[name], gradient)


def test_the_loss_is_that_of_the_joint_forward_at_the_rows_noise_and_time(make):
    policy = make(LEFT)
    batch = batch_of(policy)
    observation = {name: value[:, 0] for name, value in batch.observation.items()}
    noise, time = normal(batch.seed, (8, 8)), 0.001 + 0.999 * uniform(batch.seed, (), TIME) ** (1 / 1.5)
    action = torch.cat([batch.action / 2, torch.zeros(ROWS, 8, 6)], -1)
    t = time[:, None, None]
    error = joint_velocity(policy, observation, t * noise + (1 - t) * action, time) - (noise - action)
    assert_close(policy(batch)[0], error[..., :2].square().mean((1, 2)))


def test_the_keys_and_values_of_the_prefix_are_those_of_transformers_own_model(make):
    policy = make(LEFT)
    observation = observation_of(policy)
    prepared = policy.prepared(observation, TASKS)
    words = policy.language.embed_tokens(prepared[TOKENS]) * math.sqrt(WIDTH)
    prefix, there = torch.cat([policy._seen(observation[LEFT]), words], 1), policy.condition(prepared).there
    model = GemmaModel(GemmaConfig(**TEXT, attn_implementation="sdpa"))
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


def test_image_tokens_are_those_of_a_plain_tower(make):
    policy = make(LEFT)
    tower = Siglip(SiglipVisionConfig(**VISION))
    getattr(tower, "vision_model", tower).load_state_dict(policy.vision.state_dict())
    image = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    features = tower(pixel_values=image.permute(0, 3, 1, 2) / 255.0 * 2 - 1).last_hidden_state
    assert_close(policy._seen(image), features @ policy.image_projection.weight.T + policy.image_projection.bias)


def test_images_keep_their_shape_and_black_bars_fill_the_square():
    image = torch.rand(2, 3, 48, 64) * 2 - 1
    inside = fitted(image, 64)
    assert torch.equal(inside[:, :, 8:56], image)
    assert (inside[:, :, :8] == -1).all()
    assert (inside[:, :, 56:] == -1).all()
    shrunk = fitted(torch.full((1, 3, 128, 96), 0.5), 64)
    torch.testing.assert_close(shrunk[:, :, :, 8:56], torch.full((1, 3, 64, 48), 0.5))
    assert (shrunk[:, :, :, :8] == -1).all()
    assert fitted(torch.zeros(1, 3, 30, 97), 64).shape == (1, 3, 64, 64)


# -- cameras and states
def test_a_camera_that_is_left_out_is_one_whose_tokens_are_masked(make):
    both, one = make(LEFT, TOP), make(TOP)
    one.load_state_dict(both.state_dict())
    observation = observation_of(both)
    masked = joint_velocity(both, observation, *point_of(both), lacking=[LEFT])
    assert_close(velocity_of(one, observation), masked)
    assert (velocity_of(both, observation) - masked).abs().max() > 1e-2


def test_cameras_are_read_in_the_order_in_which_they_are_named(make):
    policies = [make(LEFT, TOP, cameras=cameras) for cameras in (["all"], ["left", "top"], ["top", "left"])]
    observation = observation_of(policies[0])
    by_name, named, turned_round = (velocity_of(policy, observation) for policy in policies)
    assert torch.equal(by_name, named)
    assert (named - turned_round).abs().max() > 1e-3
    swapped = {**observation, LEFT: observation[TOP], TOP: observation[LEFT]}
    assert torch.equal(velocity_of(policies[2], swapped), named)


def test_cameras_that_the_robot_lacks_are_left_out_with_a_word_but_not_all_of_them(make, caplog):
    with caplog.at_level(logging.WARNING):
        policy = make(TOP, cameras=["left", "top", "right"])
    assert policy.inputs == (STATE, TOP)
    assert [record.getMessage() for record in caplog.records] == [
        "policy.cameras: this robot has no camera left, right; it has top"
    ]
    with pytest.raises(ConfigError, match="this robot has no camera tpo; it has left, top"):
        make(LEFT, TOP, cameras=["tpo"])


@pytest.mark.parametrize("options", [{}, {"cameras": ["left"]}], ids=["all", "named"])
def test_a_robot_without_cameras_acts_by_state_and_task(make, options):
    policy = make(**options)
    assert policy.inputs == (STATE,)
    assert not any(name.startswith(("vision", "image")) for name in policy.state_dict())
    observation = observation_of(policy)
    assert_close(velocity_of(policy, observation), joint_velocity(policy, observation, *point_of(policy)))


def test_what_does_not_fit_is_refused(make, configs):
    for options, text in (
        ({"width": 1}, r"action has 2 numbers and its state 5: policy\.width=1"),
        ({"state_size": 4}, r"policy\.state_size=4 must be at least that"),
        ({"freeze": ["eyes"]}, r"no part eyes; the parts are vision, language, expert"),
        ({"precision": "half"}, r"precision=half: say one of float32, bfloat16"),
        ({"weights": "/nowhere"}, r"weights=/nowhere: no such file"),
    ):
        with pytest.raises(ConfigError, match=text):
            make(**options)
    blind = Spec({TOP: Feature((48, 64, 3), "uint8")}, Feature((2,), low=-2, high=2), fps=10.0)
    with pytest.raises(ConfigError, match="nothing for a state policy"):
        instantiate(configs("pi0_tiny"))(blind)


# -- what decides the action
def test_samples_of_one_prefix_are_those_drawn_one_by_one(make):
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


def test_noise_task_state_and_every_camera_decide_the_action_and_nothing_else_does(make):
    policy = make(LEFT, TOP)
    observation = observation_of(policy)
    action, other = action_of(policy), observation_of(policy, seed=1)
    assert torch.equal(action, action_of(policy))
    assert not torch.equal(action, action_of(policy, seed=1))
    assert not torch.equal(action, action_of(policy, task=("lift the cube", *TASKS[1:])))
    for name in policy.inputs:
        assert not torch.equal(action, action_of(policy, {**observation, name: other[name]})), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_padding_of_the_prompt_changes_nothing(make, precision):
    short, long = (make(LEFT, prompt_tokens=tokens, precision=precision) for tokens in (24, 48))
    observation = observation_of(short)
    tolerance = 1e-5 if precision == "float32" else 2e-2
    assert_close(velocity_of(short, observation), velocity_of(long, observation), tolerance)


# -- precision, memory, compilation
def test_bfloat16_is_near_float32_in_training_and_in_acting(make):
    exact, rough = make(LEFT), make(LEFT, precision="bfloat16")
    observation = observation_of(exact)
    velocity = velocity_of(exact, observation)
    size = velocity.square().mean().sqrt()
    assert (velocity_of(rough, observation) - velocity).square().mean().sqrt() < 2e-2 * size
    batch = batch_of(exact)
    torch.testing.assert_close(rough(batch)[0], exact(batch)[0], rtol=2e-2, atol=0)
    action = action_of(exact)
    for weight in rough.parameters():
        weight.data = weight.data.bfloat16()
    assert (velocity_of(rough, observation) - velocity).square().mean().sqrt() < 2e-2 * size
    assert (action_of(rough) - action).abs().mean() < 2e-2 * action.abs().mean()


def test_computing_the_layers_again_changes_no_loss_and_no_gradient(make):
    losses, found = [], []
    for checkpointing in (False, True):
        policy = make(LEFT, checkpointing=checkpointing)
        losses.append(policy(batch_of(policy))[0])
        found.append(gradients(policy, losses[-1].mean()))
    assert torch.equal(*losses)
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_computing_the_layers_again_keeps_less(make):
    kept = []
    for checkpointing in (False, True):
        policy, sizes = make(LEFT, checkpointing=checkpointing), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=sizes: to.append(x.numel()) or x, lambda x: x):
            policy(batch_of(policy))
        kept.append(sum(sizes))
    assert kept[1] < 0.25 * kept[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_sample_is_one_graph_without_a_break(make, precision):
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
def test_what_is_not_frozen_trains_and_all_that_trains_has_a_use(make, options, trained):
    policy = make(LEFT, **options)
    expected = {name for name, _ in policy.named_parameters() if name.split(".")[0] in (*trained, *PROJECTIONS)}
    assert {name for name, weight in policy.named_parameters() if weight.requires_grad} == expected
    found = gradients(policy, policy(batch_of(policy))[0].mean())
    assert found.keys() == expected
    assert all(gradient.any() for gradient in found.values())


def test_low_rank_updates_of_both_stacks_are_trained_and_start_at_nothing(make, configs):
    torch.manual_seed(0)
    adapted = instantiate(configs("pi0_tiny"))(spec_of(LEFT), lora=2)
    torch.manual_seed(0)
    plain = instantiate(configs("pi0_tiny"))(spec_of(LEFT))
    assert torch.equal(action_of(adapted), action_of(plain))
    trained = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    stacks = [name for name in trained if not name.startswith(PROJECTIONS)]
    assert all("lora_" in name and name.startswith(("language.", "expert.")) for name in stacks)
    assert len(stacks) == 2 * (7 * DEPTH + 7 * (DEPTH - 1) + 2)  # of the backbone's last layer, keys and values alone
    randomise(nn.ParameterList(trained[name] for name in stacks))
    assert all(gradient.any() for gradient in gradients(adapted, adapted(batch_of(adapted))[0].mean()).values())


@pytest.mark.parametrize("name", ["pi0", "pi0_expert", "pi0_lora"])
def test_at_full_size_it_has_the_weights_of_pi0_base_that_are_read(configs, name):
    """PaliGemma 3B and the expert of 300M, without the backbone's last queries and last MLP, and without lm_heads."""
    with torch.device("meta"):
        policy = instantiate(configs(name))(spec_of(LEFT, TOP, states=14, actions=14))
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


# -- what is saved and sent
def test_saved_and_loaded_weights_give_the_same_action_bit_by_bit(make):
    policy, other = make(LEFT, noise_level=0.1), make(LEFT, noise_level=0.1, seed=1)
    assert not torch.equal(action_of(policy), action_of(other))
    other.load_state_dict(safetensors.torch.load(safetensors.torch.save(policy.state_dict())))
    assert torch.equal(action_of(policy), action_of(other))


@pytest.mark.parametrize(
    "options", [{}, {"freeze": ["vision", "language"]}, {"lora": 2}], ids=["all", "expert", "lora"]
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_published_is_what_trains_and_it_is_enough(make, configs, options, precision):
    learner = make(LEFT, precision=precision, **options)
    actor = make(LEFT, precision=precision, **options)
    learner.state.set_statistics({"mean": {STATE: np.arange(5.0)}, "std": {STATE: np.full(5, 2.0)}})
    trained = {name for name, weight in learner.named_parameters() if weight.requires_grad}
    for name, weight in learner.named_parameters():
        weight.data += 0.01 * (name in trained)
    sent = safetensors.torch.load(safetensors.torch.save(learner.published()))
    scale = {"scale.center", "scale.half_range"}
    assert sent.keys() == trained | {"state.mean", "state.std", *scale, FROZEN}
    assert all(sent[name].dtype == learner.precision for name in trained)
    assert sent["state.mean"].dtype == torch.float32
    actor.load_published(sent)
    for policy in (learner, actor):  # who acts holds its weights in this precision
        for weight in policy.parameters():
            weight.data = weight.data.to(policy.precision)
    assert torch.equal(action_of(actor), action_of(learner))
    actor.load_published(sent)


def test_what_was_published_over_other_frozen_weights_is_refused_and_changes_nothing(make):
    learner, actor = make(freeze=["language"]), make(freeze=["language"], seed=1)
    before = {name: tensor.clone() for name, tensor in actor.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"give the same policy\.weights and policy\.freeze"):
        actor.load_published(learner.published())
    for other in (make(), make(LEFT, freeze=["language"]), make(freeze=["language", "expert"])):
        with pytest.raises(RuntimeError, match="trained by one of the two alone"):
            actor.load_published(other.published())
    without = {name: tensor for name, tensor in actor.published().items() if name != "state.mean"}
    with pytest.raises(RuntimeError, match=r"state\.mean"):
        actor.load_published(without)
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.state_dict().items())


# -- checkpoints of others
@pytest.fixture(scope="module")
def reference():
    """What lerobot and openpi call PI0Pytorch, of transformers' own classes, with random weights."""
    torch.manual_seed(7)
    text, vision = {"model_type": "gemma", **TEXT}, {"model_type": "siglip_vision_model", **VISION}
    model, model.paligemma_with_expert = nn.Module(), nn.Module()
    both = model.paligemma_with_expert
    both.paligemma = PaliGemma(
        PaliGemmaConfig(text_config=text, vision_config={**vision, "projection_dim": WIDTH}, projection_dim=WIDTH)
    )
    both.gemma_expert = GemmaForCausalLM(GemmaConfig(**TEXT))
    both.gemma_expert.model.embed_tokens = None
    model.state_proj, model.action_in_proj = nn.Linear(32, WIDTH), nn.Linear(8, WIDTH)
    model.action_time_mlp_in, model.action_time_mlp_out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.action_out_proj = nn.Linear(WIDTH, 8)
    randomise(model)
    return model


def filled_by_hand(policy, reference):
    both = reference.paligemma_with_expert
    tower = both.paligemma.model.vision_tower
    for ours, theirs in (
        (policy.vision, getattr(tower, "vision_model", tower)),
        (policy.image_projection, both.paligemma.model.multi_modal_projector.linear),
        (policy.state_projection, reference.state_proj),
        (policy.action_in, reference.action_in_proj),
        (policy.action_time_in, reference.action_time_mlp_in),
        (policy.action_time_out, reference.action_time_mlp_out),
        (policy.action_out, reference.action_out_proj),
        (policy.expert, both.gemma_expert.model),
    ):
        ours.load_state_dict(theirs.state_dict())
    found = policy.language.load_state_dict(both.paligemma.model.language_model.state_dict(), strict=False)
    assert not found.missing_keys
    return policy


BACKBONE = "paligemma_with_expert.paligemma."
OLDER = {  # names of transformers before 4.52
    BACKBONE + "model.vision_tower.": BACKBONE + "vision_tower.",
    BACKBONE + "model.multi_modal_projector.": BACKBONE + "multi_modal_projector.",
    BACKBONE + "model.language_model.": BACKBONE + "language_model.model.",
    BACKBONE + "lm_head.": BACKBONE + "language_model.lm_head.",
}


def checkpoint(reference, layout):
    """{name: tensor} as it would stand in a file of that layout."""
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    tensors.setdefault(BACKBONE + "lm_head.weight", tensors[BACKBONE + "model.language_model.embed_tokens.weight"])
    if layout in ("lerobot", "lerobot_2025"):  # of two names for one tensor the first is kept
        del tensors[BACKBONE + "model.language_model.embed_tokens.weight"]
    if layout == "openpi":
        del tensors[BACKBONE + "lm_head.weight"]
    if layout == "lerobot_untied":
        tensors[BACKBONE + "lm_head.weight"] = torch.randn(258, WIDTH)
    if layout == "lerobot_2025":
        for name, older in OLDER.items():
            tensors = {key.replace(name, older): tensor for key, tensor in tensors.items()}
    if layout != "openpi":
        tensors = {"model." + name: tensor for name, tensor in tensors.items()}
    if layout == "lerobot_2025":
        tensors["normalize_inputs.buffer_observation_state.mean"] = torch.zeros(5)
        tensors["unnormalize_outputs.buffer_action.std"] = torch.ones(2)
    return tensors


@pytest.mark.parametrize("layout", ["lerobot", "lerobot_untied", "lerobot_2025", "openpi"])
def test_checkpoints_of_others_load_whole_and_where_they_belong(make, reference, tmp_path, layout):
    safetensors.torch.save_file(checkpoint(reference, layout), tmp_path / "model.safetensors")
    action = action_of(filled_by_hand(make(LEFT), reference))
    for weights in (tmp_path, tmp_path / "model.safetensors"):
        policy = make(LEFT)
        load_pretrained(policy, str(weights))
        assert torch.equal(action_of(policy), action)


def test_a_policy_begins_with_its_checkpoint_whatever_then_trains_of_it(configs, reference, tmp_path):
    safetensors.torch.save_file(checkpoint(reference, "lerobot"), tmp_path / "model.safetensors")
    config = configs("pi0_tiny")
    vision = {**config["vision"], **TOWER}
    plain, adapted, blind = (
        instantiate(config)(spec_of(*cameras), weights=str(tmp_path), vision=vision, **options)
        for cameras, options in (([LEFT], {"noise_level": 0.1}), ([LEFT], {"lora": 2, "noise_level": 0.1}), ([], {}))
    )
    assert torch.equal(action_of(plain), action_of(adapted))
    embeddings = reference.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight
    assert torch.equal(blind.language.embed_tokens.weight, embeddings)


def test_a_checkpoint_that_does_not_fit_is_named_in_one_sentence_and_changes_nothing(make, reference, tmp_path):
    policy = make(LEFT)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    tensors = checkpoint(reference, "lerobot")
    missing = {name: tensor for name, tensor in tensors.items() if "action_out_proj.bias" not in name}
    deeper = {name.replace("layers.1.", "layers.9."): tensor for name, tensor in tensors.items()}
    wider = {**tensors, "model.state_proj.weight": torch.zeros(WIDTH, 33)}
    for wrong, text in (
        (missing, r"missing: action_out\.bias\)"),
        ({**tensors, "model.time_mlp_in.bias": torch.zeros(1)}, r"unknown: time_mlp_in\.bias\)"),
        (deeper, r"missing: expert\.layers\.1\S+, .* and \d+ more; unknown: expert\.layers\.9\S+, .* and \d+ more\)"),
        (wider, r"of another shape: state_projection\.weight: \(96, 33\) there, \(96, 32\) here\)"),
    ):
        safetensors.torch.save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=text) as refusal:
            load_pretrained(policy, str(tmp_path))
        assert "\n" not in str(refusal.value)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        load_pretrained(policy, str(tmp_path))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


# -- it learns
def test_imitation_teaches_it_a_toy_task():
    """The best action is minus the state."""
    torch.manual_seed(0)
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose(
            overrides=[
                "+algo=sft", "+policy=pi0_tiny", "algo.optimizer.learning_rate=3e-3", "algo.ema_decay=0.95",
                "policy.horizon=2", "policy.gemma.depth=2", "policy.prompt_tokens=4", "policy.steps=5",
            ]
        )  # fmt: skip
    spec = spec_of(states=2)
    algorithm, generator = instantiate(config.algo)(spec), torch.Generator().manual_seed(0)

    def error():
        state = torch.rand(256, 2, generator=torch.Generator().manual_seed(9)) * 2 - 1
        noise = torch.randn(256, *algorithm.acting.noise_shape, generator=torch.Generator().manual_seed(9))
        decision, _ = algorithm.act({STATE: state}, state, None, task=["go"] * 256, noise=noise, explore=False)
        return (decision.action[:, 0] + state).norm(dim=-1).mean()

    before = error()
    for _ in range(200):
        state = torch.rand(64, 1, 2, generator=generator) * 2 - 1
        flags = torch.ones(64, 2, dtype=torch.bool)
        algorithm.update(
            Batch(
                {STATE: state}, -state.expand(-1, 2, -1), torch.zeros(64, 2), flags, ~flags, ~flags, ~flags,
                flags.sum(1), torch.ones(64), torch.arange(64), torch.randint(2**62, (64,), generator=generator),
                task=("go",) * 64,
            )
        )  # fmt: skip
    assert error() < min(0.2, before / 2)
