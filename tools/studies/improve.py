"""What improves a clone: critics that choose, climb, steer or edit, at equal data and updates. On the simulated arm.

A draw is a seed with its own --demonstrations, all of them with the block on the left. Half of the starts of practice
and evaluation have it on the right, so cloning alone stays behind however long it lasts. Each way clones for --clone
updates and then makes --updates more, while the arm practises one step for every two of them:
    cloning alone     the control: on the demonstrations, and nobody practises
    qc, fql, parl, dsrl, expo, guided     plan=value_guided with that algorithm; the critics alone take the first fifth
    unguided          guided with weight 0
    recap             plan=recap without a person
    hi-ors            plan=hiors with the script that takes over; it tells the rows that it drove
    rejection         the same without takeovers: the human effort of all the others, which is the demonstrations
Evaluations on 50 distinct starts follow each fifth. Words at the end go to every learner.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from serl_launcher.algorithms.judged import present
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.utils.report import read
from tools.studies.runs import (
    EVALUATE,
    EVALUATED,
    Cell,
    Cells,
    copied,
    demonstrations,
    draw,
    effort,
    one_draw,
    phase,
    run,
    said,
    successes,
)
from tools.studies.trained import trained

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
    "rejection": ["plan=hiors"],
}  # fmt: skip
FPS = 10  # steps per second of the simulated arm
OLD = {  # phases of a plan that the fifths replace
    "plan=hiors": ("demonstrate", "baseline", "practise", "evaluate"),
    "plan=recap": ("demonstrate", "baseline", "value", "practise", "evaluate"),
    "plan=value_guided": ("demonstrate", "baseline", "warm_up", "practise", "evaluate"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--demonstrations", type=int, default=3, help="episodes by the scripted operator (3)")
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
    one_draw(found)
    yield from table(found, options)


def improved(seed: int, way: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the successes of this way after the clone and after each fifth, and what it took."""
    folder, began = options.out / f"seed-{seed}", time.monotonic()
    begun = demonstrations(folder / "demonstrations", seed, options.demonstrations, actor=["task.env.side=left"])
    source = copied(begun, folder / way.replace(" ", "-"))
    (source / "config.yaml").unlink(missing_ok=True)  # it would remember the algorithm of the demonstrations
    words = [*SMALL, *WAYS[way], f"seed={seed}", f"plan.phases.clone.until=['updates >= {options.clone}']"]
    run(source, *words, *phases(way, options), *options.words)
    summary = read(source / "summary.json")
    led = values_led(source) if way == "guided" else {}
    return led | {
        "successes": successes(source), **effort(source), "updates_made": summary["updates"],
        "value_error": errors(source), "draw": draw(begun), "wall_s": round(time.monotonic() - began),
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
    rejects = WAYS[way] == ["plan=hiors"]
    data = "{success: 0.5, demo: 0.5}" if rejects else "{online: 0.5, demo: 0.5}"
    begins = "[update_value, update_advantage]" if way == "recap" else "[update_critic]"
    for fifth in range(1, FIFTHS + 1):
        updates = "[update]" if rejects else begins if fifth == 1 else "${updates}"
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


@torch.no_grad()
def values_led(folder: Path) -> dict[str, float]:
    """Return the mean value of chunks that the critics lead, and of the same policy's without them."""
    algorithm, batch = trained(folder, "update_clone")
    observation, acting, found = present(batch.observation), algorithm.acting, {}
    for name, weight in (("value_led", acting.weight), ("value_alone", 0.0)):
        acting.weight = weight
        chunk = acting.choose(observation, batch.task, normal(batch.seed, acting.noise_shape))
        value = acting.critic.judge(observation, chunk[None, :, : acting.critic_horizon])
        found[name] = round(value.mean().item(), 4)
    return found


def table(cells: Sequence[Cell], options: argparse.Namespace) -> Iterator[str]:
    """Yield the successes of the clone and at the end, the gain over the control, and what each way took."""
    control = {cell["seed"]: cell["successes"][-1] for cell in cells if cell["way"] == CONTROL}
    head = ["clone", "at the end", "mean", "over the control", "rows that the operator drove", "minutes to 90 %"]
    yield f"| of {EVALUATED}, seeds {joined(options.seeds)} | {' | '.join(head)} |"
    yield "|---" * (len(head) + 1) + "|"
    for way in options.ways:
        mine = [cell for cell in cells if cell["way"] == way]
        first, last = (joined(cell["successes"][at] for cell in mine) for at in (0, -1))
        more = [(cell["successes"][-1] - control[cell["seed"]]) / EVALUATED for cell in mine if cell["seed"] in control]
        gained = said(more, "points") if more and way != CONTROL else ""
        driven, reached = joined(cell["driven_by_the_operator"] for cell in mine), joined(map(time_to, mine))
        mean = said([cell["successes"][-1] / EVALUATED for cell in mine])
        yield f"| {way} | {first} | {last} | {mean} | {gained} | {driven} | {reached} |"
    for cell in cells:
        if "value_led" in cell:
            yield f"guided, seed {cell['seed']}: mean value {cell['value_led']}, not led {cell['value_alone']}"


def time_to(cell: Cell, share: float = 0.9) -> str:
    """Return the minutes of practice until the first fifth after which this share succeeds; `-`: none."""
    at = next((fifth for fifth, count in enumerate(cell["successes"]) if count >= share * EVALUATED), None)
    return "-" if at is None else f"{cell['env_steps'] / FPS / 60 * at / FIFTHS:.1f}"


def joined(values: Iterable[object]) -> str:
    return " / ".join(map(str, values))
