"""Merges a person's devices into one: takeover by touch or toggle, driving speed, gripper, verdicts."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from serl_client import clock
from serl_client.driving import RemoteDriver
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array, Feature

from robot_infra.interfaces import Device, Hand, Operator, Teleop
from robot_infra.teleop.gamepad import Gamepad
from robot_infra.teleop.keyboard import Keyboard, KeyboardDevice
from robot_infra.teleop.leader import Leader
from robot_infra.teleop.page import PageDevice
from robot_infra.teleop.spacemouse import SpaceMouse

SPEED = 0.5  # of the robot's bounds, at full deflection of a device or while a key is held
WISH = 0.3  # seconds for which a key that moves may wait for the next step; later it was meant for something else
RELEASE = 0.5  # seconds after the last touch until a person who took over by touch hands back
TAKEOVERS = ("touch", "toggle")
OPERATORS = ("keyboard", "gamepad", "spacemouse", "leader", "page")
TOUCHES = {"toggle", "take over"}  # words by which a person takes the robot


class Driven(Protocol):
    """Describes what devices must know of the robot that they drive; see Robot."""

    @property
    def action(self) -> Feature: ...

    @property
    def space(self) -> str: ...


class Hands:
    """Merges `devices`; a Teleop, and the Operator who says ready, success and so on, and "moved" of any device.

    action, space: of the robot that they drive.
    takeover: `touch`: whoever moves a device drives, until they have let go for RELEASE seconds. `toggle`: only the
        device's toggle takes over. A takeover by a toggle lasts until the next one, in both.

    A demonstration is driven from the first touch or toggle on, until a toggle; before it nobody drives.
    What nobody moves stays as it is: a gripper, too, until one of its keys is used in this takeover. Then it acts until
    the other one is. Raises ConfigError if no device can move some entry of the action.
    Whoever touches a device takes the robot from one at the page, who gets it again once it was handed back.
    remote: whom somebody at the page drives by; None: nobody there may.
    """

    def __init__(self, devices: Sequence[Device], action: Feature, space: str, *, takeover: str = "touch") -> None:
        if takeover not in TAKEOVERS:
            raise ConfigError(f"task.devices.takeover={takeover} is unknown; use {' or '.join(TAKEOVERS)}")
        moves = frozenset[str]().union(*(device.moves or action.names for device in devices))
        leads = any(device.moves is None for device in devices)
        if not action.names or not moves.issuperset(action.names) or not (leads or space.endswith("_delta")):
            entries = ", ".join(action.names) or f"{action.shape[0]} entries without names"
            raise ConfigError(
                f"this robot takes {entries} as {space}; the device moves {', '.join(sorted(moves)) or 'nothing'}, by "
                "deltas of a tool: use another task.env.operator=..., or joint_position and a leader arm"
            )
        self._page = next((device for device in devices if isinstance(device, PageDevice)), None)
        if self._page and leads:
            raise ConfigError("task.env.operator: the page moves by deltas, a leader arm by positions: say one of them")
        self._devices, self._action, self.space, self._takes_by_touch = devices, action, space, takeover == "touch"
        self._beside = [device for device in devices if device is not self._page]
        self._is_here = False  # it is a person beside the robot who drives, or touches a device
        self._words: deque[str] = deque()
        self._begins = False  # nobody drives this demonstration yet
        self._has_moved = False  # any device, since the latest poll
        self._fault: RobotFault | None = None
        self._drives = self._is_latched = False  # latched: only a toggle hands back
        self._touched, self._wished, self._gripper = 0.0, 0.0, 0

    demonstrates = True

    @property
    def has_terminal(self) -> bool:
        return any(device.asks for device in self._devices)

    @property
    def remote(self) -> RemoteDriver | None:
        return self._page and self._page.remote

    @property
    def legend(self) -> dict[str, str]:
        """What the keys of all devices do, for the console."""
        return {name: text for device in self._devices for name, text in device.legend.items()}

    def reset(self, seed: int, *, demonstrate: bool = True) -> None:
        self._set_driver(False, is_led=not demonstrate)
        for device in self._devices:
            device.forget(hands_back=not demonstrate)
        self._begins = demonstrate

    def forget(self, *, hands_back: bool = True) -> None:
        """Forget motions that were begun before now: a leader arm that stands has not moved, wherever it stands.

        hands_back: nobody drives any more, so that a leader arm that follows comes to its robot until it is touched.
        Without it, as in a pause, one stays where it is.
        """
        if hands_back:
            self._set_driver(False)
        for device in self._devices:
            device.forget(hands_back=hands_back)

    def poll(self) -> list[str]:
        """Return the events since the last poll, oldest first. The next `read` takes touches, and says which device is
        gone."""
        self.look()
        said, self._words = [*self._words, *["moved"] * self._has_moved], deque()
        self._has_moved = False
        return said

    def read(self, hold: Array) -> Array | None:
        hands = self.look()
        if self._fault:
            raise self._fault
        self._decide(hands)
        if not self._drives:
            return None
        positions = next((hand.positions for hand in hands if hand.positions is not None), None)
        action = np.array(hold if positions is None else positions, self._action.dtype)
        for hand in hands:
            for name, share in hand.motion.items():
                self._move(action, name, SPEED * share)
        self._move(action, "gripper", float(self._gripper))
        return np.clip(action, self._action.low, self._action.high)

    def close(self) -> None:
        """Give all devices back; may be called twice."""
        for device in self._devices:
            device.close()

    def look(self) -> list[Hand]:
        """Read all devices, and obey their toggles; return the Hand of each device that is still there."""
        hands: list[Hand] = []
        self._fault = None
        for device in self._beside:
            try:
                hands.append(device.read())
            except RobotFault as fault:  # the others are heard: the keys must still pause and stop
                self._fault = fault
        touched = any(hand.motion or hand.gripper or TOUCHES.intersection(hand.words) for hand in hands)
        self._is_here = touched or (self._is_here and self._drives)
        is_taken = False  # from one at the page: the toggle that does so does not hand back
        if self._page:
            is_taken = self._drives and self._is_here and bool(self._page.remote.holder)
            self._page.is_hindered = self._is_here
            hands.append(self._page.read())
        for hand in hands:
            for word in hand.words:
                if word == "toggle" and is_taken:
                    continue
                if word == "toggle":
                    self._set_driver(not ((self._drives and self._is_latched) or self._wishes))
                elif word == "take over":
                    self._wish()
                else:
                    self._words.append(word)
            if hand.gripper and (self._drives or "take over" in hand.words):
                self._gripper = hand.gripper
            self._has_moved |= bool(hand.motion or hand.gripper or hand.moved or "toggle" in hand.words)
        return hands

    def _decide(self, hands: Sequence[Hand]) -> None:
        """Take over for whoever touches a device, and hand back for whoever has let go of it."""
        now, wishes, touches = clock.monotonic(), self._wishes, any(hand.motion or hand.gripper for hand in hands)
        if touches:
            self._touched = now
        begins = self._begins and (touches or wishes or any(hand.moved for hand in hands))
        if not self._drives and (begins or (self._takes_by_touch and (touches or wishes))):
            gripper = next((hand.gripper for hand in hands if hand.gripper), self._gripper if wishes else 0)
            self._set_driver(True)
            self._is_latched, self._gripper = begins or wishes, gripper
        elif self._drives and not self._is_latched and now > self._touched + RELEASE:
            self._set_driver(False)

    def _wish(self) -> None:
        """Note that a key that moves was pressed. What such a key told the gripper in a pause is over."""
        if not (self._drives or self._wishes):
            self._gripper = 0
        self._wished = clock.monotonic() if self._takes_by_touch or self._begins else 0.0

    @property
    def _wishes(self) -> bool:
        """Whether a key that moves was pressed a moment ago, and nobody has taken over for it yet."""
        return clock.monotonic() <= self._wished + WISH

    def _set_driver(self, drives: bool, *, is_led: bool = True) -> None:
        """Say who drives from now on. is_led: False: a leader arm stays as it is, limp in the hand that took it."""
        self._drives = self._is_latched = drives
        self._gripper, self._begins, self._wished = 0, False, 0.0
        for device in self._devices:
            if is_led or device.moves is not None:
                device.hand_over(to_person=drives)

    def _move(self, action: Array, name: str, share: float) -> None:
        """Move one entry of an action [A] towards its bound, by a share of the way."""
        if name in self._action.names and share:
            entry = self._action.names.index(name)
            bound = self._action.high if share > 0 else self._action.low
            assert bound is not None
            action[entry] += abs(share) * (bound[entry] - action[entry])


def make_devices(
    operator: str, scripted: Teleop | None, robot: Driven, *, clock: str, devices: Mapping[str, Any] | None = None
) -> tuple[Teleop | None, Operator | None]:
    """Make the devices of an operator: return the teleop of a robot, and the person at its devices, if any.

    operator: `scripted`: the given program; `none`: nobody; else a person's devices, joined by +, as in
        `keyboard+gamepad`. They need the real `clock` of the env.
    devices: {gamepad: path, spacemouse: path, takeover: touch or toggle}. The terminal's keys say events beside any of
        them, if there is a terminal.
    Raises ConfigError for another operator, for a device that is not there, and on the simulated clock.
    """
    if operator == "scripted" and scripted is not None:
        return scripted, None
    if operator == "none":
        return None, None
    words, devices = operator.split("+"), devices or {}
    if unknown := [word for word in words if word not in OPERATORS]:
        if unknown[0] == "scripted":
            raise ConfigError(
                "task.env.operator=scripted: this task has no script; docs/tutorials/own_task.md says one"
            )
        others = [*OPERATORS, *["scripted"] * (scripted is not None)]
        raise ConfigError(f"task.env.operator={unknown[0]} is unknown; use {', '.join(others)}")
    if clock != "real":
        raise ConfigError(f"task.env.operator={operator} needs task.env.clock=real: simulated time outruns a person")
    made: list[Device] = []
    try:
        for word in words:
            made.append(_open_device(word, devices.get(word, "auto"), robot))
        if "keyboard" not in words and (keyboard := Keyboard()).has_terminal:
            made.append(KeyboardDevice(keyboard, drives=False))
        hands = Hands(made, robot.action, robot.space, takeover=devices.get("takeover", "touch"))
    except ConfigError:
        for device in made:
            device.close()
        raise
    return hands, hands


def _open_device(word: str, path: str, robot: Driven) -> Device:
    if word == "keyboard":
        keyboard = Keyboard()
        if not keyboard.has_terminal:
            raise ConfigError("task.env.operator=keyboard needs a terminal: start the actor in one (over SSH: ssh -t)")
        return KeyboardDevice(keyboard, drives=robot.space.endswith("_delta"))
    if word == "leader":
        return Leader(robot)
    if word == "page":
        return PageDevice()
    return Gamepad(path) if word == "gamepad" else SpaceMouse(path)
