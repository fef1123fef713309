"""Prepares torch.compile on a GPU: names a compiler that is missing, and keeps the cache private.

Triton builds its launchers in C, at run time.
"""

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path


def lacking() -> str:
    """Return in words what is missing; empty if kernels can be compiled."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]  # as Triton chooses
    missing = [] if any(map(shutil.which, compilers)) else [f"a C compiler ({' or '.join(compilers)})"]
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("Python.h")
    if importlib.util.find_spec("triton") is None:
        missing.append("the package triton")
    return ", ".join(missing)


def keep_private() -> None:
    """Have torch keep compiled code in the user's own folder of caches, unless TORCHINDUCTOR_CACHE_DIR names another.

    Its own choice is a known name in the system's temporary folder, and torch runs what lies there: another user who
    makes that folder first has their code run as ours.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "retake" / "inductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or not os.access(folder, os.W_OK):
            raise PermissionError
    except (OSError, RuntimeError):  # no home, or one that cannot be written: compiled anew at each start
        folder = tempfile.mkdtemp(prefix="inductor_")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
