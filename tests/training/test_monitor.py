"""What a learner says of its training while it runs."""

from types import SimpleNamespace

import pytest

from serl_launcher.training.monitor import Monitor

WORDS = {"refused": 0, "mode": "collect", "wall_s": 0.0, "waits_for": "", "left": "", "version": 1, "actors": ""}


def told_of(success, **told):
    """A finished episode, in what a tally looks at."""
    return SimpleNamespace(
        **{"success": success, "intervened": 0, "discard": False, "reward": 0.0, "closed": True, "final": True} | told
    )


@pytest.mark.parametrize(
    ("before", "alone", "helped", "told"),
    [
        ((27, 50), (4, 50), 0, "4 of 50"), ((27, 50), (4, 24), 26, "4 of 24"),
        ((27, 50), (20, 50), 0, ""), ((27, 50), (1, 6), 44, ""), ((27, 50), (0, 49), 0, ""),
        ((4, 50), (0, 50), 0, ""), (None, (0, 50), 0, ""), ((None, 50), (0, 50), 0, ""),
    ],
)  # fmt: skip
def test_a_phase_that_does_harm_beyond_chance_is_told_of_once(caplog, before, alone, helped, told):
    succeeded, count = alone
    newest = [told_of(number < succeeded) for number in range(count)] + [told_of(True, intervened=3)] * helped
    counters = SimpleNamespace(episodes=0, recent=lambda _, most: newest[-most:], sources=SimpleNamespace(buffers={}))
    console = SimpleNamespace(show=lambda _: None)
    monitor = Monitor(SimpleNamespace(), console, counters, SimpleNamespace(), SimpleNamespace())
    phase = SimpleNamespace(name="practise", actors=SimpleNamespace(mode="collect"), updates=("update",))
    evaluations = {"baseline": dict(zip(("successes", "episodes"), before, strict=True))} if before else {}
    for _ in range(3):
        monitor.show(phase, updates=8, evaluations=evaluations, **WORDS)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(told)
    assert all(
        f"practise does harm so far: without help its newest episodes succeed in {told}, " in text for text in said
    )
    assert all("at the first evaluation it was 27 of 50" in text for text in said)
