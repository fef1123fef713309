"""tools/bench.py pi0-infer and pi0-train: the work is the one published, and the floor follows from it."""

import pytest
import torch

from serl_launcher.config import composed
from serl_launcher.training import memory
from serl_launcher.training.build import build
from tests.benches import pi0
from tests.benches.pi0_infer import Work, question, several
from tools.bench import main


def policy_of(*words, cameras):
    """(Spec, policy) of a config."""
    config = composed(pi0.CONFIG, ["algo=rejection", *words])
    spec = pi0.robot(config, cameras)
    return spec, build(config, spec).policy


@pytest.mark.slow
def test_pi0_takes_the_published_flops_without_what_nobody_reads_of_the_last_layer():
    with memory._shapes():
        spec, policy = policy_of("policy=pi0", cameras=3)
        work = Work.of(policy, spec)
    prefix = 816
    unread = 2 * prefix * (2 * 2048 * 2048 + 3 * 2048 * 16384) + 4 * prefix**2 * 2048
    assert work.flops() == pytest.approx(4.379e12 - unread, rel=2e-3)
    assert 10 * work.step == pytest.approx(0.386e12, rel=2e-3)
    assert work.kept == 2 * 18 * prefix * 256 * 2


def test_the_floor_reads_the_weights_once_for_many_rows_and_the_prefix_once_for_many_samples():
    work = Work(once=1000, step=10, once_bytes=500, step_bytes=50, kept=7, steps=3)
    slow_memory, slow_products = (1e30, 1.0), (1.0, 1e30)
    assert work.floor(*slow_products, rows=3, samples=5) == pytest.approx(work.flops(3, 5)) == 3 * (1000 + 5 * 3 * 10)
    assert work.floor(*slow_memory) == pytest.approx(500 + 3 * (50 + 7))
    assert work.floor(*slow_memory, rows=3, samples=5) == pytest.approx(500 + 3 * (50 + 3 * 7))


@pytest.mark.usefixtures("one_thread")
def test_several_samples_of_one_prefix_begin_with_the_chunk_of_one():
    spec, policy = policy_of("policy=pi0_tiny", cameras=2)
    seen = {name: torch.from_numpy(array)[None] for name, array in question(spec, 0).arrays.items()}
    prepared, noise = policy.prepared(seen, [pi0.TASK]), torch.randn(1, 1, *policy.noise_shape)
    with torch.no_grad():
        torch.testing.assert_close(several(policy, 3, prepared, noise), policy.chunks(prepared, noise))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "words", "figures"),
    [
        ("pi0-swap", ["--rounds", "1"], ["an answer alone: p99", "while weights are read: p99", "the swap"]),
        ("pi0-ranks", ["--ways", "zero3", "--batch", "4", "--rounds", "1"], ["zero3: samples", "until it is spread"]),
    ],
)
def test_a_small_pi0_shows_the_figures_on_a_cpu(bench, words, figures, capsys):
    pytest.importorskip("deepspeed")
    main([bench, "--policy", "pi0_tiny", *words, "device=cpu"])
    said = capsys.readouterr().out
    assert [figure for figure in figures if figure not in said] == []


@pytest.mark.parametrize(
    ("bench", "words", "message"),
    [
        ("pi0-infer", ["--policy", "flow"], "--policy flow is no PI0: say pi0, pi0_tiny, pi0_expert or pi0_lora"),
        ("pi0-train", ["--policy", "pi0_tiny", "policy.widht=4"], "policy has no key 'widht'; did you mean 'width'?"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(bench, words, message):
    with pytest.raises(SystemExit) as end:
        main([bench, *words])
    assert str(end.value).startswith("error: ")
    assert message in str(end.value)
    assert "\n" not in str(end.value)
