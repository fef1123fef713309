"""Computes forward and inverse kinematics of arms with revolute joints: poses, Jacobians, joints.

Sources: Denavit and Hartenberg, 1955 (standard convention: rotate about z, move along z, along x, rotate about x);
Sugihara, "Solvability-unconcerned inverse kinematics by the Levenberg-Marquardt method", 2011 (the damping).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from serl_client.spec import Array

BIAS = 1e-6  # of the damping, so that it is never 0
PASSES = 12  # of the damped least squares for one step, at most
SHORTER, MARGIN = 3, 0.95  # tries with a shorter way each, and the share of the allowed one that the next try takes
ANYWHERE = (-math.inf, math.inf)  # where a joint may be
CLOSE = 1e-6  # metres and radians, at which a pose is reached


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Describes an arm of J revolute joints, each of which turns what comes after it about its frame's z.

    links: [J, 4, 4], the frame of the next joint in that of each turned one. base, tool: [4, 4], the first frame in the
    world, and the tool in the last frame. turns: metres that count as much as a radian by which the tool is turned
    otherwise than the goal: 1, or next to nothing for an arm of fewer than six joints, which cannot keep both.

    Joints are [..., J] radians, poses [..., 4, 4], and twists [..., 6]: metres, then a rotation vector in radians, both
    along the world's axes.
    """

    links: Array
    base: Array = field(default_factory=lambda: np.eye(4))
    tool: Array = field(default_factory=lambda: np.eye(4))
    turns: float = 1.0

    def frames(self, joints: Array) -> list[Array]:
        """Return the J + 1 frames of the joints' axes, and the tool's pose: J + 2 arrays [..., 4, 4]."""
        frame = np.broadcast_to(self.base, (*joints.shape[:-1], 4, 4))
        frames = [frame]
        for link in np.moveaxis(about_z(joints) @ self.links, -3, 0):
            frame = frame @ link
            frames.append(frame)
        return [*frames, frame @ self.tool]

    def pose(self, joints: Array) -> Array:
        """Return the tool's pose."""
        return self.frames(joints)[-1]

    def toward(
        self, joints: Array, goal: Array, most: float = math.inf, ends: tuple[Array | float, Array | float] = ANYWHERE
    ) -> Array:
        """Return the joints that bring the tool to the pose `goal`, or nearer to it, no joint by more than `most` rad.

        ends: the least and the largest angle of each joint; one that is there lets the others go on. It begins at
        `joints`, and never ends farther from the goal. If a joint would move by more than `most`, the tool
        goes a part of its way only: it slows down, on a straight line.
        """
        here = self.pose(joints)
        motion, share = twist(here, goal), np.ones((*joints.shape[:-1], 1))
        step = np.zeros_like(joints)
        for _ in range(SHORTER):
            step = self._solved(joints, moved(here, share * motion), *ends) - joints
            reach = np.abs(step).max(-1, keepdims=True)
            if not (reach > most).any():
                return joints + step
            share = share * np.where(reach > most, MARGIN * most / np.maximum(reach, most), 1)
        found = joints + step * np.minimum(1, most / np.maximum(np.abs(step).max(-1, keepdims=True), 1e-12))
        is_nearer = self._size(twist(self.pose(found), goal)) <= self._size(motion)
        return np.where(is_nearer[..., None], found, joints)

    def _solved(self, joints: Array, goal: Array, low: Array | float, high: Array | float) -> Array:
        """Return the joints that bring the tool to the pose `goal`, or nearest to it, by damped least squares.

        Where the arm cannot follow, because it is stretched or two of its axes have become one, the damping, which
        grows with what is left of the way, keeps the steps small.
        """
        found = best = joints
        least = np.full(joints.shape[:-1], np.inf)
        for _ in range(PASSES):
            frames = self.frames(found)
            motion = self._weighed(twist(frames[-1], goal))
            left = np.linalg.norm(motion, axis=-1)
            best = np.where((left < least)[..., None], found, best)
            least = np.minimum(left, least)
            if not (left > CLOSE).any():
                break
            jacobian = self._weighed(jacobian_of(frames).mT).mT
            step = _damped(jacobian, motion, left)
            stuck = ((found <= low) & (step < 0)) | ((found >= high) & (step > 0))
            if stuck.any():
                step = _damped(jacobian * ~stuck[..., None, :], motion, left)
            found = np.clip(found + step, low, high)
        return best

    def _size(self, motion: Array) -> Array:
        return np.linalg.norm(self._weighed(motion), axis=-1)

    def _weighed(self, motion: Array) -> Array:
        """Return twists [..., 6] whose turns count as metres."""
        return motion * np.repeat([1, self.turns], 3)


def _damped(jacobian: Array, motion: Array, left: Array) -> Array:
    """Return the step of the joints for a motion of the tool, damped by what is left of it."""
    square = jacobian @ jacobian.mT + (left**2 / 2 + BIAS)[..., None, None] * np.eye(6)
    return (jacobian.mT @ np.linalg.solve(square, motion[..., None]))[..., 0]


def twist(start: Array, end: Array) -> Array:
    """Return the twist [..., 6] that leads from one pose to another in a unit of time."""
    rotation = end[..., :3, :3] @ start[..., :3, :3].mT
    axis = np.stack([rotation[..., k, j] - rotation[..., j, k] for j, k in ((1, 2), (2, 0), (0, 1))], -1) / 2
    sine, cosine = np.linalg.norm(axis, axis=-1), (np.trace(rotation, axis1=-2, axis2=-1) - 1) / 2
    factor = np.arctan2(sine, cosine) / np.maximum(sine, 1e-12)
    return np.concatenate(
        [end[..., :3, 3] - start[..., :3, 3], np.where(sine > 1e-12, factor, 1)[..., None] * axis], -1
    )


def moved(pose: Array, motion: Array) -> Array:
    """Return the pose that a twist leads to from `pose`: for which `twist` gives the same `motion`."""
    angle = np.maximum(np.linalg.norm(motion[..., 3:], axis=-1), 1e-12)[..., None, None]
    cross = np.cross(motion[..., None, 3:], np.eye(3)).mT / angle  # of the axis with each column
    end = pose.copy()
    end[..., :3, :3] = (np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross) @ pose[..., :3, :3]
    end[..., :3, 3] += motion[..., :3]
    return end


def at(x: float = 0.0, y: float = 0.0, z: float = 0.0) -> Array:
    """Return the pose [4, 4] at a point (metres), turned in no way."""
    pose = np.eye(4)
    pose[:3, 3] = x, y, z
    return pose


def about_z(angles: Array) -> Array:
    """Return the transforms [..., 4, 4] that turn by these angles [...] about z."""
    turned = np.zeros((*angles.shape, 4, 4))
    turned[..., 0, 0] = turned[..., 1, 1] = np.cos(angles)
    turned[..., 1, 0] = np.sin(angles)
    turned[..., 0, 1] = -turned[..., 1, 0]
    turned[..., 2, 2] = turned[..., 3, 3] = 1
    return turned


def links_of(table: Sequence[Sequence[float]]) -> Array:
    """Return the links [J, 4, 4] of a Chain from its Denavit-Hartenberg table.

    table: for each joint d and a (metres), alpha and the offset of its angle (radians).
    """
    links = []
    for d, a, alpha, offset in table:
        cosine, sine = math.cos(alpha), math.sin(alpha)
        link = np.array([[1, 0, 0, a], [0, cosine, -sine, 0], [0, sine, cosine, d], [0, 0, 0, 1]])
        links.append(about_z(np.array(offset)) @ link)
    return np.stack(links)


# The Dobot Nova 2. Only its lengths are published, so the rest is assumed: it is built like an arm of UR, and stands
# upright with all joints at 0.
NOVA2 = links_of([
    [0.2234, 0, math.pi / 2, 0], [0, -0.280, 0, -math.pi / 2], [0, -0.225, 0, 0],
    [0.1175, 0, math.pi / 2, -math.pi / 2], [0.120, 0, -math.pi / 2, 0], [0.088, 0, 0, 0],
])  # fmt: skip


def jacobian_of(frames: list[Array]) -> Array:
    """Return [..., 6, J], the tool's twist for each joint's speed, from the frames of a chain."""
    joints, tool = np.stack(frames[:-2], -3), frames[-1]  # [..., J, 4, 4]
    axes, arms = joints[..., :3, 2], tool[..., None, :3, 3] - joints[..., :3, 3]
    return np.concatenate([np.cross(axes, arms), axes], -1).mT
