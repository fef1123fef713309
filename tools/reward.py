#!/usr/bin/env python
"""Reports how a reward classifier does on the episodes that it has not learned from (docs/rewards.md).

reward.py RUN    writes RUN/reward.html: precision, recall, calibration, and pictures of what it took for success

RUN is the folder of a run with plan=reward_classifier; its learner may be serving. A row counts as claimed from the
--threshold on, and an episode once --rows in succession are, as task.judge does it.
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
from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.classifier_judge import Verdicts
from serl_launcher.algorithms.reward_classifier import STAGE
from serl_launcher.datasets.episodes import open_run
from serl_launcher.error_log import in_one_sentence
from serl_launcher.replay.views import EpisodeInfo, View
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
    names = classifier.acting.logit.encoder.inputs
    view = View(tuple(readers), keep=("successful", "failed"), split="held_out")
    for info in filter(view.holds, infos):
        rows = readers[info.source].rows(info)
        seen = {name: np.stack([rows[name][i] for i in range(len(rows[name]))]) for name in names}
        scores = classifier.acting({name: torch.from_numpy(array) for name, array in seen.items()}).numpy()
        left = info.steps - np.arange(len(scores))  # rows that follow; the final observation has none
        success = (left < classifier.positive) & bool(info.success)  # [T + 1]
        before = [success | (stage_shown(rows, len(scores)) >= k) for k in range(1, classifier.stages)]
        shows = np.stack([*before, success], 1)
        wrong = np.flatnonzero(
            (scores[:, -1] >= threshold) & ~success & (left >= classifier.positive + classifier.unsure)
        )
        images = [name for name in names if seen[name].ndim == 4]
        yield Judged(info, scores, shows, [{name: seen[name][i] for name in images} for i in wrong[:3]])


def stage_shown(rows: Mapping[str, Any], count: int) -> Array:
    """Return the stage that each of `count` observations shows: a row tells it of the one after it, and the first
    shows none. The final observation may be missing."""
    return np.append(0, rows[STAGE])[:count]


def claimed(episode: Judged, verdicts: Verdicts) -> bool:
    """Return whether the judge would have called this episode a success."""
    verdicts.reset()
    for row, scores in enumerate(episode.scores):
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
        mine = [claimed(each, verdicts) for each in episodes if bool(each.info.success) == success]
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
        f"<!doctype html><meta charset=utf-8><title>Reward classifier</title><style>{STYLE}</style>"
        f"<h1>Reward classifier</h1><p>{len(episodes)} held-out episodes, threshold {verdicts.threshold}, "
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


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--threshold", type=float, default=0.9, help="task.judge.threshold (0.9)")
    parser.add_argument("--rows", type=int, default=2, help="task.judge.rows (2)")
    options = parser.parse_args()
    if not any((options.run / "checkpoints").glob("[0-9]*/manifest.json")):
        raise ConfigError(f"no classifier in {options.run}: give the run_dir of plan=reward_classifier")
    verdicts = Verdicts(threshold=options.threshold, rows=options.rows, stale_s=1.0)
    episodes = list(judged(options.run, options.threshold))
    if not episodes:
        raise ConfigError(f"{options.run} has no judged episode that was held out: give it more episodes")
    target = options.run / "reward.html"
    target.write_text(page(episodes, verdicts))
    print(target)


if __name__ == "__main__":
    main()
