"""Does TD-MPC2 learn on an arm at its own pace, with a person who takes over? By seed, with a control.

sim_arm on the real clock, 10 steps a second. A script demonstrates --demonstrations times, algo=tdmpc2_tiny learns from
these rows alone for --offline updates, and practises for --steps steps with one update for each, while the script takes
over where the policy is stuck. Reward is 1 where the block is up; each metre that is left costs 1.
    offline       the dataset alone has taught this, before practice
    practised     after practice
    more updates  the control: as many updates, on the demonstrations alone, and nobody practises
Each acts on --starts distinct starts, with planning and without help, on the simulated clock. act: the time from an
actor's question to its answer at the server of actions, while the robot practised, beside the deadline, after which the
arm holds still.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tools.compare import trials
from tools.studies.runs import ROOT, Cell, Cells, copied, demonstrations, effort, phase, run, said

FPS = 10
DEADLINE_MS = 500 / FPS  # half of a step
TASK = ["task.env.cost=1.0"]
REAL = ["task.env.clock=real"]
ALGORITHM = [  # a discount for episodes of at most 60 steps, and a search that takes a third of the yaml's time
    "algo=tdmpc2_tiny", "algo.discount=0.95", "algo.mppi.samples=64", "algo.mppi.iterations=3", "algo.mppi.elites=12",
]  # fmt: skip
WAYS = {"offline": "offline", "practised": "practised", "more_updates": "more updates"}
PRACTISED = "practised"  # the phase, and its folder
EVERY = 5.0  # seconds between two questions for the status
BEFORE = ("demonstrate", "offline", "baseline", "practise", "evaluate")  # phases of the plan, which these replace


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--demonstrations", type=int, default=20, help="episodes by the script (20)")
    parser.add_argument("--offline", type=int, default=500, help="updates on them (500)")
    parser.add_argument("--steps", type=int, default=1500, help="of practice (1500)")
    parser.add_argument("--starts", type=int, default=30, help="of each evaluation (30)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        key = {name: vars(options)[name] for name in ("demonstrations", "steps", "starts", "words")}
        key |= {"offline_updates": options.offline}
        found.append(cells.get({**key, "seed": seed}, partial(learned, seed, options)))
    yield from table(found)


def learned(seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return what practice and its control reach, and how long answers took meanwhile."""
    folder: Path = options.out / f"seed-{seed}"
    words = ["plan=offline_to_online", *(f"~plan.phases.{name}" for name in BEFORE)]
    common = [*ALGORITHM, f"seed={seed}", *options.words]
    seconds = folder / "practised.json"

    def trained(source: Path, name: str, body: str, actor: Sequence[str] = ()) -> Path:
        if not (folder / name / "summary.json").exists():
            run(copied(source, folder / name), *words, *common, phase(name, body), actor=[*TASK, *actor])
        return folder / name

    def evaluated(source: Path) -> int:
        target = copied(source, folder / f"{source.name}-evaluated")
        many = [f"eval_episodes={options.starts}", f"eval_steps={options.starts * 1000}"]
        run(target, "plan=evaluate", *common, *many, actor=TASK)
        tried = trials(target)
        assert len(tried) == options.starts, f"{target}: starts were repeated"
        return sum(bool(trial.success) for trial in tried.values())

    begun = demonstrations(folder / "demonstrations", seed, options.demonstrations, *ALGORITHM, actor=TASK)
    end = "on_end: [checkpoint, publish]"
    teach = f"actors: {{mode: idle}}, updates: ${{updates}}, data: {{demo: 1.0}}, {end}"
    fit = "on_begin: [{fit_normalizer: demo}]"
    offline = trained(begun, "offline", f"{teach}, {fit}, until: ['updates >= {options.offline}']")
    practise = (
        "actors: {mode: collect, into: online, intervene: true}, updates: ${updates}, data: {online: 0.5, demo: 0.5}, "
        "start_when: 'online.episodes >= 2', pace: {updates_per_step: 1.0, tolerance: 64}, "
        f"publish: {{every_updates: 20}}, until: ['env_steps >= {options.steps}'], {end}"
    )
    with watched(folder / PRACTISED, seconds):
        practised = trained(offline, PRACTISED, practise, REAL)
    updates = int(json.loads((practised / "summary.json").read_text())["updates"])
    more = trained(offline, "more", f"{teach}, until: ['updates >= {updates - options.offline}']")
    found = dict(zip(WAYS, map(evaluated, (offline, practised, more)), strict=True))
    return {**found, "updates": updates, **effort(practised), **json.loads(seconds.read_text())}


@contextmanager
def watched(folder: Path, file: Path) -> Iterator[None]:
    """Write the median over practice of what `tools/status.py` tells of the answers, every EVERY seconds."""
    ended, told = threading.Event(), list[Mapping[str, Any]]()

    def watch() -> None:
        while not ended.wait(EVERY):
            if (report := status(folder)) and report["directive"].get("phase") == PRACTISED:
                told.extend(client for client in report["clients"] if "p99_ms" in client)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    if told:
        middle = {name: round(statistics.median(each[name] for each in told), 1) for name in ("p50_ms", "p99_ms")}
        file.write_text(json.dumps({f"act_{name}": value for name, value in middle.items()}))
    elif not file.exists():
        sys.exit(f"error: the learner of {folder} never told how long answers took: remove that folder, then go on")


def status(folder: Path) -> Mapping[str, Any] | None:
    """Return what a run's learner tells; None if it does not answer."""
    if not (folder / "config.yaml").exists():
        return None
    port = str(OmegaConf.select(OmegaConf.load(folder / "config.yaml"), "port"))
    command = [sys.executable, ROOT / "tools/status.py", "--json", "--port", port]
    asked = subprocess.run(command, capture_output=True, text=True)
    return None if asked.returncode else json.loads(asked.stdout)


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the successes by seed, practice minus control with its interval, and how long answers took."""
    yield f"| of {cells[0]['starts']}, seeds {' / '.join(str(cell['seed']) for cell in cells)} | successes | mean |"
    yield "|---|---|---|"
    for name, title in WAYS.items():
        shares = [cell[name] / cell["starts"] for cell in cells]
        yield f"| {title} | {' / '.join(str(cell[name]) for cell in cells)} | {said(shares)} |"
    more = [(cell["practised"] - cell["more_updates"]) / cell["starts"] for cell in cells]
    yield f"practised minus more updates: {said(more, 'points')}"
    for cell in cells:
        driven = f"the script drove {cell['driven_by_the_operator']} of {cell['env_steps']} rows"
        yield (
            f"seed {cell['seed']}: {driven}; act: half of the answers within {cell['act_p50_ms']} ms, 99 of 100 within "
            f"{cell['act_p99_ms']} ms, deadline {DEADLINE_MS:.0f} ms"
        )
