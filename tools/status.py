#!/usr/bin/env python
"""Shows who is connected to a learner, what lags and what is missing; also when the learner is down.

tools/status.py [--ip ADDRESS] [--port PORT] [--key FILE] [--run-dir RUN] [--json]
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import TrainerError
from serl_client.keys import Key, known_as
from serl_client.lockfile import holder
from serl_client.names import cleaned
from serl_client.reach import explained

from serl_launcher.error_log import in_one_sentence
from serl_launcher.service.sockets import address_of
from serl_launcher.training.facts import facts_of
from serl_launcher.training.report import took

SILENT_S = 5.0
KNOWN = ("role", "actor", "seen_s")


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ip", help="address of the learner (127.0.0.1, or that of --run-dir)")
    parser.add_argument("--port", type=int, help="its port (5588, or that of --run-dir)")
    parser.add_argument("--key", type=Path, help="your key file, for a learner with keys; any role will do")
    parser.add_argument(
        "--run-dir", type=Path, help="the run's folder, here: no key is needed, and it tells what became of the run"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    address = address_of(options.run_dir, options.ip, options.port, options.key)
    try:
        key = Key.read(options.key) if options.key else None
        with Connection(address, m.Hello(m.PROTOCOL, "viewer", known_as(key, "status")), key) as link:
            report: Any = link.call(m.Status(), timeout=3.0)
            link.send(m.Bye())
            time.sleep(0.05)
    except TrainerError as error:
        print(explained(error, address, has_key=options.key is not None), file=sys.stderr)
        sys.exit(lying(options.run_dir) if options.run_dir else 1)
    print(json.dumps(report.report, indent=2) if options.json else "\n".join(map(cleaned, lines(report.report))))


def lines(report: dict[str, Any]) -> list[str]:
    directive, weights = report["directive"], report["weights"]
    phase, mode = directive.get("phase", "-"), directive.get("mode", "-")
    said = [
        f"run        {report['run'][:12] or 'new: no actor has come yet'}, up {report['uptime_s']:.0f} s",
        f"store      {'DEGRADED: ' + report['degraded'] if report['degraded'] else 'durable'}",
        f"phase      {phase}" + f" ({mode})" * (mode != phase),
        f"weights    version {weights.get('version', 0)} {weights.get('sha256', '')[:12]}",
        f"refused    {refusals(report)}; {report['connections']} connections",
    ]
    for name, source in report["sources"].items():
        held = source["head"] - source["tail"]
        said.append(f"source     {name}: {held:,} of {source['capacity']:,} steps, {source['tail']:,} evicted")
    if count := report.get("set_aside"):
        said.append(f"set aside  {count} episodes hold values that cannot be: tools/store.py show RUN lists them")
    for client in report["clients"]:
        rest = "".join(f", {key} {shown(client[key])}" for key in client if key not in KNOWN and client[key] != "")
        said.append(f"{client['role']:10} {client['actor']}: seen {client['seen_s']} s ago{rest}")
    said += [f"waits      {text}" for text in report["full"]]
    return said + [f"lags       {text}" for text in lags(report)] + [f"missing    {text}" for text in missing(report)]


def refusals(report: dict[str, Any]) -> str:
    """How often what was refused, the most frequent reason first."""
    counts = sorted(report["refusals"].items(), key=lambda item: -item[1])
    return ", ".join(f"{count}x {reason}" for reason, count in counts) or "nothing"


def shown(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def lags(report: dict[str, Any]) -> list[str]:
    """Who has not got the newest directive or weights yet."""
    newest = {"directive": report["directive"].get("number", 0), "version": report["weights"].get("version", 0)}
    names = {"directive": "directive", "version": "weights"}
    return [
        f"{client['actor']}: {names[key]} {client[key]}, the newest is {number}"
        for client in report["clients"]
        for key, number in newest.items()
        if client.get(key, number) != number
    ]


def missing(report: dict[str, Any]) -> list[str]:
    """Who should be there and is not."""
    silent = [
        f"{client['actor']}: silent for {client['seen_s']} s"
        for client in report["clients"]
        if client["role"] == "actor" and client["seen_s"] >= SILENT_S
    ]
    silent += [f"{actor}: silent for {seconds} s" for actor, seconds in report["missing"].items()]
    present = {c["actor"] for c in report["clients"] if c["role"] == "learner" and c["seen_s"] < SILENT_S}
    absent = [name for name in ("trainer", "inference") if name not in present]
    silent += [f"the {name} process: it is starting, or stuck; see the learner's screen" for name in absent]
    if not any(client["role"] == "actor" for client in report["clients"]):
        silent.append("an actor: start one with run_actor.sh")
    return silent


def lying(run_dir: Path) -> str:
    """What a run folder tells by itself."""
    if not run_dir.exists():
        return f"There is no run in {run_dir}."
    if not (run_dir / "lock").exists():
        return f"No learner has ever run in {run_dir}."
    if process := holder(run_dir):
        return f"Process {process} holds {run_dir}, but does not answer at this address: compare port= there."
    begun = (run_dir / "config.yaml").stat().st_mtime if (run_dir / "config.yaml").exists() else 0.0
    for name in ("evaluation.json", "summary.json"):
        if (run_dir / name).exists() and (run_dir / name).stat().st_mtime >= begun:  # else of an earlier start
            return f"The run in {run_dir} has ended: see its {name}.{made(run_dir)}"
    again = "start it again with the same command, it goes on where it was."
    return f"No learner runs in {run_dir}: {again}{made(run_dir)}"


def made(run_dir: Path) -> str:
    """What the run has come to, as its report tells it; empty before its first episode."""
    facts = facts_of(run_dir)
    if not facts.all_episodes:
        return ""
    evaluated = f"; {facts.evaluations[-1].name}: {facts.evaluations[-1].success}" if facts.evaluations else ""
    return f"\nUntil now: {took(vars(facts))}{evaluated}. tools/report.py {run_dir} tells more."


if __name__ == "__main__":
    main()
