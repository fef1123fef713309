"""Carries out what a person orders: verdicts on episodes, and commands to the plan. Each one is acknowledged."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serl_client import clock
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection
from serl_client.episode import Outcome
from serl_client.errors import Disconnected, Refused, Timeout
from serl_client.keys import Key, known_as
from serl_client.person import VERDICTS
from serl_client.spec import Spec

NAME = "operator"
PATIENCE = 15.0  # seconds that a verdict may take
ANSWER_S = 5.0  # seconds that the server may take for a command
HEARD_S = 5.0  # seconds that an actor may take to acknowledge a word: it reports each second
LATE_S = 5.0  # seconds after which a word is not what its person means any more
PAUSE = "pause"  # waits for nothing, and is never too late: it is what somebody says who is afraid
COMMANDS = {PAUSE: "hold", "resume": "resume", "next": "next", "stop": "stop"}  # a button: the plan's word


def carry_out(run_dir: Path, local: str, order: str, about: str, actor: str = "", *, said: float) -> str:
    """Carry out an order, and return the sentence that acknowledges it.

    local: the learner's own address; empty: no learner runs. order: of COMMANDS or VERDICTS. about: the episode of a
    verdict; the phase that a command but a pause means, because one that has ended meanwhile is not meant any more.
    actor: whom a word of messages.WORDS is for, as `say` says it; empty: the order is about the run, or what is stored.
    said: the clock.monotonic() of when it was. A label may wait for others, a word to a robot or to the plan LATE_S.

    Raises TrainerError, with a sentence, when it was not acknowledged.
    """
    if not local:
        raise Refused("no learner runs here: start it, then say it again")
    if order in VERDICTS and not actor:
        label(local, run_dir / "actors" / "page" / "outbox", verdict_on(about, order), name="page")
        return f"{about}: {order}. It is stored"
    if clock.monotonic() > said + LATE_S and order != PAUSE:
        raise Refused(f"nothing was done: it waited for more than {LATE_S:g} s: look, before you say it again")
    if actor:
        return say(local, order, actor, about)
    if order not in COMMANDS:
        raise Refused(f"there is no order {order[:40]!r}: say one of {', '.join([*VERDICTS, *COMMANDS])}")
    return command(local, order, about)


def is_label(ask: Mapping[str, Any]) -> bool:
    """Return whether an order is a verdict on what is stored, and no word to a robot or to the plan."""
    return str(ask.get("order")) in VERDICTS and not ask.get("actor")


def say(local: str, word: str, actor: str, about: str) -> str:
    """Say a word to an actor, and return what acknowledges it: the actor itself. about: as a Command's argument."""
    with _linked(local) as link:
        done: Any = link.call(m.Command(word, about, actor=actor), ANSWER_S)
        number, end, heard, late = int(done.value), clock.monotonic() + HEARD_S, 0, ""
        while heard < number and clock.monotonic() < end:
            clock.sleep(0.1)
            status: Any = link.call(m.Status(), ANSWER_S)
            clients = status.report["clients"]
            said = (str(each.get("heard", "")) for each in clients if (each["role"], each["actor"]) == ("actor", actor))
            newest, _, late = next(said, "").partition(" ")
            heard = int(newest) if newest.isdecimal() else 0
        link.send(m.Bye())
    if heard < number:
        raise Timeout(f"{word} may be lost, {actor} has not acknowledged it: look before you repeat it")
    if late and heard == number:
        raise Refused(f"nothing was done: what you saw of {actor} is over, or somebody paused it: look again")
    return f"{word}: {actor} has taken it"


def _linked(local: str) -> Connection:
    """Return a connection of this thread, whose name no other one has: the server ends an earlier one of that name."""
    return Connection(local, m.Hello(m.PROTOCOL, "viewer", f"page/{threading.get_native_id()}"))


def verdict_on(episode: str, word: str) -> Outcome:
    """Return what an operator says of an episode. word: of VERDICTS."""
    return Outcome(episode, VERDICTS[word], discard=word == "discard", judged_by=NAME)


def command(local: str, order: str, phase: str) -> str:
    """Give a command to the plan, and return what acknowledges it."""
    with _linked(local) as link:
        status: Any = link.call(m.Status(), ANSWER_S)
        if (now := status.report["directive"].get("phase", "")) != phase and order != PAUSE:
            raise Refused(f"nothing was done, look again: the phase is {now or 'before the first one'!r} now")
        try:
            about = status.report["directive"].get("number", 0) if order == "next" else 0
            if order == "next" and not about:
                raise Refused("nothing was done, look again: there is no phase yet")
            done: Any = link.call(m.Command(COMMANDS[order], directive=about), ANSWER_S)
        except (Timeout, Disconnected) as error:
            raise Timeout(f"{order} may be lost, nobody acknowledged it ({error}): look before you repeat it") from None
        finally:
            link.send(m.Bye())
    return f"{order}: the learner has taken it as order {done.value}"


def label(address: str, outbox: Path, *outcomes: Outcome, name: str = NAME, key: Path | None = None) -> None:
    """Deliver outcomes; returns when they are durable. Raises TrainerError when that cannot be, or not in time."""
    opened = Key.read(key) if key else None
    name = known_as(opened, name)
    with Connection(address, m.Hello(m.PROTOCOL, "viewer", name), opened) as link:
        spec = link.hello(PATIENCE).spec
        link.send(m.Bye())
    if spec is None:
        raise Refused("no actor has come to this run yet, so there is no episode: start one")
    with TrainerClient(address, actor=name, spec=Spec.from_dict(spec), outbox=outbox, key=key) as client:
        for outcome in outcomes:
            client.push(outcome)
            if not client.drain(PATIENCE):
                late = f"wait, it lies in {outbox} and goes with the next label"
                raise Timeout(f"the learner did not acknowledge it: {late}")
