"""Aligns camera images with the robot's state: how old an image may be, and when a camera counts as frozen."""

from collections.abc import Mapping

import numpy as np
from serl_client import clock
from serl_client.env import Observation
from serl_client.errors import RobotFault
from serl_client.spec import Array

from robot_infra.interfaces import Camera

IMAGES, AGE = "observation.images.", "age."  # and a camera's name
BOUND = 2.0  # periods: an image that was taken longer before the state belongs to another row
FROZEN = 1.0  # seconds of identical images: a real sensor has noise
PATIENCE = 5.0  # seconds that an episode's first row waits for its images
NAP = 0.01  # seconds between two looks


class Alignment:
    """Gives the images of each row, and the ages {age.<camera>: state minus image, float32 seconds}.

    fps: steps per second. On the simulated clock (`is_real` False) no image is too old.
    """

    def __init__(self, cameras: Mapping[str, Camera], fps: float, *, is_real: bool) -> None:
        self.cameras = dict(cameras)
        self._bound, self._is_real = BOUND / fps, is_real

    def look(self, measured: float) -> tuple[Observation, dict[str, Array], str]:
        """Return the images for a state that was `measured` then (seconds), their ages, and what is wrong with them."""
        images, ages, wrong = {}, {}, []
        for name, camera in self.cameras.items():
            frame = camera.latest()
            age = measured - frame.time
            images[IMAGES + name], ages[AGE + name] = frame.image, np.array(age, np.float32)
            if self._is_real and age > self._bound:
                wrong.append(f"camera {name}: its newest image is {age:.2f} s old" + _why(camera))
            elif self._is_real and frame.changed is not None and frame.time - frame.changed >= FROZEN:
                still = frame.time - frame.changed
                wrong.append(f"camera {name}: its image has not changed for {still:.1f} s, so it is frozen")
        return images, ages, "; ".join(wrong)

    def wait(self, since: float) -> None:
        """Wait until each camera has an image that was taken after `since`. Raises RobotFault after PATIENCE seconds.

        So the first row of an episode does not show the way home.
        """
        deadline = clock.monotonic() + PATIENCE
        while late := [name for name, camera in self.cameras.items() if self._is_real and _is_older(camera, since)]:
            if clock.monotonic() > deadline:
                why = "; ".join(f"camera {name} gives no image{_why(self.cameras[name])}" for name in late)
                raise RobotFault(f"{why}: look at its cable, and whether another program has it open", "camera")
            clock.sleep(NAP)


def _is_older(camera: Camera, since: float) -> bool:
    """Return whether its newest image was taken before `since`; one that is drawn when asked for never was."""
    frame = camera.latest()
    return frame.changed is not None and frame.time <= since


def _why(camera: Camera) -> str:
    return f" ({camera.trouble})" * bool(camera.trouble)
