"""Windows of the tests of replay, and where the windows of a batch begin."""

from serl_launcher.types import Window

STATE = "observation.state"
SAC = Window({STATE: (0,), "action": (0,), "next_observation": (1,)})
CHUNK = Window({STATE: (0,), "action": (0, 1, 2, 3, 4)})
CHUNK_SAC = Window({STATE: (0,), "action": (0, 1, 2, 3, 4), "next_observation": (5,)})
SEQUENCE = Window({STATE: (-2, -1, 0, 1, 2, 3), "action": (0, 1, 2)})


def starts(batch):
    """{(key, index)} of the windows' first steps."""
    return {(int(key), int(i)) for key, i in batch.observation[STATE][:, 0, :2].tolist()}
