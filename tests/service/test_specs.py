"""The Spec of a run: who is refused for another one, and which images of a simulated robot are left out of it."""

import dataclasses

import numpy as np
import pytest
from serl_client import Feature
from serl_client.controller import asked
from serl_client.errors import Refused

from tests.shared.clients import connected
from tests.shared.common import PATIENCE, STATE, until
from tests.shared.data import blank_segment, tiny_spec


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        (r"observation\.state\.shape: \[8\], \[9\]", {"spec": tiny_spec(observation={STATE: Feature((9,))}).to_dict()}),
        (r"serves the run .*, your outbox belongs to ffffffffffff\. Nothing was deleted", {"run": "f" * 32}),
    ],
)
def test_another_spec_or_run_is_refused_with_both_values(server, act, spec, says, changes):
    act(server)
    with server.link("actor", "other", spec=spec) as link:
        link.greeting = dataclasses.replace(link.greeting, **changes)
        with pytest.raises(Refused, match=says):
            link.hello(5.0)


def test_a_run_takes_a_spec_that_says_more_and_keeps_its_own(server, act, spec):
    act(server)
    said = tiny_spec(observation={STATE: Feature((8,), units="rad", low=-9, high=9)})
    with server.link("actor", "other", spec=said) as link:
        link.greeting = dataclasses.replace(link.greeting, spec=said.to_dict())
        assert link.hello(5.0).spec == spec.to_dict() != said.to_dict()


CAMERAS = {f"observation.images.{name}": Feature((4, 6, 3), "uint8") for name in ("cam", "wrist")}


@pytest.mark.parametrize(
    ("paced", "unread", "stored"),
    [
        (True, {"cameras": [], "say": "say so"}, []),
        (True, {"cameras": ["wrist"], "say": "say so"}, ["observation.images.wrist"]),
        (True, None, [*CAMERAS]),
        (False, {"cameras": [], "say": "say so"}, [*CAMERAS]),  # a real robot's minutes are not repeated
    ],
)
def test_images_of_a_simulated_robot_that_nothing_reads_are_neither_stored_nor_sent(
    serve, join, paced, unread, stored, caplog
):
    caplog.set_level("INFO", "serl_launcher.service.welcome")
    server = serve(unread=unread)
    spec = tiny_spec(observation={STATE: Feature((8,)), **CAMERAS})
    client = join(server, spec=spec, paced=paced)
    assert client.spec.images == tuple(stored)
    client.push(blank_segment(client.spec, "e0", ends="terminated"))
    assert client.drain(PATIENCE)
    seen = {name: np.zeros(feature.shape, feature.dtype) for name, feature in spec.observation.items()}
    assert sorted(asked(client.spec, seen, None, None)) == sorted([STATE, *stored])
    server.server.welcomes._unread = None  # a later start says another: the run keeps to what it began with
    again = join(server, "again", spec=spec, paced=paced, told=False)
    until(lambda: connected(again).spec == client.spec)
    assert ("not stored, because nothing of this run reads it" in caplog.text) is (len(stored) < 2)


def test_a_run_without_an_image_refuses_a_real_robot_that_has_one(serve, act, spec):
    server = serve()
    act(server)
    more = tiny_spec(observation={STATE: Feature((8,)), **CAMERAS})
    with (
        server.link("actor", "other", spec=more) as link,
        pytest.raises(Refused, match=r"stores no .*images\.cam.*=true"),
    ):
        link.hello(5.0)
