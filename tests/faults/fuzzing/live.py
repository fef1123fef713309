"""A real server in a process of its own, attacked over plain TCP: what it took, and what became of it."""

import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from serl_client import Outcome
from serl_client.client import TrainerClient

from tests.shared import oracle
from tests.shared.clients import connected
from tests.shared.servers import ServerProcess

from . import hostile
from .mutations import CORPUS, EPOCH, SPEC, encoded, segment, spoiled_frames, with_checksum

TURN = 12  # messages on one connection: after 16 bad ones it would be ignored
HELD = 256 << 20  # bytes that the server may take while it is attacked: some of the largest frames, not yet handled


class Attacked(ServerProcess):
    """The server, and the honest client that it must go on to serve."""

    def __init__(self, scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self.words = scratch / "server.log"
        super().__init__(scratch / "run", log=self.words, online=5000, demo=100)
        self._pushed = 0  # episodes
        self.honest = TrainerClient(self.address, actor="honest", spec=SPEC, outbox=scratch / "outbox")

    def __enter__(self) -> "Attacked":
        self.honest.__enter__()
        connected(self.honest)
        self.number = self.direct()
        return self

    def __exit__(self, *exception: object) -> None:
        self.honest.close()
        self.close()

    @property
    def size(self) -> tuple[int, int]:
        """(resident bytes, threads)."""
        return hostile.memory(self.process.pid), hostile.threads(self.process.pid)

    def serves(self) -> bool:
        """Whether an honest actor's episode is acknowledged, and the learner is answered."""
        self._pushed += 1
        id = f"honest-{self._pushed}"
        self.honest.push(segment(episode=id, directive=self.number, ends=True))
        self.honest.push(Outcome(id, True))
        return self.honest.drain(20) and bool(self.report())

    def refused(self) -> int:
        return self.report()["refused"]

    def messages(self, count: int, chance: Random) -> None:
        """Spoiled messages of every kind, after a good Hello of an actor or of a viewer."""
        for number in range(0, count, TURN):
            session = f"{number:032x}"
            fields = {"role": "actor", "session": session, "outbox": "o", "spec": SPEC.to_dict()} if number % 24 else {}
            with hostile.Peer(self.port) as peer:
                greeting = {**hostile.HELLO, **fields, "actor": f"hostile-{number % 50}"}
                parts = [hostile.message(hostile.header(None, **greeting))] if chance.random() < 0.9 else []
                parts += [hostile.message(*self._spoiled(chance, session)) for _ in range(TURN)]
                peer.send(b"".join(parts))
                peer.is_open(0.002)

    def _spoiled(self, chance: Random, session: str) -> list[bytes]:
        if chance.random() < 0.5:
            return spoiled_frames(chance, chance.choice(CORPUS)) or [b""]
        records = b"".join(
            with_checksum(chance, encoded(seq, segment(episode=f"{session}-{seq}", directive=self.number)))
            for seq in range(2)
        )
        named = chance.choice((session, session, EPOCH))
        return [hostile.header([["records", "uint8", [len(records)]]], type="Push", session=named), records]

    def complaints(self) -> list[str]:
        """What its log and its store say that should not be there."""
        text = self.words.read_text()
        found = [f"the server's log: {line}" for line in text.splitlines() if "a handler failed" in line][:5]
        found += ["the server's log has a traceback"] * ("Traceback" in text)
        return found + oracle.read(self.run_dir / "store").violations


def attack(count: int, seed: int, scratch: Path) -> dict[str, Any]:
    """`count` spoiled messages, and every attack of hostile.py; {outcomes, failures, ...}."""
    failures: list[str] = []
    with Attacked(scratch) as server:
        if not server.serves():
            failures.append("the server did not serve before the attack")
        store = server.run_dir / "store"
        before = hostile.contents(store)
        attacks = hostile.attack(server.port, max(2000, count))  # these have no valid record: nothing may be written
        time.sleep(1.0)
        if hostile.contents(store) != before:
            failures.append("an attack has changed the store")
        server.messages(count // 4, Random(f"{seed}/warm"))
        time.sleep(0.5)
        resident, threads = server.size
        server.messages(count - count // 4, Random(f"{seed}/live"))
        if server.process.poll() is not None or not server.serves():
            failures.append("the server does not serve any more")
        time.sleep(3.5)  # half-open handshakes end after 3 s
        grown, left = server.size
        refused, degraded = server.refused(), server.report()["degraded"]
    failures += server.complaints() + [f"the server is DEGRADED: {degraded}"] * bool(degraded)
    files = [str(path) for path in scratch.rglob("*") if path.is_file() and not path.is_relative_to(server.run_dir)]
    return {
        "outcomes": Counter(attacks=attacks, messages=count, refused=refused), "failures": failures,
        "growth": grown - resident, "threads_lost": max(0, threads - left),
        "files": [path for path in files if not path.startswith((str(scratch / "outbox"), str(server.words)))],
    }  # fmt: skip
