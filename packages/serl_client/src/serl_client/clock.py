"""The time that everything here reads and sleeps by, so that a test can put another clock in its place."""

from time import monotonic, sleep, time, time_ns

__all__ = ["monotonic", "sleep", "time", "time_ns"]
