"""A client written from docs/reference/protocol.md alone, on pyzmq, msgpack and xxhash, delivers to our server."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

from serl_client import messages as m

from serl_launcher.datasets.episodes import open_run
from tests.shared import oracle
from tests.shared.common import PATIENCE, ROOT, until

CLIENT = Path(__file__).with_name("foreign_client.py")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def delivered(server, content):
    """What the client says that it did, in a life of its own, while these are the newest weights."""
    command = [sys.executable, CLIENT, server.address, "stranger"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as actor:
        until(lambda: server.report()["run"] or actor.poll() is not None)
        server.publish(content)
        server.direct()
        out, complaint = actor.communicate(timeout=PATIENCE)
    assert actor.returncode == 0, complaint
    return json.loads(out)


def test_a_client_that_knows_the_page_alone_delivers_whole_episodes_in_two_lives(process):
    content = random.Random(0).randbytes((2 << 20) + 77)
    first, second = delivered(process, content), delivered(process, content[::-1])
    assert first["run"] == second["run"] == process.report()["run"]
    assert [each["weights"] for each in (first, second)] == [sha256(content), sha256(content[::-1])]
    assert (first["expected"], first["directive"], first["session"] != second["session"]) == (4, 1, True)
    found = oracle.whole(process.run_dir / "store")
    assert len(found.episodes) == 2
    for episode in found.episodes.values():
        assert [episode[name] for name in ("steps", "terminated", "final", "success")] == [20, 1, 1, 1]
        steps = found.steps[episode["number"]]
        assert [step.record["reward"] for step in steps] == list(range(20))
        assert all((step.record["action"] == 0.5).all() for step in steps)
    assert not process.refusals()


def test_the_page_names_our_version():
    assert f"The version is **{m.PROTOCOL[1]}**" in (ROOT / "docs/reference/protocol.md").read_text()


def test_it_imports_nothing_of_ours():
    imported = [line for line in CLIENT.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in imported if "serl" in line or "numpy" in line or "tests" in line]


def test_it_gives_the_columns_that_the_algorithm_adds_to_its_rows(serve):
    extras = {"behaviour_mean": "action", "plan": {"shape": [3], "dtype": "uint8"}}
    server = serve(extras=extras, history=3)
    delivered(server, b"weights")
    _, readers, (episode,) = open_run(server.run_dir)
    rows = readers["online"].rows(episode)
    assert [rows[name].shape for name in extras] == [(20, 2), (20, 3)]
    assert not server.refusals()
