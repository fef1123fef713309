"""Lets the learner's other processes call the server: wait for it, wait for the robot's Spec, ask. No torch.

The server may be starting again at any time, so each function here but `report_end` waits until it is there.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import Disconnected, RetakeError, ServerFailed, Timeout
from serl_client.spec import Spec

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # how long the server may take for one answer
RETRY_S = 0.2  # between two requests, after one failed
TURN_S = 0.1  # between two looks whether the Spec is there
TELL_S = 10.0  # between two log lines that say what is waited for
END_S = 3.0  # how long a process that fails may take to let the actors know


def connect(local: str, name: str) -> Connection:
    """Return a connection of the learner's process `name` to the server at `local`. It opens with its first request."""
    return Connection(local, m.Hello(m.PROTOCOL, "learner", name))


def ask(link: Connection, message: m.Message) -> Any:
    """Return the server's answer, however long it takes. A request that fails is sent again on a new connection.

    Raises what `Connection.call` raises for a request that the server refuses.
    """
    while True:
        try:
            return link.call(message, ANSWER_S)
        except (Timeout, Disconnected, ServerFailed) as error:
            log.warning("waiting for the server: %s", error)
            link.close()  # a late answer would be taken for the answer to the next request
            time.sleep(RETRY_S)


def wait_for_spec(
    link: Connection, *, needs_actor: bool = True, announces: bool = False, stopping: Callable[[], bool] = lambda: False
) -> Spec | None:
    """Wait for the server, and return the Spec of the run: the store's, or the one that the first actor brings.

    needs_actor: where the store has no Spec yet, wait for the first actor; False: return None.
    announces: log every TELL_S seconds that an actor is waited for. stopping: once it says True, None is returned.
    """
    told = 0.0
    while not stopping():
        with suppress(Timeout, Disconnected):
            spec = link.hello(timeout=1.0).spec
            if spec is not None or not needs_actor:
                return None if spec is None else Spec.from_dict(spec)
        if announces and time.monotonic() - told > TELL_S:
            log.info("waiting for the first actor, which describes the robot: start run_actor.sh")
            told = time.monotonic()
        time.sleep(TURN_S)
    return None


def capacities(link: Connection) -> dict[str, int]:
    """Return {source: capacity in steps} of the run's store."""
    return {name: source["capacity"] for name, source in ask(link, m.Status()).report["sources"].items()}


def report_end(local: str, reason: str) -> None:
    """Let the server tell the actors why the run ends; a server that does not answer is left alone."""
    with suppress(RetakeError), connect(local, "the end") as link:
        link.call(m.Over(reason), END_S)
