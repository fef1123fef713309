"""Cuts an episode's steps into segments of at most half a second, and pushes them to the learner as they happen."""

import math
from collections.abc import Mapping

import numpy as np

from serl_client.client import TrainerClient
from serl_client.env import Observation, Step
from serl_client.episode import COLUMNS, Segment, Stamp
from serl_client.errors import ConfigError
from serl_client.limits import Limits
from serl_client.names import cleaned
from serl_client.spec import Array, Feature, Spec

SEGMENT_SECONDS = 0.5  # at most
SEGMENT_ROWS = 32  # at most
SEGMENT_BYTES = 8 << 20  # at most; a larger row makes a segment of its own


class Recorder:
    """Cuts the steps of one episode into segments. The client owns the arrays of a segment that was pushed.

    A full segment is pushed with the step after it, not before: so there is a row with which the end can be said.
    """

    def __init__(self, client: TrainerClient, episode: str, task: str) -> None:
        self.episode = episode
        self.ended = self.gap = False  # gap: the newest row is marked as one
        self.limits = Limits(client.spec)
        self._client, self._task, self._spec = client, cleaned(task), client.spec
        self._rows = segment_rows(client.spec)
        self._shapes = {name: feature.shape for name, feature in client.spec.extras.items()}
        self._start = 0
        self._stamp = Stamp(0, "", 0)
        self._observed = -math.inf  # time of the newest row
        # Rows of the open segment, and the observation after them. One assignment sets both, so that an interrupt
        # between two instructions finds both or none.
        self._state: tuple[int, Observation] = 0, {}

    @property
    def is_empty(self) -> bool:
        return self._state[0] == 0

    @property
    def steps(self) -> int:
        return self._start + self._state[0]

    def add(
        self, stamp: Stamp, observation: Observation, observed: float, step: Step, extras: Mapping[str, Array], *,
        chunk_start: bool, chunk_delay: int, gap: bool,
    ) -> str:  # fmt: skip
        """Add one step, and return "". If a number of it cannot be, add nothing and return which (Limits.broken).

        observed: when `observation` was there; seconds, the robot's clock. It becomes the row's time. If it is earlier
            than that of the row before, the row is marked as a gap.
        step: what was done in answer, and the observation after it. That one is looked at too, because the policy
            would see it next.
        extras: further columns; a missing one is zero.
        chunk_start, chunk_delay, gap: as in Segment.

        Raises ConfigError for extras that the Spec lacks, or has in another shape.
        """
        values = {
            "reward": step.reward, "intervened": step.intervened, "time": observed, "chunk_start": chunk_start,
            "chunk_delay": chunk_delay, "gap": gap or observed < self._observed,
        }  # fmt: skip
        if wrong := sorted(name for name, value in extras.items() if self._shapes.get(name) != np.shape(value)):
            raise ConfigError(
                f"the rows of this run have no columns {', '.join(wrong)} of that shape: name those of an environment "
                "in its Spec, and those of an algorithm in `extras` of its yaml, before the run begins"
            )
        columns = {**step.observation, **extras, "action": step.executed, "reward": step.reward, "time": observed}
        if bad := self.limits.broken(columns):
            return bad
        if self._state[0] == self._rows or stamp != self._stamp:
            self.flush()
        if not self._state[0]:
            self._stamp = stamp
            self._allocate()
        row = self._state[0]
        self._write(row, observation)
        for name, array in self._extras.items():
            array[row] = extras.get(name, 0)
        self._action[row] = step.executed
        for name, value in values.items():
            self._columns[name][row] = value
        self._observed, self.gap = observed, bool(values["gap"])
        self._state = row + 1, step.observation
        return ""

    def flush(self) -> None:
        """Push the open segment; the episode goes on."""
        self._push(terminated=False, truncated=False)

    def end(self, *, terminated: bool) -> None:
        """End the episode and push its last segment. Where all was flushed nothing is sent: the learner closes it."""
        self.ended = True
        if self._state[0]:
            self._write(*self._state)
            terminated = bool(terminated)  # an environment's may be numpy's
            self._push(terminated=terminated, truncated=not terminated)

    def _push(self, *, terminated: bool, truncated: bool) -> None:
        count = self._state[0]
        if not count:
            return
        rows = count + (terminated or truncated)
        segment = Segment(
            self.episode, self._start, self._task, self._stamp,
            {name: array[:rows] for name, array in self._observation.items()}, self._action[:count],
            **{name: array[:count] for name, array in self._columns.items()}, terminated=terminated,
            truncated=truncated, extras={name: array[:count] for name, array in self._extras.items()},
        )  # fmt: skip
        self._start += count
        self._state = 0, self._state[1]
        self._client.push(segment)

    def _write(self, row: int, observation: Observation) -> None:
        for name, array in self._observation.items():
            array[row] = observation[name]

    def _allocate(self) -> None:
        def empty(features: Mapping[str, Feature], rows: int) -> dict[str, Array]:
            return {name: np.empty((rows, *feature.shape), feature.dtype) for name, feature in features.items()}

        self._observation = empty(self._spec.observation, self._rows + 1)
        self._extras = empty(self._spec.extras, self._rows)
        self._action = empty({"action": self._spec.action}, self._rows)["action"]
        self._columns = {name: np.empty(self._rows, dtype) for name, dtype in COLUMNS.items()}


class Unrecorded(Recorder):
    """Looks at the steps of a way back as a Recorder does, and pushes none of them."""

    def _push(self, *, terminated: bool, truncated: bool) -> None:
        self._start += self._state[0]
        self._state = 0, self._state[1]


def segment_rows(spec: Spec) -> int:
    """Return how many rows a segment has: about SEGMENT_SECONDS of them."""
    row = sum(feature.nbytes for feature in spec.observation.values())
    return int(max(1, min(SEGMENT_SECONDS * spec.fps, SEGMENT_ROWS, SEGMENT_BYTES / row)))
