"""Rounds of chaos: each is drawn from a seed and its number, is struck, heals, goes on, drains and is checked."""

import heapq
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random

from serl_client.errors import ConfigError

from . import checker, shim
from .nemeses import NEMESES, ON_ARMS, ON_DISK, ON_FILES, WITH_MOUNT, WITH_SHIM
from .stage import Setting, Stage, context

BLOWS_S = 0.8  # in which they begin
DISK = "160m"  # of the small tmpfs


class Chaos:
    """Plays rounds in a folder, with what this machine allows."""

    def __init__(self, folder: Path, seed: int, only: str) -> None:
        self._folder, self._seed, self._control, self.absent = folder, seed, None, list[str]()
        nemeses = dict(NEMESES)
        try:
            library = shim.build(folder)
            self._control = shim.Control(folder / "control")
            os.environ.update(shim.environment(library, self._control))
            nemeses |= WITH_SHIM
        except ConfigError as error:
            self.absent.append(f"without fail-points: {error}")
        try:
            with _small_disk(folder / "probe"):
                nemeses |= WITH_MOUNT
        except OSError as error:
            self.absent.append(f"without a full disk: {error}")
        self._nemeses = {name: nemesis for name, nemesis in sorted(nemeses.items()) if name.startswith(only)}
        if not self._nemeses:
            raise ConfigError(f"no nemesis begins with {only}; there are {', '.join(sorted(nemeses))}")
        self._context = context()

    def play(self, number: int, keep: Path | None, always: bool) -> tuple[checker.Report, str]:
        """One round: begin, strike, heal, go on, drain, check; what was found, and a line that says what was done."""
        random, folder, began = Random(f"{self._seed}/{number}"), self._folder / str(number), time.monotonic()
        names = random.choices(list(self._nemeses), k=random.choice([1, 1, 2, 3]))
        if ON_FILES & set(names):
            names = [name for name in names if name in NEMESES]
        if ON_ARMS & set(names):
            names = [name for name in names if name != "insider"]
        setting = _setting(random, names)
        with _small_disk(folder / "disk") if WITH_MOUNT.keys() & set(names) else nullcontext():
            report, line = self._played(folder, setting, names)
            took = time.monotonic() - began
            if keep and (report.violations or always):
                ignored = shutil.ignore_patterns("learner", "ballast", "keys")
                shutil.copytree(folder, keep / f"{self._seed}-{number}", ignore=ignored, dirs_exist_ok=True)
        shutil.rmtree(folder)
        return report, f"round {number}: {_words(setting)}; {', '.join(names)}; {line}, {took:.1f} s"

    def _played(self, folder: Path, setting: Setting, names: list[str]) -> tuple[checker.Report, str]:
        with Stage(self._context, folder, self._seed, setting, self._control) as stage:
            if not setting.early:
                stage.resumed(0.0)
            if setting.archives:
                stage.asleep.touch()
            self._strike(stage, names, f"{self._seed}/{folder.name}")
            stage.heal()
            resumed = stage.resumed(time.monotonic())
            stage.end()
        report = stage.check()
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
            stage.until(lambda at=at: time.monotonic() >= at)
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
        skew=random.choice([0.0, 3600.0]), paced=random.random() < 0.3 and not ON_ARMS & set(names),
        early=random.random() < 0.2 and not (ON_DISK | ON_FILES | ON_ARMS | {"insider"}) & set(names),
        keys=random.random() < 0.25, driven=bool(ON_ARMS & set(names)),
    )  # fmt: skip


def _words(setting: Setting) -> str:
    said = ("archives", "weights_bytes", "skew", "paced", "early", "keys", "driven")
    marks = [name for name in said if getattr(setting, name)]
    return ", ".join([f"{setting.actors} actors", f"{setting.capacity} steps", *marks])
