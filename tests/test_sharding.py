"""Two real processes train one algorithm: to the same end as one process, whatever is spread over them.

This file is also the program of such a process: test_sharding.py FOLDER FUNCTION [ARGUMENT ...]
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from serl_client import Feature, Spec

from serl_launcher.service.ranks import Ranks
from serl_launcher.types import Batch
from serl_launcher.utils.checkpoint import Checkpoints
from serl_launcher.utils.distributed import World, join

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 150.0
UPDATES, KEPT = 20, 10  # how many there are, and after how many a checkpoint is kept
WAYS = ("replicas", "zero1", "zero2", "zero3")
IMAGE = "observation.images.top"
SPEC = Spec(
    {"observation.state": Feature((4,)), IMAGE: Feature((16, 16, 3), "uint8")}, Feature((2,), low=-1, high=1), fps=10.0
)
POLICIES = {
    "flow": ["+algo=sft", "+policy=flow", "policy.hidden=[64,64]", "algo.optimizer.learning_rate=3e-3"],
}


def config_of(words):
    with initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return compose(overrides=list(words))


def ranks_of(words, world, way="replicas"):
    torch.manual_seed(0)
    config = config_of([*words, f"+sharding={way}"])
    return Ranks(instantiate(config.algo)(SPEC), world, OmegaConf.to_container(config.sharding))


def batch_of(window, number, size=8):
    """The batch of update `number`: the same for whoever asks."""
    generator, steps = torch.Generator().manual_seed(number), (size, window.horizon)

    def observation():
        return {column: drawn(column, len(at)) for column, at in window.offsets.items() if column in SPEC.observation}

    def drawn(column, count):
        shape = (size, count, *SPEC.observation[column].shape)
        if column == IMAGE:
            return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        return torch.randn(shape, generator=generator)

    yes = torch.ones(steps, dtype=torch.bool)
    return Batch(
        observation=observation(), action=torch.rand(*steps, 2, generator=generator) * 2 - 1,
        reward=torch.rand(steps, generator=generator), valid=yes, terminated=~yes, truncated=~yes, intervened=~yes,
        length=torch.full((size,), window.horizon), weight=torch.rand(size, generator=generator),
        step_id=torch.arange(size), seed=torch.randint(2**62, (size,), generator=generator),
        next_observation=observation() if "next_observation" in window.offsets else None, task=("reach",) * size,
    )  # fmt: skip


def train(ranks, begin, end, update="update"):
    """The metrics of some updates, as numbers."""
    window = ranks.algorithm.windows[update]
    metrics = [ranks.update(update, batch_of(window, number)) for number in range(begin, end)]
    return [{name: float(value) for name, value in each.items()} for each in metrics]


def digest(state):
    """A hash of a tree of tensors and plain data."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(state, dict):
        return hashlib.sha256(json.dumps({str(key): digest(state[key]) for key in state}).encode()).hexdigest()
    return repr(state)


def alone(words, updates=UPDATES):
    ranks = ranks_of(words, World())
    ranks.begin(None)
    return train(ranks, 0, updates)


# -- what a rank does


def each_way(folder, world, words, life):
    """`first`: train to the end, and on until killed; `second`: from the checkpoint to the end."""
    for way in WAYS:
        ranks, place = ranks_of(words, world, way), Checkpoints(folder / way, spec=SPEC, config={})
        if world.rank != 0:
            ranks.follow()
            continue
        ranks.begin(place.load() if life == "second" else None)
        metrics = []
        if life == "first":
            metrics += train(ranks, 0, KEPT)
            place.save(KEPT, ranks.state_dict())
        metrics += train(ranks, KEPT, UPDATES)
        published = safetensors.torch.save(ranks.published())
        (folder / f"{way}.{life}.safetensors").write_bytes(published)
        (folder / f"{way}.{life}.json").write_text(json.dumps([metrics, digest(ranks.state_dict())]))
        ranks.end()
    while life == "first":
        time.sleep(1)


def main(folder, function, *arguments):
    torch.set_num_threads(1)
    globals()[function](Path(folder), join("cpu"), *map(json.loads, arguments))


# -- the tests


class Two:
    """The two processes of one program, as `accelerate launch` starts them."""

    def __init__(self, folder, function, *arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log, self.processes = open(folder / f"{function}.log", "w+"), []  # noqa: SIM115
        command = [sys.executable, __file__, str(folder), function, *map(json.dumps, arguments)]
        for rank in ("0", "1"):
            environment = os.environ | {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            self.processes.append(subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log))

    def until(self, condition):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            over = [process.poll() for process in self.processes]
            assert not any(over), f"{over}: {self.said()}"
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def said(self):
        self.log.seek(0)
        return self.log.read()[-4000:]

    def end(self):
        self.until(lambda: all(process.poll() == 0 for process in self.processes))

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def two(tmp_path):
    made = []
    yield lambda *arguments: made.append(Two(tmp_path, *arguments)) or made[-1]
    for each in made:
        each.kill()


def told(folder, way, life):
    return json.loads((folder / f"{way}.{life}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_however_it_is_spread_it_ends_as_one_process_and_after_a_kill_bit_for_bit(two, tmp_path, policy):
    words = POLICIES[policy]
    first = two("each_way", words, "first")
    expected = alone(words)
    first.until(lambda: (tmp_path / f"{WAYS[-1]}.first.json").exists())
    first.kill()
    two("each_way", words, "second").end()
    for way in WAYS:
        (metrics, trained), (again, resumed) = told(tmp_path, way, "first"), told(tmp_path, way, "second")
        assert metrics[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=1e-4), way
        assert metrics[0] == pytest.approx(expected[0], rel=1e-4), way
        assert again == metrics[KEPT:]
        assert resumed == trained


if __name__ == "__main__":
    main(*sys.argv[1:])
