"""The processes of one chaos round and the proxy between them; what is killed is started again, what fails is noted."""

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

from serl_launcher.service.server import serve
from serl_launcher.supervisor import END
from tests.shared.common import free_port
from tools import keys

from . import actor, checker, driven, trainer
from .insider import Insider
from .patience import Patience
from .proxy import Proxy
from .shim import Control
from .truth import Truth, notes

SENT_AWAY = 3  # an actor's exit status
PR_SET_PDEATHSIG = 1
PAUSE = 0.2  # seconds between an end by an error and the next start
PATIENCE_S = 20.0  # to begin, to go on after all is healed, to drain; what takes longer is taken for hanging


@dataclass(frozen=True)
class Setting:
    """What a round is about: `capacity` in steps; `weights_bytes` 0: none are published; `skew` in seconds; `early`:
    it is struck while it begins; `keys`: only those with a key are let in, and all is encrypted; `driven`: each actor
    drives an arm (driven.py)."""

    actors: int
    capacity: int
    archives: bool
    weights_bytes: int
    skew: float
    paced: bool
    early: bool
    keys: bool = False
    driven: bool = False
    pace_s: float = 0.01  # of an actor, from one segment to the next


def _serve(served: Callable[[], None]) -> None:
    served()


def context() -> ForkServerContext:
    """What each process is a fork of: one that has these modules already."""
    os.environ["PYTHONSAFEPATH"] = "1"  # else the fork server takes modules from where this was started,
    before = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))  # a package that brings `tests` of its own
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, before))
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([f"tests.faults.{name}" for name in ("actor", "driven", "trainer", "stage")])
    return made


def _begin(play: Callable[[Any], None], part: Any, log: Path) -> None:
    """The first thing in a new process: it writes to `log`, and ends with the process that it comes from."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(levelname)s %(name)s %(message)s", force=True)
    play(part)


class Player:
    """A process that is started again when somebody kills it; `part` says what it is told in a life."""

    def __init__(
        self, context: ForkServerContext, name: str, play: Callable[[Any], None], part: Callable[[int], Any], log: Path
    ) -> None:  # fmt: skip
        self.name, self.life, self.wanted, self.back_at = name, -1, True, 0.0
        self._context, self._play, self._part, self._log = context, play, part, log
        self._process: Any = None

    def start(self) -> None:
        self.life += 1
        words = (self._play, self._part(self.life), self._log)
        self._process = self._context.Process(target=_begin, args=words, name=self.name)
        self._process.start()

    def signal(self, number: int) -> None:
        if self.alive:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self._process.pid, number)

    def join(self) -> None:
        self._process.join()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def status(self) -> int | None:
        """Of a process that has ended; a negative one names the signal."""
        return self._process.exitcode if self._process else None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def last_words(self) -> str:
        lines = self.log.splitlines()
        return lines[-1] if lines else "it said nothing"


class Actor(Player):
    """An actor, its outbox and its notes."""

    def __init__(self, stage: "Stage", name: str, number: int, outbox: str) -> None:
        self.outbox, self.stop_file = stage.disk / outbox, stage.folder / f"{outbox}-stop"
        self._stage, self._number, self._read = stage, number, 0
        self._made: dict[int, float] = {}  # seq of this life -> when it was noted
        self.late: list[float] = []  # seconds from each record to its acknowledgement
        self.newest = 0.0  # when the newest record was made that has been acknowledged
        log = stage.folder / f"{outbox}.log"
        play = driven.play if stage.setting.driven else actor.play
        super().__init__(stage.context, name, play, self._told, log)

    def _told(self, life: int) -> actor.Part:
        stage, setting, key = self._stage, self._stage.setting, self.outbox.name
        self._read, self._made, self._acked, self._session = 0, {}, 0, ""
        return actor.Part(
            self.name, self._number, life, stage.seed, stage.address, stage.key_file(self.name), self.outbox,
            self.truth, self.stop_file, stage.disk / f"{key}-weights" if setting.weights_bytes else None,
            setting.skew if self._number % 2 else 0.0, setting.paced, setting.pace_s, stage.hangs,
        )  # fmt: skip

    @property
    def truth(self) -> Path:
        return self._stage.truths / f"{self.outbox.name}-{self.life}.jsonl"

    @property
    def end(self) -> dict[str, Any]:
        """What it noted at its end: {drained, pushed, longest_ms} in order, {sent_away} where it was; {}: nothing.

        An acknowledgement that the learner repeats may be noted after it.
        """
        found = notes(self.truth) if self.truth.exists() else ()
        return next((note for note in found if {"drained", "sent_away"} & note.keys()), {})

    @property
    def last_words(self) -> str:
        return self.end.get("sent_away") or super().last_words

    def hear(self) -> None:
        """Take in what it has noted since the last look."""
        for note in self._news():
            self._session = note.get("session", self._session)
            if "seq" in note:
                self._made[note["seq"]] = note["t"]
            elif "acked" in note and note["acked"][0] == self._session:
                for seq in range(self._acked, note["acked"][1]):
                    self.newest = self._made.pop(seq)
                    self.late.append(note["t"] - self.newest)
                self._acked = max(self._acked, note["acked"][1])

    def acknowledged_since(self, moment: float) -> bool:
        """Whether a record that was made after `moment` has been acknowledged."""
        self.hear()
        return self.newest > moment

    def _news(self) -> Iterator[dict[str, Any]]:
        """What it has noted since the last look."""
        if self.truth.exists():
            with open(self.truth) as file:
                file.seek(self._read)
                while (line := file.readline()).endswith("\n"):  # else it is still being written
                    yield json.loads(line)
                    self._read = file.tell()


class Stage:
    """One round's processes; a context manager. Nemeses strike it, `watch` keeps it going. `starts` of one process are
    the most that there may be."""

    starts = 30

    def __init__(
        self, context: ForkServerContext, folder: Path, seed: int, setting: Setting, control: Control | None
    ) -> None:
        self.context, self.folder, self.seed, self.setting, self.control = context, folder, seed, setting, control
        self.disk, self.truths, self.hangs = folder / "disk", folder / "truth", folder / "hangs"
        for made in (self.disk / "run", self.truths, self.hangs):
            made.mkdir(parents=True, exist_ok=True)
        self.violations: list[str] = []
        self.rotten = False  # bits of what is stored are turned over
        self.is_sick = self._was_sick = False  # a disk fails: a process may end with an error of its own
        self._began, self._notes = time.monotonic(), Truth(self.truths / "stage.jsonl")
        self._published = 0, 0
        self._stop, self.asleep = folder / "stop", folder / "asleep"
        port, local = free_port(), f"ipc://{folder / 'learner'}"
        self._keys = folder / "keys" if setting.keys else None
        self._served = partial(
            serve, self.disk / "run", {trainer.SOURCE: setting.capacity}, public=f"tcp://127.0.0.1:{port}",
            local=local, inference="tcp://127.0.0.1:9", archived=[trainer.SOURCE] * setting.archives, keys=self._keys,
        )  # fmt: skip
        self.server = Player(context, "server", _serve, lambda _: self._served, folder / "server.log")
        self.trainer = Player(
            context, "trainer", trainer.play, lambda life: self._trainer_part(local, life), folder / "trainer.log"
        )
        self.proxy = Proxy("127.0.0.1", port)
        self.address = f"tcp://127.0.0.1:{self.proxy.port}"
        self.actors: list[Actor] = []
        for number in range(setting.actors):
            self.key_file(self.join(f"a{number}").name)  # the first one makes the server's, too

    def _trainer_part(self, local: str, life: int) -> trainer.Part:
        setting = self.setting
        return trainer.Part(
            local, self.disk / "run", self.truths / f"trainer-{life}.jsonl", self._stop, self.asleep, life,
            setting.weights_bytes, setting.archives, setting.paced, self._began,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self.proxy.__enter__()
        for player in self.players:
            player.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for player in self.players:
            player.signal(signal.SIGKILL)
        self.proxy.__exit__(*exception)

    @property
    def players(self) -> list[Player]:
        return [self.server, self.trainer, *self.actors]

    def key_file(self, name: str) -> Path | None:
        """That of an actor of this name; None where no keys are asked for."""
        if self._keys is None:
            return None
        if not (file := self._keys / f"{name}.key").exists():
            with keys.locked(self._keys, is_new=True):
                keys.make(self._keys, name, "actor")
        return file

    def join(self, name: str, outbox: str = "", start: bool = False) -> Actor:
        """One more actor; of a name that is there already, if `outbox` gives it a folder of its own."""
        new = Actor(self, name, len(self.actors), outbox or name)
        self.actors.append(new)
        if start:
            new.start()
        return new

    # -- what falls on it
    def kill(self, player: Player, away: float) -> None:
        """SIGKILL, and a new life after `away` seconds."""
        player.back_at = time.monotonic() + away
        player.signal(signal.SIGKILL)

    def halt(self, player: Player) -> bool:
        """SIGKILL it for good; False when somebody else has it halted already, or it has done its work."""
        if not player.wanted:
            return False
        player.wanted = False
        player.signal(signal.SIGKILL)
        player.join()
        return True

    def go_on(self, player: Player) -> None:
        """Let one that was halted be started again."""
        player.wanted, player.back_at = True, 0.0

    def served_apart(self, guest: Insider) -> str:
        """The last words of a server that is started while ours is halted, and that `guest` asks to let it in."""
        apart = Player(self.context, "apart", _serve, lambda _: self._served, self.folder / "apart.log")
        apart.start()
        self.until(lambda: (guest.turn(), guest.link.connected or not apart.alive)[1], apart)
        said = apart.last_words if not apart.alive else "it serves" if guest.link.connected else "it hangs"
        apart.signal(signal.SIGKILL)
        apart.join()
        return said

    def sicken(self) -> None:
        """A disk fails; its faults are over when all is healed and has gone on."""
        self.is_sick = self._was_sick = True

    def heal(self) -> None:
        self.proxy.set("pass")
        if self.control:
            self.control.clear()
        for file in (self.asleep, self.hangs / "read", self.hangs / "write"):
            file.unlink(missing_ok=True)
        for player in self.players:
            player.signal(signal.SIGCONT)
            player.back_at = 0.0

    # -- what keeps it going
    def watch(self) -> None:
        """Start again what has been killed; note what ended by itself, and what readers may not see."""
        self._look()
        now = time.monotonic()
        for player in self.players:
            if player.wanted and not player.alive and now >= player.back_at:
                player.back_at = now + PAUSE
                self._replace(player)

    def _look(self) -> None:
        """What is published never goes back, and is never more than there is room for."""
        path = self.disk / "run/store" / trainer.SOURCE / "published"
        words = path.read_bytes() if path.exists() else b""
        if len(words) < 16:
            return  # it is being made
        tail, head = struct.unpack("<QQ", words)
        if tail < self._published[0] or head < self._published[1] or head - tail > self.setting.capacity:
            self.violations.append(f"[{tail}, {head}) of {self.setting.capacity} was published after {self._published}")
        self._published = tail, head

    def _replace(self, player: Player) -> None:
        """Start it again, unless it has done its work, or has to wait until its twin is gone."""
        stop = player.stop_file if isinstance(player, Actor) else self._stop
        if player.status == 0 and stop.exists():
            player.wanted = False
            return
        twins = [one for one in self.actors if one.name == player.name and one is not player]
        if player.status == SENT_AWAY and twins:
            if any(twin.wanted and twin.status != SENT_AWAY for twin in twins):
                return
        elif player.status != -signal.SIGKILL and not self.is_sick:
            self._fails(player)
        if isinstance(player, Actor):
            self._notes.note(spooled=checker.spooled(player.outbox))
        if player.life == self.starts:
            player.wanted = False
            self.violations.append(f"{player.name} has ended {self.starts} times")
        else:
            player.start()

    def _fails(self, player: Player) -> None:
        said = f"{player.name} ended with {player.status}: {player.last_words}"
        self.violations += [said] * (said not in self.violations)

    def until(self, condition: Callable[[], bool], *others: Player) -> bool:
        """Go on until it holds; False: it does not after PATIENCE_S that the processes had for themselves."""
        patience = Patience(lambda: [os.getpid(), *(one.pid for one in (*self.players, *others) if one.alive)])
        while not condition():
            if patience.tick() > PATIENCE_S:
                return False
            self.watch()
            time.sleep(0.02)
        return True

    # -- the end
    def resumed(self, moment: float) -> float:
        """Seconds from `moment` until every actor had a new record acknowledged."""
        live = [one for one in self.actors if not one.stop_file.exists()]
        if not self.until(lambda: all(one.acknowledged_since(moment) for one in live)):
            late = [one.name for one in live if not one.acknowledged_since(moment)]
            self.violations.append(f"{late} had nothing new acknowledged {PATIENCE_S} s after all was healed")
        self.is_sick = False
        return time.monotonic() - moment

    def end(self) -> None:
        """Let the actors drain, then stop the others."""
        for one in self.actors:
            one.stop_file.touch()
        if not self.until(lambda: not any(one.wanted for one in self.actors)):
            self.violations.append(f"{[one.name for one in self.actors if one.wanted]} did not end in {PATIENCE_S} s")
        for one in self.actors:
            if not one.end.get("drained"):
                self.violations.append(f"{one.name} did not drain")
        self._stop.touch()
        self.until(lambda: not self.trainer.alive)
        self.server.wanted = self.trainer.wanted = False
        self.server.signal(END)
        if not self.until(lambda: not self.server.alive) or self.server.status != 0:
            self.violations.append(f"the server did not end in order: {self.server.last_words}")
        if not self._was_sick and (said := [line for line in self.server.log.splitlines() if "DEGRADED" in line]):
            self.violations.append(f"no disk had failed, and the server said: {said[0]}")

    def check(self) -> checker.Report:
        """Whether what is left is what everybody noted, after the end; and all that was wrong before."""
        archived = [trainer.SOURCE] if self.setting.archives else []
        outboxes = [actor.outbox for actor in self.actors]
        report = checker.check(self.disk / "run/store", sorted(self.truths.iterdir()), outboxes, archived)
        report.violations[:0] = self.violations
        return report
