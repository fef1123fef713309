"""A client of the learner's protocol, version 19, written from docs/reference/protocol.md alone.

foreign_client.py ADDRESS NAME: pulls the newest weights, delivers one episode and prints one line of JSON. It keeps
nothing of earlier lives.
"""

import hashlib
import itertools
import json
import math
import re
import secrets
import struct
import sys
import time

import msgpack
import xxhash
import zmq

SPEC = {
    "observation": {
        "observation.state": {
            **{"shape": [8], "dtype": "float32", "names": [], "units": ["rad"] * 6 + ["m", ""]},
            **{"low": [-100.0] * 8, "high": [math.inf] * 8},
        }
    },
    "fps": 10.0,
    "extras": {},
    "action": {
        **{"shape": [2], "dtype": "float32", "names": [], "low": [-1.0, -1.0], "high": [1.0, 1.0]},
        **{"neutral": [0.0, -1.0]},
    },
}
LOST = float("-inf")


class Failed(Exception):
    """The learner answered Failed in a way that no repetition mends."""


def pad(data):
    return data + bytes(-len(data) % 8)


def pack_header(fields, arrays):
    return msgpack.packb([fields, [[name, dtype, list(shape)] for name, (dtype, shape, _) in arrays.items()]])


def encode_message(kind, fields, arrays):
    header, frames = pack_header({"type": kind, **fields}, arrays), [data for _, _, data in arrays.values()]
    if len(frames) >= 2 and len(header) + sum(map(len, frames)) <= 1 << 20:
        frames = [b"".join(map(pad, frames))]
    return [header, *frames]


def decode_message(parts):
    fields, listed = msgpack.unpackb(parts[0], strict_map_key=False)
    sizes = [int(dtype.lstrip("boluintfa") or 8) // 8 * math.prod(shape) for _, dtype, shape in listed]
    frames = list(parts[1:])
    if len(listed) >= 2 and len(frames) == 1:
        starts = [0, *itertools.accumulate(size + -size % 8 for size in sizes)]
        frames = [parts[1][at : at + size] for at, size in zip(starts, sizes, strict=False)]
    if [len(frame) for frame in frames] != sizes:
        raise ValueError("the array frames do not fit the header")
    return fields.pop("type"), fields, {n: (d, tuple(s), data) for (n, d, s), data in zip(listed, frames, strict=True)}


def encode_record(seq, fields, arrays):
    header = pack_header(fields, arrays)
    body = pad(header) + b"".join(pad(data) for _, _, data in arrays.values())
    return struct.pack("<4sIQQQ", b"RTK1", len(header), len(body), seq, xxhash.xxh3_64_intdigest(body, seed=seq)) + body


class Connection:
    """One DEALER, from its opening to its closing; ZeroMQ never connects it a second time."""

    def __init__(self, address):
        self.beats = False  # Heartbeats follow the Welcome, and are not for the inference process
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.reconnect_ivl, self.socket.linger = 10**9, 1000
        self.socket.sndtimeo = 2000
        self.socket.connect(address)
        self.heard = self.spoke = time.monotonic()

    def send(self, kind, fields, arrays=None):
        try:
            self.socket.send_multipart(encode_message(kind, fields, arrays or {}))
            self.spoke = time.monotonic()
        except zmq.ZMQError:  # nobody takes it
            self.heard = LOST

    def beat(self):
        if self.beats and time.monotonic() - self.spoke >= 1:
            self.send("Heartbeat", {"report": {}})

    def receive(self, timeout):
        self.beat()
        if self.heard == LOST or not self.socket.poll(max(0, int(timeout * 1000))):
            return "", {}, {}
        self.heard = time.monotonic()
        return decode_message(self.socket.recv_multipart())


class Client:
    def __init__(self, address, name, spec):
        self.address, self.name, self.spec, self.run = address, name, spec, ""
        self.outbox, self.session = secrets.token_hex(16), secrets.token_hex(16)
        self.kept, self.expected, self.sent = {}, 0, 0
        self.extras, self.history = {}, 1
        self.connection = self.asking = None
        self.questions = 0
        self.state, self.answered, self.failures = {"directive": {}}, time.monotonic(), []

    def _greet(self, connection, address, timeout):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if connection is not None:
                connection.socket.close()
                time.sleep(0.25)
            connection = Connection(address)
            connection.send(
                "Hello",
                {
                    "protocol": [19, 19],
                    "role": "actor",
                    "actor": self.name,
                    "session": self.session,
                    "run": self.run,
                    "outbox": self.outbox,
                    "spec": self.spec,
                    "paced": False,
                    "has_operator": False,
                    "earlier": [],
                },
            )
            until = min(end, time.monotonic() + 5)
            while (left := until - time.monotonic()) > 0 and connection.heard != LOST:
                kind, fields, _ = connection.receive(left)
                if kind == "Welcome":
                    return connection, fields
                if kind == "Failed" and not self.failure(fields):
                    raise Failed(*self.failures[-1])
                if kind == "Failed":
                    break
        raise TimeoutError(f"no Welcome from {address}; {self.failures[-3:]}")

    def hello(self, timeout):
        self.connection, welcome = self._greet(self.connection, self.address, timeout)
        self.connection.beats = True
        if self.run and welcome["run"] != self.run:
            raise Failed(f"the outbox belongs to run {self.run}, the learner has {welcome['run']}")
        self.run, self.limit, self.state = welcome["run"], welcome["max_unacknowledged"], welcome["state"]
        self.extras, self.history = welcome["spec"]["extras"], welcome["history"]
        self.inference = welcome["inference"].replace("*", self.address.split("://")[1].rsplit(":", 1)[0])
        self._acknowledge(dict(welcome["expected"])[self.session], True)

    def push(self, records):
        """Keeps and sends records; what max_unacknowledged does not let through goes out as Acks come (receive)."""
        self.kept |= {record[0]: encode_record(*record) for record in records}
        self._flush()

    def _acknowledge(self, expected, resend):
        self.expected, self.answered = expected, time.monotonic()
        self.kept = {seq: data for seq, data in self.kept.items() if seq >= expected}
        self.sent = expected if resend else max(expected, self.sent)
        self._flush()

    def _flush(self):
        flying = sum(len(data) for at, data in self.kept.items() if at < self.sent)
        if not flying:
            self.answered = time.monotonic()
        while (data := self.kept.get(self.sent)) and (not flying or flying + len(data) <= self.limit):
            self.connection.send("Push", {"session": self.session}, {"records": ("uint8", (len(data),), data)})
            flying, self.sent = flying + len(data), self.sent + 1

    def receive(self, timeout):
        """The next message, already acted upon, or None; call it at least each second: it sends the Heartbeats too."""
        end, kind = time.monotonic() + timeout, ""
        while not kind:
            now = time.monotonic()
            if now - self.connection.heard > 5:  # a StateUpdate comes each second: the connection is lost
                self.hello(60)
            if now - self.answered > 15:
                self.sent = self.expected
                self._flush()
            kind, fields, arrays = self.connection.receive(min(0.5, end - now))
            if not kind and now >= end:
                return None
        if kind == "StateUpdate":
            self.state = fields
        elif kind == "Ack":
            self._acknowledge(fields["expected"], fields["resend"])
        elif kind == "Failed" and self.failure(fields):
            self.hello(60)
        return kind, fields, arrays

    def failure(self, fields):
        self.failures.append((fields["kind"], fields["text"]))
        if fields["final"] and not fields.get("request"):
            raise Failed(*self.failures[-1])
        return fields["kind"] in ("ServerFailed", "Disconnected", "Timeout") and not fields.get("request")

    def until(self, done, timeout, what):
        end, message = time.monotonic() + timeout, None
        while not done(message):
            if time.monotonic() > end:
                raise TimeoutError(f"no {what}; degraded: {self.state.get('degraded')!r}; {self.failures[-3:]}")
            message = self.receive(0.5)
        return message

    def ask(self, step, arrays, *, seed=0, reset=False, explore=False, task="", timeout=5.0):
        """(version, whether memory began anew, arrays) of the answer for this step, or None: there may be no answer."""
        if self.history > 1:
            arrays = {
                name: (dtype, (self.history, *shape), data * self.history) if name.startswith("observation.") else array
                for name, array in arrays.items()
                for dtype, shape, data in [array]
            }
        fields = {"step": step, "seed": seed, "reset": reset, "explore": explore, "task": task, "committed": 0}
        self.questions += 1
        fields["request"] = self.questions
        end, asked = time.monotonic() + timeout, False
        while (left := end - time.monotonic()) > 0:
            if self.asking is None or self.asking.heard == LOST:
                self.asking, asked = self._greet(self.asking, self.inference, left)[0], False
            if not asked:
                self.asking.send("InferenceRequest", fields, arrays)
            (kind, answer, values), asked = self.asking.receive(min(0.5, left)), True
            if kind == "InferenceResponse" and (answer["step"], answer.get("request")) == (step, self.questions):
                return answer["version"], answer["reset"], values
            if kind == "Failed":
                asked = answer.get("request") != self.questions
                self.asking.heard = LOST if self.failure(answer) else self.asking.heard
        return None

    def weights(self, timeout=30.0):
        """The newest weights file, after at most three tries for each part."""
        sha256, size = (self.state["weights"][name] for name in ("sha256", "size"))
        found = b""
        for part in range(-(-size // (1 << 20))):
            seed, tries = xxhash.xxh3_64_intdigest(f"{sha256}/{size}/{part}".encode()), 3
            while len(found) <= part << 20 and tries:
                tries -= 1
                self.connection.send("WeightsRequest", {"sha256": sha256, "part": part, "request": 1})
                awaited = f"part {part} of the weights"
                _, fields, arrays = self.until(lambda got: got and got[0] == "WeightsChunk", timeout, awaited)
                data = bytes(arrays["data"][2])
                if fields["part"] == part and xxhash.xxh3_128_hexdigest(data, seed=seed) == fields["checksum"]:
                    found += data
        if len(found) != size or hashlib.sha256(found).hexdigest() != sha256:
            raise ValueError("the weights came damaged")
        return found

    def status(self, timeout=10.0):
        self.connection.send("Status", {"report": {}})
        return self.until(lambda message: message and message[0] == "Status", timeout, "Status")[1]["report"]

    def close(self):
        self.connection.send("Bye", {})
        for connection in filter(None, (self.asking, self.connection)):
            connection.socket.close()


def zeros(feature, T):
    size = int(re.sub(r"\D", "", feature["dtype"]) or 8) // 8  # bool: a byte
    shape = (T, *feature["shape"])
    return feature["dtype"], shape, bytes(size * math.prod(shape))


def segment(episode, start, T, directive, *, clock, ends="", extras=()):
    """(fields, arrays) of steps start to start + T; ends is "", "terminated" or "truncated"; directive is the map."""
    steps, rows = range(start, start + T), T + bool(ends)
    state = [value for i in range(rows) for value in (7.0, start + i, 0, 0, 0, 0, 0, 0)]
    return {
        "episode": episode,
        "start": start,
        "task": "reach",
        "extras": list(extras),
        "stamp": [directive["number"], directive["phase"], 0],
        "terminated": ends == "terminated",
        "truncated": ends == "truncated",
    }, {
        "action": ("float32", (T, 2), struct.pack(f"<{2 * T}f", *[0.5] * (2 * T))),
        "reward": ("float32", (T,), struct.pack(f"<{T}f", *steps)),
        "intervened": ("bool", (T,), bytes(T)),
        "chunk_start": ("bool", (T,), b"\1" * T),
        "time": ("float64", (T,), struct.pack(f"<{T}d", *(clock + step / SPEC["fps"] for step in steps))),
        "gap": ("bool", (T,), bytes(T)),
        "chunk_delay": ("uint16", (T,), bytes(2 * T)),
        "observation.state": ("float32", (rows, 8), struct.pack(f"<{8 * rows}f", *state)),
        **{name: zeros(extras[name], T) for name in extras},
    }


def outcome(episode):
    return {"episode": episode, "success": True, "discard": False, "judged_by": "judge"}, {}


def main(address, name):
    client = Client(address, name, SPEC)
    client.hello(60)
    client.until(lambda _: client.state["directive"].get("mode") == "collect", 120, "directive that collects")
    directive, episode, clock, records = client.state["directive"], f"{name}-{client.session[:8]}-0", time.time(), []
    for start, T in ((0, 6), (6, 6), (12, 8)):
        ends = "terminated" if start == 12 else ""
        made = segment(episode, start, T, directive, clock=clock, ends=ends, extras=client.extras)
        records.append((len(records), *made))
    records.append((len(records), *outcome(episode)))
    client.push(records)
    client.until(lambda _: client.expected == len(records), 60, f"Ack up to {len(records)}")
    clients, weights = client.status()["clients"], client.weights()
    client.close()
    said = {"run": client.run, "session": client.session, "expected": client.expected, "clients": len(clients)}
    said["weights"] = hashlib.sha256(weights).hexdigest()
    sys.stdout.write(json.dumps({**said, "directive": directive["number"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
