"""Chooses the random seed of each episode's start, so that training and evaluation never share one."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

TRAINING_SEEDS = 1_000_000_000
EVALUATION_SEEDS = 10_000  # for one session
DEMONSTRATION_SEEDS = 3_000_000_000  # from here on: those of what an operator demonstrates


def alone() -> tuple[int, int]:
    """Return the share of an environment that is the only one of its command."""
    return 0, 1


class Starts:
    """Gives each episode of a session its start. Each directive that evaluates gets the same list of starts.

    share: returns (place, of) of this environment among those of one command that are left. Each does its part of an
        evaluation's episodes, and no more. The first ones to end would be the short ones, and successes are shorter
        than failures.
    """

    def __init__(self, seed: int, session: str, share: Callable[[], tuple[int, int]] = alone) -> None:
        self._seed, self._session, self._share = seed, session, share
        self._begun, self._ended = Counter[int](), Counter[int]()  # evaluation episodes, by the directive's number

    def seed(self, directive: Mapping[str, Any], ordinal: int, number: int) -> int:
        """Return the start of episode `number` of the session, which is the run's session `ordinal`."""
        if directive["mode"] != "evaluate":
            begin = DEMONSTRATION_SEEDS if directive["mode"] == "teleop" else 0
            return begin + training_seed(self._seed, self._session, number)
        self._begun[directive["number"]] += 1
        return evaluation_seed(ordinal, self._begun[directive["number"]] - 1)

    def remain(self, directive: Mapping[str, Any], *, is_heard: bool) -> bool:
        """Return whether this environment has episodes to do under this directive.

        is_heard: the learner is there. It then tells an environment that is alone when it has enough of them.
        """
        place, of = self._share()
        asked = directive.get("episodes")
        if (of == 1 and is_heard) or directive["mode"] != "evaluate" or asked is None:
            return True
        return self._ended[directive["number"]] < len(range(place, asked, of))

    def end(self, directive: Mapping[str, Any]) -> None:
        """Count an episode that has ended under this directive."""
        self._ended[directive["number"]] += 1


def training_seed(seed: int, session: str, number: int) -> int:
    """Return the seed of episode `number` of a session."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{session}/{number}".encode()) % TRAINING_SEEDS


def is_demonstrated(seed: int) -> bool:
    """Return whether an operator demonstrates from this start. A simulation may lay it out as they would."""
    return seed >= DEMONSTRATION_SEEDS


def evaluation_seed(ordinal: int, number: int) -> int:
    """Return the seed of evaluation episode `number` of the run's session `ordinal`; no training episode has it."""
    return TRAINING_SEEDS + ordinal * EVALUATION_SEEDS + number
