"""Stores that tests make by hand, and what lies in them."""

from serl_launcher.store.store import Store
from tests.shared import oracle
from tests.shared.data import make_segment, tiny_spec


def founded(folder, archived=(), *, spec=None, **capacities):
    """A store in folder/store that collects into `online`; actor arm has said Hello as session A."""
    made = Store.create(folder / "store", spec or tiny_spec(), capacities or {"online": 400}, archived)
    made.direct({"into": "online", "phase": "practise"})
    made.lives.hello("arm", "outbox", "A", [])
    made.commit()
    return made


def fill(made, episodes, session="A", seq=0, length=10):
    """Stage and commit so many episodes of two segments; the seq that comes then."""
    for _ in range(episodes):
        made.stage(session, seq, make_segment(f"{session}{seq}", seq, 0, length // 2))
        made.stage(session, seq + 1, make_segment(f"{session}{seq}", seq, length // 2, length // 2, ends="terminated"))
        seq += 2
        made.commit()
    return seq


def steps(folder):
    """The live steps as the oracle reads them, in order; what is open has nothing uncommitted."""
    found = oracle.whole(folder / "store")
    return sorted((step for steps in found.steps.values() for step in steps), key=lambda step: step.number)


def contents(folder):
    """[(episode number, index, key)] of all that a reader may draw."""
    assert all(step.index == step.record["reward"] == step.origin[1] for step in steps(folder))
    return [(step.episode, step.index, step.origin[0]) for step in steps(folder)]


def indices(folder):
    """{episode number: [(index, the actor's own index), ...]} of all that a reader may draw."""
    found = {}
    for step in steps(folder):
        found.setdefault(step.episode, []).append((step.index, step.origin[1]))
    return found
