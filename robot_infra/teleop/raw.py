"""Reads fixed-size records of a device file (a joystick, a HID) without waiting: the base of devices with axes."""

import os

from serl_client.errors import ConfigError, RobotFault

MOST = 64  # records of one reading


class RawDevice:
    """Reads the device file or pipe at `path`, and opens it again after it was unplugged.

    size: bytes of a record at most. Raises ConfigError with `advice` if it cannot be opened.
    """

    def __init__(self, path: str, size: int, advice: str) -> None:
        self.path, self._size = path, size
        try:
            self._descriptor: int | None = self._open()
        except OSError as error:
            raise ConfigError(f"cannot open {path}: {error.strerror}; {advice}") from None

    def records(self) -> list[bytes]:
        """Return the records that have come, one for each read: a HID gives one report at a time."""
        found: list[bytes] = []
        while len(found) < MOST and (data := self._next()):
            found.append(data)
        return found

    def forget(self, *, hands_back: bool) -> None:
        """Do nothing: an axis that is deflected counts from now on."""

    def hand_over(self, *, to_person: bool) -> None:
        """Do nothing: it does not move by itself."""

    def close(self) -> None:
        """Give the file back; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _next(self) -> bytes:
        """Return what has come since the last call; empty: nothing. Raises RobotFault if the device is gone."""
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            data = os.read(self._descriptor, self._size)
        except BlockingIOError:
            return b""
        except OSError as error:
            self.close()
            raise self._gone(error.strerror or "") from None
        if not data:
            self.close()
            raise self._gone("it was closed")
        return data

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def rest(self) -> None:
        """Forget what is deflected and pressed: the device is gone, and tells nothing of it when it comes back."""

    def _gone(self, why: str) -> RobotFault:
        self.rest()
        return RobotFault(f"the device {self.path} is gone ({why}), so nobody could take over: connect it", "operator")
