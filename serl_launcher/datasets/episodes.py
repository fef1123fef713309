"""Reads whole episodes from the store's files for exports, while the server writes there. No torch.

The store may evict an episode while it is read. The reader looks at the store's tail after each copy, and raises Gone
instead of returning steps that were overwritten.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.errors import RetakeError
from serl_client.limits import TIME
from serl_client.spec import Array, Spec

from serl_launcher.datasets.names import is_image
from serl_launcher.replay.verdicts import rewards_of_run
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.index import Index
from serl_launcher.store.layout import CHUNK_START, GAP, INTERVENED, TERMINATED, TRUNCATED, Layout, published

SCAN = 4096  # steps looked at at once
Rows = dict[str, Any]  # {name: [T, ...]}, each an Array or StoredImages


class Gone(Exception):
    """The store has evicted this episode."""


class Mismatch(RetakeError):
    """A shard, or the store itself, differs from what was acknowledged."""


class StoredImages:
    """Reads the images of one camera in an episode, [T, H, W, C], each one only when it is indexed.

    Indexing raises Gone if the episode was evicted, before or meanwhile.
    """

    def __init__(self, reader: "EpisodeReader", info: EpisodeInfo, images: Array, rows: Array) -> None:
        self._reader, self._info, self._images, self._rows = reader, info, images, rows
        self.dtype, self.shape = images.dtype, (len(rows), *images.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return StoredImages(self._reader, self._info, self._images, self._rows[index])
        image = self._images[self._rows[index] % self._reader.layout.rows].copy()
        if self._reader.tail > self._info.first:  # looked at after copying
            raise Gone(self._info.id)
        return image

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.stack([self[index] for index in range(len(self))]).astype(dtype or self.dtype, copy=False)


class EpisodeReader:
    """Reads whole episodes of one source from the files that the server writes.

    folder: the source's folder in the store. layout: of its files.
    committed: (tail, head) of the index. The published ones may be older, where a server died and none followed.
    """

    def __init__(self, folder: Path, layout: Layout, committed: tuple[int, int] = (0, 0)) -> None:
        self.layout, self._committed = layout, committed
        self._published, self._steps = published(folder), layout.steps(folder)
        self._observations = layout.observations(folder)

    @property
    def tail(self) -> int:
        return max(int(self._published[0]), self._committed[0])

    @property
    def head(self) -> int:
        return max(int(self._published[1]), self._committed[1])

    def rows(self, info: EpisodeInfo) -> Rows:
        """Read a closed episode: {name: [T, ...]}.

        The names are those of the observations and extras of the Spec, action, reward, terminated, truncated,
        intervened, chunk_start, gap, chunk_delay, time, weights_version and directive. Observations have T + 1 rows if
        the episode has a final one. Images are StoredImages, so a long episode takes no more memory than a short one.
        Reward, terminated and truncated of the last row are those of `info`. Times that cannot be count from 0.

        Raises Gone if it was evicted, before or meanwhile, and Mismatch if steps of it are missing in the store.
        """
        records = self._records(info)
        rows = records["row"].astype(np.int64)
        if info.final:
            rows = np.append(rows, records["final_row"][-1])
        found: Rows = {
            name: StoredImages(self, info, array, rows) if is_image(self.layout.spec.observation[name])
            else array[rows % self.layout.rows] for name, array in self._observations.items()
        }  # fmt: skip
        flags = records["flags"]
        terminated, truncated = flags & TERMINATED > 0, flags & TRUNCATED > 0
        found |= {"intervened": flags & INTERVENED > 0, "chunk_start": flags & CHUNK_START > 0, "gap": flags & GAP > 0}
        found |= {"terminated": terminated, "truncated": truncated}
        columns = ("action", "reward", "time", "chunk_delay", "weights_version", "directive")
        found |= {name: records[name] for name in columns}
        found |= {name: records[f"extras.{name}"] for name in self.layout.spec.extras}
        if (np.abs(found["time"]) > TIME).any():  # an operator has taken the episode back: its other numbers are right
            found["time"] = np.arange(info.steps) / self.layout.spec.fps
        end(found, info)
        if self.tail > info.first:  # looked at after copying
            raise Gone(info.id)
        return found

    def _records(self, info: EpisodeInfo) -> Array:
        """Read the step records of an episode, [T]. The steps of other actors lie between them."""
        found, begin, count = [], info.first, 0
        while count < info.steps and begin < self.head and self.tail <= info.first:
            numbers = np.arange(begin, min(begin + SCAN, self.head))
            records = self._steps[numbers % self.layout.capacity]
            records = records[(records["number"] == numbers) & (records["episode"] == info.number)]
            found.append(records)
            begin, count = begin + SCAN, count + len(records)
        if self.tail > info.first:
            raise Gone(info.id)
        records = np.concatenate(found) if found else self._steps[:0]
        if not np.array_equal(records["index"], np.arange(info.steps)):
            raise Mismatch(f"{info.id} has {len(records)} steps in the store, {info.steps} were acknowledged")
        return records


def end(rows: Rows, info: EpisodeInfo) -> None:
    """Give the last row of an episode the reward and the end that `info` says: an operator may have judged it.

    The steps of an episode that was cut from elsewhere have no flag for that either.
    """
    for name, value in (("reward", info.last_reward), ("terminated", info.terminated), ("truncated", info.truncated)):
        rows[name][-1] = value


def open_run(run_dir: Path) -> tuple[Spec, dict[str, EpisodeReader], list[EpisodeInfo]]:
    """Open the store of a run: its Spec, a reader of each source, and all episodes as their operators judged them.

    The learner may be running.
    """
    verdict = rewards_of_run(run_dir)
    with closing(Index(run_dir / "store/index.sqlite")) as index:
        spec, sources = Spec.from_dict(index.meta("spec")), index.sources().values()
        infos = [verdict.applied(EpisodeInfo(*row)) for row in index.catalog(0, -1)[1]]
    return spec, {
        source.name: EpisodeReader(
            run_dir / "store" / source.name, Layout(spec, source.capacity), (source.tail, source.head)
        ) for source in sources
    }, infos  # fmt: skip
