"""Runs the product for a study, learner and actor on loopback, and reads what a finished run says."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from serl_launcher.store.index import Index

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, str(ROOT / "examples/train.py")]
RESULTS = ("metrics.jsonl", "summary.json", "evaluation.json")  # of a run: they say that it has ended


def ports() -> list[str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return [f"port={one.getsockname()[1]}", f"inference_port={two.getsockname()[1]}"]


def run(folder: Path, *words: str, task: str = "sim_arm", actor: Sequence[str] = (), example: str = "") -> None:
    """Run learner, with these words, and actor, with its own, on this run folder until the plan ends.

    example: the one to start instead, with the words for both sides, because its actor has a Python of its own.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    both = [f"run_dir={folder}", "log=false", *ports()]
    with open(folder.with_suffix(".log"), "a") as log:
        if example:
            command = [ROOT / "examples" / example / "start.sh", *both, *words]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
            return
        command = [*TRAIN, "actor=true", f"task={task}", *both, *actor]
        acting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            subprocess.run([*TRAIN, "learner=true", f"task={task}", *both, *words], stdout=log, stderr=log, check=True)
            acting.wait(60)
        finally:
            acting.kill()


@contextmanager
def serving(source: Path, folder: Path, *, task: str = "sim_arm") -> Iterator[str]:
    """Let a copy of a finished run answer as a policy server, as long as this lasts. Yields its address."""
    copied(source, folder)
    port = int(ports()[0].removeprefix("port="))
    words = [f"task={task}", f"run_dir={folder}", "log=false", *ports(), "plan=evaluate", f"bridge.port={port}"]
    with open(folder.with_suffix(".log"), "a") as log:
        learner = subprocess.Popen([*TRAIN, "learner=true", *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while learner.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.5)
            yield f"ws://127.0.0.1:{port}"
        finally:
            learner.terminate()
            learner.wait(60)


def finished(folder: Path, *words: str, of: Path | None = None, forgets: bool = False, **sides: Any) -> Path:
    """Return the run in this folder. If it has not ended, make it: anew from a copy of the run `of`, or as `run`."""
    if not (folder / "summary.json").exists():
        if of:
            copied(of, folder, forgets=forgets)
        run(folder, *words, **sides)
    return folder


def copied(source: Path, folder: Path, *, forgets: bool = False) -> Path:
    """Copy a run, from which another one goes on. forgets: with its data alone, for another algorithm."""
    shutil.rmtree(folder, ignore_errors=True)
    left = ("config.yaml", "checkpoints") if forgets else ()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("actors", *RESULTS, *left))
    return folder


def demonstrations(folder: Path, seed: int, count: int, *words: str, **sides: Any) -> Path:
    """Return the run that holds `count` demonstrations by the task's scripted operator."""
    until = f'plan.phases.demonstrate.until=["demo.episodes >= {count}"]'
    return finished(folder, "plan=collect", f"seed={seed}", until, *words, **sides)


# -- words of a plan
def phase(name: str, body: str) -> str:
    """Return the word that adds a phase to the plan."""
    return f"+plan.phases.{name}={{{body}}}"


def without(*names: str) -> list[str]:
    """Return the words that take phases out of the plan."""
    return [f"~plan.phases.{name}" for name in names]


def training(until: str, data: str, updates: str = "${updates}", more: str = "") -> str:
    """Return the body of a phase that trains while nobody acts."""
    acting = f"actors: {{mode: idle}}, updates: {updates}, data: {data}"
    return f"{acting}, until: ['{until}'], on_end: [checkpoint, publish]{more}"


def practice(
    until: str, data: str, updates: str = "${updates}", *, pace: str = "'${utd}'", intervene: bool | None = None,
    start: str = "", every: int = 50, more: str = "",
) -> str:  # fmt: skip
    """Return the body of a phase that trains while the robot practises.

    pace: updates for each step. intervene: whether the operator takes over. every: updates between two versions.
    """
    takes = "" if intervene is None else f", intervene: {str(intervene).lower()}"
    more += f", start_when: '{start}'" if start else ""
    return (
        f"actors: {{mode: collect, into: online{takes}}}, updates: {updates}, data: {data}, until: ['{until}'], "
        f"pace: {{updates_per_step: {pace}, tolerance: 64}}, publish: {{every_updates: {every}}}, "
        f"on_end: [checkpoint, publish]{more}"
    )


def within(every: int, starts: int) -> str:
    """Return what the body of a phase has more that also evaluates after each so many updates."""
    return f", evaluate: {{every_updates: {every}, until: ['episodes >= {starts}']}}"


def turns(bodies: Sequence[str], starts: int, name: str = "practise") -> list[str]:
    """Return the words of phases with these bodies, and of an evaluation behind each of them."""
    found = []
    for part, body in enumerate(bodies, 1):
        found += [phase(f"{name}_{part}", body), evaluation(starts, part)]
    return found


def evaluation(starts: int, part: int) -> str:
    return phase(f"evaluate_{part}", f"actors: {{mode: evaluate}}, until: ['episodes >= {starts}']")


# -- what a finished run says
def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def evaluations(folder: Path, starts: int) -> list[dict[str, Any]]:
    """Return what the run says of each evaluation, in order."""
    found = metrics(folder, "evaluation")
    assert all(line["distinct_starts"] == starts for line in found), f"{folder}: starts were repeated"
    return found


def successes(folder: Path, starts: int) -> list[int]:
    """Return how many of the evaluated episodes succeeded, for each evaluation in order."""
    return [line["successes"] for line in evaluations(folder, starts)]


def episodes(folder: Path, *sources: str) -> list[Any]:
    """Return the stored episodes of these sources."""
    with closing(Index(folder / "store/index.sqlite")) as index:
        return [episode for episode in index.latest(1_000_000) if episode.source in sources]


def draw(folder: Path, source: str = "demo") -> str:
    """Return the name of the first episode of a source. Cells of one draw share it: a seed alone does not fix them."""
    return min(episode.id for episode in episodes(folder, source))


def effort(folder: Path) -> dict[str, int]:
    """Return the steps of practice, and how many of them the operator drove."""
    practised = episodes(folder, "online")
    driven = sum(episode.intervened for episode in practised)
    return {"env_steps": sum(episode.steps for episode in practised), "driven_by_the_operator": driven}
