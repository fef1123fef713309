"""Simulates the scene of task dobot_pnp in MuJoCo: two arms with grippers, an object and a box."""

from collections.abc import Mapping
from importlib.resources import files

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array

from robot_infra.cameras.mujoco import cameras, load_mujoco
from robot_infra.interfaces import Camera
from robot_infra.kinematics import NOVA2, Chain, at

PHYSICS = 0.004  # seconds of one physics step, as in dobot_pnp.xml
SIDES = ("left", "right")
JOINTS = tuple(f"joint{number}" for number in range(1, 7))
ENTRIES = tuple(f"{side}_{name}" for side in SIDES for name in (*JOINTS, "gripper"))  # of all positions
TURN, OPEN = 3.1, 100.0  # the ends of a joint (radians), and of a gripper (percent); closed: 0
FINGER = 0.045  # metres from the middle, of an open gripper's fingers
UNITS = np.array([*[1.0] * 6, FINGER / OPEN] * 2)  # of positions, in those of dobot_pnp.xml
CHAINS = {side: Chain(NOVA2, base=at(y=y), tool=at(z=0.11)) for side, y in zip(SIDES, (0.3, -0.3), strict=True)}
HOME = np.array([  # tools 0.2 m above the table, fingers down
    0.34236, -0.03855, -2.01873, 0.48649, 1.5708, -1.22843, OPEN,
    0.48068, -0.05171, -2.00473, 0.48565, 1.5708, -1.09012, OPEN,
])  # fmt: skip
AREA = np.array([[0.3, -0.34], [0.44, -0.15]])  # metres, where the object lies at the start
MIDDLE = AREA[:, 1].mean()  # its y; positive is left of the robot
HALVES = {"both": lambda y: y, "left": lambda y: MIDDLE + abs(y - MIDDLE), "right": lambda y: MIDDLE - abs(y - MIDDLE)}
INSIDE = np.array([0.06, 0.06, 0.045])  # metres from the box's middle, and above the table
WRISTS = {f"{side}_cam_wrist": f"cam_{side}_wrist" for side in SIDES}  # the names that an arm's own camera gets


class Scene:
    """Simulates both arms; positions are [14], as ENTRIES name them: radians, and percent of a gripper.

    `object` and `box` [3] are the true points now, in metres. Only its cameras need graphics. side: where the object
    lies at the start, one of HALVES. Raises ConfigError for another side, and without the package mujoco.
    """

    def __init__(self, side: str = "both") -> None:
        if side not in HALVES:
            raise ConfigError(f"task.env.side={side}: say one of {', '.join(HALVES)}")
        self._half = HALVES[side]
        self._mujoco = load_mujoco()
        folder = files("robot_infra.sim")
        arm = {"nova2.xml": folder.joinpath("nova2.xml").read_bytes()}
        self._model = self._mujoco.MjModel.from_xml_string(folder.joinpath("dobot_pnp.xml").read_text(), arm)
        self._data = self._mujoco.MjData(self._model)
        names = [name.replace("gripper", "left_finger") for name in ENTRIES]
        self._at = np.array([self._model.joint(name).qposadr[0] for name in names])
        self._fingers = np.array([self._model.joint(f"{side}_right_finger").qposadr[0] for side in SIDES])
        self._block = int(self._model.joint("object").qposadr[0])
        self.object, self.box = self._data.body("object").xpos, self._data.body("box").xpos  # views
        self._tools = {side: self._data.site(f"{side}_tool").xpos for side in SIDES}
        self.reset(0)

    @property
    def positions(self) -> Array:
        """Return the measured positions."""
        return self._data.qpos[self._at] / UNITS

    @property
    def targets(self) -> Array:
        """Return the newest targets."""
        return self._data.ctrl / UNITS

    @property
    def pose(self) -> Array:
        """Return all that `show` needs, float64: joints, the object's place and orientation, and targets."""
        return np.concatenate([self._data.qpos, self._data.ctrl])

    def show(self, pose: Array) -> None:
        """Look like another Scene with this pose."""
        self._data.qpos[:], self._data.ctrl[:] = np.split(pose, [self._model.nq])
        self._mujoco.mj_forward(self._model, self._data)

    def tool(self, side: str) -> Array:
        """Return the point [3] between the fingers of one arm, metres."""
        return self._tools[side].copy()

    @property
    def succeeded(self) -> bool:
        """Return whether the object is in the box."""
        return bool((np.abs(self.object - self.box) < INSIDE).all())

    def reset(self, seed: int) -> None:
        """Put both arms home, and the object where `seed` says."""
        random, data = np.random.default_rng(seed), self._data
        self._mujoco.mj_resetData(self._model, data)
        data.qpos[self._at] = data.ctrl[:] = HOME * UNITS
        data.qpos[self._fingers] = FINGER
        x, y = random.uniform(*AREA)
        data.qpos[self._block : self._block + 3] = x, self._half(y), 0.02
        self._mujoco.mj_forward(self._model, data)

    def step(self, targets: Array, seconds: float) -> None:
        """Let time pass while the motors pull towards these targets."""
        self._data.ctrl[:] = targets * UNITS
        self._mujoco.mj_step(self._model, self._data, round(seconds / PHYSICS))

    def cameras(self, backend: str, *, size: int) -> Mapping[str, Camera]:
        """Return cam_high, cam_left_wrist and cam_right_wrist, drawn with this OpenGL backend (cameras/gl.py) as
        squares of `size` pixels."""
        drawn = cameras(self._model, self._data, backend, size=size)
        return {WRISTS.get(name, name): camera for name, camera in drawn.items()}
