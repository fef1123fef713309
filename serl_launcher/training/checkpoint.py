"""Writes and reads checkpoints, which appear whole: how often, how many are kept, who may resume them."""

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from serl_client.console import throttled
from serl_client.errors import ConfigError
from serl_client.spec import Spec
from torch import Tensor

from serl_launcher.store.files import sync_folder, write_synced
from serl_launcher.training.resuming import DAMAGE, FORMAT, MANIFEST, check_fit, checkpoints
from serl_launcher.training.staging import Staging

log = throttled(__name__)

SOON_S = 1.0  # seconds from a start to its first checkpoint; each interval is twice the one before
SHARE = 0.1  # largest share of the time that goes into checkpoints

STATE, TENSORS = "state.pt", "tensors.safetensors"
PLACE = "tensor of " + TENSORS  # {PLACE: name} stands in STATE for a tensor
ASIDE = ".aside"  # folder that is being written; after a crash the next save removes it


class Schedule:
    """Says when the next checkpoint is due: soon after a start, then less and less often.

    It is soon because a process that was killed may be killed again. Checkpoints take at most SHARE of the time.
    longest: largest interval, seconds; 0: a checkpoint is always due. now: seconds, of any clock that goes forward.
    cost: seconds that the last checkpoint took, before this start.
    """

    def __init__(self, longest: float, now: float, cost: float = 0.0) -> None:
        self.longest, self.cost = longest, cost
        self._interval = SOON_S
        self._next = now + self._wait()

    def due(self, now: float) -> bool:
        return now >= self._next

    def saved(self, now: float, cost: float) -> None:
        """Note that a checkpoint was finished at `now` and took `cost` seconds."""
        self.cost, self._interval = cost, 2 * self._interval
        self._next = now + self._wait()

    def _wait(self) -> float:
        return max(min(self._interval, self.longest), self.cost / SHARE) if self.longest else 0.0


class Checkpoints:
    """Keeps the checkpoints of one run, numbered as they were made: folder/000001, folder/000002, ...

    config: plain data that must be equal when a run resumes, but for its entries of these dotted names (`changeable`).
        `spec` must be equal, too.
    changed: which settings are others than when the loaded state was kept, though they may; empty: none.
    keep: how many of the newest whole checkpoints are kept, beside the newest pinned one of each phase.
    """

    def __init__(
        self, folder: Path, *, spec: Spec, config: Mapping[str, Any], changeable: Collection[str] = (), keep: int = 3
    ) -> None:  # fmt: skip
        self.folder, self.spec, self.keep, self._changeable = folder, spec, keep, changeable
        self.config = config
        self.staging, self.changed = Staging(), ""
        self._broken: set[Path] = set()  # found by load

    def stage(self, updates: int, state: Mapping[str, Any], *, pinned: str = "") -> Callable[[], Path]:
        """Copy `state`, made of tensors and plain data, into memory that stays allocated.

        pinned: the phase that ends here; "": none. Returns a function that writes the copy, in any thread. When that
        returns, the checkpoint survives a power cut. It raises OSError. It may be called again until the next `stage`.
        """
        tensors: dict[str, Tensor] = {}
        plain = io.BytesIO()
        torch.save(_take_out(state, "", tensors, {}), plain)
        self.staging.copy(tensors)
        plan = state.get("plan") or {"at": {"phase": None}, "phase": {}}
        place = {"phase": plan["at"]["phase"], "said": plan["phase"], "phases": state.get("phases", [])}
        return partial(self._write, updates, plain.getbuffer(), pinned, place)

    def _write(self, updates: int, plain: memoryview, pinned: str, place: Mapping[str, Any]) -> Path:
        numbers = [int(path.name) for path in checkpoints(self.folder)]
        path, aside = self.folder / f"{max(numbers, default=0) + 1:06d}", self.folder / ASIDE
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True, exist_ok=True)
        contents = {STATE: plain, TENSORS: self.staging.data()}
        for name, data in contents.items():
            write_synced(aside / name, data)
        manifest = {
            "format": FORMAT, "updates": updates, "pinned": pinned, "spec": self.spec.to_dict(), "config": self.config,
            "plan": place,
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
        }  # fmt: skip
        write_synced(aside / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_folder(aside)
        aside.rename(path)
        for folder in (self.folder, self.folder.parent):  # the parent, because the folder may be new
            sync_folder(folder)
        self._forget()
        return path

    def load(self) -> dict[str, Any] | None:
        """Return the state of the newest whole checkpoint, on the CPU, mapped from its file. None if there is none.

        A state of another config is without its `algorithm`, if that one had made no update.
        Raises ConfigError if that one was made with another Spec, config or version of this program. Also if there
        are checkpoints and none is whole, because a run that began again would replace what it had learned.
        """
        if newest := newest_whole(checkpoints(self.folder), self._broken):
            path, manifest = newest
            fits, self.changed = check_fit(path, manifest, self.config, lambda: self._changeable, self.spec)
            state = read_state(path)
            return state if fits else {**state, "algorithm": None}
        if self._broken:
            raise ConfigError(
                f"no checkpoint in {self.folder} is whole (see above): bring one back from a backup, or delete the "
                "folder to learn anew from the data that the run has"
            )
        return None

    def _forget(self) -> None:
        ends = {path: _pinned(path) for path in checkpoints(self.folder)}
        newest = {phase: path for path, phase in ends.items() if phase}
        paths = [path for path, phase in ends.items() if newest.get(phase) != path]
        for path in [*self._broken.intersection(paths), *[p for p in paths if p not in self._broken][: -self.keep]]:
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("checkpoint %s is not needed and cannot be deleted (%s): delete it by hand", path, error)


def newest_whole(paths: Sequence[Path], broken: set[Path]) -> tuple[Path, dict[str, Any]] | None:
    """Return the last of these checkpoints that is whole, with its manifest; add those that are not to `broken`."""
    for path in reversed(paths):
        try:
            return path, _whole(path)
        except (*DAMAGE, ConfigError) as error:
            log.warning("checkpoint %s is broken and skipped: %s", path, error)
            broken.add(path)
    return None


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that a whole checkpoint keeps, on the CPU, mapped from its file."""
    plain = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return _put_back(plain, safetensors.torch.load_file(path / TENSORS))


def _whole(path: Path) -> dict[str, Any]:
    """Return the manifest. Raises one of DAMAGE, or ConfigError, if it or another file is not as it was written."""
    manifest = json.loads((path / MANIFEST).read_text())
    if manifest["format"] == FORMAT:
        Spec.from_dict(manifest["spec"])
        kinds = {"config": dict, "updates": int, "plan": dict | None}
        if {STATE, TENSORS} - manifest["sha256"].keys() or not all(
            isinstance(manifest.get(name), kind) for name, kind in kinds.items()
        ):
            raise ValueError("its manifest is not whole")
    for name, sha256 in manifest["sha256"].items():
        with open(path / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise ValueError(f"{name} is not what was written")
    return manifest


def _pinned(path: Path) -> str:
    """Return the phase that ended with this checkpoint; "" if none did."""
    try:
        return str(json.loads((path / MANIFEST).read_text())["pinned"])
    except DAMAGE:
        return ""  # broken: treated like any other


def _take_out(value: Any, name: str, tensors: dict[str, Tensor], known: dict[Any, str]) -> Any:
    """Return `value` with each tensor moved into `tensors`. What two names share is kept once (`known`)."""
    if isinstance(value, Tensor):
        place = value.untyped_storage()._cdata, value.storage_offset(), value.dtype, value.shape, value.stride()
        if place not in known:
            known[place], tensors[name] = name, value
        return {PLACE: known[place]}
    if isinstance(value, Mapping):
        return {key: _take_out(item, f"{name}.{key}".lstrip("."), tensors, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_take_out(item, f"{name}.{i}", tensors, known) for i, item in enumerate(value))
    return value


def _put_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {PLACE}:
            return tensors[value[PLACE]]
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_put_back(item, tensors) for item in value)
    return value
