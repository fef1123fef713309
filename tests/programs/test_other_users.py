"""Another user of the machine tries to read, to truncate, to take an arm's name, and to connect."""

import grp
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from serl_client.errors import ConfigError
from serl_client.outbox import Outbox

from robot_infra.drivers import owner
from serl_launcher.sharing import check_user, is_shared, keep_private, take_over
from serl_launcher.store.creation import capacities_there
from serl_launcher.store.store import Store
from tests.shared.common import ROOT, TOOLS, until
from tests.shared.programs import Programs
from tests.shared.tools import called

NOBODY, OTHERS = 65534, 65533  # user and group
OPEN = """
import os, sys
for path in sys.argv[1:]:
    for way in ("RDONLY", "WRONLY"):
        try:
            os.close(os.open(path, getattr(os, f"O_{way}")))
            print(way, os.path.basename(path))
        except (PermissionError, IsADirectoryError):
            pass
"""
SQUAT = """
import socket, sys
squatter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
squatter.bind("\\0" + sys.argv[1])
if sys.argv[2] == "listens":
    squatter.listen()
print("taken", flush=True)
sys.stdin.read()
"""
TOOL = """
import runpy, sys
sys.stderr = sys.stdout
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WRITE = """
import pathlib, sys
from serl_launcher.store.index import Index
try:
    Index(pathlib.Path(sys.argv[1]), writes=True).probe()
except Exception as error:
    print(type(error).__name__)
"""
CONNECT = """
import sys
from serl_client import messages as m
from serl_client.connection import Connection
from serl_client.errors import TrainerError
with Connection(sys.argv[1], m.Hello(m.PROTOCOL, "viewer", "eve")) as link:
    try:
        print("in:", link.call(m.Status(), 5.0))
    except TrainerError as error:
        print(type(error).__name__)
"""

CANNOT = os.geteuid() != 0 or shutil.which("setpriv") is None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CANNOT, reason="needs root and setpriv, to be another user")]


@pytest.fixture
def stranger(exits):
    """stranger(code, *words, group=OTHERS) -> a program of another user; it is killed at the end."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "packages/serl_client/src")))

    def stranger(code, *words, group=OTHERS):
        who = ["setpriv", f"--reuid={NOBODY}", f"--regid={group}", "--clear-groups"]
        program = exits.enter_context(subprocess.Popen(
            [*who, sys.executable, "-c", code, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd="/", env={"PYTHONPATH": paths, "PATH": os.environ["PATH"]},
        ))  # fmt: skip
        exits.callback(program.kill)
        return program

    return stranger


@pytest.fixture
def place():
    """A folder that all users may enter."""
    before = os.umask(0o022)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
    os.umask(before)


@pytest.mark.parametrize("is_sharing", [False, True], ids=["private", "shared"])
def test_an_older_run_is_its_users_alone_or_read_by_the_group_that_shares_it(place, stranger, spec, is_sharing):
    share = grp.getgrall()[-1]
    Store.create(place / "run/store", spec, {"online": 400}).close()
    (place / "run/config.yaml").touch()
    files = [path for path in (place / "run").rglob("*") if path.is_file()]
    assert stranger(OPEN, *files).stdout.read().count("RDONLY") == len(files), "before it was taken over"
    take_over(place / "run", share.gr_name if is_sharing else None, is_learner=True)
    assert is_shared(place / "run") == is_sharing
    keep_private(is_sharing)
    (place / "run/weights").mkdir()
    files.append(place / "run/weights/new")
    files[-1].touch()
    with closing(Outbox(place / "outbox", 1 << 20)) as outbox:
        files.append(outbox.folder / "lock")
    assert stranger(OPEN, *files).stdout.read() == ""
    if is_sharing:
        files.pop()
        said = stranger(OPEN, *files, group=share.gr_gid).stdout.read()
        assert sorted(said.split("\n")[:-1]) == sorted(f"RDONLY {path.name}" for path in files)


def test_a_run_of_another_user_is_refused(place):
    check_user(place)
    (place / "config.yaml").touch()
    check_user(place)
    os.chown(place / "config.yaml", NOBODY, OTHERS)
    with pytest.raises(ConfigError, match=f"is a run of user {NOBODY}, who alone resumes it"):
        check_user(place)


def test_a_folder_that_holds_no_run_keeps_its_mode_and_a_group_that_is_not_there_is_told(place):
    (place / "thesis").touch()
    take_over(place, None, is_learner=True)
    assert place.stat().st_mode & 0o777 == 0o755
    for share in ("nobodies", 2**32 - 1, -1, True):
        with pytest.raises(ConfigError, match=rf"share={share}: there is no such group.*`id`"):
            take_over(place, share, is_learner=True)
    with pytest.raises(ConfigError, match="holds thesis, which is of no run: choose another run_dir"):
        take_over(place, OTHERS, is_learner=False)
    assert place.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("share", [OTHERS, "null"], ids=["shared", "private"])
def test_what_lies_on_a_robot_pc_is_its_users_or_the_groups_with_the_folders_above_it(place, stranger, share):
    """Also of an actor that ran there before. The group has a number, and no name."""
    with closing(Outbox(place / "run/actors/older/outbox", 1 << 20)):
        pass
    seen = place / "run/actors/arm", place / "run/actors/older/outbox/lock"
    with Programs(place) as programs:
        programs.start("actor", "task=fake", "name=arm", f"share={share}")
        until((seen[0] / "outbox/lock").exists, why=programs.said)
    assert stranger(OPEN, *seen, group=1).stdout.read() == ""
    assert stranger(OPEN, *seen).stdout.read() == ("RDONLY arm\nRDONLY lock\n" if share == OTHERS else "")


def test_an_actor_leaves_the_mode_of_a_learners_run_as_it_is(place):
    (place / "config.yaml").touch()
    for is_learner, mode in ((False, 0o755), (True, 0o700)):
        take_over(place, None, is_learner=is_learner)
        assert place.stat().st_mode & 0o777 == mode


@pytest.fixture
def reader(stranger):
    """A stranger who may read the product's code, but not the run."""
    if stranger("import serl_client").wait():
        pytest.skip(f"another user cannot read {ROOT}")
    return stranger


@pytest.fixture
def stored(place, spec, make_segment):
    """The folder of a run with two episodes, whose index has a log, as a killed learner leaves it."""
    made = Store.create(place / "live", spec, {"online": 400})
    made.direct({"into": "online", "phase": "practise"})
    made.lives.hello("arm", "outbox", "A", [])
    for number in range(2):
        made.stage("A", number, make_segment(f"e{number}", number, ends="terminated"))
    made.commit()
    shutil.copytree(place / "live", place / "run/store")
    made.close()
    (place / "run/config.yaml").touch()
    return place / "run"


def contents(folder):
    """{file: bytes}; SQLite may correct what it maps its log by, which is no data."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.suffix != ".sqlite-shm" and path.read_bytes() for path in files}


@pytest.mark.parametrize("left", [["-shm", "-wal"], ["-wal"], []], ids=["killed", "copied", "stopped"])
def test_a_member_of_the_group_reads_a_run_and_nobody_who_reads_it_changes_it(place, reader, stored, left):
    if not left:
        shutil.rmtree(stored / "store")
        shutil.copytree(place / "live", stored / "store")
    for ending in {"-shm", "-wal"} - set(left):
        (stored / f"store/index.sqlite{ending}").unlink(missing_ok=True)
    take_over(stored, str(OTHERS), is_learner=True)
    before = contents(stored)
    for tool, words, said in (
        ("store", ["verify"], "source online: 8 steps checked\n"), ("data", ["check"], "2 episodes, 8 steps"),
        ("label", ["--run-dir"], "e1 "),
    ):  # fmt: skip
        assert said in reader(TOOL, TOOLS / f"{tool}.py", *words, stored).stdout.read()
    assert reader(WRITE, stored / "store/index.sqlite").stdout.read() == "OperationalError\n", "it is not damaged"
    assert capacities_there(stored / "store", {"online": 300}) == {"online": 400}
    assert called("store", "verify", stored) == (0, "source online: 8 steps checked\n")
    assert contents(stored) == before


@pytest.mark.parametrize(
    ("tool", "words"),
    [("store", ["show", "{}"]), ("data", ["check", "{}"]), ("label", ["--run-dir={}"]), ("keys", ["list", "--keys={}"]),
     ("status", ["--port=1", "--run-dir={}"]), ("../examples/train", ["learner=true", "task=fake", "run_dir={}"])],
)  # fmt: skip
def test_a_tool_says_in_one_sentence_whose_run_it_may_not_read(reader, stored, tool, words):
    take_over(stored, None, is_learner=True)
    words = (word.format(stored) for word in words)
    *_, said = reader(TOOL, TOOLS / f"{tool}.py", *words).stdout.read().splitlines()
    assert re.match(f"error: you may not use {stored}.*: {stored} is of user 0, who alone .*share=GROUP", said)


@pytest.mark.parametrize("how", ["listens", "hides"])
def test_an_arms_name_is_never_taken_in_silence_and_a_device_that_we_have_locked_is_ours(
    stranger, monkeypatch, caplog, how
):
    monkeypatch.setattr(owner, "PATIENCE", 0.0)
    device = os.ttyname(os.openpty()[1])
    programs = []
    for place in ("10.0.0.7", device):
        name = f"retake-arm-{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}"
        programs.append(stranger(SQUAT, name, how))
        assert programs[-1].stdout.readline() == "taken\n"
    who = [f"process {program.pid} of another user, {NOBODY}" for program in programs]
    who = who if how == "listens" else ["a program that hides its number, and may be another user's"] * 2
    with pytest.raises(ConfigError, match=f"the arm at 10.0.0.7 is in use by {who[0]}"), owner.owned("10.0.0.7"):
        pass
    with owner.owned(device):
        assert f"the arm at {device}: {who[1]} has taken its name, but not its device" in caplog.text


def test_with_keys_another_user_does_not_connect(reader, serve, keys):
    served = serve(keys=keys)
    assert reader(CONNECT, served.address).stdout.read().strip() in ("Timeout", "Disconnected", "Refused")
    assert served.report()["clients"] == []
