"""The one place where an error becomes the answer that a client gets, here and in the inference process."""

import sqlite3
from dataclasses import dataclass

import zmq
from serl_client import messages as m
from serl_client.console import throttled
from serl_client.errors import MessageError, Refused, RetakeError, ServerFailed, VersionMismatch

from serl_launcher.service.access import AccessControl
from serl_launcher.service.keeper import StoreKeeper
from serl_launcher.service.peers import KeyOwner
from serl_launcher.store.errors import GroupFailed

log = throttled(__name__)

DISK = (OSError, sqlite3.Error, GroupFailed)
BAD = (MessageError, KeyError, TypeError, ValueError)  # errors that a malformed message causes


@dataclass(slots=True)
class Request:
    """One message of a client, and what is known of it so far. identity: the frame that it began with.

    owner: whose key it came with; None before that was looked up, and on the learner's own address. message: None until
    it is decoded.
    """

    identity: zmq.Frame
    owner: KeyOwner | None = None
    message: m.Message | None = None


class Failures:
    """Counts, logs and answers errors. keeper: holds the store that an error of the disk closes, if there is one."""

    def __init__(self, access: AccessControl, keeper: StoreKeeper | None = None) -> None:
        self._access, self._keeper = access, keeper

    def answer(self, request: Request, error: Exception) -> m.Failed:
        """Return what the sender of a request is told of the error that ended its handling."""
        message, text = request.message, str(error)
        if self._keeper is not None and message is not None and isinstance(error, DISK):
            self._keeper.degrade(error)
            return m.Failed("ServerFailed", f"the learner's store fails: {text}")
        if isinstance(error, BAD) or (isinstance(error, Refused) and isinstance(message, m.Push)):
            at_keyboard = isinstance(message, m.Command)  # a person who may not steer is told so, however often
            self._access.blame(request.identity, None if at_keyboard else request.owner, error)
            return m.Failed("Refused", text, final=isinstance(error, Refused) or isinstance(message, m.Hello))
        if not isinstance(error, RetakeError):
            log.error("a message could not be handled", exc_info=error)
            return m.Failed("ServerFailed", "the learner failed on this message; its log says why")
        if isinstance(error, VersionMismatch):
            self._access.refuse("other version", text)
        elif not (message is None or isinstance(error, ServerFailed) or (self._keeper and self._keeper.fatal)):
            self._access.refuse("not taken", text)
        final = isinstance(message, m.Hello | None) and not isinstance(error, ServerFailed)
        return m.Failed(type(error).__name__, text, final)
