"""Draws windows of steps from one replay buffer (source), by mapping the files that the server writes.

The server publishes (tail, head): steps tail <= number < head may be drawn. After copying, the reader looks at tail
again. The caller redraws what fell below it, so no overwritten row is ever used. The steps of several actors lie
between each other, so the reader links the steps of each episode itself.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from serl_client.spec import Array, Feature

from serl_launcher.replay.choice import Choice, Numbers
from serl_launcher.replay.columns import EPISODE, INDEX, EpisodeColumns
from serl_launcher.replay.derived import DerivedColumns
from serl_launcher.replay.encoded import EncodedImages, Encoder
from serl_launcher.replay.joined import NONE, Drawn, Links, joined
from serl_launcher.replay.windows import further, past, reach, sees_after, wants_next
from serl_launcher.store.layout import CHUNK_START, GAP, INTERVENED, TERMINATED, TRUNCATED, Layout, published
from serl_launcher.types import IdleFilter, Window

SCAN = 65536  # steps taken in at once
SPARE = 16  # one more step is drawn for so many, as some are of no use
TRIES = 64  # draws without a usable step, one after another, before `draw` says that there is none
MANY = 2048  # steps of each draw, once half of these have found nothing: usable ones may be rare


class ReplayBuffer:
    """Holds the links between the steps of one source, and draws windows from them.

        buffer = ReplayBuffer(Path("runs/arm/store/online"), Layout(spec, capacity=100_000))
        buffer.refresh()
        window = Window({"observation.state": (0,), "action": (0, 1, 2)})
        drawn = buffer.draw(256, window, np.random.default_rng(0), None)  # None: nothing to draw yet
        rows = buffer.stored(drawn.steps[:, 0], ["observation.state"])  # {column: [256, ...]}

    `refresh` takes in new steps; between two calls nothing changes.
    folder: of the source, in the store. derived: features of DerivedColumns. encoders: {image: what windows see of it}.
    """

    def __init__(
        self, folder: Path, layout: Layout, derived: Mapping[str, Feature] = MappingProxyType({}),
        encoders: Mapping[str, Encoder] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.layout = layout
        self.tail = self.head = 0
        self._published = np.asarray(published(folder))
        self._steps = np.asarray(layout.steps(folder))
        self._bytes = self._steps.view(f"V{self._steps.itemsize}")  # [capacity], a record each
        self._observations = {name: np.asarray(array) for name, array in layout.observations(folder).items()}
        self._encoded = {name: EncodedImages(self._observations[name], each) for name, each in encoders.items()}
        self._seen = {**self._observations, **self._encoded}
        size = layout.capacity  # of the arrays below; a step's slot in them is its number % size
        self._next, self._previous, self._row, self._final, self._first, self._episode, self._after = (
            np.full(size, NONE, np.int64) for _ in range(7)
        )  # _after: the row of the observation after a step, NONE where _is_followed is False
        self._ends, self._chunk_start, self._intervened, self._terminated, self._truncated, self._is_followed = (
            np.zeros(size, bool) for _ in range(6)
        )
        self._reward = np.zeros(size, np.float32)
        self._action = np.zeros((size, *layout.spec.action.shape), layout.spec.action.dtype)
        stored = "action", "reward", "terminated", "truncated", "intervened"
        self._columns = {name: getattr(self, f"_{name}") for name in stored}
        self._links = Links(self._row, self._final, self._first, self._next, self._ends)
        self._beginnings = np.empty(0, np.int64)  # first steps of episodes
        self._last: dict[int, int] = {}  # episode -> its newest step, while it has not ended
        self.episode_columns, self.derived = EpisodeColumns(size), DerivedColumns(size, derived)

    # -- what is there
    def refresh(self, head: int | None = None) -> None:
        """Take in the new tail, and each step below `head` (None: any) that became durable since the last call."""
        self.tail, there = (int(word) for word in self._published)
        head = there if head is None else min(there, head)
        begin = max(self.head, self.tail)
        while begin < head:
            end = min(begin + SCAN, head)
            self._take_in(np.arange(begin, end))
            begin = end
        self.head = max(head, self.tail)

    def _take_in(self, numbers: Numbers) -> None:
        slots = numbers % self.layout.capacity
        records = self._records(slots)
        whole = (records["number"] == numbers) & (numbers >= int(self._published[0]))  # else overwritten meanwhile
        self._next[slots] = self._previous[slots] = self._after[slots] = NONE
        self._is_followed[slots] = self._ends[slots] = False
        final = records["final_row"]
        self._row[slots] = records["row"] % self.layout.rows
        self._final[slots] = np.where(final == NONE, NONE, final % self.layout.rows)
        for encoded in self._encoded.values():
            encoded.forget(np.append(self._row[slots], self._final[slots][final != NONE]))
        self._first[slots] = np.where(whole, records["first"].astype(np.int64), NONE)
        self._episode[slots] = records["episode"]
        self._action[slots], self._reward[slots], flags = records["action"], records["reward"], records["flags"]
        self._chunk_start[slots], self._intervened[slots] = flags & CHUNK_START > 0, flags & INTERVENED > 0
        self._terminated[slots], self._truncated[slots] = flags & TERMINATED > 0, flags & TRUNCATED > 0
        self._end(slots[flags & (TERMINATED | TRUNCATED) > 0])
        self._link(numbers[whole], records[whole])
        begins = numbers[whole & (records["index"] == 0)]
        self._beginnings = np.concatenate([self._beginnings[self._beginnings >= self.tail], begins])

    def _link(self, numbers: Numbers, records: Array) -> None:
        """Link each step to the one before it in its episode, unless a gap lies between them. Neighbours are linked as
        arrays; a run of them is linked to its episode's newest step so far."""
        if not len(numbers):
            return
        size, episodes, indices = self.layout.capacity, records["episode"], records["index"]
        gaps = records["flags"] & GAP > 0
        follows = (episodes[1:] == episodes[:-1]) & (indices[1:] == indices[:-1] + 1) & (np.diff(numbers) == 1)
        follows &= ~gaps[1:]
        self._join(numbers[:-1][follows], numbers[1:][follows])
        begins = np.flatnonzero(np.r_[True, ~follows])
        finishes = np.r_[begins[1:] - 1, len(numbers) - 1]
        for begin, finish in zip(begins, finishes, strict=True):
            episode = int(episodes[begin])
            before = self._last.get(episode)
            if before is not None and indices[begin] > 0 and before >= self.tail:
                if gaps[begin]:
                    self._end(before % size)
                else:
                    self._join(np.array([before]), numbers[begin : begin + 1])
            self._last[episode] = int(numbers[finish])
            if self._ends[numbers[finish] % size]:
                del self._last[episode]

    def _slots(self, numbers: Numbers) -> Numbers:
        return numbers if self.head <= self.layout.capacity else numbers % self.layout.capacity

    def _records(self, slots: Numbers) -> Array:
        """Copy the records of these slots as bytes: by fields, as numpy would, takes 30 times as long."""
        return self._bytes.take(slots, mode="clip").view(self._steps.dtype)

    def _join(self, before: Numbers, after: Numbers) -> None:
        before_slots, after_slots = before % self.layout.capacity, after % self.layout.capacity
        self._next[before_slots], self._previous[after_slots] = after, before
        self._after[before_slots], self._is_followed[before_slots] = self._row[after_slots], True

    def _end(self, slots: Any) -> None:
        """Mark the steps in these slots as their episodes' ends."""
        self._ends[slots], self._after[slots] = True, self._final[slots]
        self._is_followed[slots] = self._final[slots] != NONE

    def cut(self, episodes: Collection[int]) -> None:
        """Mark the last step of these episodes as their end: they closed without a final observation."""
        for episode in episodes:
            if (last := self._last.pop(episode, None)) is not None and last >= self.tail:
                self._end(last % self.layout.capacity)

    def know(self, episode: int, first: int, count: int, success: bool | None) -> None:
        """Let windows see what is known of a closed episode. first: its first step. count: how many steps it has."""
        numbers = self.steps_of(episode, first, count, self.head)
        if len(numbers) == count:  # else it has left the store
            self.episode_columns.put(numbers, self._reward[numbers % self.layout.capacity], success)

    def judge(self, episode: int, first: int, count: int, reward: float | None) -> None:
        """Make the last step of a closed episode terminal, with this reward. None: make it what is stored.

        first: its first step. count: how many steps it has. Where no final observation is stored, the last step is
        followed by its own one, because no value is asked of what comes after a terminal step.
        """
        numbers = self.steps_of(episode, first, count, self.head)
        slots = numbers[-1:] % self.layout.capacity
        records = self._records(slots)
        if len(numbers) < count or first < int(self._published[0]):
            return  # it has left the store
        is_judged, flags, final = reward is not None, records["flags"], records["final_row"]
        self._reward[slots] = reward if is_judged else records["reward"]
        self._terminated[slots] = (flags & TERMINATED > 0) | is_judged
        self._truncated[slots] = (flags & TRUNCATED > 0) & (not is_judged)
        own = self._row[slots] if is_judged else NONE
        self._final[slots] = np.where(final == NONE, own, final % self.layout.rows)
        self._end(slots)

    def may_start(self, numbers: Numbers, rows: str, starts: str) -> NDArray[np.bool_]:
        """Return [n] bool: whether windows may start at these steps. `rows` as in View, `starts` as in Window."""
        slots = numbers % self.layout.capacity
        human, begins = self._intervened[slots], self._chunk_start[slots]
        every, first = np.ones(len(numbers), bool), self._first[slots] == numbers
        sets = {"all": every, "intervened": human, "autonomous": ~human, "decisions": human | begins}
        return sets[rows] & {"any": every, "chunk_start": begins, "episode_start": first}[starts]

    def episodes(self, numbers: Numbers) -> Numbers:
        """Return the episode number of each of these steps, [n]."""
        return self._episode[numbers % self.layout.capacity]

    def indices(self, numbers: Numbers) -> Numbers:
        """Return the index in its episode of each of these steps."""
        return self._records(numbers % self.layout.capacity)["index"]

    def steps_of(self, episode: int, first: int, count: int, end: int) -> Numbers:
        """Return the steps of an episode, [n <= count]; empty if its beginning was evicted.

        first: its first step. count: how many steps it has. end: look at steps below this number only.
        """
        found, begin = [np.empty(0, np.int64)], first
        while begin < end and count > 0 and first >= self.tail:
            numbers = np.arange(begin, min(begin + max(count, 1024), end))
            numbers, begin = numbers[self.episodes(numbers) == episode], begin + len(numbers)
            found, count = [*found, numbers], count - len(numbers)
        return np.concatenate(found)

    def observed(self, name: str, among: Numbers | None) -> Array:
        """Copy one column of many steps, [n, *shape]. Steps that were evicted meanwhile are left out.

        name: an observation, of which final ones are left out, or `action`. among: steps to copy; None: all.
        """
        numbers = np.arange(self.tail, self.head) if among is None else among
        numbers = numbers[self._first[numbers % self.layout.capacity] >= self.tail]
        slots = numbers % self.layout.capacity
        found = self._action[slots] if name == "action" else self._observations[name][self._row[slots]]
        tail = int(self._published[0])
        return found if tail <= self.tail else found[self._first[slots] >= tail]

    def stored(self, numbers: Numbers, seen: Collection[str]) -> dict[str, Array]:
        """Copy what is stored of these steps, {column: [n, ...]}, and these observations, final ones included."""
        slots = numbers % self.layout.capacity
        records, rows = self._records(slots), np.append(self._row[slots], self._final[slots])
        columns = {name.removeprefix("extras."): records[name] for name in records.dtype.names or ()}
        return columns | {name: self._observations[name][rows[rows != NONE]] for name in seen}

    def windows(self, numbers: Numbers, window: Window) -> Drawn:
        """Return the windows that begin at these steps."""
        return self._resolve(*self._chain(numbers, reach(window)), window)

    # -- drawing
    def draw(self, count: int, window: Window, generator: np.random.Generator, among: Choice | None) -> Drawn | None:
        """Draw `count` windows whose first step is uniform over the usable ones. None if there are none.

        A step is usable if all that the window asks of it is durable: its rows, or its episode's end.
        among: the steps to draw from; None: all.
        """
        size = self.head - self.tail if among is None else len(among)
        if size <= 0:
            return None
        chains, lasts, missing, tries = [], [], count, TRIES
        while tries:
            more = missing + missing // SPARE + 1 if tries > TRIES // 2 else max(missing, MANY)
            picks = generator.integers(size, size=more)
            chain, last = self._usable(self.tail + picks if among is None else among.nth(picks), window)
            chains, lasts = [*chains, chain[:missing]], [*lasts, last[:missing]]
            missing -= len(lasts[-1])
            tries = TRIES if len(lasts[-1]) else tries - 1
            if not missing:
                chain = np.concatenate(chains)
                if window.joins:
                    there = self._beginnings[self._beginnings >= self.tail]
                    there = there if among is None else there[among.holds(there)]
                    return joined(chain[:, 0], window.horizon, self._links, there, generator)
                return self._resolve(chain, np.concatenate(lasts), window)
        return None

    def _usable(self, numbers: Numbers, window: Window) -> tuple[Numbers, Numbers]:
        """Return `_chain` of those of these steps at which a window may start."""
        slots = numbers % self.layout.capacity
        usable = (self._first[slots] >= self.tail) & (numbers >= self.tail)
        if window.joins:
            return numbers[usable, None], numbers[usable]
        chain, last = self._chain(numbers, reach(window))
        ends = self._ends[last % self.layout.capacity]
        if sees_after(window):
            ends = ends & (self._final[last % self.layout.capacity] != NONE)
        usable &= (chain[:, -1] != NONE) | ends
        if window.idle_filter is not None:
            usable &= self._moves(chain, last, window.idle_filter)
        if names := further(window, self.layout.spec):
            usable &= self.episode_columns.is_known(names, numbers)
            for name in self.derived.features.keys() & names:
                steps = chain[:, : len(window.offsets[name])]
                usable &= (self.derived.is_known(name, steps) | (steps == NONE)).all(1)
        return chain[usable], last[usable]

    def usable(self, numbers: Numbers, window: Window) -> Numbers:
        """Return those of these steps at which a window may start, in their order."""
        return self._usable(numbers, window)[0][:, 0]

    def _further(self, name: str, numbers: Numbers, window: Window) -> Array:
        """Return a column of these steps [...] that no stored row has."""
        if name == INDEX:
            return self.indices(numbers)
        if name in self.derived.features:
            return self.derived.values(name, numbers)
        return self.episode_columns.values(name, numbers, window.discount)

    def _moves(self, chain: Numbers, last: Numbers, idle_filter: IdleFilter) -> NDArray[np.bool_]:
        """Return [B] bool: whether an entry of the filter's column varies by more than the threshold in the chain."""
        slots = np.where(chain == NONE, last[:, None], chain) % self.layout.capacity
        column, is_action = idle_filter.column, idle_filter.column == "action"
        values = self._action[slots] if is_action else self._observations[column][self._row[slots]]
        values = values.reshape(*slots.shape, -1)
        if idle_filter.entries is not None:
            values = values[..., list(idle_filter.entries)]
        moves = (values.std(1) > idle_filter.threshold).any(-1)
        return moves | (chain[:, 0] == last)  # one step alone cannot show whether the robot moves

    def _chain(self, numbers: Numbers, reach: int) -> tuple[Numbers, Numbers]:
        """Return the steps from each on [B, reach + 1], NONE behind its episode's newest, and the last there [B]."""
        size = self.layout.capacity
        chain = np.empty((len(numbers), reach + 1), np.int64)
        chain[:, 0] = last = numbers
        for k in range(1, reach + 1):
            before = chain[:, k - 1]
            chain[:, k] = np.where(before == NONE, NONE, self._next[before % size])
            last = np.where(chain[:, k] == NONE, last, chain[:, k])
        return chain, last

    def _resolve(self, chain: Numbers, last: Numbers, window: Window) -> Drawn:
        """Return the windows of these chains: which rows they see, before, in and after their steps."""
        size, horizon, numbers = self.layout.capacity, window.horizon, chain[:, 0]
        there = chain != NONE
        last_slot = last % size
        after = np.where(self._final[last_slot] == NONE, self._row[last_slot], self._final[last_slot])
        rows = np.where(there, self._row[chain % size], after[:, None])
        earlier = []
        for _ in range(past(window)):
            before = self._previous[numbers % size]
            numbers = np.where(before == NONE, numbers, before)
            earlier.insert(0, self._row[numbers % size][:, None])
        steps, valid = np.where(there, chain, last[:, None])[:, :horizon], there[:, :horizon]
        return Drawn(steps, valid, valid.sum(1), np.concatenate([*earlier, rows], axis=1), len(earlier))

    # -- windows of one step, drawn and copied without the chains and masks that longer ones need
    def draw_steps(
        self, count: int, window: Window, generator: np.random.Generator, among: Choice | None
    ) -> Numbers | None:  # fmt: skip
        """Draw as `draw` does, for a window that is_single. Returns the steps [B], or None."""
        size = self.head - self.tail if among is None else len(among)
        if size <= 0:
            return None
        found: list[Numbers] = []
        for _ in range(TRIES):
            picks = (generator.random(count + count // SPARE + 1) * size).astype(np.int64)  # faster than integers()
            numbers = self.tail + picks if among is None else among.nth(picks)
            slots = self._slots(numbers)
            usable = self._is_followed.take(slots) if wants_next(window) else np.ones(len(slots), bool)
            if self.tail:  # else nothing was evicted
                usable &= self._first.take(slots) >= self.tail
            found.append((numbers if np.count_nonzero(usable) == len(usable) else numbers[usable])[:count])
            count -= len(found[-1])
            if not count:
                return found[0] if len(found) == 1 else np.concatenate(found)
        return None

    def gather_steps(self, numbers: Numbers, window: Window, into: Mapping[str, Array]) -> bool:
        """Copy as `gather` does, for a window that is_single. Returns False if steps were overwritten meanwhile."""
        slots = self._slots(numbers)[:, None]
        for name, column in self._columns.items():
            column.take(slots, axis=0, out=into[name], mode="clip")
        into["step_id"][...], into["valid"][...], into["length"][...] = numbers, True, 1
        after = self._after.take(slots) if wants_next(window) else None
        rows = self._row.take(slots)
        for name in window.offsets:
            if name in self._observations:
                self._take(name, rows, into[name])
                if after is not None:
                    self._take(name, after, into[f"next.{name}"])
            elif name in self.layout.spec.extras:
                into[name][...] = self._records(slots)[f"extras.{name}"]
        return self._still_there(slots)

    def _still_there(self, slots: Numbers) -> bool:
        """Return whether none of these steps was overwritten while it was copied."""
        tail = int(self._published[0])
        return tail <= self.tail or bool((self._first[slots] >= tail).all())

    def gather(self, drawn: Drawn, window: Window, into: Mapping[str, Array]) -> bool:
        """Copy the windows into the arrays of `batch_arrays`, [B, ...] each.

        Returns False if the server overwrote some of them meanwhile: draw again.
        """
        slots, valid = self._slots(drawn.steps), drawn.valid  # [B, H] each
        columns = {name: column.take(slots, axis=0, mode="clip") for name, column in self._columns.items()}
        for name in [name for name in self.layout.spec.extras if name in window.offsets and name not in EPISODE]:
            columns[name] = self._records(slots)[f"extras.{name}"]
        for name in further(window, self.layout.spec):
            columns[name] = self._further(name, drawn.steps[:, : len(window.offsets[name])], window)
        for name, column in columns.items():
            steps = into[name].shape[1]  # 1, where a window asks for a column of its first step alone
            mask = valid[:, :steps].reshape(len(valid), steps, *(1,) * (column.ndim - 2))
            np.multiply(column[:, :steps], mask, out=into[name], casting="unsafe")
        into["valid"][...], into["length"][...] = valid, drawn.length
        into["step_id"][...] = np.where(valid, drawn.steps, NONE) if window.joins else drawn.steps[:, 0]
        for name in self.layout.spec.observation:
            if name in window.offsets:
                self._rows(drawn, window, name, into)
        own = drawn.steps if window.joins else drawn.steps[:, 0]
        return self._still_there(own % self.layout.capacity)

    def _rows(self, drawn: Drawn, window: Window, name: str, into: Mapping[str, Array]) -> None:
        offsets = drawn.first + np.array(window.offsets[name])
        self._take(name, drawn.rows[:, offsets], into[name])
        if "next_observation" in window.offsets:
            following = np.take_along_axis(drawn.rows, offsets[None] + drawn.length[:, None], axis=1)
            self._take(name, following, into[f"next.{name}"])

    def _take(self, name: str, rows: Numbers, out: Array) -> None:
        self._seen[name].take(rows, axis=0, out=out, mode="clip")
