#!/usr/bin/env python
"""Says after the fact how an episode ended (success, failure, discard): the latest word of an operator counts.

tools/label.py --run-dir RUN                                    which episodes there are: the newest 20
tools/label.py --run-dir RUN EPISODE success|failure|discard [--ip ADDRESS] [--port PORT] [--key FILE]

The learner must be running. EPISODE is a name from that list, or from the actor's console. The verdict is a record like
those of an actor: it lies in RUN/actors/operator until the learner has acknowledged it, which is when this program
ends. A learner with keys takes it with one of the role operator.
"""

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

from serl_client.errors import ConfigError, TrainerError
from serl_client.names import cleaned
from serl_client.person import VERDICTS
from serl_client.reach import explained

from serl_launcher.error_log import in_one_sentence
from serl_launcher.page.orders import NAME, label, verdict_on
from serl_launcher.service.sockets import address_of
from serl_launcher.sharing import is_shared, keep_private
from serl_launcher.store.index import Index

NEWEST = 20  # episodes that are listed
MANY = 1000  # among which a misspelt name is looked for
ENDS = {True: "success", False: "failure", None: "not judged"}


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episode", nargs="?")
    parser.add_argument("verdict", nargs="?", choices=tuple(VERDICTS))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--ip", help="address of the learner (that with which the run was started)")
    parser.add_argument("--port", type=int, help="its port (that with which the run was started)")
    parser.add_argument("--key", type=Path, help="your key file, for a learner with keys")
    options = parser.parse_args()
    if options.episode and not options.verdict:
        parser.error(f"say what {options.episode} was: {', '.join(VERDICTS)}")
    if not options.episode:
        print("\n".join(map(cleaned, listed(options.run_dir))))
        return
    address = address_of(options.run_dir, options.ip, options.port, options.key)
    try:
        keep_private(is_shared(options.run_dir))
        outcome = verdict_on(options.episode, options.verdict)
        look_up(options.run_dir, options.episode)
        outbox = options.run_dir / "actors" / NAME / "outbox"
        label(address, outbox, outcome, key=options.key)
    except TrainerError as error:
        sys.exit(f"error: {explained(error, address, has_key=options.key is not None)}")
    print(f"{options.episode}: {options.verdict}")


def listed(run_dir: Path) -> Iterator[str]:
    """A line for each of the newest episodes of a run, the newest first. Raises ConfigError where there is none."""
    store = run_dir / "store" / "index.sqlite"
    episodes = Index(store).latest(NEWEST) if store.exists() else []
    if not episodes:
        raise ConfigError(f"there is no episode in {run_dir} on this machine yet; the actor's console shows its names")
    for episode in episodes:
        verdict = "discarded" if episode.discard else ENDS[None if episode.success is None else bool(episode.success)]
        said = f" ({episode.judged_by})" if episode.judged_by else ""
        goes_on = "" if episode.closed else ", goes on"
        yield f"{episode.id:32} {episode.phase:12} {episode.steps:5} steps  {verdict}{said}{goes_on}"


def look_up(run_dir: Path, episode: str) -> None:
    """Raise ConfigError when the run's store lies here and knows no such episode; elsewhere a typing error stays."""
    store = run_dir / "store" / "index.sqlite"
    if not store.exists() or (index := Index(store)).episode(episode) is not None:
        return
    names = [there.id for there in index.latest(MANY)]
    near = difflib.get_close_matches(episode, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"the newest are {', '.join(names[:3]) or 'none'};"
    raise ConfigError(
        f"there is no episode {episode!r} in {run_dir}; {hint} tools/label.py --run-dir {run_dir} lists them"
    )


if __name__ == "__main__":
    main()
