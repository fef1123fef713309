"""Tracks the sessions (lives) of actors: in which order they came, whose they are, and which are over.

A session belongs to the key that named it first. Of the sessions without a record only the latest are kept, so that a
client that says Hello again and again fills neither memory nor disk.
"""

import sys
from collections.abc import Collection, Iterable, Iterator

from serl_client.errors import Refused, Replaced
from serl_client.keys import owns

from serl_launcher.store.schema import Session
from serl_launcher.store.texts import Texts

EMPTY = 4096  # sessions without a record that are kept: the latest


class Sessions:
    """`all` is {session: Session}, `changed` those of them that a commit has to write, `forgotten` those it deletes."""

    def __init__(self, sessions: dict[str, Session]) -> None:
        self.all = sessions
        self.changed: dict[str, Session] = {}
        self.forgotten: set[str] = set()
        self.texts = Texts()
        self._position = max((state.position for state in sessions.values()), default=-1) + 1
        self._empty: dict[str, None] = {}
        self._living: dict[tuple[str, str], dict[str, None]] = {}  # the open ones of an actor's outbox
        self._named: dict[str, set[str]] = {}  # how a session's episodes are called, up to their number: its actors
        for state in sessions.values():
            self._enter(state)

    def committed(self) -> None:
        self.changed, self.forgotten = {}, set()

    def hello(
        self, actor: str, outbox: str, session: str, earlier: Iterable[str], *, owner: str = "", simulated: bool = False
    ) -> None:
        """Add these sessions. owner: the key that names them; "": there are no keys. simulated: the clock of the actor.
        The store's next commit makes them durable.

        Raises Refused, and changes nothing, for a session of another key or outbox, if `session` is over, and if the
        key has brought too many names.
        """
        actor, outbox = sys.intern(actor), sys.intern(outbox)  # long, and the same in thousands of lives
        names = [*earlier, session]
        for state in (self.all[name] for name in names if name in self.all):
            if state.outbox != outbox or not _owned(state, owner):
                raise Refused(f"session {state.session} belongs to another actor's outbox, or to another key")
        if session in self.all and self.all[session].closed:
            raise Replaced(
                f"session {session} is over: another client named {actor} has connected since; start this one again"
            )
        self.texts.add(owner, *(name for name in names if name not in self.all), actor, outbox)
        for name in names:
            if name not in self.all:
                state = Session(name, self._position, actor, outbox, simulated=simulated, owner=owner)
                self.all[name] = self.changed[name] = state
                self.forgotten.discard(name)
                self._position += 1
                self._enter(self.all[name])
        while len(self._empty) > EMPTY:
            self._forget(next(iter(self._empty)))

    def note_record(self, state: Session) -> None:
        """Note that a record of this session was staged."""
        self._empty.pop(state.session, None)
        self.changed[state.session] = state

    def close(self, session: str) -> None:
        state = self.changed[session] = self.all[session]
        state.closed = True
        self._living.get((state.outbox, state.actor), {}).pop(session, None)

    def over(self, session: str, held: Collection[str]) -> list[str]:
        """Return the open sessions of the same outbox that came before this one, without those that are `held`."""
        now = self.all[session]
        living = self._living.get((now.outbox, now.actor), {})
        return [name for name in living if self.all[name].position < now.position and name not in held]

    def actors_of(self, episode: str) -> set[str]:
        """Return the actors whose episodes have names like this (actor-session-number); empty: anybody may begin it."""
        return set().union(*(self._named.get(begin, ()) for begin in _beginnings(episode)))

    def _enter(self, state: Session) -> None:
        self.texts.note(state.owner, state.session, state.actor, state.outbox)
        if not state.expected:
            self._empty[state.session] = None
        if not state.closed:
            self._living.setdefault((state.outbox, state.actor), {})[state.session] = None
        self._named.setdefault(_beginning(state), set()).add(state.actor)

    def _forget(self, session: str) -> None:
        state = self.all.pop(session)
        self.texts.drop(state.owner, session)
        del self._empty[session]
        self.changed.pop(session, None)
        self.forgotten.add(session)
        living, named = (state.outbox, state.actor), _beginning(state)
        if sessions := self._living.get(living):
            sessions.pop(session, None)
            if not sessions:
                del self._living[living]
        if actors := self._named.get(named):
            actors.discard(state.actor)
            if not actors:
                del self._named[named]


def _owned(state: Session, owner: str) -> bool:
    """Return whether this key may go on with a session. One that came without keys belongs to its actor's name."""
    return not owner or state.owner == owner or (not state.owner and owns(owner, state.actor))


def _beginning(state: Session) -> str:
    return f"{state.actor}-{state.session[:8]}-"


def _beginnings(name: str) -> Iterator[str]:
    return (name[: i + 1] for i, letter in enumerate(name) if letter == "-")
