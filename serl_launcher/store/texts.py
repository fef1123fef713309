"""Bounds how many different texts a key may bring, because the index and the learner's memory keep each of them."""

from serl_client.errors import Refused

MOST = 20_000


class Texts:
    """The different texts of each key: its actors, outboxes, sessions, tasks, judges, why records are lost, and the
    episodes that it has judged before they came.

    Those of its sessions are known from the start, the others since this server began. Without keys nobody is counted.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, set[int]] = {}  # by the key's name

    def note(self, key: str, *texts: str) -> None:
        if key:
            self._hashes.setdefault(key, set()).update(map(hash, texts))

    def takes(self, key: str, *texts: str) -> bool:
        """Note these texts and return True; note nothing and return False where they would be too many."""
        new = set(map(hash, texts)) - (known := self._hashes.get(key, set()))
        has_room = not key or not new or len(known) + len(new) <= MOST
        self.note(key, *texts * has_room)
        return has_room

    def add(self, key: str, *texts: str) -> None:
        """Note these texts. Raises Refused, and notes nothing, where they would be too many."""
        if not self.takes(key, *texts):
            raise Refused(
                f"the key {key} has brought {MOST:,} different names and tasks, and {texts[0]!r:.80} is one more: use "
                "those again, or begin another run_dir"
            )

    def drop(self, key: str, text: str) -> None:
        self._hashes.get(key, set()).discard(hash(text))
