#!/usr/bin/env python
"""Makes, lists and revokes the keys of a learner that others reach over a network; run it where the learner runs.

tools/keys.py make NAME --role actor|operator|viewer   a key for one robot PC or one person, in KEYS/NAME.key
tools/keys.py list                                     who has one, and who is refused
tools/keys.py revoke NAME                              it is refused from its next message on, for good
tools/keys.py unban NAME                                it is banned for its bad messages: let it in at once
tools/keys.py api NAME                                  its Api-Key, for a client of openpi (docs/guides/openpi.md)
tools/keys.py page NAME --role operator|viewer          a key for the page in a browser alone (docs/guides/page.md)

--keys KEYS is the folder (default: keys). An actor appends records and asks for actions; an operator may steer the
plan and label any episode besides; a viewer sees the status. See docs/guides/security.md.
"""

import argparse
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from serl_client.errors import ConfigError
from serl_client.keys import NAME, ROLES, Key, write_private

from serl_launcher.error_log import in_one_sentence
from serl_launcher.service.access import AllowList

RESERVED = "server"


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "list", "revoke", "unban", "api", "page"))
    parser.add_argument("name", nargs="?")
    parser.add_argument("--role", choices=ROLES)
    parser.add_argument("--keys", type=Path, default=Path("keys"))
    options = parser.parse_args()
    is_new = options.what in ("make", "page")
    if (options.what == "list") != (options.name is None) or is_new != (options.role is not None):
        parser.error("make NAME --role ROLE, page NAME --role ROLE, list, revoke NAME, unban NAME or api NAME")
    with locked(options.keys, is_new):
        print(act(options.what, options.keys, options.name, options.role))


def act(what: str, folder: Path, name: str, role: str) -> str:
    """Do it; returns what to say."""
    if what == "make":
        return make(folder, name, role)
    if what == "page":
        return page(folder, name, role)
    if what == "list":
        return listed(AllowList(folder))
    if what == "api":
        return AllowList(folder).api_key(name)
    return revoke(folder, name) if what == "revoke" else lift(folder, name)


@contextmanager
def locked(folder: Path, is_new: bool) -> Iterator[None]:
    """One of these programs at a time; makes the folder and the learner's own key where there are none and `is_new`."""
    if is_new:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not folder.is_dir():
        raise ConfigError(f"there are no keys in {folder}: begin with tools/keys.py make NAME --role ROLE")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_new and not (folder / "server.key").exists():
            public, secret = pair()
            write_private(folder / "allowed.json", [])
            write_private(folder / "server.key", {"public": public, "secret": secret})
        yield
    finally:
        os.close(descriptor)


def make(folder: Path, name: str, role: str) -> str:
    """A new key, known to the learner at once."""
    allowed, public, secret = new(folder, name)
    file = folder / f"{name}.key"
    Key(name, role, public, secret, allowed.public).write(file)
    admit(allowed, name, role, public)
    return f"{file} is the key of {name}, {role}: move it to that machine (scp -p), and keep no copy"


def page(folder: Path, name: str, role: str) -> str:
    """A new key that opens the page alone: nobody keeps what it would open other doors with."""
    if role == "actor":
        raise ConfigError("a key for the page has --role operator, which gives orders, or --role viewer")
    allowed, public, _ = new(folder, name)
    admit(allowed, name, role, public)
    token = allowed.api_key(name, "page")
    return (
        f"{name}, {role}: open the link that the learner prints, with this behind its # instead: {token}\n"
        f"It is good until `tools/keys.py revoke {name}`. Nothing keeps it: it is not shown again"
    )


def new(folder: Path, name: str) -> tuple[AllowList, str, str]:
    """(allow list, public, secret) of a key that nobody has yet."""
    if not NAME.fullmatch(name) or name == RESERVED:
        raise ConfigError(f"a name has letters, digits, dots, dashes and underscores, and is not {RESERVED}: {name!r}")
    allowed = AllowList(folder)
    if any(entry["name"] == name and entry["role"] in ROLES for entry in allowed.entries()):
        raise ConfigError(f"there is a key {name} already: revoke it first, or take another name")
    return allowed, *pair()


def admit(allowed: AllowList, name: str, role: str, public: str) -> None:
    allowed.put([*allowed.entries(), {"name": name, "role": role, "public": public}])
    (allowed.folder / f"{name}.banned").unlink(missing_ok=True)  # which was of an earlier key


def pair() -> tuple[str, str]:
    """(public, secret) in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def listed(allowed: AllowList) -> str:
    lines = [
        f"{entry['name']:20} {allowed.find(entry['public']).role:10} {entry['public']}" for entry in allowed.entries()
    ]
    return "\n".join(lines) or "nobody has a key"


def revoke(folder: Path, name: str) -> str:
    """Its entry stays, so that the log can say whose key it was."""
    allowed = AllowList(folder)
    entries = allowed.entries()
    mine = [entry for entry in entries if entry["name"] == name and entry["role"] in ROLES]
    if not mine:
        raise ConfigError(f"nobody is let in as {name}: tools/keys.py list says who is")
    mine[0]["role"] = "revoked"
    allowed.put(entries)
    return f"{name} is refused from its next message on"


def lift(folder: Path, name: str) -> str:
    try:
        (folder / f"{name}.banned").unlink()
    except FileNotFoundError:
        raise ConfigError(f"{name} is not refused for bad messages: tools/keys.py list says who is") from None
    return f"{name} is let in again"


if __name__ == "__main__":
    main()
