"""Checks the quality of recorded episodes: frozen images, cut ends, saturated actions, late steps.

A finding is `wrong` if a policy would learn from it what never happened. A `note` is worth knowing, and may be normal.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from serl_client.spec import Array, Feature, Spec

from serl_launcher.datasets.episodes import EpisodeReader, Gone, open_run
from serl_launcher.datasets.names import ENDS, OUTCOME, SUCCESS, TIME, is_image
from serl_launcher.datasets.reader import Dataset, Episode
from serl_launcher.replay.views import EpisodeInfo

BLACK, WHITE = 8, 247  # pixel values: up to BLACK is dark, from WHITE on is overexposed
SATURATED = 0.5  # an image is saturated if a larger share of its values is WHITE
SAME = 2  # pixel values that a codec may change in an unchanged image
STILL = 1e-2  # a robot whose states change by less, while an image stays the same, stands still: no camera sees it
LATE = 2.0  # a longer time between two rows is a gap, in periods
SLACK = 0.1  # share by which the rate of the rows may differ from the Spec's
OLD = 3.0  # an older image shows another moment, in periods
AT_BOUND = 0.5  # report an action that is at its bound in a larger share of the rows
CUT_OFF = "was cut off before it was judged: normal where an actor was stopped"
AGE = re.compile(r"(^|[._])age[._]")
PART = re.compile(r"\.part\d+$")  # how the store names the later parts of an episode that it had to cut


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One episode to be looked at.

    numbers: {name: [T, ...]}. images: {camera: yields its T images}. ended: whether its last step is an end; None: no
    column says so. terminated: whether the task ended it. last: [T] bool, steps that are marked as an end.
    success: its outcome. judged: whether it should have one, because others do. part: whether it is a part of an
    episode, and may have one step.
    """

    id: str
    numbers: Mapping[str, Array]
    images: Mapping[str, Callable[[], Iterator[Array]]]
    ended: bool | None
    terminated: bool
    last: Array
    success: bool | None
    judged: bool
    notes: tuple[str, ...] = ()
    part: bool = False

    def __len__(self) -> int:
        return len(self.numbers["action"])


@dataclass
class Findings:
    """Collects what was found, {(is it wrong, what): [where, ...]}, and counts what was looked at."""

    found: dict[tuple[bool, str], list[str]] = field(default_factory=dict)
    episodes: int = 0
    steps: int = 0
    outcomes: Counter[bool | None] = field(default_factory=Counter)

    def add(self, wrong: bool, what: str, where: str) -> None:
        self.found.setdefault((wrong, what), []).append(where)

    @property
    def wrong(self) -> bool:
        return any(wrong for wrong, _ in self.found)


def inspect(folder: Path, frozen: int) -> Findings:
    """Look for faults in a LeRobot dataset, or in every source of a run's store. The learner may be running.

    frozen: rows that may show the same image while the robot moves. Raises ConfigError if there is neither.
    """
    findings = Findings()
    if (folder / "store/index.sqlite").exists():
        spec, readers, infos = open_run(folder)
        for name, reader in readers.items():
            held = [i for i in infos if i.source == name and i.first >= reader.tail and not i.discard]
            _look(findings, _stored(reader, spec, sorted(held)), spec.fps, spec.action, frozen, f"{name}: ")
    else:
        dataset = Dataset(folder)
        action = dataset.spec().action if dataset.manifest else None  # a dataset of others tells no bounds
        _look(findings, (_of_dataset(episode) for episode in dataset), dataset.fps, action, frozen, "")
    return findings


def _stored(reader: EpisodeReader, spec: Spec, infos: list[EpisodeInfo]) -> Iterator[Recorded]:
    judged = any(info.success is not None for info in infos)
    for info in infos:
        if not info.closed:
            continue
        try:
            rows = reader.rows(info)
        except Gone:
            continue
        numbers = {name: array[: info.steps] for name, array in rows.items()}
        images = {name: numbers.pop(name) for name, feature in spec.observation.items() if is_image(feature)}
        ends = numbers["terminated"] | numbers["truncated"]
        notes = () if info.final else ("without a final observation",)
        success = None if info.success is None else bool(info.success)
        is_part = bool(info.continued or PART.search(info.id))
        yield Recorded(
            info.id, numbers, {name: lambda array=array: iter(array) for name, array in images.items()},
            bool(ends[-1]), bool(info.terminated), ends, success, judged, notes, is_part,
        )  # fmt: skip


def _of_dataset(episode: Episode) -> Recorded:
    features, length = episode.dataset.features, len(episode)
    images = {name: lambda name=name: episode.images(name) for name in episode.dataset.cameras}
    numbers = {name: episode.column(name) for name in features if name not in images}
    numbers["time"] = numbers.get(TIME, numbers["timestamp"]).reshape(length)
    said = [name for name in ENDS if episode.has(name)]
    ends = np.any([episode.flag(name) for name in said if name != SUCCESS] or [[False] * length], axis=0)
    ended = bool(ends[-1] or episode.flag(SUCCESS)[-1]) if said else None
    notes = () if said else ("nothing says how it ended",)
    has_outcome = episode.has(SUCCESS) or episode.has(OUTCOME)
    where = f"episode {episode.entry['episode_index']}"
    return Recorded(where, numbers, images, ended, episode.terminated, ends, episode.success, has_outcome, notes)


def _look(
    findings: Findings, episodes: Iterator[Recorded], fps: float, action: Feature | None, frozen: int, prefix: str
) -> None:
    actions: list[Array] = []
    for episode in episodes:
        where, taken = prefix + episode.id, episode.numbers["action"].astype(np.float64)
        problems = [*_ends(episode), *_numbers(episode), *_times(episode, fps), *_bounds(taken, action)]
        try:
            problems += [entry for name in episode.images for entry in _images(episode, name, frozen)]
        except Gone:
            continue
        findings.episodes += 1
        findings.steps += len(episode)
        findings.outcomes[episode.success] += 1
        actions.append(taken)
        for wrong, what in problems:
            findings.add(wrong, what, where)
    if actions:
        for what in _dimensions(np.concatenate(actions), action):
            findings.add(False, what, prefix + "all episodes")


def _ends(episode: Recorded) -> Iterator[tuple[bool, str]]:
    if len(episode) == 1 and not episode.part:
        yield True, "has one step"
    if episode.ended is False:
        yield True, "has no end: neither terminated nor truncated"
    if episode.last[:-1].any():
        yield True, "goes on after its end"
    if episode.success is None:
        is_cut = episode.judged and not episode.terminated
        yield episode.judged and not is_cut, CUT_OFF if is_cut else "has no outcome"
    for note in episode.notes:
        yield False, note


def _numbers(episode: Recorded) -> Iterator[tuple[bool, str]]:
    for name, array in episode.numbers.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            yield True, f"{name} has values that are no numbers"


def mistimed(episode: Episode) -> list[str]:
    """Return what is wrong with the times of an episode's rows; nothing if only their rate on paper is known."""
    return [what for is_wrong, what in _times(_of_dataset(episode), episode.dataset.fps) if is_wrong]


def _times(episode: Recorded, fps: float) -> Iterator[tuple[bool, str]]:
    steps = np.diff(episode.numbers["time"]) * fps  # in periods
    if len(steps) and np.isfinite(steps).all():
        if (steps <= 0).any():
            yield True, "time does not go forward"
        elif np.median(steps) < 0.5:
            yield False, "a simulated clock: times were not looked at"
        else:
            if abs(np.median(steps) - 1) > SLACK:
                yield True, f"its rate is not {fps:g} rows per second"
            if (steps > LATE * np.median(steps)).any():
                yield True, f"has gaps of more than {LATE:g} periods between its rows"
    for name, age in episode.numbers.items():
        if AGE.search(name) and (age > OLD / fps).any():
            yield True, f"{name}: images older than {OLD:g} periods"


def _bounds(actions: Array, action: Feature | None) -> Iterator[tuple[bool, str]]:
    if action is not None and ((actions < action.low) | (actions > action.high)).any():
        yield True, "has actions outside the bounds"


def _dimensions(actions: Array, action: Feature | None) -> Iterator[str]:
    """Yield notes on each entry of the action over all episodes, [N, A]."""
    actions = actions.reshape(len(actions), -1)
    low, high = actions.min(0), actions.max(0)
    if action is not None and action.low is not None and action.high is not None:
        low, high = action.low, action.high
    for i, column in enumerate(actions.T):
        if np.ptp(column) == 0:
            yield f"action[{i}] is always {column[0]:g}"
        elif (share := np.mean((column <= low[i]) | (column >= high[i]))) > AT_BOUND:
            yield f"action[{i}] is at a bound in {100 * share:.0f} % of the rows"


def _images(episode: Recorded, name: str, frozen: int) -> Iterator[tuple[bool, str]]:
    states = [
        array.reshape(len(episode), -1) for key, array in episode.numbers.items()
        if key.startswith("observation.") and array.dtype.kind == "f"
    ]  # fmt: skip
    seen: Counter[str] = Counter()
    before, start, reported = None, 0, False
    for row, image in enumerate(episode.images[name]()):
        seen["black"] += bool(image.max() <= BLACK)
        seen["saturated"] += bool(np.mean(image >= WHITE) > SATURATED)
        if before is None or np.abs(image.astype(np.int16) - before).max() > SAME:
            start, reported = row, False
        elif row - start >= frozen and not reported:
            reported = not states or any(np.abs(state[row] - state[start]).max() > STILL for state in states)
            seen["frozen"] += reported
        before = image
    yield from ((True, f"{name}: {what} images") for what in ("black", "saturated") if seen[what])
    if seen["frozen"] and any(AGE.search(key) and key.endswith("." + name.split(".")[-1]) for key in episode.numbers):
        yield False, f"{name}: new images that show the same while the robot moves: does it see a plain surface?"
    elif seen["frozen"]:
        yield True, f"{name}: frozen images"
