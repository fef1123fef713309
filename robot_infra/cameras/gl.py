"""Whether images can be rendered on this machine, and with which OpenGL."""

import os
import subprocess
import sys
from functools import cache

from serl_client.errors import ConfigError

BACKENDS = ("egl", "osmesa")  # in the order they are tried: EGL may use a GPU, OSMesa is software
PATIENCE = 30.0  # seconds
PROBE = "from robot_infra.cameras.mujoco import draw_nothing; draw_nothing('{}')"
ABSENT = (
    "cameras cannot be rendered on this machine, neither with EGL nor with OSMesa: "
    "apt-get install libegl1 libosmesa6, or go on from states alone with task.cameras=false"
)


@cache
def backend() -> str:
    """The first of BACKENDS with which a child process draws an image, or else the empty string.

    A GL library that does not fit its driver aborts the process or hangs, so nothing of it is tried in this one. It
    takes about a second for each, once in a process; PATIENCE ends a child that hangs.
    """
    return next((name for name in BACKENDS if _draws(name)), "")


def chosen(cameras: bool | str) -> str:
    """The backend for a task's option `cameras`: true, false, or `auto`, which takes what there is.

    The empty string means: no cameras. Raises ConfigError for another word, and for true where nothing can be
    rendered.
    """
    if cameras not in (True, False, "auto"):
        raise ConfigError(f"cameras is {cameras!r}; it may be true, false or auto")
    if not cameras:
        return ""
    if not backend() and cameras is True:
        raise ConfigError(ABSENT)
    return backend()


def select(name: str) -> None:
    """Make PyOpenGL load this backend's libraries; without effect once it is imported."""
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = name


def _draws(name: str) -> bool:
    command = [sys.executable, "-c", PROBE.format(name)]
    try:
        done = subprocess.run(command, timeout=PATIENCE, capture_output=True, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return False
    return done.returncode == 0
