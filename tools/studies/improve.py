"""What improves a clone, by practice or from a dataset."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client.spec import Array

from serl_launcher.algorithms.chunk_actor_critic import first_step
from serl_launcher.networks.seeded_noise import normal
from serl_launcher.training.report import read
from tools.studies import runs
from tools.studies.cells import Cell, Rows, Study, each, joined, last
from tools.studies.tasks import GOOD, demonstrated, finished
from tools.studies.trained import trained

SMALL = ["policy.head.steps=4", "batch_size=64"]
ARM, LEFT = "sim_arm", ["task.env.side=left"]
CLONE_GOOD = [
    "plan.phases.clone.data.demo=0", "+plan.phases.clone.data.good=1.0",
    "plan.phases.clone.on_begin=[{fit_normalizer: good}]",
]  # fmt: skip
CONTROL, FIFTHS = "cloning alone", 5
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
ALL, SUCCESSES, BARE = "cloning all", "successes alone", "unconditioned"
OFFLINE = {  # name: (words of its learner, its updates)
    ALL: (["algo=qc", *SMALL], "[update_clone]"),
    SUCCESSES: (["algo=qc", "+plan.sources.success={of: [online], keep: [successful]}", *SMALL], "[update_clone]"),
    "iql": (["algo=iql", *SMALL], "${updates}"),
    "iql beta 10": (["algo=iql", "algo.beta=10", *SMALL], "${updates}"),
    "calql": (["algo=calql", "algo.cql_samples=4", "batch_size=64"], "${updates}"),
    "recap": (["algo=recap", *SMALL], "${updates}"),
    BARE: (["algo=recap", "algo.task_weight=0", *SMALL], ""),
}
OLD = runs.without("demonstrate", "clone", "baseline", "warm_up", "practise", "evaluate")


def improved(cell: Namespace) -> Mapping[str, Any]:
    """What improves a clone: critics that choose, climb, steer or edit, at equal data? (docs/evidence/improve.md)

    A draw is a seed with its own --demonstrations. Each way clones for --cloned updates and then makes --updates more,
    while the robot practises one step for every two: qc, fql, parl, dsrl, expo and guided, whose critics take the first
    fifth; unguided: guided with weight 0; recap; hi-ors, where a script takes over; rejection: the same without
    takeovers. Cloning alone, the control, does not practise. Evaluations on --starts distinct starts follow each fifth.
    sim_arm  the simulated arm; all demonstrations have the block on the left. Half of the starts of practice and
             evaluation have it on the right, so cloning alone stays behind however long it lasts
    others'  a --task of others with its own script: so101, stick-pull, peg-insert-side, pick-place-wall, assembly. So
             many demonstrations have succeeded, and nobody learns from the others
    Said before the first cell of others' tasks, of so101, stick-pull and peg-insert-side with `--demonstrations 25
    --cloned 5000 --seeds 1 2 3 4 5`: a way helps if the interval of its last successes over the control's is above 0 on
    two of the three tasks at least, and below 0 on none. By this rule expo and qc help, and recap and dsrl do not.
    """
    words = [*SMALL, *WAYS[cell.way], f"plan.phases.clone.until=['updates >= {cell.cloned}']"]
    if cell.task == ARM:
        begun = runs.demonstrations(cell.folder / "demonstrations", cell.seed, cell.demonstrations, actor=LEFT)
        words += phases(cell.way, cell.updates, cell.starts, "demo")
    else:
        begun = demonstrated(cell)
        words += [GOOD, *CLONE_GOOD, *phases(cell.way, cell.updates, cell.starts, "good")]
    made = finished(cell, cell.way, words, of=begun, forgets=True)
    led = values_led(made) if cell.way == "guided" else {}
    values = [line.get("value_error") for line in runs.evaluations(made, cell.starts)]
    return led | {
        "successes": runs.successes(made, cell.starts), **runs.effort(made), "value_error": values,
        "updates_made": read(made / "summary.json")["updates"], "draw": runs.draw(begun),
    }  # fmt: skip


def phases(way: str, updates: int, starts: int, shown: str) -> list[str]:
    """Return the words that replace the plan's practice by one that evaluates after each fifth.

    shown: the source or view of the demonstrations that are learned.
    """
    rejects, fifth = WAYS[way] == ["plan=hiors"], updates // FIFTHS
    until, rest = [f"updates >= {fifth * part}" for part in (FIFTHS, FIFTHS - 1)]
    fifths: dict[str, Any] = {"more": runs.within(fifth, starts)}
    data = f"{{{'success' if rejects else 'online'}: 0.5, {shown}: 0.5}}"
    begins = "[update_value, update_advantage]" if way == "recap" else "[update_critic]"
    takes: dict[str, Any] = {"intervene": way == "hi-ors", "pace": "2.0", "start": "online.episodes >= 5"}
    if way == CONTROL:
        bodies = [runs.training(until, f"{{{shown}: 1.0}}", "[update_clone]", **fifths)]
    elif rejects:
        bodies = [runs.practice(until, data, "[update]", **takes, **fifths)]
    else:
        bodies = [runs.practice(f"updates >= {fifth}", data, begins, **takes)]
        bodies += [runs.practice(rest, data, **takes, **fifths)]
    warm = [] if rejects else ["value" if way == "recap" else "warm_up"]
    old = runs.without("demonstrate", "baseline", *warm, "practise", "evaluate")
    return [runs.evaluation(starts, 0), *old, *runs.turns(bodies, starts)]


@torch.no_grad()
def values_led(folder: Path) -> dict[str, float]:
    """Return the mean value of chunks that the critics lead, and of the same policy's without them."""
    algorithm, batch = trained(folder, "update_clone")
    observation, acting, found = first_step(batch.observation), algorithm.acting, {}
    for name, weight in (("value_led", acting.weight), ("value_alone", 0.0)):
        acting.weight = weight
        chunk = acting.choose(observation, batch.task, normal(batch.seed, acting.noise_shape))
        value = acting.critic.mean_value(observation, chunk)
        found[name] = round(value.mean().item(), 4)
    return found


def steps(cell: Cell) -> str:
    """Return the steps of practice until the first fifth after which 90 % succeed; `-`: none."""
    good = (fifth for fifth, count in enumerate(cell["successes"]) if count >= 0.9 * cell.get("starts", 50))
    at = next(good, None)
    return "-" if at is None or not cell["env_steps"] else f"{cell['env_steps'] * at // FIFTHS:,}"


def values_told(rows: Rows, _: Namespace) -> Iterator[str]:
    for cell in rows.get("guided", []):
        yield f"guided, seed {cell['seed']}: mean value {cell['value_led']}, not led {cell['value_alone']}"


def offline(cell: Namespace) -> Mapping[str, Any]:
    """What is learned from a dataset of successes and failures alone? On the simulated arm (docs/evidence/improve.md).

    A draw is a seed with its own --demonstrations, all with the block on the left, and the first --episodes of RLPD's
    practice on them: it begins by failing. From copies of that data, --updates while nobody acts: cloning all, the
    control; successes alone: those are imitated; iql, with beta 3 or 10, and calql; recap, under the condition that a
    row was good; unconditioned: the same weights without it. An evaluation on --starts distinct starts follows. Of
    recap the rank correlation (Spearman) between its value and the returns of that evaluation's rows is told.
    """
    made = learned(cell, cell.way)
    given = [bool(episode.success) for episode in runs.episodes(made, "online")]
    return ({"rank_correlation": rank_correlation(made)} if cell.way == "recap" else {}) | {
        "successes": runs.successes(made, cell.starts)[-1], "given": len(given), "given_successes": sum(given),
        "draw": runs.draw(made, "online"),
    }  # fmt: skip


def learned(cell: Namespace, way: str) -> Path:
    """Return the run that has learned in this way."""
    target, (words, updates) = cell.folder / way.replace(" ", "-"), OFFLINE[way]
    words = [*words, f"seed={cell.seed}"]
    if way == BARE:
        words += ["plan=evaluate", f"eval_episodes={cell.starts}"]
        return runs.finished(target, *words, of=learned(cell, "recap"))
    data = f"{{{'success' if way == SUCCESSES else 'online'}: 0.9, demo: 0.1}}"
    body = runs.training(f"updates >= {cell.updates}", data, updates, ", on_begin: [{fit_normalizer: online}]")
    words += ["plan=value_guided", *OLD, *runs.turns([body], cell.starts), *cell.words]
    return runs.finished(target, *words, of=dataset(cell), forgets=True)


def dataset(cell: Namespace) -> Path:
    """Return the run that holds the demonstrations and the episodes of practice."""
    count = cell.demonstrations
    begun = runs.demonstrations(cell.folder / "demonstrations", cell.seed, count, actor=LEFT)
    words = ["plan=quickstart", *runs.without("baseline", "evaluate"), "algo=rlpd", f"seed={cell.seed}"]
    words += ["plan.sources.demo.capacity=20000", f"plan.phases.demonstrate.until=['demo.episodes >= {count}']"]
    words += [f"plan.phases.practise.until=['online.episodes >= {cell.episodes}']"]
    return runs.finished(cell.folder / "dataset", *words, of=begun, forgets=True)


def rank_correlation(folder: Path) -> float:
    """Return Spearman's correlation between the value that a run has learned and the returns of its evaluation."""
    algorithm, batch = trained(folder, "update_value")
    with torch.no_grad():
        values, returns = algorithm.values(batch.observation), algorithm.returns(batch)
    return round(float(np.corrcoef(ranks(values.numpy()), ranks(returns.numpy()))[0, 1]), 3)


def ranks(values: Array) -> Array:
    """Return the ranks of values [n], where equal ones share theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[place]


def dataset_told(rows: Rows, _: Namespace) -> Iterator[str]:
    told = joined(cell["rank_correlation"] for cell in rows.get("recap", []))
    yield f"rank correlation of recap's value with held-out returns: {told}"
    given = joined(f"{cell['given_successes']} of {cell['given']}" for cell in rows.get(ALL, []))
    yield f"episodes of practice that succeeded, in the dataset: {given}"


STUDIES = {
    "improve": Study(
        improved, {"task": ARM, "demonstrations": 3, "cloned": 1000, "updates": 10000, "starts": 50},
        ways={way: {"way": way} for way in WAYS}, control=CONTROL, notes=values_told,
        columns=lambda _: {**each(["clone"]), "at the end": last},
        more={"rows that the operator drove": lambda cell: cell["driven_by_the_operator"], "steps to 90 %": steps},
    ),
    "offline": Study(
        offline, {"demonstrations": 3, "episodes": 400, "updates": 6000, "starts": 50},
        ways={way: {"way": way} for way in OFFLINE}, control=ALL, notes=dataset_told,
    ),
}  # fmt: skip
