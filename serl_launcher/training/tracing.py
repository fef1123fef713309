"""Finds the episodes whose rows gave a gradient that was not finite (NaN), and sets them aside.

The store sets aside what exceeds a limit when it comes (store/aside.py), and the trainer at its start what an older
version has stored (`sift`). The rest is for what an operator has taken back, and for what is within the limit and yet
too much for a network.

How often a step was refused is known on the device alone, and whoever reads it waits. So it is read once a second, and
after each update once something was refused: then the batch is still at hand.
"""

import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.limits import LIMIT, Limits
from torch import Tensor

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store.aside import REMEDY
from serl_launcher.training.finite import Refusals
from serl_launcher.training.plan import Phase
from serl_launcher.training.ranks import Ranks
from serl_launcher.types import Batch

log = logging.getLogger(__name__)

LOOKED = 1024  # steps of a store whose numbers are looked at together
WATCHED = 1000  # updates after a refused one that are looked at one by one
FAR = 1e3  # times what a quarter of the batch stays below, or 1 where that is less: such a value may be the reason


def sift(sources: ReplayMixture, set_aside: Callable[[str, str], None]) -> None:
    """Set aside each episode that holds a number that cannot be, unless an operator has spoken of it."""
    reasons = dict[str, str]()
    for name, buffer in sources.buffers.items():
        for episode, reason in _broken(buffer):
            info = sources.held[name].get(episode)
            if info is not None and not info.discard and info.judged_by != "operator":
                reasons.setdefault(info.id, reason)
    for episode, reason in reasons.items():
        set_aside(episode, reason)


def _broken(buffer: ReplayBuffer) -> Iterator[tuple[int, str]]:
    """Yield (episode number, which number) of each step with a number that cannot be, in order."""
    limits = Limits(buffer.layout.spec)
    seen = limits.found.keys() & buffer.layout.spec.observation
    parts = [(begin, min(begin + LOOKED, buffer.head)) for begin in range(buffer.tail, buffer.head, LOOKED)[::-1]]
    while parts:
        begin, end = parts.pop()
        steps = np.arange(begin, end)
        if reason := limits.broken(buffer.stored(steps, seen), int(buffer.indices(steps[:1])[0])):
            if len(steps) == 1:
                yield int(buffer.episodes(steps)[0]), reason
            else:
                middle = (begin + end) // 2
                parts += [(middle, end), (begin, middle)]


def check_filled(sources: ReplayMixture, phase: Phase, name: str) -> None:
    """Raise ConfigError if an update of this phase draws from what holds no step, and nobody adds any."""
    fed = phase.actors.into if phase.actors.act else None
    empty = [view for view in phase.update(name).data if not sources.size(view)[0]]
    nobody = [view for view in empty if fed not in sources.views[view].of and not sources.may_fill(view)]
    if nobody:
        raise ConfigError(
            f"phase {phase.name} cannot go on: update {name} draws from {', '.join(nobody)}, which holds no step, "
            "and no actor adds any in this phase. Import some, or let another phase collect them first"
        )


def await_rows(
    sources: ReplayMixture, name: str, turn: Callable[[], None], is_interrupted: Callable[[], bool]
) -> None:  # fmt: skip
    """While a source or view is empty and a person's word may fill it, make turns until it does, or is interrupted."""
    is_told = False
    while not sources.size(name)[0] and sources.may_fill(name) and not is_interrupted():
        if not is_told:
            log.warning(
                "%s holds no step until a person judges its episodes, so the learner waits: tools/label.py EPISODE "
                "success or failure. One that is set aside is %s", name, REMEDY,
            )  # fmt: skip
        is_told = True
        turn()


class Tracer:
    """Looks for the reason of refused steps. set_aside: called with an episode's id and a reason; returns once no batch
    is drawn from that episode."""

    def __init__(self, ranks: Ranks, sources: ReplayMixture, set_aside: Callable[[str, str], None]) -> None:
        self._ranks, self._sources, self._set_aside = ranks, sources, set_aside
        self._refusals, self._left = Refusals(), 0

    def look(self, updates: int) -> int:
        """Log what was refused since the last call, and watch the updates to come if anything was. Returns the number
        of all steps that were refused."""
        if self._was_refused():
            self._left = WATCHED
        self._refusals.tell(updates)
        return self._refusals.total

    def updated(self, name: str, batch: Batch, updates: int) -> None:
        """Set aside the episodes that explain why the update that was just made of `batch` was refused, if it was and
        updates are watched. Raises RetakeError if too many in a row were, and no episode explains it."""
        if not self._left:
            return
        self._left -= 1
        if self._was_refused():
            self._left = WATCHED
            if self._trace(name, batch):
                self._refusals.explained()
            self._refusals.check(updates)

    def _was_refused(self) -> bool:
        return self._refusals.look(self._ranks.steps())

    def _trace(self, name: str, batch: Batch) -> bool:
        """Return whether the batch's outliers are the reason: without their rows the same update has a gradient.

        Those of all columns are tried together, then those of each one, which may leave more rows.
        """
        sizes = magnitudes(batch)
        for far in (math.inf, FAR):
            found = {column: each > min(LIMIT, far * _usual(each)) for column, each in sizes.items()}
            for suspects in (found, *({column: each} for column, each in found.items())):
                bad = torch.stack([each.reshape(len(batch), -1).any(1) for each in suspects.values()]).any(0)
                if bad.any() and not bad.all() and self._goes_without(name, batch, bad):
                    self._blame(batch, sizes, suspects)
                    return True
        return False

    def _goes_without(self, name: str, batch: Batch, bad: Tensor) -> bool:
        """Make the update with the other rows, repeated. Return whether it has a gradient."""
        rest = (~bad).nonzero()[:, 0]
        self._ranks.update(name, batch.rows(rest[torch.arange(len(batch), device=rest.device) % len(rest)]))
        return not self._was_refused()

    def _blame(self, batch: Batch, sizes: dict[str, Tensor], found: dict[str, Tensor]) -> None:
        steps, reasons = _steps(batch), dict[str, str]()
        for column, is_found in found.items():
            for step, size in zip(steps[is_found].tolist(), sizes[column][is_found].tolist(), strict=True):
                if (there := self._sources.episode_of(step)) is not None and not there[0].discard:
                    reasons.setdefault(there[0].id, f"{column:.80} is {size:.3g} in size at or near step {there[1]}")
        for episode, reason in reasons.items():
            self._set_aside(episode, f"{reason}, and updates with it have no finite gradient")


def magnitudes(batch: Batch) -> dict[str, Tensor]:
    """Return {column: the largest magnitude at each of batch.step_id, [B] or [B, H]}; infinity for one that is NaN."""
    columns = {**batch.observation, "reward": batch.reward, "action": batch.action, **batch.extras}
    columns |= {f"{name} (next)": each for name, each in (batch.next_observation or {}).items()}
    shape = batch.step_id.shape
    return {
        name: each.float().abs().reshape(*shape, -1).amax(-1).nan_to_num(nan=math.inf, posinf=math.inf)
        for name, each in columns.items()
        if each.dtype not in (torch.bool, torch.uint8) and each.shape[: len(shape)] == shape
    }


def _usual(sizes: Tensor) -> float:
    """Return what a quarter of these stays below; at least 1, because right rewards may be 0 in most rows."""
    ordered = sizes.flatten().sort().values
    return max(1.0, float(ordered[len(ordered) // 4]))


def _steps(batch: Batch) -> Tensor:
    """Return the step id of each entry; of a final observation in a window that joins episodes, the one before it."""
    steps = batch.step_id.clone()
    for k in range(1, steps.shape[1] if steps.dim() > 1 else 0):
        steps[:, k] = torch.where(steps[:, k] < 0, steps[:, k - 1], steps[:, k])
    return steps
