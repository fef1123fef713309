"""Finds an OpenGL backend (EGL or OSMesa) with which this machine can render images of simulations."""

import logging
import os
import subprocess
import sys
from functools import cache
from subprocess import DEVNULL

from serl_client.errors import ConfigError

log = logging.getLogger(__name__)

BACKENDS = ("egl", "osmesa")  # in the order they are tried: EGL may use a GPU, OSMesa is software
PATIENCE = 30.0  # seconds
PROBE = "from robot_infra.cameras.mujoco import try_out; try_out('{}')"
ABSENT = (
    "this machine can draw no camera images, neither with EGL nor with OSMesa (apt-get install libegl1 libosmesa6): "
)


@cache
def backend() -> str:
    """Return the first of BACKENDS with which a child process draws an image; empty: there is none.

    A GL library that does not fit its driver aborts its process or hangs, so a child process tries it. This takes about
    a second, PATIENCE at most, and is done once. If MUJOCO_GL names a backend only that is tried, because mujoco has
    loaded it and PyOpenGL works with one.
    """
    named = os.environ.get("MUJOCO_GL", "").strip().lower()
    return next((name for name in ((named,) if named in BACKENDS else BACKENDS) if _draws(name)), "")


def choose_backend(cameras: bool | str, unseen: str = "") -> str:
    """Return the backend for a task's option `cameras`: true, false, or auto (cameras if they can be drawn).

    unseen: what the state does not show, such as `block`; empty: nothing. The task has an option `block_in_state` then.
    The empty string means no cameras. With auto a warning is then logged. Raises ConfigError if `cameras` is true and
    nothing can be drawn, for any other value, and without cameras if something is unseen.
    """
    if cameras not in (True, False, "auto"):
        raise ConfigError(f"task.cameras={cameras}: say true, false or auto")
    found = backend() if cameras else ""
    if cameras is True and not found:
        raise ConfigError(ABSENT + "install them, or say task.cameras=false to go on from states alone")
    if cameras and not found:
        log.warning("%sthe robot goes on without cameras", ABSENT)
    if unseen and not found:
        raise ConfigError(f"nothing would show the {unseen}: say task.cameras=true or task.{unseen}_in_state=true")
    return found


def select(name: str) -> None:
    """Make PyOpenGL load this backend's libraries; without effect once it is imported."""
    os.environ["PYOPENGL_PLATFORM"] = name


def _draws(name: str) -> bool:
    command = [sys.executable, "-c", PROBE.format(name)]
    try:
        done = subprocess.run(command, timeout=PATIENCE, stdout=DEVNULL, stderr=DEVNULL, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return False
    return done.returncode == 0
