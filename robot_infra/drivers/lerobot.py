"""Drives any robot of lerobot or its plugins (SO-101, ...), with a leader arm, behind our guard.

Source: lerobot.robots and lerobot.teleoperators, whose configurations name the options of each type. They import torch:
only the guard's process imports this driver's devices.
"""

import importlib
import logging
import math
import termios
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array, Feature

from robot_infra.drivers.arm import LEADER, Arm
from robot_infra.drivers.lerobot_options import configuration
from robot_infra.drivers.torque import is_tamable, standing, switch_on, tame

log = logging.getLogger(__name__)

TRIES = 3  # of a call over the bus: single packets get lost
FAILURES = (OSError, RuntimeError, IndexError, termios.error)  # of lerobot's buses; IndexError: of a torn answer
KINDS = {  # of device: lerobot's package, its registry there, what makes one of a configuration, and our option
    "robot": ("robots", "RobotConfig", "make_robot_from_config", "task.env.options.robot"),
    "teleop": ("teleoperators", "TeleoperatorConfig", "make_teleoperator_from_config", "task.env.options.leader"),
}
SIDES = {"": "", "left_arm": "left_", "right_arm": "right_"}  # attribute of a two-armed robot: prefix of its entries


class LerobotArm(Arm):
    """Makes one robot of lerobot an Arm; its entries are the robot's action features, such as `elbow_flex.pos`.

    address: its port, unless `robot` says another one. robot: `type`, and lerobot's options of that type, without
    cameras: those belong under `cameras` of the task's env, where they are read on their own. leader: the same of a
    teleoperator whose actions have the same names; None: there is none. leader_follows: its motors lead it to where the
    robot is while no person drives.

    The motors' ranges come from their norm mode (-100 to 100, 0 to 100) or, in degrees, from their calibration. Torque
    and settings stay as they are until `enable`, which configures the devices. Torque stays on when the robot
    disconnects, unless the options say otherwise. Raises ConfigError for a type or an option that
    lerobot does not know, for a device that is not calibrated, and for names that do not fit; RobotFault if a device
    does not answer.
    """

    def __init__(
        self, address: str, *, robot: Mapping[str, Any], leader: Mapping[str, Any] | None = None,
        leader_follows: bool = False,
    ) -> None:  # fmt: skip
        if robot.get("cameras"):
            raise ConfigError("task.env.options.robot.cameras: name them under `cameras` of the task's env instead")
        self._robot = _made("robot", robot, address)
        self._leader: Any = None
        numbers = {name for name, kind in self._robot.action_features.items() if kind in (float, int)}
        if numbers != set(self._robot.action_features):
            raise ConfigError(
                f"task.env.options.robot.type={robot['type']}: take a robot whose actions are numbers, not "
                f"{self._robot.action_features}"
            )
        self._names = tuple(self._robot.action_features)
        if missing := [name for name in self._names if name not in self._robot.observation_features]:
            raise ConfigError(
                f"task.env.options.robot.type={robot['type']}: take a robot that measures what its actions have: "
                f"{', '.join(missing)}"
            )
        try:
            _connect("robot", self._robot, robot, address)
            if leader is not None:
                self._leader = _made("teleop", leader, "")
                if (given := _joints(self._leader)) != set(self._names):
                    raise ConfigError(
                        f"task.env.options.leader: {leader['type']} gives "
                        f"{', '.join(sorted(given)) or 'no positions of joints'}, and {robot['type']} takes "
                        f"{', '.join(self._names)}: take a leader of the same joints, or drive the tool "
                        "by keys, as task=so101_tool does"
                    )
                _connect("teleop", self._leader, leader, "")
                self._compare_units()
            self.leads = leader_follows
            if leader_follows and set(self._led_motors()) != set(self._names):
                raise ConfigError(
                    "task.env.options.leader_follows: there is no leader arm whose motors lerobot drives over a serial "
                    "bus: leave it out"
                )
        except BaseException:
            self.close()
            raise
        self._describe()
        self._seen: Mapping[str, Any] = {}

    def _describe(self) -> None:
        """Find out what the entries are measured in, and what else is observed."""
        motors = dict(_motors(self._robot))
        self.entries = {name: motors[name][0] if name in motors else "" for name in self._names}
        self.ranges = {name: motors[name][1] for name in self._names if name in motors}
        features = self._robot.observation_features
        self._numbers = [name for name, kind in features.items() if kind in (float, int)]
        self._images = {name: kind for name, kind in features.items() if isinstance(kind, tuple)}
        observed = {f"observation.images.{name}": Feature(shape, "uint8") for name, shape in self._images.items()}
        if len(self._numbers) > len(self._names):
            observed["observation.state"] = Feature((len(self._numbers),), names=tuple(self._numbers))
        if self._leader is not None:
            observed[LEADER] = Feature((len(self._names),), names=self._names)
        self.observation = observed

    def _compare_units(self) -> None:
        """Raise ConfigError where the leader's entries are in another unit than the robot's."""
        led = dict(_motors(self._leader))
        for name, (unit, _) in _motors(self._robot):
            if name in led and (other := led[name][0]) != unit:
                raise ConfigError(
                    f"task.env.options.leader: {name} is in {other} there, and in {unit} of the robot: say the same "
                    "task.env.options.leader.use_degrees and task.env.options.robot.use_degrees; where the leader "
                    "has no such option, false for the robot"
                )

    def read(self) -> Array:
        self._seen = tried(self._robot.get_observation)
        return np.array([self._seen[name] for name in self._names], float)

    def write(self, positions: Array) -> Array:
        wanted = dict(zip(self._names, positions.tolist(), strict=True))
        sent = tried(lambda: self._robot.send_action(wanted))
        return np.array([sent.get(name, wanted[name]) for name in self._names], float)

    def recover(self) -> None:
        """Connect again what was unplugged."""
        try:
            self.read()
        except RobotFault:
            _connect_again(self._robot)
        if self._leader is not None:
            try:
                tried(self._leader.get_action)
            except RobotFault:
                _connect_again(self._leader)

    def enable(self) -> Array:
        """Configure what was connected anew, which switches torque off and on, and switch on what else is off."""
        for part in _parts(self._leader) if self._leader is not None else ():
            _configure(part)
        held = dict.fromkeys(self._names, math.nan)
        for prefix, part in _sides(self._robot).items():
            if not is_tamable(part.bus):  # lerobot may have switched it on when it connected
                tried(part.bus.enable_torque)
                continue
            _configure(part)
            goals = tried(lambda part=part: switch_on(part.bus))
            held |= {entry: at for name, at in goals.items() if (entry := f"{prefix}{name}.pos") in held}
        return np.array([*held.values()])

    def sense(self) -> Observation:
        found: Observation = {
            f"observation.images.{name}": np.array(self._seen[name], np.uint8) for name in self._images
        }
        if "observation.state" in self.observation:
            found["observation.state"] = np.array([self._seen[name] for name in self._numbers], np.float32)
        if self._leader is not None:
            found[LEADER] = self.read_leader().astype(np.float32)
        return found

    def read_leader(self) -> Array:
        led = tried(self._leader.get_action)
        return np.array([led[name] for name in self._names], float)

    def enable_leader(self) -> Array:
        held = {}
        for prefix, part in _sides(self._leader).items():
            goals = tried(lambda part=part: switch_on(part.bus))
            held |= {f"{prefix}{motor}.pos": at for motor, at in goals.items()}
        return np.array([held[name] for name in self._names], float)

    def lead(self, positions: Array | None) -> None:
        wanted = None if positions is None else dict(zip(self._names, positions.tolist(), strict=True))
        for prefix, part in _sides(self._leader).items():
            if wanted is None:
                tried(part.bus.disable_torque)
            else:
                goals = {motor: wanted[f"{prefix}{motor}.pos"] for motor in part.bus.motors}
                tried(lambda part=part, goals=goals: part.bus.sync_write("Goal_Position", goals))

    def _led_motors(self) -> list[str]:
        """Return the entries of the leader whose motors can be switched on only where they stand."""
        sides = _sides(self._leader).items() if self._leader is not None else ()
        return [f"{prefix}{motor}.pos" for prefix, part in sides if is_tamable(part.bus) for motor in part.bus.motors]

    def close(self) -> None:
        for device in (self._robot, self._leader):
            if device is not None and device.is_connected:
                try:
                    device.disconnect()
                except FAILURES as error:
                    log.warning("%s: %s", device, error)


def _made(kind: str, options: Mapping[str, Any], address: str) -> Any:
    """Make a robot or a teleop; nothing is connected."""
    room, registry, make, where = KINDS[kind]
    try:
        module = importlib.import_module(f"lerobot.{room}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"lerobot's robots need {error.name}: run `. examples/install.sh --extra robots`") from None
    defaults = {"disable_torque_on_disconnect": False, **({"port": address} if address else {})}
    config = configuration(getattr(module, registry), room, where, options, defaults=defaults)
    try:
        device = getattr(module, make)(config)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None
    for part in _parts(device):
        tame(part.bus)
    return device


def _joints(teleop: Any) -> set[str]:
    """Return the names of the numbers that it gives; none, if it gives something else, as a keyboard does."""
    try:
        return {name for name, kind in teleop.action_features.items() if kind in (float, int)}
    except AttributeError:  # lerobot's keyboard asks for an arm that it has not
        return set()


def _connect(kind: str, device: Any, options: Mapping[str, Any], address: str) -> None:
    """Connect, without lerobot's questions. Raises ConfigError if the device is not calibrated."""
    tried(lambda: _connect_once(device))
    if not tried(lambda: device.is_calibrated):
        config = {field.name: getattr(device.config, field.name, None) for field in fields(device.config)}
        words = {"type": options["type"], "port": config.get("port") or address or None, "id": config.get("id")}
        said = " ".join(f"--{kind}.{name}={value}" for name, value in words.items() if value is not None)
        raise ConfigError(f"{options['type']} is not calibrated, or not for this id: run `lerobot-calibrate {said}`")


def _connect_once(device: Any) -> None:
    """Connect, or leave the device as it was: lerobot refuses to connect to one that is half connected.

    Torque and settings stay as they are: somebody may only want to look.
    """
    for part in _parts(device):
        _only_look(part)
    try:
        device.connect(calibrate=False)
    except FAILURES:
        with suppress(*FAILURES):
            device.disconnect()
        raise


def _only_look(part: Any) -> None:
    """Leave torque and settings of this device as they are until `_configure`."""
    part.configure = part.bus.disable_torque = _nothing


def _nothing(*args: object, **options: object) -> None:
    pass


def _configure(part: Any) -> None:
    """Configure a device that was only looked at, and switch its torque on or off as lerobot does."""
    if part.configure is not _nothing:
        return
    tried(lambda: standing(part.bus))  # or an arm that is out of its range would fall
    del part.configure, part.bus.disable_torque
    try:
        tried(part.configure)
    except RobotFault:
        _only_look(part)
        raise


def _connect_again(device: Any) -> None:
    """Connect to a device that was unplugged, or whose port has vanished.

    Raises RobotFault, and leaves it unconnected, if another arm is there: ports change their names.
    """
    for part in _parts(device):
        _only_look(part)  # else it might switch the torque off
    with suppress(*FAILURES):
        device.disconnect()
    for part in _parts(device):
        free(part.bus)
    tried(lambda: _connect_once(device))
    if not tried(lambda: device.is_calibrated):
        with suppress(*FAILURES):
            device.disconnect()
        raise RobotFault(
            f"{device}: the arm at its port is not the one of its calibration. Ports may have changed their names: "
            "plug robot and leader in as they were, and say ready; names under /dev/serial/by-id stay",
            "bus",
        )


def free(bus: Any) -> None:
    """Let a bus be opened again. Where its port has vanished, lerobot's driver leaves it in use, and often open."""
    if hasattr(bus, "port_handler"):
        bus.port_handler.is_using = False
        with suppress(*FAILURES):
            bus.port_handler.closePort()


def _sides(device: Any) -> dict[str, Any]:
    """Return {prefix of its entries: the device, or one of its arms}, where lerobot drives the motors itself."""
    parts: dict[str, Any] = {prefix: getattr(device, part, None) if part else device for part, prefix in SIDES.items()}
    return {prefix: part for prefix, part in parts.items() if hasattr(getattr(part, "bus", None), "motors")}


def _parts(device: Any) -> list[Any]:
    """Return the parts of a device whose motors are switched on only where they stand."""
    return [part for part in _sides(device).values() if is_tamable(part.bus)]


def _motors(robot: Any) -> Any:
    """Yield (entry, (unit, [low, high])) of each motor whose ends its norm mode tells."""
    for prefix, part in _sides(robot).items():
        bus = part.bus
        for name, motor in bus.motors.items():
            entry, mode = f"{prefix}{name}.pos", motor.norm_mode.value
            if mode == "range_m100_100":
                yield entry, ("%", [-100.0, 100.0])
            elif mode == "range_0_100":
                yield entry, ("%", [0.0, 100.0])
            elif mode == "degrees" and name in bus.calibration:
                ends, steps = bus.calibration[name], bus.model_resolution_table[motor.model] - 1
                half = (ends.range_max - ends.range_min) / 2 * 360 / steps
                yield entry, ("deg", [-half, half])


def tried(call: Callable[[], Any]) -> Any:
    """Return what a call over the bus gives. Raises RobotFault after TRIES failures in a row."""
    failed: BaseException | None = None
    for _ in range(TRIES):
        try:
            return call()
        except FAILURES as error:
            failed = error
    raise RobotFault(f"the bus does not answer: {type(failed).__name__}: {' '.join(str(failed).split())}", "bus")
