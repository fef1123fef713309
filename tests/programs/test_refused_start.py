"""A start that is refused changes nothing in the run's folder that it refused."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest
from omegaconf import OmegaConf

from serl_launcher import launcher
from serl_launcher.config import composed
from serl_launcher.store.index import Index
from serl_launcher.store.store import Store
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.training.plan_state import PlanState
from serl_launcher.training.resuming import FORMAT, kept_settings
from tests.shared.common import CONFIG, free_port, own_ports
from tests.shared.here import TRAIN

pytestmark = pytest.mark.usefixtures("same_loggers")


@pytest.fixture
def run(tmp_path, spec):
    """The folder of a run that a learner has left in its first phase."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = composed(CONFIG, ["learner=true", f"run_dir={folder}"])
    plan = plan_of(config)
    Store.create(folder / "store", spec, plan.capacities).close()
    state = PlanState(plan).state_dict()
    place = {"phase": state["at"]["phase"], "said": state["phase"], "phases": list(plan.phases)}
    manifest = {"format": FORMAT, "updates": 7, "config": kept_settings(config), "plan": place}
    (folder / "checkpoints/000001").mkdir(parents=True)
    (folder / "checkpoints/000001/manifest.json").write_text(json.dumps(manifest))
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    (folder / "lock").write_text("4711")
    folder.chmod(0o755)
    return folder


def seen(folder):
    return {path: (path.lstat().st_mode, path.is_file() and path.read_bytes()) for path in (folder, *folder.rglob("*"))}


@contextmanager
def listening(_):
    with socket.create_server(("127.0.0.1", port := free_port())):
        yield [f"port={port}"]


@contextmanager
def of_another_format(folder):
    with closing(Index(folder / "store/index.sqlite", writes=True)) as index:
        index.set_meta("format", 1)
        index.commit()
    yield []


@contextmanager
def checkpoint_of_another_version(folder):
    path = folder / "checkpoints/000001/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    yield []


@contextmanager
def in_use(folder):
    with launcher._lock(folder):
        yield []


ORIGINAL = """
import sys, time
from pathlib import Path
from serl_launcher import launcher
launcher.Supervisor = lambda *_, **__: (print("up", flush=True), time.sleep(600))
from serl_launcher.config import composed
launcher.launch(composed(Path(sys.argv[1]), sys.argv[2:]))
"""


@contextmanager
def a_copy(folder):
    """The folder was copied, and a learner has the original open; its processes are left out."""
    original = folder.rename(folder.parent / "original")
    shutil.copytree(original, folder)
    words = [CONFIG, "learner=true", f"run_dir={original}", *own_ports()]
    with subprocess.Popen([sys.executable, "-c", ORIGINAL, *words], stdout=subprocess.PIPE) as learner:
        assert learner.stdout.readline() == b"up\n"
        yield []
        learner.kill()


def saying(*words):
    @contextmanager
    def saying(_):
        yield words

    return saying


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hindrance", "why"),
    [
        (in_use, "is in use by the learner with process 4711"),
        (a_copy, r"copies of one run, and a learner has .*original open \(process \d+\): stop that one first"),
        (listening, "cannot listen on 127.0.0.1"),
        (of_another_format, "has the format 1"),
        (checkpoint_of_another_version, "made by another version of this program"),
        (saying("share=nobodies"), "no such group"),
        (saying("algo.discount=0.5"), r"other settings of this .*discount: 0.5, 0.97.* from=/\S*/run run_dir=OTHER"),
        (saying("algo=qc", "policy=flow"), r"made with another algorithm.*begin anew with another run_dir"),
        (saying("policy.hidden=[8]"), r"other settings of this .*hidden: \[8\].*begin anew with another run_dir"),
        (saying("from=elsewhere"), r"from=/\S*/elsewhere: /\S*/run has begun without other weights"),
        (saying("plan.phases.baseline.until=[operator]", "plan.phases.demonstrate.until=[operator]"), "was edited"),
    ],
    ids=["in use", "copy", "port", "store", "checkpoint", "group", "settings", "algorithm", "policy", "from", "plan"],
)
def test_a_refused_start_changes_nothing_in_the_folder_that_it_refused(run, monkeypatch, hindrance, why):
    umask = os.umask(0o022)
    try:
        with hindrance(run) as words:
            before = seen(run)
            given = ["train.py", "learner=true", f"run_dir={run}", *own_ports(), *words]
            monkeypatch.setattr(sys, "argv", given)
            with pytest.raises(SystemExit, match=why):
                TRAIN.main()
            assert seen(run) == before
    finally:
        assert os.umask(umask) in (0o077, 0o027), "what a start makes is its user's own"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["from={new}/checkpoints/000001"], "is this run itself"),
        (["from={new}/.."], "has no checkpoint: say the folder"),
        (["from={run}", "policy.hidden=[8]"], r"another policy.*hidden: \[8\], \[128.*; its run: algo=rlpd policy=g"),
        (["from={run}/checkpoints/000001", "algo=sft"], r"algo\.policy\._target_: \S*ChunkPolicy, "),
    ],
    ids=["itself", "no run", "sizes", "policy"],
)
def test_a_run_that_cannot_begin_with_the_weights_of_another_is_not_begun(run, tmp_path, monkeypatch, words, why):
    before, new = seen(run), tmp_path / "new"
    said = [word.format(run=run, new=new) for word in words]
    monkeypatch.setattr(sys, "argv", ["train.py", "learner=true", f"run_dir={new}", *own_ports(), *said])
    with pytest.raises(SystemExit, match=why):
        TRAIN.main()
    assert seen(run) == before
    assert [path.name for path in new.iterdir()] == ["lock"]
