"""Adds up how long a run needed a person: demonstrations, takeovers, resets by hand, and what waited for them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from serl_launcher.training.counters import TRAINED, RunCounters

TOLD = ("hand_resets", "reset_s", "waiting_s")  # by actors, each since the actor's start (serl_client/status.py)


class PersonTime:
    """Sums up what actors tell of their person's time, over all their lives, and adds what the rows tell.

    A number that is smaller than before is that of an actor which has started again.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = dict.fromkeys(TOLD, 0.0)
        self._latest: dict[str, dict[str, float]] = {}  # by actor; without those that told nothing but zeros

    def hear(self, clients: Iterable[Mapping[str, Any]]) -> None:
        """clients: of the server's status."""
        for client in clients:
            if client["role"] != "actor" or TOLD[0] not in client:
                continue
            before = self._latest.pop(client["actor"], {})
            now = {name: value for name in TOLD if (value := _number(client.get(name)))}
            for name, value in now.items():
                earlier = before.get(name, 0.0)
                self._sums[name] += value - earlier if value >= earlier else value
            if now:
                self._latest[client["actor"]] = now

    def told(self, counters: RunCounters, fps: float) -> dict[str, Any]:
        """Return the minutes of each kind, and how many scenes were set up by hand.

        A demonstration is an episode whose steps a person drove all. Imported and evaluated episodes do not count.
        """
        done = counters.finished()
        done = done[done["flags"] & TRAINED > 0]
        whole = done["intervened"] == done["steps"]
        seconds = {
            "demonstrations": done["steps"][whole].sum() / fps, "takeovers": done["intervened"][~whole].sum() / fps,
            "resets": self._sums["reset_s"], "waiting": self._sums["waiting_s"],
        }  # fmt: skip
        minutes = {f"{name}_min": round(float(value) / 60, 2) for name, value in seconds.items()}
        return {**minutes, "hand_resets": round(self._sums["hand_resets"])}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "latest": {name: dict(told) for name, told in self._latest.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums |= state["sums"]
        self._latest = {name: dict(told) for name, told in state["latest"].items()}


def _number(value: Any) -> float:
    """Return a number that an actor told; 0.0 for anything else, because it comes from another machine."""
    is_number = isinstance(value, int | float) and math.isfinite(value) and 0 <= value < 1e9
    return float(value) if is_number else 0.0
