"""Does what a person has said to an actor: pause, ready, next, and verdicts (success, failure, discard)."""

import math
from typing import Protocol

import serl_client.clock as clock
from serl_client.client import TrainerClient
from serl_client.driving import PAUSED
from serl_client.env import Observation
from serl_client.episode import Outcome
from serl_client.messages import Command
from serl_client.status import ActorStatus, SuccessCounter

VERDICTS = {"success": True, "failure": False, "discard": None}
DELIBERATE = 1.0  # seconds after a pause, until another may resume: two people pause at once, and a held key repeats


class Operator(Protocol):
    """Describes a person with a keyboard. Events: pause (again, unless at once: resume), halt (pause, and never
    resume), ready, moved (a device that drives the robot), stop, next, success, failure, discard."""

    @property
    def has_terminal(self) -> bool:
        """Whether a person can be asked to say ready; a script without a terminal cannot."""
        ...

    @property
    def demonstrates(self) -> bool:
        """Whether it is this person's devices that drive a demonstration, and no script."""
        ...

    def poll(self) -> list[str]:
        """Return the events since the last call; never wait."""
        ...

    def forget(self, *, hands_back: bool = True) -> None:
        """Forget motions that were begun before now. hands_back: and nobody drives any more: a question begins."""


class Person:
    """Remembers what the operator says until the control loop has done it.

    is_there: somebody can be asked. demonstrates: and drives the demonstrations.
    is_ready, has_moved: since `ask` they said that the robot may move, or moved a device.
    verdict: success, failure or discard, of the episode under way, or of the latest one; empty: none.
    """

    def __init__(self, operator: Operator | None, client: TrainerClient, status: ActorStatus) -> None:
        self.is_there = operator is not None and operator.has_terminal
        self.demonstrates = operator is not None and self.is_there and operator.demonstrates
        self.is_ready = self.has_moved = False
        self._pauses_here = self._pauses_elsewhere = False
        self._paused_at = -math.inf  # when somebody said pause last
        self.verdict = ""
        self._operator, self._client, self._status = operator, client, status
        status.remote = "" if client.remote else None
        self._latest = ""  # the episode that ended last: a verdict between two episodes is about it
        self._successes = SuccessCounter(status)

    @property
    def is_paused(self) -> bool:
        """Whether somebody has paused the robot. A person beside it lifts any pause, one elsewhere only their own."""
        return self._pauses_here or self._pauses_elsewhere

    def listen(self, seen: Observation | None = None) -> None:
        """Read what was said since the last call. Events that the loop does not know go to the learner as commands.

        seen: the newest observation, for whoever drives from the page.
        """
        for event in self._operator.poll() if self._operator else ():
            if event in ("pause", "halt"):
                is_over = event == "pause" and self.is_paused and clock.monotonic() > self._paused_at + DELIBERATE
                self._pauses_here, self._paused_at = not is_over, clock.monotonic()
                self._pauses_elsewhere &= not is_over
            elif event == "ready":
                self.is_ready = True
            elif event == "moved":
                self.has_moved = True
            elif event in VERDICTS:
                self.verdict = event
            elif event != "next" or self._client.over != "next":  # said twice before it is heard, it would skip a phase
                on_console = {"number": self._status.directive, "phase": self._status.phase}
                self._client.command(event, seen=on_console)
        for word in self._client.words():
            self._status.heard = f"{word.request}{'' if self._takes(word) else ' late'}"
        if remote := self._client.remote:
            remote.hindrance = PAUSED if self.is_paused else ""
            remote.show(seen)
            self._status.remote = remote.holder

    def _takes(self, word: Command) -> bool:
        """Do what an operator says from elsewhere; return False if it is about something that is over, or if a person
        beside the robot has paused it, or anybody just now."""
        if word.name == "pause":
            self._pauses_elsewhere, self._paused_at = True, clock.monotonic()
        elif word.name == "resume" and not self._pauses_here and clock.monotonic() > self._paused_at + DELIBERATE:
            self._pauses_elsewhere = False
        elif word.name == "ready" and word.argument == str(self._status.question):
            self.is_ready = True
        elif word.name in VERDICTS and word.argument == self._status.episode:
            self.verdict = word.name
        else:
            return False
        return True

    def ask(self) -> None:
        """Forget what was said and moved before this question, also what nobody has read yet."""
        self.listen()
        if self._operator:
            self._operator.forget(hands_back=not self.is_paused)
        self._status.question += 1
        self.is_ready = self.has_moved = False

    def pronounce(self, episode: str, success: bool | None) -> None:
        """Push the verdicts of judge and operator before the last rows, so that no episode counts as unjudged."""
        if success is not None:
            self._client.push(Outcome(episode, bool(success)))  # an environment's may be numpy's
        if word := self.verdict:
            self._client.push(Outcome(episode, VERDICTS[word], discard=word == "discard", judged_by="operator"))

    def disown(self, episode: str) -> None:
        """Discard a demonstration that nobody drove, whatever was said of it."""
        self._client.push(Outcome(episode, None, discard=True))
        self.verdict = "discard"

    def close(self, episode: str, *, is_unattended: bool) -> str:
        """Return the verdict on the episode that ends, and forget it. A later one corrects it, unless nobody drove."""
        self._latest, word, self.verdict = "" if is_unattended else episode, self.verdict, ""
        return word

    def count(self, episode: str, success: bool | None, *, assisted: bool) -> None:
        """Count an episode of the policy for the console."""
        self._successes.add(episode, success, assisted=assisted)

    def judge_latest(self) -> str:
        """Between two episodes, push a verdict as that of the latest one, and return it; empty: there is none."""
        verdict = self.verdict if self._latest else ""
        if self._latest:
            self.pronounce(self._latest, None)
        if self.verdict:
            self._successes.correct(self._latest, VERDICTS[self.verdict])
        self.verdict = ""
        return verdict
