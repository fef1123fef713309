#!/usr/bin/env python
"""Reports how a judge does on the episodes that it has not learned from, and has it judge those of a run.

reward.py RUN                  writes RUN/reward.html: precision, recall, calibration, and pictures of what it took for
                               success
reward.py RUN --label OTHER    says of each episode of OTHER that nobody has judged what RUN's judge sees

RUN is a run's folder, with plan=reward_classifier or plan=judge (docs/guides/rewards.md); its learner may be serving.
A row counts as claimed from the --threshold on, and an episode once --rows in succession are, as task.judge does it.

The learner of OTHER must be running. An episode is a success if it is claimed, and a failure if no row comes to
1 - threshold; of others nothing is said. A person's word overrules it at any time. Evaluations are left alone. A judge
that does not see most successes among the held-out episodes, or claims most failures, is refused.
"""

import argparse
import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from serl_client.episode import Outcome
from serl_client.errors import ConfigError, TrainerError
from serl_client.reach import explained
from serl_client.spec import Array

from robot_infra.classifier_judge import Verdicts
from serl_launcher.algorithms.reward_classifier import STAGE
from serl_launcher.datasets.episodes import Gone, open_run
from serl_launcher.error_log import in_one_sentence
from serl_launcher.page.orders import NAME, label
from serl_launcher.replay.verdicts import MODEL
from serl_launcher.replay.views import EpisodeInfo, View
from serl_launcher.service.sockets import address_of
from serl_launcher.sharing import is_shared, keep_private
from serl_launcher.training.plan import EVAL
from serl_launcher.training.tallies import wilson
from tools.studies.trained import newest

BINS = 10  # of the calibration curve
SHOWN = 24  # rows with their pictures, at most
STYLE = (
    "body{font:16px sans-serif;margin:2em} td{padding:0 1em} figure{display:inline-block;margin:4px} "
    "img{image-rendering:pixelated}"
)


@dataclass
class Judged:
    """Holds an episode: P(stage) of each observation [T + 1, n], which ones show it, and pictures of those that success
    is wrongly claimed of."""

    info: EpisodeInfo
    scores: Array
    shows: Array
    wrong: Sequence[Mapping[str, Array]]


@torch.no_grad()
def judged(run: Path, threshold: float) -> Iterator[Judged]:
    """Yield the held-out episodes whose success is known, with what the newest classifier says of them."""
    classifier, _, _ = newest(run)
    _, readers, infos = open_run(run)
    view = View(tuple(readers), keep=("successful", "failed"), split="held_out")
    for info in filter(view.holds, infos):
        rows = readers[info.source].rows(info)
        seen = {name: np.asarray(rows[name]) for name in classifier.inputs}
        scores = classifier.episode_scores(seen, info.task).numpy()
        left = info.steps - np.arange(len(scores))  # rows that follow; the final observation has none
        success = (left < classifier.positive) & bool(info.success)  # [T + 1]
        before = [success | (stage_shown(rows, len(scores)) >= k) for k in range(1, classifier.stages)]
        shows = np.stack([*before, success], 1)
        wrong = np.flatnonzero(
            (scores[:, -1] >= threshold) & ~success & (left >= classifier.positive + classifier.unsure)
        )
        images = [name for name in seen if seen[name].ndim == 4]
        yield Judged(info, scores, shows, [{name: seen[name][i] for name in images} for i in wrong[:3]])


def stage_shown(rows: Mapping[str, Any], count: int) -> Array:
    """Return the stage that each of `count` observations shows: a row tells it of the one after it, and the first
    shows none. The final observation may be missing."""
    return np.append(0, rows[STAGE])[:count]


def claimed(scores_of: Array, verdicts: Verdicts) -> bool:
    """Return whether the judge would have called an episode with these scores [T + 1, n] a success."""
    verdicts.reset()
    for row, scores in enumerate(scores_of):
        verdicts.hear(scores, row)
        if verdicts.at(row).success:
            return True
    return False


def page(episodes: Sequence[Judged], verdicts: Verdicts) -> str:
    scores, shows = (np.concatenate([getattr(each, name) for each in episodes]) for name in ("scores", "shows"))
    says, stages = scores >= verdicts.threshold, scores.shape[1]
    lines: list[tuple[str, int, int]] = []
    for k in range(stages):
        name, both = f"stage {k + 1}" if k < stages - 1 else "success", int((says & shows)[:, k].sum())
        lines.append((f"rows: precision of {name}", both, int(says[:, k].sum())))
        lines.append((f"rows: recall of {name}", both, int(shows[:, k].sum())))
    for name, success in (("episodes: successes seen", True), ("episodes: failures called success", False)):
        mine = [claimed(each.scores, verdicts) for each in episodes if bool(each.info.success) == success]
        lines.append((name, sum(mine), len(mine)))
    cells = "".join(
        f"<tr><td>{name}<td>{count} of {total}<td>{'{:.0%} to {:.0%}'.format(*wilson(count, total))}</tr>"
        for name, count, total in lines
    )
    wrong = [(each.info.id, seen) for each in episodes for seen in each.wrong if seen][:SHOWN]
    pictures = "".join(
        f"<figure>{''.join(map(picture, seen.values()))}<figcaption>{html.escape(name)}</figcaption></figure>"
        for name, seen in wrong
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>Judge</title><style>{STYLE}</style>"
        f"<h1>Judge</h1><p>{len(episodes)} held-out episodes, threshold {verdicts.threshold}, "
        f"{verdicts.rows} rows in succession; 95 % intervals (Wilson)</p><table>{cells}</table>"
        f"<h2>Calibration</h2>{curve(scores, shows)}"
        f"<h2>Taken for success</h2>{pictures or 'nothing, or the classifier sees no pictures'}"
    )


def picture(image: Array) -> str:
    """Return a camera's image uint8 [H, W, 3] as HTML."""
    Image.fromarray(np.ascontiguousarray(image)).save(file := io.BytesIO(), "png")
    return inline(file.getvalue(), "width=160")


def inline(png: bytes, size: str = "") -> str:
    return f'<img {size} src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def curve(scores: Array, shows: Array) -> str:
    """Draw how often rows [N, n] of each predicted probability show a stage; the last stage is success."""
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes: Any = figure.subplots()
    axes.plot([0, 1], [0, 1], ":", color="grey")
    for k, (said, true) in enumerate(zip(scores.T, shows.T, strict=True), 1):
        place = np.minimum((said * BINS).astype(int), BINS - 1)
        there = np.flatnonzero(np.bincount(place, minlength=BINS))
        name = "success" if k == scores.shape[1] else f"stage {k}"
        axes.plot([said[place == i].mean() for i in there], [true[place == i].mean() for i in there], "o-", label=name)
    axes.legend()
    axes.set(xlabel="predicted probability", ylabel="share of rows that show it")
    figure.savefig(file := io.BytesIO(), format="png", dpi=120)
    return inline(file.getvalue())


def outcomes(run: Path, other: Path, verdicts: Verdicts) -> Iterator[Outcome]:
    """Yield what the newest judge of `run` says of the episodes of `other` that nobody has judged.

    Raises ConfigError where `other` lacks what the judge sees.
    """
    classifier, own, _ = newest(run)
    spec, readers, infos = open_run(other)
    for name in classifier.inputs:
        if name not in spec.observation or spec.observation[name].shape != own.observation[name].shape:
            there = ", ".join(f"{each} {list(feature.shape)}" for each, feature in spec.observation.items())
            raise ConfigError(
                f"{other}: this judge sees {name} {list(own.observation[name].shape)}, and these episodes have "
                f"{there}: take a judge of this robot"
            )
    for info in infos:
        if info.success is not None or info.discard or not info.closed or info.continued or info.source == EVAL:
            continue
        try:
            rows = readers[info.source].rows(info)
            scores = classifier.episode_scores({name: np.asarray(rows[name]) for name in classifier.inputs}, info.task)
        except Gone:
            continue
        success = claimed(scores.numpy(), verdicts)
        if success or float(scores[:, -1].max()) <= 1 - verdicts.threshold:
            yield Outcome(info.id, success, judged_by=MODEL)


def check_trusted(episodes: Sequence[Judged], verdicts: Verdicts) -> None:
    """Raise ConfigError for a judge whose word on stored episodes would be worth nothing: one that sees nothing gives
    each row the share of successes, and so would call every episode a failure."""
    seen, wrong = (
        [claimed(each.scores, verdicts) for each in episodes if bool(each.info.success) == success]
        for success in (True, False)
    )
    if 2 * sum(seen) <= len(seen) or 2 * sum(wrong) > len(wrong):
        raise ConfigError(
            f"of the held-out episodes this judge sees {sum(seen)} of {len(seen)} successes, and calls {sum(wrong)} of "
            f"{len(wrong)} failures success: give it more judged episodes, or another --threshold, before it labels"
        )


def labelled(run: Path, other: Path, verdicts: Verdicts, options: argparse.Namespace) -> str:
    """Have the judge of `run` judge the episodes of `other`, and say how many of which kind there were."""
    check_trusted(list(judged(run, verdicts.threshold)), verdicts)
    found = list(outcomes(run, other, verdicts))
    address = address_of(other, options.ip, options.port, options.key)
    if found:
        try:
            keep_private(is_shared(other))
            label(address, other / "actors" / NAME / "outbox", *found, key=options.key)
        except TrainerError as error:
            raise ConfigError(explained(error, address, has_key=options.key is not None)) from None
    successes = sum(bool(each.success) for each in found)
    return (
        f"{successes} successes and {len(found) - successes} failures are said; tools/label.py shows and changes them"
    )


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--threshold", type=float, default=0.9, help="task.judge.threshold (0.9)")
    parser.add_argument("--rows", type=int, default=2, help="task.judge.rows (2)")
    parser.add_argument("--label", type=Path, metavar="OTHER", help="run whose episodes it judges")
    parser.add_argument("--ip", help="address of OTHER's learner (that with which the run was started)")
    parser.add_argument("--port", type=int, help="its port (that with which the run was started)")
    parser.add_argument("--key", type=Path, help="your key file, for a learner with keys")
    options = parser.parse_args()
    if not any((options.run / "checkpoints").glob("[0-9]*/manifest.json")):
        raise ConfigError(f"no judge in {options.run}: give the run_dir of plan=reward_classifier or plan=judge")
    verdicts = Verdicts(threshold=options.threshold, rows=options.rows, stale_s=1.0)
    if options.label:
        print(labelled(options.run, options.label, verdicts, options))
        return
    episodes = list(judged(options.run, options.threshold))
    if not episodes:
        raise ConfigError(f"{options.run} has no judged episode that was held out: give it more episodes")
    target = options.run / "reward.html"
    target.write_text(page(episodes, verdicts))
    print(target)


if __name__ == "__main__":
    main()
