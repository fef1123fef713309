"""What the torch processes of the learner build from the run's config: the trainer, and the inference process."""

import contextlib
import copy
import functools
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.console import Console
from serl_client.errors import ConfigError, Disconnected, Timeout
from serl_client.spec import Spec

from serl_launcher.acting.server import InferenceServer, PolicyHost
from serl_launcher.algorithms.base import Algorithm
from serl_launcher.config import factory
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.training import memory
from serl_launcher.training.counters import ASSISTED, TRAINED, curve
from serl_launcher.training.learner import Learner
from serl_launcher.training.plan import Plan, load_plan
from serl_launcher.training.ranks import Ranks
from serl_launcher.utils import report
from serl_launcher.utils.checkpoint import Checkpoints
from serl_launcher.utils.distributed import World, join
from serl_launcher.utils.logging import MetricsLog, mirrored

log = logging.getLogger(__name__)

SPARING = ("accumulation", "checkpointing")


def train(config: DictConfig, run_dir: Path, local: str, console: Console) -> None:
    """The trainer process, or rank 0 of several: run the plan to its end, then write the report."""
    device = device_of(config)
    plan_of(config, _updates(config))
    world = join(device)
    link, spec = _connect(local, "trainer")
    with link:
        world.broadcast([OmegaConf.to_container(config), spec.to_dict()])
        _train(config, run_dir, link, spec, world, console)


def _train(config: DictConfig, run_dir: Path, link: Connection, spec: Spec, world: World, console: Console) -> None:
    ranks = _ranks(config, spec, world)
    plan = plan_of(config, set(ranks.algorithm.windows))
    for note in plan.notes:
        log.info("%s", note)
    pinned = world.device != "cpu"
    sources = ReplayMixture(run_dir / "store", spec, capacities(link), plan.views, seed=config.seed, pinned=pinned)
    learner = Learner(
        run_dir=run_dir, link=link, plan=plan, ranks=ranks, sources=sources,
        checkpoints=Checkpoints(run_dir / "checkpoints", spec=spec, config=_identity(config)),
        metrics=MetricsLog(run_dir / "metrics.jsonl"), console=console, batch_size=config.batch_size,
        checkpoint_s=config.checkpoint_s, accept_plan=config.accept_plan,
    )  # fmt: skip
    with mirrored(run_dir / "metrics.jsonl", config.wandb):
        learner.run()
        ranks.end()
        summarise(learner)


def follow(config: DictConfig) -> None:
    """Any rank but 0: build what rank 0 builds, whose config counts, and do what it says."""
    world = join(device_of(config))
    told, spec = world.broadcast()
    _ranks(DictConfig(told), Spec.from_dict(spec), world).follow()


def _ranks(config: DictConfig, spec: Spec, world: World) -> Ranks:
    """The algorithm on this rank; what cannot be built on one rank is refused by all."""
    sharding: Any = OmegaConf.to_container(config.sharding)
    with world.together():
        if world.rank == 0:
            need = check_memory(config, spec, world.device, world.size, sharding["zero_optimization"]["stage"])
            log.info("training takes %s", need)
        seed(config)
        ranks = Ranks(build(config, spec), world, sharding)
        ranks.check(config.batch_size)
    return ranks


def check_memory(config: DictConfig, spec: Spec, device: str, size: int, stage: int) -> memory.Need:
    """What training with `size` ranks takes of each; raises ConfigError when it is not there."""
    torch.set_num_threads(int(config.threads))  # it computes a little, where other processes start
    memory.check_built(_shaped(config, spec), config.ranks)
    need = memory.needed(_shaped(config, spec), spec, config.batch_size, size, stage)
    memory.check(need, memory.free(device, config.ranks), device)
    return need


def _shaped(config: DictConfig, spec: Spec) -> Callable[[], Algorithm]:
    """Builds the algorithm of this config, with no weights from a file."""
    config = copy.deepcopy(config)
    if "weights" in config.algo.policy:
        config.algo.policy.weights = None
    return lambda: build(config, spec)


def infer(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None] = lambda: None) -> None:
    """The inference process: answer actors until SIGTERM; `begun` is called once it has weights to act with.

    Weights that are not of the config's algorithm are left aside: what they mean for the run, the trainer says.
    """
    seed(config)
    link, spec = _connect(local, "inference")
    memory.check_built(_shaped(config, spec), 1)
    server = InferenceServer(
        PolicyHost(build(config, spec), spec, device_of(config)), run_dir / "weights",
        f"tcp://{config.host}:{config.inference_port}", window=config.inference_window_ms / 1000,
        keys=Path(config["keys"]) if config["keys"] else None,
    )  # fmt: skip

    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    beat = 0.0

    def newest() -> Any:
        """What the server says is valid; tells it every second how this process does."""
        nonlocal beat
        while link.receive() is not None:
            pass
        if link.connected and time.monotonic() > beat:
            link.send(m.Heartbeat(server.report()))
            if server.host.version:
                begun()
            beat = time.monotonic() + 1.0
        return link.notice.weights

    try:
        server.run(newest, lambda: bool(stopped))
    finally:
        server.close()


def build(config: DictConfig, spec: Spec) -> Algorithm:
    """The algorithm that the config names, for this Spec. Raises ConfigError for an option that it does not have."""
    return factory(config, "algo", spec)(spec)


def plan_of(config: DictConfig, methods: set[str]) -> Plan:
    """The plan that the config names, checked against the algorithm's updates."""
    mapping: Any = OmegaConf.to_container(config.plan, resolve=True)
    plan = load_plan(mapping, methods=methods, has_operator=config.task.has_operator)
    return plan if config.phase is None else plan.only(config.phase)


def device_of(config: DictConfig) -> str:
    """`auto` is a GPU if there is one. Raises ConfigError for a device that is not there."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=str(config.device))
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device={config.device} cannot be used: say device=auto, cpu or cuda:0") from None
    return str(config.device)


def seed(config: DictConfig) -> None:
    """Whoever builds the algorithm does this first: weights that come from no file are then the same everywhere."""
    torch.set_num_threads(int(config.threads))
    torch.manual_seed(int(config.seed))


def _updates(config: DictConfig) -> set[str]:
    """The names of the algorithm's updates, known before there is a Spec to build it for."""
    factory(config, "policy", None)
    algorithm: Any = factory(config, "algo", None)
    return {name for name in dir(algorithm.func) if name.startswith("update")}


def _connect(local: str, name: str) -> tuple[Connection, Spec]:
    """A link to the server, and the run's Spec: the store's, or the one that the first actor brings."""
    link = Connection(local, m.Hello(m.PROTOCOL, "learner", name))
    told = 0.0
    while True:
        with contextlib.suppress(Timeout, Disconnected):
            if (spec := link.hello(timeout=1.0).spec) is not None:
                return link, Spec.from_dict(spec)
        if time.monotonic() - told > 10.0 and name == "trainer":
            log.info("waiting for the first actor: it brings the description of the robot (run_actor.sh)")
            told = time.monotonic()
        time.sleep(0.1)


def capacities(link: Connection) -> dict[str, int]:
    """{source: steps} of the run's store; waits for a server that is being started again."""
    while True:
        with contextlib.suppress(Timeout, Disconnected):
            status: Any = link.call(m.Status(), timeout=5.0)
            return {name: source["capacity"] for name, source in status.report["sources"].items()}
        time.sleep(0.1)


def _identity(config: DictConfig) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that resumes it."""
    return {"algo": _learning(OmegaConf.to_container(config.algo, resolve=True))}


def _learning(options: Any) -> Any:
    """Options without those that change the memory that training takes, and nothing of what is learned."""
    if not isinstance(options, dict):
        return options
    return {name: _learning(value) for name, value in options.items() if name not in SPARING}


def summarise(learner: Learner) -> None:
    """summary.json, learning_curve.png and the table on the screen; where the plan only evaluates, evaluation.json.

    Such a plan writes summary.json, too, unless that tells an evaluation of the same weights already.
    """
    counters, phases, version = learner.counters, learner.plan.phases.values(), learner.version["sha256"]
    done = counters.finished()["flags"]
    done = done[done & TRAINED > 0]
    evaluations = [learner.evaluations[phase.name] for phase in phases if phase.name in learner.evaluations]
    summary = learner.run_dir / "summary.json"
    files = [summary]
    if not any(phase.updates or phase.actors.mode in ("collect", "teleop") for phase in phases):
        measured = (report.read(summary).get("eval") or {}).get("weights_sha256")
        files = [*[summary] * (measured != version), learner.run_dir / "evaluation.json"]
    write = functools.partial(
        report.write,
        env_steps=counters.env_steps,
        episodes=len(done),
        assisted=int((done & ASSISTED > 0).sum()),
        updates=learner.state.updates,
        wall_s=learner.wall_s,
        evaluations=evaluations,
        weights_sha256=version,
        curve=curve(counters, [phase.name for phase in phases if phase.actors.mode == "collect"]),
    )
    report.show([write(path) for path in files][-1], evaluated=bool(evaluations))
