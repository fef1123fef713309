"""A run in this process: server, trainer and actor as threads that do what their programs do."""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from serl_client import Spec
from serl_client import messages as m
from serl_client.connection import Connection

from serl_launcher import launcher
from serl_launcher.config import composed
from serl_launcher.training import build as training
from serl_launcher.training import trainer
from serl_launcher.training.plan_reader import plan_of

from . import common
from .common import CONFIG, PATIENCE
from .servers import ServerThread

SPECIFIED = importlib.util.spec_from_file_location("train", common.TRAIN)
assert SPECIFIED is not None
assert SPECIFIED.loader is not None
TRAIN = importlib.util.module_from_spec(SPECIFIED)  # examples/train.py
SPECIFIED.loader.exec_module(TRAIN)


@contextmanager
def thread(target: Callable[[], object], failed: Callable[[], object] = list) -> Iterator[list[BaseException]]:
    """What a thread with `target` raises; then it calls `failed`. It has ended when this ends."""
    errors: list[BaseException] = []

    def caught() -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)
            failed()

    started = threading.Thread(target=caught, daemon=True)
    started.start()
    try:
        yield errors
    finally:
        started.join(PATIENCE)
        assert not started.is_alive(), "it goes on"


@contextmanager
def serving(config: DictConfig) -> Iterator[tuple[str, int]]:
    """(the learner's own address, the actors' port) of a server."""
    plan = plan_of(config)
    launcher.describe_store(config, plan)
    with closing(ServerThread(Path(config.run_dir), **config.store)) as server:
        yield server.local, server.port
    assert not server.ended


def stop(port: int) -> None:
    """Say to a learner that nobody acts any more."""
    with Connection(f"tcp://127.0.0.1:{port}", m.Hello(m.PROTOCOL, "viewer", "operator")) as link:
        link.call(m.Command("stop"), PATIENCE)


@contextmanager
def building_by_turns() -> Iterator[None]:
    """Trainer and actor are threads here, so neither may draw from the seed of what the other builds."""
    turn, build = threading.Lock(), training.build

    def built(config: DictConfig, spec: Spec) -> object:
        with turn, torch.random.fork_rng(devices=[]):
            training.seed(config)
            return build(config, spec)

    with pytest.MonkeyPatch.context() as patch:
        for module in (training, trainer):
            patch.setattr(module, "build", built)
        yield


def start(run_dir: Path, words: list[str], folder: Path = CONFIG, *, acts: bool = True) -> DictConfig:
    """Run the plan of these words to its end, as the programs of both sides do; returns the learner's config."""
    config = composed(folder, ["learner=true", f"run_dir={run_dir}", *words])
    config.ranks = launcher.ranks_of(config)
    OmegaConf.save(config, launcher.writable(run_dir) / "config.yaml", resolve=True)
    with serving(config) as (local, port), building_by_turns():
        actor = OmegaConf.merge(config, {"learner": False, "actor": True, "inference": "local", "port": port})
        with thread(partial(TRAIN.act, actor), partial(stop, port)) if acts else nullcontext([]) as errors:
            status = launcher.child("trainer", str(run_dir), local)
    failures = run_dir / launcher.ERRORS
    if errors:
        raise errors[0]
    assert status == 0, failures.read_text() if failures.exists() else "see the sentence above"
    return config
