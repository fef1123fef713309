"""File calls of another process that fail, kill it or are recorded: shim.c is built here, driven and read.

Make a Control, start the process with `environment(build(folder), control)`, and say `control.fail(WRITE, ENOSPC)` or
`control.kill(SYNC)` at any time while it runs; `calls` reads what it was told to record.
"""

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serl_client.errors import ConfigError

WRITE, SYNC, RENAME, TRUNCATE, UNLINK, CREATE, ALLOCATE, READ, FOLDER, MARK = (1 << bit for bit in range(10))
SHORT = 1 << 30
CONTROL = struct.Struct("<IIiIq40s")
CALL = struct.Struct("<IIqQ")


def build(folder: Path) -> Path:
    """The library, compiled into `folder`. Raises ConfigError where there is no C compiler."""
    library, compiler = folder / "shim.so", shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ConfigError("the tests of faults need a C compiler: install gcc")
    source = Path(__file__).with_name("shim.c")
    done = subprocess.run(
        [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", "-o", library, source],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"{source} does not compile: {done.stderr}")
    return library


class Control:
    """What is armed in the processes that were started with `environment(..., control=this)`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(CONTROL.size))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), CONTROL.size)

    def fail(
        self, calls: int, error: int, after: int = 0, sticky: bool = False, path: str = "", short: bool = False
    ) -> None:  # fmt: skip
        """One of these `calls` (WRITE | SYNC ...) fails with the errno `error`, after that many more of them were let
        through; `sticky`: all that follow fail, too. Only files whose path contains `path` count. `short`: the first
        write that is struck is done by half (it returns that), and the next one fails."""
        self._arm(1, calls | short * SHORT, error, sticky, after, path)

    def kill(self, calls: int, after: int = 0, path: str = "", short: bool = False) -> None:
        """The process kills itself by SIGKILL just before such a call; `short`: when half of a write is done."""
        self._arm(2, calls | short * SHORT, 0, False, after, path)

    def clear(self) -> None:
        self._map[:4] = bytes(4)

    @property
    def struck(self) -> bool:
        """Whether it has happened since it was armed."""
        return CONTROL.unpack(self._map[:])[4] < 0

    def _arm(self, kind: int, calls: int, error: int, sticky: bool, after: int, path: str) -> None:
        if len(path.encode()) > 39:
            raise ConfigError(f"{path!r} is too long for the shim: at most 39 bytes")
        self.clear()
        self._map[4:] = CONTROL.pack(0, calls, error, sticky, after, path.encode())[4:]
        self._map[:4] = struct.pack("<I", kind)  # last: from now on it strikes


def environment(
    library: Path, control: Control | None = None, trace: Path | None = None, root: Path | None = None
) -> dict[str, str]:  # fmt: skip
    """The environment of a process with the shim; `trace` records all that it changes in the folder `root`."""
    found = {**os.environ, "LD_PRELOAD": str(library)}
    if control:
        found["RETAKE_SHIM_CONTROL"] = str(control.path)
    if trace:
        found["RETAKE_SHIM_TRACE"] = str(trace)
        found["RETAKE_SHIM_ROOT"] = str((root or Path("/")).resolve())
    return found


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a trace that succeeded. `offset` is where a write went, or the size that TRUNCATE and ALLOCATE gave;
    `data` is what was written, the new name of a RENAME, or the text of a MARK."""

    kind: int
    path: str
    offset: int
    data: bytes


def calls(trace: Path) -> Iterator[Call]:
    """The calls of a trace, in order; one that a kill cut off is left out."""
    with open(trace, "rb") as file:
        while len(head := file.read(CALL.size)) == CALL.size:
            kind, path_length, offset, length = CALL.unpack(head)
            path, data = file.read(path_length), file.read(length)
            if len(data) == length:
                yield Call(kind, os.fsdecode(path), offset, data)
