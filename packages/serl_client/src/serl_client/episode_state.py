"""Holds what the control loop knows of the current episode: newest observation, return, steps by a person."""

from dataclasses import dataclass

from serl_client.env import Observation, Step
from serl_client.frames import Frames
from serl_client.recorder import Recorder


@dataclass
class EpisodeState:
    """One episode from its reset to its end, as run_actor keeps it."""

    recorder: Recorder
    frames: Frames  # what was observed
    teleop: bool
    began: float
    observed: float  # when the newest observation was there; seconds, the robot's clock
    last: Step | None = None
    reset: bool = True
    human: int = 0  # steps of the takeover under way
    held: int = 0  # consecutive steps, or looks in simulation, without an action
    held_since: float = 0.0  # when the first of them was
    is_theirs: bool | None = None  # whether the operator drives the next step; None: nobody has looked
    is_stale: bool = False  # the world may have changed since that observation: the next step holds, to look again
    reward: float = 0.0
    intervened: int = 0
    driven: bool = False  # somebody gave the action of a step
    is_back: bool = False  # the policy brings the scene back by it, and nothing of it is recorded

    @property
    def is_unattended(self) -> bool:
        """Whether this is no demonstration, although it should be one: it has steps, and nobody drove any of them."""
        return self.teleop and self.last is not None and not self.driven

    @property
    def observation(self) -> Observation:
        return self.frames.newest(1)
