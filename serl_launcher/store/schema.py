"""Defines the SQLite tables of the store's index, and what a row of them is in memory.

The dataclasses Source, Session and Episode are tables: their fields are its columns, in this order, and FORMAT changes
with them.
"""

import math
from dataclasses import dataclass, fields
from textwrap import fill
from typing import Annotated, NamedTuple

FORMAT = 4
Unique = Annotated[str, "UNIQUE"]


@dataclass
class Source:
    """The two rings of a physical source: steps [tail, head) and rows [row_tail, row_head)."""

    name: str
    capacity: int
    tail: int = 0
    head: int = 0
    row_tail: int = 0
    row_head: int = 0


@dataclass
class Session:
    """One life of one actor: `expected` is the next seq, `position` the order of the first Hello, `simulated` whether
    its clock is, `steps` how many it brought."""

    session: str
    position: int
    actor: str
    outbox: str
    expected: int = 0
    closed: bool = False
    simulated: bool = False
    steps: int = 0
    owner: str = ""  # the key that named it first; "" where there were no keys


@dataclass
class Episode:
    """An episode as far as it has come; `steps` is also the index of the next step. Readers see an EpisodeInfo of it.

    What comes of an episode after it was closed from elsewhere is an episode of its own: a part of what its actor
    calls `part_of`, whose step `part_start` is its first one.
    """

    number: int
    id: Unique
    source: str
    session: str
    actor: str
    task: str
    directive: int
    phase: str
    first: int
    first_row: int
    part_of: str
    part_start: int = 0
    steps: int = 0
    reward: float = 0.0
    intervened: int = 0
    weights: int = 0
    terminated: bool = False
    truncated: bool = False
    final: bool = False
    closed: bool = False
    success: bool | None = None
    discard: bool = False
    judged_by: str = ""
    last_reward: float = 0.0  # of its newest step
    continued: bool = False  # it has a later part, or its rest was lost
    revision: int = 0
    latest = -math.inf  # time of the newest step that came since this process began; no column


class EpisodeInfo(NamedTuple):
    """What the server reports of an Episode: a row of Synced.episodes."""

    number: int
    id: str
    source: str
    actor: str
    task: str
    directive: int
    phase: str
    first: int
    steps: int
    reward: float
    intervened: int
    weights: int
    terminated: bool
    truncated: bool
    final: bool
    closed: bool
    success: bool | None
    discard: bool
    judged_by: str
    last_reward: float
    continued: bool


TABLE: dict[type, str] = {Source: "sources", Session: "sessions", Episode: "episodes"}
COLUMNS = {
    int: "INTEGER NOT NULL", bool: "INTEGER NOT NULL", float: "REAL NOT NULL", str: "TEXT NOT NULL",
    Unique: "TEXT UNIQUE NOT NULL", bool | None: "INTEGER",
}  # fmt: skip


def _table(kind: type) -> str:
    """Return the SQL that makes the table of a dataclass. Its first field is the key, and the last column a checksum.

    The lines are those of all stores of this FORMAT, because SQLite keeps the text, and a store's text is compared.
    """
    key, *columns = [f"{each.name} {COLUMNS[each.type]}" for each in fields(kind)]
    columns = [key.replace("NOT NULL", "PRIMARY KEY"), *columns, "checksum INTEGER NOT NULL"]
    whole = ", ".join(column.replace(" ", "\N{NO-BREAK SPACE}") for column in columns)  # no line ends within a column
    lines = fill(f"CREATE TABLE {TABLE[kind]} ({whole}) STRICT;", 120, subsequent_indent="    ")
    return lines.replace("\N{NO-BREAK SPACE}", " ")


SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
{_table(Source)}
{_table(Session)}
{_table(Episode)}
CREATE INDEX episodes_by_revision ON episodes (revision);
CREATE INDEX episodes_by_first ON episodes (source, first);
CREATE INDEX episodes_by_session ON episodes (session);
CREATE INDEX episodes_open ON episodes (closed) WHERE closed = 0;
CREATE INDEX episodes_parts ON episodes (part_of) WHERE part_start > 0;
CREATE TABLE phases (phase TEXT PRIMARY KEY, steps INTEGER NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE archived (number INTEGER PRIMARY KEY, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE outcomes (session TEXT, seq INTEGER, episode TEXT NOT NULL, success INTEGER, discard INTEGER NOT NULL,
    judged_by TEXT NOT NULL, at REAL NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (session, seq)) STRICT;
CREATE INDEX outcomes_by_episode ON outcomes (episode);
CREATE TABLE lost (session TEXT, seq INTEGER, reason TEXT NOT NULL, at REAL NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (session, seq)) STRICT;
CREATE TABLE directives (number INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL, at REAL NOT NULL,
    checksum INTEGER NOT NULL) STRICT;
CREATE TABLE weights (version INTEGER PRIMARY KEY AUTOINCREMENT, sha256 TEXT NOT NULL, size INTEGER NOT NULL,
    update_ INTEGER NOT NULL, at REAL NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE INDEX weights_by_sha256 ON weights (sha256);
CREATE TABLE commands (number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, argument TEXT NOT NULL,
    actor TEXT NOT NULL, at REAL NOT NULL, checksum INTEGER NOT NULL) STRICT;
"""
NUMBERED = ("directives", "weights", "commands")  # by SQLite: the checksum is of what follows the number
TABLES = (*TABLE.values(), "phases", "archived", "outcomes", "lost", *NUMBERED)
