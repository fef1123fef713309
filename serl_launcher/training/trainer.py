"""Runs the trainer process: the parent of several ranks, or rank 0 with the Learner, or a rank that obeys rank 0."""

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from serl_client.connection import Connection
from serl_client.console import Console, console
from serl_client.spec import Spec

from serl_launcher.config import factory
from serl_launcher.optim.distributed import World, join
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.service.link import capacities, connect, wait_for_spec
from serl_launcher.supervisor import stop_file
from serl_launcher.training import budget, memory, report
from serl_launcher.training.build import build, check_memory, device_of, ranks_of, seed
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.counters import ASSISTED, TRAINED, curve
from serl_launcher.training.encoders import encoders
from serl_launcher.training.learner import Learner
from serl_launcher.training.metrics import MetricsLog, mirrored
from serl_launcher.training.origin import origin
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.training.ranks import Ranks, launch_ranks
from serl_launcher.training.resuming import check_resumable, free_settings, kept_settings
from serl_launcher.training.seen import told

log = logging.getLogger(__name__)


def main(config: DictConfig, run_dir: Path, local: str, begun: Callable[[], None]) -> None:
    """Run the trainer process of a run. It calls `begun` when it can keep a checkpoint, for which a signal waits."""
    if config.ranks == "auto":
        config.ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else _chosen(config, local)
    if config.ranks * config.nodes > 1 and "RANK" not in os.environ:
        sys.exit(launch_ranks(config, ["serl_launcher.launcher", "trainer", str(run_dir), local]))
    if os.environ.get("RANK", "0") == "0":
        train(config, run_dir, local, console("learner"), begun)
    else:
        obey(config)


def _chosen(config: DictConfig, local: str) -> int:
    """Return `ranks_of` once the robot is known, which the number of weights depends on."""
    plan_of(config, _updates(config))  # raises now what would else be found after the wait for an actor
    with connect(local, "trainer") as link:
        spec = wait_for_spec(link, announces=True)
    assert spec is not None
    return ranks_of(config, spec)


def train(config: DictConfig, run_dir: Path, local: str, shown: Console, begun: Callable[[], None]) -> None:
    """Run the plan to its end as the only rank, or as rank 0 of several; then write the report."""
    device = device_of(config)
    plan_of(config, _updates(config))  # raises now what would else be found after the wait for an actor
    world = join(device)
    with connect(local, "trainer") as link:
        spec = wait_for_spec(link, announces=True)
        assert spec is not None
        world.broadcast([OmegaConf.to_container(config), spec.to_dict()])
        learner = _learner(config, run_dir, link, spec, world, shown, stop_file(local).exists)
        begun()
        with mirrored(run_dir / "metrics.jsonl", config.log):
            learner.run()
            learner.ranks.end()
            if learner.state.phase is None:
                summarise(learner, run_dir)


def _learner(
    config: DictConfig, run_dir: Path, link: Connection, spec: Spec, world: World, shown: Console,
    is_stopped: Callable[[], bool],
) -> Learner:  # fmt: skip
    resumes = check_resumable(run_dir / "checkpoints", config, plan_of(config))
    ranks = _ranks(config, spec, world, begins=not resumes and bool(config["from"]))
    log.info("%s", told(config, ranks.algorithm, spec))
    plan = plan_of(config, set(ranks.algorithm.windows)).only(config.phase)
    for note in plan.notes:
        log.info("%s", note)
    folder, kept = run_dir / "store", capacities(link)
    seen = encoders(ranks.algorithm, spec, world.device)
    budget.check_encoded(seen, spec, kept, memory.free("cpu", 1))
    sources = ReplayMixture(
        folder, spec, kept, plan.views, seed=config.seed, device=world.device, verdict=plan.verdict,
        derived=ranks.algorithm.derived, encoders=seen,
    )  # fmt: skip
    return Learner(
        run_dir=run_dir, link=link, plan=plan, ranks=ranks, sources=sources,
        checkpoints=Checkpoints(
            run_dir / "checkpoints", spec=spec, config=kept_settings(config), changeable=free_settings(config)
        ),
        metrics=MetricsLog(run_dir / "metrics.jsonl"), console=shown, batch_size=config.batch_size,
        checkpoint_s=None if config.checkpoint_s == "auto" else config.checkpoint_s, accept_plan=config.accept_plan,
        is_stopped=is_stopped, origin=config["from"],
    )  # fmt: skip


def obey(config: DictConfig) -> None:
    """Run any rank but 0: build what rank 0 builds, of rank 0's config, and do what it says."""
    world = join(device_of(config))
    told, spec = world.broadcast()
    _ranks(DictConfig(told), Spec.from_dict(spec), world).obey()


def _ranks(config: DictConfig, spec: Spec, world: World, *, begins: bool = False) -> Ranks:
    """Build the algorithm on this rank. What one rank cannot build, all ranks refuse.

    begins: with what another run has learned; for rank 0, whose weights all others get.
    """
    sharding: Any = OmegaConf.to_container(config.sharding)
    with world.together():
        if world.rank == 0:
            need = check_memory(config, spec, world.device, world.size)
            log.info("training takes %s", need)
        taken = origin(config, spec) if begins else None
        seed(config)
        ranks = Ranks(build(config, spec, taken), world, sharding)
        ranks.check({config.batch_size, *plan_of(config).batches(config.batch_size).values()})
    return ranks


def _updates(config: DictConfig) -> set[str]:
    """Return the names of the algorithm's updates, without a Spec to build it for."""
    factory(config, "policy", None)
    algorithm: Any = factory(config, "algo", None)
    return {name for name in dir(algorithm.func) if name.startswith("update")}


def summarise(learner: Learner, run_dir: Path) -> None:
    """Write summary.json and learning_curve.png, and print the table; a plan that only evaluates: evaluation.json, too.

    Such a plan leaves a summary.json alone that tells an evaluation of the same weights already.
    """
    counters, phases = learner.counters, learner.state.plan.phases.values()
    version = learner.publisher.version["sha256"]
    done = counters.finished()["flags"]
    done = done[done & TRAINED > 0]
    evaluations = [{"phase": name, **result} for name, result in learner.evaluations.items()]
    summary = run_dir / "summary.json"
    files = [summary]
    if not any(phase.updates or phase.actors.mode in ("collect", "teleop") for phase in phases):
        measured = (report.read(summary).get("eval") or {}).get("weights_sha256")
        files = [*[summary] * (measured != version), run_dir / "evaluation.json"]
    write = functools.partial(
        report.write, env_steps=counters.env_steps, episodes=len(done), assisted=int((done & ASSISTED > 0).sum()),
        updates=learner.state.updates, wall_s=learner.wall_s, evaluations=evaluations, weights_sha256=version,
        dropped=round(learner.state.dropped), changes=learner.changes, person=learner.person_time(),
        curve=curve(counters, [phase.name for phase in phases if phase.actors.mode == "collect"]),
        closing=learner.state.plan.closing,
    )  # fmt: skip
    report.show([write(path) for path in files][-1], evaluated=bool(evaluations))
