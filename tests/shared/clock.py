"""The product's clock in the hand of a test, in place of constants made short and of waiting."""

import time
from types import SimpleNamespace

REAL = SimpleNamespace(monotonic=time.monotonic, time=time.time)


class Clock:
    """Stands in for serl_client.clock. It stands still until `runs` is called, for threads that wait by the real one.

    Sleeping makes it pass, and so does `advance`; then `passed` is called, in which a thread may keep up.
    """

    passed = staticmethod(lambda: None)

    def __init__(self, now=100.0):
        self.now, self._wall, self._runs_since = now, REAL.time() - now, None

    def monotonic(self):
        return self.now + (REAL.monotonic() - self._runs_since if self._runs_since is not None else 0.0)

    def time(self):
        return self._wall + self.monotonic()

    def time_ns(self):
        return int(self.time() * 1e9)

    def advance(self, seconds):
        self.now += seconds
        self.passed()

    def sleep(self, seconds):
        if self._runs_since is None:
            self.advance(seconds)
        else:
            time.sleep(seconds)

    def runs(self):
        """From now on it passes as the real one does."""
        self.now, self._runs_since = REAL.monotonic(), REAL.monotonic()
        self._wall = REAL.time() - self.now
        return self
