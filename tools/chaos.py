#!/usr/bin/env python
"""Breaks a learner and its actors in every way there is, and lets a checker that knows nothing of them say what was
lost: chaos.py --rounds 60 --seed 1. A round is drawn from the seed and its number: --round 12 --seed 1 plays it anew.
With --quickstart it is the whole quickstart that is played, in the processes and with the settings that a user has, of
which one at random, or all, are killed -9 after each recovery; its summary is compared with a count of our own.

The last line is JSON; the exit status is 1 when anything was lost, doubled, reordered or else wrong.
"""

import argparse
import heapq
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from random import Random

from serl_client.errors import ConfigError

from tests.faults import checker, shim, trainer
from tests.faults.nemeses import NEMESES, ON_DISK, ON_FILES, WITH_MOUNT, WITH_SHIM
from tests.faults.stage import Setting, Stage
from tests.faults.whole import Whole

BLOWS_S = 0.8  # in which they begin
BOUND_S = 20.0  # to begin, to go on after all is healed, to drain; what takes longer is taken for hanging
DISK = "160m"  # of the small tmpfs
MODULES = [f"tests.faults.{name}" for name in ("actor", "trainer", "stage")]  # each process is a fork of one with these


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--round", type=int, metavar="K", help="this one alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NAME", default="", help="the nemeses whose names begin so")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="gets what a bad round left, and that of --round")
    parser.add_argument("--quickstart", action="store_true", help="a whole run, whose processes are killed")
    parser.add_argument("--gap", type=float, nargs=2, default=(5.0, 15.0), metavar="S",
                        help="from a recovery of the quickstart to the next kill (5 15)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=30.0, help="that the quickstart may take (30)")
    parser.add_argument("words", nargs="*", metavar="name=value", help="settings of the quickstart, for both sides")
    options = parser.parse_args()
    logging.getLogger("serl_client").setLevel(logging.ERROR)  # of the peers in this process, which are kept out
    if options.quickstart:
        with tempfile.TemporaryDirectory(prefix="chaos") as folder:
            sys.exit(_quickstart(Path(folder), options))
    total, rounds = checker.Report(), range(options.rounds) if options.round is None else [options.round]
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        chaos = Chaos(Path(folder), options.seed, options.only)
        for number in rounds:
            report = chaos.play(number, options.keep, always=options.round is not None)
            for name, value in asdict(report).items():
                setattr(total, name, getattr(total, name) + value)
    print(json.dumps({"rounds": len(rounds), "seed": options.seed, **asdict(total)}))
    sys.exit(1 if total.violations else 0)


def _quickstart(folder: Path, options: argparse.Namespace) -> int:
    run = Whole(folder, options.seed, options.gap, options.words)
    found = run.play(options.minutes * 60)
    took = [round(seconds, 1) for seconds in sorted(run.took_s)]
    print(*(f"    {violation}\n" for violation in run.violations), sep="", end="")
    if options.keep and run.violations:
        shutil.copytree(folder, options.keep / f"quickstart-{options.seed}", dirs_exist_ok=True)
    print(json.dumps({
        "seed": options.seed, "kills": run.kills, "start_s": round(run.start_s, 1), "took_s": took,
        "median_s": took and statistics.median(took), "summary": found and found.summary, "violations": run.violations,
    }))  # fmt: skip
    return bool(run.violations)


class Chaos:
    """Plays rounds in a folder, with what this machine allows."""

    def __init__(self, folder: Path, seed: int, only: str) -> None:
        self._folder, self._seed, self._control = folder, seed, None
        nemeses = dict(NEMESES)
        try:
            library = shim.build(folder)
            self._control = shim.Control(folder / "control")
            os.environ.update(shim.environment(library, self._control))
            nemeses |= WITH_SHIM
        except ConfigError as error:
            print(f"without fail-points: {error}")
        try:
            with _small_disk(folder / "probe"):
                nemeses |= WITH_MOUNT
        except OSError as error:
            print(f"without a full disk: {error}")
        self._nemeses = {name: nemesis for name, nemesis in sorted(nemeses.items()) if name.startswith(only)}
        if not self._nemeses:
            sys.exit(f"no nemesis begins with {only}; there are {', '.join(sorted(nemeses))}")
        os.environ["PYTHONSAFEPATH"] = "1"  # else the fork server takes modules from where this was started
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(MODULES)

    def play(self, number: int, keep: Path | None, always: bool) -> checker.Report:
        """One round: begin, strike, heal, go on, drain, check."""
        random, folder, began = Random(f"{self._seed}/{number}"), self._folder / str(number), time.monotonic()
        names = random.choices(list(self._nemeses), k=random.choice([1, 1, 2, 3]))
        if ON_FILES & set(names):
            names = [name for name in names if name in NEMESES]
        setting = _setting(random, names)
        with _small_disk(folder / "disk") if WITH_MOUNT.keys() & set(names) else nullcontext():
            report, line = self._played(folder, setting, names)
            took = time.monotonic() - began
            print(f"round {number}: {_words(setting)}; {', '.join(names)}; {line}, {took:.1f} s")
            print(*(f"    {violation}\n" for violation in report.violations), sep="", end="", flush=True)
            if keep and (report.violations or always):
                ignored = shutil.ignore_patterns("learner", "ballast", "keys")
                shutil.copytree(folder, keep / f"{self._seed}-{number}", ignore=ignored, dirs_exist_ok=True)
        shutil.rmtree(folder)
        return report

    def _played(self, folder: Path, setting: Setting, names: list[str]) -> tuple[checker.Report, str]:
        with Stage(self._context, folder, self._seed, setting, self._control) as stage:
            if not setting.early:
                stage.resumed(0.0, BOUND_S)
            if setting.archives:
                stage.asleep.touch()
            self._strike(stage, names, f"{self._seed}/{folder.name}")
            stage.heal()
            resumed = stage.resumed(time.monotonic(), BOUND_S)
            stage.end(BOUND_S)
        archived = [trainer.SOURCE] if setting.archives else []
        outboxes = [actor.outbox for actor in stage.actors]
        report = checker.check(stage.disk / "run/store", sorted(stage.truths.iterdir()), outboxes, archived)
        report.violations[:0] = stage.violations
        return report, (
            f"{report.produced} produced, {report.acked} acked, resumed in {resumed:.1f} s, "
            f"longest push {max(actor.end.get('longest_ms', 0.0) for actor in stage.actors):.1f} ms"
        )

    def _strike(self, stage: Stage, names: list[str], seed: str) -> None:
        """Each of the nemeses begins at a moment of its own, and they may overlap."""
        due = []
        for turn, name in enumerate(names):
            random = Random(f"{seed}/{turn}")
            begins = time.monotonic() + random.uniform(0.0, BLOWS_S)
            heapq.heappush(due, (begins, turn, self._nemeses[name](stage, random)))
        while due:
            at, turn, nemesis = heapq.heappop(due)
            stage.until(lambda at=at: time.monotonic() >= at, BOUND_S)
            if (pause := next(nemesis, None)) is not None:
                heapq.heappush(due, (time.monotonic() + pause, turn, nemesis))


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """A tmpfs in `folder`. Raises OSError where that is not allowed."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", folder]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _setting(random: Random, names: list[str]) -> Setting:
    """Some do not go together: whom a twin sends away leaves an episode open, as an insider does, which holds up a full
    source that is archived; and a store that cannot be made at all is the end of a run."""
    return Setting(
        actors=random.choice([1, 2, 3]), capacity=random.choice([300, 4000]),
        archives=random.random() < 0.3 and not {"twin", "insider"} & set(names),
        weights_bytes=random.choice([0, 0, 200_000, 5_000_000]),
        skew=random.choice([0.0, 3600.0]), paced=random.random() < 0.3,
        early=random.random() < 0.2 and not (ON_DISK | ON_FILES | {"insider"}) & set(names),
        keys=random.random() < 0.25,
    )  # fmt: skip


def _words(setting: Setting) -> str:
    marks = [name for name in ("archives", "weights_bytes", "skew", "paced", "early", "keys") if getattr(setting, name)]
    return ", ".join([f"{setting.actors} actors", f"{setting.capacity} steps", *marks])


if __name__ == "__main__":
    main()
