#!/usr/bin/env python
"""Breaks a learner and its actors in every way there is, and lets a checker that knows nothing of them say what was
lost: chaos.py --rounds 60 --seed 1; each round is drawn from (seed, its number) and is replayed by --round K --seed S.

The last line is JSON; the exit status is 1 when anything was lost, doubled, reordered or else wrong.
"""

import argparse
import heapq
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from multiprocessing.context import BaseContext
from pathlib import Path
from random import Random

from faults import checker, shim, trainer
from faults.nemeses import NEMESES, WITH_MOUNT, WITH_SHIM, Nemesis
from faults.stage import Setting, Stage
from serl_client.errors import ConfigError

BLOWS_S = 0.8  # in which they begin
BOUND_S = 20.0  # to begin, to go on after all is healed, to drain; more is taken for never
DISK = "160m"  # of the small tmpfs
MODULES = ["faults.actor", "faults.trainer", "faults.stage"]  # what the processes need; each is a fork of one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--round", type=int, help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NAME", help="a nemesis, or the beginning of the names of some")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="what a round with a violation left, or that of --round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        control, nemeses = _faults(Path(folder), options.only)
        if not nemeses:
            sys.exit(f"no nemesis that works here is called {options.only}")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # else the fork server of Python 3.11 finds no module
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(MODULES)
        total, rounds = checker.Report(), range(options.rounds) if options.round is None else [options.round]
        for number in rounds:
            report = play(context, Path(folder) / f"{number}", number, options.seed, control, nemeses)
            if options.keep and (report.violations or options.round is not None):
                shutil.copytree(Path(folder) / f"{number}", options.keep / f"{options.seed}-{number}", ignore=SOCKETS)
            shutil.rmtree(Path(folder) / f"{number}")
            for name, value in asdict(report).items():
                setattr(total, name, getattr(total, name) + value)
    print(json.dumps({"rounds": len(rounds), "seed": options.seed, **asdict(total)}))
    sys.exit(1 if total.violations else 0)


def _faults(folder: Path, only: str | None) -> tuple[shim.Control | None, dict[str, Nemesis]]:
    """What this machine allows; from now on processes begin with the shim."""
    control, nemeses = None, dict(NEMESES)
    try:
        library = shim.build(folder)
        control = shim.Control(folder / "control")
        os.environ.update(shim.environment(library, control))
        nemeses |= WITH_SHIM
    except ConfigError as error:
        print(f"without the shim: {error}")
    try:
        (folder / "probe").mkdir()
        with _mounted(folder / "probe"):
            nemeses |= WITH_MOUNT
    except OSError as error:
        print(f"without a small disk: {error}")
    return control, {name: nemesis for name, nemesis in nemeses.items() if name.startswith(only or "")}


@contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    """A small disk of its own in `folder`. Raises OSError where that is not allowed."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", folder]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def play(
    context: BaseContext, folder: Path, number: int, seed: int, control: shim.Control | None,
    nemeses: dict[str, Nemesis], keep: Path | None,
) -> checker.Report:  # fmt: skip
    """One round: begin, strike, heal, go on, drain, check."""
    random, began = Random(f"{seed}/{number}"), time.monotonic()
    names = random.choices(sorted(nemeses), k=random.choice([1, 1, 2, 3]))
    setting = _setting(random, "twin" not in names)
    (folder / "disk").mkdir(parents=True)
    with _mounted(folder / "disk") if "full-disk" in names else nullcontext():
        report, line = _played(
            context, folder, seed, setting, control, [(name, nemeses[name]) for name in names], random
        )
        print(
            f"round {number}: {_words(setting)}; {', '.join(names)}; {line}, {time.monotonic() - began:.1f} s",
            flush=True,
        )
        for violation in report.violations:
            print(f"    {violation}", flush=True)
        if report.violations and keep:
            shutil.copytree(
                folder, keep / f"{seed}-{number}", dirs_exist_ok=True, ignore=shutil.ignore_patterns("learner")
            )
    shutil.rmtree(folder)
    return report


def _played(
    context: BaseContext, folder: Path, seed: int, setting: Setting, control: shim.Control | None,
    blows: Sequence[tuple[str, Nemesis]], random: Random,
) -> tuple[checker.Report, str]:  # fmt: skip
    with Stage(context, folder, seed, setting, control) as stage:
        if setting.archives:
            stage.asleep.touch()
        stage.resumed(0.0, BOUND_S)
        _strike(stage, blows, random)
        stage.heal()
        resumed = stage.resumed(time.monotonic(), BOUND_S)
        stage.end(BOUND_S)
        longest = max(actor.longest_ms for actor in stage.actors)
    archived = [trainer.SOURCE] if setting.archives else []
    report = checker.check(
        stage.disk / "run/store", sorted(stage.truths.iterdir()), [actor.outbox for actor in stage.actors], archived
    )
    report.violations[:0] = stage.violations
    line = (
        f"{report.produced} produced, {report.acked} acked, resumed in {resumed:.1f} s, longest push {longest:.1f} ms"
    )
    return report, line


def _strike(stage: Stage, blows: Sequence[tuple[str, Nemesis]], random: Random) -> None:
    """Each of the nemeses begins at a moment of its own, and they may overlap."""
    begun = time.monotonic()
    due = [
        (begun + random.uniform(0.0, BLOWS_S), turn, nemesis(stage, random)) for turn, (_, nemesis) in enumerate(blows)
    ]
    heapq.heapify(due)
    while due:
        at, turn, nemesis = heapq.heappop(due)
        stage.until(lambda at=at: time.monotonic() >= at, BOUND_S)
        if (pause := next(nemesis, None)) is not None:
            heapq.heappush(due, (time.monotonic() + pause, turn, nemesis))


def _setting(random: Random, may_archive: bool) -> Setting:
    """Not with a twin: whom it sends away leaves an episode open, and that holds up a full source that is archived."""
    return Setting(
        actors=random.choice([1, 2, 3]), capacity=random.choice([200, 4000]),
        archives=random.random() < 0.3 and may_archive,
        weights_bytes=random.choice([0, 0, 200_000, 5_000_000]), skew=random.choice([0.0, 3600.0]),
        paced=random.random() < 0.3,
    )  # fmt: skip


def _words(setting: Setting) -> str:
    said = [f"{setting.actors} actors", f"{setting.capacity} steps"]
    said += [word for word, holds in (("archive", setting.archives), ("weights", setting.weights_bytes),
                                      ("skew", setting.skew), ("paced", setting.paced)) if holds]  # fmt: skip
    return ", ".join(said)


if __name__ == "__main__":
    main()
