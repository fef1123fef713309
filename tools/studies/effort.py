"""What a person's minute gives, as a correction or as a demonstration, on others' tasks with their own scripts."""

import json
import statistics
from argparse import Namespace
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from tools.studies import runs
from tools.studies.cells import Cell, Study, each, last
from tools.studies.tasks import GOOD, demonstrated, finished

CLONE, LONGER, MORE, FRESH = "clone", "cloning alone", "more demonstrations", "fresh clone"
HUMAN, ROBOT = "{mode: teleop, into: online}", "{mode: collect, into: online, intervene: true}"
WAYS = {  # name: (what the actor does, the data of an update)
    LONGER: ("", "{good: 1.0}"),
    MORE: (HUMAN, "{shown: 0.5, good: 0.5}"),
    "corrections alone": (ROBOT, "{human: 0.5, good: 0.5}"),
    "hi-ors": (ROBOT, "{success: 0.5, good: 0.5}"),
    "rows of decisions": (ROBOT, "{published: 1.0}"),
    FRESH: (HUMAN, "{all: 1.0}"),
}
VIEWS = [
    "plan.sources.online.capacity=200000",
    GOOD,
    "+plan.sources.driven={of: [online], start_steps: intervened}",
    "+plan.sources.shown={of: [online], keep: [successful]}",
    "+plan.sources.human={of: [online], keep: [successful], start_steps: intervened}",
    "+plan.sources.published={of: [online], keep: [successful], min_length: 3, start_steps: decisions}",
    "+plan.sources.all={of: [demo, online], keep: [successful]}",
]
MOST = 20_000  # steps of practice in a stage, however few rows the script has driven by then
FIT = ", on_begin: [{{fit_normalizer: {}}}]"
SFT = ["plan=sft", GOOD, *runs.without("clone", "evaluate")]
PLAN = ["plan=hiors", *VIEWS, *runs.without("demonstrate", "clone", "baseline", "practise", "evaluate")]


def effort(cell: Namespace) -> Mapping[str, Any]:
    """Is a correction worth more than a demonstration of as many rows? (docs/evidence/hiors.md)

    A draw is a seed with its own --demonstrations that succeeded, by the script of a --task, and their clone after
    --cloned updates. Draws whose clone succeeds in 10 to 70 % are gone on with. From a copy of it each way goes on: for
    each number of --rows the script drives until there are as many more human rows, whatever became of their episodes;
    the last episode goes on to its end. Then there are --updates more, and an evaluation on --starts distinct starts.
    cloning alone        nobody drives, and all of a batch are the first, successful demonstrations
    more demonstrations  the control: half of a batch are the new ones that succeeded
    corrections alone    half are rows of successful episodes that the script drove where the policy was stuck
    hi-ors               half are rows of successful episodes, old and new: the robot's own rows are free
    rows of decisions    all are first rows of chunks, and driven rows, of new successful episodes: published Hi-ORS's
                         rows, with a chunk of 4 steps
    fresh clone          as many new demonstrations as for the last number of rows, drawn anew, cloned with the first
                         ones from the beginning, with as many updates as the others make in all, and their normalizer
    The other half are the first demonstrations. All evaluations of a draw have the same starts, also the clone's.
    There are no updates while the script drives, so all ways make equally many; practice has three versions of the
    policy. An episode under way goes on to its end, so ways with corrections have a few human rows more. The first
    updates of a stage lack its last episode. A window that begins with a driven row may end with the policy's.
    tasks: so101, stick-pull, peg-insert-side, pick-place-wall, and assembly.
    Said before the first cell, about the last number of rows, over the first five draws of seeds 1, 2, ... that are
    gone on with, by 95 % intervals over more demonstrations: (1) corrections alone is above 0 on so101; (2) hi-ors is
    above -12 points on each task. Where hi-ors is above 0 on no task, README says which way has the highest mean over
    tasks, and is shown by that one. A difference of less than 12 points is hardly seen (standard deviation 10). Pilots,
    in other forms of this study, belong to no table: draw 0 of peg-insert-side, and two of stick-pull.
    """
    begun = cloned(cell)
    draw = runs.draw(begun)
    if cell.way == CLONE:
        made = finished(cell, CLONE, [*SFT, runs.evaluation(cell.starts, 0)], of=begun)
        return {"successes": runs.successes(made, cell.starts), "draw": draw}
    left_out = (len(cell.rows) - 1) * (cell.way == FRESH)  # it has the last stage alone
    phases = [word for number in range(left_out + 1, len(cell.rows) + 1) for word in stage(cell, number, begun)]
    made = finished(cell, cell.way, [*PLAN, *phases], of=begun, forgets=cell.way == FRESH)
    updates = json.loads((made / "summary.json").read_text())["updates"]
    found = [None] * left_out + runs.successes(made, cell.starts)
    return {"successes": found, "human_rows": driven(made), "all_updates": updates, **runs.effort(made), "draw": draw}


def cloned(cell: Namespace) -> Path:
    """Return the run that has cloned the demonstrations."""
    body = runs.training(f"updates >= {cell.cloned}", "{good: 1.0}", "[update]", FIT.format("good"))
    return finished(cell, "cloned", [*SFT, runs.phase("train", body)], of=demonstrated(cell))


def stage(cell: Namespace, number: int, begun: Path) -> list[str]:
    """Return the words of the phases that gather human rows up to that number, train, and evaluate."""
    (actors, data), updates, fit = WAYS[cell.way], cell.updates, ""
    first = data.partition(":")[0].strip("{")
    if cell.way == FRESH:
        updates, fit = cell.cloned + number * cell.updates, FIT.format(first)
    phases = [
        runs.phase(f"train_{number}", runs.training(f"updates >= {updates}", data, "[update]", fit)),
        runs.evaluation(cell.starts, number),
    ]
    if not actors:
        return phases
    rows = cell.rows[number - 1] - (actors == HUMAN) * mean_steps(begun) // 2  # a demonstration is never cut off
    ends = f"'driven.steps >= {rows} and {first}.steps >= 10', 'env_steps >= {MOST}'"
    body = f"actors: {actors}, until: [{ends}]"
    return [runs.phase(f"gather_{number}", body), *phases]


def driven(folder: Path) -> list[int]:
    """Return how many rows the script has driven by the end of each stage."""
    rows = dict[str, int]()
    for episode in sorted(runs.episodes(folder, "online"), key=lambda episode: episode.number):
        rows[episode.phase] = rows.get(episode.phase, 0) + episode.intervened
    return [*accumulate(rows.values())]


def mean_steps(folder: Path) -> int:
    """Return the mean length of the first demonstrations."""
    return round(statistics.fmean(episode.steps for episode in runs.episodes(folder, "demo")))


def is_within(cell: Cell) -> bool:
    return 0.1 <= last(cell) / cell.get("starts", 50) <= 0.7


def titles(options: Namespace) -> list[str]:
    return [CLONE, *(f"{rows:,} rows" for rows in options.rows)]


STUDIES = {
    "effort": Study(
        effort, ways={way: {"way": way} for way in (CLONE, *WAYS)}, seeds=range(1, 6), control=MORE,
        settings={"task": "so101", "demonstrations": 10, "cloned": 5000, "rows": [500, 1000, 1500], "updates": 2000,
                  "starts": 50},
        columns=lambda options: each(titles(options)), goes_on=is_within,
        more={"human rows": lambda cell: cell["human_rows"], "steps of practice": lambda cell: cell["env_steps"]},
    ),
}  # fmt: skip
