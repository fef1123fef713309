"""How long something may take on a machine that others load: a clock that goes slowly while processes wait for a
processor."""

import glob
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.2
LEAST = 0.02  # of the time that passes counts in any case: else processes that never rest would be waited for for ever


class Patience:
    """`seconds` that some processes had for themselves; `pids` says which they are now."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self.seconds = 0.0
        self._pids, self._at, self._before = pids, time.monotonic(), _delays(pids())

    def tick(self) -> float:
        """Look at the processes again, if it is time; the seconds so far."""
        if (passed := time.monotonic() - self._at) >= LOOK_S:
            now = _delays(self._pids())
            waited = sum(delay - self._before.get(thread, 0.0) for thread, delay in now.items())
            self.seconds += max(LEAST * passed, passed - waited)
            self._at, self._before = self._at + passed, now
        return self.seconds


def _delays(pids: Iterable[int]) -> dict[str, float]:
    """Seconds that each thread of these processes has waited for a processor, as Linux counts them."""
    found = {}
    for pid in pids:
        for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):  # Path.glob breaks where one has ended
            with suppress(OSError):  # it has just ended
                found[path] = int(Path(path).read_text().split()[1]) / 1e9
    return found
