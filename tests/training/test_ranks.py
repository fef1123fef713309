"""How many of a machine's GPUs train where `ranks` is auto, and what ranks make equal besides the gradients."""

import copy
from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from serl_client import ConfigError

from serl_launcher import launcher
from serl_launcher.config import composed
from serl_launcher.optim.distributed import World
from serl_launcher.training import build, trainer
from serl_launcher.training.ranks import Ranks, launch_ranks
from tests.shared.common import CONFIG, own_ports
from tests.shared.models import batch, config_of, robot

GPUS = 4


@pytest.fixture
def ranks(monkeypatch, tmp_path_factory):
    """ranks(*words) -> how many processes train a run with these words on a machine with four GPUs."""
    started = []

    class Supervisor:
        """Starts the trainer alone, in this process."""

        def __init__(self, run_dir, *_, **__):
            self.run_dir = run_dir

        def run(self):
            config = OmegaConf.load(self.run_dir / "config.yaml")
            assert isinstance(config, DictConfig)
            trainer.main(config, self.run_dir, "", lambda: None)
            return 0

    monkeypatch.setattr(launcher, "_gpus", lambda device: GPUS)
    monkeypatch.setattr(launcher, "NEEDED_BY_RANKS", ())
    monkeypatch.setattr(launcher, "Supervisor", Supervisor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(trainer, "connect", lambda local, name: nullcontext())
    monkeypatch.setattr(trainer, "wait_for_spec", lambda link, announces: robot())
    monkeypatch.setattr(trainer, "launch_ranks", lambda config, module: started.append(config.ranks))
    monkeypatch.setattr(trainer.sys, "exit", lambda status: None)
    monkeypatch.setattr(trainer, "train", lambda config, *_: started.append(1))

    def ranks(*words):
        started.clear()
        place = [f"run_dir={tmp_path_factory.mktemp('run')}", *own_ports()]
        assert launcher.launch(composed(CONFIG, ["learner=true", *place, *words])) == 0
        return started[0]

    return ranks


@pytest.mark.slow
def test_small_networks_train_on_one_gpu_and_large_ones_on_all(ranks, monkeypatch):
    assert ranks() == 1
    assert ranks("ranks=2") == 2
    pytest.importorskip("transformers")
    monkeypatch.setattr(build, "WORTH", 500_000)  # ten times of what this one trains
    large = ("algo=sft", "policy=pi0_tiny", "policy.lora=2")
    assert ranks(*large) == GPUS, "frozen weights count, too"
    assert ranks(*large, "device=cpu") == 1, "several GPUs are no reason for several processes on a CPU"


@pytest.mark.slow  # accelerate's import takes seconds
@pytest.mark.parametrize("device", ["cuda", "auto", "cpu"])
def test_more_ranks_than_gpus_are_refused_unless_the_cpu_is_asked_for(monkeypatch, device):
    started = []
    for name in ("LOGLEVEL", "OMP_NUM_THREADS"):  # which it sets
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda options: started.append(options))
    config = OmegaConf.create({"device": device, "ranks": 2, "nodes": 1, "node_rank": 0, "threads": 1})
    assert isinstance(config, DictConfig)
    with nullcontext() if device == "cpu" else pytest.raises(ConfigError, match="ranks=2, and this machine has 1 GPUs"):
        assert launch_ranks(config, ["a.module"]) == 0
    assert [options.num_processes for options in started] == [2] * (device == "cpu")


@pytest.mark.parametrize(
    ("name", "update", "buffer"), [("guided", "update_critic", "acts.size"), ("recap", "update_advantage", "threshold")]
)
def test_what_follows_a_batch_follows_that_of_all_ranks(name, update, buffer):
    algorithm = instantiate(config_of(f"algo={name}", "policy.horizon=2").algo)(robot(cameras=()))
    there = torch.tensor(3.0)  # what the other rank has

    class Two(World):
        def scatter(self, trees=()):
            return {field.name: getattr(rows, field.name) for field in fields(rows)}

        def mean(self, value):
            return (value + there) / 2

        def joined(self, part):
            return part

    rows = batch(robot(cameras=()), 8, window=algorithm.windows[update], derived=algorithm.derived)
    alone = copy.deepcopy(algorithm)
    getattr(alone, update)(rows)
    Ranks(algorithm, Two(), None)._update(update)
    torch.testing.assert_close(algorithm.get_buffer(buffer), (alone.get_buffer(buffer) + there) / 2)
