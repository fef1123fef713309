"""Reads and writes the store's SQLite index: the only commit point. No entry per step; written by the server alone.

What a step's files hold beyond `sources.head` does not exist. A commit of this index is what makes a group of records
real: head, watermarks (`sessions.expected`), episodes and outcomes change together or not at all.
"""

import dataclasses
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import xxhash
from serl_client import clock
from serl_client.episode import Outcome
from serl_client.errors import ConfigError

from serl_launcher.store.aside import LEARNER
from serl_launcher.store.schema import FORMAT, NUMBERED, SCHEMA, TABLE, TABLES, Episode, EpisodeInfo, Session, Source

OURS = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
TIMED = ("outcomes", "lost", *NUMBERED)  # tables whose last column but the checksum is the time of writing
DISK = {
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
}  # fmt: skip
WHICH = {  # of episodes, by what was said of them last, and by who drove
    "success": "success = 1 AND discard = 0", "failure": "success = 0 AND discard = 0",
    "unjudged": "success IS NULL AND discard = 0", "discard": f"discard = 1 AND NOT judged_by LIKE '{LEARNER}%'",
    "aside": f"discard = 1 AND judged_by LIKE '{LEARNER}%'", "assisted": "intervened > 0",
}  # fmt: skip
CONNECTION: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}


class Index:
    """The database of one store. Every method that writes is part of a transaction that `commit` ends."""

    def __init__(self, path: Path, *, writes: bool = False) -> None:
        """Open the index to read it, whoever runs or was killed: no file is made. writes: be the server, and make it.

        Raises ConfigError for one that is damaged, OSError for one that is not there or may not be read, and
        sqlite3.Error when the disk fails. SQLite looks at every page and the type of every value; what the store goes
        on from has checksums, too, and those of all past episodes are for `damaged_rows`.
        """
        new = writes and not path.exists()
        if not new and path.stat().st_size == 0:
            raise _damaged(path, "it is empty")
        self._path = path
        self._db = sqlite3.connect(path, **CONNECTION) if writes else _reading(path)
        try:
            with _clear(path):
                self._begin(new, writes)
        except BaseException:
            self._db.close()
            raise

    def _begin(self, new: bool, writes: bool) -> None:
        if writes:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
        if new:
            self._db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
            self.set_meta("format", FORMAT)
            self.commit()
        if (found := self.meta("format")) != FORMAT:
            raise ConfigError(
                f"{self._path} has the format {found}, this version reads {FORMAT}: go on with the version that made "
                "it, or begin another run_dir"
            )
        if not new:
            self._check()

    def _check(self) -> None:
        """Raise ValueError when something here cannot have been written by this class."""
        with closing(sqlite3.connect(":memory:")) as pattern:
            pattern.executescript(SCHEMA)
            if self._db.execute(OURS).fetchall() != pattern.execute(OURS).fetchall():
                raise ValueError("its tables are not those that this version makes")
        (report,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if report != "ok":
            raise ValueError(report)
        for name, source in self.sources().items():
            steps, rows = source.head - source.tail, source.row_head - source.row_tail
            if min(source.tail, source.row_tail, steps, rows) < 0 or steps > source.capacity:
                raise ValueError(f"source {name}: {source}")
        for (key,) in self._db.execute("SELECT key FROM meta").fetchall():
            self.meta(key)
        if not all(isinstance(body, dict) for body in self.directives().values()):
            raise ValueError("a directive is a mapping")

    def damaged_rows(self) -> Iterator[str]:
        """Each row that is not what was written: read all, and name it."""
        for table in TABLES:
            try:
                for *row, checksum in self._db.execute(f"SELECT * FROM {table}"):
                    if _checksum(row[table in NUMBERED :]) != checksum:
                        yield f"a row of {table}, which begins with {row[0]!r:.100}"
            except sqlite3.Error as error:
                yield f"{table} cannot be read ({error})"

    def commit(self) -> None:
        """Make everything since the last commit durable at once."""
        if self._db.in_transaction:
            self._db.execute("COMMIT")

    def probe(self) -> None:
        """Write what the log holds into the database anew, and sync it: what a failed sync left behind is either
        durable then, or this raises sqlite3.Error or OSError; ConfigError when it turns out to be damaged."""
        with _clear(self._path):
            self.set_meta("probed", self.meta("probed") is None)
            self.commit()
            busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise OSError("the index is being read by another program: close it")

    def close(self) -> None:
        self._db.close()

    def _write(self, sql: str, *rows: Sequence[Any]) -> int:
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        if len(rows) == 1:
            return self._db.execute(sql, tuple(rows[0])).lastrowid or 0
        self._db.executemany(sql, rows)
        return 0

    def add(self, table: str, *rows: Sequence[Any], instead: str = "") -> int:
        """Write rows, each with the time, where its table has a column for it, and a checksum.

        instead: of one that is there: OR REPLACE, OR IGNORE. Returns the number that a table of NUMBERED gave to a row.
        """
        if not rows:
            return 0
        rows = tuple((*row, clock.time()) for row in rows) if table in TIMED else rows
        number = "NULL, " if table in NUMBERED else ""
        sql = f"INSERT {instead} INTO {table} VALUES ({number}{', '.join('?' * (len(rows[0]) + 1))})"
        return self._write(sql, *([*row, _checksum(row)] for row in rows))

    def put(self, *things: Source | Session | Episode) -> None:
        """Write things of one kind into its table, in place of those with the same keys."""
        if things:
            names = [field.name for field in dataclasses.fields(things[0])]
            values = ([getattr(thing, name) for name in names] for thing in things)
            self.add(TABLE[type(things[0])], *values, instead="OR REPLACE")

    def _get(self, kind: type, where: str = "1", *values: Any) -> list[Any]:
        table, names = TABLE[kind], ", ".join(f.name for f in dataclasses.fields(kind))
        found = []
        for *row, checksum in self._db.execute(f"SELECT {names}, checksum FROM {table} WHERE {where}", values):
            if _checksum(row) != checksum:
                raise _damaged(self._path, f"a row of {table}, which begins with {row[0]!r:.100}")
            found.append(kind(*row))
        return found

    # -- what the store is
    def meta(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    # -- sources, sessions, episodes, outcomes
    def sources(self) -> dict[str, Source]:
        return {source.name: source for source in self._get(Source)}

    def drop_sessions(self, sessions: Iterable[str]) -> None:
        """Forget these: none of their records ever came."""
        for session in sessions:
            self._write("DELETE FROM sessions WHERE session = ?", (session,))

    def drop_archived(self, source: str, begin: int, end: int) -> None:
        """Forget that episodes which began at these steps may leave the store: they have left it."""
        left = "SELECT number FROM episodes WHERE source = ? AND first >= ? AND first < ?"
        self._write(f"DELETE FROM archived WHERE number IN ({left})", (source, begin, end))

    def sessions(self) -> dict[str, Session]:
        found = self._get(Session, "1 ORDER BY position")
        for session in found:
            session.closed, session.simulated = bool(session.closed), bool(session.simulated)
        return {session.session: session for session in found}

    def open_episodes(self) -> dict[str, Episode]:
        """The open episode of each session."""
        return {episode.session: episode for episode in self._get(Episode, "closed = 0")}

    def episode(self, id: str) -> Episode | None:
        return next(iter(self._get(Episode, "id = ?", id)), None)

    def latest(self, count: int, *, which: str = "", source: str = "", actor: str = "") -> list[Episode]:
        """The episodes that began last, the newest first: those of WHICH, of a source and of an actor; "": of any."""
        where = f"{WHICH.get(which, 1)} AND ? IN ('', source) AND ? IN ('', actor) ORDER BY number DESC LIMIT ?"
        return self._get(Episode, where, source, actor, count)

    def parts(self, id: str) -> list[Episode]:
        """The episode of that id, and what came of it after it was closed from elsewhere."""
        whole = self._get(Episode, "id = ?", id)
        return whole + self._get(Episode, "part_of = ? AND part_start > 0 ORDER BY number", id)

    def newest(self, session: str) -> Episode | None:
        """The newest episode of a session, if it has one."""
        return next(iter(self._get(Episode, "session = ? ORDER BY number DESC LIMIT 1", session)), None)

    def discarded_by(self, whom: str) -> list[Episode]:
        """The episodes of which somebody whose name begins so said last that they are discarded, in order."""
        return self._get(Episode, "discard = 1 AND judged_by LIKE ? ORDER BY number", f"{whom}%")

    def first_from(self, source: str, step: int, row: int) -> tuple[int, int] | None:
        """(first, first_row) of the oldest episode that begins at or after both numbers."""
        return self._db.execute(
            "SELECT first, first_row FROM episodes WHERE source = ? AND first >= ? AND first_row >= ? "
            "ORDER BY first LIMIT 1", (source, step, row),
        ).fetchone()  # fmt: skip

    def first_kept(self, source: str, step: int) -> tuple[int, int, str] | None:
        """(first, first_row, id) of the oldest episode from that step on which may not leave the store."""
        return self._db.execute(
            "SELECT first, first_row, id FROM episodes WHERE source = ? AND first >= ? "
            "AND number NOT IN (SELECT number FROM archived) ORDER BY first LIMIT 1", (source, step),
        ).fetchone()  # fmt: skip

    def last_numbers(self) -> tuple[int, int]:
        """The highest episode number and revision so far."""
        (number,) = self._db.execute("SELECT max(number) FROM episodes").fetchone()
        (revision,) = self._db.execute("SELECT max(revision) FROM episodes").fetchone()  # each by its own index
        return number or 0, revision or 0

    def catalog(self, since: int, limit: int) -> tuple[int, list[list[Any]]]:
        """(revision, rows in the order of EpisodeInfo): the `limit` oldest changes after `since`."""
        names = ", ".join(EpisodeInfo._fields)
        sql = f"SELECT revision, {names} FROM episodes WHERE revision > ? ORDER BY revision LIMIT ?"
        rows = self._db.execute(sql, (since, limit)).fetchall()
        return (rows[-1][0] if rows else since), [list(row[1:]) for row in rows]

    def phases(self) -> dict[str, int]:
        """{phase: steps}."""
        return dict(self._db.execute("SELECT phase, steps FROM phases").fetchall())

    def lost_counts(self) -> dict[str, int]:
        """How many records of a session are lost, where any is."""
        return dict(self._db.execute("SELECT session, count(*) FROM lost GROUP BY session").fetchall())

    def outcomes(self, episode: str) -> list[Outcome]:
        """All outcomes of an episode, in the order of their arrival."""
        sql = "SELECT episode, success, discard, judged_by FROM outcomes WHERE episode = ? ORDER BY rowid"
        return [
            Outcome(id, None if success is None else bool(success), bool(discard), judged_by)
            for id, success, discard, judged_by in self._db.execute(sql, (episode,))
        ]

    def outcome_count(self, episode: str, most: int) -> int:
        """How many outcomes an episode has; no more than `most` are counted."""
        counted = "SELECT count(*) FROM (SELECT 1 FROM outcomes WHERE episode = ? LIMIT ?)"
        (count,) = self._db.execute(counted, (episode, most)).fetchone()
        return count

    def next_said(self, session: str) -> int:
        """The number of the next outcome of a session, which has no other records."""
        (last,) = self._db.execute("SELECT max(seq) FROM outcomes WHERE session = ?", (session,)).fetchone()
        return 0 if last is None else last + 1

    # -- numbers that never go back
    def directives(self) -> dict[int, dict[str, Any]]:
        rows = self._db.execute("SELECT number, body FROM directives ORDER BY number")
        return {number: json.loads(body) for number, body in rows}

    def has_weights(self, sha256: str) -> bool:
        """Whether this file was ever published."""
        return self._db.execute("SELECT 1 FROM weights WHERE sha256 = ? LIMIT 1", (sha256,)).fetchone() is not None

    def weights(self, count: int) -> list[dict[str, Any]]:
        """The newest versions, the newest first: {version, sha256, size, update}."""
        sql = "SELECT version, sha256, size, update_ FROM weights ORDER BY version DESC LIMIT ?"
        rows = self._db.execute(sql, (count,))
        return [dict(zip(("version", "sha256", "size", "update"), row, strict=True)) for row in rows]

    def commands(self, since: int) -> list[list[Any]]:
        """[number, name, argument] of the operator's commands after `since`."""
        rows = self._db.execute(
            "SELECT number, name, argument FROM commands WHERE number > ? ORDER BY number LIMIT 100", (since,)
        )
        return [list(row) for row in rows]


def _reading(path: Path) -> sqlite3.Connection:
    """Open an index without making a file beside it, where its reader may not, or changes what he only looks at.

    SQLite reads a database with a log by a map of it, and makes that map where there is none: so it reads a copy then.
    """
    log, shared = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    if log.exists() and log.stat().st_size and not shared.exists():  # nobody writes: only a part of a folder came here
        copied = sqlite3.connect(":memory:", **CONNECTION)
        with tempfile.TemporaryDirectory() as folder, _clear(path):
            for file in (path, log):
                shutil.copyfile(file, Path(folder, file.name))
            with closing(sqlite3.connect(Path(folder, path.name))) as copy:
                copy.backup(copied)
        return copied
    way = "mode=ro" if log.exists() and shared.exists() else "immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{way}", uri=True, **CONNECTION)


@contextmanager
def _clear(path: Path) -> Iterator[None]:
    """What damage to the index raises becomes a ConfigError; what a failing disk raises goes on."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in DISK:
            raise
        raise _damaged(path, str(error)) from None
    except (ValueError, TypeError, MemoryError, OverflowError) as error:
        raise _damaged(path, str(error)) from None


def _checksum(row: Sequence[Any]) -> int:
    """Of the values of a row, as SQLite gives them back."""
    values = [value if value is None or isinstance(value, str) else value + 0 for value in row]  # no True, no -0.0
    return xxhash.xxh3_64_intdigest(repr(values).encode()) >> 1  # SQLite has no unsigned numbers


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is damaged ({reason}): take a copy of the run's folder, or begin another run_dir")
