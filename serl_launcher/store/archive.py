"""Keeps episodes of a source with `archive: lerobot` in the store until they are exported."""

from collections.abc import Collection, Mapping

from serl_launcher.store.index import Index
from serl_launcher.store.schema import Episode, Source

Kept = tuple[int, int, str]  # first step, first row and id of an episode


class Archive:
    """Knows the oldest episode that each archived source has to keep.

    released: set when something may leave, until somebody sets it back: what was Full may find room now.
    """

    def __init__(self, index: Index, sources: Mapping[str, Source], archived: Collection[str]) -> None:
        self._index, self._sources = index, sources
        self.sources = frozenset(archived) & frozenset(sources)
        self.released = False
        self._look()

    def release(self) -> None:
        """Let those episodes leave that stand in the index, durably, as archived."""
        self._look()
        self.released = True

    def begun(self, episode: Episode) -> None:
        """An episode has begun: it is the oldest to keep if its source has no other."""
        if episode.source in self.sources and self._kept[episode.source] is None:
            self._kept[episode.source] = (episode.first, episode.first_row, episode.id)

    def oldest(self, source: str) -> Kept | None:
        """Return the oldest episode that this source has to keep."""
        return self._kept.get(source)

    def _look(self) -> None:
        self._kept = {name: self._index.first_kept(name, self._sources[name].tail) for name in self.sources}
