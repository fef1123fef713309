"""Says what this machine lacks to compile kernels for a GPU: Triton builds its launchers in C, at run time."""

import importlib.util
import os
import shutil
import sysconfig
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
