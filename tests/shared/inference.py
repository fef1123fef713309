"""Algorithms as the configs compose them, and an inference server in a thread."""

import threading

import safetensors.torch

from serl_launcher.acting.host import PolicyHost
from serl_launcher.acting.server import InferenceServer
from serl_launcher.store import weights

from .common import free_port
from .models import algorithm_of


def rlpd(spec, seed=0, *words):
    return algorithm_of(spec, "+algo=rlpd", "+policy=gaussian", *words, seed=seed)


def published(folder, algorithm):
    """The file of the algorithm's weights, as the trainer publishes them."""
    sha256, _ = weights.write(folder, safetensors.torch.save(algorithm.acting.published()))
    return weights.path(folder, sha256)


class Inference:
    """An InferenceServer in a thread: it has its socket at once and answers from `start` on."""

    def __init__(self, folder, algorithm, spec, *, port=None, window=0.005, host=PolicyHost, keys=None):
        self.folder, self.notice = folder, {}
        self.address = f"tcp://127.0.0.1:{port or free_port()}"
        self.server = InferenceServer(host(algorithm, spec, "cpu"), folder, self.address, window=window, keys=keys)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._newest, self._ended.is_set))

    def _newest(self):
        return self.notice

    def start(self):
        self._thread.start()
        return self

    def acting(self):
        """Start with the weights that it has as version 1."""
        self.publish(1, self.server.host.algorithm)
        return self.start()

    def publish(self, version, algorithm):
        """Make the algorithm's acting part the newest weights; returns their sha256 and size."""
        sha256, size = weights.write(self.folder, safetensors.torch.save(algorithm.acting.published()))
        self.notice = {"version": version, "sha256": sha256}
        return sha256, size

    def stop(self):
        """May be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.server.close()
