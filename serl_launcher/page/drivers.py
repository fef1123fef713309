"""Carries what people drive with from their browsers to the actors, and back what those tell, with previews as JPEGs.

On a thread and a connection of its own, which live while somebody is at the controls: nothing else delays an input.
"""

import io
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from PIL import Image
from serl_client import clock
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.console import throttled
from serl_client.driving import LEAVE, check_drive
from serl_client.errors import MessageError, Refused, RetakeError

log = throttled(__name__)

NAME = "page"
TURN_S = 0.01  # seconds between two looks at what browsers have sent
FAREWELL = 200  # ms for the last messages to leave
IDLE_S = 0.5  # seconds between two looks whether the page ends
WAITING = 64  # inputs of all drivers that wait
MOST = 30  # inputs of one driver within a second; more are not passed on
FIELDS = {"actor": str, "number": int, "seen": int, "press": str, "motion": dict, "gripper": int}


class _Seat:
    """One browser at the controls. told: what its page shows."""

    def __init__(self, drive: m.Drive) -> None:
        self.drive, self.images = drive, dict[str, bytes]()
        self.times: deque[float] = deque(maxlen=MOST)  # when its latest inputs came
        self.told: dict[str, Any] = {"driver": drive.driver, "holder": "", "text": "", "number": 0, "heard": 0}
        self.frame = 0  # the number of the newest update that had images


class Drivers:
    """Passes inputs on, newest wins. local: the learner's own address. Its methods are called by one thread."""

    def __init__(self, local: str) -> None:
        self._local = local
        self._seats: dict[str, _Seat] = {}
        self._inputs: deque[m.Drive] = deque(maxlen=WAITING)
        self._thread: threading.Thread | None = None
        self._wanted, self._is_closing = threading.Event(), False

    def drive(self, guest: str, ask: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take an input of a browser, and return at once what its actor told last: a DriverUpdate's fields, and the
        names of `cameras` that have a preview, the newest of update `frame`. Raises MessageError for what is no input,
        and Refused where no learner runs."""
        if not self._local:
            raise Refused("no learner runs here: start it, then take over again")
        if wrong := [name for name, kind in FIELDS.items() if type(ask.get(name)) is not kind]:
            raise MessageError(f"{wrong[0]} of an input is missing, or of another type")
        drive = m.Drive(driver=f"{NAME}/{guest}", **{name: ask[name] for name in FIELDS})
        check_drive(drive)
        seat = self._seats.setdefault(guest, _Seat(drive))
        if drive.actor != seat.drive.actor:
            raise MessageError("a connection drives one actor: open another one")
        now = clock.monotonic()
        if len(seat.times) < MOST or now > seat.times[0] + 1.0:
            seat.drive = drive
            seat.times.append(now)
            self._send(drive)
        return {**seat.told, "frame": seat.frame, "cameras": list(seat.images)}

    def image(self, guest: str, camera: str) -> bytes | None:
        """Return the newest preview of a camera as a JPEG; None: there is none."""
        return self._seats[guest].images.get(camera) if guest in self._seats else None

    def leave(self, guest: str) -> None:
        """Let go for a browser that has closed."""
        if seat := self._seats.pop(guest, None):
            last = seat.drive
            self._send(m.Drive(last.actor, last.driver, last.number + 1, last.seen, LEAVE, {}, 0))

    def close(self) -> None:
        """Let go for all, and wait until that is said."""
        for guest in list(self._seats):
            self.leave(guest)
        self._is_closing = True
        if self._thread:
            self._thread.join()

    def _send(self, drive: m.Drive) -> None:
        self._inputs.append(drive)
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="drivers", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._inputs or not self._is_closing:
            if not self._wanted.wait(IDLE_S):
                continue
            self._wanted.clear()
            try:
                with Connection(self._local, m.Hello(m.PROTOCOL, "viewer", NAME)) as link:
                    while self._seats or self._inputs:
                        self._turn(link)
                    link.send(m.Bye())
                    link.close(FAREWELL)
            except RetakeError as error:
                self._inputs.clear()
                log.warning("nobody can drive: %s", error)

    def _turn(self, link: Connection) -> None:
        while (message := link.receive()) is not None:
            if isinstance(message, m.DriverUpdate):
                self._tell(message)
        while link.connected and self._inputs:
            link.send(self._inputs.popleft())
        if not link.connected and not self._seats:
            self._inputs.clear()  # nobody hears that they have let go
        link.wait(TURN_S)

    def _tell(self, update: m.DriverUpdate) -> None:
        seat = self._seats.get(update.driver.removeprefix(f"{NAME}/"))
        if seat is not None:
            seat.images = seat.images | {name: _jpeg(image) for name, image in update.arrays.items()}
            seat.frame = update.number if update.arrays else seat.frame
            seat.told = {
                "driver": update.driver, "holder": update.holder, "text": update.text, "number": update.number,
                "heard": update.heard,
            }  # fmt: skip


def _jpeg(image: Any) -> bytes:
    Image.fromarray(image).save(file := io.BytesIO(), "JPEG", quality=75)
    return file.getvalue()
