"""A run in this process: server, trainer, inference and actor as threads that do what their programs do."""

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from serl_client import Spec
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.way_home import WayHome

from serl_launcher import launcher
from serl_launcher.acting import server as inference
from serl_launcher.config import composed
from serl_launcher.datasets import importer
from serl_launcher.training import build as training
from serl_launcher.training import trainer
from serl_launcher.training.origin import Origin
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.training.resuming import origin_of

from . import common
from .common import CONFIG, PATIENCE, same_log, until
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
        started.join(10 * PATIENCE)
        assert not started.is_alive(), "it goes on"


@contextmanager
def serving(config: DictConfig) -> Iterator[tuple[str, int]]:
    """(the learner's own address, the actors' port) of a server."""
    plan, asked = plan_of(config), f"tcp://127.0.0.1:{config.inference_port}"
    launcher.describe_store(config, plan)
    with closing(ServerThread(Path(config.run_dir), inference=asked, **config.store)) as server:
        yield server.local, server.port
    assert not server.ended


@contextmanager
def answering(config: DictConfig, local: str) -> Iterator[None]:
    """The inference of a learner at this address, as long as this lasts."""
    signals: list[Callable[..., object]] = []
    caught = SimpleNamespace(signal=lambda _, handler: signals.append(handler))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "signal", caught)
        with thread(partial(inference.infer, config, Path(config.run_dir), local)) as errors:
            try:
                yield
            finally:
                until(lambda: signals or errors)  # it is there once the run knows its robot
                for end in signals:
                    end(15, None)
    assert not errors, errors


def order(port: int, command: str) -> None:
    """Say it to a learner, as an operator does."""
    with Connection(f"tcp://127.0.0.1:{port}", m.Hello(m.PROTOCOL, "viewer", "operator")) as link:
        link.call(m.Command(command), PATIENCE)


REST_S = 0.05


@contextmanager
def resting() -> Iterator[None]:
    """An actor rests before each episode: it would else fill the learner's time with episodes that nobody needs, on the
    same processor."""
    go = WayHome.go

    def rested(*arguments: Any) -> bool:
        time.sleep(REST_S)
        return go(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WayHome, "go", rested)
        yield


@contextmanager
def building_by_turns() -> Iterator[None]:
    """Trainer and actor are threads here, so neither may draw from the seed of what the other builds."""
    turn, build = threading.Lock(), training.build

    def built(config: DictConfig, spec: Spec, origin: Origin | None = None) -> object:
        with turn, torch.random.fork_rng(devices=[]):
            training.seed(config)
            return build(config, spec, origin)

    with pytest.MonkeyPatch.context() as patch:
        for module in (training, trainer, inference):
            patch.setattr(module, "build", built)
        yield


def start(
    run_dir: Path,
    words: list[str],
    folder: Path = CONFIG,
    *,
    acts: bool = True,
    beside: Callable[[DictConfig, str, int], object] | None = None,
) -> DictConfig:
    """Run the plan of these words to its end, as the programs of both sides do; returns the learner's config.

    beside: is called meanwhile, with the learner's config, its own address and the actors' port.
    """
    config = composed(folder, ["learner=true", f"run_dir={run_dir}", *words])
    config.ranks, config["from"] = launcher.ranks_of(config), origin_of(config)
    OmegaConf.save(config, launcher.writable(run_dir) / "config.yaml", resolve=True)
    children = ["importer"] * bool(importer.open_datasets(plan_of(config))) + ["trainer"]
    with same_log(), serving(config) as (local, port), building_by_turns(), resting(), ExitStack() as stack:
        actor = OmegaConf.merge(config, {"learner": False, "actor": True, "inference": "local", "port": port})
        jobs = [partial(TRAIN.act, actor)] * acts + ([partial(beside, config, local, port)] if beside else [])
        failed = [stack.enter_context(thread(job, partial(order, port, "stop"))) for job in jobs]
        statuses = [launcher.child(name, str(run_dir), local) for name in children]
    failures = run_dir / launcher.ERRORS
    for errors in failed:
        if errors:
            raise errors[0]
    assert not any(statuses), failures.read_text() if failures.exists() else "see the sentence above"
    return config
