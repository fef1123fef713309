"""Small reward models of lerobot 0.6 with random weights, in folders as lerobot leaves them. **Assumed:** a real one
has other sizes, a tokenizer of many words and another chat template; nothing else."""

import importlib

import torch

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
WORDS = (*SPECIAL, "<unk>", "True", "reach", "pick", "the", "cube", "task", "video", "robot", ".", ":", "user")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|>"
    "<|vision_end|>{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)
TOP, SIDE = "observation.images.top", "observation.images.side"


def vision_language(folder):
    """Write the folder of a small Qwen3-VL with its processors, which Robometer and TOPReward are built on."""
    tokenizers, transformers = importlib.import_module("tokenizers"), importlib.import_module("transformers")
    ids = {word: number for number, word in enumerate(WORDS)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", pad_token=SPECIAL[0], eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL),
    )  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Qwen2VLImageProcessor(**patches, min_pixels=32 * 32, max_pixels=64 * 64)
    videos = transformers.Qwen3VLVideoProcessor(**patches)
    transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)


def resnet(folder):
    """Write the folder of a small ResNet whose maps of 32 pixels are 4 x 4, as the classifier needs them."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(1)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    transformers.ResNetModel(config).save_pretrained(folder)


OPTIONS = {
    "topreward": {"max_frames": 2, "success_threshold": -1.0},
    "robometer": {"pretrained_path": None, "torch_dtype": "float32"},
    "reward_classifier": {"num_cameras": 2, "hidden_dim": 16, "latent_dim": 16},
}


def pretrained(kind, folder):
    """Make a reward model by lerobot's own functions and save it, with the preprocessor of a classifier."""
    rewards, types = importlib.import_module("lerobot.rewards"), importlib.import_module("lerobot.configs.types")
    (resnet if kind == "reward_classifier" else vision_language)(base := folder / "base")
    names = {"topreward": "vlm_name", "robometer": "base_model_id", "reward_classifier": "model_name"}
    options = {**OPTIONS[kind], names[kind]: str(base), "device": "cpu"}
    if kind == "reward_classifier":
        image = types.PolicyFeature(types.FeatureType.VISUAL, (3, 32, 32))
        options |= {"input_features": {SIDE: image, TOP: image}}
    config = rewards.make_reward_model_config(kind, **options)
    torch.manual_seed(2)
    rewards.make_reward_model(config).save_pretrained(folder / "model")
    if kind == "reward_classifier":
        measured = {
            name: {"mean": torch.full((3, 1, 1), 0.3), "std": torch.full((3, 1, 1), 0.2)} for name in (SIDE, TOP)
        }
        rewards.make_reward_pre_post_processors(config, dataset_stats=measured)[0].save_pretrained(folder / "model")
    return folder / "model"
