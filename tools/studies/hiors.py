"""Which part of Hi-ORS does the work, and does practice do more than cloning for as long? On a simulated arm.

A draw is a seed with its own --demonstrations, and a clone of them after --clone updates. A draw whose clone succeeds
within --band is practised on in these ways, each from a copy of that run and with --updates more updates:
    cloning alone     the control: on the demonstrations, and nobody practises
    hi-ors            on successful episodes, human corrections among them, and demonstrations
    no interventions  the same, and nobody takes over
    human rows only   on the demonstrations and the rows that the human drove
    unfiltered        on all episodes, failures too, and demonstrations
    neither           nobody takes over, and all episodes count
    human successes   only if --ways names it: on the demonstrations and the rows of successful episodes that the human
                      drove, which is plan=hiors plan.sources.success.start_steps=intervened
An evaluation on 50 distinct starts follows each quarter. Seeds from --first on are tried until --draws are within the
band; the others are told. With --side left all demonstrations have the object on the left, where half of the starts of
practice and evaluation have it, so cloning alone stays behind however long it lasts. Words at the end go to every
learner: `-- policy=pi0_tiny batch_size=64`.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.studies.runs import (
    EVALUATE,
    EVALUATED,
    Cell,
    Cells,
    copied,
    demonstrations,
    effort,
    mean_of,
    phase,
    run,
    said,
    successes,
)  # fmt: skip

QUARTERS = 4
HUMAN = "plan.sources.success.start_steps=intervened"
CONTROL = "cloning alone"
WAYS = {  # name: (the data of an update, whether the operator takes over); without data nobody practises
    CONTROL: ("{demo: 1.0}", None),
    "hi-ors": ("{success: 0.5, demo: 0.5}", True),
    "no interventions": ("{success: 0.5, demo: 0.5}", False),
    "human rows only": ("{human: 0.5, demo: 0.5}", True),
    "unfiltered": ("{online: 0.5, demo: 0.5}", True),
    "neither": ("{online: 0.5, demo: 0.5}", False),
    "human successes": ("{success: 0.5, demo: 0.5}", True),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", default="sim_arm", help="sim_arm or dobot_pnp (sim_arm)")
    parser.add_argument("--side", default="both", help="of the object in demonstrations: both, left or right (both)")
    parser.add_argument("--actor", nargs="+", default=[], help="words of every actor: task.env.space=ee_delta.right")
    parser.add_argument("--draws", type=int, default=5, help="draws within the band (5)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--demonstrations", type=int, default=2, help="episodes by the scripted operator (2)")
    parser.add_argument("--clone", type=int, default=2000, help="updates of the clone (2000)")
    parser.add_argument("--band", type=float, nargs=2, default=[0.2, 0.6], help="success of a clone to start from")
    parser.add_argument("--updates", type=int, default=2400, help="of practice, for each way (2400)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:-1])


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    setting = {"task": options.task, "demonstrations": options.demonstrations, "cloned": options.clone}
    setting |= {"side": options.side, "actor": options.actor, "words": options.words}
    seed, inside, found = options.first, 0, []
    while inside < options.draws:
        folder = options.out / f"seed-{seed}"

        def measure(way: str, seed: int = seed, folder: Path = folder) -> Mapping[str, Any]:
            return practised(folder, seed, way, options) if way in WAYS else clone(folder, seed, options)

        begun = cells.get({**setting, "seed": seed, "way": "clone"}, partial(measure, "clone"))
        found.append(begun)
        if within(begun, options.band):
            inside += 1
            for way in options.ways:
                key = {**setting, "updates": options.updates, "seed": seed, "way": way}
                found.append(cells.get(key, partial(measure, way)))
        seed += 1
    draw(options.out / "curves.png", found, options)
    yield from table(found, options)


def within(cell: Cell, band: Sequence[float]) -> bool:
    return band[0] <= cell["successes"][-1] / EVALUATED <= band[1]


def clone(folder: Path, seed: int, options: argparse.Namespace) -> Mapping[str, Any]:
    """Clone the draw's demonstrations; evaluate half way and at the end, so that one sees whether it has converged."""
    training = "actors: {mode: idle}, updates: [update], data: {demo: 1.0}, until: ['updates >= %d']"
    words = ["plan=sft", "~plan.phases.clone", "~plan.phases.evaluate", f"seed={seed}"]
    for part in (1, 2):
        fit = ", on_begin: [{fit_normalizer: demo}]" * (part == 1)
        words += [phase(f"clone_{part}", training % (options.clone // 2) + fit), phase(f"evaluate_{part}", EVALUATE)]
    actor = [*options.actor, f"task.env.side={options.side}"]
    begun = demonstrations(
        folder / "demonstrations", seed, options.demonstrations, *options.words, task=options.task, actor=actor
    )
    run(copied(begun, folder / "clone"), *words, *options.words, task=options.task, actor=options.actor)
    return {"successes": successes(folder / "clone")}


def practised(folder: Path, seed: int, way: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the successes after each quarter of the updates that go on from the draw's clone in this way."""
    if not (folder / "clone/summary.json").exists():
        clone(folder, seed, options)
    (data, intervene), target = WAYS[way], folder / way.replace(" ", "-")
    if intervene is None:
        acting = "actors: {mode: idle}"
    else:
        acting = (
            f"actors: {{mode: collect, into: online, intervene: {str(intervene).lower()}}}, "
            "start_when: 'online.episodes >= 5', publish: {every_updates: 50}, "
            "pace: {updates_per_step: 1.0, tolerance: 64}"
        )
    words = ["+plan.sources.human={of: [online], start_steps: intervened}", *[HUMAN] * (way == "human successes")]
    words += [f"~plan.phases.{name}" for name in ("demonstrate", "clone", "baseline", "practise", "evaluate")]
    for quarter in range(1, QUARTERS + 1):
        until = f"updates: [update], data: {data}, until: ['updates >= {options.updates // QUARTERS}']"
        words += [phase(f"practise_{quarter}", f"{acting}, {until}, on_end: [checkpoint, publish]")]
        words += [phase(f"evaluate_{quarter}", EVALUATE)]
    words = ["plan=hiors", f"seed={seed}", *words, *options.words]
    run(copied(folder / "clone", target), *words, task=options.task, actor=options.actor)
    return {"successes": successes(target), **effort(target)}


def _finished(cells: Sequence[Cell], options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Return {way: [[successes of the clone, then after each quarter], for each draw within the band]}."""
    clones = {cell["seed"]: cell["successes"][-1] for cell in cells if cell["way"] == "clone"}
    draws = [cell["seed"] for cell in cells if cell["way"] == "clone" and within(cell, options.band)]
    draws = sorted(draws)[: options.draws]
    by_key = {(cell["seed"], cell["way"]): cell["successes"] for cell in cells}
    return {
        way: [[clones[seed], *by_key[seed, way]] for seed in draws if (seed, way) in by_key] for way in options.ways
    }


def table(cells: Sequence[Cell], options: argparse.Namespace) -> Iterator[str]:
    """Yield the report as a table: the last evaluation of each draw, means over draws, differences to the control."""
    found = _finished(cells, options)
    quarters = [f"{options.updates * quarter // QUARTERS:,}" for quarter in range(1, QUARTERS)]
    yield f"| of {EVALUATED}, each draw | clone | after {' | '.join(quarters)} | {options.updates:,} updates | "
    yield "|---" * (QUARTERS + 4) + "|"
    for way, draws in found.items():
        counts = [" / ".join(map(str, column)) for column in zip(*draws, strict=True)]
        last = [draw[-1] / EVALUATED for draw in draws]
        more = [
            (mine[-1] - control[-1]) / EVALUATED for mine, control in zip(draws, found.get(CONTROL, []), strict=False)
        ]
        difference = said(more, "points") if more and way != CONTROL else ""
        yield f"| {way} | {' | '.join(counts)} | {said(last)} | {difference} |"
    outside = {cell["seed"]: cell["successes"][-1] for cell in cells if cell["way"] == "clone"}
    outside = {
        seed: count for seed, count in outside.items() if not options.band[0] <= count / EVALUATED <= options.band[1]
    }
    for cell in cells:
        if cell.get("driven_by_the_operator"):
            driven = f"the operator drove {cell['driven_by_the_operator']} of {cell['env_steps']} rows"
            yield f"{cell['way']}, seed {cell['seed']}: {driven}"
    yield f"draws outside the band {options.band}: {outside or 'none'} (seed: successes of its clone)"


def draw(path: Path, cells: Sequence[Cell], options: argparse.Namespace) -> None:
    """Draw the mean over draws of each way, and its interval, over the updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points = [options.updates * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
    for way, draws in _finished(cells, options).items():
        columns = [mean_of([count / EVALUATED for count in column]) for column in zip(*draws, strict=True)]
        centers, low, high = zip(*columns, strict=True)
        axes.plot(points, centers, marker="o", label=way)
        axes.fill_between(points, low, high, alpha=0.1)
    axes.set(xlabel="updates after the clone", ylabel="unassisted success", ylim=(0, 1.02))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
