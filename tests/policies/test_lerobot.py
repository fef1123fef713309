"""Policies of lerobot, trained and run here, beside lerobot's own functions on the same weights and inputs."""

import subprocess
import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hydra.utils import instantiate
from serl_client import ConfigError

from serl_launcher.algorithms.recap import DERIVED, POSITIVE
from serl_launcher.training import build, memory
from serl_launcher.types import Prefix, Window
from tests.shared import lerobot_policies as small
from tests.shared.common import STATE, free_port, until
from tests.shared.lerobot_policies import FITTED, SIDE, SPEC, TOP, change
from tests.shared.models import assert_same, batch, config_of
from tools import processes

pytest.importorskip("lerobot", reason="the extra `data` is not installed: . examples/install.sh --extra data")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
NEWEST = small.HAS_PI  # older ones need transformers of their own
KINDS = [
    pytest.param(kind, marks=[pytest.mark.skipif(kind[:2] == "pi" and not NEWEST, reason="lerobot 0.6 on Python 3.12")])
    for kind in small.SMALL
]


def ours(**options):
    """config/policy/lerobot.yaml with these options."""
    return instantiate(config_of("+policy=lerobot").policy)(SPEC, **options)


def rows(policy, **more):
    """Windows, one of which ends after three steps and one after a single one."""
    window = Window(policy.offsets)
    length = torch.tensor([window.horizon, 3, 1])
    return batch(SPEC, 3, window=window, length=length, task=small.TASKS, **more)


def seen_first(batch):
    """What is observed in the first step of each window."""
    return {name: value[:, 0] for name, value in batch.observation.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_chunk_are_those_of_lerobot_and_what_is_saved_gives_them_there(kind, folder, tmp_path):
    policy, theirs = ours(path=str(folder(kind))), small.Theirs(tmp_path / kind)
    given = rows(policy)
    loss, told = policy(given)
    assert all(value.isfinite() for value in told.values())
    expected = theirs.loss(given)
    torch.testing.assert_close(loss, expected.expand(3), atol=1e-6, rtol=1e-5)

    noise = torch.randn(1, 3, *policy.noise_shape, generator=torch.Generator().manual_seed(5))
    now = slice(None) if policy.history > 1 else 0
    seen = {name: value[:, now] for name, value in given.observation.items()}
    chunk = policy.sample(seen, task=small.TASKS, noise=noise)[0]
    expected = theirs.chunk(given.observation, small.TASKS, noise[0, :, 0])
    assert chunk.shape == (3, policy.horizon, 4)
    torch.testing.assert_close(chunk, expected.clamp(-3, 3), atol=1e-5, rtol=1e-5)

    optimizer = torch.optim.SGD([weight for weight in policy.parameters() if weight.requires_grad], 0.1)
    policy(given)[0].mean().backward()
    optimizer.step()
    moved = policy.sample(seen, task=small.TASKS, noise=noise)[0]
    assert not torch.equal(moved, chunk)
    policy.save(saved := tmp_path / "saved")
    there = small.Theirs(saved).chunk(given.observation, small.TASKS, noise[0, :, 0])
    torch.testing.assert_close(moved, there.clamp(-3, 3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.values[0] not in ("act", "diffusion")])
def test_a_chunk_continues_the_old_one_as_lerobots_own_rtc_does_and_only_where_it_is_asked_to(kind, folder, tmp_path):
    policy, theirs = ours(path=str(folder(kind))), small.Theirs(tmp_path / kind)
    assert policy.continues == "guided"
    seen = seen_first(rows(policy))
    made = torch.Generator().manual_seed(5)
    noise = torch.randn(1, 3, *policy.noise_shape, generator=made)
    committed, left = torch.tensor([2, 1, 0]), torch.tensor([4, 3, 0])
    there = (torch.arange(policy.horizon) < left[:, None]).unsqueeze(-1)
    prefix = Prefix(torch.rand(3, policy.horizon, 4, generator=made) * there, committed, left)
    anew = policy.sample(seen, task=small.TASKS, noise=noise)
    found = policy.sample(seen, task=small.TASKS, noise=noise, prefix=prefix)
    assert torch.equal(policy.sample(seen, task=small.TASKS, noise=noise), anew)
    assert policy.fields.rtc_config is None
    expected = theirs.continued(rows(policy).observation, small.TASKS, noise[0, :, 0], prefix).clamp(-3, 3)
    for row, kept in enumerate(committed.tolist()):
        assert torch.equal(found[0, row, :kept], prefix.action[row, :kept])
        torch.testing.assert_close(found[0, row, kept:], expected[row, kept:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0, 2], anew[0, 2], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[0, 0, 2:4], anew[0, 0, 2:4], atol=1e-3)


@pytest.mark.parametrize("kind", ["act"])
def test_lerobots_policy_server_loads_what_is_saved_and_answers_us_the_same_chunk(kind, folder, tmp_path, exits):
    """Its own program, which LerobotServer asks."""
    pytest.importorskip("grpc", reason="the extra `vla` is not installed: . examples/install.sh --extra vla")
    policy = ours(path=str(folder(kind)))
    policy.save(saved := tmp_path / "saved")
    seen = seen_first(rows(policy))
    noise = torch.zeros(1, 3, *policy.noise_shape)
    chunk = policy.sample(seen, task=small.TASKS, noise=noise)[0]

    command = [sys.executable, "-m", "lerobot.async_inference.policy_server", "--host=127.0.0.1"]
    server = processes.start([*command, f"--port={(port := free_port())}"], subprocess.DEVNULL, cwd=tmp_path)
    exits.callback(processes.kill, server)
    options = {"url": f"127.0.0.1:{port}", "type": kind, "path": str(saved), "n_action_steps": policy.horizon}
    asks = instantiate(config_of("+policy=lerobot_server").policy, **options, timeout_s=0.5)(SPEC)
    (found,) = until(lambda: [found for found, trouble in [asks.ask(seen, small.TASKS)] if not trouble])
    torch.testing.assert_close(chunk, found.clamp(-3, 3), atol=1e-5, rtol=1e-5)


def test_recap_tells_one_that_reads_words_what_was_good_and_acts_as_if_all_were(folder):
    path = {"path": str(folder("smolvla"))}
    config = config_of("algo=recap", "policy=lerobot", "algo.dropped=0")
    algorithm = instantiate(config.algo, policy=path)(SPEC)
    good = [f"{task}. {POSITIVE}" for task in small.TASKS]
    drawn = batch(SPEC, 3, window=algorithm.windows["update_policy"], task=small.TASKS)
    told = []
    algorithm.policy.register_forward_pre_hook(lambda _, given: told.append(given[0].task))
    advantage = torch.tensor([[0.0], [1.0], [0.0]])
    person = torch.tensor([[False], [False], [True]]).expand_as(drawn.intervened)
    algorithm.threshold.fill_(0.5)
    metrics = algorithm.update_policy(replace(drawn, extras={DERIVED: advantage}, intervened=person))
    assert told == [(small.TASKS[0], *good[1:])]
    assert metrics["loss"].isfinite()
    seen = seen_first(drawn)
    noise = torch.randn(1, 3, *algorithm.policy.noise_shape)
    acted, plain = (
        policy.sample(seen, task=words, noise=noise)
        for policy, words in ((algorithm.acting, small.TASKS), (algorithm.policy, small.TASKS))
    )
    assert torch.equal(acted, algorithm.policy.sample(seen, task=good, noise=noise))
    assert not torch.equal(acted, plain)
    with pytest.raises(ConfigError, match=r"algo\.task_weight=2 needs a policy with a head"):
        instantiate(config.algo, policy=path, task_weight=2)(SPEC)


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_a_folders_policy_is_counted_before_it_is_trained(kind, folder, caplog):
    config = config_of("algo=sft", "policy=lerobot")
    config.policy.path = str(folder(kind))
    need = memory.needed(build.untrained(config, SPEC), SPEC, 4, 1, 0)
    assert min(need.weights, need.gradients, need.activations) > 0
    assert "not counted" not in caplog.text


@pytest.mark.skipif(not NEWEST, reason="lerobot 0.6 on Python 3.12")
def test_relative_actions_of_a_folder_are_lerobots_and_their_statistics_are_not_fitted(folder, tmp_path):
    there = folder("pi0", use_relative_actions=True)
    policy, theirs = ours(path=str(there)), small.Theirs(there)
    given = rows(policy)
    torch.testing.assert_close(policy(given)[0], theirs.loss(given), atol=1e-6, rtol=1e-5)
    noise = torch.randn(1, 3, *policy.noise_shape)
    chunk = policy.sample(seen_first(given), task=small.TASKS, noise=noise)
    expected = theirs.chunk(given.observation, small.TASKS, noise[0, :, 0]).clamp(-3, 3)
    torch.testing.assert_close(chunk[0], expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"use_relative_actions: .* say policy\.path="):
        ours(type="pi0", options={**small.PI, "use_relative_actions": True})


def test_without_images_an_act_reads_the_state_as_that_of_its_environment(caplog):
    rename = {STATE: "observation.environment_state"}
    policy = ours(type="act", options=small.ACT, cameras=[], rename=rename)
    given = rows(policy)
    assert policy(given)[0].isfinite().all()
    assert policy.sample({STATE: given.observation[STATE][:, 0]}).shape == (1, 3, 6, 4)
    config = config_of("algo=sft", "policy=lerobot", small.ACT_WORD, "policy.cameras=[]")
    config.policy.rename = rename
    need = memory.needed(build.untrained(config, SPEC), SPEC, 4, 1, 0)
    assert need.activations > 0
    assert "not counted" not in caplog.text


def test_a_loss_for_all_rows_draws_them_by_weight_and_its_random_numbers_come_from_the_rows():
    policy = ours(type="act", options=small.ACT)
    given = rows(policy)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, second = policy(given)[0], policy(given)[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, second)
    assert first.shape == (3,)
    assert not torch.equal(policy(replace(given, seed=given.seed + 1))[0], first)
    one = policy(given.rows(torch.tensor([1, 1, 1])))[0]
    assert torch.equal(policy(replace(given, weight=torch.tensor([0.0, 2.0, 0.0])))[0], one)


def test_the_average_that_acts_has_the_running_statistics_of_what_is_trained():
    plain = {**small.SMALL["diffusion"], "use_group_norm": False}
    words = ("algo=rejection_lerobot", "policy.type=diffusion", "algo.idle_filter.threshold=0")
    algorithm = instantiate(config_of(*words).algo, policy={"options": plain})(SPEC)
    algorithm.update(batch(SPEC, 4, window=algorithm.windows["update"]))
    running = {name: value for name, value in algorithm.policy.named_buffers() if name.endswith("running_mean")}
    assert running
    assert all(value.abs().max() > 0 for value in running.values())
    assert_same(running, {name: value for name, value in algorithm.averaged.named_buffers() if name in running})


def test_statistics_of_the_folder_stay_and_those_of_random_weights_are_fitted_and_published(folder):
    kept, fresh = ours(path=str(folder("act"))), ours(type="act", options=small.ACT)
    for policy in (kept, fresh):
        policy.statistics.set_statistics(FITTED)
    assert_same(kept.statistics.tensors()["action"]["mean"], small.statistics()["action"]["mean"])
    assert "action mean [" in kept.statistics.said
    assert fresh.statistics.tensors()[STATE]["std"].tolist() == [2.0] * 5
    assert fresh.statistics.tensors()[TOP]["mean"].flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    other = ours(type="act", options=small.ACT)
    other.load_published(fresh.published())
    assert torch.equal(*(each.sample(seen_first(rows(fresh))) for each in (other, fresh)))


def test_statistics_that_lerobot_kept_among_the_weights_are_read(folder):
    there = folder("act")
    for file in there.glob("policy_*"):
        file.unlink()
    old = {
        f"{part}.buffer_{name.replace('.', '_')}.{kind}": values
        for part, names in {"normalize_inputs": (STATE, TOP, SIDE), "unnormalize_outputs": ("action",)}.items()
        for name in names for kind, values in small.statistics(3)[name].items() if kind in ("mean", "std")
    }  # fmt: skip
    weights = safetensors.torch.load_file(there / "model.safetensors")
    safetensors.torch.save_file({**weights, **old}, there / "model.safetensors")
    found = ours(path=str(there)).statistics.tensors()
    assert {name: {*kinds} for name, kinds in found.items()} == {name: {"mean", "std"} for name in small.SHAPES}
    for name, kinds in found.items():
        assert_same(kinds, {kind: small.statistics(3)[name][kind] for kind in kinds})


def test_a_folder_without_statistics_gives_no_action_before_they_are_fitted(folder):
    there = folder("act")
    for file in there.glob("policy_*"):
        file.unlink()
    policy, acts = ours(path=str(there)), ours(path=str(there))
    with pytest.raises(ConfigError, match="brought no statistics, and none are fitted yet: no action before"):
        acts.load_published(policy.published())
    policy.statistics.set_statistics(FITTED)
    acts.load_published(policy.published())
    assert_same(acts.statistics.tensors(), policy.statistics.tensors())


def feature(*shape):
    return {"type": {3: "VISUAL"}.get(len(shape), "STATE"), "shape": list(shape)}


def test_cameras_that_are_called_otherwise_are_renamed(folder):
    there = folder("act")
    other = replace(SPEC, observation={
        {TOP: "observation.images.up"}.get(name, name): feature for name, feature in SPEC.observation.items()
    })  # fmt: skip
    policy = config_of("+policy=lerobot").policy
    said = r"reads observation.images.top, and the robot has .*say which one it is, as in 'policy.rename="
    with pytest.raises(ConfigError, match=said):
        instantiate(policy)(other, path=str(there))
    renamed = instantiate(policy)(other, path=str(there), rename={"observation.images.up": TOP})
    plain, given = ours(path=str(there)), rows(ours(path=str(there)))
    seen = {"observation.images.up" if name == TOP else name: value for name, value in given.observation.items()}
    assert torch.equal(renamed(replace(given, observation=seen))[0], plain(given)[0])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda at: (at / "config.json").unlink(), "is no policy of lerobot .*give the folder `pretrained_model`"),
        (lambda at: (at / "adapter_config.json").touch(), "is an adapter .*merge it"),
        (lambda at: change(at, type="sac"), "no policy is called 'sac'; did you mean"),
        (lambda at: change(at, dim_model=16), "size mismatch"),
        (lambda at: change(at, n_encoder_layers=2), "lacks model.encoder.layers.1"),
        (lambda at: (at / "model.safetensors").write_bytes(b"no weights"), "model.safetensors: "),
        (lambda at: change(at, output_features={"action": feature(7)}), "gives 7 numbers .*, and the robot takes 4"),
        (lambda at: change(at, input_features={STATE: feature(6)}), r"as \[6\], and the robot has \[5\]"),
        (lambda at: change(at, input_features={TOP: feature(3, 9, 9)}), "task.env.cameras.NAME.width and height"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused_in_one_sentence(spoil, said, folder):
    spoil(there := folder("act"))
    with pytest.raises(ConfigError, match=said) as refused:
        ours(path=str(there))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type": "acr"}, "policy.type: no policy is called 'acr'; did you mean 'act'"),
        ({"options": {"chunk": 3}}, "act has no field 'chunk': use those of lerobot; did you mean 'chunk_size'"),
        ({"options": {"chunk_size": "many"}}, "policy.options: "),
        (
            {"options": {**small.ACT, "normalization_mapping": {"ACTION": "QUANTILE10"}}},
            "action is normalised by QUANTILE10",
        ),
        ({"options": small.ACT, "cameras": []}, "say policy.cameras=.*or 'policy.rename="),
        ({"options": small.ACT, "cameras": ["tip"]}, "the robot has no observation.images.tip"),
        ({"options": small.ACT, "rename": {"observation.images.up": TOP}}, "the robot has no observation.images.up"),
        ({"options": small.ACT, "tokenizer": "/there"}, "policy.tokenizer goes with a policy.path"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_one_sentence(options, said):
    with pytest.raises(ConfigError, match=said) as refused:
        ours(**options)
    assert "\n" not in str(refused.value)
