"""Compares what lies in a store with what its actors noted of their own work; it knows the files, and none of the code.

It imports nothing of the product: layout and checksums are written here a second time, from what the contract and the
files themselves say. A step that was evicted must have left with its whole episode, and the oldest episodes first.
"""

import hashlib
import json
import sqlite3
import struct
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tests.shared.oracle import Found, opened

from .truth import notes

COMMANDS, WEIGHTS = "number, name FROM commands", "version, sha256 FROM weights"
RECORD = struct.Struct("<4sIQQQ")  # magic, header length, body length, seq, checksum


@dataclass
class Report:
    """What was found; `produced` and `acked` are records, the next three steps and outcomes."""

    produced: int = 0
    acked: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass
class Life:
    """One start of one actor, as it noted it."""

    actor: str
    life: int
    session: str
    records: dict[int, dict[str, Any]]
    acked: int = 0  # the highest watermark that was heard
    spooled: int = 0  # records that lay in the outbox when it was killed, and before
    drained: bool = False


def check(
    store: Path, truths: Sequence[Path], outboxes: Iterable[Path], archived: Collection[str],
    strangers: Collection[str] = (),
) -> Report:  # fmt: skip
    """Everything that is wrong with a store whose server has ended, and with outboxes whose actors have drained;
    `archived` are the sources that an episode leaves only when the index says that it is archived. What the keys of
    `strangers` have brought was noted by nobody."""
    report, lives = Report(), _lives(truths)
    report.produced = sum(len(life.records) for life in lives.values())
    report.acked = sum(life.acked for life in lives.values())
    if not (store / "index.sqlite").exists():
        report.violations.append("there is no store")
        return report
    with opened(store) as index:
        damaged = {tuple(note["damaged"]) for path in truths for note in notes(path) if "damaged" in note}
        found = Found(store, index, report.violations)
        found.forget(strangers)
        found.archived |= {number for path in truths for note in notes(path) for number in note.get("archiving", ())}
        _take_losses(found, lives, damaged, report)
        compare(found, lives, archived, report)
        for path in truths:
            check_numbers(index, notes(path), path.name, report)
        newest = index.execute("SELECT sha256 FROM weights ORDER BY version DESC LIMIT 1").fetchone()
        check_weights(store.parent / "weights", newest or (), report)
    for outbox in outboxes:
        if left := [file.name for file in outbox.glob("*.records")]:
            report.violations.append(f"{outbox} still holds {left}")
    return report


def compare(found: Found, lives: dict[str, Life], archived: Collection[str], report: Report) -> None:
    """A store with what the lives of actors noted of their records."""
    _check_watermarks(found, lives, report)
    _check_records(found, lives, archived, report)
    _check_outcomes(found, lives, report)


def spooled(outbox: Path) -> dict[str, int]:
    """{session: end} of the whole records that lie in an outbox whose actor is dead; they have to arrive."""
    ends: dict[str, int] = {}
    for file in sorted(outbox.glob("*.records")):
        _, session, first = file.stem.split("-")
        data, seq, begin = file.read_bytes(), int(first), 0
        if ends.setdefault(session, seq) != seq:
            continue
        while len(data) >= begin + RECORD.size:
            magic, _, length, number, checksum = RECORD.unpack_from(data, begin)
            body = data[begin + RECORD.size : begin + RECORD.size + length]
            whole = magic == b"RTK1" and len(body) == length and number == seq
            if not whole or xxhash.xxh3_64_intdigest(body, seed=seq) != checksum:
                break
            begin, seq = begin + RECORD.size + length, seq + 1
        ends[session] = seq
    return ends


def _lives(truths: Iterable[Path]) -> dict[str, Life]:
    lives: dict[str, Life] = {}
    heard: dict[str, int] = defaultdict(int)
    lay: dict[str, int] = defaultdict(int)
    for path in truths:
        life = None
        for note in notes(path):
            if "session" in note:
                life = lives[note["session"]] = Life(note["actor"], note["life"], note["session"], {})
            elif "seq" in note and life:
                life.records[note["seq"]] = note
            elif "acked" in note:
                session, expected = note["acked"]
                heard[session] = max(heard[session], expected)
            elif "spooled" in note:
                for session, end in note["spooled"].items():
                    lay[session] = max(lay[session], end)
            elif "drained" in note and life:
                life.drained = note["drained"]
    for session, life in lives.items():
        life.acked, life.spooled = heard[session], lay[session]
    return lives


def _take_losses(found: Found, lives: dict[str, Life], damaged: Collection[tuple[str, int]], report: Report) -> None:
    """An actor may declare as lost what was damaged in its outbox, and the rest of that episode; nobody has to keep
    that any more. `damaged` are (session, seq)."""
    declared = set(found.lost)
    for life in lives.values():
        is_cut = False
        for seq, note in sorted(life.records.items()):
            is_damaged, start = (life.session, seq) in damaged, note.get("start")
            is_cut = is_damaged or (is_cut and start != 0)
            if (life.session, seq) in declared and (is_damaged or (is_cut and start)):
                declared.remove((life.session, seq))
                life.records[seq] = {"lost": True}
    report.lost += len(declared)
    report.violations += [f"record {seq} of session {session} was declared lost" for session, seq in sorted(declared)]


def _check_watermarks(found: Found, lives: dict[str, Life], report: Report) -> None:
    """What was acknowledged, what lay in an outbox and what a drained actor made is there, and nothing beyond."""
    for life in lives.values():
        state = found.sessions.get(life.session)
        expected = state["expected"] if state else 0
        has_to_come = max(life.acked, life.spooled, len(life.records) if life.drained else 0)
        if expected < has_to_come:
            report.lost += has_to_come - expected
            report.violations.append(
                f"{life.actor} life {life.life}: {life.acked} records were acknowledged, {life.spooled} lay in the "
                f"outbox, {len(life.records)} were made (drained: {life.drained}); the store has {expected}"
            )
        if expected > len(life.records):
            report.violations.append(
                f"{life.actor} life {life.life}: {expected} records are there of {len(life.records)}"
            )
    if strangers := set(found.sessions) - set(lives):
        report.violations.append(f"sessions that nobody made: {strangers}")


def _check_records(found: Found, lives: dict[str, Life], archived: Collection[str], report: Report) -> None:
    """Each delivered segment's steps are there once, in order, in their own episode, unless that was evicted whole."""
    by_number = {row["number"]: row for row in found.episodes.values()}
    if strangers := set(found.steps) - set(by_number):
        report.violations.append(f"steps of episodes {strangers} that are not in the index")
    for episode in found.episodes.values():
        if episode["session"] not in lives:
            continue
        delivered = [
            note for seq, note in sorted(lives[episode["session"]].records.items())
            if seq < found.sessions[episode["session"]]["expected"] and "steps" in note
            and note["episode"] == episode["part_of"]
        ]  # fmt: skip
        _check_episode(found, episode, delivered, report)
        is_kept = episode["source"] in archived and episode["number"] not in found.archived
        if is_kept and not found.is_live(episode):
            report.lost += episode["steps"]
            report.violations.append(f"episode {episode['id']} left the store before it was archived")
    _check_order(found, lives, report)


def _check_episode(found: Found, episode: Mapping[str, Any], delivered: list[dict[str, Any]], report: Report) -> None:
    id, wanted = episode["id"], [hash for note in delivered for hash in note["steps"]]
    parts = found.parts[episode["part_of"]]
    is_last = episode["number"] == parts[-1]["number"]
    follows = [row["part_start"] for row in parts if row["number"] > episode["number"]][:1] or [len(wanted)]
    wanted = wanted[episode["part_start"] : follows[0]]
    ends = delivered[-1]["ends"] if delivered and is_last else ""
    is_closed = bool(found.sessions[episode["session"]]["closed"])
    flags = {name: bool(episode[name]) for name in ("terminated", "truncated", "final", "closed")}
    cut = not ends and (flags["closed"] or not is_last)
    due = {
        "terminated": ends == "terminated", "truncated": ends == "truncated" or cut, "final": bool(ends),
        "closed": bool(ends) or cut,
    }  # fmt: skip
    if episode["steps"] != len(wanted) or flags != due or (is_closed and not flags["closed"]):
        report.violations.append(
            f"episode {id}: {episode['steps']} steps, {flags}; its actor sent {len(wanted)}, ending by {ends or 'none'}"
        )
    steps = found.steps.get(episode["number"], [])
    if not found.is_live(episode):
        return
    seen = Counter(step.index for step in steps)
    missing, twice = set(range(len(wanted))) - set(seen), sum(count - 1 for count in seen.values())
    report.lost += len(missing)
    report.duplicated += twice
    if missing or twice or [step.index for step in steps] != sorted(seen):
        report.violations.append(f"episode {id}: steps {sorted(missing)} are missing, {twice} are there twice")
    if [step.index for step in steps] != sorted(step.index for step in steps):
        report.reordered += 1
        report.violations.append(f"episode {id}: its steps lie in the order {[step.index for step in steps]}")
    for step in steps:
        if step.index < len(wanted) and step.hash != wanted[step.index]:
            report.violations.append(
                f"episode {id}, step {step.index} is not what was sent: its row comes from (seed, actor, life, seq, "
                f"row) {step.origin}"
            )


def _check_order(found: Found, lives: dict[str, Life], report: Report) -> None:
    """The episodes that went through one outbox lie in the order in which they were made, and none is missing."""
    made: dict[tuple[str, str], list[str]] = defaultdict(list)  # of each outbox and source
    for life in sorted(lives.values(), key=lambda life: life.life):
        if life.session not in found.sessions:
            continue
        state = found.sessions[life.session]
        sent = [note for seq, note in sorted(life.records.items()) if seq < state["expected"] and "steps" in note]
        for id in dict.fromkeys(note["episode"] for note in sent):
            if id in found.episodes:
                made[state["outbox"], found.episodes[id]["source"]].append(id)
                continue
            count = sum(len(note["steps"]) for note in sent if note["episode"] == id)
            report.lost += count
            report.violations.append(f"episode {id} of {count} steps is not in the index")
    for ids in made.values():
        firsts = [found.episodes[id]["first"] for id in ids]
        for before, after, id in zip(firsts, firsts[1:], ids[1:], strict=False):
            if after <= before:
                report.reordered += 1
                report.violations.append(f"episode {id} begins at step {after}, and the one before it at {before}")


def _check_outcomes(found: Found, lives: dict[str, Life], report: Report) -> None:
    """Every delivered outcome is kept once, and the operator's latest is valid; without one, the judge's."""
    sent = [row for row in found.outcomes if not row["judged_by"].startswith("learner: ")]  # it sets episodes aside
    kept = Counter((row["session"], row["seq"]) for row in sent)
    valid: dict[str, list[Any]] = {}
    for life in lives.values():
        expected = found.sessions[life.session]["expected"] if life.session in found.sessions else 0
        for seq, note in sorted(life.records.items()):
            if "outcome" not in note or seq >= expected:
                continue
            if (count := kept.pop((life.session, seq), 0)) != 1:
                report.lost += count == 0
                report.duplicated += max(0, count - 1)
                report.violations.append(f"outcome {seq} of {life.actor} life {life.life} is there {count} times")
            if note["outcome"][2] == "operator" or valid.get(note["episode"], [0, 0, ""])[2] != "operator":
                valid[note["episode"]] = note["outcome"]
    if kept:
        report.violations.append(f"outcomes that nobody sent: {list(kept)}")
    for id, (success, discard, by) in valid.items():
        for row in found.parts[id]:
            there = [None if row["success"] is None else bool(row["success"]), bool(row["discard"]), row["judged_by"]]
            if there != [success, discard, by]:
                said = [success, discard, by]
                report.violations.append(f"the outcome of {row['id']} is {there}, and was said to be {said}")


def check_weights(folder: Path, newest: Collection[str], report: Report) -> None:
    """The files of the newest versions are there with their parts' checksums, and each file is what its name says."""
    for sha256 in {path.stem for path in folder.glob("*.safetensors")} | set(newest):
        path = folder / f"{sha256}.safetensors"
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            report.violations.append(f"the weights {sha256[:8]} are damaged, or not there")
        elif sha256 in newest and path.with_suffix(".checksums").read_bytes() != _part_checksums(path):
            report.violations.append(f"the checksums of the weights {sha256[:8]} are damaged")


def _part_checksums(path: Path) -> bytes:
    data = path.read_bytes()
    places = [f"{path.stem}/{len(data)}/{i}".encode() for i in range(-(-len(data) // (1 << 20)))]
    seeds = map(xxhash.xxh3_64_intdigest, places)
    return b"".join(xxhash.xxh3_128_digest(data[i << 20 : (i + 1) << 20], seed) for i, seed in enumerate(seeds))


def check_numbers(index: sqlite3.Connection, said: Iterable[Mapping[str, Any]], by: str, report: Report) -> None:
    """Numbers that were given for directives, commands and weights are there, name what they named, and only grow."""
    directives = {number: json.loads(body) for number, body in index.execute("SELECT number, body FROM directives")}
    commands, weights = (dict(index.execute(f"SELECT {words}").fetchall()) for words in (COMMANDS, WEIGHTS))
    left = "SELECT number FROM episodes WHERE first < (SELECT tail FROM sources WHERE name = source)"  # the store
    archived, newest = {row[0] for row in index.execute(f"SELECT number FROM archived UNION {left}")}, Counter[str]()
    for note in said:
        if not set(note.get("archived", ())) <= archived:
            report.violations.append("episodes whose archiving was answered are not archived")
        version, sha256 = note.get("published") or note.get("weights") or (0, "")
        for kind, number, value, there in (
            ("directive", note.get("directive", 0), note.get("body"), directives),
            ("command", note.get("command", 0), note.get("body"), commands), ("weights", version, sha256, weights),
        ):  # fmt: skip
            if number and (there.get(number) != value or number <= newest[kind]):
                was = f"is {there.get(number)}, and was answered for {value} after {newest[kind]}"
                report.violations.append(f"{by}: {kind} {number} {was}")
            newest[kind] = max(newest[kind], number)
