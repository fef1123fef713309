"""Simulates a point in the plane that must reach a goal: a robot of numpy alone, with settable latency and faults."""

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
from robot_infra.guard.robot import GuardedRobot
from robot_infra.interfaces import Reading
from robot_infra.judges import DistanceCost, near
from robot_infra.safety import SafeRobot, check_clock
from robot_infra.tasks.simulated import Simulated
from robot_infra.teleop.hands import make_devices
from robot_infra.teleop.scripted import Rescuer
from robot_infra.teleop.verdicts import choose_judge

FAULTS = ("raise", "nan", "freeze")
FPS = 10.0  # steps per second, if nothing else is said
SPEED = 1.0  # metres per second, of the commanded position under an action of 1
SERVO_HZ = 100.0  # set points per second of its guard
LAG = 0.3  # part of the remaining way that is left after 0.1 s
NAMES = ("point.x", "point.y", "goal.x", "goal.y", "way.x", "way.y")


class FakeRobot(Simulated):
    """Moves a point that follows its commanded position with a first-order lag; metres, within [-1, 1].

    fps: steps per second. An action of 1 moves the commanded position by `stroke` metres in one of them.
    latency: how long a command blocks, seconds.
    faults: {kind: n}, what happens at the n-th command, counted from 1; None: never. `raise` fails the command, `nan`
        puts a NaN into the next observation, and from `freeze` on the point no longer moves.
    """

    space = "ee_delta"
    observation: Mapping[str, Feature] = {"observation.state": Feature((6,), names=NAMES)}
    action = Feature((2,), names=("x", "y"), low=np.array(-1), high=np.array(1))

    def __init__(
        self, *, fps: float = FPS, latency: float = 0.0, faults: Mapping[str, int | None] | None = None
    ) -> None:
        self._faults = {kind: number for kind, number in (faults or {}).items() if number is not None}
        if unknown := set(self._faults) - set(FAULTS):
            raise ConfigError(f"fault {min(unknown)!r} is unknown; use {', '.join(FAULTS)}")
        self._latency = latency
        self.stroke, self._tracking = SPEED / fps, 1 - LAG ** (10 / fps)
        self.commands = 0
        self.stopped = self.closed = False
        self.home(0)

    def home(self, seed: int) -> None:
        self.position, self.goal = np.random.default_rng(seed).uniform(-1, 1, (2, 2))
        self.commanded = self.position
        self.steps = 0  # since the point was home
        self.stopped = False

    def observe(self) -> Reading:
        state = np.concatenate([self.position, self.goal, self.goal - self.position])
        if self.commands == self._faults.get("nan"):
            state[0] = np.nan
        return Reading({"observation.state": state.astype(np.float32)}, clock.monotonic())

    def command(self, action: Array) -> Array:
        clock.sleep(self._latency)
        self.commands += 1
        self.steps += 1
        if self.commands == self._faults.get("raise"):
            raise RobotFault("the fake robot was told to fail")
        if self.commands < self._faults.get("freeze", np.inf):
            self.commanded = np.clip(self.commanded + self.stroke * action, -1, 1)
            self.position = self.position + self._tracking * (self.commanded - self.position)
        return action

    def hold_action(self) -> Array:
        return np.zeros(2, np.float32)

    def stop(self) -> None:
        self.stopped = True

    def recover(self) -> None:
        self.stopped = False

    def close(self) -> None:
        self.closed = True


class FakeArm(Arm):
    """Is the fake robot as a driver, whose positions are those of the point; `hz`: set points per second."""

    entries: Mapping[str, str] = {"x": "m", "y": "m"}
    observation = FakeRobot.observation
    is_simulated = True

    def __init__(self, address: str, *, hz: float, latency: float, faults: Mapping[str, int | None]) -> None:
        self._robot = FakeRobot(fps=hz, latency=latency, faults=faults)

    def read(self) -> Array:
        return self._robot.position

    def write(self, positions: Array) -> None:
        self._robot.command((positions - self._robot.commanded) / self._robot.stroke)

    def sense(self) -> Observation:
        return self._robot.observe().values

    def scene(self, seed: int) -> None:
        self._robot.home(seed)


class SeenPoint:
    """Shows a judge and a script what a guarded FakeArm observed last: see FakeRobot."""

    def __init__(self, robot: GuardedRobot, stroke: float) -> None:
        self._robot, self.stroke = robot, stroke

    @property
    def steps(self) -> int:
        return self._robot.steps

    @property
    def position(self) -> Array:
        return self._robot.seen["observation.state"][:2]

    @property
    def goal(self) -> Array:
        return self._robot.seen["observation.state"][2:4]


def guarded(*, fps: float, latency: float, faults: Mapping[str, int | None]) -> GuardedRobot:
    """Return the fake robot behind a guard; its faults count set points, not commands."""
    stroke = SPEED / fps
    limit = {"range": [-1, 1], "speed": 1.5 * SPEED, "jump": 1.5 * stroke, "tracking": 0.5}
    return GuardedRobot(
        f"{__name__}.FakeArm", address=f"fake-{secrets.token_hex(8)}", fps=fps, limits={"x": limit, "y": limit},
        home={"x": 0, "y": 0}, space="ee_delta", stroke=stroke, servo_hz=SERVO_HZ,
        options={"hz": SERVO_HZ, "latency": latency, "faults": faults},
    )  # fmt: skip


def distance(observation: Observation) -> float:
    """Return how far the point was seen from its goal, metres."""
    return float(np.linalg.norm(observation["observation.state"][4:6]))


def reach(robot: FakeRobot | SeenPoint) -> Array:
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
    guard: the point belongs to a guard, as a real arm would; only on the real clock.
    cost: what each metre to the goal takes of a step's reward.
    """
    point: FakeRobot | SeenPoint
    if guard:
        check_clock(clock)
        owner = guarded(fps=fps, latency=latency, faults=faults or {})
        point = SeenPoint(owner, SPEED / fps)
    else:
        point = FakeRobot(fps=fps, latency=latency, faults=faults)
        owner = SafeRobot(point)
    scripted = Rescuer(
        partial(reach, point), lambda: float(np.linalg.norm(point.goal - point.position)),
        noise=noise, margin=point.stroke / 4, takeover_after=takeover_after, handback_after=handback_after,
    )  # fmt: skip
    teleop, hands = make_devices(operator, scripted, owner, clock=clock, devices=devices)
    judge, person = choose_judge(
        verdict_by, lambda: near(point.position, point.goal, 0.05), lambda: point.steps, max_steps, hands,
        before=[lambda: near(point.position, point.goal, 0.3)],
    )  # fmt: skip
    if cost:
        judge = DistanceCost(judge, cost, distance)
    return RobotEnv(
        owner, judge=judge, task="reach the goal", fps=fps, max_steps=max_steps, clock=clock, teleop=teleop,
        operator=person,
    )  # fmt: skip
