"""A GPU that a CPU plays: it shows what acting does with recordings and with their memory."""

import numpy as np
import torch

from serl_launcher.acting.device import Cpu
from serl_launcher.acting.host import MOST, Question

from .toy import ask

FLOW = ("+algo=sft", "+policy=flow")


class FakeGpu(Cpu):
    """Records a function by keeping it. A replay overwrites what other recordings of its pool have answered.

    fails: what each recording raises. empty: a replay does nothing. room: rows of the largest recording.
    """

    def __init__(self, *, fails=None, empty=False, room=MOST):
        super().__init__(torch.device("cpu"))
        self.fails, self.empty, self.room = fails, empty, room
        self.made = []  # (rows, pool) of each recording
        self.pools = []  # the results that share each of them

    def pool(self):
        self.pools.append([])
        return len(self.pools) - 1

    def record(self, call, pool):
        if self.fails:
            raise self.fails
        result = call().clone()
        if (rows := result.shape[1]) > self.room:
            raise torch.OutOfMemoryError
        self.made.append((rows, pool))
        self.pools[pool].append(result)

        def replay():
            answer = result.clone() if self.empty else call()
            for other in self.pools[pool]:
                other.fill_(torch.nan)
            result.copy_(answer)

        return replay, result


def many(count, explore=True):
    return [Question(b"%d" % i, ask(i, seed=i, reset=True, explore=explore, key=i)) for i in range(count)]


def actions(host, questions):
    return np.stack([answer.arrays["action"] for answer in host.answer(questions)])
