"""Logs metrics as JSON lines, one file per process, and mirrors them to wandb or TensorBoard (`log`).

Their mirror in wandb or TensorBoard is a process of its own that reads the file, so it can neither stop nor slow the
training.
"""

import importlib.util
import json
import logging
import math
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serl_client.errors import ConfigError

from serl_launcher.store.files import replaced

CHOICES = ("auto", "wandb", "wandb-online", "tensorboard", False)
MISSING = "{0} is not installed (`. examples/install.sh --extra {0}`)"
POLL_S = 1.0
BLOCKS, BLOCK = 256, 8192  # what `sample` reads at most: parts, and bytes of each
FINISH_S = 5.0  # seconds that the end of a run waits for the mirror to write the rest

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends records {"kind", "time" (seconds since 1970), ...} to a file; each is on disk when the call returns.

    A number that is not finite is written as null, so that any JSON reader accepts the file. Of the kind "update" only
    records with more than `updates` are written: those that are made again after a crash are there already.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_torn(path):
            self._append("\n")  # a crash tore the last line; the next one begins on its own
        self._once, self.updates = set[tuple[str, str]](), -1
        for record in read(path):
            kind, updates = str(record.get("kind")), record.get("updates")
            if "id" in record:
                self._once.add((kind, str(record["id"])))
            if kind == "update" and isinstance(updates, int):
                self.updates = updates  # the last one's: a damaged one before it hides nothing

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one record of plain values."""
        if kind == "update" and values.get("updates", math.inf) <= self.updates:
            return
        record = {"kind": kind, "time": round(time.time(), 3), **values}
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._append(json.dumps(finite) + "\n")

    def once(self, kind: str, identity: str, values: Mapping[str, Any]) -> None:
        """Append a record with this "id", unless the file holds one already, also from an earlier start."""
        if (kind, identity) not in self._once:
            self._once.add((kind, identity))
            self.write(kind, {"id": identity, **values})

    def _append(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all whole records of a file, one line after the other; none if there is no file."""
    return (record for record, _ in _news(path, 0))


def sample(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of any size, in order: all of a small one, else those of BLOCKS evenly spaced parts.

    The last part is the file's end. At most BLOCKS * BLOCK bytes are read.
    """
    size = path.stat().st_size if path.exists() else 0
    if size <= BLOCKS * BLOCK:
        yield from read(path)
        return
    with open(path, "rb") as file:
        for i in range(BLOCKS):
            file.seek(i * (size - BLOCK) // (BLOCKS - 1))
            for line in file.read(BLOCK).splitlines()[1:]:  # the first one is a part
                if (record := _record(line)) is not None:
                    yield record


def _is_torn(path: Path) -> bool:
    with suppress(OSError), open(path, "rb") as file:  # there is none, or it is empty
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


# -- the mirror
def check(choice: str | bool) -> None:
    """Raise ConfigError if `choice` is none of CHOICES, or names a package that is not installed."""
    if choice not in CHOICES:
        raise ConfigError(f"log={choice}: say log=auto, wandb, wandb-online, tensorboard or false")
    if choice not in ("auto", False) and not _is_installed(package := _package(choice)):
        raise ConfigError(f"{MISSING.format(package)}: install it, or say log=false")


@contextmanager
def mirrored(path: Path, choice: str | bool) -> Iterator[None]:
    """Mirror the metrics file `path`, in a folder beside it that is named after the package, while this lasts.

    choice: "wandb" (files only; `wandb sync` sends them), "wandb-online" (needs `wandb login`), "tensorboard" (files),
    False, or "auto": wandb if it is installed. A wandb run's id stays the same over restarts. Raises ConfigError as
    `check`, nothing later.
    """
    check(choice)
    if choice == "auto" and os.environ.get("WANDB_MODE") == "disabled":  # wandb's own way to say so
        choice = False
    package = _package(choice)
    installed = _is_installed(package)
    if not installed and choice:
        log.info("%s: metrics are in %s alone", MISSING.format(package), path.name)
    if not installed or not choice:
        yield
        return
    child = _start(path, str(choice))
    try:
        yield
    finally:
        if child is not None and child.stdin is not None:
            child.stdin.close()
            try:
                child.wait(FINISH_S)
            except subprocess.TimeoutExpired:
                log.info("%s is still busy with the rest: it goes on by itself", package)


def _package(choice: str | bool) -> str:
    return "tensorboard" if choice == "tensorboard" else "wandb"


def _start(path: Path, choice: str) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", "serl_launcher.training.metrics", str(path), choice]
    try:
        (path.parent / _package(choice)).mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
        )  # fmt: skip
    except OSError as error:
        log.warning("%s does not start, training goes on: %s", _package(choice), error)
        return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return False  # sys.modules rules it out


def mirror(path: Path, choice: str) -> None:
    """Run the mirror process: send each record of `path` until the trainer closes our stdin or ends; then the rest.

    `sent.json` in the mirror's folder keeps the run's id and how far the file was sent. After a kill, a few records
    come twice.
    """
    folder = path.parent / _package(choice)
    sent = folder / "sent.json"
    state = json.loads(sent.read_text()) if sent.exists() else {"id": uuid.uuid4().hex[:8], "bytes": 0, "records": 0}
    add, flush, finish = _tensorboard(folder) if choice == "tensorboard" else _wandb(path.parent, state["id"], choice)
    is_last = False
    while True:
        for record, end in _news(path, state["bytes"]):
            add(record, state["records"])
            state = state | {"bytes": end, "records": state["records"] + 1}
        flush()
        with replaced(sent) as aside:
            aside.write_text(json.dumps(state))
        if is_last:
            break
        is_last = bool(select.select([sys.stdin], [], [], POLL_S)[0])
    finish()


Add = Callable[[Mapping[str, Any], int], None]  # a record, and its number in the file
Call = Callable[[], None]


def _wandb(folder: Path, identity: str, choice: str) -> tuple[Add, Call, Call]:
    """Return what adds a record to a wandb run below `folder`, what flushes, and what ends it."""
    import wandb

    online = choice == "wandb-online"
    settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
    run = wandb.init(
        project="retake", dir=folder, id=identity, name=folder.name, settings=settings,
        mode="online" if online else "offline", resume="allow" if online else None,
    )  # fmt: skip
    for kind in ("update", "episode"):
        run.define_metric(f"{kind}/*", step_metric=f"{kind}/updates")
    return lambda record, number: run.log(_numbers(record), step=number), lambda: None, run.finish


def _tensorboard(folder: Path) -> tuple[Add, Call, Call]:
    """Return what adds a record to a new event file in `folder`, over the updates made, what flushes, and what ends."""
    from tensorboard.compat.proto import event_pb2, summary_pb2  # torch.utils.tensorboard does the same with torch
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    events: Any = event_pb2
    summaries: Any = summary_pb2
    writer = EventFileWriter(str(folder))

    def add(record: Mapping[str, Any], number: int) -> None:
        values = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in _numbers(record).items()]
        step = int(record.get("updates", number))
        shown = summaries.Summary(value=values)
        writer.add_event(events.Event(wall_time=record["time"], step=step, summary=shown))

    return add, writer.flush, writer.close


def _news(path: Path, begin: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (record, the byte behind it) of each whole line from byte `begin` on; all if the file became shorter."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(begin if begin <= path.stat().st_size else 0)
        while (line := file.readline()).endswith(b"\n"):
            if (record := _record(line)) is not None:
                yield record, file.tell()


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None for one that a crash has torn, or that is damaged."""
    try:
        record = json.loads(line)
    except (RecursionError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record as {kind/name: value}."""
    kind = record.get("kind", "")
    return {f"{kind}/{name}": value for name, value in record.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    metrics = Path(sys.argv[1])
    try:
        mirror(metrics, sys.argv[2])
    except Exception as error:  # the last word of this process
        file = metrics.parent / _package(sys.argv[2]) / "mirror.log"
        logging.basicConfig(filename=file)
        log.exception("the mirror")
        reason = str(error).partition("\n")[0] or type(error).__name__
        sys.stderr.write(f"{file.parent.name} has stopped, training goes on: {reason}; see {file}\n")
        sys.exit(1)
