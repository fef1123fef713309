"""Samples batches from several replay buffers by their shares."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from serl_client.spec import Feature, Spec

from serl_launcher.replay.batches import BatchMemory, batch_of
from serl_launcher.replay.buffer import SCAN, ReplayBuffer
from serl_launcher.replay.choice import Choice, Numbers
from serl_launcher.replay.columns import EPISODE, RETURN
from serl_launcher.replay.derived import prefixed
from serl_launcher.replay.encoded import Encoder
from serl_launcher.replay.once import Seen, next_steps
from serl_launcher.replay.verdicts import VerdictRewards
from serl_launcher.replay.views import EpisodeInfo, Held, View
from serl_launcher.replay.windows import batch_arrays, is_single
from serl_launcher.store.aside import is_aside
from serl_launcher.store.layout import Layout
from serl_launcher.types import Batch, Window

STRIDE = 1 << 48  # step ids of different sources are this far apart
TRIES = 8  # reads of first steps, each overtaken by the server, before giving up


class ReplayMixture:
    """Reads all sources of a run for one trainer rank, and draws batches from them.

    folder: the run's `store` folder. capacities: {source: steps}. views: {name: View}; each source is a view, too.
    seed: of `generator` (numpy), which is part of the trainer's state.
    device: `cpu`, or a GPU, to which batches are copied from pinned memory while this process goes on.
    verdict: rewards of the operator's verdicts. derived: of an Algorithm. encoders: of ReplayBuffer.
    """

    def __init__(
        self, folder: Path, spec: Spec, capacities: Mapping[str, int], views: Mapping[str, View], *, seed: int,
        device: str = "cpu", verdict: VerdictRewards | None = None,
        derived: Mapping[str, Feature] = MappingProxyType({}), encoders: Mapping[str, Encoder] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.spec, self._derived = spec, prefixed(derived)
        self._made = {**self._derived, **{name: encoder.feature for name, encoder in encoders.items()}}
        made = self._derived, encoders
        self.buffers = {name: ReplayBuffer(folder / name, Layout(spec, n), *made) for name, n in capacities.items()}
        self.views = {**{name: View((name,)) for name in capacities}, **views}
        self._offsets = {name: STRIDE * place for place, name in enumerate(capacities)}
        self._plain = {name for name, view in self.views.items() if view == View(view.of)}  # of all episodes and steps
        self.held = {name: Held() for name in capacities}  # without those that left the store
        self.generator = np.random.default_rng(seed)
        self._device = device
        self._verdict = verdict or VerdictRewards()
        self._memory: dict[tuple[int, int], BatchMemory] = {}
        self._choices: dict[tuple[str, str, str], Choice] = {}  # by (view, source, Window.starts)
        self._sizes = {name: [0, 0] for name in self.views}  # [steps, closed episodes]
        self._decisions: dict[tuple[str, int], int] = {}  # {(source, episode): its decisions}, where a view asks for it
        self._known: set[str] = set()  # sources of which a window asks what is known of episodes
        self._discarded: set[str] = set()  # sources with a discarded episode: their plain view needs a Choice, too

    def update(
        self, rows: Sequence[Sequence[Any]], heads: Mapping[str, int] = MappingProxyType({})
    ) -> list[EpisodeInfo]:  # fmt: skip
        """Take in all new steps, then the server's rows of changed episodes (schema.EpisodeInfo).

        heads: {source: step} from which on the rows do not say yet which episodes are discarded: steps from there on
        come with later rows. Returns these episodes as their operators judged them.
        """
        for name, buffer in self.buffers.items():
            self._refresh(name, buffer, heads.get(name))
        changed = [self._verdict.applied(EpisodeInfo(*row)) for row in rows]
        for episode in changed:
            if (buffer := self.buffers.get(episode.source)) is None:
                continue
            if episode.first >= buffer.tail:
                self._take(episode, self.held[episode.source].put(episode))
            if episode.discard:
                self._discarded.add(episode.source)
            if episode.closed and not episode.final:
                buffer.cut([episode.number])
        return changed

    def _refresh(self, name: str, buffer: ReplayBuffer, head: int | None) -> None:
        buffer.refresh(head)
        for episode in self.held[name].evict(buffer.tail):
            self._count(episode, -1)
            self._decisions.pop((name, episode.number), None)

    def _take(self, now: EpisodeInfo, before: EpisodeInfo | None) -> None:
        """Count a changed episode. Choose its steps again in each view that it has entered or left.

        Give its last step the reward of a verdict that is new, or what is stored once that is taken back.
        """
        last, last_before = (None if info is None else self._verdict.last_of(info) for info in (now, before))
        if last != last_before:
            self.buffers[now.source].judge(now.number, now.first, now.steps, last)
        if before is not None:
            self._count(before, -1)
        self._count(now, 1)
        self._know(now)
        for (name, part, starts), choice in self._choices.items():
            view, buffer = self.views[name], self.buffers[now.source]
            if part == now.source and (holds := view.holds(now)) != (before is not None and view.holds(before)):
                numbers = buffer.steps_of(now.number, now.first, now.steps, choice.head)
                choice.put(numbers, buffer.may_start(numbers, view.start_steps, starts) & holds)

    def _know(self, episode: EpisodeInfo) -> None:
        if episode.source in self._known and episode.closed:
            buffer = self.buffers[episode.source]
            buffer.know(episode.number, episode.first, episode.steps, episode.success)

    def _know_all(self, discount: float) -> None:
        """Keep what is known of episodes from now on, with returns of this discount."""
        for name, buffer in self.buffers.items():
            if buffer.episode_columns.wants(discount):
                self._known.add(name)
                for episode in self.held[name].values():
                    self._know(episode)

    def _count(self, episode: EpisodeInfo, sign: int) -> None:
        key = episode.source, episode.number
        if sign > 0 and any(view.start_steps == "decisions" for view in self.views.values()):
            buffer = self.buffers[episode.source]
            numbers = buffer.steps_of(episode.number, episode.first, episode.steps, buffer.head)
            self._decisions[key] = int(buffer.may_start(numbers, "decisions", "any").sum())
        for name, view in self.views.items():
            if view.holds(episode):
                self._sizes[name][0] += sign * view.count(episode, self._decisions.get(key, 0))
                self._sizes[name][1] += sign * bool(episode.closed)

    def size(self, name: str) -> tuple[int, int]:
        """Return (steps, closed episodes) that a source or view holds now, without evicted ones."""
        steps, episodes = self._sizes[name]
        return steps, episodes

    def may_fill(self, name: str) -> bool:
        """Return whether a word of a person may still give a view steps: one of its episodes is aside or not judged."""
        held = (episode for part in self.views[name].of for episode in self.held[part].values())
        return any(is_aside(episode) or (episode.success is None and not episode.discard) for episode in held)

    def sample(self, count: int, window: Window, shares: Mapping[str, float]) -> Batch | None:
        """Draw a batch of `count` windows. None if a source or view has nothing usable yet.

        shares: {source or view: its part}, rounded to whole windows in this order.
        The batch is valid until the next call, which on a CPU uses its memory again.
        """
        memory = self._memory_of(window, count)
        tasks: list[str] = []
        begin, total, given = 0, sum(shares.values()), 0.0
        for name, share in shares.items():
            given += share
            end = round(count * given / total)
            names = self._fill(name, window, memory.share(begin, end))
            if names is None:
                return None
            tasks += names
            begin = end
        return self._filled(memory, tasks)

    def _filled(self, memory: BatchMemory, tasks: Sequence[str]) -> Batch:
        """Return the batch of this memory, whose arrays are filled, with new seeds."""
        np.right_shift(self.generator.bit_generator.random_raw(len(memory)), 2, out=memory.seeds)
        if memory.batch.task != (task := tuple(tasks)):
            memory.batch = replace(memory.batch, task=task)
        if self._device == "cpu":
            return memory.batch
        copy = memory.batch.to(self._device, non_blocking=True)
        memory.copied = torch.cuda.current_stream(self._device).record_event()
        return copy

    def unseen(
        self, count: int, window: Window, names: Collection[str], seen: Mapping[str, Seen]
    ) -> tuple[Batch | None, dict[str, Seen]]:
        """Return a batch of the next steps of these sources and views, and what is seen then. None: nothing is new.

        seen: what earlier calls returned; empty: nothing. See `next_steps` for the order. If there are fewer than
        `count` steps, the last one is repeated, with weight 0. The batch is valid as long as that of `sample`.
        """
        memory, filled, tasks, seen = self._memory_of(window, count), 0, list[str](), dict(seen)
        for name, part in ((each, part) for each in names for part in self.views[each].of):
            key = f"{name}/{part}"
            numbers, seen[key] = self._fill_next(name, part, window, seen.get(key, (0, 0)), memory, filled)
            filled += len(numbers)
            tasks += self._tasks(part, numbers)
        if not filled:
            return None, seen
        for array in memory.arrays.values():
            array[filled:] = array[filled - 1]
        batch = self._filled(memory, [*tasks, *tasks[-1:] * (count - filled)])
        return replace(batch, weight=(torch.arange(count) < filled).to(batch.weight)), seen

    def _fill_next(
        self, name: str, part: str, window: Window, seen: Seen, memory: BatchMemory, begin: int
    ) -> tuple[Numbers, Seen]:
        """Copy the next windows of one source into memory from row `begin` on. Returns where they start."""
        buffer = self.buffers[part]
        while True:
            numbers, after = next_steps(buffer, self.held[part], self.views[name], window, seen, len(memory) - begin)
            into = memory.part(begin, begin + len(numbers)).arrays
            if buffer.gather(buffer.windows(numbers, window), window, into):
                into["step_id"][into["step_id"] >= 0] += self._offsets[part]
                return numbers, after
            self._refresh(part, buffer, buffer.head)  # the server overwrote some of them

    def derive(self, step_id: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """Keep what an update has computed of steps: step_id [B], columns {name of Algorithm.derived: [B, ...]}.

        Or [B, H] and [B, H, ...] of windows that join episodes, where -1 is no step.
        Steps that were evicted meanwhile are left out, and values that are not finite: of such a step the column stays
        unknown. Raises ValueError for a column that the algorithm does not have.
        """
        steps = step_id.cpu().numpy()
        numbers, places = steps.reshape(-1) % STRIDE, steps.reshape(-1) // STRIDE  # -1 is of no source
        for name, column in prefixed(columns).items():
            feature, values = self._derived.get(name), column.detach().cpu().numpy()
            if feature is None or values.shape != (*steps.shape, *feature.shape):
                raise ValueError(f"an update gave {name} {list(values.shape)}: not in Algorithm.derived")
            values = values.reshape(-1, *feature.shape)
            is_finite = np.isfinite(values).reshape(len(values), -1).all(1)
            for part, buffer in self.buffers.items():
                mine = (places == self._offsets[part] // STRIDE) & (numbers >= buffer.tail) & is_finite
                buffer.derived.put(name, numbers[mine], values[mine])

    def beginnings(
        self, episodes: Collection[EpisodeInfo], window: Window, discount: float
    ) -> tuple[Batch, torch.Tensor] | None:
        """Return the windows at the first steps of these episodes, and their discounted returns [B].

        episodes: of one source; open and discarded ones, and those that have left the store, are left out. None if
        nothing is left.
        """
        self._know_all(discount)
        for _ in range(TRIES):
            there = [each for each in episodes if each.closed and not each.discard]
            there = [each for each in there if each.first >= self.buffers[each.source].tail]
            if not there:
                return None
            if found := self._beginnings(there, window, discount):
                return found
            buffer = self.buffers[there[0].source]
            self._refresh(there[0].source, buffer, buffer.head)  # the server overwrote some of them
        return None

    def _beginnings(
        self, episodes: Sequence[EpisodeInfo], window: Window, discount: float
    ) -> tuple[Batch, torch.Tensor] | None:
        buffer, numbers = self.buffers[episodes[0].source], np.array([episode.first for episode in episodes])
        arrays = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in batch_arrays(buffer.layout, len(episodes), window, self._made).items()
        }
        whole = buffer.gather(buffer.windows(numbers, window), window, {n: a.numpy() for n, a in arrays.items()})
        if not whole or not buffer.episode_columns.is_known((RETURN,), numbers).all():
            return None
        returns = buffer.episode_columns.values(RETURN, numbers, discount)
        seed = torch.zeros(len(episodes), dtype=torch.int64)
        tasks = tuple(episode.task for episode in episodes)
        return batch_of(arrays, self.spec, window, seed, torch.ones(len(seed)), tasks), torch.from_numpy(returns)

    def _fill(self, name: str, window: Window, into: BatchMemory) -> list[str] | None:
        """Draw windows of one source or view into memory. Returns their tasks, or None if nothing is usable.

        The sources of a view give windows in proportion to the steps that each has in it.
        """
        parts, count = list(self.views[name].of), len(into)
        if not count:
            return []
        sizes = [self._startable(name, part, window.starts) for part in parts]
        if not sum(sizes):
            return None
        counts = self.generator.multinomial(count, np.array(sizes) / sum(sizes)) if len(parts) > 1 else [count]
        begin, tasks = 0, []
        for part, share in zip(parts, map(int, counts), strict=True):
            if not share:
                continue
            target = into.part(begin, begin + share)
            numbers = self._draw(name, part, window, target)
            if numbers is None:
                return None
            if self._offsets[part]:
                ids = target.arrays["step_id"]
                ids[ids >= 0] += self._offsets[part]
            tasks += self._tasks(part, numbers)
            begin += share
        return tasks

    def _startable(self, name: str, part: str, starts: str) -> int:
        choice = self._choice(name, part, starts)
        return self.buffers[part].head - self.buffers[part].tail if choice is None else len(choice)

    def _draw(self, name: str, part: str, window: Window, into: BatchMemory) -> Numbers | None:
        """Draw windows of one source into memory. Returns the steps at which they start, or None."""
        buffer = self.buffers[part]
        while True:
            among = self._choice(name, part, window.starts)
            if into.is_single:
                steps = buffer.draw_steps(len(into), window, self.generator, among)
                if steps is None or buffer.gather_steps(steps, window, into.arrays):
                    return steps
            else:
                drawn = buffer.draw(len(into), window, self.generator, among)
                if drawn is None or buffer.gather(drawn, window, into.arrays):
                    return None if drawn is None else drawn.steps[:, 0]
            self._refresh(part, buffer, buffer.head)  # the server overwrote what was drawn

    def _choice(self, name: str, part: str, starts: str = "any") -> Choice | None:
        """Return the steps of source `part` at which windows of the view may start. None: all of them."""
        view, buffer = self.views[name], self.buffers[part]
        if starts == "any" and name in self._plain and part not in self._discarded:
            return None
        key = name, part, starts
        if key not in self._choices:
            self._choices[key] = Choice(buffer.layout.capacity)
        choice = self._choices[key]
        choice.evict(buffer.tail)
        while choice.head < buffer.head:
            numbers = np.arange(choice.head, min(choice.head + SCAN, buffer.head))
            episodes, where = np.unique(buffer.episodes(numbers), return_inverse=True)
            known = (self.held[part].get(number) for number in episodes.tolist())
            holds = np.array([info is not None and view.holds(info) for info in known], bool)
            choice.put(numbers, holds[where] & buffer.may_start(numbers, view.start_steps, starts))
            choice.head += len(numbers)
        return choice

    def _tasks(self, part: str, numbers: Numbers) -> list[str]:
        held = self.held[part]
        if len(held.tasks) == 1:
            return list(held.tasks) * len(numbers)
        found = [held.get(number) for number in self.buffers[part].episodes(numbers).tolist()]
        return ["" if episode is None else episode.task for episode in found]

    def episode_of(self, step_id: int) -> tuple[EpisodeInfo, int] | None:
        """Return the episode of a drawn step and the step's index in it; None if it has left the store."""
        part, number = list(self._offsets)[step_id // STRIDE], step_id % STRIDE
        step = np.array([number])
        episode = self.held[part].get(int(self.buffers[part].episodes(step)[0]))
        if episode is None or number < self.buffers[part].tail:
            return None
        return episode, int(self.buffers[part].indices(step)[0])

    def in_view(self, name: str, part: str) -> Numbers | None:
        """Return the steps of source `part` that are in the view. None: all of them."""
        choice = self._choice(name, part)
        return None if choice is None else choice.nth(np.arange(len(choice)))

    def _memory_of(self, window: Window, count: int) -> BatchMemory:
        """Return the memory of batches like this, once the last one has left it."""
        memory = self._memory.get((id(window), count))
        if memory is None:
            if not EPISODE.keys().isdisjoint(window.offsets):
                self._know_all(window.discount)
            layout = next(iter(self.buffers.values())).layout
            arrays = batch_arrays(layout, count, window, self._made)
            tensors = {name: self._tensor(shape, dtype) for name, (shape, dtype) in arrays.items()}
            seed, weight = self._tensor((count,), "int64"), self._tensor((count,), "float32").fill_(1)
            batch = batch_of(tensors, self.spec, window, seed, weight, ())
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            memory = BatchMemory(window, batch, seed.numpy().view(np.uint64), arrays, is_single(window, self.spec))
            self._memory[id(window), count] = memory
        if memory.copied is not None:
            memory.copied.synchronize()
        return memory

    def _tensor(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        if self._device == "cpu":
            return torch.from_numpy(np.empty(shape, dtype))  # in large pages, which are filled faster
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, {source: [tail, head]} as this reader saw them, and the derived columns."""
        seen = {name: [buffer.tail, buffer.head] for name, buffer in self.buffers.items()}
        derived = {name: buffer.derived.state_dict() for name, buffer in self.buffers.items()}
        return {"generator": self.generator.bit_generator.state, "seen": seen, "derived": derived}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]
        for name, derived in state.get("derived", {}).items():
            if name in self.buffers:
                self.buffers[name].derived.load_state_dict(derived)
