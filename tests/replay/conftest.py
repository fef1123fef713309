"""A store that two actors write into, and what samples it."""

import pytest

from serl_launcher.replay.buffer import ReplayBuffer
from serl_launcher.replay.views import View
from serl_launcher.store.layout import Layout
from serl_launcher.store.store import Store

from .made import REWARDS, VIEWS, Reader


@pytest.fixture
def store(tmp_path, spec, closes):
    made = closes(Store.create(tmp_path / "store", spec, {"online": 200, "demo": 200}))
    made.direct({"into": "online", "phase": "practise"})
    made.direct({"into": "demo", "phase": "demonstrate"})
    for session in "AB":
        made.lives.hello(f"arm {session}", f"outbox {session}", session, [])
    made.commit()
    return made


@pytest.fixture
def push(store):
    def push(session, *records):
        for record in records:
            store.stage(session, store.expected(session), record)
        store.commit()

    return push


@pytest.fixture
def whole(push, make_segment):
    """whole(episodes, steps, key=...): that many whole episodes; the key of each is its number if none is given."""

    def whole(episodes, steps=10, key=None, session="A"):
        for i in episodes:
            push(session, make_segment(f"{session}{i}.{steps}", i if key is None else key, 0, steps, ends="terminated"))

    return whole


@pytest.fixture
def reader(store, spec):
    """reader() -> the buffer of the source `online`, which has read nothing yet."""
    return lambda: ReplayBuffer(store.folder / "online", Layout(spec, 200))


@pytest.fixture
def mixture(store, spec):
    """mixture(views, options of ReplayMixture) -> a function that returns the sources up to date."""
    return lambda views, **options: Reader(store, spec, views, **options).hear


@pytest.fixture
def sources(mixture):
    return mixture({"success": View(("online", "demo"), ("successful",)), "long": View(("online",), min_length=6)})


@pytest.fixture
def read(mixture):
    """read(views, options) -> sources of their own that are up to date now."""
    return lambda views=VIEWS, **options: mixture(views, **options)()


@pytest.fixture
def heard(store, spec):
    """heard() -> the sources of a reader that is up to date."""
    return Reader(store, spec, verdict=REWARDS).hear
