"""What improves a clone: critics that choose, climb, steer or edit, at equal data and updates. On the simulated arm.

A draw is a seed with its own --demonstrations, all of them with the block on the left. Half of the starts of practice
and evaluation have it on the right, so cloning alone stays behind however long it lasts. Each way clones for --clone
updates and then makes --updates more, while the arm practises one step for every two of them:
    cloning alone     the control: on the demonstrations, and nobody practises
    qc, fql, parl, dsrl, expo, guided     plan=value_guided with that algorithm; the critics alone take the first fifth
    unguided          guided with weight 0
    recap             plan=recap without a person
    hi-ors            plan=hiors with the script that takes over; it tells the rows that it drove
Evaluations on 50 distinct starts follow each fifth. Words at the end go to every learner.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from serl_launcher.store.index import Index
from serl_launcher.utils.report import read
from tools.studies.runs import EVALUATE, EVALUATED, Cell, Cells, copied, demonstrations, phase, run, said, successes

CONTROL, FIFTHS = "cloning alone", 5
SMALL = ["policy.head.steps=4", "batch_size=64"]
WAYS = {  # name: words of its learner
    CONTROL: ["plan=value_guided", "algo=qc"],
    "qc": ["plan=value_guided", "algo=qc", "algo.samples=8"],
    "fql": ["plan=value_guided", "algo=fql"],
    "parl": ["plan=parl", "algo.samples=8", "algo.kept=4", "algo.steps=3", "algo.step_size=0.01",
             "algo.temperature=0.02"],
    "dsrl": ["plan=value_guided", "algo=dsrl"],
    "expo": ["plan=expo"],
    "guided": ["plan=value_guided", "algo=guided"],
    "unguided": ["plan=value_guided", "algo=guided", "algo.weight=0"],
    "recap": ["plan=recap"],
    "hi-ors": ["plan=hiors"],
}  # fmt: skip
FIRST = {"recap": "[update_value, update_advantage]", "hi-ors": "[update]"}  # updates of the first fifth
OLD = {  # phases of a plan that the fifths replace
    "plan=hiors": ("demonstrate", "baseline", "practise", "evaluate"),
    "plan=recap": ("demonstrate", "baseline", "value", "practise", "evaluate"),
    "plan=value_guided": ("demonstrate", "baseline", "warm_up", "practise", "evaluate"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--demonstrations", type=int, default=10, help="episodes by the scripted operator (10)")
    parser.add_argument("--clone", type=int, default=1000, help="updates of the clone (1000)")
    parser.add_argument("--updates", type=int, default=10000, help="after it, of all kinds together (10000)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        for way in options.ways:
            key = {"demonstrations": options.demonstrations, "cloned": options.clone, "updates": options.updates}
            key |= {"words": options.words, "seed": seed, "way": way}
            found.append(cells.get(key, partial(improved, seed, way, options)))
    yield from table(found, options)


def improved(seed: int, way: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the successes of this way after the clone and after each fifth, and what it took."""
    folder, began = options.out / f"seed-{seed}", time.monotonic()
    begun = demonstrations(folder / "demonstrations", seed, options.demonstrations, actor=["task.env.side=left"])
    source = copied(begun, folder / way.replace(" ", "-"))
    (source / "config.yaml").unlink(missing_ok=True)  # it would remember the algorithm of the demonstrations
    words = [*SMALL, *WAYS[way], f"seed={seed}", f"plan.phases.clone.until=['updates >= {options.clone}']"]
    run(source, *words, *phases(way, options), *options.words)
    with closing(Index(source / "store/index.sqlite")) as index:
        episodes = [episode for episode in index.latest(1_000_000) if episode.source == "online"]
    summary = read(source / "summary.json")
    return {
        "successes": successes(source), "env_steps": sum(episode.steps for episode in episodes),
        "driven_by_the_operator": sum(episode.intervened for episode in episodes), "updates_made": summary["updates"],
        "value_error": errors(source), "wall_s": round(time.monotonic() - began),
    }  # fmt: skip


def phases(way: str, options: argparse.Namespace) -> list[str]:
    """Return the words that replace the plan's practice by fifths, an evaluation behind each of them."""
    found, part = [phase("evaluate_0", EVALUATE)], options.updates // FIFTHS
    found += [f"~plan.phases.{name}" for name in OLD.get(WAYS[way][0], OLD["plan=value_guided"])]
    acting = (
        f"actors: {{mode: collect, into: online, intervene: {str(way == 'hi-ors').lower()}}}, "
        "publish: {every_updates: 50}, pace: {updates_per_step: 2.0, tolerance: 64}, "
        "start_when: 'online.episodes >= 5', "
    )
    data = "{success: 0.5, demo: 0.5}" if way == "hi-ors" else "{online: 0.5, demo: 0.5}"
    for fifth in range(1, FIFTHS + 1):
        updates = FIRST.get(way, "[update_critic]") if fifth == 1 else ("[update]" if way == "hi-ors" else "${updates}")
        body = f"{acting}updates: {updates}, data: {data}"
        if way == CONTROL:
            body = "actors: {mode: idle}, updates: [update_clone], data: {demo: 1.0}"
        until = f"until: ['updates >= {part}'], on_end: [checkpoint, publish]"
        found += [phase(f"practise_{fifth}", f"{body}, {until}"), phase(f"evaluate_{fifth}", EVALUATE)]
    return found


def errors(folder: Path) -> list[float | None]:
    """Return the mean error of the values at each evaluation, None where no values are learned."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("value_error") for line in lines if line["kind"] == "evaluation"]


def table(cells: Sequence[Cell], options: argparse.Namespace) -> Iterator[str]:
    """Yield the successes after each fifth, the mean at the end, and the gain over the control."""
    control = {cell["seed"]: cell["successes"][-1] for cell in cells if cell["way"] == CONTROL}
    points = [f"{options.updates * fifth // FIFTHS:,}" for fifth in range(1, FIFTHS + 1)]
    seeds = " / ".join(map(str, options.seeds))
    yield f"| of {EVALUATED}, seeds {seeds} | clone | {' | '.join(points)} | at the end | over the control |"
    yield "|---" * (FIFTHS + 4) + "|"
    for way in options.ways:
        mine = [cell for cell in cells if cell["way"] == way]
        columns = [" / ".join(map(str, column)) for column in zip(*(cell["successes"] for cell in mine), strict=True)]
        last = [cell["successes"][-1] / EVALUATED for cell in mine]
        more = [(cell["successes"][-1] - control[cell["seed"]]) / EVALUATED for cell in mine if cell["seed"] in control]
        gained = said(more, "points") if more and way != CONTROL else ""
        yield f"| {way} | {' | '.join(columns)} | {said(last)} | {gained} |"
