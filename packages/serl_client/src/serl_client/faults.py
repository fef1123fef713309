"""Counts the robot's faults, and ends the actor after three within a minute, because such a robot needs repair."""

from collections import deque

import serl_client.clock as clock
from serl_client.errors import RobotFault

READY = "ready"  # kind of what is no fault: a new arm moves only after a person's word
MOST, WITHIN = 3, 60.0  # so many faults within so many seconds are too many


class Faults:
    """Remembers the latest faults. `is_open`: the latest one has not been cleared."""

    def __init__(self) -> None:
        self.is_open = False
        self._times: deque[float] = deque(maxlen=MOST)  # seconds, time.monotonic()

    def add(self, fault: RobotFault) -> None:
        """Note a fault. Raises it again, with the reason, if there are too many; an arm that is new counts as none."""
        self.is_open = True
        if fault.kind == READY:
            return
        self._times.append(clock.monotonic())
        if len(self._times) == MOST and self._times[-1] - self._times[0] < WITHIN:
            raise RobotFault(f"{fault}. This was fault {MOST} within {WITHIN:.0f} s: mend the robot first", fault.kind)
