"""A learner for clients under test: what the contract asks of it, in memory, and every fault that a test wants."""

import dataclasses
import threading
import time

import numpy as np
import zmq
from serl_client import messages as m
from serl_client import weights
from serl_client.episode import Outcome
from serl_client.errors import MessageError

from .common import until


class FakeLearner:
    """What the contract asks of the learner, in memory; `stop` and `start` are its death and its return."""

    def __init__(self, run="run-a", window=1 << 20):
        self.run, self.window = run, window
        self.notice = m.StateUpdate({"number": 1, "phase": "practise", "mode": "idle", "boundary": "episode"}, {})
        self.expected, self.records = {}, []  # session -> next seq; (session, seq, record)
        self.acknowledges, self.answers = True, True
        self.lost_pushes = 0  # so many are still to be lost
        self.pushed_bytes = 0
        self.refusal = None
        self.files, self.parts = {}, 1 << 30  # sha256 -> bytes; how many parts are given before this learner dies
        self.flipped = set()  # parts of which a bit flips on the wire
        self.heard = []  # all but records, in order
        self.steps_per_ack = None  # a paced actor may be so many steps ahead of what is here
        self.port, self.secret = 0, b""  # with a secret key it encrypts
        self.inference_port = 0  # what it says; 0: its own
        self.damaged = 0  # pushes that did not fit their checksums
        self._gaps, self._peers = set(), {}
        self._outgoing = []
        self.start()

    @property
    def address(self):
        return f"tcp://127.0.0.1:{self.port}"

    def start(self):
        self._stopping = False
        self._router = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        if self.secret:
            self._router.curve_server, self._router.curve_secretkey = True, self.secret
        if self.port:
            until(self._bound)
        else:
            self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _bound(self):
        try:
            self._router.bind(self.address)
        except zmq.ZMQError:
            return False
        return True

    def stop(self):
        self._stopping = True
        self._thread.join()

    def tell(self, **changes):
        """A notice to everybody."""
        self.notice = dataclasses.replace(self.notice, **changes)
        self.say(self.notice)

    def say(self, message):
        self._outgoing.append(message)

    def hear(self, kind):
        return [message for message in self.heard if isinstance(message, kind)]

    def _serve(self):
        spoke = 0.0
        while not self._stopping:
            if time.monotonic() > spoke + 1:
                spoke = time.monotonic()
                for identity, hello in self._peers.items():
                    self._send(identity, self._notice_for(hello.session))
            while self._outgoing:
                message = self._outgoing.pop(0)
                for identity in [self._asker] if isinstance(message, m.InferenceResponse) else list(self._peers):
                    self._send(identity, message)
            if self._router.poll(5):
                identity, *frames = self._router.recv_multipart()
                answer = self._handle(identity, m.decode(frames))
                if answer is not None:
                    self._send(identity, answer)
        self._peers.clear()
        self._gaps.clear()
        self._router.close()

    def _send(self, identity, message):
        frames = message if isinstance(message, list) else m.encode(message)
        self._router.send_multipart([identity, *frames])

    def _handle(self, identity, message):
        if not isinstance(message, m.Push):
            self.heard.append(message)
        handler = getattr(self, f"_{type(message).__name__.lower()}", None)
        return handler(identity, message) if handler else None

    def _hello(self, identity, hello):
        if self.refusal:
            return self.refusal
        self._peers[identity] = hello
        sessions = [*(session for session, _ in hello.earlier), hello.session]
        expected = [[session, self.expected.get(session, 0)] for session in sessions]
        notice = self._notice_for(hello.session)
        inference = f"tcp://*:{self.inference_port or self.port}"
        return m.Welcome(self.run, 3, self.window, expected, None, inference, dataclasses.asdict(notice))

    def _notice_for(self, session):
        return dataclasses.replace(self.notice, step_limit=self.allowed(session))

    def _push(self, identity, push):
        self.pushed_bytes += push.nbytes
        if self.lost_pushes:
            self.lost_pushes -= 1
            return None
        try:
            records = list(m.records(*push.parts))
        except MessageError:
            self.damaged += 1
            return m.Ack(push.session, self.expected.get(push.session, 0), resend=True)
        for seq, record in records:
            expected = self.expected.get(push.session, 0)
            if seq > expected:
                if push.session in self._gaps:
                    return None
                self._gaps.add(push.session)
                return m.Ack(push.session, expected, resend=True, step_limit=self.allowed(push.session))
            if seq == expected:
                self._gaps.discard(push.session)
                self.expected[push.session] = seq + 1
                self.records.append((push.session, seq, record))
        return self.ack(push.session) if self.acknowledges else None

    def ack(self, session):
        return m.Ack(session, self.expected.get(session, 0), step_limit=self.allowed(session))

    def allowed(self, session):
        if self.steps_per_ack is None:
            return self.notice.step_limit
        return self.steps_per_ack + sum(
            len(record) for there, _, record in self.records if there == session and not isinstance(record, Outcome)
        )

    def _inferencerequest(self, identity, ask):
        self._asker = identity
        return self.act(ask.step) if self.answers else None

    def act(self, step, version=1, length=1):
        """The answer to the latest question of this step."""
        request = next((ask.request for ask in reversed(self.hear(m.InferenceRequest)) if ask.step == step), 0)
        action = {"action": np.full((length, 2), step / 1000, np.float32)}
        return m.InferenceResponse(step, version, action, request=request)

    def _command(self, identity, command):
        return m.Done(7, command.request)

    def _status(self, identity, status):
        return m.Status({"fine": True})

    def _weightsrequest(self, identity, request):
        if not self.parts:
            self._stopping = True
            return None
        self.parts -= 1
        return weights_chunk(self.files[request.sha256], request, flipped=request.part in self.flipped)


def weights_chunk(content, request, *, flipped=False):
    """The answer to a request for a part of this content; of a `flipped` one a bit is another."""
    data = content[request.part * weights.PART_BYTES :][: weights.PART_BYTES]
    checksum = weights.part_checksum(data, request.sha256, len(content), request.part)
    came = np.frombuffer(data, np.uint8) ^ np.uint8([flipped] + [0] * (len(data) - 1))
    return m.WeightsChunk(request.sha256, request.part, checksum, {"data": came})
