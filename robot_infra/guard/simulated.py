"""Guards a simulated arm in this process: time passes for it by commands alone, so that practice outruns the clock."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from serl_client import clock
from serl_client.env import Observation
from serl_client.errors import ConfigError

from robot_infra.drivers.arm import Arm
from robot_infra.drivers.owner import open_arm
from robot_infra.guard.channel import Reply, Request, Start, Started
from robot_infra.guard.guard import Guard


class SimulatedGuard:
    """Answers as a GuardLink does, without a process: after each target it sends the set points of one control step.

    It also does on the way home, whenever it is asked whether the arm has arrived.

    `arm` is the driver. `latest` is the newest reply. Raises ConfigError for an arm that is not simulated.
    """

    arm: Arm
    latest: Reply

    def __init__(self, start: Start) -> None:
        self._start, self._number, self._opened = start, 0, ExitStack()
        self._ticks = round(start.servo_hz / start.fps)
        self.is_open = False

    def begin(self) -> Started:
        """Make the driver; return what it says of the arm."""
        start = self._start
        with ExitStack() as stack:
            self.arm = stack.enter_context(open_arm(start.driver, start.address, start.options))
            if not self.arm.is_simulated:
                raise ConfigError(
                    f"{start.driver} drives a real arm, which needs a guard's process: say task.env.guard=true"
                )
            self._guard = Guard(self.arm, start, sleep=lambda _: None)
            self._opened = stack.pop_all()
        self.is_open = True
        self.call("state")
        return self._guard.started

    def call(self, kind: str, positions: Sequence[float] = (), *, seed: int = 0, patience: float = 0.0) -> Reply:
        """Ask, and return the reply, which may tell of a fault of the arm. Nothing can keep it waiting."""
        self._number += 1
        now = clock.monotonic()
        request = Request(kind, self._number, now, list(positions), seed)
        self._guard.hear(request)
        passes = kind == "target" or (kind == "state" and self._guard.is_on_its_way)
        for _ in range(self._ticks if passes else 0):
            self._guard.servo()
        self.latest = replace(self._guard.reply(request), time=now)  # as time stood still, the measurement is of now
        return self.latest

    def seen(self) -> Observation:
        """Return what the arm observed at the newest reply, besides its positions."""
        shared = self._guard.shared
        return shared.read(self.latest.sequence) if shared else {}

    def end(self, why: str) -> None:
        """Give the driver back."""
        self._opened.close()
        self.is_open = False
