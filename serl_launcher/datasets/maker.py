"""Makes one shard of episodes, each read from wherever it still is; `Exporter` says which ones, and when."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from serl_client.console import throttled
from serl_client.errors import ConfigError
from serl_client.spec import Spec

from serl_launcher.datasets import footage, shards
from serl_launcher.datasets.episodes import EpisodeReader, Gone, Rows
from serl_launcher.datasets.footage import Differs, Origins
from serl_launcher.datasets.names import MANIFEST
from serl_launcher.datasets.reader import Dataset, Episode
from serl_launcher.replay.views import EpisodeInfo
from serl_launcher.store.aside import is_aside

log = throttled(__name__)

Manifest = Mapping[str, Any]  # of a shard: what `shards` writes beside it
Earlier = Mapping[int, Episode | ConfigError]  # each episode of a shard's version before, or why it cannot be read
LeftOut = list[tuple[EpisodeInfo, str]]  # episodes that a shard lacks, and why


class ShardMaker:
    """Writes a shard aside, verifies it, and puts it in its place.

    run: the run's id. spec: of the run. readers: {source: of its episodes}. origins: where imported episodes came from.
    kept: {episode that was left out, and is tried again: the folder of its rows}.
    """

    def __init__(
        self, run: str, spec: Spec, readers: Mapping[str, EpisodeReader], kept: Mapping[int, Path], origins: Origins
    ) -> None:
        self._run, self._spec, self._readers, self._kept, self._origins = run, spec, readers, kept, origins

    @cached_property
    def _codec(self) -> str | None:
        return shards.codec_for(self._spec, self._origins.first)

    def make(
        self, shard: Path, source: str, infos: Sequence[EpisodeInfo], before: Manifest | None, phases: Sequence[str],
        told: Callable[[], None], copies: bool = True,
    ) -> tuple[Manifest | None, LeftOut]:  # fmt: skip
        """Make a shard of these episodes; return its manifest, None if none of them is left for it, and those left out.

        before: the manifest of the version in whose place it comes, if any. phases: the run's. told: called after each
        episode. copies: if each episode has videos that show exactly its images, in the version before or in the
        dataset that it came from, those are copied; else all are encoded.
        """
        part, earlier = part_of(shard), _earlier(shard, before)
        read = {number: found for number, found in earlier.items() if isinstance(found, Episode)}
        origins = {info.number: found for info in infos if (found := read.get(info.number) or self._origins(info))}
        copied = None
        if copies and self._codec:
            copied = footage.joined(origins.get(info.number) for info in infos if _stays(info, before))
        left_out: LeftOut = []
        again: set[int] = set()  # episodes of which nothing but the version before is left

        def tables() -> Iterator[tuple[EpisodeInfo, Rows]]:
            for info in infos:
                rows = self._rows(info, earlier, again) if _stays(info, before) else None
                if rows is None:
                    left_out.append((info, "discarded" if info.discard else "no longer in the store"))
                else:
                    yield info, shards.table(info, rows, self._spec, phases)
                told()

        codec = copied or self._codec
        try:
            written = shards.write(part, self._spec, codec, tables(), origins if copied else None)
        except Differs:
            return self.make(shard, source, infos, before, phases, told, copies=False)
        if not written:
            shards.remove(part)
            return None, left_out
        shards.verify(part, self._spec, written)
        there = [info for info, _ in written]
        came = [origins[info.number] if copied or info.number in again else self._origins(info) for info in there]
        encodings = max(footage.generation(episode) for episode in came) + bool(codec and not copied)
        version = before["version"] + 1 if before else 1
        manifest = shards.manifest(self._run, source, version, self._spec, phases, codec, encodings, there, left_out)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1))
        shards.place(part, shard)
        return manifest, left_out

    def _rows(self, info: EpisodeInfo, earlier: Earlier, again: set[int]) -> Rows | None:
        """Read an episode from the store, else from the version before, or from where it was left out. None if none of
        these holds it. Raises ConfigError if the version before is the only one that does and cannot be read."""
        with suppress(Gone):
            return self._readers[info.source].rows(info)
        if info.number in self._kept:
            return shards.kept(self._kept[info.number], info, self._spec)
        if info.number not in earlier:
            log.warning("export: episode %s left the store before it was in a shard", info.id)
            return None
        if isinstance(found := earlier[info.number], ConfigError):
            raise found
        again.add(info.number)
        return shards.rows_of(found, info, self._spec)


def part_of(folder: Path) -> Path:
    """Return the folder in which another one is made."""
    return folder.with_name(folder.name + shards.PART)


def _stays(info: EpisodeInfo, before: Manifest | None) -> bool:
    """Return whether an episode belongs into its shard: an operator alone takes out what is in."""
    return not info.discard or (before is not None and is_aside(info))


def _earlier(shard: Path, before: Manifest | None) -> Earlier:
    """Return the episodes, by number, of the version of a shard with this manifest."""
    numbers = [entry["number"] for entry in before["episodes"]] if before else []
    try:
        return dict(zip(numbers, Dataset(shard), strict=True)) if numbers else {}
    except ConfigError as error:
        return dict.fromkeys(numbers, error)
