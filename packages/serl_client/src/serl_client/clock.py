"""Gives the time that control loops and timeouts read and sleep by, so that a test can put a simulated clock in its
place."""

from time import monotonic, sleep, time, time_ns

__all__ = ["monotonic", "sleep", "time", "time_ns"]
