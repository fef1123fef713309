"""Says which actors are connected, which have left, and what a phase lacks that none of them does."""

from collections.abc import Sequence
from typing import Any

from serl_client import clock
from serl_client.console import throttled
from serl_client.errors import ConfigError

from serl_launcher.training.plan import Phase

log = throttled(__name__)

MOST = 8  # actors that have left and are still named
SAY_S = 5.0  # that a phase lacks an actor before the log says so: one that has just connected is not heard of before
HOPE_S = 60.0  # that a phase waits for an actor that can do it where all actors are simulated, so nobody is there
REMEDIES = {
    "teleop": "start one that demonstrates, as with task.env.operator=keyboard task.env.clock=real "
    "(docs/guides/people.md); end the phase with n in an actor's terminal; or leave such phases out: "
    "task.has_operator=false for the learner",
    "collect": "start another one, simulated where actions are random (or let the plan say policy: trained)",
    "evaluate": "start the one that it is by, with its name=, or end the evaluation with n",
}  # by the phase's mode


class Presence:
    """Logs which actors have left and which are back. As a text: who is connected, and who left when.

    here: the names of those that are connected. lack: what the phase waits for, since nobody who is here does it;
    empty: nothing.
    """

    def __init__(self) -> None:
        self.here: list[str] = []
        self.lack = ""
        self._actors: Sequence[Sequence[Any]] = []  # as in Synced
        self._left: dict[str, float] = {}  # name: when (seconds, time.monotonic()), the latest last
        self._gone: dict[str, None] = {}  # names of those that have left the phase under way
        self._lacks = "", 0  # since `_since`: what, and how many steps there were
        self._since, self._told = clock.monotonic(), ""

    def update(self, actors: Sequence[Sequence[Any]]) -> None:
        """actors: those that are connected now, as in Synced."""
        if actors == self._actors:
            return
        here, idle = [name for name, *_ in actors], {name for name, because, _ in self._actors if because}
        for name in here:
            self._gone.pop(name, None)
            if self._left.pop(name, None) is not None:
                log.info("actor %s is back", name)
        for name in self.here:
            if name not in here:
                self._left[name] = clock.monotonic()
                self._gone |= {} if name in idle else {name: None}
                log.info("actor %s has left", name)
        for names in (self._left, self._gone):
            while len(names) > MOST:
                del names[next(iter(names))]
        self.here, self._actors = here, actors

    @property
    def waits(self) -> bool:
        """Whether all that are here are simulated, and wait for their step limit."""
        return all(paced for *_, paced in self._actors)

    def begin_phase(self) -> None:
        """Forget what the phase before lacked."""
        self._gone.clear()
        self.lack, self._lacks, self._told = "", ("", 0), ""
        self._since = clock.monotonic()

    def look(self, phase: Phase | None, steps: int) -> None:
        """Find out what the phase lacks, and log it once. steps: those of the phase; while some come it lacks nothing.

        Raises ConfigError once it has lacked an actor that can do it for HOPE_S, if none that is here has a real clock:
        then nobody is there who could start one. A phase that ends by time or updates goes on.
        """
        now, hindered = clock.monotonic(), bool(self._actors) and all(because for _, because, _ in self._actors)
        lacks = self._lack(phase, hindered) if phase else ""
        if (lacks, steps) != self._lacks:
            self._lacks, self._since = (lacks, steps), now
        self.lack = lacks if now >= self._since + SAY_S else ""
        if self.lack not in ("", self._told):
            log.warning("phase %s waits for %s", phase and phase.name, self.lack)
        self._told = self.lack or (self._told if lacks else "")
        is_hopeless = bool(self.lack) and hindered and self.waits  # an idle phase lacks nobody
        if phase and is_hopeless and not phase.ends_alone and now >= self._since + HOPE_S:
            raise ConfigError(f"phase {phase.name} cannot go on without {self.lack}")

    def _lack(self, phase: Phase, hindered: bool) -> str:
        mode = phase.actors.mode
        if hindered and phase.actors.act:
            why = "; ".join(f"{name:.40}: {because}" for name, because, _ in self._actors[:MOST])
            others = f" and {len(self._actors) - MOST} others" if len(self._actors) > MOST else ""
            return f"an actor that can do it ({why}{others}): {REMEDIES.get(mode, 'start another')}"
        if mode == "evaluate" and self._gone:
            gone = ", ".join(f"{name:.40}" for name in self._gone)
            return f"the actors without {gone}, to whom this evaluation was dealt: start them again, or end it with n"
        return ""

    def __str__(self) -> str:
        now = clock.monotonic()
        here = [f"{name} (idles)" if because else name for name, because, _ in self._actors]
        left = [f"{name} left {now - since:.0f} s ago" for name, since in self._left.items()]
        start = "start one with run_actor.sh" if left else "none yet: start one with run_actor.sh"
        return "; ".join([", ".join(here), *left] if here else [*left, start])
