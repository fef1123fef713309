#!/usr/bin/env python
"""Which part of Hi-ORS does the work? Five ways to practise from one weak clone, on the simulated arm, by seed.

For each seed: a few demonstrations; a clone of them, stopped at the first count of updates (in steps of --rung) whose
unassisted success lies within --band; then, from copies of that run, the same number of updates
    hi-ors            on successful episodes, human corrections among them, and demonstrations
    no interventions  the same, and nobody takes over
    human rows only   on the demonstrations and the rows that the human drove
    unfiltered        on all episodes, failures too, and demonstrations
    neither           nobody takes over, and all episodes count
with an evaluation on 50 distinct starts after each quarter. Every run is the product itself: a learner and an actor on
loopback. Writes results.json and curves.png into --out, and prints the table; runs that are there are not repeated.
Words at the end go to every learner: `study.py --ways hi-ors -- policy=pi0_tiny batch_size=64`.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from serl_launcher.utils.report import wilson

TRAIN = [sys.executable, str(Path(__file__).resolve().parents[2] / "train.py")]
EVALUATED = 50  # episodes
EVALUATE = f"actors: {{mode: evaluate}}, until: ['episodes >= {EVALUATED}']"
QUARTERS = 4
MOST = 1000  # updates of a clone
RESULTS = ("metrics.jsonl", "summary.json", "evaluation.json")  # of a run: they say that it has ended
WAYS = {  # name: (the data of an update, whether the operator takes over)
    "hi-ors": ("{success: 0.5, demo: 0.5}", True),
    "no interventions": ("{success: 0.5, demo: 0.5}", False),
    "human rows only": ("{human: 0.5, demo: 0.5}", True),
    "unfiltered": ("{online: 0.5, demo: 0.5}", True),
    "neither": ("{online: 0.5, demo: 0.5}", False),
}


def phase(name: str, body: str) -> str:
    return f"+plan.phases.{name}={{{body}}}"


def ports() -> list[str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return [f"port={one.getsockname()[1]}", f"inference_port={two.getsockname()[1]}"]


def run(folder: Path, *words: str, actor: Sequence[str] = ()) -> None:
    """Learner, with these words, and actor, with its own, on this run folder until the plan ends."""
    common = ["task=sim_arm", f"run_dir={folder}", *ports()]
    with open(folder.with_suffix(".log"), "a") as log:
        command = [*TRAIN, "actor=true", *common, *actor]
        acting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            learner = [*TRAIN, "learner=true", *common, *words]
            subprocess.run(learner, stdout=log, stderr=log, check=True)
            acting.wait(60)
        finally:
            acting.kill()


def copied(source: Path, folder: Path) -> Path:
    """A copy of a run, from which another one goes on."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("actors", *RESULTS))
    return folder


def successes(folder: Path) -> list[int]:
    """How many of the evaluated episodes succeeded, for each evaluation in order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert all(line["distinct_starts"] == EVALUATED for line in evaluations), f"{folder}: starts were repeated"
    return [line["successes"] for line in evaluations]


def clone(folder: Path, seed: int, options: argparse.Namespace) -> tuple[Path, int, int]:
    """(the run of the clone within the band, its updates, its successes)."""
    begun = folder / "demonstrations"
    if not (begun / "summary.json").exists():
        until = f'plan.phases.demonstrate.until=["demo.episodes >= {options.demonstrations}"]'
        run(begun, "plan=collect", f"seed={seed}", until, *options.words)
    updates, before = options.rung, begun
    while updates <= MOST:
        there = folder / f"clone-{updates}"
        if not (there / "evaluation.json").exists():
            training = (
                "actors: {mode: idle}, updates: [update], data: {demo: 1.0}, on_begin: [{fit_normalizer: demo}], "
                f"until: ['updates >= {options.rung}']"
            )
            words = ["plan=sft", "~plan.phases.clone", "~plan.phases.evaluate", f"seed={seed}"]
            words += [phase(f"clone_{updates}", training), phase(f"evaluate_{updates}", EVALUATE)]
            run(copied(before, there), *words, *options.words)
        (found,) = successes(there)
        print(f"seed {seed}: clone of {updates} updates: {found} of {EVALUATED}", flush=True)
        if options.band[0] <= found / EVALUATED <= options.band[1]:
            return there, updates, found
        if found / EVALUATED > options.band[1]:
            sys.exit(f"seed {seed}: success passes the band between two rungs: give a smaller --rung")
        updates, before = updates + options.rung, there
    sys.exit(f"seed {seed}: no clone of up to {MOST} updates is within the band: give more --demonstrations")


def practise(
    folder: Path, start: Path, seed: int, options: argparse.Namespace, data: str, intervene: bool
) -> list[int]:
    """The successes after each quarter of the updates that practise from the run `start`."""
    if not (folder / "summary.json").exists():
        words = ["+plan.sources.human={of: [online], start_steps: intervened}"]
        words += [f"~plan.phases.{name}" for name in ("demonstrate", "clone", "baseline", "practise", "evaluate")]
        for quarter in range(1, QUARTERS + 1):
            practice = (
                f"actors: {{mode: collect, into: online, intervene: {str(intervene).lower()}}}, updates: [update], "
                f"data: {data}, start_when: 'online.episodes >= 5', publish: {{every_updates: 50}}, "
                f"pace: {{updates_per_step: 1.0, tolerance: 64}}, until: ['updates >= {options.updates // QUARTERS}'], "
                "on_end: [checkpoint, publish]"
            )
            words += [phase(f"practise_{quarter}", practice), phase(f"evaluate_{quarter}", EVALUATE)]
        run(copied(start, folder), "plan=hiors", f"seed={seed}", *words, *options.words)
    return successes(folder)


def draw(path: Path, results: dict, updates: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points = [updates * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    for way in next(iter(results.values())):
        counts = [sum(column) for column in zip(*(seed[way] for seed in results.values()), strict=True)]
        shares = [count / EVALUATED / len(results) for count in counts]
        low, high = zip(*(wilson(count, EVALUATED * len(results)) for count in counts), strict=True)
        axes.plot(points, shares, marker="o", label=way)
        axes.fill_between(points, low, high, alpha=0.12)
    axes.set(xlabel="updates of practice", ylabel="unassisted success", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--demonstrations", type=int, default=3, help="episodes by the scripted operator")
    parser.add_argument("--rung", type=int, default=25, help="updates between two evaluations of the clone")
    parser.add_argument("--band", type=float, nargs=2, default=[0.2, 0.5], help="success of the clone to start from")
    parser.add_argument("--updates", type=int, default=2400, help="of practice, for each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("words", nargs="*", help="words for every learner, after --")
    options = parser.parse_args()
    results: dict[str, dict[str, list[int]]] = {}
    for seed in options.seeds:
        folder = options.out.resolve() / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        start, _, found = clone(folder, seed, options)
        results[str(seed)] = {}
        for way in options.ways:
            target = folder / way.replace(" ", "-")
            counts = [found, *practise(target, start, seed, options, *WAYS[way])]
            results[str(seed)][way] = counts
            print(f"seed {seed}: {way:<17}" + "".join(f"{count:4d}" for count in counts), flush=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    draw(options.out / "curves.png", results, options.updates)
    print(f"\nof {EVALUATED}, before and after each quarter of {options.updates} updates; {options.out}/curves.png")


if __name__ == "__main__":
    main()
