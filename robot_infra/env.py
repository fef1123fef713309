"""Makes a robot, its cameras, its judge and its teleoperation one environment (RobotEnv) with a fixed control rate."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
from serl_client import clock
from serl_client.closing import Closing
from serl_client.env import Observation, Step
from serl_client.errors import RobotFault
from serl_client.spec import Array, Feature, Spec

from robot_infra.alignment import AGE, IMAGES, Alignment
from robot_infra.interfaces import STAGE, Camera, Judge, Operator, Robot, Teleop, Verdict
from robot_infra.intervention import HANDOVER, POLICY_ACTION, Intervention, policy_action
from robot_infra.pace import Pace
from robot_infra.safety import check_guarded
from robot_infra.spaces import understood
from robot_infra.turns import Turns

log = logging.getLogger(__name__)

FAILURES = 3  # of a judge in succession, until a person must look


class RobotEnv(Closing):
    """Implements serl_client.env.Env over a robot; a context manager, so that every way out stops the robot.

    judge: gives reward and success; only it terminates an episode. Its success counts once the episode has ended.
    An error of the judge ends the episode, which is cut off before that step; the next one begins as usual.
    task: in words; Turns: several, of which each episode does one. `observation.task` tells the policy which, one-hot.
    trouble: says why the scene cannot be a start, as it is, once the robot is home; empty: it can.
    fps: steps per second. max_steps: an episode of so many steps is truncated.
    clock: "real": a step lasts 1/fps seconds (see Pace). "simulated": nothing waits.
    teleop: the device of the human; None: nobody can take over.
    operator: the person at the keys, if the teleop is their keyboard too; it is closed with the env.
    handover: seconds from the last action of policy or person to the first one of the other; 0: at once.

    Each row also records `age.<camera>`, how long before the state each image was taken (seconds, see Alignment). With
    a teleop it records `policy_action`, and with a hand-over `handover` (intervention.py). Raises ConfigError for an
    unknown clock, and for a teleop whose action space cannot be converted to the robot's (spaces.py).
    """

    def __init__(
        self, robot: Robot, *, judge: Judge, task: str | Turns, fps: float, max_steps: int, clock: str = "real",
        cameras: Mapping[str, Camera] | None = None, teleop: Teleop | None = None, operator: Operator | None = None,
        handover: float = 0.0, trouble: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        self._pace = Pace(clock, fps)
        check_guarded(robot, clock, fps)
        teleop = teleop and understood(teleop, robot)
        self.robot, self.judge, self.teleop, self.operator = robot, judge, teleop, operator
        self._alignment = Alignment(cameras or {}, fps, is_real=self._pace.is_real)
        images = {name: camera.feature for name, camera in self.cameras.items()}
        extras = {AGE + name: Feature(()) for name in cameras or ()}
        ramp = round(handover * fps)
        if teleop is not None:
            extras[POLICY_ACTION] = Feature(robot.action.shape, robot.action.dtype)
            extras |= {HANDOVER: Feature((), "bool")} if ramp > 1 else {}
        self.turns = task if isinstance(task, Turns) else Turns((task,))
        self.spec = Spec({**robot.observation, **self.turns.features, **images}, robot.action, fps, extras)
        self.clock, self.has_operator = clock, teleop is not None
        self.keeps_scene = False  # the next way home leaves the scene as it is (resets.py)
        self._trouble = trouble
        self.observed = 0.0
        self._max_steps = max_steps
        self._steps = 0
        self._failure = ""  # why the judge says nothing of this episode
        self._failures = 0  # of it, since its latest verdict
        self._homed: int | None = None  # the seed that the robot went home for
        self._ages: dict[str, Array] = {}  # of the latest observation
        self._executed: Array | None = None  # in the step before
        self._intervention = Intervention(teleop, ramp)

    @property
    def task(self) -> str:
        """The task of this episode, or of the next one, in words."""
        return self.turns.text

    @property
    def trouble(self) -> str:
        """Why the scene, as it is now, cannot be a start; empty: it can. The robot is home."""
        self.robot.observe()
        return self._trouble()

    @property
    def cameras(self) -> dict[str, Camera]:
        """The cameras, by the names of their images."""
        return {IMAGES + name: camera for name, camera in self._alignment.cameras.items()}

    @property
    def is_home(self) -> bool:
        return self.robot.is_home

    def home(self, seed: int) -> None:
        if self.keeps_scene:
            self.robot.return_home(seed)
        else:
            self.robot.home(seed)
        self._homed = seed

    def reset(self, seed: int, *, teleop: bool = False, intervene: bool = False) -> Observation:
        """Begin an episode, as Env.reset. Raises ConfigError for `teleop` if the env has no teleop, and RobotFault if
        a camera gives no image of the start."""
        self._intervention.reset(seed, demonstrate=teleop, intervene=intervene)
        if self._homed != seed:
            self.home(seed)
        while not self.is_home:
            clock.sleep(self._pace.period)
        self._homed, self._steps, self._executed = None, 0, None
        self._failure = ""
        with self._judging():
            self.judge.reset()
        self._alignment.wait(clock.monotonic())
        self._pace.begin()
        observation, _, stale = self._observe()
        if stale:
            raise RobotFault(stale, "camera")
        return observation

    def look(self) -> bool:
        if self._pace.is_real and clock.monotonic() > self.observed + 2 * self._pace.period:
            self.robot.observe()  # while nobody steps: a leader arm is seen by the robot's driver
        return self._intervention.look(self.robot.hold_action())

    def step(self, action: Array | None) -> Step:
        """Make one control step, as Env.step: send the action [A], wait for the end of the step, observe, judge."""
        driven, is_theirs = self._intervention.drive(action, self.robot.hold_action(), self._executed)
        sent = clock.monotonic()
        executed = self.robot.command(driven)
        extras = dict(self._ages)  # of the observation before this action
        self._pace.wait(sent)
        observation, changed, stale = self._observe()
        self._executed = executed = executed if changed is None else changed
        if POLICY_ACTION in self.spec.extras:
            extras[POLICY_ACTION] = policy_action(action, executed)
        if HANDOVER in self.spec.extras:
            extras[HANDOVER] = np.array(self._intervention.is_handover)
        verdict = Verdict(0.0, terminated=False, success=None)
        with self._judging():
            verdict = self.judge(observation)
            self._failures = 0
        if STAGE in self.spec.extras:
            extras[STAGE] = np.array(verdict.stage or 0)
        self._steps += 1
        truncated = self._steps >= self._max_steps and not verdict.terminated
        success = verdict.success if verdict.terminated or truncated else None
        return Step(
            observation, verdict.reward, executed, is_theirs, verdict.terminated, truncated, success, extras,
            stale or self._failure, self._intervention.is_driven,
        )  # fmt: skip

    def stop(self) -> None:
        """Hold now; may be called twice."""
        self._homed = None
        self.robot.stop()

    def recover(self) -> None:
        self.robot.recover()

    def close(self) -> None:
        """Stop the robot and give every device back, even if one of them fails; may be called twice."""
        with ExitStack() as stack:
            for part in (self.operator, self.teleop, self.judge, *self.cameras.values(), self.robot):
                if part is not None:
                    stack.callback(part.close)
            self.stop()

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """Take an error of the judge for the reason why this episode ends."""
        try:
            yield
        except RobotFault:
            raise
        except Exception as error:
            self._failure = f"the judge {type(self.judge).__name__} failed: {type(error).__name__}: {error}"
            log.error("%s", self._failure, exc_info=error)
            self._failures += 1
            if self._failures >= FAILURES:  # else an arm would go home again and again
                self._failures = 0
                raise RobotFault(self._failure, "judge") from error

    def _observe(self) -> tuple[Observation, Array | None, str]:
        """Return state and images, the action [A] that the arm itself made of the latest one, and what is stale."""
        reading = self.robot.observe()
        self.observed = reading.time
        images, self._ages, stale = self._alignment.look(reading.time)
        return reading.values | self.turns.observed | images, reading.executed, stale
