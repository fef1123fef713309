"""The scripted expert of both tasks, and the tasks as an Env."""

from functools import partial

import numpy as np
from serl_client.spec import Array

from robosuite_actor.scene import Scene
from robot_infra.env import RobotEnv
from robot_infra.judges import Predicate
from robot_infra.teleop.scripted import Rescuer

TASKS = {"Lift": "lift the cube", "Can": "put the can into its bin"}
CARRY = 0.25  # metres above the bin's floor at which the can travels
RELEASE = 0.09  # metres above the bin's floor at which the gripper opens; a can that stands there is at 0.06
WITHIN = 0.06  # metres beside the bin's centre, up to which the can is let down; the bin is 20 cm wide
ABOVE, BETWEEN = 0.015, 0.03  # metres beside the object, up to which the gripper goes down, and closes
OPEN, CLOSE = -1.0, 1.0


def intent(scene: Scene) -> Array:
    """Return the expert's action [7] for the scene as it is: proportional control to the next point, gripper upright.

    It follows from the scene alone, so that a lost object is picked again.
    """
    way, gripper = lift(scene) if scene.task == "Lift" else place(scene)
    turn = 0.5 * np.cross(scene.axes, scene.upright, axis=0).sum(1)  # axis-angle back to the start's orientation
    return np.concatenate([scene.gain * way, 2 * turn, [gripper]])


def lift(scene: Scene) -> tuple[Array, float]:
    """Return (way [3] in metres, gripper) of the next step: above the cube, down, close, up."""
    return (np.array([0, 0, 0.1]), CLOSE) if scene.holds else grasp(scene)


def place(scene: Scene) -> tuple[Array, float]:
    """Return (way [3] in metres, gripper) of the next step: pick the can, carry it to its bin, release, leave."""
    way = scene.bin - scene.object
    is_there = float(np.hypot(*way[:2])) < WITHIN
    if is_there and not (scene.holds and way[2] < -RELEASE):
        return np.array([0, 0, 0.1]) * (not scene.holds), OPEN
    if not scene.holds:
        return grasp(scene)
    if is_there:
        return np.array([way[0], way[1], -0.05]), CLOSE
    rise = way[2] + CARRY
    return np.array([*(way[:2] if rise < 0.1 else (0, 0)), rise]), CLOSE


def grasp(scene: Scene) -> tuple[Array, float]:
    """Return (way [3] in metres, gripper): above the object, down to it, close."""
    way = scene.object - scene.tool
    beside = float(np.hypot(*way[:2]))
    if beside < BETWEEN and abs(way[2]) < BETWEEN:
        return way, CLOSE if abs(way[2]) < ABOVE else OPEN
    return np.array([way[0], way[1], way[2] + scene.hover * (beside > ABOVE)]), OPEN


def remaining(scene: Scene) -> float:
    """Return how much of the task is left, in metres: from tool to object, and from there to where it has to be."""
    reach = float(np.linalg.norm(scene.object - scene.tool))
    if scene.task == "Lift":
        return reach + max(0.0, 1.0 - float(scene.object[2]))
    return reach + float(np.linalg.norm(scene.bin - scene.object))


def make(
    *, scene: str, fps: float, max_steps: int, noise: float, takeover_after: int, handback_after: int, cameras: bool,
    image_size: int, clock: str,
) -> RobotEnv:  # fmt: skip
    """Make a task as an Env, with the expert as its teleop; scene, cameras and image_size as in Scene.

    noise: standard deviation of the expert's actions.
    """
    robot = Scene(scene, fps=fps, cameras=cameras, image_size=image_size)
    operator = Rescuer(
        partial(intent, robot), partial(remaining, robot), noise=noise, margin=0.002, takeover_after=takeover_after,
        handback_after=handback_after,
    )  # fmt: skip
    return RobotEnv(
        robot, judge=Predicate(robot.succeeded), task=TASKS[scene], fps=fps, max_steps=max_steps,
        clock=clock, cameras=robot.cameras() if cameras else {}, teleop=operator,
    )  # fmt: skip
