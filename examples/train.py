"""Starts a run: `learner=true` starts the learner, `actor=true` an actor; the rest is config.

examples/train.py learner=true|actor=true [task=... algo=... policy=... plan=...] [name=value ...]
    --help says what there is to choose, --cfg prints the config that the words make.

Only wiring: Hydra composes, this file hands the parts to each other.
"""

import logging
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from serl_client import clock
from serl_client.chunks import RULES, chunk_policy, deadline_of
from serl_client.client import TrainerClient
from serl_client.connection import is_local, tcp
from serl_client.console import LiveDisplay, console, log_as
from serl_client.controller import RemotePolicy
from serl_client.errors import ConfigError, RetakeError
from serl_client.identity import keep_name, machine, named, undelivered
from serl_client.keys import Key
from serl_client.lockfile import holder
from serl_client.reach import Look, Lookout, why_silent
from serl_client.runner import run_actor
from serl_client.several import Share, run_several
from serl_client.starts import alone
from serl_client.status import RECENT, ActorStatus
from serl_client.words import check_choice

from robot_infra.classifier_judge import ClassifierJudge, judge_by
from robot_infra.resets import resets_of
from robot_infra.stages import stages_of
from robot_infra.teleop.keyboard import LEGEND, Keyboard
from serl_launcher.config import composed, factory, groups
from serl_launcher.launcher import launch, writable
from serl_launcher.sharing import keep_private, take_over

log = logging.getLogger(__name__)

MOST_ENVS = 64
STARTING = 120.0  # seconds that a learner on this machine may take until it listens, and nobody is warned
CONFIG = Path(__file__).resolve().parent.parent / "config"


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script that starts us with & has it ignored
    words = [word for word in sys.argv[1:] if word not in ("--cfg", "job")]
    if {"--help", "-h"} & set(words):
        choices = "\n".join(f"{name}: {', '.join(names)}" for name, names in groups(CONFIG).items())
        print(f"{__doc__}\n{choices}\n\n{(CONFIG / 'base.yaml').read_text()}")
        return
    try:
        config = composed(CONFIG, words)
        if "--cfg" in sys.argv:
            print(OmegaConf.to_yaml(config))
            return
        status = run(config)
    except (RetakeError, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


def run(config: DictConfig) -> int:
    """Run one side; returns the exit status."""
    if config.learner == config.actor:
        raise ConfigError("say which side this is: learner=true or actor=true")
    keep_private(config.share is not None)
    if config.learner:
        log_as("launcher")
        return launch(config, sys.argv[1:])
    return act(config)


def act(config: DictConfig) -> int:
    """Run an actor until the plan ends, or one for each of several simulated environments."""
    check_choice(config.inference, ("remote", "local"), "place", "inference")
    check_choice(config.chunks, tuple(RULES), "rule", "chunks")
    key = Key.read(Path(config.key)) if config.key else None
    config.name = named(str(config.name), key, Path(str(config.run_dir)) / "actors")
    if config.envs == 1:
        return act_in(config)
    made: Any = factory(config, "task.env")
    if made.keywords.get("clock", getattr(made.func, "clock", "real")) != "simulated":
        raise ConfigError(f"envs={config.envs}: only simulated robots can be several; a real one needs envs=1")
    if config.envs not in range(1, MOST_ENVS + 1):
        raise ConfigError(f"envs={config.envs}: say a whole number from 1 to {MOST_ENVS}")
    return run_several(config.envs, partial(act_as_one_of, config))


def act_as_one_of(config: DictConfig, place: int, share: Share) -> None:
    """Be the process of one of several environments."""
    try:
        act_in(config, place, share)
    except (RetakeError, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def act_in(config: DictConfig, place: int = 0, share: Share = alone) -> int:
    """Act in one environment, number `place` of config.envs, under a name of its own."""
    key, local = Path(config.key) if config.key else None, config.inference == "local"
    name = str(config.name) + f"/{place}" * (config.envs > 1)
    shown = console(name, plain=config.envs > 1)  # first, because a robot says how it is limited
    with factory(config, "task.env")() as env, closing(env.operator or Keyboard()) as keyboard:
        judge = judge_by(config.task.judge, env, name=name) if config.task.judge.address else None
        operator = stages_of(env, keyboard, config.task.stages)
        resets = resets_of(env, config.reset, config.reset_patience)
        deadline = deadline_of(config.deadline_s, env.spec.fps, env.clock)
        run_dir = writable(Path(str(config.run_dir)))
        take_over(run_dir, config.share, is_learner=False)
        folder = writable(run_dir / "actors" / name)
        if place == 0:
            settle(str(config.name), config.envs, run_dir / "actors")
        address = tcp(str(config.ip), config.port)
        with TrainerClient(
            address, actor=name, spec=env.spec, outbox=folder / "outbox",
            capacity=int(config.outbox_gb * 1e9), paced=env.clock == "simulated", has_operator=env.has_operator,
            weights_folder=folder / "weights" if local else None, key=key,
            inference_port=None if config.inference_port == "auto" else config.inference_port,
            remote=getattr(keyboard, "remote", None),
        ) as client, closing(local_source(config, client) if local else client) as source:  # fmt: skip
            controller = chunk_policy(
                source, chunks=config.chunks, deadline=deadline, n_action_steps=config.n_action_steps, clock=env.clock
            )
            status = ActorStatus()
            keys = operator.legend(getattr(keyboard, "legend", {"keys": LEGEND} if keyboard.has_terminal else {}))
            find = partial(find_learner, address, run_dir, has_key=key is not None, began=clock.monotonic())
            lookouts = watched(client, controller, judge, find, has_key=key is not None, local=local)
            display = LiveDisplay(shown, lambda: rows(status, client, keys, lookouts), lambda: status.driver)
            with ExitStack() as watching:
                for each in (*lookouts.values(), display):
                    watching.enter_context(each)
                run_actor(
                    env, controller, client, seed=config.seed, operator=operator, reset=config.reset, status=status,
                    share=share, resets=resets,
                )  # fmt: skip
    return 0


def settle(name: str, envs: int, actors: Path) -> None:
    """Keep the machine's name for this folder, and warn of records that other actors have left here."""
    if name == machine():
        keep_name(name, actors)
    words = [word for word in sys.argv[1:] if not word.startswith(("name=", "envs="))]
    own = [f"{name}/{place}" for place in range(envs)] if envs > 1 else [name]
    for other, size in undelivered(own, actors).items():
        command = shlex.join([".venv/bin/python", "examples/train.py", *words, f"name={other}"])
        log.warning(
            "%s holds %.1f MB of records that nobody delivers. End this actor and start that one, which delivers them "
            "first: `%s`", actors / other / "outbox", size / 1e6, command,
        )  # fmt: skip


def find_learner(address: str, run_dir: Path, *, has_key: bool, began: float) -> Look:
    """Look why the learner is silent. One that has this run's folder here, and listens nowhere yet, is starting."""
    found = why_silent(address, has_key=has_key)
    is_new = found.is_refused and is_local(address) and clock.monotonic() < began + STARTING
    return Look(True, "starting, on this machine") if is_new and holder(run_dir) else found


def watched(
    client: TrainerClient, controller: RemotePolicy, judge: ClassifierJudge | None, find: Callable[[], Look], *,
    has_key: bool, local: bool,
) -> dict[str, Lookout]:  # fmt: skip
    """What an actor waits for, by its name in the console: the learner, and who gives it actions and verdicts. find:
    looks why the learner is silent."""

    def find_actions() -> Look:
        if local:
            return Look(False, client.pulling, "look at the learner's screen, whether its trainer runs")
        return why_silent(client.inference, has_key=has_key, option="inference_port")

    learner = Lookout("the learner", lambda: client.silence, find, refusal=lambda: client.refusal)
    what = "the learner's weights" if local else "the inference process"
    silence = controller.unanswered
    actions = Lookout(
        what, lambda: silence.seconds if client.connected else None, find_actions,
        refusal=lambda: "" if local else client.no_action,
    )  # fmt: skip
    judged = {"judge": Lookout("the judge", lambda: judge.unanswered.seconds, judge.why_silent)} if judge else {}
    return {"learner": learner, "actions": actions, **judged}


def rows(
    status: ActorStatus, client: TrainerClient, keys: Mapping[str, str], lookouts: Mapping[str, Lookout]
) -> dict[str, str]:  # fmt: skip
    """What the actor's console shows."""
    (records, size), fault = client.pending, client.fault or client.state.degraded
    because = f": {status.because}" * bool(status.because)
    moves = status.driver in ("POLICY", "HUMAN") and status.rate > 0
    return {
        **({"warning": status.warning} if status.warning else {}),
        **keys,
        "phase": (status.phase or "-") + f" ({status.mode})" * (status.mode != status.phase) + because,
        **{name: str(each) for name, each in lookouts.items() if name == "learner" or each.told},
        "episodes": f"{status.episodes}, {status.steps} steps, now {status.episode or '-'}",
        f"of last {RECENT}": f"success {status.unassisted} unassisted, {status.assisted} assisted",
        "takeovers": f"{status.takeovers}" + f", {status.remote} drives now" * bool(status.remote),
        "control": f"{status.rate:.1f} Hz, " * moves + f"{status.late} late ticks",
        "outbox": f"{records} records, {size / 1e6:.1f} MB not acknowledged" + f": {fault}" * bool(fault),
    }


def local_source(config: DictConfig, client: TrainerClient) -> Any:
    """An ActionSource with a policy in this process, and weights from the learner; the caller closes it."""
    try:
        from serl_launcher.acting.host import PolicyHost
        from serl_launcher.acting.local import LocalSource
        from serl_launcher.training.build import build, device_of, seed
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"inference=local needs {error.name}: run `. examples/install.sh --extra learner` here"
        ) from None
    seed(config)
    spec = client.spec  # one of them: a Welcome may change the client's
    return LocalSource(client, PolicyHost(build(config, spec), spec, device_of(config)))


if __name__ == "__main__":
    main()
