"""Counts faults of the robot or the environment: three within a minute end the actor, because repair is needed."""

import logging
from collections import deque

import serl_client.clock as clock
from serl_client.errors import RobotFault, last_line

log = logging.getLogger(__name__)

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
            raise RobotFault(f"{fault}. This was fault {MOST} within {WITHIN:.0f} s: mend that first", fault.kind)


def as_fault(error: Exception) -> RobotFault:
    """Return what an episode raised as a fault that says its traceback's last line; the log has the whole of it."""
    if isinstance(error, RobotFault):
        return error
    log.error("the episode ended in an error", exc_info=error)
    return RobotFault(last_line(error), "error")
