"""A recurrent toy algorithm whose actions tell what it saw, and questions to whoever acts with it."""

import contextlib
import threading
import time

import msgpack
import numpy as np
import torch
from serl_client import messages as m
from torch import nn

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.policies.base import Acting
from serl_launcher.types import Decision
from tests.shared.common import PATIENCE, STATE, until

# -- algorithms

POISON = 5.0


class Memory(Acting):
    noise_shape = (1, 2)

    def __init__(self, scale, sizes):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.rest = nn.ParameterList([torch.zeros(size) for size in sizes])
        self.register_buffer("mean", torch.tensor(1 / 3))


class Counting(Algorithm):
    """A recurrent toy: the action is [scale * decisions since the episode began, sum of the states' first numbers].

    A call waits for `gate`, which is open unless it was cleared. `sizes` are those of weights
    that nothing reads; `seconds` is how long a call takes.
    """

    def __init__(self, scale=1.0, sizes=(), precision=torch.float32, seconds=0.0):
        super().__init__()
        self.memory = Memory(scale, sizes)
        self.memory.precision = precision
        self.seconds = seconds
        self.batches = []  # how many observations each call had
        self.tasks = []  # of each call
        self.gate = threading.Event()
        self.gate.set()

    @property
    def acting(self):
        return self.memory

    def update(self, batch):
        raise NotImplementedError

    @torch.no_grad()
    def act(self, observation, previous_action, carry, *, task, noise, explore):
        seen = observation[STATE].flatten(1)[:, -8]  # of the newest observation
        self.batches.append(len(seen))
        self.tasks.append(task)
        self.gate.wait(PATIENCE)
        time.sleep(self.seconds)
        carry = carry or {"count": torch.zeros(len(seen)), "more": (torch.zeros(len(seen)),)}
        carry = {"count": carry["count"] + 1, "more": (carry["more"][0] + seen,)}
        action = torch.stack([self.memory.scale * carry["count"], carry["more"][0]], 1)
        return Decision(action.unsqueeze(1), {"previous": previous_action}), carry


class Poisoned(Counting):
    """A state of POISON makes what it remembers, and each action after it, NaN."""

    def act(self, observation, *arguments, **options):
        seen = observation[STATE]
        return super().act({STATE: torch.where(seen == POISON, torch.nan, seen)}, *arguments, **options)


# -- who asks


def observed(generator):
    return {STATE: generator.standard_normal(8).astype(np.float32)}


def ask(step=0, *, seed=0, reset=False, explore=False, task="", key=0.0, **arrays):
    arrays = {STATE: np.full(8, key, np.float32), **arrays}
    return m.InferenceRequest(step, seed, reset, explore, task, arrays, request=step)


def receive(link):
    """The next InferenceResponse."""

    def answer():
        return message if isinstance(message := link.receive(), m.InferenceResponse) else None

    return until(answer, every=0.001, why="no answer came")


def reconnect(link):
    """Notice that the other side has gone, and open a new connection."""
    until(lambda: link.receive() is None and not link.is_open)
    until(lambda: link.receive() is None and link.is_open)


@contextlib.contextmanager
def gathering(inference, count):
    """What is sent within makes one batch, which begins once so many questions have come."""
    server, batches = inference.server, inference.server.host.algorithm.batches
    made, replaced = len(batches), server._replaced
    server._is_gathered = lambda now: len(server._waiting) + server._replaced - replaced >= count
    yield
    until(lambda: len(batches) > made)
    del server._is_gathered


# -- an openpi client's messages


def packed(thing):
    if isinstance(thing, np.ndarray):
        return {b"__ndarray__": True, b"data": thing.tobytes(), b"dtype": thing.dtype.str, b"shape": thing.shape}
    return {b"__npgeneric__": True, b"data": thing.item(), b"dtype": thing.dtype.str}


def message(**request):
    """The bytes of a request."""
    return msgpack.packb(request, default=packed)
