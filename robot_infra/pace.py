"""Sets how long a control step lasts: one period (1/fps) on the real clock, and no time on the simulated one."""

import os
from contextlib import suppress

from serl_client import clock
from serl_client.errors import ConfigError

CLOCKS = ("real", "simulated")


class Pace:
    """Waits for the end of each step, which began with its observation and lasts one period.

    clock: "real": a step lasts 1/fps seconds. "simulated": nothing waits. Raises ConfigError for another one.
    """

    def __init__(self, clock: str, fps: float) -> None:
        if clock not in CLOCKS:
            raise ConfigError(f"clock {clock!r} is unknown; use one of {', '.join(CLOCKS)}")
        self.is_real, self.period = clock == "real", 1 / fps
        self._began = 0.0  # when the step under way began; seconds, time.monotonic()

    def begin(self) -> None:
        """Begin the first step of an episode now."""
        self._began = clock.monotonic()

    def wait(self, sent: float) -> None:
        """Wait for the end of the step whose command was `sent` then, seconds.

        If the command was sent in the second half of the step, the period counts from the command, so that each action
        has time to act, and the robot need not hurry afterwards.
        """
        if not self.is_real:
            return
        end = (sent if sent > self._began + self.period / 2 else self._began) + self.period
        if (remaining := end - clock.monotonic()) > 0:
            clock.sleep(remaining)
        self._began = max(end, clock.monotonic())


def run_first() -> None:
    """Let this thread run before all others whenever it wakes, where the system permits that: so a simulated device
    answers on a busy machine, too, as a real one does."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
