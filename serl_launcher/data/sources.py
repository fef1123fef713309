"""Sources as an algorithm sees them: physical ones and views of them, mixed by shares into one Batch."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client.errors import ConfigError
from serl_client.spec import Array, Spec

from serl_launcher.data.episodes import EpisodeInfo, View
from serl_launcher.data.layout import Layout
from serl_launcher.data.replay import Drawn, Numbers, ReplayBuffer, batch_arrays
from serl_launcher.types import Batch, Window

STRIDE = 1 << 48  # step ids of different sources are this far apart


class Sources:
    """All sources of a run for one trainer rank: what lies in them, and batches drawn from them.

    `generator` (numpy) is part of the trainer's state. With `pinned` the batches lie in pinned memory.
    """

    def __init__(
        self, folder: Path, spec: Spec, capacities: Mapping[str, int], views: Mapping[str, View], *, seed: int,
        pinned: bool = False,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.buffers = {
            name: ReplayBuffer(folder / name, Layout(spec, capacity)) for name, capacity in capacities.items()
        }
        self.views = {**{name: View((name,)) for name in capacities}, **views}
        self.episodes: dict[int, EpisodeInfo] = {}  # by number, in that order
        self.generator = np.random.default_rng(seed)
        self._pinned = pinned
        self._memory: dict[Any, torch.Tensor] = {}
        self._candidates: dict[tuple[str, str], Numbers] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._discarded: set[str] = set()  # sources with a discarded episode: their plain view is a filter, too

    def update(self, rows: Sequence[Sequence[Any]]) -> list[tuple[EpisodeInfo | None, EpisodeInfo]]:
        """Take in what the server said of episodes, then every new step; returns (before, now) of each changed one."""
        changed, newest = [], next(reversed(self.episodes), 0)
        if rows:
            self._sizes.clear()
        for row in rows:
            episode = EpisodeInfo(*row)
            before = self.episodes.get(episode.number)
            changed.append((before, episode))
            self.episodes[episode.number] = episode
            self._forget(before, episode)
            if episode.discard:
                self._discarded.add(episode.source)
        new = [now.number for before, now in changed if before is None]
        if new != sorted(new) or (new and new[0] < newest):  # a restart hears of them in the order of their last change
            self.episodes = dict(sorted(self.episodes.items()))
        for buffer in self.buffers.values():
            buffer.refresh()
        for _, episode in changed:
            if episode.sealed and not episode.final:
                self.buffers[episode.source].cut([episode.number])
        return changed

    def _forget(self, before: EpisodeInfo | None, now: EpisodeInfo) -> None:
        """Drop the candidates of the views whose steps this change of an episode adds to or takes from."""
        for key in list(self._candidates):
            view = self.views[key[0]]
            if key[1] == now.source and (view.holds(now) or (before is not None and view.holds(before))):
                del self._candidates[key]

    def size(self, name: str) -> tuple[int, int]:
        """(steps, episodes) that a source or view holds now; evicted episodes do not count."""
        if name not in self._sizes:
            view = self.views[name]
            held = (episode for episode in self.episodes.values() if view.holds(episode))
            alive = [episode for episode in held if episode.first >= self.buffers[episode.source].tail]
            self._sizes[name] = sum(view.count(episode) for episode in alive), sum(episode.sealed for episode in alive)
        return self._sizes[name]

    def sample(self, count: int, window: Window, shares: Mapping[str, float]) -> Batch | None:
        """A batch of `count` windows, each source giving its share (rounded, in the order of `shares`).

        None when a source has nothing usable yet. The batch is valid until the next call: its memory is used again.
        """
        layout = next(iter(self.buffers.values())).layout
        arrays = {
            name: self._array((name, id(window)), shape, dtype)
            for name, (shape, dtype) in batch_arrays(layout, count, window).items()
        }
        tasks: list[str] = []
        begin, total, given = 0, sum(shares.values()), 0.0
        for name, share in shares.items():
            given += share
            end = round(count * given / total)
            part = {key: array.numpy()[begin:end] for key, array in arrays.items()}
            names = self._fill(name, end - begin, window, part)
            if names is None:
                return None
            tasks += names
            begin = end
        seed = torch.from_numpy(self.generator.integers(2**62, size=count))
        return _batch(arrays, self.spec, window, seed, tuple(tasks))

    def beginnings(
        self, episodes: Collection[EpisodeInfo], window: Window, discount: float
    ) -> tuple[Batch, torch.Tensor] | None:
        """(windows at the first steps of these episodes of one source, their discounted returns [B] as they came).

        Episodes that have left the store are left out; None when nothing is left.
        """
        there = [episode for episode in episodes if episode.first >= self.buffers[episode.source].tail]
        if not there:
            return None
        buffer, numbers = self.buffers[there[0].source], np.array([episode.first for episode in there])
        arrays = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in batch_arrays(buffer.layout, len(there), window).items()
        }
        returns = torch.from_numpy(buffer.returns(numbers, discount)).float()
        drawn = buffer.windows(numbers, window)
        if not buffer.gather(drawn, window, {name: array.numpy() for name, array in arrays.items()}):
            return None
        seed = torch.zeros(len(there), dtype=torch.int64)
        return _batch(arrays, self.spec, window, seed, tuple(episode.task for episode in there)), returns

    def _fill(self, name: str, count: int, window: Window, into: Mapping[str, Array]) -> list[str] | None:
        """Draw `count` windows of one source or view into arrays; a view's parts get what they hold of it."""
        parts = list(self.views[name].of)
        candidates = [self._among(name, part) for part in parts]
        sizes = [self._held(part, among) for part, among in zip(parts, candidates, strict=True)]
        if count and not sum(sizes):
            return None
        counts = self.generator.multinomial(count, np.array(sizes) / sum(sizes)) if len(parts) > 1 else [count]
        begin, tasks = 0, []
        for part, among, share in zip(parts, candidates, counts, strict=True):
            if not share:
                continue
            target = {key: array[begin : begin + share] for key, array in into.items()}
            drawn = self._draw(self.buffers[part], int(share), window, among, target)
            if drawn is None:
                return None
            target["step_id"] += STRIDE * list(self.buffers).index(part)
            tasks += self._tasks(self.buffers[part], drawn)
            begin += share
        return tasks

    def _draw(
        self, buffer: ReplayBuffer, count: int, window: Window, among: Numbers | None, into: Mapping[str, Array]
    ) -> Drawn | None:
        while True:
            drawn = buffer.draw(count, window, self.generator, among)
            if drawn is None or buffer.gather(drawn, window, into):
                return drawn
            buffer.refresh()  # the writer went past what was drawn

    def _among(self, name: str, part: str) -> Numbers | None:
        """The steps of `part` that are in the view; None when all of them are."""
        view = self.views[name]
        if view == View(view.of) and part not in self._discarded:
            return None
        if (name, part) not in self._candidates:
            held = [e.number for e in self.episodes.values() if e.source == part and view.holds(e)]
            self._candidates[name, part] = self.buffers[part].candidates(held, view.rows)
        return self._candidates[name, part]

    def _held(self, part: str, among: Numbers | None) -> int:
        return len(among) if among is not None else self.buffers[part].head - self.buffers[part].tail

    def _tasks(self, buffer: ReplayBuffer, drawn: Drawn) -> list[str]:
        return [self.episodes[number].task if number in self.episodes else "" for number in buffer.episode_of(drawn)]

    def _array(self, key: Any, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        memory = self._memory.get((key, shape))
        if memory is None:
            if self._pinned:
                memory = torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True)
            else:
                memory = torch.from_numpy(np.empty(shape, dtype))  # in large pages, which are filled faster
            self._memory[key, shape] = memory
        return memory

    def state_dict(self) -> dict[str, Any]:
        """The generator, and what was visible: {source: [tail, head]}."""
        seen = {name: [buffer.tail, buffer.head] for name, buffer in self.buffers.items()}
        return {"generator": self.generator.bit_generator.state, "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]


def _batch(
    arrays: Mapping[str, torch.Tensor], spec: Spec, window: Window, seed: torch.Tensor, task: tuple[str, ...]
) -> Batch:
    names = [name for name in window.offsets if name in spec.observation]
    columns = ("action", "reward", "valid", "terminated", "truncated", "intervened", "length", "step_id")
    following = {name: arrays[f"next.{name}"] for name in names} if "next_observation" in window.offsets else None
    return Batch(
        observation={name: arrays[name] for name in names},
        **{name: arrays[name] for name in columns},
        weight=torch.ones(len(seed)),
        seed=seed,
        next_observation=following,
        task=task,
        extras={name: arrays[name] for name in window.offsets if name in spec.extras},
    )


def blank(spec: Spec, window: Window, count: int) -> Batch:
    """A batch of zeros, shaped as those that Sources.sample gives."""
    arrays = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in batch_arrays(Layout(spec, 1), count, window).items()
    }
    return _batch(arrays, spec, window, torch.zeros(count, dtype=torch.int64), ("",) * count)


def statistics(sources: Sources, name: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """(mean, std) of each float observation over all steps of a source or view, for a frozen normaliser."""
    means, stds = {}, {}
    parts: Collection[str] = sources.views[name].of
    for key, feature in sources.spec.observation.items():
        if feature.dtype.startswith("float"):
            rows = np.concatenate([sources.buffers[part].observed(key, sources._among(name, part)) for part in parts])
            if not len(rows):
                raise ConfigError(f"the statistics of {key} are to come from {name}, which holds nothing yet")
            means[key], stds[key] = rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)
    return means, stds
