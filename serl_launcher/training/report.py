"""Reports a run: summary.json, the learning curve, a table, and confidence intervals of success rates (Wilson)."""

import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from serl_launcher.store.files import replaced
from serl_launcher.training.plan import TIME
from serl_launcher.training.tallies import RECENT, Share, mean_curve, success_curve, wilson

_LIST = re.compile(r"\[[^][{}]+\]")  # without another one in it: it is written in one line
OF_ALL = ("phase", "updates", "weights_sha256")  # of an evaluation during training


class Evaluated(NamedTuple):
    """One evaluation. updates: before it, None: not known. trials: (start, success or None, return) of each episode."""

    name: str
    updates: int | None
    success: Share
    episodes: int
    distinct_starts: int
    return_mean: float | None
    trials: Sequence[Sequence[Any]] = ()


def write(
    path: Path, *, env_steps: int, episodes: int, assisted: int, updates: int, wall_s: float,
    evaluations: Sequence[Mapping[str, Any]], weights_sha256: str, curve: Sequence[Mapping[str, Any]], dropped: int = 0,
    changes: Sequence[Mapping[str, Any]] = (), person: Mapping[str, Any] | None = None, closing: Collection[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Write the summary to `path` and learning_curve.png beside it, and return the summary.

    The counts are of the whole run. wall_s: seconds.
    evaluations: what `training.counters.evaluation` returns, in their order, with the weights_sha256 that acted, the
    phase's name and the number of updates. The last is of the trained policy, if these are the newest weights. The
    first other one is of the untrained one, unless it was within a phase or a repetition, or of a phase in `closing`:
    the names of those behind the last that trains. The rest is `during`.
    Without any, the file keeps the results of an earlier plan. weights_sha256: of the newest weights.
    curve: {env_steps (up to its end), success (None: not judged), return, intervened} of each training episode.
    dropped: updates that steps were due and the learner was too slow for. changes: {updates, what} of settings.
    person: how long the run needed a person (person_time.py).
    """
    results, earlier = [_result(evaluation) for evaluation in evaluations], read(path)
    is_newest = bool(results) and evaluations[-1].get("weights_sha256", weights_sha256) == weights_sha256
    first = evaluations[0].get("phase", "") if evaluations else ""
    has_before = len(results) > is_newest and not {TIME, "."} & {*first} and first not in closing
    before = results[0] if has_before else earlier.get("before")
    measured = {
        "during": [
            {**{key: evaluation.get(key) for key in OF_ALL}, **result}
            for evaluation, result in [*zip(evaluations, results, strict=True)][has_before : len(results) - is_newest]
        ],
        "success_before": before and before["success"],
        "before": before,
        "eval": {**results[-1], "weights_sha256": weights_sha256} if is_newest else None,
    }
    counts = {"env_steps": env_steps, "episodes": episodes, "assisted": assisted, "updates": updates}
    counts |= {"updates_dropped": dropped, "changes": list(changes), "person": dict(person or {})}
    counts |= {"wall_s": round(wall_s, 1), "weights_sha256": weights_sha256}
    summary = counts | (measured if results else {name: earlier.get(name) for name in measured})
    with replaced(path) as aside:
        aside.write_text(_LIST.sub(lambda found: " ".join(found[0].split()), json.dumps(summary, indent=1)))
    if curve:
        with replaced(path.with_name("learning_curve.png")) as aside:
            aside.write_bytes(picture(curve))
    return summary


def show(summary: Mapping[str, Any], *, evaluated: bool) -> None:
    """Print the table. evaluated: whether this plan has evaluated; if not, print only steps, updates and time."""
    Console().print(table(summary) if evaluated else took(summary))


def read(path: Path) -> dict[str, Any]:
    """Read the summary in a file; empty if there is none, or a power cut has torn it."""
    try:
        summary = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def table(summary: Mapping[str, Any]) -> Table:
    """Return the summary as a table: one line per evaluation; below it steps, updates and time."""
    columns = ("evaluated", "success", "95 % interval", "mean return", "distinct starts")
    lines = Table(*columns, caption=took(summary))
    for each in evaluations(summary):
        interval = "{:.0%} to {:.0%}".format(*each.success.interval) if each.success.episodes else "-"
        mean = "-" if each.return_mean is None else f"{each.return_mean:.2f}"
        lines.add_row(each.name, str(each.success), interval, mean, f"{each.distinct_starts} of {each.episodes}")
    return lines


def share_of(result: Mapping[str, Any]) -> Share:
    """Return the successes of an evaluation in a summary; those of no episode where nobody judged."""
    rate, episodes = result["success"], result["episodes"]
    return Share(0, 0) if rate is None else Share(round(rate * episodes), episodes)


def evaluations(summary: Mapping[str, Any]) -> list[Evaluated]:
    """Return the evaluations of a summary.json in their order."""
    during = [(f"{each['updates'] or 0:,} updates", each) for each in summary.get("during") or ()]
    named = [("before training", summary.get("before")), *during, ("after training", summary.get("eval"))]
    return [
        Evaluated(
            name, 0 if name == "before training" else result.get("updates"), share_of(result), result["episodes"],
            result["distinct_starts"], result["return_mean"], result.get("trials") or (),
        ) for name, result in named if result
    ]  # fmt: skip


def took(summary: Mapping[str, Any]) -> str:
    """Return the steps, episodes, updates and seconds of a summary, or of Facts, for a person."""
    return (
        f"{summary['env_steps']:,} environment steps, {summary['episodes']:,} episodes ({summary['assisted']:,} "
        f"assisted), {summary['updates']:,} updates, {summary['wall_s']:,.0f} s"
    )


def picture(curve: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the learning curve as a PNG: returns over environment steps, and success if episodes are labelled.

    A success with a person's help counts as a failure, as in an evaluation.
    """
    from matplotlib.figure import Figure  # importing it takes half a second

    labelled = [episode for episode in curve if episode["success"] is not None]
    figure = Figure(figsize=(7, 6 if labelled else 3.2), layout="constrained")
    panels = figure.subplots(1 + bool(labelled), sharex=True, squeeze=False)[:, 0]
    if labelled:
        wins = [episode["success"] and not episode["intervened"] for episode in labelled]
        points = success_curve([episode["env_steps"] for episode in labelled], wins)
        steps, rates, low, high = zip(*points, strict=True)
        panels[0].plot(steps, rates)
        panels[0].fill_between(steps, low, high, alpha=0.2)
        panels[0].set(ylabel=f"unassisted success\n(last {RECENT}, 95 %)", ylim=(-0.02, 1.02))
    returns = [episode["return"] for episode in curve]
    steps = [episode["env_steps"] for episode in curve]
    panels[-1].plot(steps, returns, ".", markersize=3, alpha=0.4)
    panels[-1].plot(*zip(*((point.x, point.value) for point in mean_curve(steps, returns)), strict=True))
    panels[-1].set(xlabel="environment steps", ylabel=f"return\n(mean of the last {RECENT})")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _result(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    episodes, successes, returns = evaluation["episodes"], evaluation["successes"], evaluation["returns"]
    is_labelled = successes is not None and episodes > 0
    return {
        "episodes": episodes,
        "distinct_starts": evaluation["distinct_starts"],
        "success": successes / episodes if is_labelled else None,
        "wilson95": wilson(successes or 0, episodes) if is_labelled else None,
        "return_mean": sum(returns) / len(returns) if returns else None,
        "trials": evaluation.get("trials", []),  # checkpoints of before have none
    }
