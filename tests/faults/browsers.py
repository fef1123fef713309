"""Looks at a run's page as a bad network and careless people do, until it is killed. A program: PORT TOKEN. Without
them it only computes, as busy as a crowd.

One page behind 5 KB/s, one that asks and never reads, and twenty that ask for all there is without a pause. Each comes
again when it is cut. Each line says how many answers came within a second.

**Assumed:** real ones are on other machines; this has the lowest priority, within its session and among sessions
(man 7 sched: autogroup), so that its own work costs little here.
"""

import asyncio
import itertools
import json
import sys
from contextlib import suppress

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from serl_launcher.supervisor import give_way
from tests.faults.computing import compute
from tests.faults.proxy import Proxy

MANY = 20
SLOW = 5_000  # bytes per second
ASKS = ({"ask": "state"}, {"ask": "curves"}, {"ask": "episodes", "which": "all", "source": "", "actor": ""})


class Crowd:
    """Browsers at a page; `answers`: how many they were given."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token, self.answers = port, token, 0

    async def look(self, proxy: int, *, reads: bool = True) -> None:
        """One browser, which reaches the page at port `proxy`."""
        here = f"localhost:{self._port}"
        while True:
            with suppress(OSError, TimeoutError, WebSocketException):
                async with connect(
                    f"ws://{here}/socket", host="127.0.0.1", port=proxy, origin=f"http://{here}",  # type: ignore[arg-type]
                    compression=None, max_size=None, max_queue=1,
                ) as link:  # fmt: skip
                    await link.send(json.dumps({"token": self._token}))
                    await link.recv()
                    for number in itertools.count():
                        await link.send(json.dumps({"id": number, **ASKS[number % len(ASKS)]}))
                        if reads:
                            await link.recv()
                            self.answers += 1
            await asyncio.sleep(1)

    async def come(self) -> None:
        with Proxy("127.0.0.1", self._port) as slow:
            slow.set("trickle", rate=SLOW)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.look(slow.port))
                group.create_task(self.look(self._port, reads=False))
                for _ in range(MANY):
                    group.create_task(self.look(self._port))
                while True:
                    before = self.answers
                    await asyncio.sleep(1)
                    if self.answers > before:
                        print(self.answers - before, flush=True)


if __name__ == "__main__":
    give_way(19)
    if len(sys.argv) == 1:
        compute()
    asyncio.run(Crowd(int(sys.argv[1]), sys.argv[2]).come())
