"""What a person's minute gives, as a correction or as a demonstration, on others' tasks with their own scripts."""

import json
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.studies import runs
from tools.studies.cells import Cell, Study, each, last

CLONE, MORE, ALONE = "clone", "more demonstrations", "corrections alone"
HUMAN, ROBOT = "{mode: teleop, into: online}", "{mode: collect, into: online, intervene: true}"
WAYS = {  # name: (what the actor does, the data of an update, when these begin)
    MORE: (HUMAN, "{shown: 0.5, good: 0.5}", "shown.episodes >= 1"),
    ALONE: (ROBOT, "{human: 0.5, good: 0.5}", "human.steps >= 10"),
    "hi-ors": (ROBOT, "{success: 0.5, good: 0.5}", "online.episodes >= 5"),
    "rows of decisions": (ROBOT, "{published: 1.0}", "published.steps >= 10"),
}
GOOD = "+plan.sources.good={of: [demo], keep: [successful]}"
VIEWS = [
    GOOD,
    "+plan.sources.shown={of: [online], keep: [successful]}",
    "+plan.sources.human={of: [online], start_steps: intervened}",
    "+plan.sources.published={of: [online], keep: [successful], min_length: 3, start_steps: decisions}",
]
END = "actors: {mode: idle}, until: ['wall_s >= 30']"  # for the episode under way: the end of a plan cuts it off
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
    """Is a correction worth more than a demonstration of as many rows? (docs/hiors.md)

    A draw is a seed with its own --demonstrations that succeeded, by the script of a --task, and their clone after
    --cloned updates. Draws whose clone succeeds in 10 to 70 % are gone on with. From a copy of it each way goes on: for
    each number of --rows the script drives until there are as many more human rows, whatever became of their episodes;
    then there are --updates more, those of practice among them, and an evaluation on --starts distinct starts.
    more demonstrations  the control: half of a batch are the new ones that succeeded
    corrections alone    half are rows that the script drove where the policy was stuck
    hi-ors               half are rows of successful episodes, old and new: the robot's own rows are free
    rows of decisions    all are first rows of chunks, and driven rows, of new successful episodes: published Hi-ORS's
                         rows, with a chunk of 4 steps; without a success the policy stays as it is
    The other half are the first, successful demonstrations. All ways take the same stages, so their evaluations begin
    with the same starts. A window that begins with a driven row may end with the policy's.
    tasks: so101, stick-pull, peg-insert-side, pick-place-wall, and assembly, where more demonstrations help least.
    Hypotheses, said before the first cell, about the last number of rows: (1) over the draws of so101 the interval of
    corrections alone over more demonstrations is above 0; (2) on no task that of hi-ors over more demonstrations is
    below 0. With five draws a difference of less than 12 points is hardly seen (standard deviation 10).
    """
    begun = cloned(cell)
    if cell.way == CLONE:
        return {"successes": runs.successes(begun, cell.starts), "draw": runs.draw(begun)}
    stages = [gone_on(cell, begun, 0)]
    for number in range(1, len(cell.rows) + 1):
        stages += [gone_on(cell, stages[-1], number)]
    counts = [count for folder in stages for count in runs.successes(folder, cell.starts)]
    rows = [human_rows(folder) for folder in stages[:-1]]
    counted = {"human_rows": rows, "all_updates": updates(stages[-1]), **runs.effort(stages[-1])}
    return {"successes": counts, **counted, "draw": runs.draw(begun)}


def cloned(cell: Namespace) -> Path:
    """Return the run that has cloned the demonstrations, and was evaluated."""
    example, task = TASKS[cell.task]
    enough = f'plan.phases.demonstrate.until=["good.episodes >= {cell.demonstrations}"]'
    begun = cell.folder / "demonstrations"
    runs.finished(begun, "plan=collect", f"seed={cell.seed}", GOOD, enough, *task, *cell.words, example=example)
    fit = ", on_begin: [{fit_normalizer: good}]"
    body = runs.training(f"updates >= {cell.cloned}", "{good: 1.0}", "[update]", fit)
    phases = [GOOD, *runs.without("clone", "evaluate"), *runs.turns([body], cell.starts, CLONE)]
    return made(cell, "cloned", ["plan=sft", *phases], of=begun)


def gone_on(cell: Namespace, before: Path, number: int) -> Path:
    """Return the run that goes on from `before`: it makes the updates that its last stage has left, is evaluated, and
    gathers human rows up to the next number, as far as there is one."""
    actors, data, start = WAYS[cell.way]
    phases = ["plan=hiors", *VIEWS, *runs.without("demonstrate", "clone", "baseline", "practise", "evaluate")]
    left = cell.cloned + number * cell.updates - updates(before)
    has_any = any(episode.success for episode in runs.episodes(before, "online"))
    if left > 0 and (has_any or cell.way == ALONE):
        phases += [runs.phase(f"train_{number}", runs.training(f"updates >= {left}", data, "[update]"))]
    if number > 0:
        phases += [runs.evaluation(cell.starts, number)]
    if number < len(cell.rows):
        most = cell.rows[number] - (cell.way == MORE) * mean_steps(before) // 2  # a demonstration is never cut off
        until = f"'human.steps >= {most}', 'updates >= {cell.updates}'"
        body = (
            f"actors: {actors}, updates: [update], data: {data}, start_when: '{start}', until: [{until}], "
            "pace: {updates_per_step: 0.5, tolerance: 64}, publish: {every_updates: 50}"
        )
        phases += [runs.phase(f"gather_{number + 1}", body), runs.phase("end", END)]
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
    """Return how many rows of practice, or of later demonstrations, the script has driven."""
    return sum(episode.intervened for episode in runs.episodes(folder, "online"))


def mean_steps(folder: Path) -> int:
    """Return the mean length of the first demonstrations."""
    return round(statistics.fmean(episode.steps for episode in runs.episodes(folder, "demo")))


def is_within(cell: Cell) -> bool:
    return 0.1 <= last(cell) / cell.get("starts", 50) <= 0.7


def titles(options: Namespace) -> list[str]:
    return [CLONE, *(f"{rows:,} rows" for rows in options.rows)]


STUDIES = {
    "effort": Study(
        effort, ways={way: {"way": way} for way in (CLONE, *WAYS)}, seeds=range(5), control=MORE, goes_on=is_within,
        settings={"task": "so101", "demonstrations": 10, "cloned": 5000, "rows": [500, 1000, 1500], "updates": 2000,
                  "starts": 50},
        columns=lambda options: each(titles(options)),
        more={"human rows": lambda cell: cell["human_rows"], "steps of practice": lambda cell: cell["env_steps"]},
    ),
}  # fmt: skip
