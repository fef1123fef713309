"""Counts the robot's faults, and ends the actor after three within a minute, because such a robot needs repair."""

from collections import deque

import serl_client.clock as clock
from serl_client.errors import RobotFault

READY = "ready"  # RobotFault.kind of an arm that waits for a person's word; it does not count as a fault
MOST, WITHIN = 3, 60.0  # so many faults within so many seconds are too many


class Faults:
    """Remembers the latest faults. `is_open`: the latest one has not been cleared."""

    def __init__(self) -> None:
        self.is_open = False
        self._times: deque[float] = deque(maxlen=MOST)  # seconds, time.monotonic()

    def add(self, fault: RobotFault) -> None:
        """Note a fault. Raises it again, with the reason, if there are too many; one of kind READY does not count."""
        self.is_open = True
        if fault.kind == READY:
            return
        self._times.append(clock.monotonic())
        if len(self._times) == MOST and self._times[-1] - self._times[0] < WITHIN:
            raise RobotFault(f"{fault}. This was fault {MOST} within {WITHIN:.0f} s: mend the robot first", fault.kind)
