"""What goes around a control loop: signals that unwind it, so that the robot is stopped, and no long collections."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM is a KeyboardInterrupt too, and so is the SIGHUP of a terminal that is gone (a lost SSH connection), so
    that the robot is stopped on the way out; what was ignored (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def without_long_collections() -> Iterator[None]:
    """The garbage collector leaves aside what is there now: looking at all that a program imports takes 10 ms (some
    tenths of a second with torch), in the middle of a tick."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
