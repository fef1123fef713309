"""Reads and writes key files (mode 0600) that encrypt and authenticate connections (CURVE), and name a client."""

import json
import os
import re
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zmq.utils import z85

from serl_client.errors import ConfigError

ROLES = ("viewer", "actor", "operator")  # each may do what those before it may
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Key:
    """Holds a client's name and role, its two CURVE keys, and the learner's public key (Z85)."""

    name: str
    role: str
    public: str
    secret: str = field(repr=False)
    server: str

    @classmethod
    def read(cls, file: Path) -> "Key":
        """Read a key file. Raises ConfigError if it is no key, or if others than its owner may read it."""
        try:
            key = cls(**read_private(file))
            if not NAME.fullmatch(key.name) or key.role not in ROLES:
                raise ValueError
            for text in (key.public, key.secret, key.server):
                check_curve(text)
        except (TypeError, ValueError):
            raise ConfigError(f"{file} is no key: make one on the learner with tools/keys.py make NAME") from None
        return key

    def write(self, file: Path) -> None:
        write_private(file, asdict(self))

    def owns(self, name: str) -> bool:
        return owns(self.name, name)


def owns(holder: str, name: str) -> bool:
    """Return whether `name` is the holder's own, or one below it: left, left/status."""
    return name == holder or name.startswith(f"{holder}/")


def known_as(key: Key | None, name: str) -> str:
    """Return the name of a tool: its own, below that of its key if it has one."""
    return f"{key.name}/{name}" if key else name


def check_curve(text: Any) -> None:
    """Raise ValueError unless `text` is a CURVE key in Z85."""
    try:
        is_key = isinstance(text, str) and len(text) == 40 and len(z85.decode(text.encode())) == 32
    except (KeyError, struct.error):  # what is no letter of Z85, and five letters that are more than 32 bits
        is_key = False
    if not is_key:
        raise ValueError("no CURVE key")


def read_private(file: Path) -> Any:
    """Return the JSON in a file. Raises ConfigError if others than its owner may read it, or if it is damaged."""
    try:
        return json.loads(private_text(file, "tools/keys.py on the learner makes keys"))
    except ValueError:
        raise ConfigError(f"{file} is damaged: make it anew with tools/keys.py on the learner") from None


def private_text(file: Path, cure: str) -> str:
    """Return a file's text. Raises ConfigError, with its cure, if it cannot be read, or if others than its owner may
    read it; ValueError if it is no text."""
    try:
        with open(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise ConfigError(f"{file} has mode {mode:04o}, so others may use the key: say chmod 600 {file}")
            return opened.read()
    except OSError as error:
        raise ConfigError(f"cannot read {file} ({error.strerror}): {cure}. Or give another file") from None


def write_private(file: Path, content: Any) -> None:
    """Replace a file at once by JSON that only its owner may read."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump(content, opened, indent=1)
        opened.flush()
        os.fsync(opened.fileno())
    aside.rename(file)
