"""A run begins with another one's weights and normalisers, whatever both learn by, and changes nothing there."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from serl_client import ConfigError, Feature

from serl_launcher.algorithms.sft import SFT
from serl_launcher.config import composed
from serl_launcher.networks.mlp import ActionScale, StateEncoder
from serl_launcher.training.build import build, seed
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.origin import origin
from serl_launcher.training.resuming import kept_settings
from tests.shared.common import CONFIG, STATE
from tests.shared.models import assert_same, batch, robot, weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SPEC = robot(cameras=())
FLOW = ("policy=flow", "policy.network.hidden=[16,16]", "policy.head.steps=2")
GAUSSIAN = ("policy=gaussian", "policy.hidden=[16,16]")
FITTED = {
    "mean": {STATE: np.array([1.0, -2.0, 3.0]), "action": np.zeros(2)},
    "std": {STATE: np.array([0.5, 2.0, 4.0]), "action": np.full(2, 0.5)},
    "low": {"action": np.array([-1.0, -0.5])}, "high": {"action": np.array([0.5, 1.0])},
}  # fmt: skip


def config_of(folder, *words):
    return composed(CONFIG, ["learner=true", f"run_dir={folder / 'new'}", f"from={folder / 'last'}", *words])


def trained(folder, *words, spec=SPEC, updates=1):
    """The algorithm of these words after an update, as its run's newest checkpoint keeps it."""
    config = config_of(folder, *words)
    seed(config)
    algorithm = build(config, spec)
    algorithm.set_statistics(FITTED)
    name = "update_clone" if "update_clone" in algorithm.windows else "update"
    getattr(algorithm, name)(batch(spec, 8, window=algorithm.windows[name]))
    kept = Checkpoints(folder / "last/checkpoints", spec=spec, config=kept_settings(config))
    kept.stage(updates, {"algorithm": algorithm.state_dict()})()
    return algorithm


def begun(folder, *words, spec=SPEC):
    config = config_of(folder, *words, "seed=7")
    seed(config)
    return build(config, spec, origin(config, spec))


def policy_of(algorithm):
    """What acts, without what improves, steers or conditions it."""
    return algorithm.averaged if isinstance(algorithm, SFT) else algorithm.policy


@pytest.mark.parametrize(
    ("last", "new", "policy"),
    [
        ("sft", "sac_pi0", FLOW), ("sac_pi0", "iql", FLOW), ("iql", "fql", FLOW), ("fql", "expo", FLOW),
        ("expo", "sft", FLOW), ("sft", "dsrl", FLOW), ("sft", "rlpd", GAUSSIAN), ("sac", "sft", GAUSSIAN),
        ("sac", "rlpd", GAUSSIAN), ("guided algo.discount=0.5", "guided", FLOW),
        ("recap algo.share=0.5", "recap", FLOW),
    ],
    ids=lambda value: value.partition(" ")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_another_algorithm_begins_with_the_policy_that_acted_and_normalises_as_it_did(tmp_path, last, new, policy):
    source = policy_of(trained(tmp_path, *f"algo={last}".split(), *policy))
    algorithm = begun(tmp_path, f"algo={new}", *policy)
    own, expected = policy_of(algorithm), weights(source)
    copies = [
        each for each in algorithm.modules() if type(each) is type(source) and weights(each).keys() == {*expected}
    ]
    assert own in copies
    for copy in copies:
        assert_same(weights(copy), expected)
    for module in algorithm.modules():
        if isinstance(module, StateEncoder):
            assert module.mean.tolist() == FITTED["mean"][STATE].tolist()
            assert module.std.tolist() == FITTED["std"][STATE].tolist()
        elif isinstance(module, ActionScale) and module.kind == "range":
            assert torch.equal(module.half_range, source.scale.half_range)
    assert not any(optimizer.steps for optimizer in algorithm.optimizers.values())


RLPD = ("algo=rlpd", *GAUSSIAN, "critic.hidden=[16,16]")


def test_the_same_algorithm_begins_with_all_networks_of_the_newest_whole_checkpoint(tmp_path, caplog):
    source = trained(tmp_path, *RLPD)
    trained(tmp_path, *RLPD, "seed=1")
    broken = tmp_path / "last/checkpoints/000002"
    (broken / "tensors.safetensors").write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "last").rglob("*")}
    algorithm = begun(tmp_path, *RLPD, "algo.learning_rate=1e-4")
    assert_same(weights(algorithm), weights(source))
    assert f"checkpoint {broken} is broken" in caplog.text
    assert not any(optimizer.steps for optimizer in algorithm.optimizers.values())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "last").rglob("*")} == before


def with_state(feature, **more):
    return replace(SPEC, observation={STATE: feature, **more})


RADIANS = with_state(Feature((3,), units="rad"))


@pytest.mark.parametrize(
    ("last", "new", "spec", "why"),
    [
        (RLPD, RLPD, with_state(Feature((3,)), **{"observation.force": Feature((6,))}),
         r"another robot.*value, then the checkpoint's: observation\.observation\.force: it is there, nothing"),
        (RLPD, RLPD, with_state(Feature((3,), units="deg")), r"units: \['deg', .*\['rad'"),
        (RLPD, (*RLPD, "policy.hidden=[8]"), SPEC, r"another policy.*: algo\.policy\.hidden: \[8\], \[16, 16\]\. Ask"),
        (RLPD, ("algo=sft", *FLOW), SPEC, r": algo\.policy\._target_: \S*ChunkPolicy, \S*GaussianPolicy\. Ask"),
        (RLPD, ("algo=tdmpc2_tiny",), SPEC, r"another policy.*: algo\._target_: \S*TDMPC2, \S*SAC\. Ask"),
        (("algo=recap", *FLOW), ("algo=sft", *FLOW), SPEC, r"has other networks.*size mismatch for network"),
    ],
    ids=["columns", "units", "sizes", "policy", "algorithm", "inputs"],
)  # fmt: skip
def test_what_gives_weights_another_meaning_is_refused_and_both_values_are_named(tmp_path, last, new, spec, why):
    trained(tmp_path, *last, spec=RADIANS)
    with pytest.raises(ConfigError, match=why):
        begun(tmp_path, *new, spec=spec)


@pytest.mark.parametrize(
    ("told", "damage", "why"),
    [
        ({}, True, "no checkpoint is whole"),
        ({"format": 3}, False, "another version"),
        ({"updates": 0}, False, "nothing"),
    ],
)
def test_a_checkpoint_that_is_damaged_old_or_of_no_update_is_refused(tmp_path, told, damage, why):
    trained(tmp_path, *RLPD)
    path = tmp_path / "last/checkpoints/000001"
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | told))
    if damage:
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=why):
        begun(tmp_path, *RLPD)
