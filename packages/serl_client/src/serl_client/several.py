"""Runs several simulated environments in parallel (`envs`), each in a process of its own, as one command."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

from serl_client.signals import interrupted_by_signals


def run_several(count: int, target: Callable[[int], object]) -> int:
    """Run target(0) to target(count - 1), each in a process of its own; return 0, or 1 if one of them failed.

    Once one fails, or this process is interrupted or killed, the others get SIGTERM, so that each may still deliver
    its records. They have no terminal. target: a function that can be imported by its name, or a partial of one.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run, args=(target, place)) for place in range(count)]
    with interrupted_by_signals():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they inherit it: Ctrl-C is for this process alone
        try:
            for process in processes:
                process.start()
            signal.signal(signal.SIGINT, before)
            while alive := [process.sentinel for process in processes if process.is_alive()]:
                if any(process.exitcode for process in processes):  # after the list, so no end is missed
                    break
                wait(alive)
        finally:
            signal.signal(signal.SIGINT, before)
            for process in processes:
                if process.is_alive():
                    process.terminate()
            for process in processes:
                if process.pid is not None:
                    process.join()
    return int(any(process.exitcode for process in processes))


def _run(target: Callable[[int], object], place: int) -> None:
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    target(place)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
