"""Tells clients the state of the run each second, limits their steps, and finds actors that fall silent.

The same look at the clients finds those that have fallen silent, and ends the episodes that they left open.
"""

import math
from collections.abc import Mapping
from typing import Any

from serl_client import clock
from serl_client import messages as m
from serl_client.console import throttled

from serl_launcher.service.failures import DISK
from serl_launcher.service.keeper import StoreKeeper
from serl_launcher.service.peers import Address, Peer
from serl_launcher.store.directives import EVALUATE, ends_run

log = throttled(__name__)

UPDATE_S = 1.0
SILENCE_S = 60.0  # after which the open episode of an actor with a simulated clock is truncated
MISSING_S = 15.0  # until who is silent has left: longer than one large record takes over a slow link
MISSING = 64  # actors that are named as missing: the last ones
NAMED = 8  # actors that are named as those for whom an evaluation is


class StateUpdates:
    """Sends a StateUpdate to all `peers`: when it changes, and every second. `on_silence`: as for Server."""

    def __init__(self, keeper: StoreKeeper, peers: dict[Address, Peer], on_silence: Mapping[str, float]) -> None:
        self._keeper, self._peers, self._on_silence = keeper, peers, on_silence
        self.allowance: tuple[int, int | None] = (0, 0)  # (directive, steps)
        self.is_directed = False  # this learner has given a directive
        self.missing: dict[str, float] = {}  # actor -> when it was last seen
        self._paced: dict[int, int] = {}  # {directive: actors with a limit that it is for}, as counted in this turn
        self._heard: dict[str, float] = {}  # session of an open episode -> when its actor last spoke
        self._next, self._started = 0.0, clock.monotonic()
        self._found = keeper.store.directives.newest if keeper.store else 0  # the directive of before this start

    def send(self) -> None:
        """Tell each client what it does not know, or everything if a second is over."""
        now = clock.monotonic()
        self._paced.clear()
        due = now >= self._next
        if due:
            self._next = now + UPDATE_S
            self.forget(now)
            self.deal()
            self.cut_silent(now)
        state = self.shared()
        for peer in self._peers.values():
            update = self._of(peer, *state)
            if due or update != peer.updated:
                peer.updated = update
                peer.send(update)

    def of(self, peer: Peer) -> m.StateUpdate:
        """Return what is valid for this client now."""
        return self._of(peer, *self.shared())

    def _of(self, peer: Peer, directive: dict[str, Any], weights: dict[str, Any]) -> m.StateUpdate:
        if because := self._because(directive, peer):
            mode = directive["mode"] if self._is_for(directive["number"], peer) else "idle"
            directive = {**directive, "mode": mode, "because": because}
        return m.StateUpdate(
            directive, weights, self.step_limit(peer), self._keeper.degraded or peer.waits_for or peer.was_cut
        )

    def came(self, peer: Peer) -> None:
        """Count a client that has just become one of the peers."""
        self.missing.pop(peer.hello.actor, None)
        self._paced.clear()

    def deal(self) -> None:
        """Let those who are here run an evaluation that is for nobody of them: who was to run it has left.

        After a start of this server, those who were to run it have MISSING_S to connect again.
        """
        if (store := self._keeper.store) is None or self._keeper.degraded:
            self._started = clock.monotonic()  # until then nobody could connect again
            return
        if store.directives.newest == self._found and clock.monotonic() < self._started + MISSING_S:
            return
        try:
            store.deal(self.here)
        except DISK as error:
            self._keeper.degrade(error)

    def _is_for(self, number: int, peer: Peer) -> bool:
        return self._keeper.store is None or self._keeper.store.directives.is_for(number, peer.hello.actor)

    def _because(self, directive: Mapping[str, Any], peer: Peer) -> str:
        """Return why this actor makes no steps under this directive; empty: nothing hinders it."""
        if not directive or peer.owner is None or peer.hello.role != "actor":  # an importer follows no directive
            return ""
        if directive.get("mode") == "teleop" and not peer.hello.has_operator:
            return "it has no operator"
        if directive.get("policy", "trained") != "trained" and not peer.hello.paced:
            return "its clock is real, and the actions are random"
        if not self._is_for(directive["number"], peer):
            assert self._keeper.store is not None
            if directive["mode"] != EVALUATE:
                return "it only evaluates"
            if directive.get("by"):
                return f"this evaluation is by {directive['by']:.40} alone"
            dealt = self._keeper.store.directives.dealt[directive["number"]]
            others = f" and {len(dealt) - NAMED} others" if len(dealt) > NAMED else ""
            names = ", ".join(f"{name:.40}" for name in dealt[:NAMED]) or "nobody yet"
            return f"it came after this evaluation had begun, which is for {names}{others}"
        return ""

    @property
    def here(self) -> set[str]:
        """The actors that are connected, without the learner's own."""
        peers = (peer for peer in self._peers.values() if peer.owner is not None)
        return {peer.hello.actor for peer in peers if peer.hello.role == "actor"}

    def shared(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the directive and the newest weights, as in StateUpdate; empty where there are none."""
        store = self._keeper.store
        if store is None:
            return {}, {}
        newest, number = store.newest_weights, store.directives.newest
        weights = {key: newest[key] for key in ("version", "sha256", "size")} if newest else {}
        directive = {"number": number, **store.directives[number]} if number else {}
        if directive.get("mode") == "stop" and not self.is_directed:
            directive = {}  # the end of an earlier run: what this one will do is not said yet
        return directive, weights

    @property
    def is_over(self) -> bool:
        """Whether this learner has told its actors that the plan has ended."""
        return self.is_directed and ends_run(self.shared()[0])

    def step_limit(self, peer: Peer) -> int | None:
        """How many steps this peer's session may have made in all; None: no limit.

        Each paced actor may make an equal share of what is left, and one at least: so together they may run ahead of it
        by less than what was left, and nobody waits for one that stands still.
        """
        store = self._keeper.store
        if store is None or not peer.hello.paced:
            return None
        number = store.directives.newest
        if not number or not store.directives[number].get("paced"):
            return None
        directive, steps = self.allowance
        if directive == number and steps is None:
            return None
        session = store.sessions.get(peer.hello.session)
        made = session.steps if session else 0  # None: thousands have said Hello since, and it has brought nothing
        if directive != number or steps is None:
            return made  # the learner has not said yet how far we may go
        left = max(0, steps - store.phase_steps.get(store.directives[number]["phase"], 0))
        if (paced := self._paced.get(number)) is None:
            paced = sum(other.hello.paced and self._is_for(number, other) for other in self._peers.values())
            self._paced[number] = paced
        return made + -(-left // max(1, paced))

    def forget(self, now: float) -> None:
        """Forget the clients that have been silent for MISSING_S."""
        for address, peer in list(self._peers.items()):
            if peer.hello.role != "learner" and now - peer.seen > MISSING_S:
                log.warning("%s %s is silent", peer.hello.role, peer.hello.actor)
                self.missing[peer.hello.actor] = peer.seen
                del self._peers[address]
        while len(self.missing) > MISSING:
            del self.missing[next(iter(self.missing))]

    def cut_silent(self, now: float) -> None:
        """Truncate the episodes that silent actors left open, where nobody is to come back for them."""
        store = self._keeper.store
        if store is None or self._keeper.degraded:
            return
        for peer in self._peers.values():
            self._heard |= dict.fromkeys(peer.living, peer.seen)
        episodes = list(store.episodes.open.values())
        self._heard = {episode.session: self._heard.get(episode.session, now) for episode in episodes}
        for episode in episodes:
            by_clock = SILENCE_S if store.sessions[episode.session].simulated else math.inf
            silent = now - self._heard[episode.session]
            if silent >= self._on_silence.get(episode.source, by_clock):
                log.warning("%s is truncated, as %s was silent for %.0f s", episode.id, episode.actor, silent)
                store.episodes.cut(episode.session)
