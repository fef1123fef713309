"""Defines the messages of the wire protocol between all processes, and the records that a Push carries.

Every field is plain msgpack data except `arrays`, which travel as raw frames. An unknown kind, a missing or an extra
field is a MessageError. Handlers are found in tables keyed by these types. Of a Hello the protocol is checked first.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import serl_client.wire as wire
from serl_client.driving import Drive, DriverUpdate
from serl_client.episode import COLUMNS, LostRecord, Outcome, QueuedRecord, Segment, Stamp
from serl_client.errors import MessageError, VersionMismatch
from serl_client.names import check_names, cleaned
from serl_client.spec import Array

PROTOCOL = (19, 19)  # the oldest and the newest version spoken here
MAX_REPORT = 8192
WORDS = ("ready", "pause", "resume", "success", "failure", "discard")  # of a Command to an actor
MAX_EARLIER = 64  # sessions that a Hello names besides its own


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens every connection. `role` is actor, learner or viewer; `earlier` lists [session, last seq] of the
    MAX_EARLIER oldest sessions before this one that still lie in this outbox; `run` is "" before the first Welcome."""

    protocol: Sequence[int]
    role: str
    actor: str
    session: str = ""
    outbox: str = ""
    run: str = ""
    spec: Mapping[str, Any] | None = None
    earlier: Sequence[Sequence[Any]] = ()
    paced: bool = False
    has_operator: bool = False


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """Tells a client what is valid now; the server sends it on each change and every second, as its heartbeat.
    `directive` {number, phase, mode, ...}; `weights` {version, sha256, size} or empty; `step_limit` is how many
    steps this session may have made in all (None: no limit); `degraded` is the reason why nothing is acknowledged."""

    directive: Mapping[str, Any]
    weights: Mapping[str, Any]
    step_limit: int | None = None
    degraded: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to Hello. `expected` is [session, next seq] of the sender's sessions; `ordinal` numbers the starts of
    all actors of the run; `max_unacknowledged` is in bytes, `state` the first StateUpdate. `spec`: of the run, the
    robot's with the extras that the algorithm gives. `history`: observations of an InferenceRequest."""

    run: str
    ordinal: int
    max_unacknowledged: int
    expected: Sequence[Sequence[Any]]
    spec: Mapping[str, Any] | None
    inference: str  # the address that answers InferenceRequest
    state: Mapping[str, Any]
    history: int = 1


@dataclass(frozen=True, slots=True)
class Push:
    """Carries encoded records of one session, in order: the bytes of all `arrays`, one after the other."""

    session: str
    arrays: Mapping[str, Array]

    @property
    def parts(self) -> list[wire.Buffer]:
        return [array.data for array in self.arrays.values()]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class Ack:
    """Says that every record of `session` below `expected` is durable; `resend`: send again from there."""

    session: str
    expected: int
    resend: bool = False
    step_limit: int | None = None


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Asks for the action at step `step`. `request`: a number that the answer repeats. `reset`: the carry begins anew.
    `seed` names the noise of this decision, so that any host draws the same. `task` is what to do, in words: the prompt
    of a policy that reads one. Raises MessageError for one that is too long.
    `arrays`: each observation, [...] or, where Welcome.history is more than 1, [history, ...]; after step 0
    `previous_action` [A]; perhaps `prefix` float32 [R, A], what is left of the chunk under way, from step `step` on.
    `committed`: how many rows of it the robot will have executed when the answer is due; 0 without a prefix."""

    step: int
    seed: int
    reset: bool
    explore: bool
    task: str
    arrays: Mapping[str, Array]
    committed: int = 0
    request: int = 0

    def __post_init__(self) -> None:
        check_names("a question's task", self.task, error=MessageError)


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """Answers the InferenceRequest `request`, of step `step`: arrays {"action": [H, A], extras}, by weights `version`.
    `reset`: a policy that remembers earlier steps began anew, because it was asked to, or had lost them."""

    step: int
    version: int
    arrays: Mapping[str, Array]
    reset: bool = False
    request: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that a client lives. `report` holds its numbers for console and status, {name: number, text, bool or None}:
    at most MAX_REPORT bytes, since the server keeps and sends on those of all clients. Raises MessageError else."""

    report: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, value in self.report.items():
            if not isinstance(value, str | int | float | None):
                raise MessageError(f"a report holds numbers, texts, bools and nil; its {name!r:.50} is none of them")


@dataclass(frozen=True, slots=True)
class Bye:
    """Says that the client leaves of its own will; its outbox keeps the undelivered records."""


@dataclass(frozen=True, slots=True)
class Over:
    """Ends the run because a process of the learner failed: the actors are told why. Answered by Done."""

    reason: str


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """Asks for a part of the weights file `sha256`: MiB number `part`, from 0 on."""

    sha256: str
    part: int
    request: int = 0


@dataclass(frozen=True, slots=True)
class WeightsChunk:
    """Carries a part of a weights file, with its `part_checksum` (weights.py): arrays {"data": uint8 [bytes]}."""

    sha256: str
    part: int
    checksum: str
    arrays: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Direct:
    """Sets the directive (learner); `steps` as in StepLimit. Answered by Done with its number."""

    body: Mapping[str, Any]
    steps: int | None
    request: int = 0


@dataclass(frozen=True, slots=True)
class StepLimit:
    """Lets paced actors bring the steps of a directive's phase to `steps` (learner); None: no limit. Not answered."""

    directive: int
    steps: int | None


@dataclass(frozen=True, slots=True)
class Publish:
    """Makes weights/<sha256>.safetensors of the run a new version (learner). Answered by Done with its number."""

    sha256: str
    size: int
    update: int
    request: int = 0


@dataclass(frozen=True, slots=True)
class Archived:
    """Lets episodes, by number, leave the store (learner): verified shards hold them. Answered by Done once durable."""

    episodes: Sequence[int]
    request: int = 0


@dataclass(frozen=True, slots=True)
class SetAside:
    """Keeps an episode, by its id, out of all batches (learner), for this reason. Answered by Done once durable."""

    episode: str
    reason: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class Sync:
    """Asks for the episodes changed since `revision` and the operator's commands since `command` (learner)."""

    revision: int
    command: int


@dataclass(frozen=True, slots=True)
class Synced:
    """Answers Sync: rows of `episodes` in the order of schema.EpisodeInfo, oldest change first; `more`: ask again."""

    revision: int
    episodes: Sequence[Sequence[Any]]
    commands: Sequence[Sequence[Any]]  # [number, name, argument]; no name: a `next` about a phase that was over
    actors: Sequence[Sequence[Any]]  # living ones: [name, why it makes no steps now ("": it may), whether it is paced]
    more: bool
    heads: Mapping[str, int] = field(default_factory=dict)  # {source: step}: these rows tell of the steps below it


@dataclass(frozen=True, slots=True)
class Command:
    """Carries an operator's command to the plan: next, hold, resume, goto, stop. `directive`: one of the phase that it
    is about, 0: none. With `actor` it is one of WORDS, which that actor gets with the number of Done as `request`, and
    reports as `heard`: docs/reference/protocol.md. Answered by Done."""

    name: str
    argument: str = ""
    request: int = 0
    actor: str = ""
    directive: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """Asked without a report, answered with one."""

    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """Says that a request was carried out. value: what the server numbered it, if it does. request: the client's."""

    value: int = 0
    request: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """Says that a request failed; `kind` names the class in errors.py. The connection goes on unless `final`;
    `request` as in Done, 0 for a message without a number."""

    kind: str
    text: str
    final: bool = False
    request: int = 0


Message = (
    Hello | Welcome | StateUpdate | Push | Ack | InferenceRequest | InferenceResponse | Heartbeat | Bye | Over
    | WeightsRequest | WeightsChunk | Direct | StepLimit | Publish | Archived | SetAside | Sync | Synced | Command
    | Drive | DriverUpdate | Status | Done | Failed
)  # fmt: skip
NUMBERED = WeightsRequest | Direct | Publish | Archived | SetAside | Command  # requests whose answer names their number
TYPES: tuple[type, ...] = Message.__args__
Part = TypeVar("Part", Segment, Stamp, Outcome, LostRecord)
PARTS: tuple[type, ...] = (Segment, Stamp, Outcome, LostRecord)  # of a Push's records
FIELDS = {kind: {f.name: f.type for f in dataclasses.fields(kind) if f.name != "arrays"} for kind in TYPES + PARTS}
_BY_NAME = {kind.__name__: kind for kind in TYPES}


def _plain(annotation: Any) -> tuple[type, ...]:
    """Return the types of a field's values, as msgpack gives them."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    origins = [typing.get_origin(part) or part for part in parts]
    return tuple({Mapping: dict, Sequence: list}.get(origin, origin) for origin in origins)


# Not of an Array: `wire` makes nothing else of one, and numpy's alias for it is no type since 2.5.
_PLAIN = {kind: {name: _plain(of) for name, of in FIELDS[kind].items() if of is not Array} for kind in FIELDS}


def encode(message: Message) -> list[wire.Buffer]:
    """Return the frames of a message. Raises MessageError for a forbidden dtype or a report that is too long."""
    kind = type(message)
    header: dict[str, Any] = {"type": kind.__name__, **{name: getattr(message, name) for name in FIELDS[kind]}}
    if header.get("request") == 0:  # peers of protocol 3 understand a Failed without it
        del header["request"]
    frames = wire.pack(header, getattr(message, "arrays", {}))
    _check_size(kind, frames)
    return frames


def decode(frames: Sequence[wire.Buffer]) -> Message:
    """Return the message in these frames. Raises MessageError or, for a Hello, VersionMismatch."""
    header, arrays = wire.unpack(frames)
    name = header.pop("type", None)
    kind = _BY_NAME.get(name) if type(name) is str else None
    if kind is None:
        raise MessageError("the message is of no known kind")
    _check_size(kind, frames)
    fields = _PLAIN[kind]
    if kind is Hello:
        _check_version(header)
    if "request" in fields:
        header.setdefault("request", 0)
    if header.keys() != fields.keys():
        raise MessageError(f"a {kind.__name__} has the fields {tuple(fields)}, not {tuple(header)}")
    for name, allowed in fields.items():
        if type(header[name]) not in allowed:
            expected = " or ".join(each.__name__ for each in allowed)
            raise MessageError(f"{name} of a {kind.__name__} should be of type {expected}")
    if "arrays" in kind.__dataclass_fields__:
        header["arrays"] = arrays
    elif arrays:
        raise MessageError(f"a {kind.__name__} carries no arrays")
    return kind(**header)


def _check_version(hello: dict[str, Any]) -> None:
    """Raise VersionMismatch for a Hello of another version: what it holds besides its protocol is unknown here."""
    said = hello.get("protocol")
    if not isinstance(said, list) or [type(number) for number in said] != [int, int]:
        raise MessageError("the protocol of a Hello is the oldest and the newest version that its sender speaks")
    low, high = said
    strange = sorted(map(str, hello.keys() ^ FIELDS[Hello].keys()))
    if high < PROTOCOL[0] or low > PROTOCOL[1] or strange:
        fields = f" (and differ in the fields {', '.join(strange)[:200]} of a Hello)" if strange else ""
        older = "the learner" if low > PROTOCOL[1] else "this client" if high < PROTOCOL[0] else "the older one"
        raise VersionMismatch(
            f"the sides speak different protocols: this client {low}-{high}, this learner {PROTOCOL[0]}-{PROTOCOL[1]}"
            f"{fields}. Install the same version on both: update {older} (`git pull && . examples/install.sh`)"
        )


def _check_size(kind: type, frames: Sequence[wire.Buffer]) -> None:
    if kind is Heartbeat and len(frames[0]) > MAX_REPORT:
        raise MessageError(f"a Heartbeat with its report has at most {MAX_REPORT} bytes, not {len(frames[0])}")


def encode_record(seq: int, record: QueuedRecord) -> list[wire.Buffer]:
    if isinstance(record, Outcome | LostRecord):
        return wire.encode_record(seq, dataclasses.asdict(record), {})
    header = {
        "episode": record.episode, "start": record.start, "task": record.task,
        "stamp": [record.stamp.directive, record.stamp.phase, record.stamp.weights_version],
        "terminated": record.terminated, "truncated": record.truncated, "extras": list(record.extras),
    }  # fmt: skip
    columns = {name: getattr(record, name) for name in ("action", *COLUMNS)}
    return wire.encode_record(seq, header, {**columns, **record.observation, **record.extras})


def records(*data: wire.Buffer) -> Iterator[tuple[int, QueuedRecord]]:
    """Yield (seq, record) of each record in `data`, at most MAX_RECORDS. Raises MessageError; checks no Spec."""
    try:
        for seq, header, arrays in wire.decode_records(*data):
            yield seq, _record(header, arrays)
    except (TypeError, KeyError, ValueError) as error:
        raise MessageError(f"this is no record: {error!r}") from None


def _record(header: dict[str, Any], arrays: dict[str, Array]) -> QueuedRecord:
    if "reason" in header or "judged_by" in header:
        kind: Any = LostRecord if "reason" in header else Outcome
        return _typed(kind(**header))
    if not all(array.ndim for array in arrays.values()):
        raise ValueError("each array of a segment is [T, ...]")
    stamp = _typed(Stamp(*header.pop("stamp")))
    extras = {name: arrays.pop(name) for name in header.pop("extras")}
    columns: dict[str, Any] = {name: arrays.pop(name) for name in ("action", *COLUMNS)}
    segment = _typed(Segment(**header, **columns, stamp=stamp, observation=arrays, extras=extras))
    return segment if segment.task.isprintable() else dataclasses.replace(segment, task=cleaned(segment.task))


def _typed(record: Part) -> Part:
    """Return the record. Raises ValueError for a field of another type."""
    for name, allowed in _PLAIN[type(record)].items():
        if type(value := getattr(record, name)) not in allowed:
            raise ValueError(f"{name} is {value!r:.100}, of another type")
    return record
