"""A robot of robosuite with its scene: a Panda arm that lifts a cube or places a can, seen as robomimic sees it."""

import importlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature

from robot_infra.cameras import gl
from robot_infra.interfaces import Frame
from robot_infra.tasks.simulated import Simulated

ENVS = {"Lift": "Lift", "Can": "PickPlaceCan"}  # robomimic's name of a task: robosuite's
POSITION = {"Lift": "cube_pos", "Can": "Can_pos"}
OBJECTS = {"Lift": 10, "Can": 14}  # numbers of `object`: its pose, and the way to the gripper
CAMERAS = ("agentview", "robot0_eye_in_hand")
STATE = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}  # what robomimic's policies see of it
AXES = ("x", "y", "z", "rx", "ry", "rz", "gripper")  # deltas of position and axis-angle, and closing
IMAGE_SIZES = range(16, 513)  # pixels


class Scene(Simulated):
    """Simulates a task of robosuite; a Robot whose action [7] is in [-1, 1], as robomimic's.

    An action of 1 moves the tool by 5 cm or 0.5 rad at most, or closes the gripper. The observations have robomimic's
    names and units: metres, quaternions (x, y, z, w).
    task: a name of ENVS. fps: steps per second. cameras: it draws CAMERAS; the observations then leave out `object`,
    which only the images show. image_size: pixels.

    Raises ConfigError for an unknown task, for a size that cannot be drawn, and without robosuite.
    """

    space = "ee_delta"
    action = Feature((7,), names=AXES, low=np.array(-1), high=np.array(1))

    def __init__(self, task: str, *, fps: float, cameras: bool, image_size: int) -> None:
        if task not in ENVS:
            raise ConfigError(f"task.scene={task} is unknown; use {' or '.join(ENVS)}")
        if image_size not in IMAGE_SIZES:
            raise ConfigError(f"task.image_size={image_size}: say {IMAGE_SIZES[0]} to {IMAGE_SIZES[-1]} pixels")
        self.task, self._image_size = task, image_size
        self._keys = STATE if cameras else {"object": OBJECTS[task], **STATE}
        self.observation: Mapping[str, Feature] = {f"observation.{k}": Feature((n,)) for k, n in self._keys.items()}
        self.env = _made(ENVS[task], fps, gl.choose_backend(cameras))
        self.home(0)

    def cameras(self) -> dict[str, "SceneCamera"]:
        """Return {name: camera}; only a scene that was made with cameras can draw."""
        return {name: SceneCamera(self, name, self._image_size) for name in CAMERAS}

    @property
    def tool(self) -> Array:
        """Return where the gripper is now, [3] in metres."""
        return self._seen["robot0_eef_pos"]

    @property
    def axes(self) -> Array:
        """Return the gripper's axes as columns, [3, 3]."""
        return self.env.sim.data.site_xmat[self.env.robots[0].eef_site_id["right"]].reshape(3, 3)

    @property
    def object(self) -> Array:
        """Return where cube or can is now, [3] in metres."""
        return self._seen[POSITION[self.task]]

    @property
    def bin(self) -> Array:
        """Return where the can has to be put, [3] in metres."""
        return self.env.target_bin_placements[self.env.object_to_id["can"]]

    @property
    def holds(self) -> bool:
        """Return whether both fingers touch the object."""
        object = self.env.cube if self.task == "Lift" else self.env.objects[self.env.object_id]
        return bool(self.env._check_grasp(self.env.robots[0].gripper["right"], object))

    def succeeded(self) -> bool:
        """Return robosuite's own judgement."""
        return bool(self.env._check_success())

    def home(self, seed: int) -> None:
        self.env.rng.bit_generator.state = np.random.PCG64(seed).state  # placements and joints share this generator
        self._seen = self.env.reset()
        random = np.random.default_rng((seed, 2))
        self.gain, self.hover = random.uniform(8, 14), random.uniform(0.06, 0.12)  # of the expert in this episode
        self.upright = self.axes.copy()

    def sense(self) -> Observation:
        seen = {**self._seen, "object": self._seen["object-state"]}
        return {f"observation.{key}": np.array(seen[key], np.float32) for key in self._keys}

    def act(self, action: Array) -> None:
        self._seen = self.env.step(action)[0]

    def close(self) -> None:
        self.env.close()


class SceneCamera:
    """Draws a scene whenever a frame is asked for, as robomimic shows it: the first row is the upper one."""

    trouble = ""

    def __init__(self, scene: Scene, name: str, size: int) -> None:
        self.feature = Feature((size, size, 3), "uint8")
        self._scene, self._name, self._size = scene, name, size

    def latest(self) -> Frame:
        image = self._scene.env.sim.render(camera_name=self._name, width=self._size, height=self._size)
        return Frame(np.ascontiguousarray(image[::-1]), time.monotonic())  # OpenGL counts rows from below

    def close(self) -> None:
        pass  # the scene owns the context


def _made(name: str, fps: float, backend: str) -> Any:
    """Make robosuite's environment; `backend` draws its images (robot_infra/cameras/gl.py), empty: nothing does."""
    if backend:
        os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend  # read at import
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of robots that are not used here
    try:
        suite: Any = importlib.import_module("robosuite")
        logs: Any = importlib.import_module("robosuite.utils.log_utils")
        logs.ROBOSUITE_DEFAULT_LOGGER.setLevel(logging.ERROR)
        controllers: Any = importlib.import_module("robosuite.controllers")
        return suite.make(
            name, robots="Panda", control_freq=fps, ignore_done=True, hard_reset=False,  # else it grows at each reset
            controller_configs=controllers.load_composite_controller_config(controller="BASIC", robot="Panda"),
            has_renderer=False, has_offscreen_renderer=bool(backend), use_camera_obs=False,
            seed=0,  # of the cube's size
        )  # fmt: skip
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing here: examples/robomimic/run_actor.sh installs it") from None
    finally:
        logging.disable(before)
