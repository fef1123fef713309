"""What is said at the start of what a policy sees, and which images a run stores that nothing of it reads."""

import numpy as np
import pytest
from serl_client import Feature, Spec

from serl_launcher import launcher
from serl_launcher.config import composed
from serl_launcher.training.build import build
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.training.seen import told
from tests.shared.common import CONFIG

SEEN = {"state": Feature((3,)), "images.cam": Feature((64, 64, 3), "uint8"), "count": Feature((1,), "int32")}
SPEC = Spec(
    {f"observation.{name}": feature for name, feature in SEEN.items()}, Feature((2,), low=-np.ones(2), high=1), 10.0
)
NUMBERS = "stored, not seen: count (because states are float32: let the task give such numbers)"
UNSEEN = "stored, not seen: images.cam, 12 kB a step (because no camera of them is named; say {} in another run_dir"
VECTORS = [
    ("algo=rlpd", ["'policy.encoder.cameras=[all]'"]),
    ("algo=dreamer_tiny", ["'algo.cameras=[all]'"]),
    ("algo=qc", ["'policy.encoder.cameras=[all]'", "'algo.encoder.cameras=[all]'"]),
]


def config_of(words, tmp_path):
    return composed(CONFIG, ["learner=true", f"run_dir={tmp_path}", *words.split()])


@pytest.mark.parametrize(("words", "cures"), [*VECTORS, ("algo=rlpd_pixels", [])])
def test_the_start_says_what_the_policy_sees_and_what_to_say_so_that_it_sees_more(words, cures, tmp_path):
    config = config_of(words, tmp_path)
    said = told(config, build(config, SPEC), SPEC)
    assert said.startswith(f"the policy sees {'state' if cures else 'images.cam, state'}; stored, not seen: ")
    assert (UNSEEN.format(" ".join(cures)) in said) is bool(cures)
    assert said.endswith(NUMBERS)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        *[(words, False) for words, _ in VECTORS],
        ("algo=rlpd_pixels", True), ("algo=rlpd unread_images=true", True), ("record=eval", True),
        ("live=9876", True), ("export.sources=all", True), ("plan=evaluate", True), ("plan=collect", True),
        ("+plan.sources.online.archive=lerobot", True),
    ],
)  # fmt: skip
def test_images_are_left_out_only_where_nothing_reads_them_and_nobody_asks(words, kept, tmp_path):
    config = config_of(words, tmp_path)
    launcher.describe_store(config, plan_of(config))
    assert (config.store.unread is None) is kept
    if not kept:
        assert config.store.unread.cameras == []
        cures = " ".join(dict(VECTORS)[words])
        assert config.store.unread.say == f"say {cures} to see it, or unread_images=true to store it all the same"
