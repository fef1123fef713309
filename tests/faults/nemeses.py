"""What may befall a chaos round: each nemesis is a generator that does something, and says how long to wait before it
goes on; its last word undoes what it did."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from tests.faults.fuzzing.hostile import contents

from . import checker
from .insider import HOSTILE, Insider
from .rot import Rot, spoil
from .shim import ALLOCATE, CREATE, READ, RENAME, SYNC, UNLINK, WRITE
from .stage import Player, Stage
from .trainer import SOURCE
from .truth import Truth

Nemesis = Callable[[Stage, Random], Iterator[float]]


def _length(random: Random) -> float:
    return random.uniform(0.1, 0.9)


def _network(stage: Stage, random: Random, mode: str, **options: Any) -> Iterator[float]:
    stage.proxy.set(mode, **options)
    lasts_over_timeout = mode in ("half_open", "one_way") and random.random() < 0.1
    yield 3.6 if lasts_over_timeout else _length(random)
    stage.proxy.set("pass")


def _some(stage: Stage, random: Random, who: str) -> list[Player]:
    actor = random.choice(stage.actors)
    return {"server": [stage.server], "trainer": [stage.trainer], "actor": [actor], "all": stage.players}[who]


def _kill(stage: Stage, random: Random, who: str) -> Iterator[float]:
    for player in _some(stage, random, who):
        stage.kill(player, random.uniform(0.0, 0.3))
    yield 0.3


def _stop(stage: Stage, random: Random, who: str) -> Iterator[float]:
    stopped = _some(stage, random, who)
    for player in stopped:
        player.signal(signal.SIGSTOP)
    yield _length(random)
    for player in stopped:
        player.signal(signal.SIGCONT)


def _die(stage: Stage, random: Random, who: str) -> Iterator[float]:
    """Dies at a call, before it or in the middle of it."""
    calls, path = {
        "server": random.choice([
            (WRITE, "store/main/rows"), (WRITE, "store/main/steps"),
            (SYNC, "store/main/rows"), (SYNC, "store/main/steps"),
            (WRITE, "index.sqlite"), (SYNC, "index.sqlite"), (WRITE | SYNC, "run/store"),
            (CREATE | ALLOCATE | RENAME | SYNC, "run/store"),
        ]),
        "trainer": random.choice([(WRITE, "run/weights"), (SYNC, "run/weights"), (RENAME, "run/weights")]),
        "actor": random.choice([(WRITE, ".records"), (UNLINK | CREATE, ".records")]),
    }[who]  # fmt: skip
    assert stage.control
    stage.control.kill(calls, after=random.randint(0, 30), path=path, short=random.random() < 0.3)
    for _ in range(random.randint(5, 40)):
        yield 0.02
        if stage.control.struck:
            break  # its next life is not to die of it
    stage.control.clear()


def _fail(stage: Stage, random: Random, who: str, calls: int, error: int) -> Iterator[float]:
    """A call of one side fails, once or for a while."""
    path = ".records" if who == "actor" else random.choice(["run/store", "store/main", "index.sqlite"])
    lasts = _length(random)
    stage.sicken()
    assert stage.control
    stage.control.fail(
        calls, error, after=random.randint(0, 20), sticky=random.random() < 0.6, path=path,
        short=error == errno.ENOSPC and random.random() < 0.5,
    )  # fmt: skip
    yield lasts
    stage.control.clear()


def _full_disk(stage: Stage, random: Random) -> Iterator[float]:
    """The disk under everybody's files is full to the last block."""
    lasts, ballast = _length(random), stage.disk / "ballast"
    stage.sicken()
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        for block in (1 << 20, 4096):
            while True:
                try:
                    os.posix_fallocate(file, os.fstat(file).st_size, block)
                except OSError:
                    break
    finally:
        os.close(file)
    yield lasts
    ballast.unlink(missing_ok=True)  # it may have been drawn twice


def _twin(stage: Stage, random: Random) -> Iterator[float]:
    """Somebody starts a second client of the same name, with an outbox of its own."""
    name = random.choice(stage.actors).name
    twin = stage.join(name, outbox=f"{name}-twin{len(stage.actors)}", start=True)
    yield _length(random)
    twin.stop_file.touch()


def _late(stage: Stage, random: Random) -> Iterator[float]:
    stage.join(f"late{len(stage.actors)}", start=True)
    yield 0.1


def _insider(stage: Stage, random: Random) -> Iterator[float]:
    """Records with hostile fields, beside those of honest actors."""
    for kind in random.sample(list(HOSTILE), 6):
        insider = Insider(stage.address, stage.key_file, stage.truths, random, kind)
        for _ in range(random.randint(3, 9)):
            insider.turn()
            yield 0.05
        insider.link.close()


def _missing_index(stage: Stage, random: Random) -> Iterator[float]:
    """The index is not there when the server starts: it has to refuse, and to leave alone what is."""
    if not stage.halt(stage.server):
        return
    store, aside = stage.disk / "run/store", stage.folder / "aside"
    aside.mkdir(exist_ok=True)
    names = ["index.sqlite", *random.choice([(), ("index.sqlite-wal", "index.sqlite-shm")])]
    moved = [store / name for name in names if (store / name).exists()]
    for path in moved:
        path.rename(aside / path.name)
    before = contents(store)
    said = stage.served_apart(Insider(stage.address, stage.key_file, stage.truths, random, "start 2^40"))
    if "index.sqlite" not in said:
        stage.violations.append(f"a server without its index did not refuse, naming it: {said}")
    if changed := {path for path, _ in before.items() ^ contents(store).items()}:
        stage.violations.append(f"a server without its index changed {sorted(changed)}")
    for path in moved:
        (aside / path.name).replace(path)
    stage.go_on(stage.server)
    yield 0.1


def _bit_rot(stage: Stage, random: Random) -> Iterator[float]:
    """Bits of stored steps turn over, and back after a while: verify finds these, and no others."""
    if stage.rotten or not stage.halt(stage.server):
        return
    stage.rotten, rot = True, Rot(stage.disk / "run", SOURCE, random)
    stage.violations += rot.unseen()
    stage.go_on(stage.server)
    yield _length(random)
    was_running = stage.halt(stage.server)
    rot.mend()
    stage.rotten = False
    if was_running:
        stage.go_on(stage.server)


def _outbox_rot(stage: Stage, random: Random) -> Iterator[float]:
    """A bit of what an actor could not send yet turns over while it is dead: it loses that episode's rest, and says so.

    What it declares as lost the checker compares with what was damaged here.
    """
    stage.proxy.set("cut")
    yield _length(random)
    one, notes = random.choice(stage.actors), Truth(stage.truths / "outbox-rot.jsonl")
    if stage.halt(one):
        notes.note(spooled=checker.spooled(one.outbox))  # all of it is heard of, as it is or as lost
        for session, seq in spoil(one.outbox, random):
            notes.note(damaged=[session, seq])
        stage.go_on(one)
    stage.proxy.set("pass")


def _hang(stage: Stage, random: Random, call: str, then: str = "") -> Iterator[float]:
    """The drivers of all arms hang in a call, longer than a guard may be silent; and `then` in another one, for good:
    whoever gives up such a guard has to kill it."""
    for each in (call, then) if then else (call,):
        (stage.hangs / each).touch()
    yield random.uniform(1.5, 4.0)
    (stage.hangs / call).unlink(missing_ok=True)  # it may have been drawn twice


NEMESES: dict[str, Nemesis] = {
    **{f"kill-{who}": partial(_kill, who=who) for who in ("server", "actor", "trainer", "all")},
    **{f"stop-{who}": partial(_stop, who=who) for who in ("server", "actor", "trainer")},
    **{name: partial(_network, mode=name.replace("-", "_")) for name in ("cut", "reset", "half-open")},
    "up-only": partial(_network, mode="one_way", direction="up"),
    "down-only": partial(_network, mode="one_way", direction="down"),
    "delay": partial(_network, mode="delay", seconds=0.1), "trickle": partial(_network, mode="trickle", rate=40_000),
    "twin": _twin, "late": _late, "insider": _insider, "missing-index": _missing_index, "bit-rot": _bit_rot,
    "outbox-rot": _outbox_rot, **{f"hang-{call}": partial(_hang, call=call) for call in ("read", "write")},
    "hang-stop": partial(_hang, call="write", then="close"),
}  # fmt: skip
WITH_SHIM: dict[str, Nemesis] = {  # where there is a C compiler
    **{f"die-{who}": partial(_die, who=who) for who in ("server", "trainer", "actor")},
    **{f"full-{who}": partial(_fail, who=who, calls=WRITE, error=errno.ENOSPC) for who in ("server", "actor")},
    **{f"io-{who}": partial(_fail, who=who, calls=WRITE | SYNC | READ, error=errno.EIO) for who in ("server", "actor")},
    "sync-server": partial(_fail, who="server", calls=SYNC, error=errno.EIO),
}  # fmt: skip
ON_ARMS = {"hang-read", "hang-write", "hang-stop"}  # what is driven has another Spec than an insider says
ON_FILES = {"missing-index", "bit-rot", "outbox-rot"}  # they look at what a disk without faults holds
ON_DISK = {"full-server", "io-server", "sync-server", "full-disk"}  # they fail the learner's disk
WITH_MOUNT: dict[str, Nemesis] = {"full-disk": _full_disk}  # where a tmpfs may be mounted
