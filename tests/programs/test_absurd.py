"""The real programs, and 50 steps of numbers that cannot be among a thousand: one episode comes while the run goes on,
another lies in the store since a version that had no limit. The run ends with its plan, and resumes."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from serl_client import Outcome, Spec
from serl_client import messages as m
from serl_client.client import TrainerClient
from serl_client.connection import Connection

from serl_launcher.store.store import Store
from tests.shared.clients import directed, push_all
from tests.shared.common import PATIENCE
from tests.shared.data import blank_segment
from tests.shared.tools import called

from .test_run import LONG

STEPS = 50


def absurd(spec, name, column, directive):
    """An episode of 50 steps, every observation or reward of which is 3e38, and its judge's word."""
    segment = blank_segment(spec, name, steps=STEPS, ends="terminated", directive=directive, phase="practise")
    if column == "reward":
        segment = replace(segment, reward=np.full(STEPS, 3e38, np.float32))
    else:
        segment = replace(segment, observation={
            name: np.full_like(array, 3e38) if array.dtype.kind == "f" else array
            for name, array in segment.observation.items()
        })  # fmt: skip
    return [segment, Outcome(name, True)]


def push(programs, column):
    """An actor of its own brings such an episode, and has it acknowledged."""
    address = f"tcp://127.0.0.1:{programs.ports[0]}"
    with Connection(address, m.Hello(m.PROTOCOL, "viewer", "test")) as link:
        spec = Spec.from_dict(link.hello(PATIENCE).spec)
    with TrainerClient(address, actor="odd", spec=spec, outbox=programs.run_dir / "odd") as client:
        directive = directed(client).state.directive["number"]
        push_all(client, absurd(spec, "new", column, directive))
        assert client.drain(PATIENCE)


def write(programs, column):
    """The store of a stopped run gets such an episode as an older version wrote it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serl_launcher.store.store.absurd", lambda segment: "")
        store = Store(programs.run_dir / "store")
        store.hello("older", "older", "older", [])
        for record in absurd(store.spec, "old", column, store.directive):
            store.stage("older", store.expected("older"), record)
        store.commit()
        store.close()


def aside(programs):
    """{id: why} of the episodes that are set aside."""
    with closing(sqlite3.connect(programs.run_dir / "store/index.sqlite", timeout=10)) as index:
        rows = index.execute("SELECT id, judged_by FROM episodes WHERE discard AND judged_by LIKE 'learner: %'")
        return {id: why.removeprefix("learner: ") for id, why in rows.fetchall()}


@pytest.mark.slow
@pytest.mark.parametrize("column", ["observation", "reward"])
def test_a_run_with_numbers_that_cannot_be_ends_with_its_plan_names_them_and_resumes(programs, column):
    learner, actor = programs.start("learner", *LONG), programs.start("actor", *LONG)
    programs.practised(400)
    push(programs, column)
    programs.until(lambda: aside(programs).keys() == {"new"})
    programs.practised(programs.facts().practised + 200)
    programs.kill("launcher", "server", "trainer", "inference")
    learner.wait()
    programs.until(lambda: programs.alive().keys() == {"actor"})
    write(programs, column)
    learner = programs.start("learner", *LONG)
    programs.until(lambda: aside(programs).keys() == {"new", "old"})
    programs.practised(programs.facts().practised + 40)
    programs.order("next")
    assert [programs.status(side) for side in (learner, actor)] == [0, 0], programs.said()[-4000:]
    assert not {word for word in ("Traceback", "errors.log") if word in programs.said()}
    shown = called("store", "show", programs.run_dir)[1]
    for id, why in aside(programs).items():
        assert f"set aside {id}, {STEPS} steps in online: {why}" in shown
        assert f"episode '{id}': set aside, because {why}" in programs.said()
        assert column in why
        assert "3e+38" in why
    assert programs.status(programs.start("learner", *LONG)) == 0, "it is over, and nothing of it is in the way"
