"""Says that the episodes of a source come faster than an export writes them."""

import math
from collections.abc import Iterable, Mapping

from serl_client import clock
from serl_client.console import throttled

from serl_launcher.replay.views import EpisodeInfo

log = throttled(__name__)

BEHIND_S = 60.0  # that half of a source waits and more comes, before that is said


class Backlog:
    """Looks at how much of each source waits to be written. capacities: {source: steps}."""

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self._capacities = capacities
        self._behind: dict[str, tuple[float, float]] = {}  # source of which half waits: since when, and how many steps

    def look(self, waiting: Iterable[EpisodeInfo], heads: Mapping[str, int]) -> None:
        """Note which episodes wait, and to which step each source has come."""
        firsts = dict(heads)
        for episode in waiting:
            firsts[episode.source] = min(firsts[episode.source], episode.first)
        for source, head in heads.items():
            self._note(source, head - firsts[source])

    def _note(self, source: str, waits: int) -> None:
        """Say once that more and more of a source waits, until less than half does. What a dataset brought at once only
        becomes less, and is not said."""
        if waits <= self._capacities[source] // 2:
            self._behind.pop(source, None)
            return
        since, before = self._behind.setdefault(source, (clock.monotonic(), waits))
        if clock.monotonic() >= since + BEHIND_S and waits > before:
            self._behind[source] = math.inf, waits
            log.warning(
                "export: half of what source %s holds waits to be written: its episodes come faster. When it is full "
                "its actors wait (archive: lerobot), or episodes leave it without a dataset. Write less (record=none, "
                "plan.sources.%s.archive=none), or record at a lower rate, or fewer or smaller images", source, source
            )  # fmt: skip
