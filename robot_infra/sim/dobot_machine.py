"""Simulates what a Dobot controller makes of commands: power, alarms, and joints that follow servo set points.

It has no socket and no clock: dobot_controller.py puts it on the network. Source: as drivers/dobot_protocol.py. What
docs/guides/robots.md marks as assumed stands in no document.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from serl_client.spec import Array

from robot_infra.drivers import dobot_protocol as p

VELOCITY = 150.0  # degrees per second, the most of each joint (assumed)
OVERSPEED = 300.0  # degrees per second that a set point asks for, from where an alarm ends the motion (assumed)
LAG = 0.02  # seconds, of the first-order lag with a gain of 500 and a look-ahead of 50 (assumed)
CLOSE = 0.01  # degrees from its target where a joint has arrived
ENABLING = 0.2  # seconds (assumed)
TURN = 360.0  # degrees, the end of each joint's range (assumed)
HISTORY = 10_000  # entries that are remembered
WRONG_MODE = "Control Mode Is Not Tcp"
COMMAND = re.compile(r"\s*(\w+)\s*\((.*)\)", re.DOTALL)
OPTIONS = {"t": 0.1, "gain": 500.0, "ahead": 50.0}  # of ServoJ


class Refusal(Exception):
    """Ends a command with this error number."""

    def __init__(self, error: int) -> None:
        super().__init__(error)
        self.error = error


class Machine:
    """Holds the state of an arm, in degrees and seconds of its own time.

    power_s: seconds from PowerOn until there is power; it begins with power, and disabled.

    **Assumed:** each joint follows its set points with a lag, its encoders are exact, and motors that come on hold the
    arm where it stands. It cannot show masses, gravity, collisions, or what filters a real controller has.

    `is_tcp`: False: commands are refused, as long as its own screen has the control. `q`, `speed`: of the joints [6].
    `heard` has (time, text) of each command, `targets` (time, [6]) of each set point that was obeyed, `speeds` (time,
    the fastest joint) of each 8 ms.
    """

    def __init__(self, version: p.Version, *, power_s: float) -> None:
        self.version, self._power_s = version, power_s
        self.time, self.is_tcp = 0.0, True
        self.q, self.speed = np.array([0.0, 20.0, -60.0, 0.0, 90.0, 0.0]), np.zeros(p.JOINTS)
        self.alarms: list[list[int]] = [[] for _ in range(p.JOINTS + 1)]  # of the controller, then of each joint
        self.is_powered, self.is_enabled, self.is_stopped, self.is_paused = True, False, False, False
        self._power_at = self._enabled_at = np.inf
        self._id = 0  # of the newest queued command
        self.heard: deque[tuple[float, str]] = deque(maxlen=HISTORY)
        self.targets: deque[tuple[float, Array]] = deque(maxlen=HISTORY)
        self.speeds: deque[tuple[float, float]] = deque(maxlen=HISTORY)
        self._commands: dict[str, tuple[Callable[[], object], int, bool]] = {
            # name: (what it does, most arguments, whether it is obeyed in an alarm and without power)
            "poweron": (self._power_on, 0, True), "enablerobot": (self._enable, 5, False),
            "clearerror": (self._clear, 0, True), version.stop.lower()[:-2]: (self._stop, 0, True),
            "geterrorid": (lambda: str(self.alarms).replace(" ", ""), 0, True),
        }  # fmt: skip
        self._hold()

    @property
    def mode(self) -> int:
        """Return RobotMode."""
        if any(self.alarms):
            return p.COLLISION if p.COLLIDED in self.alarms[0] else p.ERROR
        if not self.is_powered:
            return p.POWERLESS
        if not self.is_enabled:
            return p.DISABLED
        if self.is_paused:
            return p.PAUSE
        return p.RUNNING if self.speed.any() else p.IDLE

    # -- what happens to it

    def advance(self, seconds: float) -> None:
        """Let time pass, at most a few milliseconds."""
        self.time += seconds
        if self.time >= self._power_at:
            self.is_powered, self._power_at = True, np.inf
        if self.time >= self._enabled_at:
            self.is_enabled, self._enabled_at = True, np.inf
            self._hold()
        goal, most = self._goal(), VELOCITY * seconds
        way = np.clip((goal - self.q) * (1 - np.exp(-seconds / self._lag)), -most, most)
        arrived = (goal == self._target) & (np.abs(goal - self.q) < CLOSE)
        way = np.where(arrived, goal - self.q, way) * self.is_enabled
        self.q, self.speed = self.q + way, np.where(arrived, 0.0, way / seconds)
        self.speeds.append((self.time, float(np.abs(self.speed).max())))

    def stand(self, joints: Array) -> None:
        """Be at these joints [6] at once, and forget the last set point: a simulation begins anew."""
        self.q, self.speed = np.array(joints, float), np.zeros(p.JOINTS)
        self._hold()

    def alarm(self, number: int, joint: int = 0) -> None:
        """Raise an alarm of the controller, or of joint 1 to 6: the arm stands, and is disabled."""
        self.alarms[joint].append(number)
        self.disable()

    def press(self) -> None:
        """Press the emergency stop, which also takes the power away."""
        self.is_stopped, self.is_powered = True, False
        self.alarm(p.STOPPED)

    def release(self) -> None:
        """Release the emergency stop; its alarm stays until it is cleared."""
        self.is_stopped = False

    def disable(self) -> None:
        """Disable the arm, as its own screen may, too."""
        self.is_enabled, self._enabled_at = False, np.inf
        self.speed = np.zeros(p.JOINTS)
        self._hold()

    def pause(self) -> None:
        """Pause on its own screen."""
        self.is_paused = True
        self._hold()

    def _hold(self) -> None:
        self._target = self._from = self.q
        self._since, self._t, self._lag = self.time, 0.1, LAG

    def _goal(self) -> Array:
        """Return the joints [6] on the straight line to the newest set point, which takes t."""
        share = min(1.0, (self.time - self._since) / self._t)
        return self._target if share == 1 else self._from + share * (self._target - self._from)

    # -- commands

    def obey(self, text: str, port: int) -> str | None:
        """Carry out one command that came to this port; return the reply, None if there is none."""
        self.heard.append((self.time, text))
        if not self.is_tcp:
            return WRONG_MODE
        said = COMMAND.fullmatch(text)
        name, given = (said[1], said[2].strip()) if said else (text.strip(), "")
        words = [word.strip() for word in given.split(",")] if given else []
        is_servo = name.lower() == "servoj" and port == self.version.motion
        try:
            error, values = 0, self._servo(words) if is_servo else self._command(name.lower(), words, port)
        except Refusal as refusal:
            error, values = refusal.error, ""
        return None if is_servo and not self.version.servo_replies else f"{error},{{{values}}},{name}({given});"

    def _command(self, name: str, words: Sequence[str], port: int) -> str:
        if name not in self._commands or port != p.DASHBOARD:
            raise Refusal(-10000)
        obey, most, always = self._commands[name]
        if len(words) > most:
            raise Refusal(-20000)
        for i, word in enumerate(words):
            _number(word, -50_001 - i)
        if not always:
            self._check_state()
        return str(obey() or "")

    def _check_state(self) -> None:
        """Refuse what needs power and no alarm."""
        states = (self.is_stopped, -3), (any(self.alarms), -2), (not self.is_powered, -4), (self.is_paused, -5)
        for is_so, error in states:
            if is_so:
                raise Refusal(error if self.version.tells_why else -1)

    def _power_on(self) -> None:
        if self.is_stopped:
            raise Refusal(-3 if self.version.tells_why else -1)
        if not self.is_powered:
            self._power_at = self.time + self._power_s

    def _enable(self) -> None:
        if not self.is_enabled:
            self._enabled_at = self.time + ENABLING

    def _clear(self) -> None:
        if self.is_stopped:
            raise Refusal(-3 if self.version.tells_why else -1)
        self.alarms = [[] for _ in self.alarms]

    def _stop(self) -> None:
        self.is_paused = False
        self._hold()

    def _servo(self, words: Sequence[str]) -> str:
        plain = [word for word in words if "=" not in word]
        if len(plain) != p.JOINTS:
            raise Refusal(-20000)
        target = np.array([_number(word, -30_001 - i) for i, word in enumerate(plain)])
        if (np.abs(target) > TURN).any():
            raise Refusal(-40_001 - int(np.argmax(np.abs(target))))
        options, ranges = dict(OPTIONS), {"t": (self.version.shortest, p.LONGEST), "gain": p.GAIN, "ahead": p.AHEAD}
        for i, word in enumerate(words[p.JOINTS :], p.JOINTS + 1):
            name, _, value = word.partition("=")
            name = "ahead" if name == self.version.ahead else name
            if name not in OPTIONS:
                raise Refusal(-50_000 - i)
            options[name] = _number(value, -50_000 - i)
            if not ranges[name][0] <= options[name] <= ranges[name][1]:
                raise Refusal(-60_000 - i)
        self._check_state()
        if not self.is_enabled:
            raise Refusal(-1)
        self._track(target, **options)
        self._id += 1
        return str(self._id) if self.version.servo_replies else ""

    def _track(self, target: Array, t: float, gain: float, ahead: float) -> None:
        goal = self._goal()
        speeds = np.abs(target - self._target) / t  # from the set point before: several may come at once
        if speeds.max() > OVERSPEED:
            self.alarm(p.OVERSPEED + int(np.argmax(speeds)))
            return
        self.targets.append((self.time, target))
        self._target, self._from, self._since, self._t = target, goal, self.time, t
        self._lag = LAG * 500 / gain * ahead / 50

    # -- feedback

    def packet(self) -> bytes:
        """Return the feedback packet of now."""
        made: Any = np.zeros((), p.PACKET)
        made["len"], made["test_value"], made["time_stamp"] = p.SIZE, p.TEST, round(1000 * self.time)
        made["robot_mode"] = self.mode
        made["q_actual"], made["qd_actual"], made["q_target"] = self.q, self.speed, self._target
        made["enable_status"], made["error_status"] = self.is_enabled, any(self.alarms)
        made["running_status"] = self.speed.any()
        return made.tobytes()


def _number(word: str, error: int) -> float:
    """Return the finite number that a word is. Raises Refusal with this error if it is none."""
    try:
        number = float(word)
    except ValueError:
        raise Refusal(error) from None
    if not np.isfinite(number):
        raise Refusal(error)
    return number
