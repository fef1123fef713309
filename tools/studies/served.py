"""What improves a policy server that stays as it is."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from tools.studies import runs
from tools.studies.cells import Cell, Study, each, last
from tools.studies.improve import LEFT, SMALL

CLONE, CONTROL, FIFTHS = "clone", "server alone", 5
WAYS = {CONTROL: ["updates=[update_critic]"], "residual": []}  # name: words of its learner


def served(cell: Namespace) -> Mapping[str, Any]:
    """Do edits improve a policy server that succeeds in 30 to 70 %? (docs/guides/openpi.md)

    A draw is a seed with its own --demonstrations on the simulated arm, all with the block on the left, and a flow that
    cloned them for --cloned updates. Half of the starts have the block on the right. Draws whose clone succeeds in 30
    to 70 % are gone on with; the others are told. The clone's run answers as a policy server (bridge.port), and nothing
    else of it is used. Two runs act by it and make --updates, two for each step of practice: server alone, the control,
    learns values and never edits; residual edits, from the end of the warm-up on. Evaluations on --starts distinct
    starts follow the warm-up and each fifth.

    Hypotheses, written before the first run: residual ends above the control in each draw, and by 10 points or more in
    the mean. The control ends where it began, give or take 10 points.
    """
    begun = runs.demonstrations(cell.folder / "demonstrations", cell.seed, cell.demonstrations, actor=LEFT)
    fit = ", on_begin: [{fit_normalizer: demo}]"
    body = runs.training(f"updates >= {cell.cloned}", "{demo: 1.0}", "[update]", fit)
    words = ["plan=sft", "algo=sft", *SMALL, *runs.without("clone", "evaluate"), f"seed={cell.seed}"]
    words += runs.turns([body], cell.starts, "clone")
    clone = runs.finished(cell.folder / "clone", *words, of=begun, forgets=True)
    if cell.way == CLONE:
        return {"successes": runs.successes(clone, cell.starts), "draw": runs.draw(begun)}
    target, until = cell.folder / cell.way.replace(" ", "-"), f"updates >= {cell.updates}"
    body = runs.practice(until, "{online: 1.0}", pace="2.0", more=runs.within(cell.updates // FIFTHS, cell.starts))
    words = ["plan=residual", f"seed={cell.seed}", *WAYS[cell.way], *runs.without("baseline", "practise", "evaluate")]
    words += [runs.evaluation(cell.starts, 0), *runs.turns([body], cell.starts), *cell.words]
    with runs.serving(clone, target.with_name(f"{target.name}-server")) as url:
        made = runs.finished(target, *words, f"policy.url={url}")
    return {"successes": runs.successes(made, cell.starts), **runs.effort(made), "draw": runs.draw(begun)}


def is_within(cell: Cell) -> bool:
    return 0.3 <= last(cell) / cell.get("starts", 50) <= 0.7


STUDIES = {
    "served": Study(
        served, {"demonstrations": 5, "cloned": 1000, "updates": 10000, "starts": 50},
        ways={way: {"way": way} for way in (CLONE, *WAYS)}, seeds=range(4), goes_on=is_within,
        control=CONTROL, columns=lambda _: {**each(["clone", "before practice"]), "at the end": last},
    ),
}  # fmt: skip
