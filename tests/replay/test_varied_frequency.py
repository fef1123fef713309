"""`start_steps: decisions` beside the loop on the robot's PC of Hi-ORS (deploy/inference_xtrainer.py, 5fa4b23).

That loop asks for a chunk and executes 20 steps of it, or one step while a person drives; each question is a row.
"""

import numpy as np
import pytest
from serl_client.chunks import RULES

from serl_launcher.replay.views import View
from tests.shared.actors import Chunks, CountingEnv, FakeClient, run

CHUNK = 20


def rows(human, *, takes_over_at_once=False):
    """The steps of an episode at which Hi-ORS's loop makes a row. human: whether a person drives, by step."""
    step, found = 0, []
    while step < len(human):
        found.append(step)
        chunk = 1 if human[step] else CHUNK
        if takes_over_at_once:  # as here; there the chunk ends first, and what was driven meanwhile has no row
            chunk = next((i for i in range(1, chunk) if human[step + i : step + i + 1] == [True]), chunk)
        step += chunk
    return found


def recorded(spec, human, length):
    env, client = CountingEnv(spec, length, human=human), FakeClient(spec)
    run(env, client, RULES["wait"](Chunks(CHUNK), deadline=0.0, n_action_steps=CHUNK), episodes=1)
    return client.episodes[0]


@pytest.mark.parametrize(
    ("human", "cut"),
    [((), False), (range(20, 33), False), ((*range(20, 27), *range(47, 50)), False), (range(13, 31), True)],
)
def test_a_view_of_decisions_has_the_rows_of_the_published_loop(spec, push, mixture, make_segment, human, cut):
    episode, segment = recorded(spec, human, 90), make_segment("e0", 1, 0, 90, ends="terminated")
    assert np.flatnonzero(episode.intervened).tolist() == list(human)
    segment.intervened[:], segment.chunk_start[:] = episode.intervened, episode.chunk_start
    push("A", segment)
    sources = mixture({"decisions": View(("online",), start_steps="decisions")})()
    expected = rows(episode.intervened.tolist(), takes_over_at_once=cut)
    choice = sources._choice("decisions", "online")
    assert sorted(choice.nth(np.arange(len(choice))).tolist()) == expected
    assert sources.size("decisions") == (len(expected), 1)
