"""Gives a study its runs and keeps its results: learner and actor of the product on loopback, and a file of cells."""

import json
import math
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from serl_launcher.store.index import Index

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, str(ROOT / "examples/train.py")]
EVALUATED = 50  # episodes of an evaluation
EVALUATE = f"actors: {{mode: evaluate}}, until: ['episodes >= {EVALUATED}']"
RESULTS = ("metrics.jsonl", "summary.json", "evaluation.json")  # of a run: they say that it has ended
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, two-sided 95 %, 1 to 9 degrees

Cell = dict[str, Any]


class Cells:
    """The finished cells of a study in a file, one JSON object in each line. The same command goes on with the rest."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.all: list[Cell] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def get(self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Cell:
        """Return the cell of this key. If it is missing, measure it, and write it with its commit first."""
        for cell in self.all:
            if key.items() <= cell.items():
                return cell
        cell = {**key, "commit": commit(), **measure()}
        self.all.append(cell)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a") as file:
            file.write(json.dumps(cell) + "\n")
        print(json.dumps(cell), flush=True)
        return cell


def commit() -> str:
    """Return the short name of the commit at hand; it says so where files of it were changed."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", ":!docs/studies")  # there it writes itself
    return git("rev-parse", "--short", "HEAD") + " and changes" * bool(changed)


def phase(name: str, body: str) -> str:
    """Return the word that adds a phase to the plan."""
    return f"+plan.phases.{name}={{{body}}}"


def ports() -> list[str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return [f"port={one.getsockname()[1]}", f"inference_port={two.getsockname()[1]}"]


def run(folder: Path, *words: str, task: str = "sim_arm", actor: Sequence[str] = ()) -> None:
    """Run learner, with these words, and actor, with its own, on this run folder until the plan ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    common = [f"task={task}", f"run_dir={folder}", "log=false", *ports()]
    with open(folder.with_suffix(".log"), "a") as log:
        command = [*TRAIN, "actor=true", *common, *actor]
        acting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            learner = [*TRAIN, "learner=true", *common, *words]
            subprocess.run(learner, stdout=log, stderr=log, check=True)
            acting.wait(60)
        finally:
            acting.kill()


def example(name: str, folder: Path, *words: str) -> None:
    """Run both sides of an example whose actor has a Python of its own, as a user does: until its plan ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [ROOT / "examples" / name / "start.sh", f"run_dir={folder}", "log=false", *ports(), *words]
    with open(folder.with_suffix(".log"), "a") as log:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)


def demonstrations(
    folder: Path, seed: int, count: int, *words: str, task: str = "sim_arm", actor: Sequence[str] = ()
) -> Path:
    """Return the run that holds `count` demonstrations by the task's scripted operator. actor: words of its own."""
    if not (folder / "summary.json").exists():
        until = f'plan.phases.demonstrate.until=["demo.episodes >= {count}"]'
        run(folder, "plan=collect", f"seed={seed}", until, *words, task=task, actor=actor)
    return folder


def draw(folder: Path, source: str = "demo") -> str:
    """Return the name of the first episode of a source. Cells of one draw share it: a seed alone does not fix them."""
    with closing(Index(folder / "store/index.sqlite")) as index:
        return min(episode.id for episode in index.latest(1_000_000) if episode.source == source)


def effort(folder: Path) -> dict[str, int]:
    """Return the steps of practice, and how many of them the operator drove."""
    with closing(Index(folder / "store/index.sqlite")) as index:
        episodes = [episode for episode in index.latest(1_000_000) if episode.source == "online"]
    driven = sum(episode.intervened for episode in episodes)
    return {"env_steps": sum(episode.steps for episode in episodes), "driven_by_the_operator": driven}


def one_draw(cells: Sequence[Cell]) -> None:
    """Raise ValueError if cells of one seed began with different data."""
    for seed in {cell["seed"] for cell in cells}:
        draws = {cell["way"]: cell["draw"] for cell in cells if cell["seed"] == seed}
        if len(set(draws.values())) > 1:
            raise ValueError(
                f"cells of seed {seed} began with different data, so they cannot be compared: {draws}. Keep those of "
                "one draw, and measure the others again with the --out that holds it, or all of them with new --results"
            )


def copied(source: Path, folder: Path) -> Path:
    """Copy a run, from which another one goes on."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("actors", *RESULTS))
    return folder


def successes(folder: Path) -> list[int]:
    """Return how many of the evaluated episodes succeeded, for each evaluation in order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert all(line["distinct_starts"] == EVALUATED for line in evaluations), f"{folder}: starts were repeated"
    return [line["successes"] for line in evaluations]


def mean_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, and its 95 % interval by Student's t: each value is one draw. NaN for fewer than two draws."""
    center = statistics.fmean(values)
    if len(values) < 2:
        return center, math.nan, math.nan
    half = T_95[min(len(values) - 1, len(T_95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return center, center - half, center + half


def said(values: Sequence[float], unit: str = "%") -> str:
    """Say a mean of shares and its interval, as in `73 % (60 to 86)`."""
    center, low, high = (100 * value for value in mean_of(values))
    if unit == "%":
        low, high = max(low, 0.0), min(high, 100.0)
    return f"{center:.0f} {unit}" + (f" ({low:.0f} to {high:.0f})" if len(values) > 1 else "")
