#!/usr/bin/env python
"""Says which inputs (cameras, states) a policy looks at: its loss, and what the loss becomes when an input shows
another moment.

tools/inputs.py --run-dir RUN [--source NAME] [--split held_out] [--windows N]

One batch is drawn from successful episodes, by default those of the evaluations, on which nothing trains. The newest
published weights say their loss of imitation for it: as it is, then with one input after the other shuffled among the
windows of the batch, with the same noise and times. An input that the policy does not look at leaves the loss as it is;
so does one of two that show the same.

Evaluations hold what the policy itself drew. Demonstrations that it never saw say more: a learner collects them last
with
    '+plan.sources.check={capacity: 2000}' \\
    '+plan.phases.check={actors: {mode: teleop, into: check}, until: ["check.episodes >= 25"]}'
and then they are --source check. Of a source that the plan trains on, --split held_out is new to the policy only where
the plan takes it through a view with `split: train`.
"""

import argparse
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Spec
from serl_client.words import check_choice
from torch import Tensor

from serl_launcher.acting.host import PolicyHost
from serl_launcher.config import saved
from serl_launcher.error_log import in_one_sentence
from serl_launcher.policies.base import Policy
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.verdicts import rewards_of_run
from serl_launcher.replay.views import SPLITS, EpisodeInfo, View
from serl_launcher.store import weights
from serl_launcher.store.index import Index
from serl_launcher.training.build import build
from serl_launcher.training.plan import EVAL
from serl_launcher.types import Batch, Window

DRAWN = "drawn"  # the view that the batch comes from
SEED = 0


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's folder; its learner may be running")
    parser.add_argument("--source", default=EVAL, help="where the episodes lie (eval)")
    parser.add_argument("--split", choices=SPLITS, help="only the episodes of this split (replay/views.py)")
    parser.add_argument("--windows", type=int, default=256, help="how many windows the batch has (256)")
    options = parser.parse_args()
    print("\n".join(lines(options.run_dir, options.source, options.split, options.windows)))


def lines(run_dir: Path, source: str, split: str | None, count: int) -> Iterator[str]:
    """What a person reads. Raises ConfigError where there are no weights, or no such episodes."""
    if not (run_dir / "store/index.sqlite").exists() or not (run_dir / "config.yaml").exists():
        raise ConfigError(f"there is no run in {run_dir}: name the folder that a learner was given as run_dir")
    if count < 2:
        raise ConfigError(f"--windows {count}: shuffling needs at least 2")
    with closing(Index(run_dir / "store/index.sqlite")) as index:
        spec = Spec.from_dict(index.meta("spec"))
        policy, version = published(run_dir, spec, index.weights(1))
        sources = opened(run_dir, spec, index, source, split)
    batch = sources.sample(count, Window(policy.offsets), {DRAWN: 1.0})
    if batch is None:
        of_split = f" in the split {split}" if split else ""
        raise ConfigError(
            f"{source} holds no successful episode{of_split} that is as long as this policy needs: "
            "run an evaluation (plan=evaluate), or name another --source"
        )
    yield (
        f"the loss over {len(batch)} windows of {sources.size(DRAWN)[1]} successful episodes of {source}, weights "
        f"{version['version']} ({version['sha256'][:12]})"
    )
    whole = loss(policy, batch)
    yield f"{'every input as it is':40} {whole:8.4f}"
    for what, names in inputs(spec):
        if names.isdisjoint(policy.inputs):
            yield f"{what:40} is no input of this policy"
            continue
        mixed = loss(policy, shuffled(batch, names))
        yield f"{what + ' shuffled':40} {mixed:8.4f}  {change(whole, mixed)}"


def change(before: float, after: float) -> str:
    """By how much a loss rose; in percent, too, where it is above zero (a likelihood may be below)."""
    return f"{after - before:+8.4f}" + (f"  {(after - before) / before:+8.1%}" if before > 0 else "")


def published(run_dir: Path, spec: Spec, versions: list[dict[str, Any]]) -> tuple[Policy, dict[str, Any]]:
    """(the run's policy with the newest weights, which these are). Raises ConfigError where there are none."""
    file = weights.path(run_dir / "weights", versions[0]["sha256"]) if versions else None
    if file is None or not file.exists():
        raise ConfigError(f"{run_dir} has no published weights yet: start its learner")
    host = PolicyHost(build(saved(run_dir), spec), spec, "cpu")
    host.load(versions[0]["version"], file)
    return host.algorithm.acting, versions[0]  # type: ignore[return-value]


def opened(run_dir: Path, spec: Spec, index: Index, source: str, split: str | None) -> ReplayMixture:
    """The run's source, with the view DRAWN of its successful episodes."""
    there = index.sources()
    check_choice(source, there, "source", f"--source {source}")
    view = View((source,), ("successful",), split=split)
    sources = ReplayMixture(
        run_dir / "store", spec, {source: there[source].capacity}, {DRAWN: view}, seed=SEED,
        verdict=rewards_of_run(run_dir),
    )  # fmt: skip
    revision = 0
    while True:
        revision, rows = index.catalog(revision, 1000)
        if not rows:
            return sources
        sources.update([row for row in rows if EpisodeInfo(*row).source == source])


def inputs(spec: Spec) -> list[tuple[str, set[str]]]:
    """(what it is called, its observations): each observation by itself, and all cameras together."""
    cameras = {name for name in spec.observation if name.startswith(IMAGES)}
    together = [("all cameras", cameras)] if len(cameras) > 1 else []
    return [(name, {name}) for name in sorted(spec.observation)] + together


def shuffled(batch: Batch, names: Collection[str]) -> Batch:
    """The batch with these observations from other rows, all of them from the same one."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(SEED))
    mixed: dict[str, Tensor] = {n: v[order] if n in names else v for n, v in batch.observation.items()}
    return replace(batch, observation=mixed)


@torch.no_grad()
def loss(policy: Policy, batch: Batch) -> float:
    return float(policy(batch)[0].mean())


if __name__ == "__main__":
    main()
