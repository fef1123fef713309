"""Reads a leader arm for teleoperation: its positions are the robot's targets."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.drivers.arm import LEADER
from robot_infra.interfaces import Hand

STILL = 0.01  # of an entry's range: a leader arm that moves by less is not in a hand


class Leader:
    """Gives the positions of the leader arm that the driver of `robot` observes beside its own (drivers/arm.py).

    Its positions do not tell whether somebody holds it, so only a toggle takes over from a policy; a demonstration
    begins once it moves. Raises ConfigError for a robot whose driver observes no leader.
    """

    moves, asks = None, False
    legend: Mapping[str, str] = {}

    def __init__(self, robot: Any) -> None:
        self._robot = robot
        self._rest: Array | None = None  # where it was at the first reading since `forget`
        observed = getattr(robot, "features", {}).get(LEADER)
        if not robot.space.endswith("_position") or observed is None or observed.shape != robot.action.shape:
            raise ConfigError("task.env.operator=leader: this robot has no leader arm like it; name one in its options")

    def read(self) -> Hand:
        seen: Observation = getattr(self._robot, "seen", {})
        positions, action = seen.get(LEADER), self._robot.action
        if positions is None:
            return Hand()
        self._rest = positions if self._rest is None else self._rest
        moved = bool((np.abs(positions - self._rest) > STILL * (action.high - action.low)).any())
        return Hand(positions=positions, moved=moved)

    def forget(self) -> None:
        self._rest = None

    def close(self) -> None:
        """Do nothing: the driver owns it."""
