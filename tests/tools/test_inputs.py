"""tools/inputs.py: shuffling what a policy looks at raises its loss, and shuffling anything else does not."""

import re

import numpy as np
import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf
from serl_client.episode import Outcome, Segment, Stamp
from serl_client.spec import Feature, Spec

from serl_launcher.config import composed
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store import weights
from serl_launcher.store.store import Store
from serl_launcher.training.build import build
from tests.shared.common import CONFIG, STATE
from tests.shared.tools import called
from tools import inputs as tool

FRONT, SIDE = "observation.images.front", "observation.images.side"
SIZE, STEPS, CAPACITY = 32, 16, 400
SPEC = Spec(
    {STATE: Feature((2,)), FRONT: Feature((SIZE, SIZE, 3), "uint8"), SIDE: Feature((SIZE, SIZE, 3), "uint8")},
    Feature((2,), low=-1, high=1), fps=10.0,
)  # fmt: skip
SMALL = [
    "policy.horizon=1", "policy.network.hidden=[64]", "policy.encoder.channels=[8,8]", "policy.encoder.latent=16",
    "algo.optimizer.learning_rate=3e-3", "algo.ema_decay=0.9", "algo.idle_filter.threshold=0", "batch_size=32",
]  # fmt: skip
SEES = ["algo=rejection_pixels", "policy=flow_pixels", "algo.augment=null", *SMALL]
BLIND = [*SEES, "policy.encoder.cameras=[]"]


def episode(number, source, directive, random, success):
    """A bright block before the camera `front`, to which the action points; all else is noise."""
    place = random.integers(0, SIZE - 8, (STEPS + 1, 2))
    images = random.integers(40, 80, (2, STEPS + 1, SIZE, SIZE, 3), dtype=np.uint8)
    for image, (row, column) in zip(images[0], place, strict=True):
        image[row : row + 8, column : column + 8] = 220
    action = (place[:STEPS] / (SIZE - 9) * 2 - 1).astype(np.float32)
    id, flags = f"{source}-{number}", np.zeros(STEPS, bool)
    seen = {STATE: random.normal(size=(STEPS + 1, 2)).astype(np.float32), FRONT: images[0], SIDE: images[1]}
    rows = np.zeros(STEPS, np.float32), flags, flags, np.arange(STEPS) / 10.0
    yield Segment(id, 0, "look", Stamp(directive, source, 0), seen, action, *rows, terminated=True)
    yield Outcome(id, success)


def made(run, words, *, updates, success=True):
    """A run's folder with demonstrations, a policy that has cloned them, and three evaluated episodes."""
    config = composed(CONFIG, ["learner=true", f"run_dir={run}", *words])
    run.mkdir()
    OmegaConf.save(config, run / "config.yaml")
    store = Store.create(run / "store", SPEC, {"demo": CAPACITY, "eval": CAPACITY})
    random, seq = np.random.default_rng(0), 0
    store.lives.hello("arm", "outbox", "session", [])
    for source, count in (("demo", 20), ("eval", 3)):
        directive = store.direct({"into": source, "phase": source})
        for number in range(count):
            for record in episode(number, source, directive, random, success):
                store.stage("session", seq, record)
                seq += 1
        store.commit()
    if updates is not None:
        sha256, size = weights.write(run / "weights", safetensors.torch.save(cloned(run, config, store, updates)))
        store.publish_weights(sha256, size, updates)
    store.close()
    return run


def cloned(run, config, store, updates):
    """What acts after so many updates on the demonstrations."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    algorithm = build(config, SPEC)
    sources = ReplayMixture(run / "store", SPEC, {"demo": CAPACITY}, {}, seed=0)
    sources.update([row for row in store.index.catalog(0, 100)[1] if row[2] == "demo"])
    for _ in range(updates):
        algorithm.update(sources.sample(config.batch_size, algorithm.windows["update"], {"demo": 1.0}))
    return {name: tensor.contiguous() for name, tensor in algorithm.acting.state_dict().items()}


def inputs(run, *words):
    return called("inputs", "--run-dir", run, *words)


def changes(said):
    """{what was shuffled: by which share the loss rose}."""
    found = re.findall(r"^(.+) shuffled +[\d.-]+ +[+-][\d.]+ +([+-][\d.]+)%$", said, re.MULTILINE)
    return {what: float(percent) / 100 for what, percent in found}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return made(tmp_path_factory.mktemp("seeing") / "run", SEES, updates=250)


@pytest.mark.slow
def test_shuffling_what_the_policy_looks_at_raises_its_loss_and_nothing_else_does(seeing):
    status, said = inputs(seeing)
    assert status == 0
    assert "3 successful episodes of eval, weights 1" in said
    changed = changes(said)
    assert set(changed) == {STATE, FRONT, SIDE, "all cameras"}
    assert changed[FRONT] > 0.3
    assert changed["all cameras"] > 0.3
    assert abs(changed[STATE]) < 0.1
    assert abs(changed[SIDE]) < 0.1


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [(0.5, 0.75, "+0.2500    +50.0%"), (-0.1, 0.57, "+0.6700"), (0.0, 0.1, "+0.1000"), (-1.0, -2.0, "-1.0000")],
)
def test_percent_are_said_only_of_a_loss_above_zero(before, after, said):
    assert tool.change(before, after).strip() == said


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(seeing):
    assert inputs(seeing, "--windows", "64") == inputs(seeing, "--windows", "64")


@pytest.mark.slow
def test_a_fold_and_another_source_can_be_asked_about(seeing):
    said = [inputs(seeing, "--source", "demo", "--split", split)[1] for split in ("held_out", "train")]
    counts = [int(re.search(r"of (\d+) successful episodes of demo", text)[1]) for text in said]
    assert sum(counts) == 20
    assert 0 < counts[0] < counts[1]


def test_a_camera_that_is_no_input_is_said_to_be_none(tmp_path):
    status, said = inputs(made(tmp_path / "run", BLIND, updates=1))
    assert status == 0
    assert set(changes(said)) == {STATE}
    assert said.count("is no input of this policy") == 3


@pytest.mark.parametrize(
    ("updates", "success", "words", "message"),
    [
        (None, True, [], "has no published weights yet: start its learner"),
        (1, False, [], "eval holds no successful episode that is as long as this policy needs: run an evaluation"),
        (1, True, ["--source", "demos"], "no source is called 'demos'; did you mean 'demo'?"),
        (1, True, ["--windows", "1"], "shuffling needs at least 2"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(tmp_path, updates, success, words, message):
    status, said = inputs(made(tmp_path / "run", BLIND, updates=updates, success=success), *words)
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith("error: ")
    assert message in said


def test_a_folder_without_a_run_is_named(tmp_path):
    assert inputs(tmp_path)[1].startswith(f"error: there is no run in {tmp_path}: name the folder")
