"""A real server in a process of its own, attacked over plain TCP: what it took, and what became of it."""

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from serl_client import Outcome
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection

from serl_launcher.store.index import Index
from tests.shared.common import free_port

from . import hostile
from .damage import verify
from .mutations import CORPUS, EPOCH, SPEC, resealed, sealed, segment, spoiled_frames

TURN = 12  # messages on one connection: after 16 bad ones it would be ignored
HELD = 256 << 20  # bytes that the server may take while it is attacked: some of the largest frames, not yet handled


SERVE = """
import logging, sys
from pathlib import Path
from serl_launcher.store.server import serve
logging.basicConfig(level=logging.INFO)
run_dir, public = Path(sys.argv[1]), "tcp://127.0.0.1:" + sys.argv[2]
sources = {"online": 5000, "demo": 100}
serve(run_dir, sources, public=public, local=f"ipc://{run_dir}/server", inference="tcp://127.0.0.1:1")
"""


class Attacked:
    """The server, and the honest clients that it must go on to serve."""

    def __init__(self, scratch: Path) -> None:
        self.run_dir, self.log = scratch / "run", scratch / "server.log"
        self.run_dir.mkdir(parents=True)
        self.port = free_port()
        command = [sys.executable, "-c", SERVE, str(self.run_dir), str(self.port)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stderr=log)
        self.pid = self.process.pid
        self.learner: Any = Connection(f"ipc://{self.run_dir}/server", m.Hello(m.PROTOCOL, "learner", "trainer"))
        self.honest = TrainerClient(
            f"tcp://127.0.0.1:{self.port}", actor="honest", spec=SPEC, outbox=scratch / "outbox"
        )
        self.episodes = 0

    def __enter__(self) -> "Attacked":
        self.honest.__enter__()
        end = time.monotonic() + 30
        while not self.honest.connected and time.monotonic() < end:
            time.sleep(0.02)
        directive = {"mode": "collect", "into": "online", "phase": "practise"}
        self.number = self.learner.call(m.Direct(directive, None), 10).value
        return self

    def __exit__(self, *exception: object) -> None:
        self.honest.close()
        self.learner.close()
        self.process.terminate()
        self.process.wait(20)

    def serves(self) -> bool:
        """Whether an honest actor's episode is acknowledged, and the learner is answered."""
        self.episodes += 1
        id = f"honest-{self.episodes}"
        self.honest.push(segment(episode=id, directive=self.number, ends=True))
        self.honest.push(Outcome(id, True))
        return self.honest.drain(20) and bool(self.learner.call(m.Status(), 20).report)

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
            resealed(chance, sealed(seq, segment(episode=f"{session}-{seq}", directive=self.number)))
            for seq in range(2)
        )
        named = chance.choice((session, session, EPOCH))
        return [hostile.header([["records", "uint8", [len(records)]]], type="Push", session=named), records]


def attack(count: int, seed: int, scratch: Path) -> dict[str, Any]:
    """`count` spoiled messages, and every attack of hostile.py; {outcomes, failures, ...}."""
    failures: list[str] = []
    outcomes: Counter[str] = Counter()
    with Attacked(scratch) as server:
        if not server.serves():
            failures.append("the server did not serve before the attack")
        store = server.run_dir / "store"
        before = hostile.contents(store)
        for strike in hostile.ATTACKS:  # these have no valid record: nothing may be written
            strike(server.port, max(2000, count))
            outcomes["attacks"] += 1
        time.sleep(1.0)
        if hostile.contents(store) != before:
            failures.append("an attack has changed the store")
        server.messages(count // 4, Random(f"{seed}/warm"))
        time.sleep(0.5)
        resident, threads = hostile.memory(server.pid), hostile.threads(server.pid)
        server.messages(count - count // 4, Random(f"{seed}/live"))
        outcomes["messages"] = count
        if server.process.poll() is not None or not server.serves():
            failures.append("the server does not serve any more")
        time.sleep(3.5)  # half-open handshakes end after 3 s
        growth = hostile.memory(server.pid) - resident
        lost = threads - hostile.threads(server.pid)
        report = server.learner.call(m.Status(), 20).report
    outcomes["refused"] = report["refused"] if isinstance(report["refused"], int) else sum(report["refused"].values())
    text = server.log.read_text()
    failures += [f"the server's log: {line}" for line in text.splitlines() if "a handler failed" in line][:5]
    failures += ["the server's log has a traceback"] * ("Traceback" in text)
    if report["degraded"]:
        failures.append(f"the server is DEGRADED: {report['degraded']}")
    index = Index(store / "index.sqlite")
    if damaged := verify(store, index):
        failures.append(f"{damaged} steps of the store are damaged")
    index.close()
    files = [str(path) for path in scratch.rglob("*") if path.is_file() and not path.is_relative_to(server.run_dir)]
    strange = [path for path in files if not path.startswith((str(scratch / "outbox"), str(server.log)))]
    return {
        "outcomes": outcomes,
        "failures": failures,
        "growth": growth,
        "threads_lost": max(0, lost),
        "files": strange,
    }
