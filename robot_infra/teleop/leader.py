"""Reads a leader arm for teleoperation: its positions are the robot's targets."""

from collections.abc import Mapping
from typing import Any

from serl_client.env import Observation
from serl_client.errors import ConfigError

from robot_infra.drivers.arm import LEADER
from robot_infra.interfaces import Hand


class Leader:
    """Gives the positions of the leader arm that the driver of `robot` observes beside its own (drivers/arm.py).

    Its positions do not tell whether somebody holds it, so only a toggle takes over. Raises ConfigError for a robot
    whose driver observes no leader.
    """

    moves, asks = None, False
    legend: Mapping[str, str] = {}

    def __init__(self, robot: Any) -> None:
        self._robot = robot
        observed = getattr(robot, "features", {}).get(LEADER)
        if not robot.space.endswith("_position") or observed is None or observed.shape != robot.action.shape:
            raise ConfigError("task.env.operator=leader: this robot has no leader arm like it; name one in its options")

    def read(self) -> Hand:
        seen: Observation = getattr(self._robot, "seen", {})
        return Hand(positions=seen.get(LEADER))

    def forget(self) -> None:
        """Do nothing: it has no motions that wait."""

    def close(self) -> None:
        """Do nothing: the driver owns it."""
