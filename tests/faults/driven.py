"""An actor of a chaos round that drives an arm: the product's own control loop, env and guard over a driver that hangs
while a file of the call's name lies in a folder."""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from serl_client import faults
from serl_client.errors import RobotFault
from serl_client.runner import run_actor
from serl_client.spec import Array, Feature

from robot_infra.env import RobotEnv
from robot_infra.interfaces import Verdict
from robot_infra.judges import Function
from robot_infra.tasks.fake import FakeArm, guarded

from .actor import NotingClient, Part, played
from .truth import Truth

FPS, STEPS = 20.0, 30  # of an episode
FAULTS = 1000  # within a minute, until a person would mend the robot first


class HangingArm(FakeArm):
    """A FakeArm whose `read`, `write` or `close` does not return while a file of that name lies in `folder`."""

    def __init__(self, address: str, *, folder: str, **options: Any) -> None:
        self._folder = Path(folder)
        super().__init__(address, **options)

    def read(self) -> Array:
        self._hang("read")
        return super().read()

    def write(self, positions: Array) -> Array | None:
        self._hang("write")
        return super().write(positions)

    def close(self) -> None:
        self._hang("close")

    def _hang(self, call: str) -> None:
        while (self._folder / call).exists():
            time.sleep(0.01)


class Stopped(Exception):
    """It is time to stop."""


class _Person:
    """Somebody who says ready after each fault, and ends the loop when it is time."""

    has_terminal, demonstrates = True, False

    def __init__(self, stop: Path) -> None:
        self._stop = stop

    def poll(self) -> list[str]:
        if self._stop.exists():
            raise Stopped
        return ["ready"]

    def forget(self, *, hands_back: bool = True) -> None:
        """They have no device."""


class _Drift:
    """A controller whose actions are random."""

    carry_resets = version = chunk_delay = 0
    chunk_start = True
    extras: Mapping[str, Array] = {}

    def __init__(self, action: Feature, seed: int) -> None:
        self._shape, self._chance = action.shape, np.random.default_rng(seed)

    def begin(self, episode: str, directive: Mapping[str, Any], task: str) -> None:
        pass

    def act(self, observation: Mapping[str, Array], **words: Any) -> Array:
        return self._chance.uniform(-1, 1, self._shape).astype(np.float32)


def play(part: Part) -> None:
    """Run the control loop until it is time to stop."""
    faults.MOST = FAULTS
    never = Function(lambda observation: Verdict(0.0, terminated=False, success=False))

    def made() -> RobotEnv:
        """Start again, as a person does, while the start ends because the driver hangs."""
        while True:
            with suppress(RobotFault):
                robot = guarded(HangingArm, fps=FPS, guard=True, folder=str(part.hangs))
                return RobotEnv(robot, judge=never, task="chaos", fps=FPS, max_steps=STEPS, clock="real")

    with made() as env:

        def work(client: NotingClient, truth: Truth) -> None:
            with suppress(Stopped):
                run_actor(env, _Drift(env.spec.action, part.seed), client, seed=part.seed, operator=_Person(part.stop))

        played(part, env.spec, work)
