"""Finds the newest image of an actor, or the last one of an episode, in the files that the server writes."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from serl_client.spec import Array, Spec

from serl_launcher.store.index import Index
from serl_launcher.store.layout import Layout, published
from serl_launcher.store.schema import Episode

SCAN = 4096  # steps that are looked through at once
FOUND = 256  # episodes of which it is remembered how far they were looked through
WIDE = 640  # pixels of an image at most
STATES = 32  # numbers of a state that are shown


class _Source:
    def __init__(self, folder: Path, layout: Layout) -> None:
        self.layout, self._published = layout, published(folder)
        self._steps, self.observations = layout.steps(folder), layout.observations(folder)
        self._found: dict[int, tuple[int, int, int | None]] = {}  # by episode: the next step to look at, how many, row

    @property
    def tail(self) -> int:
        return int(self._published[0])

    def last_row(self, episode: Episode) -> int | None:
        """Return the row of the newest step of an episode; None if it has left the store, or is not found."""
        if episode.first < self.tail:
            return None
        head, (step, count, row) = int(self._published[1]), self._found.pop(episode.number, (episode.first, 0, None))
        while step < head and count < episode.steps:  # any number of steps of other actors may lie between
            numbers = np.arange(step, min(step + SCAN, head))
            steps = self._steps[numbers % self.layout.capacity]
            rows = steps["row"][(steps["episode"] == episode.number) & (steps["number"] == numbers)]
            step, count, row = int(numbers[-1]) + 1, count + len(rows), int(rows[-1]) if len(rows) else row
        self._found[episode.number] = step, count, row
        while len(self._found) > FOUND:
            del self._found[next(iter(self._found))]
        return row if episode.first >= self.tail else None


class Images:
    """Reads images and states of a run's store. index: of that store."""

    def __init__(self, store: Path, index: Index) -> None:
        self.spec = Spec.from_dict(index.meta("spec"))
        self.cameras = [
            name for name, each in self.spec.observation.items() if each.dtype == "uint8" and len(each.shape) == 3
        ]
        self._store, self._index = store, index
        self._sources: dict[str, _Source] = {}

    def observed(self, episode: Episode, name: str) -> Array | None:
        """Return a copy of the newest row of an observation; None: it has left the store, perhaps meanwhile."""
        source = self._source(episode.source)
        row = source.last_row(episode)
        if row is None or name not in source.observations:
            return None
        found = np.array(source.observations[name][row % source.layout.rows])
        return found if episode.first >= source.tail else None  # looked at after copying

    def jpeg(self, episode: Episode, camera: str) -> bytes | None:
        """Return the newest image of a camera in an episode as a JPEG, at most WIDE pixels wide and high."""
        found = self.observed(episode, camera) if camera in self.cameras else None
        if found is None:
            return None
        image = Image.fromarray(found[..., -3:] if found.shape[2] >= 3 else found[..., 0])  # the newest of a stack
        image.thumbnail((WIDE, WIDE))
        image.save(file := io.BytesIO(), "JPEG", quality=80)
        return file.getvalue()

    def state(self, episode: Episode) -> list[Mapping[str, Any]]:
        """Return the newest numbers of an episode, of all observations that are no images: [{name, value, unit}]."""
        told = []
        for name, feature in self.spec.observation.items():
            values = None if name in self.cameras else self.observed(episode, name)
            for i, value in enumerate(() if values is None else values.reshape(-1)[: STATES - len(told)]):
                said = feature.names[i] if i < len(feature.names) else f"{name.removeprefix('observation.')} {i}"
                unit = feature.units[i] if i < len(feature.units) else ""
                told.append({"name": said, "value": f"{float(value):.4g}", "unit": unit})
        return told

    def _source(self, name: str) -> _Source:
        if name not in self._sources:
            capacity = self._index.sources()[name].capacity
            self._sources[name] = _Source(self._store / name, Layout(self.spec, capacity))
        return self._sources[name]
