"""Says of each column of a LeRobot dataset what an import makes of it, and of a dataset that misfits what to write."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import IMAGES, Feature, Spec

from serl_launcher.datasets import names, tables
from serl_launcher.datasets.reader import Dataset
from serl_launcher.datasets.units import Conversion
from serl_launcher.store.files import replaced
from serl_launcher.training.plan import Change

NOTES = "imported"  # folder of a run: for each source a file of what became of its dataset
LEFT_OUT = "left out: "
NUMBERED = LEFT_OUT + "a run numbers its steps anew"
OF_THAT_RUN = LEFT_OUT + "it is of the run that recorded it"
FATE = {  # a column: what becomes of it, besides those of the Spec
    names.REWARD: "kept as reward",
    names.DONE: "kept: true in the last row means terminated",
    names.SUCCESS: "kept as outcome, and a success in the last row means terminated",
    names.TERMINATED: "kept", names.TRUNCATED: "kept", names.OUTCOME: "kept",
    names.INTERVENED: "kept", names.TIME: "kept", "timestamp": "kept as time",
    names.CHUNK_START: "kept", names.CHUNK_DELAY: "kept", names.GAP: "kept",
    names.WEIGHTS_VERSION: OF_THAT_RUN, names.DIRECTIVE: OF_THAT_RUN, names.PHASE: OF_THAT_RUN,
    "frame_index": NUMBERED, "episode_index": NUMBERED, "index": NUMBERED,
    "task_index": "kept as the text of each episode's task",
    "complementary_info.discrete_penalty": LEFT_OUT + "no algorithm here subtracts it from the reward",
}  # fmt: skip
LACKING = {
    names.REWARD: "is not there: each reward is 0",
    names.INTERVENED: "is not there: nobody intervened",
    names.OUTCOME: "is not there: no outcome is known",
}


def became(dataset: Dataset, spec: Spec, conversion: Conversion) -> dict[str, str]:
    """Return {column of the dataset: what becomes of it in a run with this Spec}, which it must fit."""
    run = {**spec.observation, "action": spec.action, **spec.extras}
    used = {dataset.called(name, spec): name for name in run}
    said = {}
    for column, name in dataset.names.items():
        renamed = [f"renamed to {name}"] if name != column else []
        entry: Any = dataset.info["features"][column]
        if name in used:
            changed = _changed(dataset, name, run[used[name]], conversion)
            said[column] = ", ".join([*renamed, *changed]) or "kept"
        elif name in FATE:
            said[column] = ", ".join([*renamed, FATE[name]])
        elif name not in dataset.features:
            said[column] = LEFT_OUT + tables.why_not(entry)
        else:
            said[column] = ", ".join([*renamed, LEFT_OUT + "this run's robot has no such column"])
        if name == "timestamp" and dataset.has(names.TIME):
            said[column] = LEFT_OUT + f"{names.TIME} says it"
        if name == names.REWARD and dataset.is_judged:
            said[column] += "; each is 0 or 1, so an episode that ends with a 1 has succeeded"
        if name == "task_index" and (cut := sum(not piece.is_last for piece in dataset.pieces)):
            said[column] += f"; it changes within an episode {cut} times, and another one begins there"
    has_outcome = dataset.is_judged or dataset.has(names.SUCCESS) or dataset.has(names.OUTCOME)
    lacking = [name for name in LACKING if not (has_outcome if name == names.OUTCOME else dataset.has(name))]
    return said | {name: LACKING[name] for name in lacking}


def _changed(dataset: Dataset, name: str, theirs: Feature, conversion: Conversion) -> Iterator[str]:
    mine = dataset.features[name]
    if name == "action" and dataset.fps != dataset.recorded_fps:
        yield from _resampled(mine, dataset.deltas)
    if name in dataset.cameras:
        if [*dataset.info["features"][dataset.original(name)]["shape"]] != [*dataset.shape_of(name)]:
            yield "its channels come last"
        crop, size = dataset.change.of(name)
        if crop:
            yield f"cropped to {list(crop)}"
        if size:
            whole = crop[2:] if crop else dataset.shape_of(name)[:2]
            yield f"resized from {list(whole)} to {list(size)}"
    elif mine.dtype != theirs.dtype:
        yield f"{mine.dtype} becomes {theirs.dtype}"
    if names.order(mine, theirs) is not None:
        left = ", ".join(entry for entry in mine.names if entry not in theirs.names)
        yield "its entries are put in the run's order" + f", and {left} left out" * bool(left)
    entries = {*dataset.change.rename} & {*tables.entry_names(dataset.info["features"][dataset.original(name)])}
    if entries:
        yield f"its entries {', '.join(sorted(entries))} are renamed"
    if name in conversion.factors:
        yield "percent become degrees"


def _resampled(action: Feature, deltas: Sequence[int]) -> Iterator[str]:
    if deltas:
        yield f"{', '.join(action.names[i] if action.names else str(i) for i in deltas)} added up over each step"
    if len(deltas) < action.shape[0]:
        yield "held until the next one: right for positions, wrong for changes per step (deltas adds those up)"


def digest(dataset: Dataset, count: int) -> str:
    """Return the hash of what tells a dataset from another one: the lengths of the first `count` episodes, and the
    actions of the very first. It stays as it is where episodes are added, or statistics and units."""
    found = hashlib.sha256(repr(dataset.lengths[:count]).encode())
    with suppress(ConfigError):  # such an episode is left out by name
        found.update(np.ascontiguousarray(dataset.episode(0).column("action")).tobytes())
    return found.hexdigest()


def note(dataset: Dataset, source: str, columns: dict[str, str], run_dir: Path) -> list[str]:
    """Keep in the run's folder what became of a dataset, with its own info.json; return it as the lines of a table.

    imported/SOURCE.json: dataset, episodes (how many), hash (digest), robot_type, columns, and info, which is the
    dataset's meta/info.json.
    """
    path = note_of(source, run_dir)
    path.parent.mkdir(exist_ok=True)
    count = len(dataset.lengths)
    kept = {"dataset": str(dataset.folder.resolve()), "episodes": count, "hash": digest(dataset, count)}
    kept |= {"robot_type": dataset.info.get("robot_type"), "columns": columns}
    with replaced(path) as aside:
        aside.write_text(json.dumps(kept | {"info": dataset.info}, indent=1))
    width = max(map(len, columns))
    rate = f", resampled from {dataset.recorded_fps:g} to {dataset.fps:g} steps per second"
    head = f"{source}: {dataset.folder}{rate * (dataset.fps != dataset.recorded_fps)} (this table is kept in {path})"
    return [head, *(f"  {column:{width}}  {what}" for column, what in columns.items())]


def note_of(source: str, run_dir: Path) -> Path:
    return run_dir / NOTES / f"{source}.json"


def noted(dataset: Dataset, source: str, run_dir: Path) -> Mapping[str, Any] | None:
    """Return what `note` has kept of the dataset of this name; None if the run's folder does not tell."""
    path = note_of(source, run_dir)
    kept = tables.read_json(path.parent, path.name) if path.exists() else {}
    return kept if "hash" in kept and Path(kept["dataset"]).name == dataset.name else None


def remedy(dataset: Dataset, spec: Spec, source: str) -> str:
    """Return the words by which a dataset that misfits comes to fit a run with this Spec; empty if there are none."""
    try:
        change = _fitting(dataset, spec)
        if Dataset(dataset.folder, change).misfit(spec):
            return ""
    except (ConfigError, ValueError):  # what it guessed cannot be
        return ""
    said = {"rename": change.rename, "crop": change.crop, "size": change.size, "fps": change.fps}
    return " ".join(f"'plan.sources.{source}.{word}={_text(value)}'" for word, value in said.items() if value)


def _fitting(dataset: Dataset, spec: Spec) -> Change:
    """Guess which change makes a dataset fit: the nearest names, images as the run's cameras cut theirs."""
    rename, cuts = dict(dataset.change.rename), {name: dataset.change.of(name) for name in spec.images}
    described, before = dataset.described(spec), {new: own for own, new in rename.items()}
    free = [name for name in dataset.features if name not in {*spec.observation, "action", *FATE}]
    for name, theirs in {**spec.observation, "action": spec.action}.items():
        alike = [other for other in free if _are_alike(dataset.features[other], theirs)]
        if name not in described and alike:
            rename[dataset.original(alike[0])] = name
            free.remove(alike[0])
        mine = described.get(name) or (dataset.features[alike[0]] if alike else theirs)
        if names.is_image(theirs) and mine.shape != theirs.shape:
            crop = next((said.removeprefix("crop ") for said in theirs.names if said.startswith("crop ")), "null")
            cuts[name] = tuple(json.loads(crop) or ()) or None, theirs.shape[:2]
        elif len(mine.names) == len(theirs.names):
            left = [entry for entry in theirs.names if entry not in mine.names]
            for own in (entry for entry in mine.names if entry not in theirs.names):
                (found,) = difflib.get_close_matches(own, left, n=1, cutoff=0)
                rename[before.get(own, own)] = found
                left.remove(found)
    crops, sizes = ({name.removeprefix(IMAGES): both[i] for name, both in cuts.items()} for i in (0, 1))
    return Change(
        rename,
        _shared(crops),
        _shared(sizes),
        spec.fps if dataset.fps != spec.fps else dataset.change.fps,
        dataset.change.deltas,
    )


def _are_alike(mine: Feature, theirs: Feature) -> bool:
    return names.is_image(mine) if names.is_image(theirs) else mine.shape == theirs.shape


def _shared(cuts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cuts of all cameras as one, where it is the same; else of each that is cut."""
    first = next(iter(cuts.values()), None)
    shared = {"": first} if {*cuts.values()} == {first} else cuts
    return {name: cut for name, cut in shared.items() if cut}


def _text(value: Any) -> str:
    """Return a value as a word of the command line has it."""
    if isinstance(value, Mapping):
        return _text(value[""]) if "" in value else "{" + ", ".join(f"{n}: {_text(v)}" for n, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(list(value)) if isinstance(value, tuple) else str(value)
