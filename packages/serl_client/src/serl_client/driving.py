"""Keeps what one person elsewhere, at the page, does with this actor's robot: docs/guides/people.md says the rules.

The network thread hears the inputs, and sends what the driver is told; the control thread does all else.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

import serl_client.clock as clock
from serl_client.env import Observation
from serl_client.episode import MAX_NUMBER
from serl_client.errors import MessageError
from serl_client.names import check_names
from serl_client.spec import IMAGES, Array

INPUT_S = 0.3  # seconds after its receipt that an input counts; then the arm holds
AGE_S = 1.0  # seconds since the driver was told what an input has seen; a later input was held up, and moves nothing
SILENT_S = 2.0  # seconds without an input, after which somebody else may drive
TELL_S = 0.05  # seconds between two updates
WAITING = 32  # inputs, and updates, that wait
TAKE, BACK, LEAVE = "take over", "hand back", "let go"  # what was pressed; let go: nobody is at the controls
PRESSES = ("", TAKE, BACK, LEAVE)
MOTIONS = ("x", "y", "z", "roll", "pitch", "yaw")
CAMERAS, PREVIEW = 4, 240  # pixels: how wide and high a preview is at most
PAUSED = "the robot is paused: Resume, then take over again"


@dataclass(frozen=True, slots=True)
class Drive:
    """Carries what a person elsewhere does with an actor's robot now. Newest wins; see check_drive.

    driver: who they are, known by the name of their Hello, or by that with / and anything behind it.
    number: larger than that of each earlier Drive of this driver. seen: the number of the newest DriverUpdate.
    press: of PRESSES. motion, gripper: as in robot_infra.interfaces.Hand.
    """

    actor: str
    driver: str
    number: int
    seen: int
    press: str
    motion: Mapping[str, float]
    gripper: int


@dataclass(frozen=True, slots=True)
class DriverUpdate:
    """Tells `driver` who drives the actor's robot (`holder`, "": nobody elsewhere), and in `text` why not they.

    number: counts up for whoever drives; 0 for others. heard: the number of their newest Drive.
    arrays: perhaps {camera: preview, uint8 [height, width, 3]}; see check_update.
    """

    driver: str
    holder: str
    text: str
    number: int
    heard: int
    arrays: Mapping[str, Array] = field(default_factory=dict)


def check_drive(drive: Drive) -> None:
    """Raise MessageError for an input that no person could make."""
    check_names("a Drive", drive.actor, drive.driver, error=MessageError)
    shares = [drive.motion.get(name, 0.0) for name in MOTIONS]
    if drive.press not in PRESSES or drive.gripper not in (-1, 0, 1) or not set(MOTIONS).issuperset(drive.motion):
        raise MessageError(f"a Drive presses one of {PRESSES}, moves {MOTIONS}, and its gripper is -1, 0 or 1")
    if not all(type(share) in (int, float) and abs(share) <= 1 for share in shares):
        raise MessageError("each motion of a Drive is a number from -1 to 1")
    if not (0 < drive.number < MAX_NUMBER and 0 <= drive.seen < MAX_NUMBER):
        raise MessageError("a Drive is numbered from 1 on")


def check_update(update: DriverUpdate) -> None:
    """Raise MessageError for an update that is no sentence, or whose images are none, too many or too large."""
    check_names("a DriverUpdate", update.driver, update.holder, update.text, *update.arrays, error=MessageError)
    images = update.arrays.values()
    fits = all(_is_image(each) and max(each.shape) <= PREVIEW and each.shape[2] == 3 and each.size for each in images)
    if len(images) > CAMERAS or not fits:
        raise MessageError(f"a DriverUpdate has at most {CAMERAS} images of at most {PREVIEW} x {PREVIEW} pixels")


class RemoteDriver:
    """Lets one person elsewhere drive at a time, and only with inputs that are new.

    An input counts for INPUT_S after its receipt, on this machine's clock. It says which update its sender had seen, so
    that one which a slow link has held up is known by the same clock. Whoever is silent for SILENT_S has let go.

    holder: who is at the controls; empty: nobody. hindrance: why nobody elsewhere may be now; empty: they may.
    wake: is called when something is to be sent.
    """

    def __init__(self) -> None:
        self.holder = self.hindrance = ""
        self.wake: Callable[[], None] = lambda: None
        self._inbox: deque[tuple[float, Drive]] = deque(maxlen=WAITING)
        self._outbox: deque[DriverUpdate] = deque(maxlen=WAITING)
        self._motion: Mapping[str, float] = {}
        self._gripper, self._is_late = 0, False
        self._heard = self._seen = self._number = self._shown = 0  # shown: the newest update that had images
        self._received = self._told_at = self._shown_at = -math.inf
        self._told: deque[tuple[int, float]] = deque(maxlen=WAITING)  # (number, when) of the updates of this holder

    # -- the network thread
    def hear(self, drive: Drive) -> None:
        """Take an input that has just been received. Raises MessageError for a bad one."""
        check_drive(drive)
        self._inbox.append((clock.monotonic(), drive))

    def updates(self) -> Iterator[DriverUpdate]:
        """Yield what is to be sent; the previews are made here."""
        while self._outbox:
            update = self._outbox.popleft()
            yield replace(update, arrays={name: _small(image) for name, image in update.arrays.items()})

    # -- the control thread
    def read(self, hindrance: str = "") -> tuple[Mapping[str, float], int, list[str]]:
        """Return what the holder does now: motion, gripper, and what of PRESSES since the last call.

        hindrance: one more reason why nobody elsewhere may drive now. Who drove, or wants to, is told.
        """
        presses: list[str] = []
        if hindrance := hindrance or self.hindrance:
            self._end(hindrance)
        while self._inbox:
            self._take(*self._inbox.popleft(), hindrance, presses)
        self._lapse(now := clock.monotonic())
        is_new = self.holder and now <= self._received + INPUT_S
        return (self._motion, self._gripper, presses) if is_new else ({}, 0, presses)

    def show(self, observation: Observation | None) -> None:
        """Tell the holder how it stands; with the images of an observation [...] once those before have been seen."""
        now, images = clock.monotonic(), dict[str, Array]()
        if self.holder and now >= self._told_at + TELL_S:
            self._number, self._told_at = self._number + 1, now
            if self._shown <= self._seen or now > self._shown_at + AGE_S:
                images = _images(observation or {})
            if images:
                self._shown, self._shown_at = self._number, now
            late = "the link is too slow: what you see is too old, so nothing moves" if self._is_late else ""
            self._told.append((self._number, now))
            self._outbox.append(DriverUpdate(self.holder, self.holder, late, self._number, self._heard, images))
        if self._outbox:
            self.wake()

    def _take(self, received: float, drive: Drive, hindrance: str, presses: list[str]) -> None:
        self._lapse(received)
        if drive.press == TAKE and not self.holder and not hindrance:
            self.holder, self._heard, self._seen, self._shown = drive.driver, 0, 0, 0
            self._told.clear()
        if drive.driver != self.holder:
            why = hindrance or ("somebody else drives" if self.holder else "you do not drive: take over first")
            self._outbox.append(DriverUpdate(drive.driver, self.holder, why, 0, drive.number))
        elif drive.number > self._heard:
            self._heard, self._seen, self._received = drive.number, drive.seen, received
            is_new = any(number == drive.seen and received <= told + AGE_S for number, told in self._told)
            self._is_late = not is_new and drive.seen > 0
            self._motion, self._gripper = (drive.motion, drive.gripper) if is_new else ({}, 0)
            if drive.press == TAKE or (drive.press == BACK and is_new):
                presses.append(drive.press)
            if drive.press == LEAVE or (drive.press == BACK and is_new):
                self._end("")

    def _lapse(self, now: float) -> None:
        if now > self._received + SILENT_S:
            self._end(f"nothing came from you for {SILENT_S:.0f} s: take over again")

    def _end(self, why: str) -> None:
        if self.holder:
            self._outbox.append(DriverUpdate(self.holder, "", why, 0, self._heard))
        self.holder = ""


def _images(observation: Observation) -> dict[str, Array]:
    """Return the images in colour of the first CAMERAS cameras."""
    found = {name: each for name, each in observation.items() if name.startswith(IMAGES) and _is_image(each)}
    return dict(list(found.items())[:CAMERAS])


def _is_image(array: Array) -> bool:
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] >= 3


def _small(image: Array) -> Array:
    """Return an image of at most PREVIEW x PREVIEW pixels, by leaving out rows and columns; of a stack the newest."""
    step = -(-max(image.shape[:2]) // PREVIEW)
    return np.ascontiguousarray(image[::step, ::step, -3:])
