"""A store that two actors write into, and what samples it."""

import pytest

from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.replay.views import View
from serl_launcher.store.store import Store


@pytest.fixture
def store(tmp_path, spec):
    made = Store.create(tmp_path / "store", spec, {"online": 200, "demo": 200})
    made.direct({"into": "online", "phase": "practise"})
    made.direct({"into": "demo", "phase": "demonstrate"})
    for session in "AB":
        made.hello(f"arm {session}", f"outbox {session}", session, [])
    yield made
    made.close()


@pytest.fixture
def push(store):
    def push(session, *records):
        for record in records:
            store.stage(session, store.expected(session), record)
        store.commit()

    return push


@pytest.fixture
def sources(store, spec):
    views = {"success": View(("online", "demo"), ("successful",)), "long": View(("online",), min_length=6)}
    made = ReplayMixture(store.folder, spec, {"online": 200, "demo": 200}, views, seed=0)
    cursor = [0]

    def refresh():
        cursor[0], rows = store.index.catalog(cursor[0], 10_000)
        made.update(rows)
        return made

    return refresh
