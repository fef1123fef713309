"""Watches every Python process of the tests: what a message must never set off stops there, and is written down.

conftest.py puts this folder on PYTHONPATH, so that servers, actors and trainers load it as they start. While a message
is handled (a function of WATCHED is on the stack) nothing unpickles, compiles or runs code that is not a module's,
starts a process, or opens, makes or moves a file outside the folders of RETAKE_FOLDERS.

Those of tests with a simulated bus of servos are patient with it, see `own_time`.
"""

import os
import sys
import time
import traceback
from types import FrameType

WATCHED = {
    ("serl_launcher/service/server.py", "_answer"), ("serl_launcher/acting/server.py", "_hear"),
    ("serl_client/connection.py", "_next"), ("serl_client/network.py", "_handle"),
    ("serl_client/wire.py", "unpack"), ("serl_client/wire.py", "decode_records"),
    ("serl_client/outbox.py", "_next_record"), ("serl_launcher/acting/openpi.py", "read"),
}  # fmt: skip
CODE = {"exec", "compile", "pickle.find_class", "marshal.loads", "code.__new__", "ctypes.dlopen"}
PROCESSES = {"os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen"}
PATHS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
         "sqlite3.connect": 1}  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TRACEBACK = traceback.__file__
PATIENCE = 20  # times as long as lerobot's drivers wait for an answer, and only while they run: a busy machine stalls
PATIENT = "RETAKE_PATIENT_DRIVERS"  # in the environment of processes that do so
FOLDERS = tuple(os.environ.get("RETAKE_FOLDERS", "").split(":"))


class Violation(RuntimeError):
    """A message has set off what none may."""


def _handling(frame: FrameType | None) -> str:
    """The watched function that is on the stack, unless a module is imported inside it, or an error written down: a
    traceback parses the lines that it shows."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_filename == TRACEBACK:
            return ""
        for file, name in WATCHED:
            if code.co_name == name and code.co_filename.endswith(file):
                return f"{file}:{name}"
        frame = frame.f_back
    return ""


def _outside(path: object) -> bool:
    if not isinstance(path, (str, bytes, os.PathLike)) or path == ":memory:":
        return False  # a descriptor, or no file
    return not os.path.realpath(os.fsdecode(path)).startswith((*FOLDERS, "/dev/"))


def _is_forbidden(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        path, _, flags = arguments
        return isinstance(flags, int) and bool(flags & WRITES) and _outside(path)
    return event in CODE or event in PROCESSES or any(map(_outside, arguments[: PATHS[event]]))


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" and event not in CODE and event not in PROCESSES and event not in PATHS:
        return
    if _is_forbidden(event, arguments) and (where := _handling(sys._getframe())):
        text = f"{event}{arguments!r:.200} in {where}"
        os.write(_record, f"{text}\n".encode())
        raise Violation(text)


def record_into(path: str | os.PathLike[str]) -> None:
    """Write violations to this file from now on."""
    global _record
    _record = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


if "RETAKE_VIOLATIONS" in os.environ:
    record_into(os.environ["RETAKE_VIOLATIONS"])
    sys.addaudithook(watch)


def own_time(port: object = None) -> float:
    """Milliseconds for a driver's timeouts: they pass only while its thread runs, and PATIENCE times as slowly.

    A driver asks for the time again and again while it waits: the simulated bus runs first."""
    os.sched_yield()
    return time.thread_time() * 1e3 / PATIENCE


if PATIENT in os.environ:
    import scservo_sdk

    scservo_sdk.PortHandler.getCurrentTime = own_time
