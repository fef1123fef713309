"""Small policies of lerobot with random weights, in folders as lerobot-train leaves them, and how lerobot itself runs
them. **Assumed:** a real folder has other sizes, and tokenizers of 257,152 words; nothing else."""

import importlib
import importlib.util
import inspect
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from serl_launcher.policies.relative import COLUMN
from tests.shared.common import STATE
from tests.shared.models import robot

TOP, SIDE = "observation.images.top", "observation.images.side"
SPEC = robot(states=5, actions=4, reach=3, shape=(48, 64, 3), cameras=(TOP, SIDE))
TASKS = ("pick the cube", "pick", "the cube")
SHAPES = {STATE: (5,), TOP: (3, 48, 64), SIDE: (3, 48, 64), "action": (4,)}  # as lerobot has them
ACT = {
    "chunk_size": 6, "n_action_steps": 6, "dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1, "latent_dim": 4, "pretrained_backbone_weights": None,
}  # fmt: skip
ACT_WORD = f"policy.options={ACT}".replace("'", "").replace("None", "null")  # of the command line
PI = {"chunk_size": 6, "n_action_steps": 6, "image_resolution": [28, 28], "num_inference_steps": 3}
SMALL = {
    "act": ACT,
    "diffusion": {
        "down_dims": [16, 32], "n_groups": 4, "spatial_softmax_num_keypoints": 4, "diffusion_step_embed_dim": 16,
        "num_inference_steps": 3, "noise_scheduler_type": "DDIM", "pretrained_backbone_weights": None,
    },
    "smolvla": {
        "chunk_size": 6, "n_action_steps": 6, "resize_imgs_with_padding": [64, 64], "num_vlm_layers": 2,
        "num_steps": 3, "tokenizer_max_length": 8,
    },
    "pi0": PI, "pi05": PI,
}  # fmt: skip
DIFFUSION_WORD = (  # of the command line: one observation, and chunks that run whole
    "policy.options={n_obs_steps: 1, horizon: 8, n_action_steps: 8, down_dims: [8, 16], n_groups: 4, "
    "spatial_softmax_num_keypoints: 2, diffusion_step_embed_dim: 8, num_inference_steps: 3, "
    "noise_scheduler_type: DDIM, pretrained_backbone_weights: null}"
)
HAS_PI = bool(importlib.util.find_spec("lerobot") and importlib.util.find_spec("lerobot.policies.pi_gemma"))
WORDS = (
    "<unk>", "<pad>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>",
    "pick", "the", "cube",
)  # fmt: skip
FITTED = {
    kind: {STATE: torch.full((5,), value), **dict.fromkeys(("action", COLUMN), torch.full((4,), value))}
    for kind, value in {"mean": 1.0, "std": 2.0, "low": -1.0, "high": 4.0, "q01": -1.0, "q99": 3.0}.items()
}


def language(folder):
    """Write the folder of a small SmolVLM, with its tokenizer, which the pi policies read as well."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, WORDS[0]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token=WORDS[0], pad_token=WORDS[1], bos_token=WORDS[2], eos_token=WORDS[3],
        extra_special_tokens={
            "fake_image_token": WORDS[4], "image_token": WORDS[5], "global_image_token": WORDS[6],
            "end_of_utterance_token": WORDS[3],
        },
    )  # fmt: skip
    config = transformers.SmolVLMConfig(
        vision_config={
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 64, "patch_size": 16,
        },
        text_config={
            "model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
        },
        scale_factor=2, image_token_id=5, pad_token_id=1,
    )  # fmt: skip
    parts = (transformers.SmolVLMImageProcessor(), tokenizer, transformers.SmolVLMVideoProcessor())
    for part in (config, transformers.SmolVLMProcessor(*parts)):
        part.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shrink_pi(monkeypatch):
    """Have lerobot build small pi policies: their sizes are no options."""
    transformers, name = importlib.import_module("transformers"), "PaliGemmaForConditionalGenerationWithPiGemma"

    def paligemma():
        config = transformers.PaliGemmaConfig()
        config.vision_config.update({"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2})
        return config

    def built(real, config):
        config.vision_config.update({"intermediate_size": 32, "projection_dim": 32})
        config.text_config.vocab_size = 300
        return real(config)

    sizes = SimpleNamespace(width=32, depth=2, mlp_dim=64, num_heads=8, num_kv_heads=1, head_dim=8)
    for kind in ("pi0", "pi05"):
        module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
        known = {"paligemma": paligemma, "gemma": module.CONFIG_MAPPING["gemma"]}
        monkeypatch.setattr(module, "CONFIG_MAPPING", known)
        monkeypatch.setattr(module, name, partial(built, getattr(module, name)))
        monkeypatch.setattr(module, "get_gemma_config", lambda variant: sizes)


def statistics(seed=0):
    """Statistics as lerobot computes them of a dataset."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        shape = (3, 1, 1) if len(shape) == 3 else shape
        low, wide = torch.rand(shape, generator=random) - 1, torch.rand(shape, generator=random) + 0.5
        found[name] = {
            "mean": low + wide / 2, "std": wide / 4, "min": low, "max": low + wide, "q01": low, "q99": low + wide,
        }  # fmt: skip
    return found


def pretrained(kind, folder, words, *, seed=0, **options):
    """Make a policy by lerobot's own functions, with random weights, and save it as lerobot-train does.

    words: folder of `language`.
    """
    factory, types = (
        importlib.import_module("lerobot.policies.factory"),
        importlib.import_module("lerobot.configs.types"),
    )
    more = {"vlm_model_name": str(words)} if kind == "smolvla" else {}
    config = factory.make_policy_config(kind, **SMALL[kind], **more, device="cpu", push_to_hub=False, **options)
    kinds = {STATE: "STATE", "action": "ACTION"}
    features = {
        name: types.PolicyFeature(types.FeatureType(kinds.get(name, "VISUAL")), shape) for name, shape in SHAPES.items()
    }
    config.input_features = {name: feature for name, feature in features.items() if name != "action"}
    config.output_features = {"action": features["action"]}
    torch.manual_seed(seed)
    policy = factory.get_policy_class(kind)(config)
    policy.save_pretrained(folder)
    for pipeline in factory.make_pre_post_processors(config, dataset_stats=statistics()):
        pipeline.save_pretrained(folder)
    return Path(folder)


def read_here(words, monkeypatch):
    """Have lerobot's pi policies take the tokenizer of `language`: its name is no option."""
    tokenizer = importlib.import_module("transformers").AutoTokenizer
    real = tokenizer.from_pretrained

    def here(name, *args, **more):
        return real(words if "paligemma" in str(name) else name, *args, **more)

    monkeypatch.setattr(tokenizer, "from_pretrained", here)


def all_of_them(folder):
    """Make a policy of each kind that this lerobot has in FOLDER/KIND, for a process that ends with it."""
    monkeypatch = pytest.MonkeyPatch()
    language(words := folder / "words")
    if HAS_PI:
        shrink_pi(monkeypatch)
    read_here(words, monkeypatch)
    for kind in SMALL:
        if kind[:2] != "pi" or HAS_PI:
            pretrained(kind, folder / kind, words)


class Theirs:
    """The policy of a folder, loaded and run by lerobot alone."""

    def __init__(self, folder):
        factory, configs = (
            importlib.import_module(f"lerobot.{name}") for name in ("policies.factory", "configs.policies")
        )
        self.config = configs.PreTrainedConfig.from_pretrained(folder)
        self.config.device = "cpu"
        self.policy = factory.get_policy_class(self.config.type).from_pretrained(folder, config=self.config)
        device = {"device_processor": {"device": "cpu"}}
        self.pre, self.post = factory.make_pre_post_processors(
            self.config, pretrained_path=str(folder), preprocessor_overrides=device, postprocessor_overrides=device
        )

    def loss(self, batch):
        """The loss of a Batch, of each row if there is one, given as lerobot's dataset gives it: repeated last actions,
        images in [0, 1]."""
        steps = torch.arange(batch.action.shape[1])
        last = torch.minimum(steps, batch.length[:, None] - 1)
        given = {
            "action": torch.stack([row[at] for row, at in zip(batch.action, last, strict=True)]),
            "action_is_pad": ~batch.valid, "task": list(batch.task), **self._seen(batch.observation),
        }  # fmt: skip
        torch.manual_seed(int(batch.seed[0]))
        self.policy.train()
        by_row = "reduction" in inspect.signature(self.policy.forward).parameters
        return self.policy.forward(self.pre(given), **({"reduction": "none"} if by_row else {}))[0]

    def chunk(self, observation, task, noise):
        """A chunk of each row, by `select_action` where it needs a history."""
        self.policy.eval().reset()
        seen, given = self._seen(observation), {"task": list(task)}
        if self.config.type != "diffusion":
            words = {} if self.config.type == "act" else {"noise": noise}
            now = {name: value[:, 0] if self._has_time() else value for name, value in seen.items()}
            return self.post(self.policy.predict_action_chunk(self.pre({**given, **now}), **words))
        for step in (0, 1):
            self.policy._queues["action"].clear()
            now = {name: value[:, step] for name, value in seen.items()}
            first = self.policy.select_action(self.pre({**given, **now}), noise=noise)
        return torch.stack([self.post(action) for action in (first, *self.policy._queues["action"])], 1)

    def continued(self, observation, task, noise, prefix):
        """A chunk of each row, that continues an old one by lerobot's real-time chunking."""
        rtc = importlib.import_module("lerobot.policies.rtc.configuration_rtc")
        self.config.rtc_config, chunks = rtc.RTCConfig(enabled=True), []
        self.policy.eval().init_rtc_processor()
        seen = self._seen(observation)
        for row, (committed, left) in enumerate(zip(prefix.committed.tolist(), prefix.left.tolist(), strict=True)):
            now = {name: (value[:, 0] if self._has_time() else value)[row : row + 1] for name, value in seen.items()}
            given = self.pre({"task": [task[row]], **now, "action": prefix.action[row : row + 1]})
            old = given.pop("action")[0, :left] if left else None
            words = {"inference_delay": committed, "prev_chunk_left_over": old}
            chunks.append(self.post(self.policy.predict_action_chunk(given, noise=noise[row : row + 1], **words)))
        return torch.cat(chunks)

    def _has_time(self):
        return self.config.observation_delta_indices is not None

    def _seen(self, observation):
        """Observations [B, To, ...] as lerobot's dataset gives them."""
        found = {
            name: value if name == STATE else value.permute(0, 1, 4, 2, 3).float() / 255
            for name, value in observation.items()
        }
        return found if self._has_time() else {name: value[:, 0] for name, value in found.items()}


def change(folder, **fields):
    """Change the config.json of a folder."""
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **fields}))
