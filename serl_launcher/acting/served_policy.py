"""Asks a policy server for chunks of actions, whatever its protocol; algo=residual improves what it does."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from serl_client import clock
from serl_client.errors import ConfigError, MessageError
from serl_client.names import cleaned
from serl_client.spec import Array, Spec
from torch import Tensor

from serl_launcher.networks.mlp import ActionScale
from serl_launcher.networks.vision import ALL, images_of
from serl_launcher.policies.residual import BasePolicy
from serl_launcher.types import Observation

SAID = 300  # characters of a server's error that are told


class ServedPolicy(BasePolicy):
    """A policy on another machine, or in another process, which answers one question after the other.

    url: its address. timeout_s: seconds for the answers to one batch. After a failure no question is sent for as long,
        so that actors with a chunk under way wait half of the time at most.
    cameras: names of those whose images it is sent; `all`: of every camera there is. All else is sent, too.
    keys: {the server's key: the Spec's feature}; features that are not in it go by their own names.
    n_action_steps: actions of a chunk that run before the next question. scale: kind of ActionScale.
    Raises ConfigError for values that cannot be, and for keys that do not fit the Spec.
    """

    failures: tuple[type[BaseException], ...] = (OSError, MessageError)  # what `_infer` may raise
    changeable = ("url", "timeout_s")
    reserved: Sequence[str] = ()  # names that the protocol itself gives to something else than a feature

    def __init__(
        self, spec: Spec, *, url: str, keys: Mapping[str, str] | None, cameras: Sequence[str], n_action_steps: int,
        timeout_s: float, scale: str,
    ) -> None:  # fmt: skip
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
        taken = self._sent.keys() & self.reserved
        if len(self._sent) < len(self.inputs) or len(names) < len(keys) or taken:
            others = "".join(f", and none {name!r}" for name in self.reserved)
            raise ConfigError(f"policy.keys={keys}: name each feature once{others}")
        self.n_action_steps, self.scale = n_action_steps, ActionScale(spec.action, scale)
        self._url, self._timeout_s, self._size = url, timeout_s, spec.action.shape[0]
        self._failed, self._trouble = 0.0, ""  # until when, after a failure, it is not asked; and what that was

    @abstractmethod
    def _infer(self, observation: Mapping[str, Array], task: str, deadline: float) -> object:
        """Ask one question, connecting before if need be; return the answer's actions.

        observation: by the server's keys, without a batch. deadline: by `clock.monotonic`. Raises one of `failures`.
        """

    @abstractmethod
    def _drop(self, error: BaseException) -> None:
        """After a failure: let the next question find no answer to this one."""

    def ask(self, observation: Observation, task: Sequence[str]) -> tuple[Tensor, str]:
        """See BasePolicy.ask. After the first question that fails the others are not asked."""
        chunks = np.full((len(task), self.n_action_steps, self._size), np.nan, np.float32)
        begun = clock.monotonic()
        if begun < self._failed:
            return torch.from_numpy(chunks), self._trouble
        arrays = {theirs: observation[name].numpy() for theirs, name in self._sent.items()}
        try:
            for row, words in enumerate(task):
                seen = {key: np.asarray(value[row]) for key, value in arrays.items()}
                chunks[row] = self._chunk(self._infer(seen, words, begun + self._timeout_s))
        except self.failures as error:
            self._drop(error)
            late = f"no answer within {self._timeout_s} s" if isinstance(error, TimeoutError) else ""
            why = late or cleaned(str(error)) or "it broke the handshake off"
            self._trouble = f"the policy server at {self._url} gives no chunk ({why}); mend it, or say policy.url=..."
            self._failed = clock.monotonic() + self._timeout_s
            return torch.from_numpy(chunks), self._trouble
        return torch.from_numpy(chunks), ""

    def _chunk(self, found: object) -> Array:
        """Return the first n actions of an answer [n, A]. Raises MessageError if they are none of this robot."""
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
