"""Holds what the console and the heartbeat say of an actor: step rate, success rate, takeovers and warnings."""

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

RECENT = 20  # judged episodes


@dataclass
class ActorStatus:
    """Holds what the console shows of an actor, and what its heartbeat tells the learner."""

    directive: int = 0
    phase: str = ""
    mode: str = "idle"
    because: str = ""  # why it idles under this directive, which others follow
    # POLICY, HUMAN, WAITING (no action has come), PAUSED (by the operator), IDLE, HOMING (on the way to a start),
    # RESET or FAULT (until the operator says ready), or BEGIN of way_home.py
    driver: str = "IDLE"
    episodes: int = 0
    episode: str = ""  # the one under way, or the latest
    steps: int = 0  # in this session
    rate: float = 0.0  # steps per second since it last waited between episodes, a moving average; 0.0: of none yet
    late: int = 0  # commands on the real clock that followed the one before by less than 0.5 or more than 1.5 periods
    takeovers: int = 0
    # The person's time besides demonstrations and takeovers, which the rows tell.
    hand_resets: int = 0  # scenes that were set up by hand because the automatic reset could not
    reset_s: float = 0.0  # seconds from the question to r, for scenes
    waiting_s: float = 0.0  # the same for faults, and until a demonstration began
    carry_resets: int = 0  # a policy that remembers earlier steps began anew in mid-episode: docs/guides/operations.md
    # Successes / episodes among the latest judged ones. Demonstrations count in neither.
    assisted: str = "0/0"  # the operator took over
    unassisted: str = "0/0"  # the policy drove every step
    remote: str | None = None  # who drives from the page; "": nobody; None: nobody there can
    warning: str = ""
    question: int = 0  # number of the latest question to a person; `ready` from elsewhere names it
    heard: str = ""  # number of the latest Command to this actor, and `late` if it was about something that is over

    def warn(self, text: str) -> None:
        """Show `text` as the latest warning, until `calm`, and log it."""
        self.warning = text
        log.warning("%s", text, extra={"is_shown": True})

    def calm(self) -> None:
        """Show no warning: its cause is gone, because an episode went well or there is a new directive."""
        self.warning = ""


class SuccessCounter:
    """Counts the successes of the latest RECENT judged episodes, apart for those with and without a human's help."""

    def __init__(self, status: ActorStatus) -> None:
        self._status = status
        self._episodes: dict[str, tuple[bool | None, bool]] = {}  # id: (success, assisted)

    def add(self, episode: str, success: bool | None, *, assisted: bool) -> None:
        """Add an ended episode; success None: it was not judged, or discarded, and does not count."""
        self._episodes[episode] = None if success is None else bool(success), assisted
        while len(self._episodes) > 2 * RECENT:
            del self._episodes[next(iter(self._episodes))]
        judged = [(success, assisted) for success, assisted in self._episodes.values() if success is not None][-RECENT:]
        self._status.assisted = _ratio([success for success, assisted in judged if assisted])
        self._status.unassisted = _ratio([success for success, assisted in judged if not assisted])

    def correct(self, episode: str, success: bool | None) -> None:
        if episode in self._episodes:
            self.add(episode, success, assisted=self._episodes[episode][1])


def _ratio(successes: list[bool]) -> str:
    return f"{sum(successes)}/{len(successes)}"
