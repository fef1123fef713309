#!/usr/bin/env python
"""Checks, merges and uploads LeRobot datasets, and exports those of a run.

check PATH           a LeRobot dataset, a shard of ours, or a run's folder: black, saturated and frozen images, ends,
                     outcomes, actions, times; `wrong` is what a policy would learn and what never happened, and then
                     the exit status is 1; a `note` is worth knowing, and normal
merge OUT SHARD...   one LeRobot dataset of several, in that order, in the new folder OUT
export RUN           whatever the run's store holds and no dataset yet, as LeRobot datasets under RUN/datasets/<source>;
                     episodes that were left out are tried again; --plain OUT: then one dataset OUT of them, without our
                     columns, which LeRobot merges with the dataset that the run began with
upload PATH NAME     a LeRobot dataset to the hub, as NAME=user/dataset, with the token of `hf auth login`; nobody else
                     sees it without --public
robomimic RUN OUT    the closed episodes of a run, as the file OUT.hdf5 of robomimic
"""

import argparse
import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from serl_client.errors import ConfigError, last_line

from serl_launcher.datasets import lerobot_api, plain, robomimic, shards
from serl_launcher.datasets.export import export_run, imported
from serl_launcher.datasets.inspection import Findings, inspect
from serl_launcher.datasets.reader import Dataset
from serl_launcher.error_log import in_one_sentence
from serl_launcher.sharing import is_shared, keep_private

TELL_S = 2.0  # between two words on how far a merge is
SHOWN = 3  # places that are named of each finding


def parsed() -> argparse.Namespace:
    """Return the words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="look a dataset or a run over")
    check.add_argument("path", type=Path, help="the dataset's folder, or the run's")
    check.add_argument("--frozen", type=int, default=10, help="rows that may show one image while the robot moves (10)")
    merging = commands.add_parser("merge", help="make one dataset of several")
    merging.add_argument("out", type=Path, help="the folder that is made")
    merging.add_argument("shards", type=Path, nargs="+", help="the datasets' folders")
    exporting = commands.add_parser("export", help="make datasets of all that a run holds")
    exporting.add_argument("run", type=Path, help="the run's folder; its learner is stopped, or exports nothing itself")
    exporting.add_argument("--source", action="append", help="this source alone; may be said several times")
    exporting.add_argument("--episodes", type=int, default=10, help="episodes in one dataset (10)")
    exporting.add_argument(
        "--plain", type=Path, metavar="OUT", help="the folder that is made of the run's own episodes"
    )
    exporting.add_argument("--successes", action="store_true", help="in OUT: successful episodes alone")
    uploading = commands.add_parser("upload", help="put a dataset on the hub")
    uploading.add_argument("path", type=Path, help="the dataset's folder")
    uploading.add_argument("name", help="what it is called there: user/dataset")
    uploading.add_argument("--public", action="store_true", help="everybody may see it")
    uploading.add_argument("--replace", action="store_true", help="in place of a dataset that is there under this name")
    writing = commands.add_parser("robomimic", help="write a run's episodes as a robomimic file")
    writing.add_argument("run", type=Path, help="the run's folder")
    writing.add_argument("out", type=Path, help="the file that is made")
    writing.add_argument("--source", help="this source alone")
    writing.add_argument("--like", type=Path, help="a robomimic file of the same robot, whose env_args are kept")
    return parser.parse_args()


@in_one_sentence()
def main() -> None:
    options = parsed()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("serl_launcher.datasets").setLevel(logging.INFO)  # how far it is
    keep_private("run" in options and is_shared(options.run))
    if options.command == "export":
        export(options.run, max(1, options.episodes), options.source, options.plain, options.successes)
        return
    if options.command == "upload":
        print(upload(options.path, options.name, options.public, options.replace))
        return
    if options.command == "robomimic":
        count, steps = robomimic.write(options.run, options.out, options.source, options.like)
        print(f"{options.out}: {count:,} demonstrations, {steps:,} steps")
        return
    if options.command == "check":
        findings = inspect(options.path, options.frozen)
        show(options.path, findings)
        sys.exit(1 if findings.wrong else 0)
    episodes, frames = merge(options.out, options.shards)
    print(f"{options.out}: {episodes:,} episodes, {frames:,} frames of {len(options.shards)} datasets")


def export(run: Path, count: int, sources: Sequence[str] | None, out: Path | None, successes: bool) -> None:
    """Export a run, and say which datasets there are; with `out` make a plain one of those of these sources."""
    folders = export_run(run, count, sources)
    if out is None:
        print(*folders, sep="\n")
        return
    begun = imported(run)
    with quiet():
        made = plain.write(out, [f for f in folders if f.parent.name in (sources or f.parent.name)], begun, successes)
    print(f"{out}: {made.episodes:,} episodes, {made.frames:,} frames")
    if made.failures:
        print(f"{made.failures:,} of them are failures, which no column tells: --successes leaves them out")
    if made.left:
        old = next(words["dataset"] for words in begun.values())
        print(f"{made.left:,} episodes came from a dataset and are not in it: tools/data.py merge ALL {old} {out}")


def upload(path: Path, name: str, is_public: bool, replaces: bool) -> str:
    """Upload a dataset that is whole; return its address. Raises ConfigError if it is none, or the hub refuses it."""
    frames, size = sum(Dataset(path).lengths), sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    kind = "everybody may see it" if is_public else "private"
    print(f"uploading {frames:,} frames, {size / 1e6:,.1f} MB to {name} ({kind})", flush=True)
    return lerobot_api.upload(path, name, private=not is_public, replace=replaces)


def show(path: Path, findings: Findings) -> None:
    """What was found, the worst first."""
    counts = findings.outcomes
    print(
        f"{path}: {findings.episodes:,} episodes, {findings.steps:,} steps; {counts[True]:,} successes, "
        f"{counts[False]:,} failures, {counts[None]:,} without an outcome"
    )
    if not findings.found:
        print("nothing to complain of")
        return
    table = Table("", "what", "how often", "where")
    for (wrong, what), places in sorted(findings.found.items(), key=lambda entry: not entry[0][0]):
        where = ", ".join(places[:SHOWN]) + ", ..." * (len(places) > SHOWN)
        table.add_row("wrong" if wrong else "note", what, str(len(places)), where)
    Console().print(table)


def merge(out: Path, folders: Sequence[Path]) -> tuple[int, int]:
    """(episodes, frames) of the dataset that LeRobot makes of several: written aside, counted, renamed.

    Raises ConfigError when OUT is there, when one is no dataset or is named twice, or when they differ.
    """
    if lacking := shards.missing():
        raise ConfigError(f"merging needs {', '.join(lacking)}: run `. examples/install.sh --extra data` here")
    if out.exists():
        raise ConfigError(f"{out} is there already: name a new folder")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a dataset is named twice: its episodes would count twice")
    datasets = [Dataset(folder) for folder in folders]
    for dataset in datasets[1:]:
        if differing := difference(datasets[0], dataset):
            raise ConfigError(f"{dataset.folder} is of another kind than {folders[0]}: {differing}")
    lengths = [length for dataset in datasets for length in dataset.lengths]
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + shards.PART)
    shards.remove(part)
    try:
        print(f"merging {len(lengths):,} episodes, {sum(lengths):,} frames of {len(folders)} datasets", flush=True)
        with quiet():
            aggregate(part, folders)
        verify(part, datasets)
        shards.place(part, out)
    finally:
        shards.remove(part)
    return len(lengths), sum(lengths)


def difference(first: Dataset, other: Dataset) -> str:
    """What keeps LeRobot from merging the two; empty when nothing does."""
    if first.fps != other.fps:
        return f"{other.fps:g} frames per second, not {first.fps:g}"
    mine, theirs = first.info["features"], other.info["features"]
    names = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    both = [name for name in names if name in mine and name in theirs]
    if units := [name for name in both if mine[name].get("units") != theirs[name].get("units")]:
        said = "; ".join(f"{name} is in {theirs[name].get('units')}, not {mine[name].get('units')}" for name in units)
        return f"{said}. Where one says no unit, write the same `units` into its meta/info.json, if they are the same"
    if not names and first.info.get("robot_type") != other.info.get("robot_type"):
        return "its robot_type is another one"
    return f"{', '.join(names)} differ{'s' * (len(names) == 1)} in shape, type, names or coding" if names else ""


def aggregate(part: Path, folders: Sequence[Path]) -> None:
    import pyarrow as pa

    try:
        lerobot_api.merge(part, folders)
    except (LookupError, ValueError, pa.ArrowException) as error:
        raise ConfigError(
            f"LeRobot cannot merge these datasets ({last_line(error)}): look each over with tools/data.py check"
        ) from None


def verify(part: Path, datasets: Sequence[Dataset]) -> None:
    """Raise an error unless every row is there, with its own images: LeRobot has shown those of other episodes."""
    merged, lengths = Dataset(part), [length for dataset in datasets for length in dataset.lengths]
    if merged.lengths != lengths:
        raise ConfigError(f"LeRobot merged {sum(merged.lengths):,} frames of {sum(lengths):,}: nothing was written")
    called, told = {merged.original(name): name for name in merged.features}, time.monotonic()
    for done, (episode, original) in enumerate(zip(merged, itertools.chain(*datasets), strict=True), 1):
        if time.monotonic() > told + TELL_S or done == len(lengths):
            told = time.monotonic()
            print(f"reading back: episode {done} of {len(lengths)}", flush=True)
        plain.check_same(episode, original, called)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let LeRobot ask nobody on the network, and tell only of what is wrong."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import av.logging
    import datasets

    datasets.disable_progress_bars()
    av.logging.set_libav_level(av.logging.ERROR)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
