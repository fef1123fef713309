"""Checks of what lies between actor and learner: ports, protocol, keys, the run's Spec, clocks and the outbox."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serl_client import messages as m
from serl_client.connection import Connection, inference_at, tcp
from serl_client.errors import ConfigError, Timeout, VersionMismatch
from serl_client.identity import undelivered
from serl_client.keys import Key, known_as
from serl_client.lockfile import holder
from serl_client.outbox import Outbox
from serl_client.reach import Look, look, look_at, unwelcome
from serl_client.spec import Spec

from serl_launcher.launcher import check_ports, writable
from serl_launcher.service.access import AllowList, check_address

from .common import Finding, Run

PATIENCE = 3.0  # seconds
FAREWELL = 200  # ms
SKEW = 1.0  # seconds


def folder(run: Run) -> Iterator[Finding]:
    """Whether the run's folder can be written, and whether a learner has it already."""
    if process := holder(writable(run.folder)):
        text = f"{run.folder} is in use by the learner with process {process}"
        yield Finding(
            "FAIL", text, f"stop it (`.venv/bin/python tools/plan.py stop {run.folder}`), or choose run_dir=..."
        )
    else:
        yield Finding("ok", f"{run.folder} can be written, and no learner runs there")


def ports(run: Run) -> Iterator[Finding]:
    """Whether the learner can listen."""
    check_ports(run.config)
    yield Finding("ok", f"ports {run.config.port} and {run.config.inference_port} on {run.config.host} are free")


def keys(run: Run) -> Iterator[Finding]:
    """Who is let in, and whether anybody may be reached from elsewhere."""
    folder = Path(run.config["keys"]) if run.config["keys"] else None
    check_address(tcp(run.config.host, run.config.port), folder)
    if folder is None:
        yield Finding("ok", f"none, and host={run.config.host} is reached from this machine alone")
        return
    allowed = AllowList(folder)
    entries = [(entry["name"], allowed.find(entry["public"]).role) for entry in allowed.entries()]
    if banned := [name for name, role in entries if role == "banned"]:
        advice = "; ".join(f"`tools/keys.py unban {name}`" for name in banned)
        yield Finding("WARN", f"refused for bad messages: {', '.join(banned)}", f"to let them in again: {advice}")
    said = ", ".join(f"{name} ({role})" for name, role in entries)
    if not {"actor", "operator"} & {role for _, role in entries}:
        yield Finding("FAIL", f"no key of an actor: {said or 'none at all'}", "tools/keys.py make NAME --role actor")
        return
    yield Finding("ok", said)


def key(run: Run) -> Iterator[Finding]:
    """The key of this robot PC."""
    if not run.config.key:
        run.config.name = run.name
        yield Finding("ok", "none: that is for a learner on this machine, or behind a tunnel")
        return
    run.key = Key.read(Path(run.config.key))
    run.config.name = run.name
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
    yield _finding(look(str(run.config.ip), int(run.config.port), has_key=run.key is not None))


def _finding(found: Look) -> Finding:
    return Finding("ok" if found.ok else "FAIL", found.text, found.advice)


def protocol(run: Run) -> Iterator[Finding]:
    """Whether the learner welcomes us."""
    try:
        with _viewer(str(run.config.ip), run.config.port, run.key) as link:
            run.welcome = link.hello(PATIENCE)
    except VersionMismatch as error:
        yield Finding("FAIL", *str(error).split(". ", 1))
        return
    except Timeout:
        yield _finding(unwelcome(f"{run.config.ip}:{run.config.port}"))
        return
    state = run.welcome.state.get("degraded")
    if state:
        yield Finding("FAIL", f"the learner acknowledges nothing: {state}", "make room on its disk; see its screen")
    phase = run.welcome.state["directive"].get("phase", "none yet")
    yield Finding("ok", f"run {run.welcome.run[:12] or 'new'}, phase {phase}, protocol {m.PROTOCOL[0]}-{m.PROTOCOL[1]}")


@contextmanager
def _viewer(host: str, port: int, key: Key | None) -> Iterator[Connection]:
    """A connection to a learner that takes its leave."""
    link = Connection(tcp(host, port), m.Hello(m.PROTOCOL, "viewer", known_as(key, "doctor")), key)
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
        return
    theirs, mine = Spec.from_dict(run.welcome.spec), run.spec
    if run.env is not None and run.env.clock == "simulated":
        mine = mine.as_in(theirs)
    if difference := theirs.difference(mine):
        advice = "start the learner with another run_dir=..., or the actor with the task= (and options) of the run"
        yield Finding("FAIL", f"the run is of another robot or task (the run, here): {difference}", advice)
    else:
        yield Finding("ok", "the run is of this robot")


def name(run: Run) -> Iterator[Finding]:
    """Whether the actor's name is free: each of a run has its own."""
    if run.welcome is None:
        return
    with _viewer(str(run.config.ip), run.config.port, run.key) as link:
        report: Any = link.call(m.Status(), PATIENCE)
    others = [c["actor"] for c in report.report["clients"] if c["role"] == "actor" and c["seen_s"] < PATIENCE]
    if str(run.config.name) in others:
        yield Finding("FAIL", f"an actor named {run.config.name} is connected", "stop it, or choose name=...")
    else:
        yield Finding("ok", f"{run.config.name}; connected are {', '.join(others) or 'no actors'}")


def clocks(run: Run) -> Iterator[Finding]:
    """How far the clocks differ: no matter for the data (order is by number), but for reading two logs together."""
    if run.welcome is None:
        return
    with _viewer(str(run.config.ip), run.config.port, run.key) as link:
        link.hello(PATIENCE)
        before = time.time()
        report: Any = link.call(m.Status(), PATIENCE)
        after = time.time()
    skew = report.report["time"] - (before + after) / 2
    advice = "nothing to do for the data; for logs set both clocks (`timedatectl set-ntp true`)"
    text = f"the learner's clock is {skew:+.3f} s from ours, an exchange takes {(after - before) * 1e3:.1f} ms"
    yield Finding("WARN", text, advice) if abs(skew) > SKEW else Finding("ok", text)


def inference(run: Run) -> Iterator[Finding]:
    """Whether the process that answers with actions can be reached."""
    if run.welcome is None or run.config.inference != "remote":
        return
    said = None if run.config.inference_port == "auto" else run.config.inference_port
    address = inference_at(run.welcome.inference, tcp(str(run.config.ip), run.config.port), said)
    found = look_at(address, has_key=run.key is not None, option="inference_port")
    if found.is_refused:  # its machine answers, so it may still be starting, or wait for the first actor
        yield Finding("WARN", found.text, found.advice)
    else:
        yield _finding(found)


def outbox(run: Run) -> Iterator[Finding]:
    """What lies in this actor's outbox, and for which run."""
    place = Path(run.folder) / "outbox"
    for other, size in undelivered(run.name, run.actors).items():
        text = f"{run.actors / other / 'outbox'} holds {size / 1e6:.1f} MB of records that nobody delivers"
        yield Finding("WARN", text, f"start the actor once with name={other}: it delivers them first")
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
