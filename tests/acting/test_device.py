"""Copies of new weights, the current device and the compiler, as far as a CPU can show it; then on a GPU."""

import logging
import os
import tempfile
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from serl_launcher.acting import device as devices
from serl_launcher.acting.device import Cpu, Cuda
from serl_launcher.acting.host import PolicyHost, Question
from serl_launcher.networks import compiler
from serl_launcher.optim import distributed
from tests.shared.inference import algorithm_of

from .gpu import FLOW, FakeGpu, actions, many
from .toy import ask

# -- copies of new weights


class Slow(Cpu):
    """A device whose copies come only when they are waited for. It counts the staging memories that it makes."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.staged = 0

    def _pinned(self, size):
        self.staged += 1
        return super()._pinned(size)


def test_weights_are_copied_in_pieces_through_one_staging_memory(monkeypatch):
    monkeypatch.setattr(devices, "PIECE", 24)
    weights = {
        "scalar": torch.tensor(3.0), "half": torch.randn(7, 5).bfloat16(), "flags": torch.tensor([True, False, True]),
        "count": torch.arange(9), "bytes": torch.arange(100, dtype=torch.uint8), "none": torch.empty(0, 4),
    }  # fmt: skip
    device = Slow()
    for _ in range(2):
        copies = device.copies(weights)
        assert copies.keys() == weights.keys()
        for name, weight in weights.items():
            assert copies[name].dtype == weight.dtype
            assert torch.equal(copies[name], weight)
            assert copies[name].data_ptr() != weight.data_ptr() or not weight.numel()
    assert device.staged == 1


def test_the_staging_memory_is_written_again_only_when_the_last_copy_from_it_is_done(monkeypatch):
    monkeypatch.setattr(devices, "PIECE", 16)
    device, order, copy = Slow(), [], torch.Tensor.copy_

    def noted(target, source, **options):
        order.append("sent" if options else "staged")
        return copy(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    monkeypatch.setattr(device, "settle", lambda: order.append("done"))
    device.copies({"weight": torch.zeros(3, 4)})
    assert order == ["staged", "sent", "done"] * 3


# -- the current device


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda without a GPU, whose calls note the current device: [(what, device)]."""
    current, noted = [torch.device("cuda:0")], []

    @contextmanager
    def device(which):
        current.append(which)
        yield
        current.pop()

    class Noting:
        def __init__(self, *_, **__):
            noted.append((type(self).__name__, current[-1]))

        def replay(self):
            noted.append(("replay", current[-1]))

        def wait_stream(self, other):
            noted.append(("wait", current[-1]))

        synchronize = wait = replay

    for name in ("Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, type(name, (Noting,), {}))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **options: nullcontext(options["stream"].wait()))
    monkeypatch.setattr(torch.cuda, "current_stream", Noting)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: noted.append(("pool", current[-1])))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: noted.append(("release", current[-1])))
    monkeypatch.setattr(torch.cuda, "set_device", lambda which: noted.append(("set", which)))
    return noted


def test_streams_pools_recordings_and_replays_belong_to_the_device_of_their_tensors(cuda):
    second = torch.device("cuda:1")
    device = Cuda(second)
    replay, _ = device.record(lambda: torch.zeros(1), device.pool())
    replay()
    device.settle()
    device.release()
    assert {what for what, _ in cuda} >= {"Stream", "CUDAGraph", "pool", "replay", "wait", "release"}
    assert {where for _, where in cuda} == {second}


def test_a_trainer_on_the_second_gpu_opens_nothing_on_the_first(cuda, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ("cpu", "cuda", "cuda:1"):
        assert distributed.join(name).device == name
    assert cuda == [("set", "cuda:1")]


# -- the compiler


def test_without_a_compiler_layers_stay_as_they_are_and_one_sentence_says_so(on, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr("serl_launcher.policies.chunk.ChunkPolicy.compile_layers", lambda _: asked.append(1))
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    on(FakeGpu()).warm_up(1)
    assert not asked
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith("the policy's layers are not compiled and answers take longer: a C compiler (gcc or clang)")
    monkeypatch.setattr(compiler, "lacking", lambda: "")
    on(FakeGpu())
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("CC", "there", "header", "says"),
    [("", ["gcc"], True, ""), ("", ["clang"], True, ""), ("", [], True, "a C compiler (gcc or clang)"),
     ("mycc", ["gcc"], True, "a C compiler (mycc)"), ("", ["gcc"], False, "Python.h")],
)  # fmt: skip
def test_what_a_compilation_needs_is_named(monkeypatch, tmp_path, CC, there, header, says):
    monkeypatch.setenv("CC", CC)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: name)
    if header:
        (tmp_path / "Python.h").touch()
    assert compiler.lacking() == says


def test_compiled_code_is_kept_where_only_its_user_writes(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    compiler.keep_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"
    for home, expected in (("mine", tmp_path / "mine/retake/inductor"), ("file", tmp_path / "inductor_")):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (tmp_path / "file").touch()  # nothing can be made below it
        compiler.keep_private()
        kept = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        assert kept.startswith(str(expected))
        assert os.stat(kept).st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_layer_that_is_compiled_is_compiled_once_for_all_layers_tasks_and_batches(spec, one_thread):
    """What a GPU will do, with a compiler that writes no code."""
    host = PolicyHost(algorithm_of(spec, "+algo=sft", "+policy=pi0_tiny"), spec, "cpu")

    def actions(task, count):
        questions = [Question(b"%d" % i, ask(seed=i, reset=True, explore=True, task=task, key=i)) for i in range(count)]
        return [answer.arrays["action"] for answer in host.answer(questions)]

    sizes = (1, 2, 4)
    expected = {size: actions("push the block", size) for size in sizes}
    host.acting._attend = torch.compile(host.acting._attend, fullgraph=True, backend="eager")
    for size in sizes[:2]:
        actions("reach", size)
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in sizes:
            np.testing.assert_allclose(actions("push the block", size), expected[size], atol=1e-6)


# -- on a GPU


@pytest.mark.gpu
def test_each_gpu_answers_recorded_as_a_cpu_does(spec):
    plain = PolicyHost(algorithm_of(spec, *FLOW, seed=1), spec, "cpu")
    for index in range(torch.cuda.device_count()):
        host = PolicyHost(algorithm_of(spec, *FLOW, seed=1), spec, f"cuda:{index}")
        while sizes := host.unrecorded:
            host.warm_up(sizes[0])
        assert host.acting.chunks.is_on
        for count in (1, 3, 64):
            np.testing.assert_allclose(actions(host, many(count)), actions(plain, many(count)), atol=1e-3)


@pytest.mark.gpu
def test_a_gpu_answers_while_new_weights_are_copied_and_has_them_after_the_swap():
    for index in range(torch.cuda.device_count()):
        device = Cuda(torch.device("cuda", index))
        weights = {"large": torch.randn(40_000_000), "half": torch.randn(7).bfloat16()}
        for name, copied in device.copies(weights).items():
            assert copied.device == device.device
            assert torch.equal(copied.cpu(), weights[name])
        assert device._staging is not None
        assert device._staging.is_pinned()
