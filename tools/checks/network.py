"""Checks of what lies between actor and learner: ports, protocol, keys, the run's Spec, clocks and the outbox."""

import fcntl
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serl_client import messages as m
from serl_client.errors import ConfigError, Timeout, TrainerError, VersionMismatch
from serl_client.keys import Key, known_as
from serl_client.link import Link
from serl_client.outbox import Outbox
from serl_client.spec import Spec

from serl_launcher.service.gate import AllowList, check_address
from serl_launcher.service.launcher import writable

from .common import Finding, Run

PATIENCE = 3.0  # seconds
FAREWELL = 200  # ms
# What every ZeroMQ peer says first (ZMTP 3.0): this signature and version, then the mechanism of its security, whether
# it is the server, and zeros: GREETING bytes in all.
OPENING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00"
GREETING = 64
SKEW = 1.0  # seconds


def folder(run: Run) -> Iterator[Finding]:
    """Whether the run's folder can be written, and whether a learner has it already."""
    lock = writable(run.folder) / "lock"
    if lock.exists():
        with open(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"{run.folder} is in use by the learner with process {file.read().strip()}"
                yield Finding("FAIL", text, "stop it (kill that process), or choose run_dir=...")
                return
    yield Finding("ok", f"{run.folder} can be written, and no learner runs there")


def ports(run: Run) -> Iterator[Finding]:
    """Whether the learner can listen."""
    names = ["port", "inference_port", *["live"] * (run.config.live is not None)]
    taken = {name: why for name in names if (why := _taken(str(run.config.host), run.config[name]))}
    for name, why in taken.items():
        text = f"cannot listen on {run.config.host}:{run.config[name]}: {why}"
        if holder := _holder(run, int(run.config[name])):
            text += f" ({holder})"
        yield Finding("FAIL", text, f"stop what listens there (`ss -ltnp` names it), or choose {name}=...")
    if not taken:
        yield Finding(
            "ok", f"{', '.join(f'{name} {run.config[name]}' for name in names)} on {run.config.host} are free"
        )


def _taken(host: str, port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError, TypeError) as error:
            return str(getattr(error, "strerror", None) or error)
    return ""


def _holder(run: Run, port: int) -> str:
    """Which learner listens there, if one does that anybody may ask."""
    try:
        with _viewer(str(run.config.host), port, None) as link:
            return f"a learner, run {link.hello(1.0).run[:12] or 'new'}"
    except TrainerError:
        return ""


def keys(run: Run) -> Iterator[Finding]:
    """Who is let in, and whether anybody may be reached from elsewhere."""
    folder = Path(run.config["keys"]) if run.config["keys"] else None
    check_address(f"tcp://{run.config.host}:{run.config.port}", folder)
    if folder is None:
        yield Finding("ok", f"none, and host={run.config.host} is reached from this machine alone")
        return
    allowed = AllowList(folder)
    entries = [(entry["name"], allowed.find(entry["public"]).role) for entry in allowed.entries()]
    if banned := [name for name, role in entries if role == "banned"]:
        advice = "; ".join(f"`tools/keys.py lift {name}`" for name in banned)
        yield Finding("WARN", f"refused for bad messages: {', '.join(banned)}", f"to let them in again: {advice}")
    said = ", ".join(f"{name} ({role})" for name, role in entries)
    if not {"actor", "operator"} & {role for _, role in entries}:
        yield Finding("FAIL", f"no key of an actor: {said or 'none at all'}", "tools/keys.py make NAME --role actor")
        return
    yield Finding("ok", said)


def key(run: Run) -> Iterator[Finding]:
    """The key of this robot PC."""
    if not run.config.key:
        yield Finding("ok", "none: that is for a learner on this machine, or behind a tunnel")
        return
    run.key = Key.read(Path(run.config.key))
    if not run.key.owns(str(run.config.name)):
        advice = f"say name={run.key.name}, or {run.key.name}/2 for a second actor"
        yield Finding("FAIL", f"{run.config.key} is the key of {run.key.name}, not of {run.config.name}", advice)
    elif run.key.role == "viewer":
        advice = f"on the learner: tools/keys.py make {run.key.name} --role actor"
        yield Finding("FAIL", f"{run.config.key} is a viewer's: it may append nothing", advice)
    else:
        yield Finding("ok", f"{run.key.name}, {run.key.role}")


def reachable(run: Run) -> Iterator[Finding]:
    """Whether somebody listens at the learner's address, and whether it is a learner, with or without keys."""
    host, port = str(run.config.ip), int(run.config.port)
    try:
        greeting, seconds = _greeted(host, port)
    except socket.gaierror as error:
        yield Finding("FAIL", f"{host} is no known name: {error.strerror}", "say the learner's address, ip=10.0.0.5")
    except ConnectionRefusedError:
        advice = (
            "start the learner; if it runs, compare port= there, and its host=: on 127.0.0.1 only its own machine "
            f"reaches it, so use a tunnel (ssh -L {port}:localhost:{port} GPU_BOX) or keys (docs/security.md)"
        )
        yield Finding("FAIL", f"nobody listens at {host}:{port}", advice)
    except OSError as error:
        advice = "look at the cable, the address (ping) and the firewall of the learner's machine for this port"
        yield Finding("FAIL", f"{host}:{port} cannot be reached: {error.strerror or error}", advice)
    else:
        yield _judged(f"{host}:{port}", greeting, seconds, run.key is not None)


def _greeted(host: str, port: int) -> tuple[bytes, float]:
    """What a listener says to a ZeroMQ peer (GREETING bytes, or what came), and the seconds that connecting took."""
    begin = time.monotonic()
    with socket.create_connection((host, port), PATIENCE) as peer:
        seconds = time.monotonic() - begin
        peer.sendall(OPENING)
        said = b""
        try:
            while len(said) < GREETING and (part := peer.recv(GREETING - len(said))):
                said += part
        except (TimeoutError, ConnectionResetError):
            pass
    return said, seconds


def _judged(address: str, greeting: bytes, seconds: float, has_key: bool) -> Finding:
    if not greeting:
        advice = "is the learner stopped (Ctrl-Z)? Behind a tunnel: does the learner run at its other end?"
        return Finding("FAIL", f"{address} takes connections and says nothing", advice)
    if greeting[:1] + greeting[9:10] != b"\xff\x7f" or len(greeting) < GREETING:
        advice = f"another program has that port: compare port= of the learner with {address.rpartition(':')[2]}"
        return Finding("FAIL", f"{address} is no learner, it says {greeting[:24]!r}", advice)
    mechanism = greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
    if mechanism == "CURVE" and not has_key:
        advice = "have a key made there (`tools/keys.py make`), bring the file here (mode 0600) and say key=FILE"
        return Finding("FAIL", f"{address} lets in only who has a key", advice)
    if mechanism == "NULL" and has_key:
        return Finding("FAIL", f"{address} has no keys, and key= is given", "leave key= out, or start it with keys=")
    return Finding("ok", f"{address} answers after {seconds * 1e3:.1f} ms, security {mechanism}")


def protocol(run: Run) -> Iterator[Finding]:
    """Whether the learner welcomes us."""
    try:
        with _viewer(str(run.config.ip), run.config.port, run.key) as link:
            run.welcome = link.hello(PATIENCE)
    except VersionMismatch as error:
        yield Finding("FAIL", str(error), "bring both machines to the same version (git pull, uv sync)")
        return
    except Timeout:
        advice = "another program that speaks ZeroMQ, or a learner that is stopped: compare port=, look at its screen"
        yield Finding("FAIL", f"{run.config.ip}:{run.config.port} does not answer to Hello", advice)
        return
    state = run.welcome.notice.get("degraded")
    if state:
        yield Finding("FAIL", f"the learner acknowledges nothing: {state}", "make room on its disk; see its screen")
    phase = run.welcome.notice["directive"].get("phase", "none yet")
    yield Finding("ok", f"run {run.welcome.run[:12] or 'new'}, phase {phase}, protocol {m.PROTOCOL[0]}-{m.PROTOCOL[1]}")


@contextmanager
def _viewer(host: str, port: int, key: Key | None) -> Iterator[Link]:
    """A connection to a learner that takes its leave."""
    link = Link(f"tcp://{host}:{port}", m.Hello(m.PROTOCOL, "viewer", known_as(key, "doctor")), key)
    try:
        yield link
    finally:
        link.send(m.Bye())
        link.close(FAREWELL)


def same_robot(run: Run) -> Iterator[Finding]:
    """Whether the run is of this robot."""
    if run.welcome is None or run.spec is None:
        return
    if run.welcome.spec is None:
        yield Finding("ok", "the run is new: it will be of this robot")
    elif difference := Spec.from_dict(run.welcome.spec).difference(run.spec):
        advice = "start the learner with another run_dir=..., or the actor with the task= (and options) of the run"
        yield Finding("FAIL", f"the run is of another robot or task (the run, here): {difference}", advice)
    else:
        yield Finding("ok", "the run is of this robot")


def clocks(run: Run) -> Iterator[Finding]:
    """How far the clocks differ: no matter for the data (order is by number), but for reading two logs together."""
    if run.welcome is None:
        return
    with _viewer(str(run.config.ip), run.config.port, run.key) as link:
        link.hello(PATIENCE)
        before = time.time()
        report: Any = link.call(m.Status(), PATIENCE)
        after = time.time()
    others = [c["actor"] for c in report.report["clients"] if c["role"] == "actor" and c["seen_s"] < PATIENCE]
    if str(run.config.name) in others:
        yield Finding("FAIL", f"an actor named {run.config.name} is connected", "stop it, or choose name=...")
    skew = report.report["time"] - (before + after) / 2
    advice = "no matter for the data; for logs set both clocks (timedatectl set-ntp true)"
    text = f"the learner's clock is {skew:+.3f} s from ours, an exchange takes {(after - before) * 1e3:.1f} ms"
    yield Finding("WARN", text, advice) if abs(skew) > SKEW else Finding("ok", text)


def inference(run: Run) -> Iterator[Finding]:
    """Whether the process that answers with actions can be reached."""
    if run.welcome is None or run.config.inference != "remote":
        return
    address = run.welcome.inference.replace("*", str(run.config.ip))
    url = urlsplit(address)
    try:
        greeting, seconds = _greeted(url.hostname or "", url.port or 0)
    except OSError as error:
        advice = "it starts after the first actor has come; else see the learner's screen, and its inference_port="
        state = "FAIL" if run.welcome.spec is not None else "ok"
        yield Finding(state, f"no inference at {address} yet: {error}", advice if state == "FAIL" else "")
        return
    yield _judged(address.removeprefix("tcp://"), greeting, seconds, run.key is not None)


def outbox(run: Run) -> Iterator[Finding]:
    """What lies in this actor's outbox, and for which run."""
    place = Path(run.folder) / "outbox"
    if not place.exists():
        yield Finding("ok", "the outbox is new")
        return
    try:
        opened = Outbox(place, int(run.config.outbox_gb * 1e9))
    except ConfigError as error:
        yield Finding("FAIL", str(error), "stop that actor, or choose name=...")
        return
    records, size = opened.pending
    opened.close()
    if records and run.welcome is not None and opened.run not in ("", run.welcome.run):
        text = f"{records} records of run {opened.run[:12]} wait in {place}, the learner is {run.welcome.run[:12]}"
        yield Finding("FAIL", text, "start the learner with that run's run_dir, or choose another run_dir=... here")
        return
    yield Finding("ok", f"{records} records ({size / 1e6:.1f} MB) of earlier starts wait in the outbox")
