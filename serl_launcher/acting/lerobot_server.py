"""Asks lerobot's policy server (async_inference, gRPC) for chunks of actions, which algo=residual improves.

Facts of lerobot 0.4.4 and 0.6.1, which agree: the client says `Ready`, then which policy to load and how its features
are named; the server loads it, and answers no question before. An observation is sent by `SendObservations`, and
`GetActions` returns the chunk for the newest one, or nothing at all when something went wrong, which its own log says.
There is one policy for all clients. What travels is pickle: here it is written by names alone, so that lerobot's own
classes need not be imported, and read without calling anything but what makes a tensor.
"""

import io
import pickle
import pickletools
import random
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from serl_client import clock
from serl_client.errors import ConfigError, MessageError
from serl_client.spec import Array, Spec

from serl_launcher.acting.served_policy import SAID, ServedPolicy

HELPERS = "lerobot.async_inference.helpers"
STATE, IMAGES = "observation.state", "observation.images."
LOAD_S = 600.0  # for a server to load its policy
KINDS = ("act", "diffusion", "smolvla", "tdmpc", "vqbet", "pi0", "pi05", "groot")


OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20))  # of a channel


class Lost(MessageError):
    """The server cannot be reached, or has no policy."""


class LerobotServer(ServedPolicy):
    """lerobot's `python -m lerobot.async_inference.policy_server`, which loads what `path` says.

    It is sent the state, and images. Where it was started anew its policy is loaded again, after the first question
    that it leaves without an answer.

    url: `HOST:PORT`. type, path: of its policy: act, and a folder or a name on the hub, as the server sees it.
    device: of the policy there. options: of ServedPolicy. Raises ConfigError also without gRPC.
    """

    changeable = (*ServedPolicy.changeable, "path", "device")

    def __init__(self, spec: Spec, *, url: str, type: str, path: str, device: str, **options: Any) -> None:
        host, _, port = url.rpartition(":")
        if not host or "/" in host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ConfigError(f"policy.url={url}: say the address of lerobot's policy server, HOST:PORT")
        if type not in KINDS or not path:
            raise ConfigError(
                f"policy.type={type}, policy.path={path}: say one of {', '.join(KINDS)}, and the folder on the server, "
                "or the name on the hub, from which it loads that policy"
            )
        super().__init__(spec, url=url, **options)
        for key, name in self._sent.items():
            called = key.removeprefix(IMAGES)
            if name in spec.images and (called == key or called == "task" or called.isdigit()):
                raise ConfigError(
                    f"policy.keys: an image goes as {IMAGES}NAME, not as {key}; `task` and numbers are taken"
                )
        self._sent = {key: name for key, name in self._sent.items() if key == STATE or key.startswith(IMAGES)}
        self.inputs = list(self._sent.values())
        if STATE not in self._sent or len(spec.observation[self._sent[STATE]].shape) != 1:
            raise ConfigError(
                f"lerobot's policy server wants a vector {STATE}: say which feature that is, "
                f"policy.keys={{{STATE}: ...}}"
            )
        try:
            parts = ("transport.services_pb2", "transport.services_pb2_grpc", "transport.utils")
            self._words, self._service, self._utils = (import_module(f"lerobot.{part}") for part in parts)
            self._grpc = import_module("grpc")
        except ModuleNotFoundError as error:
            cure = "run `. examples/install.sh --extra data --extra vla` here"
            raise ConfigError(f"asking lerobot's policy server needs {error.name}: {cure}") from None
        features = {key: _feature(spec, name) for key, name in self._sent.items()}
        self._wanted = _pickled(
            "RemotePolicyConfig", policy_type=type, pretrained_name_or_path=path, lerobot_features=features,
            actions_per_chunk=self.n_action_steps, device=device, rename_map={},
        )  # fmt: skip
        self._number = random.SystemRandom().getrandbits(60)  # that no other client of the server has
        self._channel: Any = None
        self._loading: Any = None

    def _infer(self, observation: Mapping[str, Array], task: str, deadline: float) -> object:
        if self._channel is None:
            self._open(deadline)
        if not self._loading.done():
            raise MessageError("it is loading its policy")
        if (failed := self._loading.exception()) is not None:
            raise Lost(f"it has not loaded its policy: {self._said(failed)}")
        self._number += 1
        raw = {theirs.removeprefix(IMAGES): seen for theirs, seen in observation.items() if theirs != STATE}
        raw |= {str(at): float(number) for at, number in enumerate(observation[STATE])} | {"task": task}
        question = _pickled(
            "TimedObservation", timestamp=clock.time(), timestep=self._number, observation=raw, must_go=True
        )
        told = self._utils.send_bytes_in_chunks(question, self._words.Observation)
        self._call(self._stub.SendObservations, deadline, told)
        answer = self._call(self._stub.GetActions, deadline, self._words.Empty())
        return _chunk(answer.data, self._number)

    def _open(self, deadline: float) -> None:
        """Connect, and let the server load its policy."""
        self._channel = self._grpc.insecure_channel(self._url, OPTIONS)
        self._stub = self._service.AsyncInferenceStub(self._channel)
        try:
            self._call(self._stub.Ready, deadline, self._words.Empty())
        except TimeoutError as error:
            raise Lost(f"no answer within {self._timeout_s} s") from error
        setup = self._words.PolicySetup(data=self._wanted)
        self._loading = self._stub.SendPolicyInstructions.future(setup, timeout=LOAD_S)

    def _call(self, method: Any, deadline: float, message: Any) -> Any:
        """Raises TimeoutError, or Lost with what the server says."""
        try:
            return method(message, timeout=max(0.001, deadline - clock.monotonic()))
        except self._grpc.RpcError as error:
            if error.code() is self._grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from None
            raise Lost(f"it says: {self._said(error)}") from None

    def _said(self, error: Any) -> str:
        return (error.details() or error.code().name).strip()[:SAID]

    def _drop(self, error: BaseException) -> None:
        """Begin anew where the server is lost; else its policy would be loaded again. A chunk that comes late has
        another number."""
        if self._channel is not None and isinstance(error, Lost):
            self._channel.close()
            self._channel = self._loading = None


def _feature(spec: Spec, name: str) -> dict[str, Any]:
    """Say what a feature is, as lerobot's datasets do. The numbers of a state are named 0, 1, ..."""
    shape = spec.observation[name].shape
    if name in spec.images:
        return {"dtype": "image", "shape": shape, "names": ["height", "width", "channels"]}
    return {"dtype": "float32", "shape": shape, "names": [str(at) for at in range(shape[0])]}


def _pickled(name: str, **fields: Any) -> bytes:
    """Return the pickle of an object of lerobot's, given its fields: a name, no arguments, then its state."""
    state = pickle.dumps(fields, 3)[2:-1]  # without how it begins and ends
    return b"\x80\x03c%b\n%b\n)\x81%bb." % (HELPERS.encode(), name.encode(), state)


class _Reader(pickle.Unpickler):
    """Reads one list of actions, and refuses to name anything else. A pickle may change what it names, so each has its
    own."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._names: dict[tuple[str, str], Any] = {
            (HELPERS, "TimedAction"): type("TimedAction", (), {}),
            ("collections", "OrderedDict"): type("OrderedDict", (dict,), {}),
            ("torch._utils", "_rebuild_tensor_v2"): lambda *told: _vector(*told),
            ("torch.storage", "_load_from_bytes"): lambda data: _storage(data),
        }

    def find_class(self, module: str, name: str) -> Any:
        if (found := self._names.get((module, name))) is None:
            raise MessageError(f"its answer names {module}.{name}, which is not read")
        return found


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _vector(storage: Any, offset: int, size: tuple[int], stride: tuple[int], *_: Any) -> Array:
    """Return the numbers of a tensor, which has to be a vector within its storage. Raises ValueError."""
    raw = storage._untyped_storage  # as torch does it: `untyped` warns
    if len(size) != 1 or stride != (1,) or not 0 <= offset <= offset + size[0] <= len(raw) // storage.dtype.itemsize:
        raise ValueError
    return torch.empty(0, dtype=storage.dtype).set_(raw, offset, size, stride).float().numpy()


def _chunk(data: bytes, number: int) -> Array:
    """Return the actions of an answer [H, A] to this question. Raises MessageError."""
    if not data:
        raise Lost("it answers nothing; its own log says why")
    try:
        if any("PUT" in code.name and (at or 0) > len(data) for code, at, _ in pickletools.genops(data)):
            raise ValueError  # reading it would take memory for as many places
        found = _Reader(data).load()
        first, chunk = found[0].timestep, np.stack([np.asarray(each.action, np.float32) for each in found])
        is_ours = type(first) is int and first == number
    except MessageError:
        raise
    except Exception as error:  # whatever a pickle that is none sets off
        raise MessageError(f"its answer is no chunk ({type(error).__name__})") from None
    if not is_ours:
        raise MessageError("its answer is to another question")
    return chunk
