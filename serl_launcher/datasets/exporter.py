"""Decides which closed episodes go into which LeRobot dataset ("shard"), and into recordings.

`Exporter` knows which episodes there are, which shards hold them, and what to write next. export.py calls it; maker.py
makes one shard.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from serl_client import clock
from serl_client.console import throttled
from serl_client.errors import ConfigError, is_machines
from serl_client.spec import Spec

from serl_launcher.datasets import shards
from serl_launcher.datasets.backlog import Backlog
from serl_launcher.datasets.episodes import EpisodeReader, Gone, Rows
from serl_launcher.datasets.footage import Origins
from serl_launcher.datasets.maker import Manifest, ShardMaker, part_of
from serl_launcher.datasets.names import LEFT_OUT, MANIFEST
from serl_launcher.error_log import ERRORS, first_line, write_traceback
from serl_launcher.replay.verdicts import VerdictRewards
from serl_launcher.replay.views import EpisodeInfo, Held
from serl_launcher.store.aside import is_aside
from serl_launcher.store.layout import Layout

log = throttled(__name__)

VERDICTS = len(shards.VERDICT)  # values of a mark that an operator may change
TELL_S = 2.0  # seconds between two lines of progress at the end of a run
Sink = Callable[[EpisodeInfo, Callable[[], Rows], Spec], None]


class Exporter:
    """Writes closed episodes into shards: `take` the server's rows, then `work` until nothing is due.

    run: the run's id; shards of another run are refused. spec: of the run.
    capacities: {source: steps} of all sources. sources: those to export. count: episodes in a shard.
    sinks: each is called as sink(info, rows, spec) once per closed episode of any source. rows() reads the episode, or
    raises Gone. A new Exporter shows the episodes again; a sink finds what it made before.
    An episode that fails, whatever the error is, is left out and named in the run's errors.log; the others go on.
    committed: {source: (tail, head)} of the index, for a run whose server is stopped.
    verdict: rewards of the operator's verdicts. again: try the episodes that were left out once more, whatever it was
    that failed; one that fails again stays as it is. datasets: {source: the dataset that was imported into it}.

    Raises ConfigError if the folder of datasets holds shards of another run.
    """

    def __init__(
        self, run_dir: Path, run: str, spec: Spec, capacities: Mapping[str, int], sources: Iterable[str], count: int,
        sinks: Sequence[Sink] = (), committed: Mapping[str, tuple[int, int]] | None = None,
        verdict: VerdictRewards | None = None, again: bool = False, datasets: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.run, self.spec, self.count, self.sinks = run_dir / "datasets", run, spec, count, list(sinks)
        self.episodes: dict[int, EpisodeInfo] = {}  # in the store, or with work to do on them
        self.rest = False  # the run is over: fewer than `count` episodes make a shard, too
        self._verdict = verdict or VerdictRewards()
        self._readers = {
            name: EpisodeReader(run_dir / "store" / name, Layout(spec, capacity), (committed or {}).get(name, (0, 0)))
            for name, capacity in capacities.items()
        }
        self._capacities, self._backlog = dict(capacities), Backlog(capacities)
        self._held = {name: Held() for name in capacities}
        self._gone: set[int] = set()  # numbers in `episodes` that have left the store
        self._pending: dict[str, set[int]] = {name: set() for name in sources}  # closed, in no shard yet
        self._stale: dict[Path, None] = {}  # shards that differ from the store, in the order of their next try
        self._unseen: dict[int, None] = {}  # to be shown to the sinks, in this order
        self._written, self._all, self._told = 0, 0, clock.monotonic()
        self._phases: dict[str, int] = {}  # phase -> its first episode
        self._settled: set[int] = set()  # may leave the store, and the server does not know
        self._shard: dict[int, Path] = {}  # episode -> its shard
        self._mark: dict[int, tuple[Any, ...]] = {}  # episode -> shards.mark of its entry there
        self._kept: dict[int, Path] = {}  # episode that was left out, and is tried again -> the folder of its rows
        self._maker = ShardMaker(run, spec, self._readers, self._kept, Origins(datasets or {}))
        self._marks: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # one object for equal marks, to save memory
        shards.clean(self.folder)
        exported: dict[int, tuple[Any, ...]] = {}  # episode -> its length
        for shard, manifest in chain.from_iterable(map(self._shards_of, self._pending)):
            self._adopt(shard, manifest)
            exported |= {entry["number"]: shards.mark(entry)[VERDICTS:] for entry in manifest["episodes"]}
        for folder, manifest in self._shards_of(LEFT_OUT):
            [entry] = manifest["left_out"]
            if exported.get(entry["number"]) == shards.mark(entry)[VERDICTS:]:
                shards.drop(folder)  # an export was killed that had brought it into a shard
            elif again and manifest["source"] in self._pending:
                self._kept[entry["number"]] = folder
            else:
                self._adopt(folder, manifest)

    def _shards_of(self, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield each shard of a source, or each left-out episode, with its manifest."""
        for shard in sorted(path for path in (self.folder / name).glob("*") if path.is_dir()):
            if not (shard / MANIFEST).exists():
                log.warning("export: %s has no %s: it is not ours and is left alone", shard, MANIFEST)
                continue
            manifest = shards.read_manifest(shard)
            if manifest["run"] != self.run:
                raise ConfigError(f"{shard} is of run {manifest['run'][:12]}, not of this one: move {self.folder} away")
            yield shard, manifest

    def _adopt(self, shard: Path, manifest: Mapping[str, Any]) -> None:
        for entry in [*manifest["episodes"], *manifest["left_out"]]:
            number, mark = entry["number"], shards.mark(entry)
            self._shard[number], self._mark[number] = shard, self._marks.setdefault(mark, mark)
            self._settled.add(number)

    # -- what is to be done
    def update(self, rows: Iterable[Sequence[Any]]) -> None:
        """Note the server's rows of new and changed episodes (schema.EpisodeInfo)."""
        for row in rows:
            info = self._verdict.applied(EpisodeInfo(*row))
            first = self._phases.get(info.phase, info.number)
            self._phases[info.phase] = min(first, info.number)
            if info.source not in self._readers:
                continue
            is_there = info.first >= self._readers[info.source].tail
            before = self.episodes.get(info.number)
            self.episodes[info.number] = info
            if is_there:
                self._held[info.source].put(info)
            else:
                self._gone.add(info.number)
            if info.closed:
                if info.source in self._pending:
                    self._sort(info)
                if self.sinks and is_there and (before is None or not before.closed):
                    self._unseen[info.number] = None
        self._drop_gone()
        waiting = [self.episodes[number] for number in {*self._unseen, *chain(*self._pending.values())}]
        self._backlog.look(waiting, {name: reader.head for name, reader in self._readers.items()})

    def _drop_gone(self) -> None:
        """Forget episodes that left the store and need no more work, so that a long history takes no memory."""
        for name, held in self._held.items():
            self._gone.update(info.number for info in held.evict(self._readers[name].tail))
        for number in list(self._gone):
            is_pending = number in self._pending.get(self.episodes[number].source, ())
            if not (is_pending or number in self._unseen or self._shard.get(number) in self._stale):
                del self.episodes[number]
                self._gone.discard(number)
                self._settled.discard(number)

    def _sort(self, info: EpisodeInfo) -> None:
        """Decide what a closed episode needs: a shard, its shard again, or nothing."""
        number = info.number
        if number in self._shard:
            is_left_out = self._shard[number].parent.name == LEFT_OUT
            if self._differs(info) and not (is_left_out or is_aside(info)):  # an operator alone takes out what is in
                self._stale[self._shard[number]] = None
                self._settled.discard(number)  # it stays in the store until its shard was written again
        elif info.discard:
            self._pending[info.source].discard(number)
            self._settled.add(number)
        elif number in self._kept or info.first >= self._readers[info.source].tail:  # else it left without an export
            self._settled.discard(number)
            self._pending[info.source].add(number)

    def _differs(self, info: EpisodeInfo) -> bool:
        """Return whether its shard would change now: of an episode that left the store, only the verdict can."""
        there, now = self._mark[info.number], shards.mark_now(info)
        is_there = info.first >= self._readers[info.source].tail
        return there != now if is_there else there[:VERDICTS] != now[:VERDICTS]

    @property
    def remaining(self) -> int:
        """The number of closed episodes that are in no shard yet."""
        return sum(map(len, self._pending.values()))

    @property
    def settled(self) -> list[int]:
        """The numbers of episodes that the store holds and may evict. Call `told` once the server knows them."""
        held = {name: reader.tail for name, reader in self._readers.items()}
        return sorted(
            number for number in self._settled
            if (info := self.episodes.get(number)) is not None and info.first >= held[info.source]
        )  # fmt: skip

    def told(self) -> None:
        """Forget what is `settled`: the server has stored it durably."""
        self._settled = {number for number in self._settled if number not in self.episodes}

    # -- doing it
    def work(self, *, rest: bool = False) -> bool:
        """Write the next shard, or show the next episode to the sinks. Returns False if nothing is due.

        rest: the run is over, so fewer than `count` episodes make a shard, too.
        Raises an error of the machine (errors.is_machines), such as a full disk: the next call tries again.
        """
        if rest and not self.rest and self.remaining:
            self._written, self._all = 0, self.remaining
            log.info(
                "export: %d episodes go into datasets; Ctrl-C is safe, `tools/data.py export %s` goes on where it was",
                self.remaining, self.folder.parent,
            )  # fmt: skip
        self.rest = rest
        try:
            worked = self._work()
        except Gone as gone:  # the next call finds which episodes are still there
            log.info("export: episode %s left the store while it was read; its shard is written again without it", gone)
            worked = True
        self._drop_gone()
        return worked

    def _work(self) -> bool:
        if self._unseen:
            number = next(iter(self._unseen))
            self._show(self.episodes[number])
            del self._unseen[number]
            return True
        for source, pending in self._pending.items():
            if numbers := self._due(source, sorted(pending), self.rest):
                self._write(source, numbers)
                return True
        if self._stale:
            shard = next(iter(self._stale))
            try:
                self._rewrite(shard)
            except Exception as error:  # such as: somebody has moved the shard away
                if isinstance(error, Gone) or is_machines(error):
                    self._stale[shard] = self._stale.pop(shard)  # tried again once the others were
                    raise
                self._give_up(shard, error)
            self._stale.pop(shard, None)
            return True
        return False

    def _free(self, shard: Path) -> Path:
        """Return this path, or one with `~` behind it if a folder that is not ours has the name."""
        is_strange = shard.exists() and not (shard / MANIFEST).exists()
        return self._free(shard.with_name(shard.name + "~")) if is_strange else shard

    def _give_up(self, shard: Path, error: Exception) -> None:
        """Give up the new verdicts of a shard that cannot be made again. Steps that it lacks go into a new one."""
        self._note("what was judged anew in %s stays as it was", error, shard)
        for number in [number for number, place in self._shard.items() if place == shard]:
            info = self.episodes.get(number)
            if info and self._differs(info) and self._mark[number][VERDICTS:] != shards.mark_now(info)[VERDICTS:]:
                del self._shard[number], self._mark[number]
                self._sort(info)
            else:
                self._settled.add(number)

    def _note(self, what: str, error: Exception, *names: object) -> None:
        """Put the traceback of an error into the run's errors.log, and say it; of many of one `what`, it says few."""
        run_dir = self.folder.parent
        write_traceback(run_dir, f"export: {what}" % names, error, is_item=True)
        log.error(f"export: {what}: %s (where: %s)", *names, first_line(error), run_dir / ERRORS)

    def _due(self, source: str, pending: list[int], rest: bool) -> list[int]:
        """Return the numbers for the next shard of a source. Fewer than `count` make one at the end of the run, and
        when the oldest is a quarter of the store behind."""
        if not pending:
            return []
        waits = self._readers[source].head - self.episodes[pending[0]].first
        whole = len(pending) >= self.count or rest or waits >= self._capacities[source] // 4
        return pending[: self.count] if whole else []

    def _show(self, info: EpisodeInfo) -> None:
        """Call the sinks with an episode."""
        for sink in self.sinks:
            try:
                sink(info, lambda: self._readers[info.source].rows(info), self.spec)
            except Gone:
                log.info("export: episode %s left the store before it was recorded", info.id)
            except Exception as error:  # pictures for people must not keep episodes in the store
                self._note("episode %s is not recorded", error, info.id)

    def _write(self, source: str, numbers: Sequence[int]) -> None:
        """Write a new shard. One that fails is halved until it is known which episodes no shard takes."""
        shard = self._free(self.folder / source / f"{numbers[0]:06d}-{numbers[-1]:06d}")
        try:
            self._make(shard, source, [self.episodes[number] for number in numbers], None)
        except Exception as error:
            shards.remove(part_of(shard))
            if isinstance(error, Gone) or is_machines(error):
                raise
            if middle := len(numbers) // 2:
                self._write(source, numbers[:middle])
                self._write(source, numbers[middle:])
            else:
                self._leave_out(self.episodes[numbers[0]], error)
        self._pending[source].difference_update(numbers)

    def _leave_out(self, info: EpisodeInfo, error: Exception) -> None:
        """Keep an episode that no shard takes in a folder of its own, so that it may leave the store like the others.

        Raises OSError if that cannot be written either: then the disk is at fault.
        """
        folder = self.folder / LEFT_OUT / f"{info.number:06d}"
        was_kept = self._kept.pop(info.number, None)
        manifest = shards.read_manifest(folder) if was_kept else self._keep(folder, info, first_line(error))
        self._adopt(folder, manifest)
        self._note("episode %s is in no dataset, but in %s", error, info.id, folder)

    def _keep(self, folder: Path, info: EpisodeInfo, reason: str) -> dict[str, Any]:
        """Write the rows of an episode into a folder, and return its manifest."""
        part, why = part_of(folder), [reason]
        shards.remove(part)
        part.mkdir(parents=True)
        try:
            shards.keep(part, self._readers[info.source].rows(info))
        except (Gone, OSError):
            raise
        except Exception as damage:
            if is_machines(damage):
                raise
            why.append(f"its rows cannot be read ({first_line(damage)})")
        left_out = [(info, "; ".join(why))]
        manifest = shards.manifest(self.run, info.source, 1, self.spec, [info.phase], None, 0, [], left_out)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1))
        shards.place(part, folder)
        return manifest

    def _rewrite(self, shard: Path) -> None:
        """Write the next version of a shard: some of its episodes were judged again, or have more steps."""
        before = shards.read_manifest(shard)
        entries = sorted([*before["episodes"], *before["left_out"]], key=lambda entry: entry["number"])
        tail, infos = self._readers[before["source"]].tail, []
        for entry in entries:
            info = self.episodes.get(entry["number"]) or shards.info_of(entry, before["source"])
            if info.first < tail:  # its steps are left only in the shard
                info = info._replace(**{name: entry[name] for name in shards.MARK if name not in shards.VERDICT})
            infos.append(info)
        self._make(shard, before["source"], infos, before)

    def _make(self, shard: Path, source: str, infos: Sequence[EpisodeInfo], before: Manifest | None) -> None:
        """Make a shard, in place of the version with the manifest `before`, if any."""
        phases = sorted(self._phases, key=lambda phase: self._phases[phase])
        made, left_out = self._maker.make(shard, source, infos, before, phases, lambda: self._tell(before is None))
        if made is None:
            self._forget(shard, before, left_out)
            return
        self._adopt(shard, made)
        for number in self._kept.keys() & {entry["number"] for entry in made["episodes"]}:
            shards.drop(self._kept.pop(number))

    def _tell(self, counts: bool) -> None:
        self._written += counts
        if self.rest and clock.monotonic() > self._told + TELL_S:
            self._told = clock.monotonic()
            log.info("export: episode %d of %d is written", self._written, max(self._written, self._all))

    def _forget(self, shard: Path, before: Manifest | None, left_out: Sequence[tuple[EpisodeInfo, str]]) -> None:
        """Remove a shard without episodes: LeRobot has no such dataset."""
        if before:
            shards.drop(shard)
        for info, _ in left_out:
            self._shard.pop(info.number, None)
            self._mark.pop(info.number, None)
            if info.discard:
                self._settled.add(info.number)
