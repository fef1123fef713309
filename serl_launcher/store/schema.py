"""Defines the SQLite tables of the store's index, and what a row of them is in memory."""

from dataclasses import dataclass

FORMAT = 4
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE sources (name TEXT PRIMARY KEY, capacity INTEGER NOT NULL, tail INTEGER NOT NULL, head INTEGER NOT NULL,
    row_tail INTEGER NOT NULL, row_head INTEGER NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE sessions (session TEXT PRIMARY KEY, position INTEGER NOT NULL, actor TEXT NOT NULL, outbox TEXT NOT NULL,
    expected INTEGER NOT NULL, closed INTEGER NOT NULL, simulated INTEGER NOT NULL, steps INTEGER NOT NULL,
    owner TEXT NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE episodes (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, source TEXT NOT NULL, session TEXT NOT NULL,
    actor TEXT NOT NULL, task TEXT NOT NULL, directive INTEGER NOT NULL, phase TEXT NOT NULL, first INTEGER NOT NULL,
    first_row INTEGER NOT NULL, part_of TEXT NOT NULL, part_start INTEGER NOT NULL, steps INTEGER NOT NULL,
    reward REAL NOT NULL, intervened INTEGER NOT NULL, weights INTEGER NOT NULL, terminated INTEGER NOT NULL,
    truncated INTEGER NOT NULL, final INTEGER NOT NULL, closed INTEGER NOT NULL, success INTEGER,
    discard INTEGER NOT NULL, judged_by TEXT NOT NULL, last_reward REAL NOT NULL, continued INTEGER NOT NULL,
    revision INTEGER NOT NULL, checksum INTEGER NOT NULL) STRICT;
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
EPISODE = (  # what a row of Synced.episodes holds
    "number", "id", "source", "actor", "task", "directive", "phase", "first", "steps", "reward", "intervened",
    "weights", "terminated", "truncated", "final", "closed", "success", "discard", "judged_by", "last_reward",
    "continued",
)  # fmt: skip
NUMBERED = ("directives", "weights", "commands")  # by SQLite: the checksum is of what follows the number
TABLES = ("sources", "sessions", "episodes", "phases", "archived", "outcomes", "lost", *NUMBERED)


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
    """An episode as far as it has come; `steps` is also the index of the next step. EPISODE lists what readers see.

    What comes of an episode after it was closed from elsewhere is an episode of its own: a part of what its actor
    calls `part_of`, whose step `part_start` is its first one.
    """

    number: int
    id: str
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
