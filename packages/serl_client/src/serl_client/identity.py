"""Says by which name an actor goes, and which outboxes beside its own hold records that nobody delivers.

A container or a pod that nobody gave a name keeps its first one beside the actors' folders, so that it finds its outbox
again: its host has another name at each start.
"""

import os
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from serl_client.keys import NAME, Key
from serl_client.lockfile import holder

MACHINE_ID = Path("/etc/machine-id")
UNNAMED = "auto"  # the name in base.yaml of an actor that was given none
IMPORTED = "dataset-"  # begins the name of a learner's importer, which delivers its own records
CONTAINER = re.compile("[0-9a-f]{12}")  # the host's name in a container that was given none
POD = re.compile(".+-[bcdfghjklmnpqrstvwxz2456789]{5}")  # in one of Kubernetes, but for a StatefulSet, whose names stay
OPERATOR = "operator"  # the folder of tools/label.py, which delivers its own records, too
KEPT = ".name"  # file in the folder of the actors' folders


def named(name: str, key: Key | None, actors: Path) -> str:
    """Return the name of an actor: the given one, else that of its key, else the kept one, else that of its machine.

    actors: the run's folder of actors' folders. A kept name is left to the process that has its outbox, and to whoever
    is one of several of a SLURM job.
    """
    if name != UNNAMED:
        return name
    if key:
        return key.name
    own, kept = machine(), ""
    if not _passes(own):
        return own
    with suppress(OSError, ValueError):
        kept = (actors / KEPT).read_text()
    is_free = NAME.fullmatch(kept) and not any(holder(path) for path in _outboxes(actors / kept))
    return kept if is_free and not (actors / own).exists() else own


def keep_name(name: str, actors: Path) -> None:
    """Keep a container's name for its next start without one, unless one is kept, or the disk fails."""
    if _passes(name) and not (actors / KEPT).exists():
        with suppress(OSError):
            (actors / f"{KEPT}.new").write_text(name)
            (actors / f"{KEPT}.new").rename(actors / KEPT)


def undelivered(names: Collection[str], actors: Path) -> dict[str, int]:
    """Return {name: bytes} of other actors than these whose outbox holds records, and that no process has open."""
    found = {}
    for outbox in _outboxes(actors):
        other = str(outbox.parent.relative_to(actors))
        with suppress(OSError):
            size = sum(file.stat().st_size for file in outbox.glob("*.records"))
            if size and other not in {*names, OPERATOR} and not other.startswith(IMPORTED) and not holder(outbox):
                found[other] = size
    return found


def machine() -> str:
    """Return a name for this machine's actor, the same after a restart, because the name of the outbox depends on it.

    It is the host's name, with the numbers of the array's task and of the process if SLURM has started several.
    """
    host = socket.gethostname().partition(".")[0]
    if host in ("", "localhost"):
        host = MACHINE_ID.read_text()[:8] if MACHINE_ID.exists() else "actor"
    return re.sub("[^A-Za-z0-9._-]", "-", "-".join([host, *_numbers()]))[:64]


def _passes(name: str) -> bool:
    """Return whether this is the name of a container, which has another one at its next start."""
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ and POD.fullmatch(name)
    return bool(is_pod or CONTAINER.fullmatch(name))


def _numbers() -> list[str]:
    several = os.environ.get("SLURM_NTASKS", "1") != "1"
    numbers = [os.environ.get("SLURM_ARRAY_TASK_ID"), os.environ.get("SLURM_PROCID") if several else None]
    return [number for number in numbers if number]


def _outboxes(folder: Path) -> list[Path]:
    """Return the outboxes in an actor's folder, or in those of several; actors of one start lie in a common one."""
    return [path for depth in ("", "*/", "*/*/") for path in sorted(folder.glob(f"{depth}outbox"))]
