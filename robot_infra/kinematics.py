"""Computes forward and inverse kinematics of arms with revolute joints: poses, Jacobians, joints.

Sources: Denavit and Hartenberg, 1955 (standard convention: rotate about z, move along z, along x, rotate about x);
Sugihara, "Solvability-unconcerned inverse kinematics by the Levenberg-Marquardt method", 2011 (the damping).
"""

import math
from dataclasses import dataclass, field

import numpy as np
from serl_client.spec import Array

BIAS = 1e-6  # of the damping, so that it is never 0
PASSES = 12  # of the damped least squares for one step, at most
SHORTER, MARGIN = 3, 0.95  # tries with a shorter way each, and the share of the allowed one that the next try takes
CLOSE = 1e-6  # metres and radians, at which a pose is reached


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Describes an arm of J revolute joints.

    table: [J, 4], for each joint d and a (metres), alpha and the offset of its angle (radians).
    base, tool: [4, 4], the first frame in the world, and the tool in the last frame.

    Joints are [..., J] radians, poses [..., 4, 4], and twists [..., 6]: metres, then a rotation vector in radians, both
    along the world's axes.
    """

    table: Array
    base: Array = field(default_factory=lambda: np.eye(4))
    tool: Array = field(default_factory=lambda: np.eye(4))

    def frames(self, joints: Array) -> list[Array]:
        """Return the J + 1 frames of the joints' axes, and the tool's pose: J + 2 arrays [..., 4, 4]."""
        frame = np.broadcast_to(self.base, (*joints.shape[:-1], 4, 4))
        frames = [frame]
        for link in np.moveaxis(_links(self.table, joints), -3, 0):
            frame = frame @ link
            frames.append(frame)
        return [*frames, frame @ self.tool]

    def pose(self, joints: Array) -> Array:
        """Return the tool's pose."""
        return self.frames(joints)[-1]

    def toward(self, joints: Array, goal: Array, most: float = math.inf) -> Array:
        """Return the joints that bring the tool to the pose `goal`, or nearer to it, no joint by more than `most` rad.

        It begins at `joints`, and never ends farther from the goal. If a joint would move by more than `most`, the tool
        goes a part of its way only: it slows down, on a straight line.
        """
        here = self.pose(joints)
        motion, share = twist(here, goal), np.ones((*joints.shape[:-1], 1))
        step = np.zeros_like(joints)
        for _ in range(SHORTER):
            step = self._solved(joints, moved(here, share * motion)) - joints
            reach = np.abs(step).max(-1, keepdims=True)
            if not (reach > most).any():
                return joints + step
            share = share * np.where(reach > most, MARGIN * most / np.maximum(reach, most), 1)
        found = joints + step * np.minimum(1, most / np.maximum(np.abs(step).max(-1, keepdims=True), 1e-12))
        is_nearer = np.linalg.norm(twist(self.pose(found), goal), axis=-1) <= np.linalg.norm(motion, axis=-1)
        return np.where(is_nearer[..., None], found, joints)

    def _solved(self, joints: Array, goal: Array) -> Array:
        """Return the joints that bring the tool to the pose `goal`, or nearest to it, by damped least squares.

        Where the arm cannot follow, because it is stretched or two of its axes have become one, the damping, which
        grows with what is left of the way, keeps the steps small.
        """
        found = best = joints
        least = np.full(joints.shape[:-1], np.inf)
        for _ in range(PASSES):
            frames = self.frames(found)
            motion = twist(frames[-1], goal)
            left = np.linalg.norm(motion, axis=-1)
            best = np.where((left < least)[..., None], found, best)
            least = np.minimum(left, least)
            if not (left > CLOSE).any():
                break
            jacobian = jacobian_of(frames)
            square = jacobian @ jacobian.mT + (left**2 / 2 + BIAS)[..., None, None] * np.eye(6)
            found = found + (jacobian.mT @ np.linalg.solve(square, motion[..., None]))[..., 0]
        return best


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


# The Dobot Nova 2. Only its lengths are published, so the rest is assumed: it is built like an arm of UR, and stands
# upright with all joints at 0.
NOVA2 = np.array([
    [0.2234, 0, math.pi / 2, 0], [0, -0.280, 0, -math.pi / 2], [0, -0.225, 0, 0],
    [0.1175, 0, math.pi / 2, -math.pi / 2], [0.120, 0, -math.pi / 2, 0], [0.088, 0, 0, 0],
])  # fmt: skip


def _links(table: Array, joints: Array) -> Array:
    """Return the transforms [..., J, 4, 4] of the table's rows."""
    d, a, alpha, offset = table.T
    links = np.zeros((*joints.shape, 4, 4))
    cosine, sine = np.cos(joints + offset), np.sin(joints + offset)
    links[..., 0, 0], links[..., 1, 0] = cosine, sine
    links[..., 0, 1], links[..., 1, 1] = -sine * np.cos(alpha), cosine * np.cos(alpha)
    links[..., 0, 2], links[..., 1, 2] = sine * np.sin(alpha), -cosine * np.sin(alpha)
    links[..., 2, 1], links[..., 2, 2] = np.sin(alpha), np.cos(alpha)
    links[..., 0, 3], links[..., 1, 3], links[..., 2, 3] = a * cosine, a * sine, d
    links[..., 3, 3] = 1
    return links


def jacobian_of(frames: list[Array]) -> Array:
    """Return [..., 6, J], the tool's twist for each joint's speed, from the frames of a chain.

    Each joint turns what comes after it about its frame's z.
    """
    joints, tool = np.stack(frames[:-2], -3), frames[-1]  # [..., J, 4, 4]
    axes, arms = joints[..., :3, 2], tool[..., None, :3, 3] - joints[..., :3, 3]
    return np.concatenate([np.cross(axes, arms), axes], -1).mT
