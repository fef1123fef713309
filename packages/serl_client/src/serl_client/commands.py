"""Keeps what an operator here says to the plan until the learner has taken or refused it, also while it is away."""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serl_client.messages import Command

log = logging.getLogger(__name__)

ENDING = ("next", "stop")  # what ends the directive under which it is said


class Commands:
    """Holds commands in their order; one at a time is on its way to the learner.

    ended: the numbers of the directives that the operator has ended, the newest and the one before it, and by which
        command; ((), ""): none.
    The control thread calls `say`, and the network thread all other methods.
    """

    def __init__(self, number: int) -> None:
        """Begin with `number` as the latest of a request; commands have higher ones."""
        self.ended: tuple[tuple[int, ...], str] = (), ""
        self._queue: deque[Command] = deque()
        self._number, self._on_its_way = number, 0

    def say(self, name: str, argument: str, seen: Mapping[str, Any], newest: Mapping[str, Any]) -> None:
        """Queue a command, `stop` once. seen: the directive that its person sees; newest: the one that came last."""
        is_about_seen = name == "next" and seen["phase"] != newest["phase"]  # stop is about the run
        number = (seen if is_about_seen else newest)["number"]
        if name == "next" and not number:
            log.warning("`next` is dropped, because the learner has named no phase yet")
            return
        if name == "stop" and self._is_queued(name):
            return
        if name in ENDING and not (self.ended[1] == "stop" and newest["number"] in self.ended[0]):
            self.ended = (number,), name
        self._queue.append(Command(name, argument, directive=number if name == "next" else 0))

    def to_send(self) -> Command | None:
        """Return the command to send now, whose `request` is its number; `sent` says that it is on its way."""
        return replace(self._queue[0], request=self._number + 1) if self._queue and not self._on_its_way else None

    def sent(self) -> None:
        self._number += 1
        self._on_its_way = self._number

    def done(self, request: int, number: int) -> None:
        """Note that the learner has taken the command of this request as its `number`."""
        if 0 < request == self._on_its_way:
            log.info("the learner has taken %s as number %d", self._queue.popleft().name, number)
            self._on_its_way = 0

    def take_back(self, request: int | None = None) -> str:
        """Forget the command on its way, as the learner has not taken it: it has ended nothing. Return its name.

        request: which it must be; None: whichever it is.
        """
        if not self._on_its_way or request not in (None, self._on_its_way):
            return ""
        name, self._on_its_way = self._queue.popleft().name, 0
        if self.ended[1] == name and not self._is_queued(name):
            self.ended = (), ""
        return name

    def directed(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Note that another directive has come, before anybody else sees it. What is to be heard yet ends that one too,
        if it is of the same phase; `stop`, which is about the run, in any case."""
        numbers, name = self.ended
        is_about_it = name == "stop" or (before["phase"] == now["phase"] and self._is_queued(name))
        if before["number"] in numbers and is_about_it:
            self.ended = (before["number"], now["number"]), name

    def welcomed(self) -> str:
        """Note that the learner may be another process. Return the command to which no answer can come any more.

        A `stop` that it had taken is its own to obey: with another plan it begins anew.
        """
        lost = self.take_back()
        if self.ended[1] == "stop" and not self._is_queued("stop"):
            self.ended = (), ""
        return lost

    def _is_queued(self, name: str) -> bool:
        return any(command.name == name for command in tuple(self._queue))  # `say` appends meanwhile
