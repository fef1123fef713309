"""Schedules the learning rate over a run: a linear warm-up, then half a cosine."""

import math


def rate(step: int, *, warmup: int, decay: int | None, final: float) -> float:
    """Return the factor on the learning rate after `step` steps. It grows to 1 over `warmup` steps, then falls as a
    cosine to `final` at step `decay`, counted from the beginning, and stays there. decay None: it stays at 1.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if decay is None:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, decay - warmup))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
