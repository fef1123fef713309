"""Renders the camera images of a MuJoCo simulation, each on request, of the scene at that moment."""

import importlib
from typing import Any

import numpy as np
from serl_client import clock
from serl_client.errors import ConfigError
from serl_client.spec import Array, Feature

from robot_infra.cameras import gl
from robot_infra.interfaces import Frame

SIZES = range(16, 1025)  # pixels a side
MAX_GEOMS = 1000


class Renderer:
    """Draws what a camera of a model sees, in one OpenGL context; only for the thread that made it.

    MuJoCo's own Renderer takes the backend that was named before `import mujoco`; this one can be made later. Without
    shadows and multisampling (arm.xml) a pair of 128x128 images takes about 1 ms in software. Raises ConfigError for
    an image of less than 16 or more than 1024 pixels a side.
    """

    def __init__(self, model: Any, backend: str, *, size: int) -> None:
        if size not in SIZES:
            raise ConfigError(f"task.image_size={size}: say {SIZES[0]} to {SIZES[-1]} pixels")
        gl.select(backend)
        self._mujoco = mujoco = load_mujoco()
        self._model, self._size = model, size
        self._scene = mujoco.MjvScene(model, MAX_GEOMS)
        self._option, self._view = mujoco.MjvOption(), mujoco.MjvCamera()
        self._view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._area = mujoco.MjrRect(0, 0, size, size)
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self._context: Any = importlib.import_module(f"mujoco.{backend}").GLContext(size, size)
        self._context.make_current()
        self._buffers = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._buffers)

    def draw(self, data: Any, camera: int) -> Array:
        """Draw what the model's camera of this number sees of `data`; return a fresh image, uint8 [size, size, 3]."""
        mujoco, self._view.fixedcamid = self._mujoco, camera
        mujoco.mjv_updateScene(
            self._model, data, self._option, None, self._view, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        image = np.empty((self._size, self._size, 3), np.uint8)
        self._context.make_current()  # another env of this process may have drawn with its own
        mujoco.mjr_render(self._area, self._scene, self._buffers)
        mujoco.mjr_readPixels(image, None, self._area, self._buffers)
        return np.ascontiguousarray(image[::-1])  # OpenGL counts rows from below

    def close(self) -> None:
        """Free the context; may be called twice."""
        if self._context is not None:
            self._context.make_current()
            self._buffers.free()
            self._context.free()
            self._context = None


class MujocoCamera:
    """Draws a frame whenever one is asked for; a Camera. The cameras of a scene share one Renderer."""

    trouble = ""

    def __init__(self, renderer: Renderer, data: Any, number: int, *, size: int) -> None:
        self.feature = Feature((size, size, 3), "uint8")
        self._renderer, self._data, self._number = renderer, data, number

    def latest(self) -> Frame:
        return Frame(self._renderer.draw(self._data, self._number), clock.monotonic())

    def close(self) -> None:
        self._renderer.close()


def cameras(model: Any, data: Any, backend: str, *, size: int) -> dict[str, MujocoCamera]:
    """Return {name: camera} of all cameras of a model; images are square, `size` pixels a side."""
    renderer = Renderer(model, backend, size=size)
    return {model.camera(n).name: MujocoCamera(renderer, data, n, size=size) for n in range(model.ncam)}


def try_out(backend: str) -> None:
    """Draw a white ball in a child process of gl.backend(). Raises when that fails, or when the image is empty."""
    mujoco = load_mujoco()
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><camera pos='0 0 3'/><geom size='1' rgba='1 1 1 1'/></worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    (camera,) = cameras(model, data, backend, size=16).values()
    image = camera.latest().image
    camera.close()
    if image.max() == image.min():
        raise RuntimeError(f"{backend} draws nothing")


def load_mujoco() -> Any:
    """Return the package mujoco, without its types, which lack what it draws with. Raises ConfigError without it."""
    try:
        return importlib.import_module("mujoco")
    except ModuleNotFoundError:
        raise ConfigError("mujoco is missing: run `. examples/install.sh --extra sim`") from None
