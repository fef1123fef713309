"""Defines action spaces (joints, end-effector deltas, grippers), and how one becomes another.

Every space can turn an action into target positions of the robot and back, so that any two of them meet there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from serl_client.errors import ConfigError, RobotFault
from serl_client.faults import READY
from serl_client.spec import Array, Feature

from robot_infra.guard.limits import largest_part, squares_outside
from robot_infra.interfaces import Reading, Robot, Teleop
from robot_infra.kinematics import CLOSE, Chain, moved, twist

JOINT, JOINT_DELTA, EE_DELTA = "joint_position", "joint_delta", "ee_delta"
AXES, TURNS = ("x", "y", "z"), ("roll", "pitch", "yaw")
BAND = 0.5  # an entry of a gripper between -0.5 and 0.5 leaves it as it is, so that noise around 0 toggles nothing
WITHIN = 1e-3  # metres inside a box's face at which targets end: between two on a face the joints' way bulges out
AT_END = 0.01  # share of a gripper's way within which it is at its end
STILL = 1e-6  # metres or radians, below which a gripper's target has not changed


class Space(Protocol):
    """Describes one meaning of actions [A] of a robot with the positions [J]."""

    action: Feature
    moves: frozenset[str]  # the entries of the positions that it can move
    is_whole: bool  # whether it can move them in every way

    def begin(self, positions: Array) -> None:
        """Begin an episode at these positions."""

    def target(self, action: Array, before: Array) -> Array:
        """Return the target positions that an action means after the target `before`."""
        ...

    def actual(self, target: Array, before: Array) -> Array:
        """Return the action that leads from the target `before` to this one."""
        ...


@dataclass(frozen=True, slots=True)
class Gripper:
    """Describes a gripper that is opened (an action of -1) and closed (1): its entry's positions then."""

    open: float
    closed: float

    def target(self, wanted: float, before: float) -> float:
        """Return the gripper's target for a wish; one within BAND leaves it as it is."""
        return before if abs(wanted) < BAND else self.closed if wanted > 0 else self.open

    def is_closed(self, position: float) -> bool:
        """Return whether a position is nearer to the closed end."""
        return abs(position - self.closed) < abs(position - self.open)

    def actual(self, target: float, before: float) -> float:
        """Return 1 if the gripper closes or is closed, -1 if it opens or is open, 0 if it rests between its ends."""
        if abs(target - before) < STILL:
            rests = min(abs(target - self.open), abs(target - self.closed)) > AT_END * abs(self.open - self.closed)
            return 0.0 if rests else 1.0 if self.is_closed(target) else -1.0
        return 1.0 if (target - before) * (self.closed - self.open) > 0 else -1.0


class JointPosition:
    """Takes positions themselves; `action` is the robot's."""

    is_whole = True

    def __init__(self, action: Feature) -> None:
        self.action, self.moves = action, frozenset(action.names)

    def begin(self, positions: Array) -> None:
        pass

    def target(self, action: Array, before: Array) -> Array:
        return action

    def actual(self, target: Array, before: Array) -> Array:
        return target


class JointDelta:
    """Moves the target of each position by a share of its stroke; grippers go by their state.

    positions: the robot's action in JOINT. stroke: of each entry or of all, radians or metres in one step.
    grippers: {entry: its Gripper}.
    """

    is_whole = True

    def __init__(
        self, positions: Feature, stroke: float | Sequence[float], grippers: Mapping[str, Gripper] | None = None
    ) -> None:
        self.action = Feature(positions.shape, names=positions.names, low=np.array(-1), high=np.array(1))
        self.moves = frozenset(positions.names)
        self._low, self._high = _bounds(positions)
        self._stroke = np.broadcast_to(stroke, positions.shape)
        self._grippers = {positions.names.index(name): gripper for name, gripper in (grippers or {}).items()}

    def begin(self, positions: Array) -> None:
        pass

    def target(self, action: Array, before: Array) -> Array:
        target = np.clip(before + self._stroke * action, self._low, self._high)
        for i, gripper in self._grippers.items():
            target[i] = gripper.target(action[i], before[i])
        return target

    def actual(self, target: Array, before: Array) -> Array:
        action = (target - before) / self._stroke
        for i, gripper in self._grippers.items():
            action[i] = gripper.actual(target[i], before[i])
        return action


@dataclass(frozen=True, slots=True, eq=False)
class Limb:
    """Describes one arm of a robot, for EeDelta.

    entries: the names of its joints among the robot's positions. chain: its kinematics. scale: [J] or of all, radians
    of a joint in the unit of its entry. box: [2, 3] metres, low and high of the tool. gripper: the name of its entry,
    and the Gripper; None: there is none.
    """

    entries: tuple[str, ...]
    chain: Chain
    box: Array
    gripper: tuple[str, Gripper] | None = None
    scale: Array | float = 1.0

    def pose(self, positions: Array) -> Array:
        """Return the tool's pose [..., 4, 4] at these positions [..., J] of its entries."""
        return self.chain.pose(positions * self.scale)

    @property
    def within(self) -> Array:
        """The box [2, 3] for the tool's targets."""
        middle = self.box.mean(0)
        return np.array([np.minimum(self.box[0] + WITHIN, middle), np.maximum(self.box[1] - WITHIN, middle)])


class EeDelta:
    """Moves the tool of each limb along x, y and z, and about them if it turns; grippers go by their state.

    limbs: {prefix of the action's entries: Limb}. Positions of no limb stay as they are.
    stroke: metres in one step. turn: radians in one step; 0: the tools keep the orientation of the start.
    most: radians, of a joint in one step. is_relative: the axes are those of the tool at the start, not the world's.

    A step that would leave the box ends WITHIN its face. Where the arm cannot follow, the tool slows down
    (Chain.toward).
    """

    def __init__(
        self, positions: Feature, limbs: Mapping[str, Limb], *, stroke: float, most: float, turn: float = 0.0,
        is_relative: bool = False,
    ) -> None:  # fmt: skip
        self._limbs, self._most, self._is_relative, self.is_whole = limbs, most, is_relative, turn > 0
        axes = (*AXES, *TURNS) if turn else AXES
        names = [f"{prefix}{a}" for prefix, limb in limbs.items() for a in (*axes, *["gripper"] * bool(limb.gripper))]
        self.action = Feature((len(names),), names=tuple(names), low=np.array(-1), high=np.array(1))
        self._scale = np.array([stroke] * 3 + [turn] * 3)[: len(axes)]
        self._at = {p: [positions.names.index(name) for name in limb.entries] for p, limb in limbs.items()}
        self._grip = {p: positions.names.index(limb.gripper[0]) for p, limb in limbs.items() if limb.gripper}
        self.moves = frozenset(positions.names[i] for at in (*self._at.values(), [*self._grip.values()]) for i in at)
        self._low, self._high = _bounds(positions)
        self._starts: dict[str, Array] = {}

    def begin(self, positions: Array) -> None:
        self._starts = {p: limb.pose(positions[self._at[p]]) for p, limb in self._limbs.items()}

    def target(self, action: Array, before: Array) -> Array:
        target, left = before.copy(), action
        for prefix, limb in self._limbs.items():
            step, left = np.split(left, [len(self._scale)])
            target[self._at[prefix]] = self._moved(prefix, limb, step * self._scale, before)
            if limb.gripper:
                entry = self._grip[prefix]
                target[entry], left = limb.gripper[1].target(left[0], before[entry]), left[1:]
        return target

    def actual(self, target: Array, before: Array) -> Array:
        parts: list[Array] = []
        for prefix, limb in self._limbs.items():
            here, there = limb.pose(np.stack([before, target])[:, self._at[prefix]])
            axes = self._axes(prefix)
            step = (twist(here, there).reshape(2, 3) @ axes).ravel()  # the inverse of a rotation is its transpose
            parts.append(step[: len(self._scale)] / self._scale)
            if limb.gripper:
                entry = self._grip[prefix]
                parts.append(np.array([limb.gripper[1].actual(target[entry], before[entry])]))
        return np.concatenate(parts)

    def _moved(self, prefix: str, limb: Limb, step: Array, before: Array) -> Array:
        """Return the joints of a limb after this step [3 or 6] of its tool."""
        joints = before[self._at[prefix]]
        if not step.any():
            return joints
        here = limb.pose(joints)
        step = np.resize(np.append(step, np.zeros(6 - len(step))), (2, 3)) @ self._axes(prefix).T
        goal = moved(here, step.ravel())
        if not self.is_whole and prefix in self._starts:
            goal[:3, :3] = self._starts[prefix][:3, :3]
        box = limb.within
        low, high = box
        goal[:3, 3] = np.clip(goal[:3, 3], np.minimum(low, here[:3, 3]), np.maximum(high, here[:3, 3]))
        at = self._at[prefix]
        ends = self._low[at] * limb.scale, self._high[at] * limb.scale
        end = limb.chain.toward(joints * limb.scale, goal, self._most, ends) / limb.scale
        most = (np.sqrt(squares_outside(here[:3, 3], box)) + CLOSE) ** 2
        return largest_part(joints, end, lambda j: bool(squares_outside(limb.pose(j)[:3, 3], box) <= most))

    def _axes(self, prefix: str) -> Array:
        """Return the axes [3, 3] of a limb's actions, as columns."""
        return self._starts[prefix][:3, :3] if self._is_relative and prefix in self._starts else np.eye(3)


@dataclass(frozen=True, slots=True)
class Spoken:
    """Describes the action space that a device speaks, which need not be the robot's (teleop/hands.py)."""

    action: Feature
    space: str


class SpacedRobot:
    """Wraps a Robot that takes positions, so that it takes actions of `space`, a name in `spaces`; a Robot.

    Executed actions are of that space, too. grippers: {entry of the positions: its Gripper}. `toggled` says how many
    of them the newest command opened or closed. Raises ConfigError for an unknown space.
    """

    def __init__(
        self, robot: Robot, spaces: Mapping[str, Space], space: str, grippers: Mapping[str, Gripper] | None = None
    ) -> None:
        self.spaces = {JOINT: JointPosition(robot.action), **spaces}
        if space not in self.spaces:
            raise ConfigError(f"task.env.space={space}: this robot takes {', '.join(self.spaces)}")
        self.robot, self.space, self.observation = robot, space, robot.observation
        self.action, self._space = self.spaces[space].action, self.spaces[space]
        self._grippers = {robot.action.names.index(name): each for name, each in (grippers or {}).items()}
        self._begins, self.toggled = True, 0
        self._before = robot.hold_action()  # the target before the newest command

    def speaks(self, space: str) -> "Spoken":
        """Return what a device must know to speak this space."""
        return Spoken(self.spaces[space].action, space)

    @property
    def positions(self) -> Array:
        """The newest target [J] that the robot took, float64."""
        positions = self.robot.hold_action().astype(float)
        if self._begins and self._has_arrived():
            self._begins = False
            for space in self.spaces.values():
                space.begin(positions)
        return positions

    def _has_arrived(self) -> bool:
        try:
            return self.robot.is_home
        except RobotFault as fault:
            if fault.kind == READY:  # one may look at an arm before somebody has said ready
                return False
            raise

    @property
    def is_home(self) -> bool:
        return self.robot.is_home

    def observe(self) -> Reading:
        reading = self.robot.observe()
        executed = None if reading.executed is None else self._actual(reading.executed, self._before)
        return Reading(reading.values, reading.time, executed)

    def command(self, action: Array) -> Array:
        """Send an action [A]; return the one that was really executed. An action that is not finite holds."""
        action = np.asarray(action, self.action.dtype)
        self.action.check("action", action)
        before = self._before = self.positions
        if np.isfinite(action).all():
            target = self._space.target(np.clip(action, self.action.low, self.action.high).astype(float), before)
        else:
            target = np.full_like(before, np.nan)  # the robot holds
        taken = self.robot.command(target.astype(self.robot.action.dtype)).astype(float)
        self.toggled = sum(g.is_closed(taken[i]) != g.is_closed(before[i]) for i, g in self._grippers.items())
        return self._actual(taken, before)

    def hold_action(self) -> Array:
        positions = self.positions
        return self._actual(positions, positions)

    def home(self, seed: int) -> None:
        self.robot.home(seed)
        self._begins = True

    def return_home(self, seed: int) -> None:
        self.robot.return_home(seed)
        self._begins = True

    def recover(self) -> None:
        self.robot.recover()

    def stop(self) -> None:
        self.robot.stop()

    def close(self) -> None:
        self.robot.close()

    def _actual(self, target: Array, before: Array) -> Array:
        action = self._space.actual(target.astype(float), before).astype(self.action.dtype)
        return np.clip(action, self.action.low, self.action.high)


class Converted:
    """Wraps a Teleop that speaks another space, so that it speaks the robot's; a Teleop."""

    def __init__(self, teleop: Teleop, robot: SpacedRobot) -> None:
        self._teleop, self._robot, self.space = teleop, robot, robot.space
        self._spoken, self._taken = robot.spaces[teleop.space], robot.spaces[robot.space]

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        self._teleop.reset(seed, demonstrate=demonstrate)

    def read(self, hold: Array) -> Array | None:
        before, spoken = self._robot.positions, self._spoken.action
        wanted = self._teleop.read(self._spoken.actual(before, before).astype(spoken.dtype))
        if wanted is None:
            return None
        target = self._spoken.target(np.clip(wanted, spoken.low, spoken.high).astype(float), before)
        taken = self._taken.action
        return np.clip(self._taken.actual(target, before), taken.low, taken.high).astype(taken.dtype)

    def close(self) -> None:
        self._teleop.close()


def understood(teleop: Teleop, robot: Robot) -> Teleop:
    """Return a teleop of the robot's space. Raises ConfigError if it speaks one that cannot be converted."""
    if teleop.space == robot.space:
        return teleop
    spaces: Mapping[str, Space] = robot.spaces if isinstance(robot, SpacedRobot) else {}
    taken = spaces.get(robot.space)
    accepted = [name for name, spoken in spaces.items() if taken and _holds(taken, spoken)] or [robot.space]
    if isinstance(robot, SpacedRobot) and teleop.space in accepted:
        return Converted(teleop, robot)
    raise ConfigError(
        f"the teleop gives {teleop.space} actions, the robot takes {', '.join(accepted)}: choose another "
        "task.env.operator or task.env.space"
    )


def _holds(taken: Space, spoken: Space) -> bool:
    """Return whether actions of one space can say all that those of another one mean."""
    return spoken.moves <= taken.moves and (taken.is_whole or not spoken.is_whole)


def _bounds(positions: Feature) -> tuple[Array, Array]:
    assert positions.low is not None
    assert positions.high is not None
    return positions.low, positions.high
