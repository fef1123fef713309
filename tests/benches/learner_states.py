"""A learner that a bench slows down, stops or kills, with a stand-in for inference."""

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import zmq
from serl_client import messages as m

from .served import Served


class Learner(Served):
    """A real server and a stand-in for inference that answers at once with actions of `size` entries."""

    def __init__(self, folder: Path, inference: str = "", told: str = "", *, size: int = 14) -> None:
        super().__init__(folder / "run", 2000, partial(answer, size=size), inference, told)
        self._ended = threading.Event()

    def enter(self, state: str) -> None:
        if state == "stopped":
            os.kill(self.pid, signal.SIGSTOP)
        elif state in ("dead", "full"):
            os.kill(self.pid, signal.SIGKILL)
        elif state == "slow":
            threading.Thread(target=self._stutter, args=(self.pid,), daemon=True).start()

    def _stutter(self, pid: int) -> None:
        """Stop the server for nine tenths of each second."""
        with suppress(ProcessLookupError):
            while not self._ended.wait(0.1):
                os.kill(pid, signal.SIGSTOP)
                self._ended.wait(0.9)
                os.kill(pid, signal.SIGCONT)

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        super().__exit__(*exception)


def answer(address: str, size: int) -> None:
    """Answers every InferenceRequest with a chunk of zeros."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    chunk = np.zeros((50, size), np.float32)
    while True:
        identity, *parts = router.recv_multipart(copy=False)
        message = m.decode([part.buffer for part in parts])
        if isinstance(message, m.InferenceRequest):
            router.send_multipart([identity.bytes, *m.encode(m.InferenceResponse(message.step, 1, {"action": chunk}))])
