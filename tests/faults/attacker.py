"""Tries everything that one valid key of an actor opens, by turns, until it is killed. A program: ADDRESS KEY TRUTHS,
where TRUTHS is the folder of what honest actors note of their work, so that it knows their sessions and episodes.
Without them it only computes.

It keeps to some sessions, so that the limit of a key's names does not end its work. Each turn is a line: what it tried,
and how often.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import zmq
from serl_client import Feature, Outcome, Spec, wire
from serl_client import messages as m
from serl_client.episode import LostRecord, QueuedRecord, Segment
from serl_client.errors import TrainerError
from serl_client.keys import Key

from tests.faults.computing import compute
from tests.faults.fuzzing import hostile
from tests.faults.fuzzing.mutations import BOMBS, CORPUS, spoiled_frames
from tests.faults.insider import HOSTILE, LENGTH
from tests.faults.proxy import Proxy
from tests.shared.clients import RawActor
from tests.shared.common import STATE
from tests.shared.data import blank_segment, changed

SPEC = Spec(
    {STATE: Feature((8,)), "observation.images.eye": Feature((64, 64, 3), "uint8")},
    Feature((2,), low=-np.ones(2), high=np.ones(2)), fps=30.0,
)  # fmt: skip
TURN_S = 2.0  # of one kind
SLOTS = 16  # sessions that it keeps to, each of an actor of its own
AHEAD = 12_000  # records that are not acknowledged
CROWD = 64  # connections that each want much
MANY = 300  # that want nothing
STALL = 19 << 20  # bytes of a message that does not end
MIB = 1 << 20

Make = Callable[[RawActor], list[QueuedRecord]]


class Attacker:
    def __init__(self, address: str, key: Path, truths: Path, random: Random) -> None:
        self._address, self._file, self._key, self._truths, self._random = address, key, Key.read(key), truths, random
        self._slots = [(f"{self._key.name}/{slot}", self._id(), self._id()) for slot in range(SLOTS)]
        self._inference, self._open, self._made = "", ExitStack(), itertools.count()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * MANY)
        self._kinds: dict[str, Callable[[], Iterator[None]]] = {
            **{name: partial(self._pushes, make) for name, make in self._records().items()},
            "Hellos": self._hellos, "connections": self._connections, "strangers": self._strangers,
            "wrong handshakes": self._handshakes, "huge messages": self._huge, "full windows": self._windows,
            "messages that do not end": self._endless, "answers that nobody reads": self._unread,
            "the learner's words": self._forged, "garbage": self._garbage, "what is of others": self._stale,
            "questions": self._questions, "wrong questions": self._wrong_questions,
        }  # fmt: skip

    def run(self) -> Iterator[tuple[str, int]]:
        """Take a turn of each kind, in another order each time: (what, how often), for ever."""
        while True:
            for name in self._random.sample(list(self._kinds), len(self._kinds)):
                yield name, self._turn(self._kinds[name]())

    def _turn(self, kind: Any) -> int:
        count, end = 0, time.monotonic() + TURN_S
        with self._open, closing(kind), suppress(TrainerError, OSError, zmq.ZMQError):  # it is kept out, or cut
            for _ in kind:
                count += 1
                if time.monotonic() > end:
                    break
        return count

    # -- connections
    def _id(self) -> str:
        return self._random.randbytes(16).hex()

    def _actor(self, slot: int | None = None, address: str = "") -> RawActor:
        """One of the slots, welcomed. Raises TrainerError."""
        name, session, outbox = self._slots[self._random.randrange(SLOTS) if slot is None else slot]
        one = RawActor(address or self._address, SPEC, name, session=session, outbox=outbox, key=self._file)
        welcome = self._open.enter_context(one).link.hello(3.0)
        self._inference = welcome.inference.replace("*", "127.0.0.1")
        one.expected = {session: expected for session, expected in welcome.expected}[session]
        return one

    def _hello(self, **changes: Any) -> m.Hello:
        fields: dict[str, Any] = {
            "role": "actor", "actor": f"{self._key.name}/{next(self._made)}", "session": self._id(),
            "outbox": self._id(), "spec": SPEC.to_dict(),
        }  # fmt: skip
        return m.Hello(m.PROTOCOL, **{**fields, **changes})

    def _dealer(self, address: str = "", hello: m.Hello | None = None) -> zmq.Socket:
        """A connection that is never read, and says Hello."""
        socket = self._open.enter_context(self._context.socket(zmq.DEALER))
        options = {
            zmq.LINGER: 0, zmq.SNDHWM: 100, zmq.RCVHWM: 1, zmq.RCVBUF: 4096, zmq.RECONNECT_IVL: -1,
            zmq.CURVE_PUBLICKEY: self._key.public.encode(), zmq.CURVE_SECRETKEY: self._key.secret.encode(),
            zmq.CURVE_SERVERKEY: self._key.server.encode(),
        }  # fmt: skip
        for option, value in options.items():
            socket.set(option, value)
        socket.connect(address or self._address)
        self._say(socket, hello or self._hello())
        return socket

    def _say(self, socket: zmq.Socket, said: m.Message | list[bytes]) -> None:
        frames = said if isinstance(said, list) else wire.joined(m.encode(said))
        try:
            socket.send_multipart(frames or [b""], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            time.sleep(0.001)

    def _others(self) -> tuple[str, str, str]:
        """(session, episode, name) of an honest actor, the newest."""
        path = self._random.choice(sorted(self._truths.glob("*.jsonl")))
        notes = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
        episodes = [note["episode"] for note in notes if "episode" in note]
        return notes[0]["session"], (episodes or ["none"])[-1], notes[0]["actor"]

    # -- records
    def _pushes(self, make: Make) -> Iterator[None]:
        while True:
            one = self._actor()
            seq = one.expected
            while len(one.failed) < 12 and one.link.is_open:  # then it would soon be ignored
                failures, records = len(one.failed), make(one)
                one.push(seq, *records)
                seq += len(records)
                yield
                while seq - one.hear() > AHEAD and len(one.failed) == failures:
                    time.sleep(0.001)
                    yield
                if len(one.failed) > failures or any(resend for _, resend in one.acks):
                    seq = one.expected
                one.acks.clear()

    def _records(self) -> dict[str, Make]:
        return {
            "short episodes": lambda one: [self._segment(one, ends="terminated") for _ in range(50)],
            "long episodes": lambda one: [self._segment(one, 100, ends="truncated")],
            "episodes that do not end": lambda one: [self._segment(one)],
            "verdicts": lambda one: [Outcome(self._own(one, i % 100), i % 2 == 0) for i in range(5_000)],
            "verdicts on others": lambda one: [self._verdict(self._others()[1])],
            "episodes of others": lambda one: [self._segment(one, episode=self._others()[1])],
            "values of an insider": self._insider,
            "values beyond limits": self._beyond,
            "lost records": lambda one: [
                record for i in range(100) for record in (self._segment(one), LostRecord(f"reason {next(self._made)}"))
            ],
            "many texts": lambda one: [
                Outcome(self._id(), True), Outcome(self._own(one, 0), True, judged_by=self._id()),
                self._segment(one, ends="truncated", task=self._id()),
            ],
            "evaluations": self._evaluation,
        }  # fmt: skip

    def _own(self, one: RawActor, number: int | None = None) -> str:
        return f"{one.link.greeting.actor}-{one.session[:8]}-{next(self._made) if number is None else number:06d}"

    def _segment(
        self, one: RawActor, steps: int = 1, *, ends: str = "", episode: str = "", task: str = "", **stamp: Any
    ) -> Segment:
        told = one.link.notice
        says = {"directive": told.directive.get("number", 0), "phase": told.directive.get("phase", "")}
        says["weights"] = told.weights.get("version", 0)
        made = blank_segment(SPEC, episode or self._own(one), 0, steps, ends=ends, **{**says, **stamp})
        return replace(made, task=task or made.task)

    def _verdict(self, episode: str) -> Outcome:
        by = self._random.choice(["judge", "operator", "learner: it is set aside", "x"])
        return Outcome(episode, self._random.random() < 0.5, self._random.random() < 0.3, by)

    def _insider(self, one: RawActor) -> list[QueuedRecord]:
        honest = self._segment(one, LENGTH)
        goes_on = replace(honest, start=LENGTH)
        return list[QueuedRecord]((honest, replace(goes_on, **self._random.choice([*HOSTILE.values()])(goes_on))))

    def _beyond(self, one: RawActor) -> list[QueuedRecord]:
        column = self._random.choice([STATE, "reward", "time", "action"])
        value = self._random.choice([3e38, -1e30, 1e12, 1e7])
        return [changed(self._segment(one, LENGTH, ends="truncated"), column, value)]

    def _evaluation(self, one: RawActor) -> list[QueuedRecord]:
        """Successes of one step: of the evaluation that there is, a few; and of what is none."""
        number = one.link.notice.directive.get("number", 1)
        lie = {
            "directive": self._random.randint(1, number + 1),
            "phase": "evaluate",
            "weights": self._random.randint(0, 3),
        }
        is_real = one.link.notice.directive.get("mode") == "evaluate" and next(self._made) % 100 == 0
        made = self._segment(one, ends="terminated", **({} if is_real else lie))
        return [made, Outcome(made.episode, True)]

    # -- the rest
    def _hellos(self) -> Iterator[None]:
        socket = self._dealer()
        while True:
            self._say(socket, self._hello())
            yield

    def _connections(self) -> Iterator[None]:
        for _ in range(MANY):
            self._say(self._dealer(), m.Heartbeat({}))
            yield
        yield from self._idle()

    def _strangers(self) -> Iterator[None]:
        for _ in range(MANY):
            self._open.enter_context(hostile.Peer(self._port(self._address), greeted=False))
            yield
        yield from self._idle()

    def _idle(self) -> Iterator[None]:
        while True:
            time.sleep(0.05)
            yield

    def _port(self, address: str) -> int:
        return int(address.rpartition(":")[2])

    def _handshakes(self) -> Iterator[None]:
        for address in (self._address, self._inference or self._address):
            hostile.attack(self._port(address), 1000)
            yield

    def _huge(self) -> Iterator[None]:
        one = self._actor()
        whole = np.zeros(64 * MIB, np.uint8)
        for count in itertools.cycle((1, 64, 250)):
            one.link.send(m.Push(one.session, {str(i): part for i, part in enumerate(np.array_split(whole, count))}))
            yield
            one.hear()

    def _endless(self) -> Iterator[None]:
        """Large messages of all slots, each stopped by a proxy on its way."""
        proxy = self._open.enter_context(Proxy("127.0.0.1", self._port(self._address)))
        whole, end = np.zeros(60 * MIB, np.uint8), time.monotonic() + 2 * TURN_S
        for slot in range(SLOTS):
            one = self._actor(slot, f"tcp://127.0.0.1:{proxy.port}")
            one.link.send(m.Push(one.session, {"records": whole}))
            yield
        while proxy.moved["up"] < SLOTS * STALL and time.monotonic() < end:
            time.sleep(0.002)
        proxy.set("half_open")
        time.sleep(1.0)
        yield

    def _windows(self) -> Iterator[None]:
        """All slots fill their windows, while the key may bring no more records within this second."""
        many = self._pushes(self._records()["short episodes"])
        large = np.zeros(15 * MIB, np.uint8)
        for slot in range(SLOTS):
            one = self._actor(slot)
            for _ in range(2):
                one.link.send(m.Push(one.session, {"records": large}))
                next(many)
                yield
        yield from many

    def _unread(self) -> Iterator[None]:
        told = self._actor().link.notice.weights
        crowd = [self._dealer() for _ in range(CROWD)]
        for socket in crowd:
            self._say(socket, m.Heartbeat({"text": "x" * 7900}))
        for socket in itertools.cycle(crowd):
            self._say(socket, m.Status())
            self._say(socket, m.WeightsRequest(told.get("sha256", ""), 0, 1))
            yield

    def _forged(self) -> Iterator[None]:
        body = {"mode": "stop", "phase": "evaluate", "into": "eval"}
        while True:
            one = self._actor()
            session, episode, _ = self._others()
            said = [
                m.Direct(body, None), m.StepLimit(1, 0), m.Publish("a" * 64, 1, 1), m.Archived([1, 2]),
                m.SetAside(episode, "a lie"), m.Over("a lie"), m.Sync(0, 0), m.Command("stop"), m.Command("next"),
                m.Command("goto", "evaluate"), m.Command("ready", "0", actor="arm"),
                m.Drive("arm", one.link.greeting.actor, 1, 0, "take over", {"x": 1.0}, 1),
                m.StateUpdate({"number": 99, **body}, {}), m.Ack(session, 10**6),
                m.Failed("Replaced", "a lie", final=True), self._hello(role="learner"), self._hello(role="operator"),
            ]  # fmt: skip
            for message in self._random.sample(said, 10):
                one.link.send(message)
                yield
            one.hear()

    def _garbage(self) -> Iterator[None]:
        random = self._random
        for address in itertools.cycle((self._address, self._inference or self._address)):
            socket = self._dealer(address)
            for _ in range(12):
                frames = spoiled_frames(random, random.choice(CORPUS))
                rest: list[list[bytes]] = [[random.choice(BOMBS)], [random.randbytes(random.randrange(5000))]]
                self._say(socket, random.choice([frames, frames, *rest, [b""] * 300]))
                yield

    def _stale(self) -> Iterator[None]:
        while True:
            session, _, name = self._others()
            mine, own, box = self._random.choice(self._slots)
            hellos = [
                self._hello(actor=name), self._hello(actor=mine, session=session), self._hello(actor=mine, session=own),
                self._hello(actor=mine, earlier=[[session, 2**40]]), self._hello(actor=mine, outbox=box, run="another"),
                self._hello(actor=mine, earlier=[[self._id(), 1] for _ in range(m.MAX_EARLIER)]),
            ]  # fmt: skip
            for hello in hellos:
                socket = self._dealer(hello=hello)
                for named in (session, own):
                    self._say(socket, m.Push(named, {"records": np.zeros(100, np.uint8)}))
                yield

    def _question(self, step: int, **changes: Any) -> m.InferenceRequest:
        arrays = {name: np.zeros(feature.shape, feature.dtype) for name, feature in SPEC.observation.items()}
        previous = {"previous_action": np.zeros(2, np.float32)}
        fields = {"seed": step, "reset": step % 2 == 0, "explore": True, "task": "", "arrays": arrays | previous}
        return m.InferenceRequest(step, **{**fields, **changes})

    def _asking(self) -> Iterator[zmq.Socket]:
        self._actor()
        yield from itertools.cycle([self._dealer(self._inference) for _ in range(CROWD)])

    def _questions(self) -> Iterator[None]:
        for step, socket in enumerate(self._asking()):
            self._say(socket, self._question(step))
            yield

    def _wrong_questions(self) -> Iterator[None]:
        arrays = dict(self._question(0).arrays)
        for step, socket in enumerate(self._asking()):
            wrong = self._random.choice([
                {"arrays": {**arrays, STATE: np.full(8, np.nan, np.float32)}}, {"arrays": {}}, {"task": "x" * 200},
                {"arrays": {**arrays, STATE: np.zeros(10 * MIB, np.uint8)}}, {"committed": 2**62}, {"seed": -1},
                {"arrays": {**arrays, "prefix": np.full((1000, 2), 1e30, np.float32)}, "committed": 7},
            ])  # fmt: skip
            self._say(socket, self._question(step, **wrong))
            yield


if __name__ == "__main__":
    if len(sys.argv) == 1:
        compute()
    for kind, times in Attacker(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Random(0)).run():
        print(f"{kind}: {times}", flush=True)
