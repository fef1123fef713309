"""Guards one arm: answers its actor, and sends the arm one limited set point in each tick."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from serl_client import clock
from serl_client.errors import RobotFault
from serl_client.spec import Array

from robot_infra.drivers.arm import Arm
from robot_infra.guard.channel import Reply, Request, Shared, Start, Started
from robot_infra.guard.lead import Lead
from robot_infra.guard.limits import Limiter, are_positions, read_home, read_limits, read_waypoints
from robot_infra.guard.motion import HOME, Motion

RELAXING = 1.0  # seconds, at most, until an arm that was blocked is led back to where it holds
# Seconds after which it is not taken: its actor may have given up.
# Whether the leader arm stays where it is after such a request; after another one it does as before.
LEADER_STAYS = {"hold": True, "stay": True, "come": False, "target": False, "home": False, "return_home": False}
OLD = {"target": 0.5, "follow": 0.5, "come": 0.5, "home": 5.0, "return_home": 5.0, "recover": 5.0}
READINGS, PAUSE = 10, 0.01  # of an arm before it may move, and seconds between two: who fails for a moment is found out


def read(arm: Arm) -> Array:
    """Return the measured positions [J]. Raises RobotFault if there are more or less, or one is not finite."""
    measured = np.array(arm.read(), float)
    if not are_positions(measured, len(arm.entries)):
        raise RobotFault(f"the arm has {len(arm.entries)} entries, and its positions are {measured}", "sensor")
    return measured


class Guard:
    """Guards an arm: nothing else writes to it. Whoever has a Guard calls `servo` once in each tick.

    start: how the arm may move; its driver is made already. sleep: waits so many seconds between two looks at the arm.
    `started` describes the arm, `shared` holds what it observed. Raises ConfigError for limits or a home that cannot
    be, and RobotFault if the arm tells no positions.
    """

    def __init__(self, arm: Arm, start: Start, sleep: Callable[[float], None] = clock.sleep) -> None:
        measured = read(arm)
        has_tool = arm.tool(measured) is not None
        limits = read_limits(arm.entries, start.limits, has_tool=has_tool, ranges=arm.ranges, tools=arm.tools)
        self._arm, self._tick, self._sleep = arm, 1 / start.servo_hz, sleep
        self._motion = Motion(
            Limiter(limits, arm.tool), read_home(limits, start.home), tick=self._tick, period=1 / start.fps,
            home_speed=start.home_speed, measured=measured, is_ready=arm.is_simulated,
        )  # fmt: skip
        self._waypoints = read_waypoints(limits, start.waypoints)  # [n, 2, J]
        self._lead = Lead(arm, limits, self._tick)
        self.shared = Shared(arm.observation) if arm.observation else None
        features = {name: feature.to_dict() for name, feature in arm.observation.items()}
        low, high = limits.low.tolist(), limits.high.tolist()
        self.started = Started(dict(limits.entries), low, high, features, limits.described(), arm.leads)
        self._is_driver_ill = False  # True: until it has recovered the driver is not even asked for positions
        self._sequence = 0
        self._measured_at = clock.monotonic()
        self._has_scenes = arm.is_simulated and type(arm).scene is not Arm.scene
        self._handlers = {
            "target": self._track, "hold": self._hold, "home": self._go_home, "return_home": self._return_home,
            "state": self._hear, "observe": self._observe, "recover": self._recover, "close": self._hold,
            "follow": self._follow, "let_go": self._let_go, "stay": self._hear, "come": self._hear,
        }  # fmt: skip

    @property
    def is_on_its_way(self) -> bool:
        """Return whether the arm drives home."""
        return self._motion.mode == HOME

    def servo(self) -> None:
        """Send the set point of this tick, and measure."""
        with self._failing():
            self._write()
            if not self._is_driver_ill:
                measured, self._measured_at = np.array(self._arm.read(), float), clock.monotonic()
                self._motion.observe(measured)
                self._lead.advance(None if self._motion.fault else self._motion.point)

    def hold(self) -> None:
        """Hold, as if the actor had said so."""
        self._motion.hold()
        self._lead.stays = True

    def leave(self) -> None:
        """Send the last set point, which holds the arm. Raises RobotFault if the driver fails."""
        self._motion.hold()
        self._write()

    def hear(self, request: Request) -> None:
        """Do what the actor asks for, as far as it may be done. What could move the arm, and comes late, is a fault."""
        age = clock.monotonic() - request.sent
        if age > OLD.get(request.kind, math.inf):
            said = f"{request.kind} came {age:.2f} s after it was sent: the guard was stopped or starved"
            self._motion.fail("guard", said)
            return
        self._lead.stays = LEADER_STAYS.get(request.kind, self._lead.stays)
        with self._failing():
            self._handlers[request.kind](request)

    def reply(self, request: Request) -> Reply:
        """Answer this request."""
        motion = self._motion
        return Reply(
            request.number, motion.measured.tolist(), self._measured_at, motion.target.tolist(),
            [] if motion.executed is None else motion.executed.tolist(), motion.is_home, motion.fault, motion.limited,
            motion.refused, self._sequence, self._lead.state,
        )  # fmt: skip

    def _write(self) -> None:
        """Send the next set point, if one may be sent. Nothing else writes to the arm."""
        if (point := self._motion.advance()) is not None:
            made = self._arm.write(point.copy())
            if made is not None and not are_positions(made := np.asarray(made, float), len(point)):
                raise RobotFault(f"the driver says that it made {made} of a set point: that is no position", "driver")
            self._motion.accepted(point, made)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn a fault of the driver into one of the arm. After whatever else it raises nothing is sent, either."""
        try:
            yield
        except Exception as error:
            self._is_driver_ill = True
            self._motion.release(error.kind if isinstance(error, RobotFault) else "driver", str(error))
            if not isinstance(error, RobotFault):
                raise

    def _track(self, request: Request) -> None:
        self._motion.track(np.array(request.positions, float))

    def _hold(self, request: Request) -> None:
        self._motion.hold()

    def _go_home(self, request: Request) -> None:
        if not self._has_scenes or self._motion.fault:
            self._motion.go_home()
            return
        self._arm.scene(request.seed)
        self._motion.begin(read(self._arm), is_home=True)

    def _return_home(self, request: Request) -> None:
        low, high = self._waypoints.swapaxes(0, 1)
        self._motion.go_home(low + np.random.default_rng(request.seed).random(low.shape) * (high - low))

    def _hear(self, request: Request) -> None:
        self._motion.hear()

    def _follow(self, request: Request) -> None:
        self._motion.hear()
        self._lead.follow()

    def _let_go(self, request: Request) -> None:
        self._motion.hear()
        self._lead.let_go()

    def _observe(self, request: Request) -> None:
        self._motion.hear()
        if self.shared is None or self._is_driver_ill:
            return
        arrays = self._arm.sense()
        for name, feature in self._arm.observation.items():
            feature.check(name, arrays[name])
            if not np.isfinite(arrays[name]).all():
                raise RobotFault(f"{name} holds a value that is not finite; a sensor or its driver failed", "sensor")
        self._sequence = self.shared.write(arrays)

    def _recover(self, request: Request) -> None:
        for _ in range(round(RELAXING / self._tick)):
            if not self._motion.is_relaxing:
                break
            self._sleep(self._tick)
            self.servo()
        self._motion.suspend()
        self._arm.recover()
        self._is_driver_ill = False
        self._lead.advance(None)
        if self._motion.may_recover(self._readings()):
            held = self._arm.enable()
            self._motion.recover(self._readings(), held)

    def _readings(self) -> list[Array]:
        """Return READINGS measurements, [J] each."""
        found = [np.array(self._arm.read(), float)]
        for _ in range(READINGS - 1):
            self._sleep(PAUSE)
            found.append(np.array(self._arm.read(), float))
        return found
