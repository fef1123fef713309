"""PI0 begins with the checkpoints of others, and sends what those who act need."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from serl_client import ConfigError, Feature
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, PaliGemmaConfig
from transformers import PaliGemmaForConditionalGeneration as PaliGemma

from serl_launcher.policies import pi0_lerobot
from serl_launcher.policies.frozen import FROZEN
from serl_launcher.policies.pi0_checkpoint import load_pretrained
from tests.shared.models import STATE, algorithm_of, assert_same, weights
from tests.shared.pi0 import LEFT, TEXT, VISION, WIDTH, action_of, make, observation_of, randomise, spec_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]  # its import alone takes seconds


SPEC = replace(spec_of(LEFT), action=Feature((2,), low=-100, high=100))  # so that no number is clipped
NAMED = replace(
    SPEC, observation={**SPEC.observation, STATE: Feature((5,), names=("wrist", "gripper", "a", "b", "c"))},
    action=replace(SPEC.action, names=("wrist", "gripper")),
)  # fmt: skip
KINDS = ("mean", "std")


# -- what is saved and sent
@pytest.mark.parametrize(
    ("options", "precision"),
    [({}, "float32"), ({"freeze": ["vision", "language"]}, "bfloat16"), ({"lora": 2}, "bfloat16")],
    ids=["all", "expert", "lora"],
)
def test_what_is_published_is_what_trains_and_it_is_enough(options, precision):
    learner, actor = (make(LEFT, precision=precision, **options) for _ in range(2))
    learner.state.set_statistics({"mean": {STATE: np.arange(5.0)}, "std": {STATE: np.full(5, 2.0)}})
    trained = {name for name, weight in learner.named_parameters() if weight.requires_grad}
    for name, weight in learner.named_parameters():
        weight.data += 0.01 * (name in trained)
    sent = safetensors.torch.load(safetensors.torch.save(learner.published()))
    assert sent.keys() == trained | {"state.mean", "state.std", "scale.center", "scale.half_range", FROZEN}
    assert all(sent[name].dtype == learner.precision for name in trained)
    assert sent["state.mean"].dtype == torch.float32
    actor.load_published(sent)
    for policy in (learner, actor):  # who acts holds its weights in this precision
        for weight in policy.parameters():
            weight.data = weight.data.to(policy.precision)
    assert torch.equal(action_of(actor), action_of(learner))
    actor.load_published(sent)


def test_what_was_published_over_other_frozen_weights_is_refused_and_changes_nothing():
    learner, actor = make(freeze=["language"]), make(freeze=["language"], seed=1)
    before = weights(actor)
    with pytest.raises(RuntimeError, match=r"give the same policy\.weights and policy\.freeze"):
        actor.load_published(learner.published())
    for other in (make(), make(LEFT, freeze=["language"]), make(freeze=["language", "expert"])):
        with pytest.raises(RuntimeError, match="trained by one of the two alone"):
            actor.load_published(other.published())
    without = {name: tensor for name, tensor in actor.published().items() if name != "state.mean"}
    with pytest.raises(RuntimeError, match=r"state\.mean"):
        actor.load_published(without)
    assert_same(weights(actor), before)


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
def test_checkpoints_of_others_load_whole_and_where_they_belong(reference, tmp_path, layout):
    safetensors.torch.save_file(checkpoint(reference, layout), tmp_path / "model.safetensors")
    action = action_of(filled_by_hand(make(LEFT), reference))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        policy = make(LEFT)
        load_pretrained(policy, str(path))
        assert torch.equal(action_of(policy), action)
    resized = [make(LEFT, weights=str(tmp_path), scale="std", resize=how).antialias for how in ("auto", "antialias")]
    assert resized == [layout == "openpi", True]


STATISTICS = {
    "state": (torch.arange(5.0), torch.arange(1.0, 6)),
    "action": (torch.tensor([0.1, 0.2]), torch.ones(2) / 4),
}


def brings(folder, layout, weights, action=2):
    """Write a checkpoint with statistics as each of its authors keeps them."""
    names = {
        "lerobot": ("observation.state.{}", "action.{}"),
        "lerobot_2025": ("normalize_inputs.buffer_observation_state.{}", "unnormalize_outputs.buffer_action.{}"),
        "openpi": ("state.{}", "actions.{}"),
    }[layout]
    numbers = {
        name.format(kind): value[:action] if part == "action" else value
        for (part, values), name in zip(STATISTICS.items(), names, strict=True)
        for kind, value in zip(("mean", "std"), values, strict=True)
    }
    if layout == "lerobot_2025":
        weights = {name: value for name, value in weights.items() if not name.startswith(("normalize", "unnormalize"))}
        weights |= numbers
    if layout == "lerobot":
        safetensors.torch.save_file(numbers, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    if layout == "openpi":
        (folder / "assets/trossen").mkdir(parents=True)
        told = {}
        for name, value in numbers.items():
            told.setdefault(name.partition(".")[0], {})[name.rpartition(".")[2]] = value.tolist()
        (folder / "assets/trossen/norm_stats.json").write_text(json.dumps({"norm_stats": told}))
    safetensors.torch.save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("layout", ["lerobot", "lerobot_2025", "openpi"])
def test_statistics_that_a_checkpoint_brings_are_kept_and_acted_by(reference, tmp_path, layout):
    brings(tmp_path, layout, checkpoint(reference, layout))
    paths = (tmp_path, tmp_path / "model.safetensors")
    kept, plain = (make(LEFT, weights=str(path), scale="std") for path in paths)
    other = {kind: {STATE: np.full(5, 9.0), "action": np.full(2, 0.5)} for kind in ("mean", "std", "low", "high")}
    for policy in (kept, plain):
        for module in (policy.state, policy.scale):
            module.set_statistics(other)
        assert torch.equal(policy.state.mean, STATISTICS["state"][0])
        assert torch.equal(policy.state.std, STATISTICS["state"][1])
    torch.testing.assert_close(kept.scale.to_unit(STATISTICS["action"][0] + 1 / 4), torch.ones(2))
    assert torch.equal(kept.scale.from_unit(torch.zeros(2)), STATISTICS["action"][0])


def test_statistics_of_another_robot_or_none_are_told_and_fitted_here(reference, tmp_path, caplog):
    caplog.set_level("WARNING")
    brings(tmp_path, "lerobot", checkpoint(reference, "lerobot"), action=1)
    policy = make(LEFT, weights=str(tmp_path), scale="std")
    assert "brings statistics of 1 numbers of the action, and this robot has 2: they are fitted here" in caplog.text
    assert (policy.state.is_given, policy.scale.is_given) == (True, False)
    (tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors").unlink()
    caplog.clear()
    policy = make(LEFT, weights=str(tmp_path), scale="std")
    assert caplog.text.count("brings no statistics of the ") == 2
    assert not policy.state.is_given


def test_what_would_scale_otherwise_than_the_checkpoint_is_refused(reference, tmp_path):
    brings(tmp_path, "openpi", checkpoint(reference, "openpi"))
    with pytest.raises(ConfigError, match=r"say policy\.scale=std"):
        make(LEFT, weights=str(tmp_path), scale="range")
    shutil.copytree(tmp_path / "assets/trossen", tmp_path / "assets/libero")
    with pytest.raises(ConfigError, match="statistics of several datasets: remove all but this robot's"):
        make(LEFT, weights=str(tmp_path), scale="std")


def said(folder, *words):
    """The policy that a user's words make of a folder, as a run's."""
    pinned = ("policy.vision.image=64", "policy.vision.patch=8", "policy.scale=std", "policy.precision=float32")
    return algorithm_of(SPEC, "algo=sft", "policy=pi0_tiny", *pinned, f"policy.weights={folder}", *words).policy


FITTED = {"state": (torch.full((5,), 0.5), torch.full((5,), 2.0)), "action": (torch.ones(2) / 2, torch.ones(2) / 8)}


@pytest.mark.parametrize(
    ("layout", "given", "kept"),
    [
        ("lerobot", 2, ("state", "action")),
        ("openpi", 2, ("state", "action")),
        ("lerobot", 1, ("state",)),
        ("lerobot", None, ()),
    ],
    ids=["fine-tuned", "openpi", "another action size", "without statistics"],
)
def test_a_folder_acts_by_its_own_statistics_and_by_the_datas_where_it_has_none(
    layout, given, kept, reference, tmp_path
):
    if given is None:
        safetensors.torch.save_file(checkpoint(reference, layout), tmp_path / "model.safetensors")
    else:
        brings(tmp_path, layout, checkpoint(reference, layout), action=given)
    policy = said(tmp_path)
    policy.state.set_statistics({kind: {STATE: each} for kind, each in zip(KINDS, FITTED["state"], strict=True)})
    policy.scale.set_statistics({kind: {"action": each} for kind, each in zip(KINDS, FITTED["action"], strict=True)})
    (center, spread), (mean, std) = ((STATISTICS if part in kept else FITTED)[part] for part in ("action", "state"))
    plain = filled_by_hand(make(spec=SPEC, scale="std"), reference)
    plain.scale.keep(torch.zeros(2), torch.ones(2))
    seen = observation_of(policy)
    unit = action_of(plain, {**seen, STATE: (seen[STATE] - mean) / std})
    torch.testing.assert_close(action_of(policy, seen), center + spread * unit, atol=1e-5, rtol=1e-5)


def test_a_folder_of_another_action_size_in_the_network_is_refused_in_one_sentence(reference, tmp_path):
    safetensors.torch.save_file(checkpoint(reference, "openpi"), tmp_path / "model.safetensors")
    text = r"action_in\.weight: \(96, 8\) there, \(96, 16\) here.*: choose the policy's sizes as in the checkpoint"
    with pytest.raises(ConfigError, match=text):
        said(tmp_path, "policy.width=16")


def test_a_folder_whose_actions_are_relative_is_taken_by_those_words_alone(reference, tmp_path, caplog):
    brings(tmp_path, "lerobot", checkpoint(reference, "lerobot"))
    described = {"type": "pi0", "use_relative_actions": True, "relative_exclude_joints": ["Grip"]}
    options = {"weights": str(tmp_path), "scale": "std", "spec": NAMED}
    for names, words in ((["wrist", "gripper"], ["wrist"]), (None, ["wrist", "gripper"])):
        (tmp_path / "config.json").write_text(json.dumps({**described, "action_feature_names": names}))
        with pytest.raises(ConfigError, match=re.escape(f"Say policy.relative=[{','.join(words)}]")):
            make(LEFT, **options)
        kept = make(LEFT, relative=words, **options).relative.scale
        assert (kept.is_given, kept.center.tolist()) == (True, pytest.approx([0.1, 0.2]))
    (tmp_path / "config.json").write_text(json.dumps({"type": "pi0"}))  # of lerobot before 0.6
    make(LEFT, **options)
    with pytest.raises(ConfigError, match=re.escape("Say policy.relative=[]")):
        make(LEFT, relative=["wrist"], **options)
    assert "does not say whether" not in caplog.text
    (tmp_path / "config.json").unlink()
    make(LEFT, relative=["wrist"], **options)
    assert "does not say whether" not in caplog.text
    make(LEFT, **options)
    assert "does not say whether its actions are relative" in caplog.text


@pytest.mark.parametrize(
    ("names", "relative"),
    [(("arm", "gripper_arm"), ["gripper_arm"]), (("gripper", "wrist"), ["gripper", "wrist"])],
    ids=["a name within another", "another order"],
)
def test_relative_chunks_that_lerobots_step_cannot_make_are_not_exported(names, relative, tmp_path):
    state = ("arm", "gripper_arm") if "arm" in names else ("wrist", "gripper")
    spec = replace(
        NAMED, observation={**NAMED.observation, STATE: Feature((5,), names=(*state, *"abc"))},
        action=replace(NAMED.action, names=names),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"another choice than policy\.relative=.*: export without --lerobot"):
        pi0_lerobot.save(make(LEFT, spec=spec, relative=relative, scale="std"), spec, tmp_path)


def test_a_policy_begins_with_its_checkpoint_whatever_then_trains_of_it(reference, tmp_path):
    safetensors.torch.save_file(checkpoint(reference, "lerobot"), tmp_path / "model.safetensors")
    plain, adapted, blind = (
        make(*cameras, weights=str(tmp_path), **options)
        for cameras, options in (([LEFT], {"noise_level": 0.1}), ([LEFT], {"lora": 2, "noise_level": 0.1}), ([], {}))
    )
    assert torch.equal(action_of(plain), action_of(adapted))
    embeddings = reference.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight
    assert torch.equal(blind.language.embed_tokens.weight, embeddings)


def test_a_checkpoint_that_does_not_fit_is_named_in_one_sentence_and_changes_nothing(reference, tmp_path):
    policy = make(LEFT)
    before = weights(policy)
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
    assert_same(weights(policy), before)
