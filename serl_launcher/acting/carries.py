"""Remembers the recurrent state of a policy (its carry) from one request of a connection to the next."""

from collections import Counter
from collections.abc import Sequence

import torch

from serl_launcher.types import Carry

REMEMBERED = 1024  # connections whose carry is kept


class Carries:
    """Keeps one carry per connection, at most REMEMBERED in all.

    If there are more, one is forgotten: of the owner with the most carries, the one that was not used for longest. So a
    key that opens ever new connections displaces only its own carries.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[str, Carry]] = {}  # by connection: (owner, carry); the latest used comes last

    def __contains__(self, connection: bytes) -> bool:
        return connection in self._kept

    def forget(self, connection: bytes) -> None:
        self._kept.pop(connection, None)

    def stacked(self, connections: Sequence[bytes]) -> Carry:
        """Return the carries of these connections as one of a batch, [B, ...]."""
        return _stacked([self._kept[connection][1] for connection in connections])

    def keep(self, connection: bytes, owner: str, carry: Carry, row: int) -> None:
        """Keep row `row` of a batch's carry. owner: the name of the connection's key."""
        self.forget(connection)
        self._kept[connection] = owner, _at(carry, row)
        while len(self._kept) > REMEMBERED:
            ((most, _),) = Counter(owner for owner, _ in self._kept.values()).most_common(1)
            self.forget(next(each for each, (owner, _) in self._kept.items() if owner == most))


def _stacked(carries: Sequence[Carry]) -> Carry:
    first = carries[0]
    if isinstance(first, dict):
        return {name: _stacked([carry[name] for carry in carries]) for name in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_stacked(parts) for parts in zip(*carries, strict=True))
    return torch.stack(list(carries))


def _at(carry: Carry, i: int) -> Carry:
    if isinstance(carry, dict):
        return {name: _at(part, i) for name, part in carry.items()}
    if isinstance(carry, (tuple, list)):
        return type(carry)(_at(part, i) for part in carry)
    return carry[i].clone()  # a view would keep the whole batch
