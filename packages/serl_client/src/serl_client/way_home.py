"""Waits between two episodes, and brings the robot to the start of the next one, once the person agrees."""

from collections.abc import Mapping
from typing import Any

from serl_client.client import TrainerClient
from serl_client.env import Env
from serl_client.person import Person
from serl_client.status import ActorStatus

NAP = 0.05  # seconds between two looks at the operator; a message of the learner ends the wait early
BEGIN = "waiting for r or the first motion"  # ActorStatus.driver, before a person's demonstration


class WayHome:
    """Listens to the person while the robot waits, or is on its way to a start.

    asks: before each way home the robot holds until the person says ready. A demonstration that is driven by the
        person's devices waits at its start, too, until they say ready or move a device, unless they were just asked.
    """

    def __init__(self, env: Env, client: TrainerClient, person: Person, status: ActorStatus, *, asks: bool) -> None:
        self._env, self._client, self._person, self._status, self._asks = env, client, person, status, asks

    def go(self, seed: int, directive: Mapping[str, Any]) -> bool:
        """Bring the robot to the start that `seed` names; return False if the directive is over before that.

        While the person pauses, the robot holds where it is.
        """
        if self._asks and not self._agreed("RESET", directive):
            return False
        self._env.home(seed)
        while not self._env.is_home:
            if self.is_over(directive):
                self._env.stop()
                return False
            was_paused = self._person.is_paused
            self.wait_as("PAUSED" if was_paused else "HOMING", holds=was_paused)
            if was_paused and not self._person.is_paused:
                self._env.home(seed)
        waits = directive["mode"] == "teleop" and self._person.demonstrates and not self._asks
        return not waits or self._agreed(BEGIN, directive)

    def is_over(self, directive: Mapping[str, Any]) -> bool:
        """Return whether nothing may begin under this directive: there is a newer one, or the person has ended it."""
        return bool(self._client.over) or self._client.state.directive["number"] != directive["number"]

    def wait_as(self, driver: str, *, holds: bool = True) -> None:
        """Wait a moment between two episodes, and show why; a robot that `holds` is told so once."""
        if self._status.driver != driver:
            self._status.driver = driver
            if holds:
                self._env.stop()
        self.nap()
        self._person.judge_latest()

    def nap(self) -> None:
        self._client.wait(NAP)
        self._person.listen()

    def _agreed(self, why: str, directive: Mapping[str, Any]) -> bool:
        """Wait until the person says ready, or for BEGIN moves a device; return False if the directive is over."""
        person, begins = self._person, why == BEGIN
        person.ask()
        while person.is_paused or not (person.is_ready or (begins and person.has_moved)):
            if self.is_over(directive):
                return False
            if begins:
                self._env.look()  # so that devices that the robot sees are read anew, and as a sign of life
            self.wait_as("PAUSED" if person.is_paused else why, holds=not begins)
            if person.is_paused:
                person.ask()  # what was said and moved in the pause begins nothing after it
        return True
