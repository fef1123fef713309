"""tools/bench.py pi0: the work is the one published, and the floor follows from it."""

import pytest

from serl_launcher.config import composed
from serl_launcher.training import memory
from serl_launcher.training.build import build
from tests.benches.pi0 import CONFIG, Work, robot
from tools.bench import main


@pytest.mark.nightly
def test_pi0_takes_the_published_flops_without_what_nobody_reads_of_the_last_layer():
    config = composed(CONFIG, ["algo=rejection", "policy=pi0"])
    spec = robot(config, 3)
    with memory._shapes():
        work = Work.of(build(config, spec).policy, spec)
    prefix = 816
    unread = 2 * prefix * (2 * 2048 * 2048 + 3 * 2048 * 16384) + 4 * prefix**2 * 2048
    assert work.once + 10 * work.step == pytest.approx(4.379e12 - unread, rel=2e-3)
    assert 10 * work.step == pytest.approx(0.386e12, rel=2e-3)
    assert work.kept == 2 * 18 * prefix * 256 * 2


def test_the_floor_reads_the_weights_once_for_many_rows():
    work = Work(once=1000, step=10, once_bytes=500, step_bytes=50, kept=7, steps=3)
    slow_memory, slow_products = (1e30, 1.0), (1.0, 1e30)
    assert work.floor(*slow_products, rows=3) == pytest.approx(3 * (1000 + 3 * 10))
    assert work.floor(*slow_memory) == pytest.approx(500 + 3 * (50 + 7))
    assert work.floor(*slow_memory, rows=3) == pytest.approx(500 + 3 * (50 + 3 * 7))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "flow"], "--policy flow is no PI0: say pi0, pi0_tiny, pi0_expert or pi0_lora"),
        (["--policy", "pi0_tiny", "policy.widht=4"], "policy has no key 'widht'; did you mean 'width'?"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(words, message):
    with pytest.raises(SystemExit) as end:
        main(["pi0", *words])
    assert str(end.value).startswith("error: ")
    assert message in str(end.value)
    assert "\n" not in str(end.value)
