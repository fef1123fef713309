"""A start that fails: both sides say why in one sentence, and actors end with a run that never began."""

import re

import pytest
from serl_client import Feature, Spec
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import Refused

from serl_launcher import launcher
from serl_launcher.config import composed
from tests.shared.common import CONFIG, PATIENCE
from tests.shared.here import serving, start

pytestmark = pytest.mark.usefixtures("one_thread", "same_loggers")

SPEC = Spec({"observation.state": Feature((3,))}, Feature((1,), low=-2, high=2), fps=10.0)


def test_a_start_that_fails_is_one_sentence_on_both_sides_and_its_traceback_is_in_a_file(tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise RuntimeError("no such storage\nin two lines")

    monkeypatch.setattr("serl_launcher.training.trainer.check_memory", fail)
    why = r"trainer: it failed: RuntimeError: no such storage \(where: .*errors\.log\)"
    with pytest.raises(Refused, match=f"^the learner has ended: {why}$"):
        start(tmp_path / "run", ["task=fake"])
    said = capfd.readouterr().err
    assert len(re.findall(why, said)) == 1
    assert "Traceback" not in said
    assert "in two lines" in (tmp_path / "run" / launcher.ERRORS).read_text()


@pytest.mark.parametrize("begun", [False, True])
def test_actors_end_with_a_run_that_never_began_and_wait_for_one_that_did(tmp_path, begun):
    config = composed(CONFIG, ["learner=true", "task=fake", f"run_dir={tmp_path}"])
    hello = m.Hello(m.PROTOCOL, "actor", "arm", "e" * 32, "o" * 32, "", SPEC.to_dict(), [], True)
    with serving(config) as (local, port), Connection(f"tcp://127.0.0.1:{port}", hello) as actor:
        actor.hello(PATIENCE)
        with Connection(local, m.Hello(m.PROTOCOL, "learner", "trainer")) as trainer:
            if begun:
                trainer.call(m.Direct({"mode": "idle", "phase": "clone", "into": None}, None), PATIENCE)
            trainer.call(m.Over("trainer: no memory"), PATIENCE)
        heard = []
        while not any(isinstance(message, m.Failed) for message in heard):
            actor.wait(PATIENCE)
            heard.append(actor.receive())
        assert heard[-1] == m.Failed("Refused", "the learner has ended: trainer: no memory", final=not begun)
        with Connection(f"tcp://127.0.0.1:{port}", hello) as late:
            if begun:
                late.hello(PATIENCE)
            else:
                with pytest.raises(Refused, match="the learner has ended: trainer: no memory"):
                    late.hello(PATIENCE)
