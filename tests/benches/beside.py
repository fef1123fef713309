"""What one valid key costs the others: ten actors at 30 Hz alone, and beside an attacker with another actor's key; or,
with --browsers, beside a crowd at the run's page (tests/faults/browsers.py), whose process is stopped and killed too.
The control is a process that only computes, in the neighbour's place, on its core and with its priority: what the
neighbour would cost on as few cores if it never spoke to the run.

Each run is a learner with keys, as a person starts it, whose plan collects, trains a little, evaluates and ends. The
actors are processes with the product's own loop and an image of 64x64; they ask the inference process at each step. The
attacker is a process on one core, the last one, that tries everything by turns (tests/faults/attacker.py). A ban of its
key is lifted at once. Runs alone and beside it alternate. The time of an acknowledgement is from the push until the
outbox hears of it; a step is late by what its row comes after its time. The store is compared with what the actors
noted, and summary.json with an independent count of it.
"""

import argparse
import itertools
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from serl_launcher.page.door import Tokens
from tests.faults import attacker, browsers, checker
from tests.faults.actor import NotingClient
from tests.faults.attacker import SPEC
from tests.faults.counted import Counted
from tests.faults.fuzzing.hostile import memory
from tests.faults.truth import Truth, notes
from tests.shared.common import STATE, free_port
from tests.shared.programs import Programs
from tools import processes
from tools.keys import locked, make

from .paired import Figure, option, ratio, rounds
from .served import PATIENCE_S, Group

EPISODES, STEPS = 50, 60  # of the evaluation, and of an episode
HERS = "eve"  # the attacker's key
ENDS_S = 120.0  # that a plan may take beyond what it collects
WORDS = [
    "task=fake", "plan=from_scratch", "algo=sac", "policy.hidden=[32,32]", "critic.hidden=[32,32]", "batch_size=32",
    "utd=0.02", "~plan.phases.explore", f'plan.phases.evaluate.until=["episodes >= {EPISODES}"]', "log=false",
]  # fmt: skip
OPTIONS = {
    "--rounds": option(5, "pairs of runs (5)"),
    "--seconds": option(105.0, "that each run collects (105; with its evaluation about two minutes)"),
    "--actors": option(10, "how many (10)"),
    "--browsers": option(False, "browsers at the page in place of an attacker; else no page runs"),
    "--attacker": option(Path(attacker.__file__), "a program that gets ADDRESS KEY TRUTHS (tests/faults/attacker.py)"),
}


@dataclass
class Run:
    """One run: `late` are the seconds of each acknowledgement, and by which each step was late; `peak` the most MB of
    each process of the learner but the page's, `starts` how often each of them was started, `turns` how many lines the
    neighbour wrote, `wrong` what an independent reader counts otherwise than the summary."""

    late: Mapping[str, np.ndarray]
    peak: Mapping[str, float]
    starts: Mapping[str, int]
    turns: int
    report: checker.Report
    ended: bool
    wrong: list[str]

    def ms(self, share: float, what: str = "acknowledgement") -> float:
        """A quantile."""
        return float(np.quantile(self.late[what], share)) * 1e3


FATES: dict[str, Callable[[Run], int]] = {  # what there may be none of
    "restarts of the learner's processes": lambda run: sum(run.starts.values()) - len(run.starts),
    "steps and records lost": lambda run: run.report.lost,
    "steps and records doubled": lambda run: run.report.duplicated,
    "differences from what the actors noted": lambda run: len(run.report.violations),
    "plans that did not end": lambda run: not run.ended,
    "differences of a summary from an independent count": lambda run: len(run.wrong),
}
COMPUTES = "a process that computes"
TURNS = "turns of the neighbour, fewest"  # beside one that did nothing nothing is measured


def measure(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    runs: dict[str, list[Run]] = defaultdict(list)

    program = Path(browsers.__file__) if options.browsers else options.attacker

    def once(name: str, *neighbour: Path, speaks: bool = False) -> float:
        at = folder / f"{name}{len(runs[name])}"
        runs[name].append(run := played(at, options.actors, options.seconds, neighbour, speaks))
        print(said(name, run), *run.report.violations[:10], *run.wrong, sep="\n    ", file=sys.stderr, flush=True)
        return run.ms(0.5)

    contenders = {
        "alone": partial(once, "alone"), COMPUTES: partial(once, COMPUTES, program),
        "beside": partial(once, "beside", program, speaks=True),
    }  # fmt: skip
    rounds(contenders, options.rounds)
    yield from figures(runs)


def said(name: str, run: Run) -> str:
    """One run in a line, which comes as soon as it is over: it takes long."""
    late = {what: ", ".join(f"{run.ms(q, what):.1f}" for q in (0.5, 0.99, 1.0)) for what in run.late}
    peak = {process: round(most) for process, most in run.peak.items()}
    return (
        f"{name}: {late}; {run.turns} turns of its neighbour; MB {peak}; starts {dict(run.starts)}; ended: {run.ended}"
    )


def figures(runs: Mapping[str, list[Run]]) -> Iterator[Figure]:
    alone, beside = runs["alone"], runs["beside"]
    yield compared("acknowledgement", 0.5, runs, "alone", "<= 1.5")
    yield Figure("acknowledgement, p99 of the worst run", max(run.ms(0.99) for run in beside), "ms", goal="<= 200")
    yield Figure("the same, alone", max(run.ms(0.99) for run in alone), "ms")
    for against in (name for name in runs if name != "beside"):
        yield compared("acknowledgement", 0.99, runs, against)
        yield compared("step", 0.99, runs, against)
    for process in ("server", "inference"):
        more = [b.peak[process] - a.peak[process] for a, b in zip(alone, beside, strict=True)]
        yield Figure(f"peak memory of {process} beyond alone, worst pair", max(more), "MB", goal="<= 100")
    yield Figure(TURNS, min(run.turns for run in beside), "", goal=">= 1")
    for fate, count in FATES.items():
        yield Figure(fate, sum(count(run) for each in runs.values() for run in each), "", goal="<= 0")


def compared(what: str, share: float, runs: Mapping[str, list[Run]], against: str, goal: str = "") -> Figure:
    """A quantile of each run, its median, and the pairs' ratios: their median and spread."""
    measured = {name: [run.ms(share, what) for run in runs[name]] for name in (against, "beside")}
    pairs = [b / a for a, b in zip(measured[against], measured["beside"], strict=True)]
    spread = f"{against} ({median(measured[against]):.3g} ms; {min(pairs):.3g} to {max(pairs):.3g})"
    name = f"{what}, p{share * 100:g}"
    return Figure(name, median(measured["beside"]), "ms", spread, ratio(measured, "beside", against), goal)


# -- one run
def played(folder: Path, count: int, seconds: float, neighbour: Sequence[Path], speaks: bool) -> Run:
    """Play a run of `count` actors to its end. neighbour: the program, if any. speaks: to the run, or only computes."""
    names, keys, truths = [f"a{number}" for number in range(count)], folder / "keys", folder / "truths"
    attacks = folder / "attacks"
    truths.mkdir(parents=True)
    with locked(keys, True):
        for name in (*names, HERS):
            make(keys, name, "actor")
    with Programs(folder) as programs:
        address = f"tcp://127.0.0.1:{programs.ports[0]}"
        words = [*WORDS, f'plan.phases.practise.until=["wall_s >= {seconds}"]', f"keys={keys}"]
        given: list[Any] = [address, keys / f"{HERS}.key", truths] if speaks else []
        if is_page := speaks and Path(browsers.__file__) in neighbour:
            programs.run_dir.mkdir()
            given = [free_port(), Tokens(programs.run_dir / "page.tokens").make("operator")]
            words += [f"page={given[0]}"]
        learner = programs.start("learner", *words)
        parts = [(address, name, number, folder, keys / f"{name}.key") for number, name in enumerate(names)]
        with Group(act, parts) as actors, open(attacks, "w") as told:
            actors.heard()  # each has played an episode
            began, end = time.monotonic(), time.monotonic() + seconds + ENDS_S
            command = [sys.executable, "-P", *map(str, (*neighbour, *given))]
            hers = processes.start(command, told, preexec_fn=pinned) if neighbour else None
            peak, seen = defaultdict[str, float](float), defaultdict[str, set[int]](set)
            for turn in itertools.count():
                if learner.poll() is not None or time.monotonic() > end:
                    break
                (keys / f"{HERS}.banned").unlink(missing_ok=True)
                if is_page:
                    annoy(programs, turn)
                watch(programs, peak, seen)
                if hers is not None and hers.poll() is not None:  # libzmq may abort a process that is cut as it closes
                    hers = processes.start(command, told, preexec_fn=pinned)
            if hers is not None:
                processes.kill(hers)
            ended = learner.poll() == 0 and not any(actors.heard())
    paths = sorted(truths.glob("*.jsonl"))
    report = checker.check(programs.run_dir / "store", paths, [folder / name for name in names], [], strangers=[HERS])
    late = {
        "acknowledgement": np.concatenate([acknowledged(path, began) for path in paths]),
        "step": np.concatenate([np.load(folder / f"{name}.npy") for name in names]),
    }
    starts, turns = {process: len(found) for process, found in seen.items()}, len(attacks.read_text().splitlines())
    return Run(late, peak, starts, turns, report, ended, wrong_of(programs.run_dir))


def annoy(programs: Programs, second: int) -> None:
    """Stop the page's process for two of each ten seconds, and kill it in each thirtieth."""
    turns = {4: signal.SIGSTOP, 6: signal.SIGCONT, 9: signal.SIGKILL if second // 10 % 3 == 2 else 0}
    with suppress(ProcessLookupError, KeyError):  # it is not there at present
        os.kill(programs.alive()["page"], turns.get(second % 10, 0))


def pinned() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def watch(programs: Programs, peak: dict[str, float], seen: dict[str, set[int]]) -> None:
    """Look at the memory of the learner's processes for a second."""
    there = {name: pid for name, pid in programs.alive().items() if name != "page"}
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
        self.late: list[float] = []  # seconds by which each step's end was

    def home(self, seed: int) -> None: ...

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        self._row, self._seed, self._due = 0, seed, time.monotonic()
        return self._seen()

    def look(self) -> bool:
        return False

    def step(self, action: Any) -> Step:
        self._due = max(self._due, time.monotonic() - 1 / SPEC.fps) + 1 / SPEC.fps
        time.sleep(max(0.0, self._due - time.monotonic()))
        self.late.append(time.monotonic() - self._due)
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
            run_actor(robot := Robot(number), policy, client, seed=0, on_episode=heard)
            np.save(folder / f"{name}.npy", robot.late)
            truth.note(drained=client.drain(PATIENCE_S))
            pipe.send("")
        except TrainerError as error:
            truth.note(sent_away=str(error))
            pipe.send(str(error))
