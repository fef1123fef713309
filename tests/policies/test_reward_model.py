"""Reward models of lerobot, asked as lerobot asks them."""

import importlib.util
import json

import pytest
import safetensors.torch
import torch
from hydra.utils import instantiate
from serl_client import ConfigError

from serl_launcher.algorithms.judge import Judge
from serl_launcher.policies.reward_model import TYPES
from serl_launcher.training import memory
from tests.shared import lerobot_rewards as small
from tests.shared.lerobot_rewards import SIDE, TOP
from tests.shared.models import batch, config_of, robot

NEWEST = importlib.util.find_spec("lerobot") and importlib.util.find_spec("lerobot.rewards")
needs_rewards = pytest.mark.skipif(not NEWEST, reason="lerobot 0.6 on Python 3.12")
pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`max_length` is ignored"),
]  # fmt: skip
SPEC = robot(states=2, shape=(32, 32, 3), cameras=(TOP, SIDE))
TASKS = ("pick the cube", "reach")


def ours(spec=SPEC, **options):
    """config/algo/judge.yaml's model with these options."""
    return instantiate(config_of("algo=judge").algo.model)(spec, **options)


def frames(count):
    drawn = torch.randint(0, 256, (2, 2, count, 32, 32, 3), generator=torch.Generator().manual_seed(0))
    return dict(zip((TOP, SIDE), drawn.to(torch.uint8), strict=True))


@needs_rewards
@pytest.mark.parametrize("kind", TYPES)
def test_what_it_says_is_what_lerobot_says(kind, tmp_path):
    folder = small.pretrained(kind, tmp_path)
    model = ours(path=str(folder), frames=4)
    images = frames(model.frames)
    said = model.score(images, TASKS)
    rewards = importlib.import_module("lerobot.rewards")
    config = importlib.import_module("lerobot.configs.rewards").RewardModelConfig.from_pretrained(folder)
    config.pretrained_path = str(folder)
    theirs = rewards.make_reward_model(config)
    if kind == "reward_classifier":
        seen = [(images[name][:, -1].movedim(-1, 1) / 255 - 0.3) / 0.2 for name in (SIDE, TOP)]
        torch.testing.assert_close(said.sigmoid(), theirs.predict(seen).probabilities, atol=1e-6, rtol=1e-5)
        return
    assert model.inputs == (TOP,)
    config.max_frames, theirs.config.success_threshold = None, float("-inf")
    pre, _ = rewards.make_reward_pre_post_processors(config)
    expected = theirs.compute_reward(pre({TOP: images[TOP].movedim(-1, 2), "task": list(TASKS)}))
    torch.testing.assert_close(
        said.sigmoid(), expected.exp() if kind == "topreward" else expected, atol=1e-6, rtol=1e-5
    )
    assert said[0] != said[1]
    changed = images[TOP].clone()
    changed[:, 0] = 255 - changed[:, 0]
    assert (model.score({TOP: changed}, TASKS) != said).all(), "the first frame counts"


@needs_rewards
def test_it_judges_by_the_robots_own_camera_names(tmp_path):
    folder = small.pretrained("topreward", tmp_path)
    spec = robot(states=2, shape=(32, 32, 3), cameras=("observation.images.front",))
    with pytest.raises(
        ConfigError, match=r"sees observation.images.top, and the robot has observation.images.front: say"
    ):
        ours(spec, path=str(folder))
    model = ours(spec, path=str(folder), rename={"observation.images.front": TOP}, frames=2)
    algorithm = Judge(spec, model=lambda _: model, positive=1, unsure=0, kept=4, every=1)
    made = batch(spec, 4, window=algorithm.windows["update_calibration"])
    assert algorithm.update_calibration(made)["scored"] == 4


@needs_rewards
def test_while_memory_is_counted_no_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SMALL", 0)
    folder = small.pretrained("reward_classifier", tmp_path)
    (folder / "model.safetensors").unlink()
    config = config_of("algo=judge")
    config.algo.model.path = str(folder)
    memory.needed(lambda: instantiate(config.algo)(SPEC), SPEC, 4, 1, 0)


def lacks_weights(folder):
    file = folder / "model.safetensors"
    whole = safetensors.torch.load_file(file)
    safetensors.torch.save_file({name: whole[name] for name in list(whole)[1:]}, file)


def says(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


@needs_rewards
@pytest.mark.parametrize(
    ("kind", "spoil", "options", "said"),
    [
        ("robometer", lacks_weights, {}, "model.safetensors lacks "),
        ("robometer", says(base_model_id="/nowhere"), {}, r"cannot build robometer .* \{base_model_id: FOLDER\}"),
        ("topreward", says(type="sarm"), {}, "'sarm'"),
        ("topreward", lambda folder: (folder / "config.json").unlink(), {}, "is no reward model of lerobot"),
        ("topreward", lambda _: None, {"vlm": "x"}, "topreward has no field 'vlm'"),
        ("topreward", lambda _: None, {"fps": "many"}, "lerobot cannot build topreward"),
        ("reward_classifier", says(num_classes=3), {}, "tells 3 classes"),
    ],
)
def test_what_cannot_judge_is_refused_in_one_sentence(kind, spoil, options, said, tmp_path):
    folder = small.pretrained(kind, tmp_path)
    spoil(folder)
    with pytest.raises(ConfigError, match=said) as refused:
        ours(path=str(folder), options=options)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(bool(NEWEST), reason="lerobot 0.4 on Python 3.11")
def test_an_older_lerobot_is_told():
    with pytest.raises(ConfigError, match=r"reward models came with lerobot 0\.6, which needs Python 3.12"):
        ours(path="/nowhere")
