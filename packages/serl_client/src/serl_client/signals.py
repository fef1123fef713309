"""Lets Ctrl-C, SIGTERM or a lost terminal stop the robot; garbage collections in a control loop stay short."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that the robot is stopped on the way out.

    SIGHUP comes when a terminal closes, as with a lost SSH connection. An ignored signal (nohup) stays ignored.
    Does nothing outside of the main thread, where Python handles no signals.
    """
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
    """Exclude the objects that exist now from garbage collection.

    Searching everything that a program imports takes 10 ms (some tenths of a second with torch), within one step.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
