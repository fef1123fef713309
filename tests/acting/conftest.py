"""Inference servers in threads and processes, and who asks them."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from serl_client import messages as m
from serl_client.connection import Connection

from serl_launcher.acting import host as hosts
from serl_launcher.acting.host import PolicyHost
from serl_launcher.config import composed
from tests.shared.clients import connected
from tests.shared.common import CONFIG, free_port
from tests.shared.inference import Inference, algorithm_of

from .gpu import FLOW

INFER = """
import sys, time
from pathlib import Path
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from serl_launcher.acting.server import infer
run_dir, local = Path(sys.argv[1]), sys.argv[2]
config = OmegaConf.load(run_dir / "config.yaml")
algorithm = get_class(config.algo._target_)
act = algorithm.act
def slow(self, observation, previous_action, carry, **options):
    if (run_dir / "fail").exists():
        raise RuntimeError("the policy is broken")
    time.sleep(0.2)
    decision, carry = act(self, observation, previous_action, carry, **options)
    return decision, torch.zeros(len(previous_action)) if carry is None else carry
algorithm.act = slow
infer(config, run_dir, local)
"""


class Process(Inference):
    """The inference process of a run, with a policy that takes 200 ms, has a carry, at least that it was asked before,
    and fails where the run has a file `fail`. algo: a word."""

    def __init__(self, run_dir, algo):
        port, self.bridge = free_port(), free_port()
        self.folder, self.address = run_dir / "weights", f"tcp://127.0.0.1:{port}"
        run_dir.mkdir()
        words = [f"inference_port={port}", f"bridge.port={self.bridge}", "bridge.keys={robot/state: observation.state}"]
        OmegaConf.save(composed(CONFIG, [algo, *words]), run_dir / "config.yaml")
        self._command = [sys.executable, "-c", INFER, run_dir, f"ipc://{run_dir}/server"]
        self.begin()

    def begin(self):
        self.child = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)

    def stop(self):
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def process(tmp_path, request):
    """The process of algo=rlpd, or of the word that the test says."""
    made = Process(tmp_path / "run", getattr(request, "param", "algo=rlpd"))
    yield made
    made.stop()


@pytest.fixture
def inference(tmp_path, spec, exits):
    """inference(algorithm) -> an Inference that is not started yet."""

    def make(algorithm, **options):
        made = Inference(tmp_path / "run/weights", algorithm, spec, **options)
        exits.callback(made.stop)
        return made

    return make


class Asker(Connection):
    """A connection whose Welcome is nothing that is received."""

    def receive(self):
        message = super().receive()
        return self.receive() if isinstance(message, m.Welcome) else message


@pytest.fixture
def link(closes):
    """link(address) -> an actor's connection to an inference process."""

    def make(address):
        made = closes(Asker(address, m.Hello(m.PROTOCOL, "actor", "arm")))
        made.receive()  # opens it
        return made

    return make


@pytest.fixture
def connect(serve, join, tmp_path):
    """connect(inference) -> (a real server that names this inference process, join(name), publish(version, algorithm)).

    join(name) is a connected TrainerClient; its weights are the inference process's.
    """

    def connect(inference):
        server = serve(inference=inference.address)

        def client(name):
            return connected(join(server, name, told=False, weights_folder=tmp_path / name))

        def publish(version, algorithm):
            assert server.ask(m.Publish(*inference.publish(version, algorithm), 0)).value == version

        return server, client, publish

    return connect


@pytest.fixture
def on(monkeypatch, spec, one_thread):
    """on(gpu) -> a PolicyHost with a flow policy on this fake; its weights are the same each time."""

    def make(gpu, *words):
        monkeypatch.setattr(hosts, "open_device", lambda _: gpu)
        return PolicyHost(algorithm_of(spec, *FLOW, *words, seed=1), spec, "cpu")

    return make
