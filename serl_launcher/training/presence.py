"""Says which actors are connected and which have left, in the learner's console and its log."""

from collections.abc import Collection

from serl_client import clock
from serl_client.console import throttled

log = throttled(__name__)

MOST = 8  # actors that have left and are still named


class Presence:
    """Logs which actors have left and which are back. As a text: who is connected, and who left when."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self._left: dict[str, float] = {}  # name: when (seconds, time.monotonic()), the latest last

    def update(self, actors: Collection[str]) -> None:
        """actors: the names of those that are connected now."""
        if list(actors) == self.here:
            return
        for name in actors:
            if self._left.pop(name, None) is not None:
                log.info("actor %s is back", name)
        for name in self.here:
            if name not in actors:
                self._left[name] = clock.monotonic()
                log.info("actor %s has left", name)
        while len(self._left) > MOST:
            del self._left[next(iter(self._left))]
        self.here = list(actors)

    def __str__(self) -> str:
        now = clock.monotonic()
        left = [f"{name} left {now - since:.0f} s ago" for name, since in self._left.items()]
        start = "start one with run_actor.sh" if left else "none yet: start one with run_actor.sh"
        return "; ".join([", ".join(self.here), *left] if self.here else [*left, start])
