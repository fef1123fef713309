"""Writes metrics as JSON lines: one file per process, one line per record, continued by a resumed run.

Their mirror in wandb is a process of its own that reads the file, so wandb can neither stop nor slow the training.
"""

import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serl_client.errors import ConfigError

MODES = ("auto", "offline", "online", False)
MISSING = "wandb is not installed (`. examples/install.sh --extra wandb`)"
POLL_S = 1.0
FINISH_S = 5.0  # seconds that the end of a run waits for wandb to write the rest

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends records {"kind", "time" (seconds since 1970), ...} to a file; each is on disk when the call returns.

    A number that is not finite is written as null, so that any JSON reader accepts the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._once = {(record["kind"], record["id"]) for record in read(path) if "id" in record}
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            self._append("\n")  # a crash tore the last line; the next one begins on its own

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one record of plain values."""
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


def read(path: Path) -> list[dict[str, Any]]:
    """Read all whole records of a file; none if there is no file."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a crash
        if isinstance(record, dict):
            records.append(record)
    return records


# -- wandb
def check(mode: str | bool) -> None:
    """Raise ConfigError if `mode` is none of MODES, or is `offline` or `online` and wandb is not installed."""
    if mode not in MODES:
        raise ConfigError(f"wandb={mode}: say wandb=auto, offline, online or false")
    if mode in ("offline", "online") and not _has_wandb():
        raise ConfigError(f"{MISSING}: install it, or say wandb=false")


@contextmanager
def mirrored(path: Path, mode: str | bool) -> Iterator[None]:
    """Mirror the metrics file `path` in a wandb run, in the folder `wandb` beside it, while this lasts.

    mode: "offline" (files only; `wandb sync` sends them), "online" (needs `wandb login`), False, or "auto": offline
    if wandb is installed. The run's id stays the same over restarts. Raises ConfigError as `check`, nothing later.
    """
    check(mode)
    if mode == "auto" and os.environ.get("WANDB_MODE") == "disabled":  # wandb's own way to say so
        mode = False
    installed = _has_wandb()
    if not installed and mode:
        log.info("%s: metrics are in %s alone", MISSING, path.name)
    if not installed or not mode:
        yield
        return
    child = _start(path, "offline" if mode == "auto" else str(mode))
    try:
        yield
    finally:
        if child is not None:
            child.terminate()
            try:
                child.wait(FINISH_S)
            except subprocess.TimeoutExpired:
                log.info("wandb is still busy with the rest: it goes on by itself")


def _start(path: Path, mode: str) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", "serl_launcher.utils.logging", str(path), mode, str(os.getpid())]
    try:
        (path.parent / "wandb").mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
        )  # fmt: skip
    except OSError as error:
        log.warning("wandb does not start, training goes on: %s", error)
        return None


def _has_wandb() -> bool:
    try:
        return importlib.util.find_spec("wandb") is not None
    except ValueError:
        return False  # sys.modules rules it out


def mirror(path: Path, mode: str, parent: int) -> None:
    """Run the mirror process: send each record of `path` to wandb until SIGTERM or the parent's end; then the rest.

    `wandb/sent.json` keeps the run's id and how far the file was sent. After a kill, a few records come twice.
    """
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    import wandb

    sent = path.parent / "wandb" / "sent.json"
    state = json.loads(sent.read_text()) if sent.exists() else {"id": uuid.uuid4().hex[:8], "bytes": 0, "records": 0}
    online = mode == "online"
    settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
    run = wandb.init(
        project="retake", dir=path.parent, id=state["id"], name=path.parent.name, settings=settings,
        mode="online" if online else "offline", resume="allow" if online else None,
    )  # fmt: skip
    for kind in ("update", "episode"):
        run.define_metric(f"{kind}/*", step_metric=f"{kind}/updates")
    last = False
    while not last:
        last = bool(stopped) or os.getppid() != parent  # before reading: what was written until now is still sent
        for record, end in _news(path, state["bytes"]):
            run.log(_numbers(record), step=state["records"])
            state = state | {"bytes": end, "records": state["records"] + 1}
        aside = sent.with_suffix(".aside")
        aside.write_text(json.dumps(state))
        aside.replace(sent)
        if not last:
            time.sleep(POLL_S)
    run.finish()


def _news(path: Path, begin: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (record, the byte behind it) of each whole line from byte `begin` on; all if the file became shorter."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(begin if begin <= path.stat().st_size else 0)
        while (line := file.readline()).endswith(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # torn by a crash
            if isinstance(record, dict):
                yield record, file.tell()


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record as {kind/name: value}."""
    kind = record.get("kind", "")
    return {f"{kind}/{name}": value for name, value in record.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    metrics = Path(sys.argv[1])
    try:
        mirror(metrics, sys.argv[2], int(sys.argv[3]))
    except Exception as error:  # the last word of this process
        logging.basicConfig(filename=metrics.parent / "wandb" / "mirror.log")
        log.exception("wandb")
        reason = str(error).partition("\n")[0] or type(error).__name__
        sys.stderr.write(f"wandb has stopped, training goes on: {reason}; see {metrics.parent}/wandb/mirror.log\n")
        sys.exit(1)
