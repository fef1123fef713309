"""What several tests share: a small Spec, segments whose content tells where they belong, a server and its actors."""

import logging
import os
import re
import signal
import sys
import tempfile
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from serl_client import console
from serl_client.client import TrainerClient

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # else each program that a test starts compiles all of torch again
    sys.dont_write_bytecode = False
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits that it is ignored

console.QUIET_S = 0.0  # a test hears what the one before it has heard
os.environ["WANDB_MODE"] = "disabled"  # the runs that tests start mirror nothing, unless they ask for it

settings.register_profile(  # a busy machine makes no example wrong
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("house")

VIOLATIONS = Path(f"{tempfile.gettempdir()}/retake-{os.getpid()}.violations")
os.environ["RETAKE_VIOLATIONS"] = str(VIOLATIONS)  # each worker of a parallel run, and what it starts, has its own
WATCH = str(Path(__file__).parent / "watch")
if WATCH not in sys.path:  # the processes of a parallel run have it from the one that started them
    os.environ["RETAKE_FOLDERS"] = os.path.realpath(tempfile.gettempdir())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WATCH, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, WATCH)
    sys.modules.pop("sitecustomize", None)  # this machine's own
import sitecustomize  # noqa: E402

from tests.shared import data  # noqa: E402
from tests.shared import keys as shared_keys  # noqa: E402
from tests.shared.clients import connected, directed  # noqa: E402
from tests.shared.clock import Clock  # noqa: E402
from tests.shared.common import same_log  # noqa: E402
from tests.shared.composing import composes_once  # noqa: E402, F401
from tests.shared.servers import ServerThread  # noqa: E402

sitecustomize.record_into(VIOLATIONS)  # a worker has loaded it with the file of the process that started it


def pytest_ignore_collect(collection_path, config):
    """Import no file that is slow as a whole where no slow test is wanted: what it imports takes seconds, too."""
    if "not slow" not in config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    return bool(re.search(r"^pytestmark = .*\bmark\.slow\b", collection_path.read_text(), re.MULTILINE)) or None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("program") is None)  # the longest first, beside all others
    on_a_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_a_gpu and not import_module("torch").cuda.is_available():
        for item in on_a_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_sessionfinish():
    VIOLATIONS.unlink(missing_ok=True)


def violations():
    """What watch/sitecustomize.py has written down since the last call, in any process."""
    found = VIOLATIONS.read_text().splitlines() if VIOLATIONS.exists() else []
    if found:
        os.truncate(VIOLATIONS, 0)
    return found


@pytest.fixture(autouse=True)
def _nothing_unsafe_was_set_off_by_a_message():
    yield
    assert not violations()


@pytest.fixture(autouse=True)
def _the_log_says_what_it_said_before():
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)  # a program that ran in this process has raised it


@pytest.fixture
def taken_violations():
    """Those of a test that plants some."""
    return violations


@pytest.fixture
def clock(monkeypatch):
    """The product's clock, which stands still until the test moves it on. Ask for it before threads of it begin."""
    made = Clock()
    for name in ("monotonic", "sleep", "time", "time_ns"):
        monkeypatch.setattr(f"serl_client.clock.{name}", getattr(made, name))
    return made


@pytest.fixture
def running_clock(clock):
    """The product's clock, which runs as ever, and which the test may move on."""
    return clock.runs()


@pytest.fixture
def spec():
    return data.tiny_spec()


@pytest.fixture
def make_segment():
    return data.make_segment


@pytest.fixture
def exits():
    """An ExitStack that the end of the test closes."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def closes(exits):
    """closes(thing) -> the thing, which the end of the test closes: the last one first."""
    return lambda thing: exits.enter_context(closing(thing))


@pytest.fixture
def serve(tmp_path, closes):
    """serve(**options) -> a server in a thread, in the folder `run`; it is closed at the end."""
    return lambda **options: closes(ServerThread(tmp_path / "run", **options))


@pytest.fixture
def join(spec, tmp_path, exits):
    """join(server, name) -> a TrainerClient with the key of that name, if there are keys; it is closed at the end.

    It has got a directive to collect; `told=False`: it only tries.
    """

    def join(server, name="arm", *, address=None, outbox=None, spec=spec, told=True, **options):
        keys, folder = getattr(server, "keys", None), tmp_path / (outbox or f"outbox-{name}")
        options = {"key": keys and keys / f"{name}.key", **options}
        address = address or server.address
        client = exits.enter_context(TrainerClient(address, actor=name, spec=spec, outbox=folder, **options))
        if told:
            connected(client)
            server.direct()
            directed(client)
        return client

    return join


@pytest.fixture
def keys(tmp_path):
    """A folder with a key for everybody in PEOPLE, made by the tool."""
    return shared_keys.make(tmp_path / "keys")


@pytest.fixture
def one_thread():
    """Two threads on small networks mostly wait for each other, and on a busy machine do little else."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def same_loggers():
    """What a run changes of the root logger is taken back."""
    with same_log():
        yield


class Killer:
    """Kills this process at the n-th call of whatever it wraps."""

    def __init__(self, at):
        self.left = at

    def wrap(self, function):
        def wrapped(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped


@pytest.fixture
def killer_at():
    """killer_at(n) is a Killer that strikes at the n-th call."""
    return Killer
