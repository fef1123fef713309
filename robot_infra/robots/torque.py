"""Switches the motors on lerobot's serial buses on where they stand: a servo may obey the goal that it remembers.

lerobot switches torque on in many places (its `configure` does when it connects), and writes no goal before. `tame` is
the one place through which all of them go. Source: lerobot.motors.motors_bus.SerialMotorsBus.
"""

from typing import Any

import numpy as np
from serl_client.errors import RobotFault
from serl_client.spec import Array

SLACK = 20  # steps of 4096: at a mechanical end a motor stands a little outside of its calibrated range
LOOKS = 3  # at the positions, which have to agree


def is_tamable(bus: Any) -> bool:
    """Return whether a bus has torque and goals as this module knows them."""
    return all(hasattr(bus, name) for name in ("motors", "calibration", "sync_read", "write", "enable_torque"))


def tame(bus: Any) -> None:
    """Let this bus switch motors on only where they stand, whoever asks it to.

    It then raises RobotFault, with all torque as it is, if a motor stands outside of its calibrated range.
    """
    switch = bus.enable_torque

    def enable_torque(motors: Any = None, num_retry: int = 0) -> None:
        for motor, at in _standing(bus, motors).items():
            bus.write("Goal_Position", motor, at, normalize=False, num_retry=num_retry)
        switch(motors, num_retry)

    bus.enable_torque = enable_torque


def switch_on(bus: Any) -> bool:
    """Switch on what is off of a tame bus; return whether anything was."""
    off = [motor for motor, is_on in bus.sync_read("Torque_Enable", normalize=False).items() if not is_on]
    if off:
        bus.enable_torque(off)
    return bool(off)


def _standing(bus: Any, motors: Any) -> dict[str, int]:
    """Return the steps at which these motors stand. Raises RobotFault if readings differ, or are out of range."""
    looks = [bus.sync_read("Present_Position", motors, normalize=False) for _ in range(LOOKS)]
    found = {}
    for motor in looks[0]:
        steps: Array = np.array([look[motor] for look in looks])
        if np.ptp(steps) > SLACK:
            raise RobotFault(f"{motor} is at steps {steps.tolist()} within a moment: its sensor is wrong", "sensor")
        found[motor] = int(np.median(steps))
        ends = bus.calibration.get(motor)
        if ends is not None and not ends.range_min - SLACK <= found[motor] <= ends.range_max + SLACK:
            raise RobotFault(
                f"{motor} is at step {found[motor]}, and its calibration says {ends.range_min} to {ends.range_max}, so "
                "its torque stays off. Move it into its range by hand, or calibrate it anew, then say ready", "range",
            )  # fmt: skip
    return found
