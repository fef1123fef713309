"""tools/bench.py pi0-infer and pi0-train: their FLOPs are those published and those that PyTorch counts."""

from dataclasses import replace

import pytest
import torch
from serl_client.errors import ConfigError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from serl_launcher.config import composed
from serl_launcher.training.build import build
from serl_launcher.types import Window
from tests.benches import pi0, pi0_infer, pi0_train
from tests.benches.test_bench import run
from tools.bench import main

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 2
ODD = [  # sizes of which no two are the same by accident
    "policy.gemma.expert_width=64", "policy.gemma.expert_mlp=160", "policy.gemma.kv_heads=2", "policy.horizon=5",
    "policy.steps=3", "policy.vision.image=48", "policy.vision.patch=12",
]  # fmt: skip
TERA = 1e12
H200 = 790e12, 4.3e12  # FLOP/s and bytes/s that were measured on one


@pytest.fixture(scope="module")
def full():
    """What pi0 costs with three cameras."""
    return pi0.Work.of(composed(pi0.CONFIG, ["policy=pi0"]).policy, 3)


def tiny(*words):
    """(its config, Spec, policy, Work) of pi0_tiny with odd sizes and two cameras."""
    config = composed(pi0.CONFIG, ["algo=rejection", "policy=pi0_tiny", *ODD, *words])
    spec = pi0.robot(config, 2)
    return config.policy, spec, build(config, spec).policy, pi0.Work.of(config.policy, 2)


def counted(call):
    """FLOPs of a call as PyTorch counts them; of attention it counts the plain products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


def test_the_sizes_of_pi0_give_the_published_flops_and_floor(full):
    whole = replace(full, whole=True)
    assert whole.prefix == 816
    assert whole.seen / TERA == pytest.approx(0.661, abs=5e-4)
    assert whole.language.flops / TERA == pytest.approx(3.332, abs=5e-4)
    assert 10 * whole.step / TERA == pytest.approx(0.386, abs=5e-4)
    assert whole.inference() / TERA == pytest.approx(4.379, abs=5e-4)
    assert whole.training() / TERA == pytest.approx(12.1, abs=0.05)
    assert whole.floor(*H200) == pytest.approx(6.53e-3, abs=5e-5)  # 5.05 + 1.48 ms


def test_what_nobody_reads_of_the_last_layer_is_not_counted(full):
    unread = 2 * 816 * (2 * 2048 * 2048 + 3 * 2048 * 16384) + 4 * 816**2 * 2048
    assert replace(full, whole=True).inference() - full.inference() == unread
    assert full.inference() / TERA == pytest.approx(4.196, abs=5e-4)


def test_the_floor_reads_the_weights_once_for_many_rows_and_the_prefix_once_for_many_samples(full):
    slow_memory, slow_products = (1e30, 1.0), (1.0, 1e30)
    assert full.floor(*slow_products, rows=3, samples=5) == pytest.approx(full.inference(3, 5))
    kept = 2 * 18 * 816 * 256 * 2  # bytes of one row's keys and values
    assert full.floor(*slow_memory, rows=3) - full.floor(*slow_memory) == pytest.approx(2 * 10 * kept)
    assert full.floor(*slow_memory, samples=5) == full.floor(*slow_memory)


@pytest.mark.parametrize(("samples", "cached"), [(1, True), (4, True), (1, False)])
def test_pytorch_counts_the_same_flops_of_an_answer(samples, cached):
    _, spec, policy, work = tiny()
    asks = [pi0_infer.question(spec, seed) for seed in range(ROWS)]
    observation = {name: torch.stack([torch.from_numpy(ask.arrays[name]) for ask in asks]) for name in spec.observation}
    prepared = policy.prepared(observation, [ask.task for ask in asks])
    noise = torch.zeros(samples, ROWS, *policy.noise_shape)
    with torch.no_grad():
        done = counted(
            lambda: policy.chunks(prepared, noise) if cached else pi0_infer.uncached(policy, prepared, noise)
        )
    assert work.inference(ROWS, samples, cached=cached) == pytest.approx(done, rel=2e-3)


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        ([], 0.005), (["policy.checkpointing=true"], 0.005), (["policy.freeze=[vision,language]"], 0.005),
        (["policy.freeze=[vision,language]", "policy.checkpointing=true"], 0.005),
        (["policy.freeze=[vision]"], 0.005), (["policy.freeze=[language]"], 0.005), (["policy.lora=2"], 0.05),
    ],
)  # fmt: skip
def test_pytorch_counts_the_same_flops_of_a_gradient(words, tolerance):
    config, spec, policy, work = tiny(*words)
    batch = pi0_train.random_batch(spec, Window(policy.offsets), ROWS)
    done = counted(lambda: policy(batch)[0].sum().backward())
    options = config.freeze, config.lora
    ours = work.training(*options) + (work.recomputed(*options) if config.checkpointing else 0)
    assert ours * ROWS == pytest.approx(done, rel=tolerance)


def test_every_way_makes_the_same_chunk():
    _, spec, policy, _ = tiny()
    ask = pi0_infer.question(spec, 0)
    observation = {name: torch.from_numpy(ask.arrays[name])[None] for name in spec.observation}
    prepared, noise = policy.prepared(observation, [ask.task]), torch.randn(1, 1, *policy.noise_shape)
    with torch.no_grad():
        chunk = policy.chunks(prepared, noise)
        torch.testing.assert_close(pi0_infer.uncached(policy, prepared, noise), chunk)
        torch.testing.assert_close(pi0_infer.several(policy, 3, prepared, noise), chunk)


def test_inference_is_measured_beside_its_floor_and_other_ways():
    words = ["--policy", "pi0_tiny", "--rounds", "2", "--cameras", "1", "--steps", "4", "--batch", "1", "3"]
    result = run("pi0-infer", *words, "--samples", "2", "--", "policy.horizon=6")
    assert (result["cameras"], result["horizon"], result["steps"], result["rounds"]) == (1, 6, 4, 2)
    assert result["flops"] < result["flops_whole"]
    cases = {(case["way"], case["rows"], case["samples"]): case for case in result["cases"]}
    assert set(cases) == {
        ("eager", 1, 1), ("eager", 2, 1), ("eager", 3, 1), ("no prefix cache", 1, 1), ("one prefix", 1, 2)
    }  # fmt: skip
    work = pi0.Work.of(composed(pi0.CONFIG, ["policy=pi0_tiny", "policy.steps=4", "policy.horizon=6"]).policy, 1)
    ceilings = result["ceilings"]["flops"], result["ceilings"]["bytes"]
    for (_, rows, samples), case in cases.items():
        assert 0 < case["share"] < 1.5
        assert 0 < case["p50_ms"] <= case["p99_ms"]
        assert case["floor_ms"] == pytest.approx(work.floor(*ceilings, rows, samples) * 1e3)
        assert case["share"] == pytest.approx(case["floor_ms"] / case["p50_ms"])
        assert case["chunks_per_s"] == pytest.approx(rows * samples / case["p50_ms"] * 1e3)
        assert case["peak_bytes"] > 4 * work.expert.weights
    assert cases["eager", 1, 1]["flops"] == result["flops"]
    assert cases["eager", 1, 1]["flops"] < cases["no prefix cache", 1, 1]["flops"]
    assert cases["one prefix", 1, 2]["flops"] < cases["eager", 2, 1]["flops"]
    said = "\n".join(pi0_infer.lines(result))
    assert f"1 cameras of {work.tower.image} pixels, {work.words} words, chunks of 6, 4 steps; 2 rounds" in said
    assert "lerobot is not beside it: it has the full size alone" in said


def test_training_is_measured_beside_the_matrix_products_of_the_machine():
    words = ["--policy", "pi0_tiny", "--rounds", "2", "--cameras", "1", "--batch", "4", "--accumulation", "2"]
    result = run("pi0-train", *words, "--checkpointing")
    assert (result["batch"], result["accumulation"], result["checkpointing"]) == (4, 2, True)
    work = pi0.Work.of(composed(pi0.CONFIG, ["policy=pi0_tiny"]).policy, 1)
    assert (result["needed"], result["recomputed"]) == (work.training(), work.recomputed())
    assert 0 < result["useful_share"] < result["share"] < 1.5
    assert result["flops_per_s"] == pytest.approx(result["samples_per_s"] * (result["needed"] + result["recomputed"]))
    assert result["share"] == pytest.approx(result["flops_per_s"] / result["ceilings"]["flops"])
    assert 0 < result["weights"] < 1_000_000
    assert result["predicted_bytes"] > 16 * result["weights"]  # weights, their gradients and Adam's two moments
    assert result["peak_bytes"] > 0
    assert "batches of 4 in 2 parts, checkpointing True; 2 rounds" in "\n".join(pi0_train.lines(result))


@pytest.mark.parametrize(
    ("bench", "words", "message"),
    [
        ("pi0-infer", ["--policy", "flow"], "--policy flow is no PI0: say pi0, pi0_tiny, pi0_expert or pi0_lora"),
        ("pi0-infer", ["--policy", "pi0_tini"], "did you mean 'pi0_tiny'?"),
        ("pi0-infer", ["--policy", "pi0_tiny", "--device", "cuda:99"], "device=cuda:99 cannot be used"),
        ("pi0-train", ["--policy", "pi0_tiny", "--batch", "5", "--accumulation", "2"], "cannot be cut into 2 equal"),
        ("pi0-train", ["--policy", "pi0_tiny", "policy.widht=4"], "policy has no key 'widht'; did you mean 'width'?"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(bench, words, message):
    with pytest.raises(SystemExit) as end:
        main([bench, *words])
    assert str(end.value).startswith("error: ")
    assert message in str(end.value)
    assert "\n" not in str(end.value)


def test_a_lerobot_that_cannot_be_had_is_explained(full):
    _, spec, policy, _ = tiny()
    with pytest.raises(ConfigError, match=r"incorrect transformer version|No module named"):
        pi0_infer.lerobot(full, policy, pi0_infer.question(spec, 0), torch.device("cpu"))
