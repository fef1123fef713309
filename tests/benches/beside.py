"""What one valid key costs the others: ten actors at 30 Hz alone, and beside an attacker with another actor's key.

Each run is a learner with keys, as a person starts it, whose plan collects, trains a little, evaluates and ends. The
actors are processes with the product's own loop and an image of 64x64; they ask the inference process at each step. The
attacker is a process on one core, the last one, that tries everything by turns (tests/faults/attacker.py). A ban of its
key is lifted at once. Runs alone and beside it alternate. The time of an acknowledgement is from the push until the
outbox hears of it. The store is compared with what the actors noted, and summary.json with an independent count of it.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from serl_client.chunks import chunk_policy, deadline_of
from serl_client.env import Observation, Step
from serl_client.errors import TrainerError
from serl_client.runner import run_actor

from tests.faults import attacker, checker
from tests.faults.actor import NotingClient
from tests.faults.attacker import SPEC
from tests.faults.counted import Counted
from tests.faults.fuzzing.hostile import memory
from tests.faults.truth import Truth, notes
from tests.shared.common import STATE
from tests.shared.programs import Programs
from tools import processes
from tools.keys import locked, make

from .paired import Figure, option, ratio, rounds
from .served import PATIENCE_S, Group

ACTORS, EPISODES, STEPS = 10, 50, 60  # EPISODES of the evaluation, STEPS of an episode
HERS = "eve"  # the attacker's key
ENDS_S = 120.0  # that a plan may take beyond what it collects
WORDS = [
    "task=fake", "plan=from_scratch", "algo=sac", "policy.hidden=[32,32]", "critic.hidden=[32,32]", "batch_size=32",
    "utd=0.02", "~plan.phases.explore", f'plan.phases.evaluate.until=["episodes >= {EPISODES}"]', "log=false",
]  # fmt: skip
OPTIONS = {
    "--rounds": option(5, "pairs of runs (5)"),
    "--seconds": option(105.0, "that each run collects (105; with its evaluation about two minutes)"),
    "--attacker": option(Path(attacker.__file__), "a program that gets ADDRESS KEY TRUTHS (tests/faults/attacker.py)"),
}


@dataclass
class Run:
    """One run: `late` are the seconds of each acknowledgement, `peak` the most MB of each process of the learner,
    `starts` how often each of them was started, `turns` how many the attacker took, `wrong` what an independent reader
    counts otherwise than the summary."""

    late: np.ndarray
    peak: Mapping[str, float]
    starts: Mapping[str, int]
    turns: int
    report: checker.Report
    ended: bool
    wrong: list[str]

    def ms(self, share: float) -> float:
        """A quantile of the acknowledgements."""
        return float(np.quantile(self.late, share)) * 1e3


FATES: dict[str, Callable[[Run], int]] = {  # what there may be none of
    "restarts of the learner's processes": lambda run: sum(run.starts.values()) - len(run.starts),
    "steps and records lost": lambda run: run.report.lost,
    "steps and records doubled": lambda run: run.report.duplicated,
    "differences from what the actors noted": lambda run: len(run.report.violations),
    "plans that did not end": lambda run: not run.ended,
    "differences of a summary from an independent count": lambda run: len(run.wrong),
}


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    runs: dict[str, list[Run]] = defaultdict(list)

    def once(name: str, program: Path | None) -> float:
        runs[name].append(run := played(folder / f"{name}{len(runs[name])}", options.seconds, program))
        print(said(name, run), *run.report.violations[:10], *run.wrong, sep="\n    ", file=sys.stderr, flush=True)
        return run.ms(0.5)

    contenders = {"alone": partial(once, "alone", None), "beside": partial(once, "beside", options.attacker)}
    yield from figures(rounds(contenders, options.rounds), runs["alone"], runs["beside"])


def said(name: str, run: Run) -> str:
    """One run in a line, which comes as soon as it is over: it takes long."""
    late = ", ".join(f"{run.ms(share):.1f}" for share in (0.5, 0.99, 1.0))
    peak = {process: round(most) for process, most in run.peak.items()}
    return (
        f"{name}: {len(run.late)} acknowledgements, p50, p99 and longest {late} ms; {run.turns} turns of an attacker; "
        f"MB {peak}; starts {dict(run.starts)}; ended: {run.ended}"
    )


def figures(measured: Mapping[str, list[float]], alone: list[Run], beside: list[Run]) -> Iterator[Figure]:
    pairs = [b / a for a, b in zip(measured["alone"], measured["beside"], strict=True)]
    spread = f"alone ({median(measured['alone']):.3g} ms; {min(pairs):.3g} to {max(pairs):.3g})"
    half = ratio(measured, "beside", "alone")
    yield Figure("acknowledgement, p50", median(measured["beside"]), "ms", spread, half, "<= 1.5")
    yield Figure("acknowledgement, p99 of the worst run", max(run.ms(0.99) for run in beside), "ms", goal="<= 200")
    yield Figure("the same, alone", max(run.ms(0.99) for run in alone), "ms")
    for process in ("server", "inference"):
        more = [b.peak[process] - a.peak[process] for a, b in zip(alone, beside, strict=True)]
        yield Figure(f"peak memory of {process} beyond alone, worst pair", max(more), "MB", goal="<= 100")
    for fate, count in FATES.items():
        yield Figure(fate, sum(map(count, (*alone, *beside))), "", goal="<= 0")


# -- one run
def played(folder: Path, seconds: float, program: Path | None) -> Run:
    """Play a run to its end; with an attacker if there is a program."""
    names, keys, truths = [f"a{number}" for number in range(ACTORS)], folder / "keys", folder / "truths"
    attacks = folder / "attacks"
    truths.mkdir(parents=True)
    with locked(keys, True):
        for name in (*names, HERS):
            make(keys, name, "actor")
    with Programs(folder) as programs:
        address = f"tcp://127.0.0.1:{programs.ports[0]}"
        until = f'plan.phases.practise.until=["wall_s >= {seconds}"]'
        learner = programs.start("learner", *WORDS, until, f"keys={keys}")
        parts = [(address, name, number, folder, keys / f"{name}.key") for number, name in enumerate(names)]
        with Group(act, parts) as actors, open(attacks, "w") as told:
            actors.heard()  # each has played an episode
            began, end = time.monotonic(), time.monotonic() + seconds + ENDS_S
            words = [sys.executable, "-P", program, address, keys / f"{HERS}.key", truths]
            hers = processes.start([*map(str, words)], told, preexec_fn=pinned) if program else None
            peak, seen = defaultdict[str, float](float), defaultdict[str, set[int]](set)
            while learner.poll() is None and time.monotonic() < end:
                (keys / f"{HERS}.banned").unlink(missing_ok=True)
                watch(programs, peak, seen)
                if hers is not None and hers.poll() is not None:  # libzmq may abort a process that is cut as it closes
                    hers = processes.start([*map(str, words)], told, preexec_fn=pinned)
            if hers is not None:
                processes.kill(hers)
            ended = learner.poll() == 0 and not any(actors.heard())
    paths = sorted(truths.glob("*.jsonl"))
    report = checker.check(programs.run_dir / "store", paths, [folder / name for name in names], [], strangers=[HERS])
    late = np.concatenate([acknowledged(path, began) for path in paths])
    starts, turns = {process: len(found) for process, found in seen.items()}, len(attacks.read_text().splitlines())
    return Run(late, peak, starts, turns, report, ended, wrong_of(programs.run_dir))


def pinned() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def watch(programs: Programs, peak: dict[str, float], seen: dict[str, set[int]]) -> None:
    """Look at the memory of the learner's processes for a second."""
    there = programs.alive()
    for _ in range(10):
        for process, pid in there.items():
            with suppress(OSError, IndexError):  # it has just ended
                peak[process] = max(peak[process], memory(pid) / 1e6)
                seen[process].add(pid)
        time.sleep(0.1)


def wrong_of(run_dir: Path) -> list[str]:
    """What of the summary an independent reader counts otherwise."""
    wrong: list[str] = []
    try:
        Counted(run_dir, wrong).check({}, {})
    except FileNotFoundError as error:
        wrong.append(str(error))
    return wrong


def acknowledged(path: Path, began: float) -> np.ndarray:
    """Seconds of each acknowledgement of what an actor noted after `began`."""
    made, late = dict[int, float](), list[float]()
    for note in notes(path):
        if "seq" in note:
            made[note["seq"]] = note["t"]
        elif "acked" in note:
            mine = [seq for seq in made if seq < note["acked"][1]]
            late += [note["t"] - then for then in map(made.pop, mine) if then > began]
    return np.array(late)


# -- an honest actor
class Robot:
    """In the place of a RobotEnv: it takes 1/fps for each step, and succeeds in every third of its starts."""

    spec, task, clock, has_operator, is_home = SPEC, "stand", "real", False, True
    observed = 0.0

    def __init__(self, number: int) -> None:
        self._random = np.random.default_rng(number)
        self._row, self._seed, self._due = 0, 0, 0.0

    def home(self, seed: int) -> None: ...

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        self._row, self._seed, self._due = 0, seed, time.monotonic()
        return self._seen()

    def look(self) -> bool:
        return False

    def step(self, action: Any) -> Step:
        self._due = max(self._due, time.monotonic() - 1 / SPEC.fps) + 1 / SPEC.fps
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._row += 1
        ends = self._row == STEPS
        won = self._seed % 3 == 0
        executed = np.zeros(2, np.float32) if action is None else action
        return Step(self._seen(), float(ends and won), executed, False, ends, False, won if ends else None)

    def _seen(self) -> Observation:
        self.observed = time.monotonic()
        return {
            STATE: self._random.random(8, np.float32),
            "observation.images.eye": self._random.integers(0, 256, (64, 64, 3), np.uint8),
        }

    def stop(self) -> None: ...

    def recover(self) -> None: ...

    def close(self) -> None: ...


def act(pipe: Any, address: str, name: str, number: int, folder: Path, key: Path) -> None:
    """Follow the plan to its end. Says "" when the first records are acknowledged, and at the end why it ended."""
    truth = Truth(folder / "truths" / f"{name}.jsonl")
    with NotingClient(address, truth, 0, actor=name, spec=SPEC, outbox=folder / name, key=key) as client:
        policy = chunk_policy(
            client, chunks="async", deadline=deadline_of("auto", SPEC.fps, "real"), n_action_steps=4, clock="real"
        )
        told: list[str] = []

        def heard(_: Any) -> None:
            if not told:
                pipe.send(told.append("") or "")

        try:
            run_actor(Robot(number), policy, client, seed=0, on_episode=heard)
            truth.note(drained=client.drain(PATIENCE_S))
            pipe.send("")
        except TrainerError as error:
            truth.note(sent_away=str(error))
            pipe.send(str(error))
