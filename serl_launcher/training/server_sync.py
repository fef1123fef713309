"""The trainer's talk with the server: it hears of episodes and commands, and tells what actors are to do."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from serl_client import clock
from serl_client import messages as m
from serl_client.connection import Connection

from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.service.link import ask
from serl_launcher.training.counters import RunCounters
from serl_launcher.training.person_time import PersonTime
from serl_launcher.training.presence import Presence

log = logging.getLogger(__name__)

SYNC_S = 0.005
RETRY_S = 0.2  # after the server said that it cannot
LATE = "`next` was said while the phase before ended by itself: this one goes on"
LIMIT_S = 1.0  # the step limit is told again this often: a server that was restarted does not know it


class ServerSync:
    """Hears from the server which episodes have changed, who is connected, and which commands people gave.

    counters: count the changed episodes; their sources take them. on_ended: called with each episode that ended.
    `commands`: (number, name, argument) of those not carried out yet. `newest_command`: the largest number heard.
    `clients`: what the server's latest status tells of each.
    """

    def __init__(self, link: Connection, counters: RunCounters, on_ended: Callable[[EpisodeInfo], None]) -> None:
        self.link, self._counters, self._on_ended = link, counters, on_ended
        self.presence, self.person = Presence(), PersonTime()
        self.clients: Sequence[Mapping[str, Any]] = ()
        self.commands: list[Sequence[Any]] = []
        self.newest_command = self._revision = 0
        self._has_asked = self._is_behind = False  # a Sync is under way; its latest answer was not all there is
        self._has_news = False
        self._next_sync = 0.0

    def hear(self) -> bool:
        """Take what the server has sent, and ask again. Never waits.

        Returns whether episodes have come or changed since the last call.
        """
        self._receive()
        if self._is_behind:
            self.synchronise()  # or a step would be drawn whose episode the next page sets aside
        if self.link.connected and not self._has_asked and clock.monotonic() >= self._next_sync:
            self._has_asked = self.link.send(m.Sync(self._revision, self.newest_command))
            self._next_sync = clock.monotonic() + SYNC_S
        has_news, self._has_news = self._has_news, False
        return has_news

    def synchronise(self) -> None:
        """Hear of all episodes and commands that the server has."""
        while self._has_asked:  # an answer is under way already
            self.link.wait(SYNC_S)
            self._receive()
        more = True
        while more:
            synced = self.call(m.Sync(self._revision, self.newest_command))
            self._take(synced)
            more = synced.more

    def drop(self, names: Collection[str], why: str) -> None:
        """Drop the commands of these names that were heard and not carried out; log `why` if there are any."""
        self._receive()
        kept = [command for command in self.commands if command[1] not in names]
        if len(kept) < len(self.commands):
            log.warning("%s", why)
        self.commands = kept

    def call(self, message: m.Message) -> Any:
        """Return the server's answer. Where that took a new connection, a Sync under way on the old one was lost."""
        before = self.link.welcome
        answer = ask(self.link, message)
        self._has_asked &= self.link.welcome is before
        return answer

    def set_aside(self, episode: str, reason: str) -> None:
        """Have the server keep an episode out of all views, and hear that it does."""
        self.call(m.SetAside(episode, reason))
        self.synchronise()

    def _receive(self) -> None:
        while (message := self.link.receive()) is not None:
            if isinstance(message, m.Synced):
                self._take(message)
            elif isinstance(message, m.Status):
                self.clients = message.report["clients"]
                self.person.hear(self.clients)
            elif isinstance(message, m.Failed):
                log.warning("server: %s", message.text)
                self._has_asked, self._next_sync = False, clock.monotonic() + RETRY_S
        self._has_asked &= self.link.connected

    @property
    def obeyed(self) -> int:
        """The largest number of a command that was carried out, as were those before it."""
        return self.commands[0][0] - 1 if self.commands else self.newest_command

    def _take(self, synced: m.Synced) -> None:
        self._has_asked, self._is_behind = False, synced.more
        self._revision = synced.revision
        self.presence.update(synced.actors)
        self._has_news |= bool(synced.episodes)
        for episode in self._counters.update(self._counters.sources.update(synced.episodes, synced.heads)):
            self._on_ended(episode)
        new = [command for command in synced.commands if command[0] > self.newest_command]
        if not all(name for _, name, _ in new):
            log.warning(LATE)
        self.commands += [command for command in new if command[1]]
        self.newest_command = max(self.newest_command, *(number for number, _, _ in synced.commands), 0)


class Director:
    """Tells the server the directive and the step limit. `number`, `body`, `limit`: the latest that were told."""

    def __init__(self, server: ServerSync) -> None:
        self._server = server
        self.number, self.body = 0, dict[str, Any]()
        self.limit: int | None = None
        self._welcome: m.Welcome | None = None  # of the connection on which the directive was told
        self._next_limit = 0.0

    def direct(self, body: Mapping[str, Any], limit: int | None) -> None:
        """Tell the directive if it has changed, or if the server may have been restarted."""
        link = self._server.link
        if body != self.body or link.welcome is not self._welcome:
            number = self._server.call(m.Direct(body, limit)).value
            if number != self.number:
                told = dict.fromkeys(filter(None, (body["phase"], body["mode"])))
                log.info("the actors are told: %s", " ".join(told))
            self.number, self.body, self.limit, self._welcome = number, dict(body), limit, link.welcome

    def pace(self, limit: int | None) -> None:
        """Tell the step limit of a paced phase if it has changed, or if LIMIT_S have passed."""
        now = clock.monotonic()
        if self.body.get("paced") and (limit != self.limit or now >= self._next_limit):
            self._server.link.send(m.StepLimit(self.number, limit))
            self.limit, self._next_limit = limit, now + LIMIT_S
