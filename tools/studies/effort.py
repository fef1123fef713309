"""What a person's minute gives, as a correction or as a demonstration, on others' tasks with their own scripts."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.studies import runs
from tools.studies.cells import Study, each

MORE = "more demonstrations"
WAYS = {  # name: (the data of an update in practice, when it begins)
    MORE: ("{demo: 1.0}", ""),
    "hi-ors": ("{success: 0.5, demo: 0.5}", "online.episodes >= 5"),
    "hi-ors as published": ("{published: 1.0}", "published.steps >= 10"),
    "corrections alone": ("{human: 0.5, demo: 0.5}", "online.episodes >= 5"),
}
VIEWS = [
    "+plan.sources.human={of: [online], start_steps: intervened}",
    "+plan.sources.published={of: [online], keep: [successful], min_length: 3, start_steps: decisions}",
]
TASKS = {  # name: (the example whose Python its actor has, the words of the task)
    "so101": ("so101_sim", []),
    **{
        name: ("metaworld", ["task=metaworld_expert", f"task.env_id={name}-v3", *more])
        for name, more in {
            "stick-pull": [], "peg-insert-side": [], "pick-place-wall": ["task.env.script.noise=0.1"], "assembly": [],
        }.items()
    },
}  # fmt: skip


def effort(cell: Namespace) -> Mapping[str, Any]:
    """Where is a correction worth more than a demonstration of as many rows? (docs/hiors.md)

    A draw is a seed with its own --demonstrations by the script of a --task, and a clone of them after --cloned
    updates. From a copy of that run each way goes on: for each number of --rows the person drives until there are as
    many human rows as that, of demonstrations or of corrections, beside those of the clone. Then there are --updates
    more, those of practice among them, and an evaluation on --starts distinct starts.
    more demonstrations  the control: nobody practises
    hi-ors               practice, in which the script takes over where the policy is stuck: successful episodes, and
                         demonstrations
    hi-ors as published  of successful episodes the first row of each chunk, and each row that the script drove
    corrections alone    what the script drove, and demonstrations
    Practice ends at its share of updates, too, at one for each step: so human rows may be fewer; the table tells them.
    tasks: so101, stick-pull, peg-insert-side, pick-place-wall, and assembly, where more demonstrations help least.
    Hypotheses, said before the first cell, of the last number of rows, over the draws: (1) the interval of hi-ors over
    more demonstrations is above 0 on so101, whose script rescues best, and on no other task; (2) hi-ors as published is
    above hi-ors nowhere; (3) corrections alone are within 10 points of hi-ors.
    """
    begun = cloned(cell)
    if cell.way == MORE:
        stages = [demonstrated(cell, begun)]
    else:
        stages = [practised(cell, begun, 0)]
        for number in range(1, len(cell.rows) + 1):
            stages += [practised(cell, stages[-1], number)]
    successes = [count for folder in [begun, *stages] for count in runs.successes(folder, cell.starts)]
    rows = [human_rows(folder) - human_rows(begun) for folder in stages[: len(cell.rows)]]
    counted = {"human_rows": rows, "all_updates": updates(stages[-1]), **runs.effort(stages[-1])}
    return {"successes": successes, **counted, "draw": runs.draw(begun)}


def cloned(cell: Namespace) -> Path:
    """Return the run that has cloned the demonstrations, and was evaluated."""
    example, task = TASKS[cell.task]
    begun = runs.demonstrations(cell.folder / "demonstrations", cell.seed, cell.demonstrations, *task, example=example)
    fit = ", on_begin: [{fit_normalizer: demo}]"
    body = runs.training(f"updates >= {cell.cloned}", "{demo: 1.0}", "[update]", fit)
    phases = [*runs.without("clone", "evaluate"), *runs.turns([body], cell.starts, "clone")]
    return made(cell, "cloned", ["plan=sft", *phases], of=begun)


def demonstrated(cell: Namespace, begun: Path) -> Path:
    """Return the run in which there were more demonstrations for each budget, and as many updates."""
    there = sum(episode.steps for episode in runs.episodes(begun, "demo"))
    body = runs.training(f"updates >= {cell.updates}", "{demo: 1.0}", "[update]")
    phases = ["plan=sft", *runs.without("clone", "evaluate")]
    for part, rows in enumerate(cell.rows, 1):
        more = f"actors: {{mode: teleop, into: demo}}, until: ['demo.steps >= {there + rows}']"
        phases += [
            runs.phase(f"more_{part}", more),
            runs.phase(f"train_{part}", body),
            runs.evaluation(cell.starts, part),
        ]
    return made(cell, "demonstrated", phases, of=begun)


def practised(cell: Namespace, before: Path, number: int) -> Path:
    """Return the run that goes on from `before`: it makes the updates that its last practice has left, is evaluated,
    and practises for the next number of human rows, as far as there is one."""
    data, start = WAYS[cell.way]
    phases = ["plan=hiors", *VIEWS, *runs.without("demonstrate", "clone", "baseline", "practise", "evaluate")]
    due = cell.cloned + number * cell.updates
    if (left := due - updates(before)) > 0:
        phases += [runs.phase(f"train_{number}", runs.training(f"updates >= {left}", data, "[update]"))]
    if number > 0:
        phases += [runs.evaluation(cell.starts, number)]
    if number < len(cell.rows):
        until = f"human.steps >= {cell.rows[number]}', 'updates >= {cell.updates}"
        body = runs.practice(until, data, "[update]", pace="1.0", intervene=True, start=start)
        phases += [runs.phase(f"practise_{number + 1}", body)]
    return made(cell, f"{cell.way.replace(' ', '-')}-{number}", phases, of=before)


def made(cell: Namespace, name: str, words: Sequence[str], of: Path) -> Path:
    """Return the run of that name, which goes on from a copy of the run `of`."""
    example, task = TASKS[cell.task]
    words = [*task, f"seed={cell.seed}", *words, *cell.words]
    return runs.finished(cell.folder / name, *words, of=of, example=example)


def updates(folder: Path) -> int:
    """Return how many updates a finished run has made, those of the runs that it goes on from among them."""
    return json.loads((folder / "summary.json").read_text())["updates"]


def human_rows(folder: Path) -> int:
    """Return how many rows of a run the script has driven."""
    return sum(episode.intervened for episode in runs.episodes(folder, "demo", "online"))


def titles(options: Namespace) -> list[str]:
    return ["clone", *(f"{rows:,} rows" for rows in options.rows)]


STUDIES = {
    "effort": Study(
        effort, ways={way: {"way": way} for way in WAYS}, seeds=range(5), control=MORE,
        settings={"task": "so101", "demonstrations": 10, "cloned": 5000, "rows": [500, 1000, 1500], "updates": 2000,
                  "starts": 50},
        columns=lambda options: each(titles(options)),
        more={"human rows": lambda cell: cell["human_rows"], "steps of practice": lambda cell: cell["env_steps"]},
    ),
}  # fmt: skip
