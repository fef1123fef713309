"""Switches on motor torque of lerobot's buses without a jump: a servo may obey an old goal.

lerobot switches torque on in many places (its `configure` does when it connects), and writes no goal before. `tame` is
the one place through which all of them go. Source: lerobot.motors.motors_bus.SerialMotorsBus.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from serl_client.errors import RobotFault
from serl_client.spec import Array

RETRIES = 2  # of a packet to one motor: single ones get lost, and to configure an arm takes dozens
SLACK = 20  # steps of 4096: at a mechanical end a motor stands a little outside of its calibrated range
LOOKS, FALL = 3, 200  # at the positions, and steps between them: an arm that has just lost its torque falls


def is_tamable(bus: Any) -> bool:
    """Return whether this is one of lerobot's serial buses, on which each motor has a torque and a goal."""
    return isinstance(bus, importlib.import_module("lerobot.motors.motors_bus").SerialMotorsBus)


def tame(bus: Any) -> None:
    """Let this bus switch motors on only where they stand, whoever asks it to. It raises RobotFault as `standing`.

    Whatever goes to one motor is tried again where its answer is lost, which lerobot leaves to its callers. An answer
    that comes too late is dropped before the next question: lerobot would take it for that one's, and so would every
    later question take the answer to the one before.
    """
    if port := getattr(bus, "port_handler", None):
        port.clearPort = lambda: port.ser.reset_input_buffer()
    for name in ("ping", "read", "write"):
        setattr(bus, name, _tried_again(getattr(bus, name)))
    switch = bus.enable_torque

    def enable_torque(motors: Any = None, num_retry: int = 0) -> None:
        for motor, at in standing(bus, motors).items():
            bus.write("Goal_Position", motor, at, normalize=False, num_retry=num_retry)
        switch(motors, num_retry)

    bus.enable_torque = enable_torque


def _tried_again(call: Callable[..., Any]) -> Callable[..., Any]:
    def tried(*words: Any, num_retry: int = 0, **options: Any) -> Any:
        return call(*words, num_retry=max(num_retry, RETRIES), **options)

    return tried


def switch_on(bus: Any) -> dict[str, float]:
    """Switch on the motors of a tame bus that are off; return {motor: where it is held now}, in the bus's units."""
    if off := [motor for motor in bus.motors if not bus.read("Torque_Enable", motor, normalize=False)]:
        bus.enable_torque(off)
    return {motor: bus.read("Goal_Position", motor) for motor in bus.motors}


def standing(bus: Any, motors: Sequence[str] | str | None = None) -> dict[str, int]:
    """Return {motor: the step at which it stands}; motors: None for all.

    Raises RobotFault if readings differ too much, or a motor is out of its calibrated range.
    """
    found = {}
    for motor in [motors] if isinstance(motors, str) else motors or bus.motors:
        steps: Array = np.array([bus.read("Present_Position", motor, normalize=False) for _ in range(LOOKS)])
        if np.ptp(steps) > FALL:
            raise RobotFault(f"{motor} is at steps {steps.tolist()} within a moment: its sensor is wrong", "sensor")
        found[motor] = int(np.median(steps))
        ends = bus.calibration.get(motor)
        if ends is not None and not ends.range_min - SLACK <= found[motor] <= ends.range_max + SLACK:
            raise RobotFault(
                f"{motor} is at step {found[motor]}, and its calibration says {ends.range_min} to {ends.range_max}: no "
                "torque is switched. Move it into its range by hand, or calibrate it anew, then say ready", "range",
            )  # fmt: skip
    return found
