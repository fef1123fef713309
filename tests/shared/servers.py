"""The server of a run, in a process that can be killed and in a thread that can be looked into."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading

from serl_client import ConfigError
from serl_client import messages as m
from serl_client.connection import Connection, tcp
from serl_client.errors import TrainerError
from serl_client.keys import Key

from serl_launcher.service.server import Server
from serl_launcher.store import weights
from serl_launcher.store.schema import EpisodeInfo
from serl_launcher.supervisor import END

from . import oracle
from .common import PATIENCE, free_port, until

# While run_dir/fail exists the disk is full; if run_dir/raise exists, the next segment sets off a bug.
SERVE = """
import json, os, sys, errno
from pathlib import Path
from serl_launcher.service.server import serve
import serl_launcher.service.server as server
run_dir, capacities, public, local = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
sync = os.fdatasync
def failing(fd):
    if (run_dir / "fail").exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    sync(fd)
os.fdatasync = failing
stage = server.Store._stage_segment
def buggy(*arguments):
    stage(*arguments)
    if (run_dir / "raise").exists():
        (run_dir / "raise").unlink()
        raise RuntimeError("a bug, when half of a record was staged")
server.Store._stage_segment = buggy
serve(run_dir, capacities, public=public, local=local, inference="tcp://127.0.0.1:1")
"""


class _Asked:
    """What a test asks a server for as its trainer does; the connection is opened when it is first used."""

    keys = None  # a folder

    def __init__(self, run_dir):
        self.run_dir, self.port = run_dir, free_port()
        local = f"{run_dir}/server"
        if len(local) > 100:  # bytes: a socket's path has room for 107
            local = f"{tempfile.gettempdir()}/server-{self.port}"
        self.address, self.local = f"tcp://127.0.0.1:{self.port}", f"ipc://{local}"
        self._admin = None
        run_dir.mkdir(parents=True, exist_ok=True)

    @property
    def admin(self):
        """The connection as the trainer."""
        if self._admin is None:
            self._admin = Connection(self.local, m.Hello(m.PROTOCOL, "learner", "trainer"))
        return self._admin

    def ask(self, message):
        """The answer to a message of the learner's role; waits for a server that is starting."""

        def answer():
            try:
                return self.admin.call(message, 2.0)
            except TrainerError as error:
                failed.append(error)
                return None

        failed = []
        return until(answer, why=lambda: str(failed[-1]))

    def report(self):
        return self.ask(m.Status()).report

    def refusals(self):
        return self.report()["refusals"]

    def direct(self, body=None, **more):
        """Tell the actors to collect, or what `body` says; the directive's number."""
        body = body or {"phase": "practise", "mode": "collect", "into": "online", **more}
        return self.ask(m.Direct(body, None)).value

    def publish(self, content):
        """Make these bytes the newest weights; their version."""
        sha256, size = weights.write(self.run_dir / "weights", content)
        return self.ask(m.Publish(sha256, size, 0)).value

    def episodes(self):
        """{id: {field: value}} of all episodes that the server knows."""
        rows, page = [], self.ask(m.Sync(0, 0))
        while page.episodes:
            rows += page.episodes
            page = self.ask(m.Sync(page.revision, 0))
        return {row[1]: dict(zip(EpisodeInfo._fields, row, strict=True)) for row in rows}

    def stored(self, source="online"):
        """{episode id: [index, ...]} in the order in which its steps lie in the store."""
        return oracle.indices(self.run_dir / "store", source)

    def link(self, role, name, *, key=None, spec=None):
        """A connection by hand, with the key of that name; with a Spec it is that of an actor."""
        opened = Key.read(self.keys / f"{key}.key") if key else None
        record = {} if spec is None else {"session": f"{name:e<32}"[:32], "outbox": name, "spec": spec.to_dict()}
        return Connection(self.address, m.Hello(m.PROTOCOL, role, name, **record), opened)

    def hang_up(self):
        if self._admin is not None:
            self._admin.close()
            self._admin = None


class ServerProcess(_Asked):
    """A server in a process of its own that can be killed, stopped and started again."""

    def __init__(self, run_dir, *, log=None, **capacities):
        super().__init__(run_dir)
        self.log = log  # a file for its stderr
        self.capacities = capacities or {"online": 20_000, "demo": 1000}
        self.start()

    def start(self):
        arguments = [str(self.run_dir), json.dumps(self.capacities), self.address, self.local]
        with open(self.log, "ab") if self.log else contextlib.nullcontext() as errors:
            self.process = subprocess.Popen([sys.executable, "-c", SERVE, *arguments], stderr=errors)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def signal(self, number):
        self.process.send_signal(number)

    @contextlib.contextmanager
    def full_disk(self):
        """Within, every sync of the store fails."""
        (self.run_dir / "fail").touch()
        yield
        (self.run_dir / "fail").unlink()

    def close(self):
        self.hang_up()
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(END)
        self.process.wait(PATIENCE)


class ServerThread(_Asked):
    """A server in a thread of this process; `ended` is what it refused to go on with."""

    def __init__(self, run_dir, capacities=None, *, inference="tcp://127.0.0.1:1", host="127.0.0.1", **options):
        super().__init__(run_dir)
        self.address = tcp(host, self.port) if ":" in host else self.address
        public = tcp(host, self.port)
        self.keys = options.get("keys")
        self.server = Server(
            run_dir, capacities or {"online": 400}, public=public, local=self.local, inference=inference,
            **options,
        )  # fmt: skip
        self.ended = ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self.server.run()
        except ConfigError as error:
            self.ended = str(error)

    def stop(self):
        self.server.stop()
        self.thread.join()

    def close(self):
        self.stop()
        self.hang_up()
        self.server.close()
