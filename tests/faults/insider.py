"""A peer that is let in and speaks the protocol well, and whose records say what no honest actor would say."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from serl_client import Segment
from serl_client.episode import COLUMNS
from serl_client.errors import TrainerError

from tests.shared.clients import RawActor
from tests.shared.data import blank_segment

from . import actor
from .truth import Truth

LENGTH = 3  # steps of a segment


def _stamped(**numbers: int) -> Callable[[Segment], Mapping[str, Any]]:
    return lambda honest: {"stamp": dataclasses.replace(honest.stamp, **numbers)}


HOSTILE: dict[str, Callable[[Segment], Mapping[str, Any]]] = {  # what an honest segment that goes on is changed to
    **{f"directive 2^{power}": _stamped(directive=1 << power) for power in (31, 32, 40, 52, 63)},
    **{f"weights 2^{power}": _stamped(weights_version=1 << power) for power in (52, 53, 63)},
    "directive -1": _stamped(directive=-1),
    "start 2^40": lambda honest: {"start": 1 << 40},
    "a long phase": lambda honest: {"stamp": dataclasses.replace(honest.stamp, phase="x" * 100_000)},
    "time NaN": lambda honest: {"time": np.full(LENGTH, np.nan)},
    "time inf": lambda honest: {"time": np.full(LENGTH, np.inf)},
    "reward NaN": lambda honest: {"reward": np.full(LENGTH, np.nan, np.float32)},
    "reward 3e38": lambda honest: {"reward": np.full(LENGTH, 3e38, np.float32)},
    "action inf": lambda honest: {"action": np.full((LENGTH, 2), np.inf, np.float32)},
    "no steps": lambda honest: {name: getattr(honest, name)[:0] for name in
                                ("action", *COLUMNS)},
}  # fmt: skip


class Insider(RawActor):
    """One life of such a peer: an honest segment, then the hostile one, again and again, as one does that obeys when it
    is asked to send it again. What is stored of it has to be what it sent."""

    def __init__(
        self, address: str, key_file: Callable[[str], Path | None], truths: Path, random: Random, kind: str
    ) -> None:
        self._change, self._records = HOSTILE[kind], list[Segment]()
        name = f"insider{random.randrange(1 << 32):08x}"
        super().__init__(
            address, actor.SPEC, name, session=f"{name}-0", outbox=f"outbox-{name}", key=key_file(name)
        )  # fmt: skip
        self._truth = Truth(truths / f"{name}.jsonl")
        self._truth.note(actor=name, life=0, session=self.session)

    def turn(self) -> None:
        """Say what there is to say now; what is refused is said again at the next turn."""
        try:
            self.hear()
        except TrainerError:
            return  # its key is not let in any more
        directive = self.link.notice.directive
        if self.link.connected and directive.get("mode") == "collect":
            if not self._records:
                self._make(directive["number"])
            self.push(0, *self._records)

    def _make(self, directive: int) -> None:
        stamp: dict[str, Any] = {"directive": directive, "phase": "collect", "weights": 0}
        honest = [blank_segment(actor.SPEC, f"{self.session}-episode", i, LENGTH, **stamp) for i in (0, LENGTH)]
        self._records = [honest[0], dataclasses.replace(honest[1], **self._change(honest[1]))]
        for seq, record in enumerate(self._records):
            self._truth.note(seq=seq, **actor.facts_of(record))
