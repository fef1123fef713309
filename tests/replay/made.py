"""Windows of the tests of replay, where the windows of a batch begin, and a reader that hears what people say."""

import numpy as np
from serl_client import Outcome

from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.verdicts import VerdictRewards
from serl_launcher.replay.views import View
from serl_launcher.replay.windows import batch_arrays
from serl_launcher.types import Window

STATE = "observation.state"
SAC = Window({STATE: (0,), "action": (0,), "next_observation": (1,)})
CHUNK = Window({STATE: (0,), "action": (0, 1, 2, 3, 4)})
CHUNK_SAC = Window({STATE: (0,), "action": (0, 1, 2, 3, 4), "next_observation": (5,)})
SEQUENCE = Window({STATE: (-2, -1, 0, 1, 2, 3), "action": (0, 1, 2)})

REWARDS = VerdictRewards(success=5.0, failure=-2.0)
VIEWS = {"rewarded": View(("online",), ("rewarded",)), "unrewarded": View(("online",), ("unrewarded",))}
WORDS = {  # what a person says: (success, discard)
    "success": (True, False), "failure": (False, False), "discard": (None, True), "nothing": (None, False),
}  # fmt: skip


def starts(batch):
    """{(key, index)} of the windows' first steps."""
    return {(int(key), int(i)) for key, i in batch.observation[STATE][:, 0, :2].tolist()}


class Reader:
    """A mixture that hears of the store's episodes as the trainer does."""

    def __init__(self, store, spec, views=VIEWS, **options):
        self.store, self.cursor, self.told = store, 0, {}
        self.sources = ReplayMixture(store.folder, spec, {"online": 200, "demo": 200}, views, seed=0, **options)

    def hear(self):
        self.cursor, rows = self.store.index.catalog(self.cursor, 10_000)
        self.told |= {info.id: info for info in self.sources.update(rows)}
        return self.sources


def said(id, word):
    return Outcome(id, *WORDS[word], judged_by="operator")


def whole_steps(buffer):
    """The numbers of the steps whose episodes are there from their beginnings on, and their records."""
    numbers = np.arange(buffer.tail, buffer.head)
    numbers = numbers[buffer._first[numbers % 200] >= buffer.tail]
    return numbers, np.asarray(buffer._steps)[numbers % 200]


def arrays_of(buffer, count, window):
    """Arrays for so many windows."""
    return {name: np.empty(*made) for name, made in batch_arrays(buffer.layout, count, window).items()}


def gathered(buffer, numbers, window):
    """The arrays of the windows that begin with these steps."""
    arrays = arrays_of(buffer, len(numbers), window)
    assert buffer.gather(buffer.windows(numbers, window), window, arrays)
    return arrays
