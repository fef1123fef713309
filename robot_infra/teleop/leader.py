"""Reads a leader arm for teleoperation: its positions are the robot's targets."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.drivers.arm import LEADER
from robot_infra.guard.lead import FOLLOWS, TOUCHED
from robot_infra.interfaces import Hand

log = logging.getLogger(__name__)

STILL = 0.01  # of an entry's range: a leader arm that moves by less is not in a hand


class Leader:
    """Gives the positions of the leader arm that the driver of `robot` observes beside its own (drivers/arm.py).

    One that follows its robot tells when somebody touches it: that takes over, and begins a demonstration. Else its
    positions do not tell whether somebody holds it, so only a toggle takes over from a policy; a demonstration begins
    once it moves. Raises ConfigError for a robot whose driver observes no leader.
    """

    moves, asks = None, False
    legend: Mapping[str, str] = {}

    def __init__(self, robot: Any) -> None:
        self._robot = robot
        self._rest: Array | None = None  # where it was at the first reading since `forget`
        self._was_touched = False
        observed = getattr(robot, "features", {}).get(LEADER)
        if not robot.space.endswith("_position"):
            raise ConfigError(f"a leader arm gives positions, not {robot.space}: say task.env.space=joint_position")
        if observed is None or observed.shape != robot.action.shape:
            raise ConfigError(
                "task.env.operator=leader: this robot has no leader arm like it; name one in its options, or observe "
                "one in your driver (docs/tutorials/own_robot.md)"
            )

    def read(self) -> Hand:
        seen: Observation = getattr(self._robot, "seen", {})
        positions, action = seen.get(LEADER), self._robot.action
        if positions is None:
            return Hand()
        leader = self._robot.leader
        is_touched = leader == TOUCHED and not self._was_touched
        self._was_touched = leader == TOUCHED
        if is_touched:
            log.warning("leader arm: somebody has touched it, so it goes limp")
        self._rest = positions if self._rest is None or leader == FOLLOWS else self._rest
        moved = bool((np.abs(positions - self._rest) > STILL * (action.high - action.low)).any())
        return Hand(positions=positions, words=["take over"] * is_touched, moved=moved or is_touched)

    def forget(self, *, hands_back: bool) -> None:
        self._rest = None
        self._robot.hold_leader(not hands_back)

    def hand_over(self, *, to_person: bool) -> None:
        self._robot.lead(follows=not to_person)

    def close(self) -> None:
        """Do nothing: the driver owns it."""
