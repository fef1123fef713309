"""Asks a policy server of openpi's protocol (websockets) for chunks of actions, which algo=residual improves.

It is the other side of bridge.py. The facts of the protocol are in openpi.py: the server sends its metadata first, then
answers each map of observations with a map that holds `actions`, or with a text that says what went wrong.
"""

import logging
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client import clock
from serl_client.errors import ConfigError, MessageError
from serl_client.keys import private_text
from serl_client.names import cleaned
from serl_client.spec import Array, Spec
from torch import Tensor
from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from serl_launcher.acting import openpi
from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.vision import ALL, images_of
from serl_launcher.policies.residual import BasePolicy
from serl_launcher.types import Observation

ANSWER = "answer of a policy server"
SAID = 300  # characters of a server's error that are told
CLOSE_S = 0.1  # for a server to close in order
FAILURES = OSError, WebSocketException, MessageError, AssertionError  # websockets asserts where a handshake breaks off
SILENT = logging.Logger("policy server", logging.CRITICAL + 1)  # it would write a traceback for what is told anyway


class PolicyServer(BasePolicy):
    """A policy on another machine, or in another process, which answers one question after the other.

    url: `ws://HOST:PORT`. api_key: the file that holds the Api-Key which it wants; None: it wants none.
    timeout_s: seconds for the answers to one batch. After a failure the connection is opened anew, and no question is
        sent for as long, so that actors with a chunk under way wait half of the time at most.
    cameras: names of those whose images it is sent; `all`: of every camera there is. All else is sent, too.
    keys: {the server's key: the Spec's feature}; features that are not in it go by their own names.
    n_action_steps: actions of a chunk that run before the next question. scale: kind of ActionScale.
    Raises ConfigError for values that cannot be, and for keys that do not fit the Spec.
    """

    changeable = ("url", "api_key", "timeout_s")

    def __init__(
        self, spec: Spec, *, url: str, api_key: str | None, keys: Mapping[str, str] | None, cameras: Sequence[str],
        n_action_steps: int, timeout_s: float, scale: str,
    ) -> None:  # fmt: skip
        try:
            parse_uri(url)
        except (InvalidURI, ValueError):
            raise ConfigError(f"policy.url={url}: say the address of a policy server, ws://HOST:PORT") from None
        if timeout_s <= 0 or n_action_steps < 1:
            raise ConfigError(
                f"policy.timeout_s={timeout_s}, n_action_steps={n_action_steps}: say a number above 0, and 1 or more "
                "steps"
            )
        images, keys = spec.images if ALL in cameras else images_of(spec, cameras), keys or {}
        self.inputs = [name for name in spec.observation if name in images or name not in spec.images]
        if strange := sorted(set(keys.values()) - set(self.inputs)):
            raise ConfigError(
                f"policy.keys names {strange[0]}, which is not sent: name some of {', '.join(self.inputs)}, or its "
                "camera in policy.cameras"
            )
        names = {ours: theirs for theirs, ours in keys.items()}
        self._sent = {names.get(name, name): name for name in self.inputs}
        if len(self._sent) < len(self.inputs) or len(names) < len(keys) or openpi.PROMPT in self._sent:
            raise ConfigError(f"policy.keys={keys}: name each feature once, and none {openpi.PROMPT!r}")
        self.n_action_steps, self.scale = n_action_steps, ActionScale(spec.action, scale)
        self._url, self._timeout_s, self._size = url, timeout_s, spec.action.shape[0]
        self._headers = {"Authorization": f"Api-Key {_read_api_key(api_key)}"} if api_key else None
        self._held = ExitStack()
        self._connection: ClientConnection | None = None
        self._failed, self._trouble = 0.0, ""  # until when, after a failure, it is not asked; and what that was

    def ask(self, observation: Observation, task: Sequence[str]) -> tuple[Tensor, str]:
        """See BasePolicy.ask. After the first question that fails the others are not asked."""
        chunks = np.full((len(task), self.n_action_steps, self._size), np.nan, np.float32)
        begun = clock.monotonic()
        if begun < self._failed:
            return torch.from_numpy(chunks), self._trouble
        arrays = {theirs: observation[name].numpy() for theirs, name in self._sent.items()}
        try:
            for row, words in enumerate(task):
                request = {**{key: np.asarray(value[row]) for key, value in arrays.items()}, openpi.PROMPT: words}
                chunks[row] = self._chunk(self._infer(request, begun + self._timeout_s))
        except FAILURES as error:
            self._drop()
            late = f"no answer within {self._timeout_s} s" if isinstance(error, TimeoutError) else ""
            why = late or cleaned(_said_by(error)) or "it broke the handshake off"
            self._trouble = f"the policy server at {self._url} gives no chunk ({why}); mend it, or say policy.url=..."
            self._failed = clock.monotonic() + self._timeout_s
            return torch.from_numpy(chunks), self._trouble
        return torch.from_numpy(chunks), ""

    def _infer(self, request: Mapping[str, Any], deadline: float) -> dict[Any, Any]:
        """Return the server's answer. Raises one of FAILURES."""
        connection = self._connection or self._opened(deadline)
        connection.send(openpi.pack(request))
        answer = connection.recv(max(0.0, deadline - clock.monotonic()))
        if isinstance(answer, str):
            lines = answer.strip().splitlines() or [""]
            raise MessageError(f"it says: {lines[-1][:SAID]}")  # of openpi's server, the last line of a traceback
        return openpi.unpack(answer, ANSWER)

    def _opened(self, deadline: float) -> ClientConnection:
        """Connect, and read the server's metadata, which has no fixed keys."""
        left = max(0.001, deadline - clock.monotonic())
        opening = connect(
            self._url, open_timeout=left, close_timeout=CLOSE_S, compression=None, max_size=openpi.LEAST_LIMIT,
            proxy=None, additional_headers=self._headers, logger=SILENT,
        )  # fmt: skip
        connection = self._connection = self._held.enter_context(opening)
        limit = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)  # of a server that does not read
        openpi.unpack(connection.recv(max(0.0, deadline - clock.monotonic())), ANSWER)
        return connection

    def _chunk(self, answer: Mapping[Any, Any]) -> Array:
        """Return the first n actions of an answer [n, A]. Raises MessageError if they are none of this robot."""
        found = answer.get("actions")
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":
            raise MessageError("its answer has no array `actions`")
        n, size = self.n_action_steps, self._size
        if found.ndim != 2 or found.shape[1] != size or len(found) < n:
            raise MessageError(f"its actions are {list(found.shape)}, not [{n} (n_action_steps) or more, {size}]")
        with np.errstate(over="ignore"):
            chunk = found[:n].astype(np.float32)
        if not np.isfinite(chunk).all():
            raise MessageError("its actions are not finite")
        return chunk

    def _drop(self) -> None:
        """Close the connection: an answer that comes late is none to the next question."""
        self._connection = None
        with suppress(*FAILURES):
            self._held.close()


def _read_api_key(file: str) -> str:
    """Raises ConfigError."""
    try:
        text = private_text(
            Path(file), "policy.api_key names the file that holds the Api-Key of the policy server"
        ).strip()
    except ValueError:
        text = ""
    if not (text and text.isascii() and text.isprintable()):
        raise ConfigError(f"policy.api_key={file}: this file should hold an Api-Key alone, in one line")
    return text


def _said_by(error: BaseException) -> str:
    """Return what went wrong; of who does not let us in, what it says, too."""
    body = error.response.body if isinstance(error, InvalidStatus) else b""
    return " ".join([str(error), bytes(body or b"").decode(errors="replace")[:SAID].strip()]).strip()
