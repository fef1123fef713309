"""A user's tool, called in this process; `typed` starts it as a person does; and a script for an example's Python."""

import io
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest

from .common import ROOT, TOOLS


def called(name, *words):
    """(exit status, all that is said) of tools/NAME.py with these words."""
    said, status = io.StringIO(), 0
    with patch.object(sys, "argv", [f"{name}.py", *map(str, words)]), redirect_stdout(said), redirect_stderr(said):
        try:
            runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
        except SystemExit as ended:
            status = 1 if isinstance(ended.code, str) else ended.code or 0
            said.write(f"{ended.code}\n" if isinstance(ended.code, str) else "")
    return status, said.getvalue()


def typed(name, *words):
    """The same, in a process of its own."""
    command = [sys.executable, TOOLS / f"{name}.py", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def installs(said, folder):
    """The words that uv gets, in a copy of the repository, from the command of a message that names install.sh."""
    (command,) = re.findall(r"`([^`]*examples/install\.sh[^`]*)`", said)
    copy = folder / "copy"
    (copy / "examples").mkdir(parents=True)
    (copy / "examples/install.sh").write_text((ROOT / "examples/install.sh").read_text())
    stand_ins = {"uv": 'echo "$@"', "git": "true", "df": "echo 12"}  # uv says its words; there are 12 GB free
    for name, does in stand_ins.items():
        (copy / name).write_text(f"#!/bin/sh\n{does}\n")
        (copy / name).chmod(0o755)
    path = f"{copy}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-euc", command], cwd=copy, env={"PATH": path}, capture_output=True, text=True)
    assert done.stdout.startswith("sync --quiet --inexact"), done.stderr
    return done.stdout.split()[3:]


def told_by_example(name, script, *words):
    """What the script says in JSON last, in the Python that examples/NAME/run_actor.sh installs; skipped without it."""
    python = ROOT / f"examples/{name}/.venv/bin/python"
    if not python.exists():
        pytest.skip(f"needs the Python of this task: examples/{name}/run_actor.sh installs it")
    done = subprocess.run([python, "-c", script, *words], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
