"""Gives the time that loops and timeouts read and sleep by; a test puts a simulated clock in its place."""

from time import monotonic, sleep, time, time_ns

__all__ = ["monotonic", "sleep", "time", "time_ns"]
