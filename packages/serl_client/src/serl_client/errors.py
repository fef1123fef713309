"""Defines the errors between an actor and a learner; every text says what to do about it.

RetakeError                 an error that one clear sentence explains
|-- ConfigError             what was asked for cannot be built: a wrong value, a missing extra, a full disk
|-- RobotFault              the robot, a sensor or its link failed
|-- MessageError            bytes that are no message
`-- TrainerError            the other side
    |-- Timeout             no answer in time
    |-- Disconnected        nobody listens there, or the link broke
    |-- VersionMismatch     the two sides speak different protocols
    |-- Refused             the learner took nothing: another run or Spec, a bad record
    |   |-- Replaced        another client of this name has connected since
    |   `-- Ended           this learner has ended
    `-- ServerFailed        the learner failed while it answered
"""

import errno

from serl_client.names import cleaned

MOST = 4000  # characters of an error's text
MOST_QUOTED = 300  # characters of what others' code says of its error


class RetakeError(Exception):
    """Explains an error to a person; programs print it without a traceback and exit with 1.

    The text is cut after MOST characters, and cleaned, because it may quote what a peer has sent.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(cleaned(text if len(text) <= MOST else f"{text[:MOST]} ...", "\n"))


class ConfigError(RetakeError):
    """Says that a setting, a file or an option cannot be used."""


class RobotFault(RetakeError):
    """Says that the robot, a sensor or its link failed. It was told to hold; a person must look before it moves again.

    kind: what failed in one word, such as `collision`, `estop`, `link`, `sensor`, `tracking` or `guard`.
    """

    def __init__(self, text: str = "", kind: str = "fault") -> None:
        super().__init__(text)
        self.kind = kind


class TrainerError(RetakeError):
    """The other side of the wire did not do what was asked."""


class Timeout(TrainerError):
    """No answer in time."""


class Disconnected(TrainerError):
    """Nobody listens at that address, or the link broke."""


class VersionMismatch(TrainerError):
    """The two sides speak different protocol versions."""


class Refused(TrainerError):
    """The learner took nothing of what was sent; nothing was deleted on this side."""


class Replaced(Refused):
    """Another client of this name has connected since; nothing was deleted on this side."""


class Ended(Refused):
    """The learner has ended. A client to which it has never given a directive ends, too."""


class ServerFailed(TrainerError):
    """The learner failed while it handled the request."""


class MessageError(RetakeError):
    """Says that bytes are no message: malformed, oversized or of an unknown kind. Nothing of them is used."""


KINDS = {
    kind.__name__: kind
    for kind in (TrainerError, Timeout, Disconnected, VersionMismatch, Refused, Replaced, Ended, ServerFailed)
}


TRANSIENT = (
    errno.EIO, errno.EBUSY, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT,
    errno.ENOSPC, errno.EDQUOT,
)  # fmt: skip


def last_line(error: BaseException) -> str:
    """Return an exception as its traceback ends, on one line: its kind, and the first words of its text."""
    words = " ".join(str(error).split())
    return type(error).__name__ + f": {words[:MOST_QUOTED]}" * bool(words)


def is_machines(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, is the machine's own: another try may go well."""
    while error is not None:
        if isinstance(error, MemoryError | ImportError) or getattr(error, "errno", None) in TRANSIENT:
            return True
        error = error.__cause__ or error.__context__
    return False


def full_disk(error: BaseException | None) -> OSError | None:
    """Return the OSError of a full disk that caused an error, or None. torch.save wraps it in another error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__ or error.__context__
    return None
