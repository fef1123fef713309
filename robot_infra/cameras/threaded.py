"""Reads a camera in a thread, so that none delays a step; crops and resizes images; keeps the newest."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from serl_client import clock
from serl_client.errors import ConfigError
from serl_client.images import cut, pixels
from serl_client.spec import Array, Feature

from robot_infra.interfaces import Frame

log = logging.getLogger(__name__)

OPENING = 20.0  # seconds until a camera has to give its first image
AGAIN = 1.0  # seconds until one that failed is opened again
ENDING = 2.0  # seconds that `close` waits for a thread that may hang in its camera


class FrameSource(Protocol):
    """Describes an open camera, as its driver has it."""

    def read(self) -> Array:
        """Wait for the next image, uint8 [height, width, channel]. Raises any exception."""
        ...

    def close(self) -> None: ...


class ThreadedCamera:
    """Implements Camera over a driver that waits for images.

    open_source: opens the camera; it is called again, after AGAIN seconds, when the camera has failed.
    crop: [top, left, height, width] in pixels; size: [height, width] after it. None: the whole image, as large as it
        is. Both are done here, on the robot, and the feature says so in its names.

    The time of an image is that of its arrival. Raises ConfigError if there is no image, and for a crop outside of it.
    """

    def __init__(
        self, name: str, open_source: Callable[[], FrameSource], *, crop: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.trouble = name, ""
        self._open, self._crop, self._size = open_source, _pixels("crop", crop, 4), _pixels("size", size, 2)
        self._frame: Frame | None = None
        self._shape: tuple[int, ...] | None = None  # of the images before they are cut
        self._arrived, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"camera {name}", daemon=True)
        self._thread.start()
        if not self._arrived.wait(OPENING) or self._frame is None:
            self.close()
            why = self.trouble or "it does not answer"
            raise ConfigError(
                f"camera {name} gives no image: {why}. Look at its cable, and whether another program has it open"
            )
        self.feature = Feature(self._frame.image.shape, "uint8", names=self._cut)

    def latest(self) -> Frame:
        assert self._frame is not None
        return self._frame

    def close(self) -> None:
        self._ended.set()
        self._thread.join(ENDING)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._watch()
            except Exception as error:  # a driver may raise anything
                self.trouble = f"{type(error).__name__}: {error}"[:300]
                log.warning("camera %s: %s", self.name, self.trouble)
                if self._frame is None:
                    self._arrived.set()
                    return
                self._ended.wait(AGAIN)

    def _watch(self) -> None:
        """Take images until the camera fails or is closed."""
        source, before = self._open(), None
        try:
            while not self._ended.is_set():
                raw, now = source.read(), clock.monotonic()
                self._check(raw)
                is_same = before is not None and np.array_equal(raw, before)
                changed = self._frame.changed if is_same and self._frame else now
                self._frame, before = Frame(cut(raw, self._crop, self._size), now, changed), raw
                self.trouble = ""
                self._arrived.set()
        finally:
            source.close()

    def _check(self, raw: Array) -> None:
        """Raise ValueError for what is no image, or one of another size than before."""
        if raw.dtype != np.uint8 or raw.ndim != 3:
            raise ValueError(f"it gives {raw.dtype} {list(raw.shape)}, and an image is uint8 [height, width, channel]")
        if self._shape not in (None, raw.shape):
            raise ValueError(
                f"it gives images of {list(raw.shape[:2])}, and first gave {list((self._shape or ())[:2])}"
            )
        self._shape = raw.shape

    @property
    def _cut(self) -> tuple[str, ...]:
        """What was cut out, as the names of the feature: another cut makes another robot."""
        if not (self._crop or self._size):
            return ()
        whole = f"crop {list(self._crop)}" if self._crop else "whole image"
        return "height", "width", "channel", whole


def _pixels(word: str, written: Sequence[int] | None, count: int) -> tuple[int, ...] | None:
    return None if written is None else pixels(f"{word} of a camera", list(written), count)
