"""Keeps the run's directives and to whom its evaluations were dealt, and compares what a segment says with that.

Phase, mode, source and weights of a directive are the learner's word. An actor only copies them, so a segment that
says anything else is no honest one.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from serl_client.episode import Segment
from serl_client.errors import Refused

from serl_launcher.store.index import Index

log = logging.getLogger(__name__)

DATASET = "dataset"  # the mode of a directive that no actor hears of: an importer's
EVALUATE = "evaluate"
WITHOUT_STEPS = ("idle", "stop")  # modes in which nobody makes steps
DEALT = "dealt"  # in the index's table meta


def ends_run(directive: Mapping[str, Any]) -> bool:
    """Return whether a directive says that the plan has ended. A phase of the plan may let its actors end, too."""
    return directive.get("mode") == "stop" and not directive.get("phase")


class Directives(dict[int, dict[str, Any]]):
    """{number: what the learner said}. `dealt`: {number of an evaluation: the names of those who run it}; a name stands
    for all actors below it, too. An evaluation that is not there is for everybody."""

    def __init__(self, index: Index) -> None:
        super().__init__(index.directives())
        self._index = index
        self.dealt: dict[int, list[str]] = {int(number): names for number, names in index.meta(DEALT) or ()}

    @property
    def newest(self) -> int:
        """The number of the newest directive that is for actors; 0: there is none."""
        return next((number for number in reversed(self) if self.mode(number) != DATASET), 0)

    def mode(self, number: int) -> str:
        return self.get(number, {}).get("mode", "")

    def same(self, body: dict[str, Any]) -> int:
        """Return the number under which `body` holds already; 0: it would be new."""
        candidates = self if body.get("mode") == DATASET else [self.newest]
        return next((number for number in candidates if number and self[number] == body), 0)

    def deal(self, number: int, actors: Collection[str]) -> None:
        """Let these actors, too, run an evaluation. The next commit makes it durable."""
        names = {name_of(actor) for actor in actors}
        self.dealt[number] = sorted(names.union(self.dealt.get(number, ())))
        self._index.set_meta(DEALT, list(self.dealt.items()))
        log.info("directive %d is for %s", number, ", ".join(self.dealt[number]) or "nobody yet")

    def is_for(self, number: int, actor: str) -> bool:
        """Return whether this actor follows a directive: an evaluation is for those to whom it was dealt, and anything
        else for all but those of its `without`, which only evaluate."""
        name = name_of(actor)
        if number in self.dealt and self.mode(number) == EVALUATE:
            return name in self.dealt[number]
        return name not in self.get(number, {}).get("without", ())

    def of(self, segment: Segment, actor: str, newest_weights: int) -> dict[str, Any]:
        """Return the directive of a segment. Raises Refused where the segment's stamp says what cannot be."""
        id, stamp = segment.episode, segment.stamp
        if (body := self.get(stamp.directive)) is None:
            raise Refused(f"no directive {stamp.directive}, of {id}, was ever given")
        if (mode := self.mode(stamp.directive)) in WITHOUT_STEPS:
            raise Refused(f"directive {stamp.directive}, of {id}, is {mode}: nobody makes steps under it")
        if stamp.phase != (phase := body.get("phase", "")):
            raise Refused(f"{id} names the phase {stamp.phase!r}, and its directive {stamp.directive} is of {phase!r}")
        if stamp.weights_version > newest_weights:
            raise Refused(f"{id} names the weights {stamp.weights_version}, and the newest are {newest_weights}")
        if body.get("weights") not in (None, stamp.weights_version):
            raise Refused(
                f"{id} names the weights {stamp.weights_version}, and its directive {stamp.directive} wants those of "
                f"version {body['weights']} to act"
            )
        if not self.is_for(stamp.directive, actor):
            whose = f"evaluates: it is for {', '.join(self.dealt.get(stamp.directive, ()))}"
            what = whose if mode == EVALUATE else "is for those that do not evaluate alone"
            raise Refused(f"directive {stamp.directive}, of {id}, {what}, and {actor} idles")
        return body


def name_of(actor: str) -> str:
    """Return the name to which those of a command's environments and of a key's tools belong: left of left/0."""
    return actor.partition("/")[0]
