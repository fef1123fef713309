"""Waits between two episodes, and brings the robot to the start of the next one, once the person agrees."""

from collections.abc import Mapping
from typing import Any

import serl_client.clock as clock
from serl_client.client import TrainerClient
from serl_client.env import Env, Resets
from serl_client.errors import RobotFault
from serl_client.person import VERDICTS, Person
from serl_client.status import ActorStatus

NAP = 0.05  # seconds between two looks at the operator; a message of the learner ends the wait early
RESET = "RESET"  # ActorStatus.driver, while the person sets up the scene
BEGIN = "waiting for r or the first motion"  # ActorStatus.driver, before a person's demonstration


class WayHome:
    """Listens to the person while the robot waits, or is on its way to a start.

    resets: what brings the scene back; None: nothing does, or a simulation sets it up.
    asks: before each way home the robot holds until the person says ready. A demonstration that is driven by the
        person's devices waits at its start, too, until they say ready or move a device, unless they were just asked.
    """

    def __init__(
        self, env: Env, client: TrainerClient, person: Person, status: ActorStatus, resets: Resets | None, *, asks: bool
    ) -> None:
        self._env, self._client, self._person, self._status, self._asks = env, client, person, status, asks
        self._resets, self._is_real = resets, env.clock == "real"
        self._waits_since = 0.0

    def go(self, seed: int, directive: Mapping[str, Any]) -> bool:
        """Bring the robot to the start that `seed` names; return False if the directive is over before that.

        While the person pauses, the robot holds where it is. Raises RobotFault if a person has to set up the scene, and
        there is none.
        """
        if self._asks and not self._agreed(RESET, directive):
            return False
        if not self._arrives(seed, directive):
            return False
        while self._resets and (trouble := self._resets.trouble):
            goes_on = not self.is_over(directive) and self._set_up(trouble, self._resets, directive)
            if not goes_on or not self._arrives(seed, directive):
                return False
        waits = directive["mode"] == "teleop" and self._person.demonstrates and not self._asks
        return not waits or self._agreed(BEGIN, directive)

    def _arrives(self, seed: int, directive: Mapping[str, Any]) -> bool:
        """Bring the robot home; return False if the directive is over before that."""
        self._env.home(seed)
        while not self._env.is_home:
            if self.is_over(directive):
                self._env.stop()
                return False
            was_paused = self._person.is_paused
            seconds = NAP if was_paused or self._is_real else 0.0  # a simulated robot drives as fast as it is asked
            self.wait_as("PAUSED" if was_paused else "HOMING", holds=was_paused, seconds=seconds)
            if was_paused and not self._person.is_paused:
                self._env.home(seed)
        return True

    def _set_up(self, trouble: str, resets: Resets, directive: Mapping[str, Any]) -> bool:
        """Have the person, or the simulation, set up the scene; return False if the directive is over before that."""
        if not self._is_real:
            self._status.warn(f"{trouble}: the simulation sets up another scene")
        else:
            self._status.warn(f"{trouble}. Set up the scene for the first task, then press r")
            if not self._person.is_there:
                raise RobotFault(trouble, "scene")
            if not self._agreed(RESET, directive):
                return False
            self._status.calm()
        self._status.hand_resets += 1
        resets.set_up()
        return True

    def is_over(self, directive: Mapping[str, Any]) -> bool:
        """Return whether nothing may begin under this directive: there is a newer one, or the person has ended it."""
        return bool(self._client.over) or self._client.state.directive["number"] != directive["number"]

    def wait_as(self, driver: str, *, holds: bool = True, seconds: float = NAP) -> None:
        """Wait a moment between two episodes, and show why; a robot that `holds` is told so once."""
        if self._status.driver != driver:
            self._status.driver, self._status.rate = driver, 0.0
            if holds:
                self._env.stop()
        self.nap(seconds)
        verdict = self._person.judge_latest()
        if verdict and self._resets:
            self._resets.corrected(VERDICTS[verdict])

    def nap(self, seconds: float = NAP) -> None:
        self._client.wait(seconds)
        self._person.listen()

    def _agreed(self, why: str, directive: Mapping[str, Any]) -> bool:
        """Wait until the person says ready, or for BEGIN moves a device; return False if the directive is over."""
        person, begins = self._person, why == BEGIN
        if not begins:
            self._env.stop()  # before the question, so that a leader arm may come to a robot that holds
        person.ask()
        self.begin_waiting()
        while person.is_paused or not (person.is_ready or (begins and person.has_moved)):
            if self.is_over(directive):
                return False
            if begins:
                self._env.look()  # so that devices that the robot sees are read anew, and as a sign of life
            was_paused = person.is_paused
            self.wait_as("PAUSED" if was_paused else why, holds=False)
            self.count_waiting(why)
            if was_paused or person.is_paused:  # what was said and moved in the pause begins nothing after it
                person.ask()
        return True

    def begin_waiting(self) -> None:
        """Note that from now on the robot waits for a person."""
        self._waits_since = clock.monotonic()

    def count_waiting(self, why: str = "") -> None:
        """Count the seconds since the last call for which a person took their time, without pauses. why: RESET: to set
        up the scene."""
        before, self._waits_since = self._waits_since, clock.monotonic()
        seconds = 0.0 if self._person.is_paused else self._waits_since - before
        if why == RESET:
            self._status.reset_s += seconds
        else:
            self._status.waiting_s += seconds
