"""Runs the guard, the only process that commands a real arm: it limits each set point, and holds."""

import logging
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from serl_client import clock
from serl_client.errors import RetakeError, RobotFault
from serl_client.spec import Array

from robot_infra.drivers.arm import Arm
from robot_infra.drivers.owner import open_arm
from robot_infra.guard.channel import Ended, Reply, Request, Shared, Start, Started, receive, send
from robot_infra.guard.limits import Limiter, are_positions, read_home, read_limits
from robot_infra.guard.motion import Motion

log = logging.getLogger(__name__)

LINGER = 1.0  # seconds that the arm is held after its actor has gone, until the guard ends
RELAXING = 1.0  # seconds, at most, until an arm that was blocked is led back to where it holds
READINGS, PAUSE = 10, 0.01  # of an arm before it may move, and seconds between two: who fails for a moment is found out


def main(descriptor: int) -> int:
    """Guard the arm that the actor names over the socket with this descriptor; return the exit status."""
    logging.basicConfig(format="[guard] %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the actor's: it says hold and close
    link = socket.socket(fileno=descriptor)
    start, _ = receive(link)
    if not isinstance(start, Start):
        return 1
    try:
        with open_arm(start.driver, start.address, start.options) as arm:
            text = _guarded(link, arm, start)
        ended = Ended(text)
    except RetakeError as error:
        ended = Ended(str(error))
    except Exception as error:
        log.exception("the guard of %s failed", start.address)
        ended = Ended(f"it failed: {type(error).__name__}: {error}")
    with suppress(OSError):
        send(link, ended)
    return 0


def _guarded(link: socket.socket, arm: Arm, start: Start) -> str:
    """Guard an arm until its actor has gone, or somebody ends this process; return why it ends."""
    measured = read(arm)
    has_tool = arm.tool(measured) is not None
    limits = read_limits(arm.entries, start.limits, has_tool=has_tool, ranges=arm.ranges, tools=arm.tools)
    motion = Motion(
        Limiter(limits, arm.tool), read_home(limits, start.home), tick=1 / start.servo_hz, period=1 / start.fps,
        home_speed=start.home_speed, measured=measured, is_ready=arm.is_simulated,
    )  # fmt: skip
    shared = Shared(arm.observation) if arm.observation else None
    features = {name: feature.to_dict() for name, feature in arm.observation.items()}
    started = Started(dict(limits.entries), limits.low.tolist(), limits.high.tolist(), features, limits.described())
    send(link, started, *([shared.descriptor] if shared else []))
    return Guard(link, arm, motion, shared, 1 / start.servo_hz).run()


def read(arm: Arm) -> Array:
    """Return the measured positions [J]. Raises RobotFault if there are more or less, or one is not finite."""
    measured = np.array(arm.read(), float)
    if not are_positions(measured, len(arm.entries)):
        raise RobotFault(f"the arm has {len(arm.entries)} entries, and its positions are {measured}", "sensor")
    return measured


class Guard:
    """Runs the servo loop of one arm, and answers its actor between two ticks."""

    def __init__(self, link: socket.socket, arm: Arm, motion: Motion, shared: Shared | None, tick: float) -> None:
        self._link, self._arm, self._motion, self._shared, self._tick = link, arm, motion, shared, tick
        self._ends: str | None = None  # why
        self._cut_at: float | None = None
        self._is_driver_ill = False  # True: until it has recovered the driver is not even asked for positions
        self._sequence = 0
        self._measured_at = clock.monotonic()
        self._has_scenes = arm.is_simulated and type(arm).scene is not Arm.scene
        self._handlers = {
            "target": self._track, "hold": self._hold, "home": self._go_home, "state": self._hear,
            "observe": self._observe, "recover": self._recover, "close": self._close,
        }  # fmt: skip

    def run(self) -> str:
        """Serve until the end; return why it came. The last set point holds the arm."""
        signal.signal(signal.SIGTERM, self._terminated)
        due = clock.monotonic()
        try:
            while self._ends is None:
                self._listen(max(0.0, due - clock.monotonic()))  # also when it is late: a sign of life may wait there
                if clock.monotonic() < due:
                    continue
                self._servo()
                due, now = due + self._tick, clock.monotonic()
                due = due if due > now else now + self._tick  # no short ticks to catch up
        finally:
            self._motion.hold()
            self._write()
        return self._ends

    def _servo(self) -> None:
        if self._cut_at is not None and clock.monotonic() > self._cut_at + LINGER:
            self._ends = "its actor has gone"
        with self._failing():
            self._write()
            if not self._is_driver_ill:
                measured, self._measured_at = np.array(self._arm.read(), float), clock.monotonic()
                self._motion.observe(measured)

    def _write(self) -> None:
        """Send the next set point, if one may be sent. Nothing else writes to the arm."""
        if (point := self._motion.advance()) is not None:
            made = self._arm.write(point.copy())
            if made is not None and not are_positions(made := np.asarray(made, float), len(point)):
                raise RobotFault(f"the driver says that it made {made} of a set point: that is no position", "driver")
            self._motion.accepted(point, made)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn a fault of the driver into one of the arm."""
        try:
            yield
        except RobotFault as fault:
            self._is_driver_ill = True
            self._motion.release(fault.kind, str(fault))

    # -- the actor

    def _listen(self, seconds: float) -> None:
        if self._cut_at is not None:
            clock.sleep(seconds)
            return
        if not select.select([self._link], [], [], seconds)[0]:
            return
        request, _ = receive(self._link)
        if not isinstance(request, Request):
            self._cut_at = clock.monotonic()
            self._motion.hold()
            return
        self._handlers[request.kind](request)
        motion = self._motion
        reply = Reply(
            request.number, motion.measured.tolist(), self._measured_at, motion.target.tolist(),
            [] if motion.executed is None else motion.executed.tolist(), motion.is_home, motion.fault, motion.limited,
            motion.refused, self._sequence,
        )  # fmt: skip
        with suppress(OSError):  # the actor has just gone: the next look says so
            send(self._link, reply)

    def _track(self, request: Request) -> None:
        self._motion.track(np.array(request.positions, float), clock.monotonic() - request.sent)

    def _hold(self, request: Request) -> None:
        self._motion.hold()

    def _go_home(self, request: Request) -> None:
        if not self._has_scenes or self._motion.fault:
            self._motion.go_home()
            return
        with self._failing():
            self._arm.scene(request.seed)
            self._motion.begin(read(self._arm), is_home=True)

    def _hear(self, request: Request) -> None:
        self._motion.hear()

    def _observe(self, request: Request) -> None:
        self._motion.hear()
        if self._shared is None or self._is_driver_ill:
            return
        with self._failing():
            arrays = self._arm.sense()
            for name, feature in self._arm.observation.items():
                feature.check(name, arrays[name])
                if not np.isfinite(arrays[name]).all():
                    raise RobotFault(
                        f"{name} holds a value that is not finite; a sensor or its driver failed", "sensor"
                    )
            self._sequence = self._shared.write(arrays)

    def _recover(self, request: Request) -> None:
        until = clock.monotonic() + RELAXING
        while self._motion.is_relaxing and clock.monotonic() < until:
            clock.sleep(self._tick)
            self._servo()
        self._motion.suspend()
        with self._failing():
            self._arm.recover()
            self._is_driver_ill = False
            if self._motion.may_recover(self._readings()):
                held = self._arm.enable()
                self._motion.recover(self._readings(), held)

    def _readings(self) -> list[Array]:
        """Return READINGS measurements, [J] each."""
        found = [np.array(self._arm.read(), float)]
        for _ in range(READINGS - 1):
            clock.sleep(PAUSE)
            found.append(np.array(self._arm.read(), float))
        return found

    def _close(self, request: Request) -> None:
        self._ends = "its actor has closed it"

    def _terminated(self, *_: object) -> None:
        self._ends = "it was ended by SIGTERM"
