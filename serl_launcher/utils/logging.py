"""Metrics as JSON lines: one file per process, one whole line per record, continued by a resumed run."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends records {"kind", "time" (seconds since 1970), ...} to a file; each is on disk when the call returns.

    A number that is not finite is written as null, so that any reader of JSON takes the file.
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
        """Append a record with this "id", unless the file holds one already, from this start or an earlier one."""
        if (kind, identity) not in self._once:
            self._once.add((kind, identity))
            self.write(kind, {"id": identity, **values})

    def _append(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file; none when there is no file."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a crash
        if isinstance(record, dict):
            records.append(record)
    return records
