"""Reads where an arm's tool is from its URDF, by the names of its joints.

Source: the URDF specification of ROS (http://wiki.ros.org/urdf/XML): a joint's frame is its origin in its parent's
link, turned by fixed angles about x, y and z in this order; it turns about its axis, or not at all.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.kinematics import Chain, about_z

OURS = Path(__file__).parent  # holds NAME.urdf of arms that a yaml may name
PLACE = "task.env.options.kinematics"
EXAMPLE = "`kinematics: {urdf: so101, frame: gripper_frame_link}`"
TURNING = ("revolute", "continuous")
RADIANS = {"rad": 1.0, "deg": math.pi / 180}  # in one of an entry's units
FREE = 6  # joints, with which an arm can put its tool anywhere, turned in any way
LOOSELY = 1e-3  # metres that count as much as a radian, where joints are too few to keep a turn, too


class Kinematics:
    """Says where an arm's tool is.

    words: of the task's yaml: `urdf`, a file, or the name of an arm that comes with Retake (so101); `frame`, the name
    of the link that is the tool; `joints`, {entry of the arm: its joint in the URDF}, where they differ by more than an
    ending, as in `elbow_flex.pos`. units: {entry of the arm: its unit}.

    `entries` are those that move the tool, from its base on, `scale` [J] the radians of each one's unit, `chain` its
    kinematics in radians. Raises ConfigError for a file that cannot be read, for a frame or a joint that there is not,
    and for what is no chain of joints that turn.
    """

    def __init__(self, words: Mapping[str, Any], units: Mapping[str, str]) -> None:
        if not isinstance(words, Mapping):
            raise ConfigError(f"{PLACE}={words}: say it as in {EXAMPLE}")
        if unknown := [name for name in words if name not in ("urdf", "frame", "joints")]:
            raise ConfigError(f"{PLACE}: say urdf, frame and joints, not {', '.join(map(str, unknown))}")
        if missing := [name for name in ("urdf", "frame") if not words.get(name)]:
            raise ConfigError(f"{PLACE}.{missing[0]}: say it, as in {EXAMPLE}")
        said = words.get("joints") or {}
        if not isinstance(said, Mapping):
            raise ConfigError(f"{PLACE}.joints: say {{entry of the arm: its joint in the URDF}}, not {said}")
        joints = {str(joint): str(entry) for entry, joint in said.items()}
        known = {entry.split(".")[0]: entry for entry in units if entry not in joints.values()} | joints
        names, self.chain = read_chain(str(words["urdf"]), str(words["frame"]))
        if lost := [name for name in names if known.get(name) not in units]:
            raise ConfigError(
                f"{PLACE}.joints: the joints {', '.join(lost)} of the URDF move its {words['frame']}, and this arm has "
                f"{', '.join(units)}: say which is which, as in `joints: {{{next(iter(units))}: {lost[0]}}}`"
            )
        self.entries = tuple(known[name] for name in names)
        if others := [entry for entry in self.entries if units[entry] not in RADIANS]:
            raise ConfigError(
                f"{PLACE}: {others[0]} is in {units[others[0]] or 'no unit'}, and a tool's place follows from degrees "
                "or radians alone (of a lerobot arm: task.env.options.robot.use_degrees=true, and of its leader)"
            )
        self.scale = np.array([RADIANS[units[entry]] for entry in self.entries])
        if len(names) < FREE:
            self.chain = replace(self.chain, turns=LOOSELY)
        self._at = [[*units].index(entry) for entry in self.entries]

    def tool(self, positions: Array) -> Array:
        """Return where the tool is at these positions [J] of the arm, as [3] metres from the URDF's root."""
        return self.chain.pose(positions[self._at] * self.scale)[:3, 3]


def read_chain(urdf: str, frame: str) -> tuple[list[str], Chain]:
    """Return the names of the joints that move this link, from the root on, and their Chain."""
    joints = _joints(urdf)
    if frame not in joints:
        raise ConfigError(f"{PLACE}.frame={frame}: {urdf} has {', '.join(joints)}")
    names: list[str] = []
    path: list[tuple[Array, Array | None]] = []  # from the tool to the root: each joint's origin, and axis if it turns
    seen = set[str]()
    while frame in joints:
        if frame in seen:
            raise ConfigError(f"{PLACE}.urdf={urdf}: {frame} is its own parent")
        seen.add(frame)
        joint = joints[frame]
        kind = joint.get("type")
        if kind not in (*TURNING, "fixed") or joint.find("mimic") is not None:
            raise ConfigError(
                f"{PLACE}.urdf={urdf}: the joint {joint.get('name')} is {kind}; only joints that turn, each on its "
                "own, may move the tool"
            )
        origin, axis = joint.find("origin"), joint.find("axis")
        turns = kind in TURNING
        names += [str(joint.get("name"))] * turns
        path.append((_placed(urdf, origin), _numbers(urdf, axis, "xyz", "1 0 0") if turns else None))
        frame = _named(urdf, joint, "parent")
    if not names:
        raise ConfigError(f"{PLACE}.frame: no joint of {urdf} moves it: say a link behind one")
    frames, pose = [], np.eye(4)  # of each turning joint in the one before, with its axis as z
    for origin, axis in reversed(path):
        pose = pose @ origin
        if axis is not None:
            onto = _onto(axis)
            frames.append(pose @ onto)
            pose = onto.T
    return names[::-1], Chain(np.array([*frames[1:], np.eye(4)]), base=frames[0], tool=pose)


def _joints(urdf: str) -> dict[str, ElementTree.Element]:
    """Return {link: the joint that carries it}."""
    path = OURS / f"{urdf}.urdf" if (OURS / f"{urdf}.urdf").exists() else Path(urdf).expanduser()
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        ours = ", ".join(sorted(each.stem for each in OURS.glob("*.urdf")))
        raise ConfigError(f"{PLACE}.urdf={urdf}: {error}; give a URDF's path, or one of {ours}") from None
    return {_named(urdf, joint, "child"): joint for joint in root.iter("joint") if joint.find("child") is not None}


def _named(urdf: str, joint: ElementTree.Element, side: str) -> str:
    """Return the name of a joint's parent or child."""
    element = joint.find(side)
    if element is None or not (name := element.get("link")):
        raise ConfigError(f"{PLACE}.urdf={urdf}: the joint {joint.get('name')} has no {side}")
    return name


def _placed(urdf: str, origin: ElementTree.Element | None) -> Array:
    """Return the pose [4, 4] of an origin."""
    roll, pitch, yaw = _numbers(urdf, origin, "rpy", "0 0 0")
    x, y = np.eye(3)[:2]
    pose = about_z(np.array(yaw)) @ _turned(y, pitch) @ _turned(x, roll)
    pose[:3, 3] = _numbers(urdf, origin, "xyz", "0 0 0")
    return pose


def _turned(axis: Array, angle: float) -> Array:
    onto = _onto(axis)
    return onto @ about_z(np.array(angle)) @ onto.T


def _onto(axis: Array) -> Array:
    """Return a pose [4, 4] at the origin whose z is this axis."""
    z = axis / np.linalg.norm(axis)
    x = np.eye(3)[np.argmin(np.abs(z))]
    x = x - z * (x @ z)
    x /= np.linalg.norm(x)
    pose = np.eye(4)
    pose[:3, :3] = np.stack([x, np.cross(z, x), z], -1)
    return pose


def _numbers(urdf: str, element: ElementTree.Element | None, name: str, usual: str) -> Array:
    """Return the three numbers of an attribute."""
    said = usual if element is None else element.get(name, usual)
    try:
        numbers = np.array([float(each) for each in said.split()])
    except ValueError:
        numbers = np.empty(0)
    is_nowhere = element is not None and element.tag == "axis" and not numbers.any()
    if numbers.shape != (3,) or not np.isfinite(numbers).all() or is_nowhere:
        raise ConfigError(f"{PLACE}.urdf={urdf}: {name}={said!r} should be three numbers")
    return numbers
