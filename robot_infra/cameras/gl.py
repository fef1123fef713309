"""Whether images can be rendered on this machine, and with which OpenGL."""

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
    """The first of BACKENDS with which a child process draws an image, or else the empty string.

    A GL library that does not fit its driver aborts its process or hangs: so a child tries it, for PATIENCE at most and
    about a second as a rule, once for this process. Where MUJOCO_GL names one of them only that is tried, since
    mujoco has loaded it and PyOpenGL works with one.
    """
    named = os.environ.get("MUJOCO_GL", "").strip().lower()
    return next((name for name in ((named,) if named in BACKENDS else BACKENDS) if _draws(name)), "")


def chosen(cameras: bool | str) -> str:
    """The backend for a task's option `cameras`: true, false, or `auto`, which takes what there is.

    The empty string means: no cameras; `auto` says so, and for true it is a ConfigError, as is any other word.
    """
    if cameras not in (True, False, "auto"):
        raise ConfigError(f"cameras is {cameras!r}; it may be true, false or auto")
    found = backend() if cameras else ""
    if cameras is True and not found:
        raise ConfigError(ABSENT + "install them, or say task.cameras=false to go on from states alone")
    if cameras and not found:
        log.warning("%sthe robot goes on without cameras", ABSENT)
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
