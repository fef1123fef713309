"""Simulates a point in the plane that must reach a goal: an arm of numpy alone, with settable latency and faults."""

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from serl_client import clock
from serl_client.env import Observation
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array, Feature

from robot_infra.drivers.arm import Arm
from robot_infra.env import RobotEnv
from robot_infra.guard.robot import STATE, GuardedRobot
from robot_infra.judges import DistanceCost, near
from robot_infra.safety import check_clock
from robot_infra.teleop.hands import make_devices
from robot_infra.teleop.scripted import Rescuer
from robot_infra.teleop.verdicts import choose_judge

FAULTS = ("raise", "nan", "freeze")
FPS = 10.0  # steps per second, if nothing else is said
SPEED = 1.0  # metres per second, of the commanded position under an action of 1
SERVO_HZ = 100.0  # set points per second of its guard
FAR = 10.0  # metres: without a guard process it may stand where it likes
LAG = 0.3  # part of the remaining way that is left after 0.1 s
NAMES = ("point.x", "point.y", "goal.x", "goal.y", "way.x", "way.y")


class FakeArm(Arm):
    """Moves a point that follows its set points with a first-order lag; metres, within [-1, 1].

    address: any name. hz: set points per second. latency: how long each of them blocks, seconds.
    faults: {kind: n}, what happens at the n-th set point, counted from 1; None: never. `raise` fails it, `nan` puts a
        NaN into what is observed next, and from `freeze` on the point no longer moves.

    **Assumed:** a real arm's motors never overshoot, and its sensors are exact. It cannot show an obstacle, or a motor
    that is off.
    """

    entries: Mapping[str, str] = {"x": "m", "y": "m"}
    observation: Mapping[str, Feature] = {STATE: Feature((6,), names=NAMES)}
    is_simulated = True

    def __init__(
        self, address: str, *, hz: float, latency: float = 0.0, faults: Mapping[str, int | None] | None = None
    ) -> None:
        self._faults = {kind: number for kind, number in (faults or {}).items() if number is not None}
        if unknown := set(self._faults) - set(FAULTS):
            raise ConfigError(f"fault {min(unknown)!r} is unknown; use {', '.join(FAULTS)}")
        self._latency, self._follows, self._written = latency, 1 - LAG ** (10 / hz), 0
        self.scene(0)

    def scene(self, seed: int) -> None:
        self.position, self.goal = np.random.default_rng(seed).uniform(-1, 1, (2, 2))

    def read(self) -> Array:
        return self.position

    def write(self, positions: Array) -> Array | None:
        if self._latency:
            clock.sleep(self._latency)
        self._written += 1
        if self._written == self._faults.get("raise"):
            raise RobotFault("the fake robot was told to fail")
        if self._written < self._faults.get("freeze", np.inf):
            self.position = self.position + self._follows * (positions - self.position)
        return None

    def sense(self) -> Observation:
        state = np.concatenate([self.position, self.goal, self.goal - self.position])
        if self._written == self._faults.get("nan"):
            state[0] = np.nan
        return {STATE: state.astype(np.float32)}


class Point:
    """Is what a judge and a script see of a guarded FakeArm: what it observed last. An action moves it by `stroke`."""

    def __init__(self, robot: GuardedRobot) -> None:
        self._robot, self.stroke = robot, SPEED / robot.fps

    @property
    def steps(self) -> int:
        return self._robot.steps

    @property
    def position(self) -> Array:
        return self._robot.seen[STATE][:2]

    @property
    def goal(self) -> Array:
        return self._robot.seen[STATE][2:4]


def guarded(
    driver: type[FakeArm] = FakeArm, robot: type[GuardedRobot] = GuardedRobot, *, fps: float, guard: bool = False,
    **options: Any,
) -> GuardedRobot:  # fmt: skip
    """Return a robot that moves a point by steps of its set point.

    guard: its guard is a process of its own. options: of the driver, besides `hz`.
    """
    hz = max(SERVO_HZ, fps) if guard else fps
    stroke = SPEED / fps
    limit = {"range": [-1, 1], "speed": 1.5 * SPEED, "jump": 1.5 * stroke, "tracking": 0.5 if guard else FAR}
    return robot(
        f"{driver.__module__}.{driver.__name__}", address=f"fake-{secrets.token_hex(8)}", fps=fps, process=guard,
        limits=dict.fromkeys(driver.entries, limit), home=dict.fromkeys(driver.entries, 0), space="ee_delta",
        stroke=stroke, servo_hz=hz, options={"hz": hz, **options},
    )  # fmt: skip


def distance(observation: Observation) -> float:
    """Return how far the point was seen from its goal, metres."""
    return float(np.linalg.norm(observation[STATE][4:6]))


def reach(robot: Point) -> Array:
    """Return the action [x, y] straight to the goal; more than 1 when it is far."""
    return (robot.goal - robot.position) / robot.stroke


def make(
    *, max_steps: int, noise: float, clock: str, fps: float = FPS, latency: float = 0.0,
    faults: Mapping[str, int | None] | None = None, operator: str = "scripted", verdict_by: str = "judge",
    takeover_after: int = 12, handback_after: int = 10, guard: bool = False, cost: float = 0.0,
    devices: Mapping[str, Any] | None = None,
) -> RobotEnv:  # fmt: skip
    """Make the reaching task as an Env.

    noise: standard deviation of the scripted operator's actions.
    verdict_by: `judge` or `operator` (teleop/verdicts.py).
    guard: its guard is a process of its own, as a real arm's; only on the real clock.
    cost: what each metre to the goal takes of a step's reward.
    """
    if guard:
        check_clock(clock)
    robot = guarded(fps=fps, guard=guard, latency=latency, faults=faults or {})
    point = Point(robot)
    scripted = Rescuer(
        partial(reach, point), lambda: float(np.linalg.norm(point.goal - point.position)),
        noise=noise, margin=point.stroke / 4, takeover_after=takeover_after, handback_after=handback_after,
    )  # fmt: skip
    teleop, hands = make_devices(operator, scripted, robot, clock=clock, devices=devices)
    judge, person = choose_judge(
        verdict_by, lambda: near(point.position, point.goal, 0.05), lambda: point.steps, max_steps, hands,
        before=[lambda: near(point.position, point.goal, 0.3)],
    )  # fmt: skip
    if cost:
        judge = DistanceCost(judge, cost, distance)
    return RobotEnv(
        robot, judge=judge, task="reach the goal", fps=fps, max_steps=max_steps, clock=clock, teleop=teleop,
        operator=person,
    )  # fmt: skip
