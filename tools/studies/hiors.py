"""What the parts of Hi-ORS do."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tools.studies import runs
from tools.studies.cells import Cell, Rows, Study, each, last, mean_of

CLONE, CONTROL, QUARTERS = "clone", "cloning alone", 4
WAYS = {  # name: (the data of an update, whether the operator takes over); without data nobody practises
    CONTROL: ("{demo: 1.0}", None),
    "hi-ors": ("{success: 0.5, demo: 0.5}", True),
    "no interventions": ("{success: 0.5, demo: 0.5}", False),
    "human rows only": ("{human: 0.5, demo: 0.5}", True),
    "unfiltered": ("{online: 0.5, demo: 0.5}", True),
    "neither": ("{online: 0.5, demo: 0.5}", False),
    "human successes": ("{success: 0.5, demo: 0.5}", True),
}
PLAN = [
    "plan=hiors", "+plan.sources.human={of: [online], start_steps: intervened}",
    *runs.without("demonstrate", "clone", "baseline", "practise", "evaluate"),
]  # fmt: skip


def practised(cell: Namespace) -> Mapping[str, Any]:
    """Which part of Hi-ORS does the work, and does practice do more than cloning for as long? (docs/evidence/hiors.md)

    A draw is a seed with its own --demonstrations, and a clone of them after --cloned updates. From a copy of that run
    each way makes --updates more: cloning alone is the control, and nobody practises; hi-ors learns from successful
    episodes with human corrections; no interventions: nobody takes over; human rows only: what the human drove;
    unfiltered: failures, too; neither: all episodes, and nobody takes over; human successes: what the human drove of
    successful episodes. All see demonstrations, too. An evaluation on --starts distinct starts follows each quarter.
    hiors        the simulated arm. Draws whose clone succeeds in 20 to 60 % are gone on with; the others are told
    dobot_pnp    two six-joint arms that are commanded by joint positions, whatever the clones do
    dobot_left   the right arm of them alone moves, and all demonstrations have the object on the left (--side), where
                 half of the starts have it, so cloning alone stays behind however long it lasts
    """
    side: dict[str, Any] = {"task": cell.task, "actor": cell.actor}
    placed = {**side, "actor": [*cell.actor, f"task.env.side={cell.side}"]}
    begun = runs.demonstrations(cell.folder / "demonstrations", cell.seed, cell.demonstrations, *cell.words, **placed)
    fit = f", on_begin: [{{fit_normalizer: demo}}]{runs.within(cell.cloned // 2, cell.starts)}"
    body = runs.training(f"updates >= {cell.cloned}", "{demo: 1.0}", "[update]", fit)
    words = [f"seed={cell.seed}", "plan=sft", *runs.without("clone", "evaluate"), *cell.words]
    clone = runs.finished(cell.folder / CLONE, *words, *runs.turns([body], cell.starts, CLONE), of=begun, **side)
    if cell.way == CLONE:
        return {"successes": runs.successes(clone, cell.starts)}
    (data, intervene), until = WAYS[cell.way], f"updates >= {cell.updates}"
    quarters = runs.within(cell.updates // QUARTERS, cell.starts)
    takes: dict[str, Any] = {"pace": "1.0", "intervene": intervene, "start": "online.episodes >= 5"}
    body = runs.practice(until, data, "[update]", **takes, more=quarters)
    if intervene is None:
        body = runs.training(until, data, "[update]", quarters)
    words = [f"seed={cell.seed}", *PLAN, *runs.turns([body], cell.starts), *cell.words]
    words += ["plan.sources.success.start_steps=intervened"] * (cell.way == "human successes")
    made = runs.finished(cell.folder / cell.way.replace(" ", "-"), *words, of=clone, **side)
    return {"successes": runs.successes(made, cell.starts), **runs.effort(made)}


def curves(rows: Rows, options: Namespace) -> Iterator[str]:
    """Draw the mean over draws of each way, and its interval, over the updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for way, cells in rows.items():
        columns = zip(*(cell["successes"] for cell in cells), strict=True)
        points = [mean_of([count / options.starts for count in column]) for column in columns]
        centers, low, high = zip(*points, strict=True)
        updates = [options.updates * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
        axes.plot(updates, centers, marker="o", label=way)
        axes.fill_between(updates, low, high, alpha=0.1)
    axes.set(xlabel="updates after the clone", ylabel="unassisted success", ylim=(0, 1.02))
    axes.legend()
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "curves.png", dpi=120)
    yield f"the curves: {options.out / 'curves.png'}"


def quarters(options: Namespace) -> list[str]:
    return [CLONE, *(f"after {options.updates * quarter // QUARTERS:,}" for quarter in range(1, QUARTERS + 1))]


def is_within(cell: Cell) -> bool:
    return 0.2 <= last(cell) / cell.get("starts", 50) <= 0.6


HIORS = Study(
    practised, ways={way: {"way": way} for way in (CLONE, *WAYS)}, usual=len(WAYS), seeds=range(8), goes_on=is_within,
    settings={"task": "sim_arm", "demonstrations": 2, "cloned": 2000, "side": "both", "actor": list[str](),
              "updates": 2400, "starts": 50},
    columns=lambda options: each(quarters(options)), control=CONTROL, notes=curves,
)  # fmt: skip
BOTH = replace(
    HIORS, ways={way: {"way": way} for way in (CLONE, CONTROL, "hi-ors")}, seeds=(0, 1, 2), goes_on=bool,
    settings={**HIORS.settings, "task": "dobot_pnp", "demonstrations": 15, "updates": 4000},
    words=("policy.scale=range",),
)  # fmt: skip
LEFT = replace(
    BOTH, ways={way: {"way": way} for way in (*BOTH.ways, "human rows only", "human successes")},
    settings={**BOTH.settings, "demonstrations": 3, "cloned": 1000, "side": "left",
              "actor": ["task.env.space=ee_delta.right"]},
    words=("policy.head.steps=4", "batch_size=64"),
)  # fmt: skip
STUDIES = {"hiors": HIORS, "dobot_pnp": BOTH, "dobot_left": LEFT}
