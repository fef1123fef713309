#!/usr/bin/env python
"""Looks into a run's store: `show RUN` says what lies in it, `verify RUN` reads every step back and checks it.

The learner may be running: what is evicted meanwhile is passed over. If it starts meanwhile, `verify` begins anew.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from serl_client.errors import ConfigError
from serl_client.names import cleaned
from serl_client.spec import Spec

from serl_launcher.error_log import in_one_sentence
from serl_launcher.store import layout
from serl_launcher.store.aside import LEARNER, reason_of
from serl_launcher.store.creation import INDEX, is_there
from serl_launcher.store.files import check_sizes
from serl_launcher.store.index import Index
from serl_launcher.store.schema import Source


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("show", "verify"))
    parser.add_argument("run", type=Path, help="the run's folder")
    options = parser.parse_args()
    folder = options.run / "store"
    if not is_there(folder):
        raise ConfigError(f"there is no store in {options.run}")
    look = {"show": show, "verify": verify}[options.command]
    was_written, failed = is_written(folder), None
    try:
        bad = look(folder, Index(folder / INDEX))
    except ConfigError as error:
        bad, failed = 1, error
    if bad and not was_written and is_written(folder):  # the index was read as a file that nobody changes
        print("a learner has started meanwhile, whose writing may look like damage: all is read again")
        bad, failed = look(folder, Index(folder / INDEX)), None
    if failed is not None:
        raise failed
    sys.exit(1 if bad else 0)


def is_written(folder: Path) -> bool:
    """Whether a learner has the index open, or was killed: a log lies beside it then."""
    return folder.joinpath(f"{INDEX}-wal").exists()


def show(folder: Path, index: Index) -> int:
    """Sources, actors, and the episodes that are set aside, with the reasons."""
    print(f"run {index.meta('run')}")
    for source in index.sources().values():
        print(f"source {source.name}: steps [{source.tail:,}, {source.head:,}) of {source.capacity:,}")
    lost = index.lost_counts()
    for session in index.sessions().values():
        state = "closed" if session.closed else f"next record {session.expected}"
        damage = f", {lost[session.session]} records lost on its disk" if session.session in lost else ""
        print(cleaned(f"actor {session.actor}, session {session.session[:8]}: {state}{damage}"))
    tails = {source.name: source.tail for source in index.sources().values()}
    for episode in index.discarded_by(LEARNER):
        where = f"in {episode.source}" if episode.first >= tails[episode.source] else "no longer in the store"
        print(cleaned(f"set aside {episode.id}, {episode.steps} steps {where}: {reason_of(episode)}"))
    return 0


def verify(folder: Path, index: Index) -> int:
    """How many things are not as they were acknowledged; each is said in one sentence."""
    bad = 0
    for sentence in index.damaged_rows():
        print(cleaned(f"{folder / INDEX}: {sentence} is damaged"))
        bad += 1
    for source in index.sources().values():
        if sentences := list(unreadable(folder, index, source)):
            print(*sentences, sep="\n")
            bad += len(sentences)
            continue
        for number in damaged(folder, index, source):
            print(f"source {source.name}, step {number}: damaged")
            bad += 1
        print(f"source {source.name}: {source.head - source.tail:,} steps checked")
    return bad


def unreadable(folder: Path, index: Index, source: Source) -> Iterator[str]:
    """Why the steps of a source cannot be looked at."""
    try:
        check_sizes(folder / source.name, layout.Layout(Spec.from_dict(index.meta("spec")), source.capacity))
    except ConfigError as error:
        yield f"source {source.name}: {error}"
        return
    published = int(layout.published(folder / source.name)[1])
    with closing(Index(folder / INDEX)) as now:  # it may have gone on, also if nobody was there when we began
        known = now.sources()[source.name].head
    if published > known:
        yield f"source {source.name}: {published:,} steps were published, and its index knows {known:,}: one is damaged"


def damaged(folder: Path, index: Index, source: Source) -> Iterator[int]:
    """The numbers of a source's steps whose content is not what was acknowledged."""
    files = layout.Layout(Spec.from_dict(index.meta("spec")), source.capacity)
    steps, rows = files.steps(folder / source.name), files.observations(folder / source.name)
    words = layout.published(folder / source.name)
    for number in range(source.tail, source.head):
        record = steps[number % files.capacity].copy()
        seen = [record["row"], *([record["final_row"]] if record["final_row"] >= 0 else [])]
        columns = (rows[name][row % files.rows] for row in seen for name in sorted(rows))
        is_whole = record["number"] == number and record["checksum"] == layout.checksum(record, columns)
        if not is_whole and number >= int(words[0]):  # else it was evicted while we read
            yield number


if __name__ == "__main__":
    main()
