"""The lives of actors (epochs) that a store knows: in which order they came, whose they are, and which are over.

An epoch belongs to the key that named it first. One without a record is known only while it is one of the latest, so
that whoever says Hello again and again fills neither memory nor disk.
"""

from collections.abc import Collection, Iterable, Iterator

from serl_client.errors import Refused
from serl_client.keys import owns

from serl_launcher.store.index import Epoch

EMPTY = 4096  # epochs without a record that are known: the latest


class Epochs:
    """`all` is {epoch: Epoch}, `changed` those of them that a commit has to write, `forgotten` those it deletes."""

    def __init__(self, known: dict[str, Epoch]) -> None:
        self.all = known
        self.changed: dict[str, Epoch] = {}
        self.forgotten: set[str] = set()
        self._position = max((state.position for state in known.values()), default=-1) + 1
        self._empty: dict[str, None] = {}
        self._living: dict[tuple[str, str], dict[str, None]] = {}  # the open ones of an actor's outbox
        self._named: dict[str, set[str]] = {}  # how an epoch's episodes are called, up to their number: its actors
        for state in known.values():
            self._enter(state)

    def committed(self) -> None:
        self.changed, self.forgotten = {}, set()

    def hello(
        self, actor: str, outbox: str, epoch: str, earlier: Iterable[str], owner: str, *, simulated: bool
    ) -> None:  # fmt: skip
        """Make these epochs known. Raises Refused, and changes nothing, when one is not this key's, or is over."""
        names = [*earlier, epoch]
        for state in (self.all[name] for name in names if name in self.all):
            if state.outbox != outbox or not _owned(state, owner):
                raise Refused(f"epoch {state.epoch} belongs to another actor's outbox, or to another key")
        if epoch in self.all and self.all[epoch].closed:
            raise Refused(
                f"epoch {epoch} is over: another client named {actor} has connected since; start this one again"
            )
        for name in names:
            if name not in self.all:
                state = Epoch(name, self._position, actor, outbox, simulated=simulated, owner=owner)
                self.all[name] = self.changed[name] = state
                self.forgotten.discard(name)
                self._position += 1
                self._enter(self.all[name])
        while len(self._empty) > EMPTY:
            self._forget(next(iter(self._empty)))

    def taken(self, state: Epoch) -> None:
        """A record of this epoch was staged."""
        self._empty.pop(state.epoch, None)
        self.changed[state.epoch] = state

    def close(self, epoch: str) -> None:
        state = self.changed[epoch] = self.all[epoch]
        state.closed = True
        self._living.get((state.outbox, state.actor), {}).pop(epoch, None)

    def over(self, epoch: str, held: Collection[str]) -> list[str]:
        """The open epochs of the same outbox that came before this one, but for those that are `held`."""
        now = self.all[epoch]
        living = self._living.get((now.outbox, now.actor), {})
        return [name for name in living if self.all[name].position < now.position and name not in held]

    def actors_of(self, episode: str) -> set[str]:
        """Who names episodes like this (actor-epoch-number); empty: anybody may."""
        return set().union(*(self._named.get(begin, ()) for begin in _beginnings(episode)))

    def _enter(self, state: Epoch) -> None:
        if not state.expected:
            self._empty[state.epoch] = None
        if not state.closed:
            self._living.setdefault((state.outbox, state.actor), {})[state.epoch] = None
        self._named.setdefault(_beginning(state), set()).add(state.actor)

    def _forget(self, epoch: str) -> None:
        state = self.all.pop(epoch)
        del self._empty[epoch]
        self.changed.pop(epoch, None)
        self.forgotten.add(epoch)
        living, named = (state.outbox, state.actor), _beginning(state)
        if epochs := self._living.get(living):
            epochs.pop(epoch, None)
            if not epochs:
                del self._living[living]
        if actors := self._named.get(named):
            actors.discard(state.actor)
            if not actors:
                del self._named[named]


def _owned(state: Epoch, owner: str) -> bool:
    """Whether this key may go on with an epoch; one that came without keys is that of the key of its actor's name."""
    return not owner or state.owner == owner or (not state.owner and owns(owner, state.actor))


def _beginning(state: Epoch) -> str:
    return f"{state.actor}-{state.epoch[:8]}-"


def _beginnings(name: str) -> Iterator[str]:
    return (name[: i + 1] for i, letter in enumerate(name) if letter == "-")
