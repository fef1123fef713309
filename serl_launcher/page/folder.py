"""Reads what the page shows: the facts of the run's folder, images of its store, and the server's status.

Used by one thread.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serl_client import clock
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import ConfigError, RetakeError
from serl_client.names import is_name
from serl_client.way_home import BEGIN

from serl_launcher.page import downloads
from serl_launcher.page.images import Images
from serl_launcher.store.aside import is_aside, reason_of
from serl_launcher.store.index import Index
from serl_launcher.store.schema import Episode
from serl_launcher.training.facts import DONE, NOW, Facts, PhaseFacts, RunReader
from serl_launcher.training.machine import MACHINES, counted
from serl_launcher.training.plan import parse
from serl_launcher.training.tallies import RECENT, Share

ANSWER_S = 2.0  # seconds that the server may take for its status
FRAME_S = 0.1  # seconds that an image is shown at least, whoever asks for it
FACTS_S = 5.0  # the same of the run's facts
LISTED = 200  # newest episodes
LOSSES = 3  # curves of losses
DRIVERS = {  # who drives an actor, the most urgent first: what a person should know
    "FAULT": "The robot holds after a fault. Look at it, then press Ready: it goes home and on",
    "RESET": "Set up the scene, then press Ready: the robot moves",
    BEGIN: "It waits for your demonstration: Ready, or the first motion of a device, begins it",
    "PAUSED": "A person has paused it: Resume goes on",
    "WAITING": "No action has come: the robot holds still until one does",
    "HUMAN": "A person drives",
    "POLICY": "The policy drives: keep clear of the robot",
    "HOMING": "It moves to its start: keep clear of the robot",
    "IDLE": "It does nothing now",
}
SHOWN = {"RESET": "WAITING", BEGIN: "WAITING", "HOMING": "POLICY"}  # a driver: its word on the banner
UNDER_WAY = ("POLICY", "HUMAN", "WAITING", "PAUSED")  # drivers of an episode of which nothing may be stored yet
HELD = "the operator: held"  # what the trainer waits for then
EMPTY: Mapping[str, Any] = {
    "directive": {}, "weights": {}, "clients": [], "sources": {}, "degraded": "", "full": [], "missing": {},
}  # fmt: skip


class RunFolder:
    """Reads one run. local: the server's own address; empty: no learner runs."""

    def __init__(self, run_dir: Path, local: str) -> None:
        self.run_dir, self.local = run_dir, local
        self.refusals: Mapping[str, int] = {}  # what the page's door counts, by reason, on another thread
        self._link: Connection | None = None
        self._reader = RunReader(run_dir)
        self._facts: tuple[float, Facts] | None = None
        self._told: tuple[float, Mapping[str, Any], str] | None = None
        self._opened: tuple[Any, Index, Images] | None = None
        self._frames: dict[tuple[str, str], tuple[float, bytes | None]] = {}

    def close(self) -> None:
        """Let go of server and store: nobody looks any more."""
        if self._link is not None:
            self._link.send(m.Bye())
            self._link.close()
        if self._opened is not None:
            self._opened[1].close()
        self._link = self._opened = None
        self._frames.clear()

    # -- what is shown
    def state(self) -> dict[str, Any]:
        """Return all that changes from second to second, as plain data."""
        facts, (report, trouble) = self._look(), self._status()
        index, images = self._store()
        trainer: Mapping[str, Any] = next((c for c in report["clients"] if c["actor"] == "trainer"), {})
        actors = [
            _actor(client, next(iter(index.latest(1, actor=client["actor"])), None) if index else None, images)
            for client in sorted(report["clients"], key=lambda each: each["actor"])
            if client["role"] == "actor" and client["actor"] != "page"
        ]
        return {
            "run": self.run_dir.name, "banner": _banner(report, trainer, actors, trouble), "actors": actors,
            "phase": report["directive"].get("phase", ""), "numbers": _numbers(facts, dict(self.refusals)),
            "plan": [_step(phase, str(trainer.get("left", ""))) for phase in facts.phases],
            "warnings": [*_warnings(report, actors), *facts.warnings], "alive": not trouble,
            "held": trainer.get("waits_for") == HELD, "sources": [*facts.sources], "downloads": downloads.FORMATS,
        }  # fmt: skip

    def curves(self) -> list[dict[str, Any]]:
        """Return [{name, unit, over, text, points: [[x, y], ...] or [[x, y, low, high], ...]}] since the run began."""
        made, recent = self._look().curves, f"of the last {RECENT} episodes, with its 95 % interval."
        curves = [
            _curve("unassisted success", "%", "steps", made.success, f"Successes without any takeover, {recent}"),
            _curve("success with help", "%", "steps", made.assisted, f"Successes where a person took over, {recent}"),
            _curve("return", "", "steps", made.returns, f"Mean sum of an episode's rewards, {recent}"),
            _curve("driven by a person", "%", "steps", made.interventions, f"Share of steps a person drove, {recent}"),
            _curve("updates", "/s", "updates", made.losses.get("rate", ()), "Training updates per second."),
        ]
        for name, (title, unit, text) in MACHINES.items():
            curves.append(_curve(title, unit, "min", made.machines.get(name, ()), text))
        for name in [name for name in made.losses if "loss" in name][:LOSSES]:
            text = "What the training makes smaller: look at its direction, not at its value."
            curves.append(_curve(name.replace("_", " "), "", "updates", made.losses[name], text))
        return [curve for curve in curves if curve["points"]]

    def episodes(self, which: str = "", source: str = "", actor: str = "") -> list[dict[str, Any]]:
        """Return the newest episodes, the newest first; the arguments choose among them, as those of Index.latest."""
        index, images = self._store()
        return [
            {
                "id": each.id, "actor": each.actor, "phase": each.phase, "source": each.source, "steps": each.steps,
                "closed": bool(each.closed), "goes_on": self._goes_on(each),
                "return": round(each.reward, 3), "assisted": each.intervened > 0,
                "verdict": _verdict(each), "by": each.judged_by, "aside": reason_of(each) if is_aside(each) else "",
                "cameras": images.cameras[:1] if images else [],
            }
            for each in (index.latest(LISTED, which=which, source=source, actor=actor) if index else ())
        ]  # fmt: skip

    def check_over(self, episode: str) -> None:
        """Raise ConfigError for an episode that is not there, or goes on: a label would end it here, its robot not."""
        index, _ = self._store()
        if (found := index.episode(episode) if index else None) is None:
            raise ConfigError(f"there is no episode {episode[:80]!r} in this run: choose one that is listed")
        if self._goes_on(found):
            raise ConfigError(f"{episode} goes on: say it at {found.actor}, which ends it, or once it is over")

    def _goes_on(self, episode: Episode) -> bool:
        if episode.closed:
            return False
        report, trouble = self._status()
        return bool(trouble) or any(
            (each["role"], each["actor"]) == ("actor", episode.actor) for each in report["clients"]
        )

    def image(self, episode: str, camera: str) -> bytes | None:
        """Return the newest image of a camera in an episode, as a JPEG; the same one for FRAME_S seconds."""
        made, frame = self._frames.get((episode, camera), (-FRAME_S, None))
        if clock.monotonic() < made + FRAME_S:
            return frame
        index, images = self._store()
        found = index.episode(episode) if index else None
        frame = images.jpeg(found, camera) if images and found else None
        while len(self._frames) > LISTED:
            del self._frames[next(iter(self._frames))]
        self._frames[episode, camera] = clock.monotonic(), frame
        return frame

    # -- where it comes from
    def _look(self) -> Facts:
        now = clock.monotonic()
        if self._facts is None or now > self._facts[0] + FACTS_S:
            facts = self._reader.look()
            self._facts = clock.monotonic(), facts
        return self._facts[1]

    def _status(self) -> tuple[Mapping[str, Any], str]:
        """Return what `_ask` does; the same for FRAME_S seconds, whoever looks: a server answers so many a second."""
        if self._told is None or clock.monotonic() > self._told[0] + FRAME_S:
            told = self._ask()
            self._told = clock.monotonic(), *told
        return self._told[1:]

    def _ask(self) -> tuple[Mapping[str, Any], str]:
        """Return the server's status, and why there is none: then it is an empty one."""
        if not self.local:
            return EMPTY, "No learner runs. What is shown is what it left"
        self._link = self._link or Connection(self.local, m.Hello(m.PROTOCOL, "viewer", "page"))
        try:
            status: Any = self._link.call(m.Status(), ANSWER_S)
            while self._link.receive() is not None:  # what came unasked
                pass
        except RetakeError as error:
            self._link.close()
            self._link = None
            return EMPTY, f"The learner does not answer: {error}"
        return status.report, ""

    def _store(self) -> tuple[Index, Images] | tuple[None, None]:
        """Return the run's index and images; opened anew where the server has made, or left, another file."""
        path = self.run_dir / "store" / "index.sqlite"
        try:
            now = path.stat().st_ino, *(path.with_name(path.name + end).exists() for end in ("-wal", "-shm"))
            if self._opened is None or self._opened[0] != now:
                index = Index(path)
                self._opened = now, index, Images(path.parent, index)
        except (OSError, ConfigError, sqlite3.Error):  # it is not there yet, or its server repairs it
            return None, None
        return self._opened[1:]


def _step(phase: PhaseFacts, left: str) -> dict[str, Any]:
    """Return {name, when, text, share (0 to 1, or None), left} of a phase of the plan."""
    made = {"env_steps": phase.env_steps, "episodes": phase.episodes}
    shares = [
        made[terms[0].name] / terms[0].bound
        for text in phase.until
        if len(terms := parse(text)) == 1 and terms[0].name in made and terms[0].bound and not terms[0].window
    ]
    is_now = phase.state == NOW
    made_so_far = [f"{phase.episodes:,} episodes, {phase.env_steps:,} steps"] if phase.episodes else []
    ends = [f"ends with {' or '.join(phase.until)}"] if phase.state != DONE else []
    return {
        "name": phase.name, "when": phase.state, "text": "; ".join([*made_so_far, *ends]),
        "share": min(1.0, max(shares)) if shares and is_now else None, "left": left if is_now else "",
    }  # fmt: skip


def _actor(client: Mapping[str, Any], newest: Episode | None, images: Images | None) -> dict[str, Any]:
    driver, remote = str(client.get("driver", "IDLE")), client.get("remote")
    drives = f"{remote} drives, from a page" if remote and driver == "HUMAN" else DRIVERS.get(driver, driver)
    text = client.get("warning") or client.get("because") or drives
    cameras = images.cameras if images and newest else []
    drives = told if is_name(told := client.get("episode")) else ""  # the episode under way, or the latest
    is_under_way = not newest.closed if newest and newest.part_of == drives else driver in UNDER_WAY
    return {
        "name": client["actor"], "driver": driver, "word": SHOWN.get(driver, driver), "text": str(text),
        "warning": str(client.get("warning", "")), "rate": round(counted(client, "rate"), 1), "cameras": cameras,
        **{name: counted(client, name) for name in ("steps", "late", "takeovers")},
        "outbox": round(counted(client, "outbox") / 1e6, 1),
        "episode": newest.id if newest else "",
        "closed": bool(newest.closed) if newest else True, "question": str(client.get("question", 0)),
        "asks": driver in ("FAULT", "RESET", BEGIN), "runs": drives if is_under_way else "",
        "remote": None if remote is None else str(remote),
        "state": images.state(newest) if images and newest and not cameras else [],
    }  # fmt: skip


def _numbers(facts: Facts, refusals: Mapping[str, int]) -> list[dict[str, str]]:
    """Return [{name, value, text}]: numbers with their units, and a sentence that explains each."""
    told = f"of the last {RECENT} judged episodes; between the brackets its 95 % interval"
    rate, version = facts.updates_per_s, facts.weights.get("version", 0)
    held = sum(source.head - source.tail for source in facts.sources.values())
    age = "" if facts.weights_age_s is None else f" · {_seconds(facts.weights_age_s)} old"
    control = facts.control and f"{facts.control.rate:.1f} of {facts.control.fps:g} Hz"
    mean = facts.recent.return_mean
    numbers = {
        "success alone": (_rate(facts.recent.alone), f"Episodes that the policy finished without help, {told}."),
        "success with help": (_rate(facts.recent.assisted), f"Episodes in which a person took over, {told}."),
        "return": ("-" if mean is None else f"{mean:.2f}", f"Mean sum of rewards of the last {RECENT} episodes."),
        "episodes": (f"{facts.episodes:,}", "Finished episodes of this run, evaluations left out."),
        "steps": (f"{facts.env_steps:,}", "Environment steps of this run, evaluations left out."),
        "updates": (f"{facts.updates:,}" + (f" · {rate:,.0f}/s" if rate else ""), "Training updates made so far."),
        "control": (control or "-", "Steps per second of the newest episode, and what they should be."),
        "replay buffer": (f"{held:,} steps", "Steps that are stored, and may be trained on."),
        "weights": (f"version {version}{age}", "The newest weights of the policy, which actors use."),
        "free disk": (f"{facts.free_bytes / 1e9:,.1f} GB", "Room that is left where the run's folder lies."),
    }
    if refusals:
        why = ", ".join(f"{reason}: {count:,}" for reason, count in refusals.items())
        numbers["refused"] = (f"{sum(refusals.values()):,}", f"What this page refused since it began. {why}.")
    return [{"name": name, "value": value, "text": text} for name, (value, text) in numbers.items()]


def _banner(
    report: Mapping[str, Any], trainer: Mapping[str, Any], actors: list[dict[str, Any]], trouble: str
) -> dict[str, str]:
    """Return {word, text, who}: the most urgent that there is to say of the whole run."""
    if trouble:
        return {"word": "IDLE", "text": trouble, "who": ""}
    if report["degraded"]:
        return {"word": "FAULT", "text": f"Nothing is stored now: {report['degraded']}", "who": "learner"}
    if trainer.get("waits_for") == HELD:
        return {"word": "PAUSED", "text": "The run is paused: robots hold, nothing trains. Resume goes on", "who": ""}
    urgent = [*DRIVERS]
    first = min(actors, key=lambda a: urgent.index(a["driver"]) if a["driver"] in urgent else 0, default=None)
    if first is None:
        return {"word": "IDLE", "text": "No actor is connected: start one with run_actor.sh", "who": ""}
    return {"word": first["word"], "text": first["text"], "who": first["name"]}


def _warnings(report: Mapping[str, Any], actors: list[dict[str, Any]]) -> list[str]:
    said = [f"Nothing is stored now: {report['degraded']}"] if report["degraded"] else []
    said += [f"{each['name']}: {each['warning']}" for each in actors if each["warning"]]
    said += [f"Actors wait: {why}" for why in report["full"]]
    said += [f"{name}: nothing heard for {_seconds(seconds)}" for name, seconds in report["missing"].items()]
    return said


def _verdict(episode: Episode) -> str:
    if episode.discard:
        return "discard"
    return "" if episode.success is None else "success" if episode.success else "failure"


def _rate(share: Share) -> str:
    low, high = share.interval
    return f"{share} [{low:.0%}, {high:.0%}]" if share.episodes else "none yet"


def _curve(name: str, unit: str, over: str, points: Sequence[Sequence[float]], text: str) -> dict[str, Any]:
    scale = 100 if unit == "%" else 1  # of shares
    kept = [[point[0], *(round(scale * float(number), 6) for number in point[1:])] for point in points]
    return {"name": name, "unit": unit, "over": over, "text": text, "points": kept}


def _seconds(value: float) -> str:
    return f"{value / 3600:.1f} h" if value >= 3600 else f"{value / 60:.0f} min" if value >= 100 else f"{value:.0f} s"
