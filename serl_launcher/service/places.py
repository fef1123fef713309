"""Shares the places at a door between guests, who proved who they are, and strangers, who have not done so yet."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any


class Places:
    """Gives out the places at one door: `most` to guests, and as many to strangers. Nobody can take them all.

    Where strangers are too many, the address that holds most places loses its oldest one. Where guests are too many,
    the key (without keys: the address) that holds most loses its newest one, and among equals whoever comes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.strangers: dict[Any, str] = {}  # {connection: address}, the oldest first
        self.guests: dict[Any, str] = {}  # {connection: key}, the oldest first

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.strangers, *self.guests])

    def __len__(self) -> int:
        return len(self.strangers) + len(self.guests)

    def knock(self, who: Any, address: str) -> Any:
        """Give a stranger a place. Return who loses a place for it, if anybody does."""
        self.strangers[who] = address
        loser = surplus(self.strangers, self.most)
        self.leave(loser)
        return loser

    def welcome(self, who: Any, key: str) -> Any:
        """Make a stranger a guest. Return who loses a place for it, if anybody does: itself if it stays a stranger."""
        loser = surplus(dict(reversed((self.guests | {who: key}).items())), self.most)
        if loser != who:
            self.leave(who)
            self.leave(loser)
            self.guests[who] = key
        return loser

    def leave(self, who: Any) -> None:
        self.strangers.pop(who, None)
        self.guests.pop(who, None)


def surplus(held: Mapping[Any, str], most: int) -> Any:
    """Return who is one too many of these {who: group}: the first one of the group that holds most. None: they fit."""
    if len(held) <= most:
        return None
    largest = Counter(held.values()).most_common(1)[0][0]
    return next(who for who, group in held.items() if group == largest)
