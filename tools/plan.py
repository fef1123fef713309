#!/usr/bin/env python
"""Prints the timeline of a plan, or checks it against its algorithm; or stops the run that trains by one.

tools/plan.py show|check NAME|FILE [OVERRIDES]: no robot and no learner is needed
tools/plan.py stop RUN: its learner, on this machine, keeps a checkpoint and ends; the same command goes on from there
"""

import argparse
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from serl_client.errors import ConfigError, RetakeError
from serl_client.lockfile import holder

from serl_launcher.config import composed
from serl_launcher.training.forecast import planned as planned_minutes
from serl_launcher.training.forecast import rate_of
from serl_launcher.training.plan import TRAINED, Phase, Plan, unrepeated
from serl_launcher.training.plan_reader import plan_of

CONFIG = Path(__file__).resolve().parent.parent / "config"


def planned(name: str, words: list[str]) -> DictConfig:
    """The whole configuration with the plan of that name, or with the plan in that file."""
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ConfigError(f"{name}: there is no such file")
        words, own = [w for w in words if not w.startswith("plan.")], [w for w in words if w.startswith("plan.")]
        config = composed(CONFIG, words)
        config.plan = OmegaConf.merge(OmegaConf.load(name), OmegaConf.from_dotlist(own).get("plan", {}))
        return config
    return composed(CONFIG, [f"plan={name}", *words])


def load(config: DictConfig, *, check_updates: bool) -> Plan:
    """The plan of a composed configuration, as the learner would load it."""
    methods = None
    if check_updates:
        algorithm = pkgutil.resolve_name(config.algo._target_)
        methods = {name for name in dir(algorithm) if name.startswith("update")}
    return plan_of(config, methods).only(config.phase)


def timeline(plan: Plan, minutes: Mapping[str, str]) -> Iterator[str]:
    """The lines that describe a plan to a person. minutes: of its phases, and of all by the name ""; see forecast."""
    for name, source in plan.sources.items():
        yield f"source {name}: {source.capacity:,} steps"
    for name, view in plan.views.items():
        yield f"view {name}: {', '.join(view.keep)} of {', '.join(view.of)}, from {view.min_length} steps"
    repeat = plan.repeat
    for number, name in enumerate(plan.outline, 1):
        is_repeated = repeat is not None and plan.repeats(name)
        times = f" to #{repeat.times}" if repeat and is_repeated else ""
        yield f"\n{number}. {name}{times}"
        yield from (f"   {word:<8} {text}" for word, text in described(plan.phases[name]).items() if text)
        yield from (f"   time     {text}" for text in [minutes.get(name)] if text)
        if repeat and is_repeated and unrepeated(name) == repeat.phases[-1]:
            leaves = f", until {' | '.join(repeat.until)}" if repeat.until else ""
            yield f"   repeat   {', '.join(repeat.phases)}: {repeat.times} times{leaves}"
    yield from (f"\nat most: {text}" for text in [minutes.get("")] if text)
    yield from (f"\nnote: {note}" for note in plan.notes)


def described(phase: Phase) -> Mapping[str, str]:
    """{what: text} of one phase; an empty text says that it has none."""
    actors, pace, within = phase.actors, phase.pace, phase.evaluate
    into = f" into {actors.into}" if actors.into else ""
    drawn = f" {actors.policy} actions" if actors.policy != TRAINED else ""
    shares = {name: f"{share:.0%}" for update in phase.updates for name, share in update.data.items()}
    when = f"every {within.every:,} {within.unit} until {' | '.join(within.phase.until)}" if within else ""
    ratio = f"{pace.updates_per_step:g} per env step, within {pace.tolerance:g}" if pace else "free"
    return {
        "actors": f"{actors.told}{drawn}{into}",
        "learner": ", ".join(update.name for update in phase.updates),
        "data": ", ".join(f"{share} {name}" for name, share in shares.items()),
        "start": f"when {phase.start_when}" if phase.start_when else "",
        "pace": ratio if phase.updates else "",
        "publish": f"every {phase.publish_every} updates" if phase.publish_every else "",
        "evaluate": when + (f", by {within.phase.actors.by} alone" if within and within.phase.actors.by else ""),
        "until": " | ".join(phase.until),
        "then": ", ".join(f"{action} {source or ''}".strip() for action, source in phase.on_end),
    }


def minutes_of(plan: Plan, config: DictConfig, like: Path | None) -> dict[str, str]:
    """The minutes that a plan takes of a robot at the task's rate; none where the task does not say it."""
    fps, longest = config.task.env.get("fps"), config.task.env.get("max_steps")
    return planned_minutes(plan, fps, longest, rate_of(like) if like else None) if fps and longest else {}


def stop(run_dir: Path) -> str:
    """Ask the learner of a run to keep a checkpoint and to end; return what to say once it has ended."""
    process, lock = holder(run_dir), (run_dir / "lock").resolve()
    if not any(file.resolve() == lock for file in Path(f"/proc/{process or 0}/fd").glob("*")):
        raise ConfigError(f"no learner trains in {run_dir} on this machine: give the folder of its run_dir=")
    os.kill(int(process), signal.SIGTERM)
    print(f"process {process} is asked to stop; it says how long that takes", flush=True)
    while holder(run_dir):
        time.sleep(0.1)
    return f"stopped: the command that began {run_dir} goes on from here"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("show", "check", "stop"), help="check: looks the updates up, too")
    parser.add_argument("plan", metavar="NAME|FILE|RUN", help="a plan of config/plan, a yaml file; to stop: a run_dir")
    parser.add_argument("--like", type=Path, metavar="RUN", help="show: a run whose updates per second tell the time")
    parser.add_argument("overrides", nargs="*", help="as for training: task=sim_arm algo=rlpd plan.phases...")
    arguments = parser.parse_args()
    try:
        if arguments.action == "stop":
            print(stop(Path(arguments.plan)))
            return 0
        config = planned(arguments.plan, arguments.overrides)
        plan = load(config, check_updates=arguments.action == "check")
    except (RetakeError, OmegaConfBaseException, ImportError, AttributeError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    print("\n".join(timeline(plan, minutes_of(plan, config, arguments.like))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
