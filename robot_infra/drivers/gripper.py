"""Drives a gripper that is one Feetech servo on a serial bus of its own, beside an arm that does not know it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from serl_client.errors import ConfigError, RobotFault

from robot_infra.drivers.lerobot import FAILURES, free, tried
from robot_infra.drivers.torque import switch_on, tame

NAME = "gripper"


class FeetechGripper:
    """Drives one servo; positions are percent of the way between the two ends of `steps`.

    port: of its bus. id: of the servo. steps: [at 0 %, at 100 %] of its turn of 4096, the smaller one first. Connecting
    moves nothing and leaves the torque as it is. Raises ConfigError without lerobot, RobotFault if nobody answers.
    """

    def __init__(self, port: str, *, id: int = 21, steps: Sequence[int] = (2048, 3055)) -> None:
        low, high = steps
        if not 0 <= low < high <= 4095:
            raise ConfigError(
                f"the steps of a gripper should be two numbers from 0 to 4095, the smaller one first, not {list(steps)}"
            )
        try:
            from lerobot.motors import Motor, MotorCalibration, MotorNormMode
            from lerobot.motors.feetech import FeetechMotorsBus
        except ModuleNotFoundError as error:
            raise ConfigError(f"a gripper needs {error.name}: run `. examples/install.sh --extra robots`") from None
        self._port = port
        self._bus = FeetechMotorsBus(
            port, {NAME: Motor(id, "sts3215", MotorNormMode.RANGE_0_100)}, {NAME: MotorCalibration(id, 0, 0, low, high)}
        )
        tame(self._bus)
        try:
            tried(self._connect)
        except RobotFault as fault:
            raise RobotFault(f"no gripper with id {id} at {port}: {fault}", "bus") from None

    def read(self) -> float:
        """Return the measured position, percent."""
        return float(self._tried(lambda: self._bus.sync_read("Present_Position"))[NAME])

    def write(self, position: float) -> None:
        """Send a set point, percent."""
        self._tried(lambda: self._bus.sync_write("Goal_Position", {NAME: position}))

    def recover(self) -> None:
        """Connect again what was unplugged."""
        try:
            self.read()
        except RobotFault:
            with suppress(*FAILURES):
                self.close()
            free(self._bus)
            self._tried(self._connect)

    def enable(self) -> float:
        """Switch the torque on where the gripper is; return where it is held, percent."""
        return float(self._tried(lambda: switch_on(self._bus))[NAME])

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return tried(call)
        except RobotFault as fault:
            raise RobotFault(f"the gripper at {self._port}: {fault}; look at its cable and power", fault.kind) from None

    def _connect(self) -> None:
        """Connect, or give the port back: lerobot refuses a bus that is half connected."""
        try:
            self._bus.connect()
        except FAILURES:
            with suppress(*FAILURES):
                self.close()
            raise

    def close(self) -> None:
        """Give the port back; the torque stays on, so that nothing falls."""
        if self._bus.is_connected:
            self._bus.disconnect(disable_torque=False)
