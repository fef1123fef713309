"""robomimic's HDF5 files: into a run's store as an actor would bring them, out of it, and the same again."""

import json
import shutil

import numpy as np
import pytest
from serl_client.errors import ConfigError
from serl_client.spec import Feature, Spec

from serl_launcher.datasets import robomimic
from serl_launcher.datasets.episodes import open_run
from serl_launcher.datasets.robomimic import RobomimicFile, write
from serl_launcher.store.store import Store
from tests.shared.tools import called

from .exporting import bring, catalog

h5py = pytest.importorskip("h5py", reason="the extra `h5py` is not installed: . examples/install.sh --extra h5py")

ENV_ARGS = {
    "env_name": "Lift",
    "env_version": "1.5.2",
    "type": 1,
    "env_kwargs": {"control_freq": 20, "robots": "Panda"},
}
LENGTHS = {0: 30, 2: 7, 10: 12}  # by number: as text demo_10 would come before demo_2
SUCCEEDED = (0, 10)
OBSERVED = {"object": (10,), "robot0_eef_pos": (3,)}


def demonstration(group, number, length):
    """One demonstration as robomimic's converter writes it; numbers that float32 holds too."""
    random = np.random.default_rng(number)
    seen = {key: random.normal(size=(length + 1, *shape)).astype(np.float32) for key, shape in OBSERVED.items()}
    seen["agentview_image"] = random.integers(0, 256, (length + 1, 16, 16, 3), dtype=np.uint8)
    for key, array in seen.items():
        array = array if array.dtype == np.uint8 else array.astype(np.float64)
        options = {"compression": "gzip"} if array.dtype == np.uint8 else {}
        group.create_dataset(f"obs/{key}", data=array[:-1], **options)
        group.create_dataset(f"next_obs/{key}", data=array[1:], **options)
    last = (np.arange(length) == length - 1) & (number in SUCCEEDED)
    group["actions"] = random.uniform(-1, 1, (length, 7)).astype(np.float32).astype(np.float64)
    group["rewards"], group["dones"] = last.astype(np.float64), last.astype(np.int64)
    group["states"] = random.normal(size=(length, 32))
    group.attrs["num_samples"] = length


@pytest.fixture
def lift(tmp_path):
    """A file of three demonstrations, the second one without success, and a mask of two."""
    path = tmp_path / "low_dim.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for number, length in LENGTHS.items():
            demonstration(data.create_group(f"demo_{number}"), number, length)
        data.attrs["total"], data.attrs["env_args"] = sum(LENGTHS.values()), json.dumps(ENV_ARGS)
        file["mask/train"] = np.array([b"demo_10", b"demo_2"])
    return path


def rows(run_dir):
    """{id: (its rows, its info)} of the source `demo`, all arrays in memory."""
    spec, readers, infos = open_run(run_dir)
    found = [(readers["demo"].rows(info), info) for info in sorted(infos)]
    return spec, [({name: np.asarray(array) for name, array in each.items()}, info) for each, info in found]


def contents(path):
    """{name of a dataset: its array} of a whole file."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, node: found.update({name: node[:]} if isinstance(node, h5py.Dataset) else {}))
    return found


def test_a_file_goes_into_a_store_out_of_it_and_in_again_bit_by_bit(lift, serving, tmp_path):
    server = serving()
    bring(server, lift)
    before = catalog(server.run_dir)
    bring(server, lift)
    assert catalog(server.run_dir) == before, "what is there is not brought again"
    assert [info.steps for info in before] == [30, 7, 12], "by number"
    assert [(info.success, info.terminated, info.truncated, info.final) for info in before] == [
        (True, True, False, True), (False, False, True, True), (True, True, False, True)
    ]  # fmt: skip

    out = tmp_path / "out.hdf5"
    assert write(server.run_dir, out, "demo", lift) == (3, 49)
    first, second, masks = contents(lift), contents(out), {"mask/train", "mask/successful"}
    assert second["mask/successful"].tolist() == [b"demo_0", b"demo_2"]
    for name in first.keys() - masks:
        if not name.endswith("states"):
            theirs = second[name.replace("demo_2/", "demo_1/").replace("demo_10/", "demo_2/")]
            assert theirs.dtype == first[name].dtype, name
            assert np.array_equal(theirs, first[name]), name
    with h5py.File(out) as file:
        assert json.loads(file["data"].attrs["env_args"]) == ENV_ARGS
        assert file["data"].attrs["total"] == 49
    with pytest.raises(ConfigError, match="is there already"):
        write(server.run_dir, out, None, None)

    server.close()
    shutil.move(server.run_dir, tmp_path / "first")
    again = serving()
    bring(again, out)
    (spec, mine), (other, theirs) = rows(tmp_path / "first"), rows(again.run_dir)
    assert spec == other
    for (columns, info), (copied, its) in zip(mine, theirs, strict=True):
        assert info[7:] == its[7:], "first step, steps, reward, ends, outcome"
        for name in columns.keys() - {"directive"}:
            assert np.array_equal(columns[name], copied[name]), name


def test_a_mask_chooses_demonstrations_and_a_run_of_the_robot_takes_what_its_spec_names(lift, serving, tmp_path):
    spec = Spec({"observation.robot0_eef_pos": Feature((3,))}, Feature((7,), low=-1, high=1), fps=20)
    Store.create(tmp_path / "run/store", spec, {"demo": 1000}).close()
    server = serving()
    bring(server, f"{lift}:train")
    assert [info.steps for info in catalog(server.run_dir)] == [7, 12]
    status, said = called("data", "robomimic", server.run_dir, tmp_path / "tool.hdf5", "--source", "demo")
    assert (status, said) == (0, f"{tmp_path}/tool.hdf5: 2 demonstrations, 19 steps\n")
    assert RobomimicFile(str(tmp_path / "tool.hdf5")).fps == 20
    other = Spec({"observation.object": Feature((14,))}, Feature((7,), low=-1, high=1), fps=10)
    assert RobomimicFile(str(lift)).misfit(other) == (
        "its rate is 20 fps, the run's 10; its observation.object is [10], the run's [14]"
    )


@pytest.mark.parametrize(
    ("rewards", "dones", "shaping", "ends"),
    [
        ((0, 0, 1), (0, 0, 1), False, (True, True)),
        ((0, 1, 1), (0, 1, 1), False, (True, True)),  # done at each success: the last step ends it
        ((0, 0, 0), (0, 0, 1), False, (False, False)),  # done at the end of the recording, without success
        ((0, 0, 1), (0, 0, 0), False, (False, True)),
        ((0.1, 0.2, 0.3), (0, 0, 1), True, (True, None)),
        (None, (0, 0, 1), False, (True, None)),
    ],
)
def test_each_convention_of_dones_gives_an_end_and_an_outcome(lift, rewards, dones, shaping, ends):
    with h5py.File(lift, "r+") as file:
        for number in (2, 10):
            del file[f"data/demo_{number}"]
        del file["mask"], file["data/demo_0"]
        group = file.create_group("data/demo_0")
        demonstration(group, 0, 3)
        del group["rewards"], group["dones"]
        group["dones"] = np.array(dones)
        if rewards is not None:
            group["rewards"] = np.array(rewards, np.float64)
        file["data"].attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": 20, "reward_shaping": shaping}})
    episode = RobomimicFile(str(lift)).episode(0)
    assert (episode.terminated, episode.success) == ends


def drop(name):
    return lambda file: file.__delitem__(name)


def put(name, value):
    return lambda file: (file.pop(name, None), file.__setitem__(name, value))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (drop("data"), "is no robomimic file: it has no group 'data'"),
        (drop("data/demo_2/obs"), "demo_2 has no obs, only states: make them with robomimic's dataset_states_to_obs"),
        (drop("data/demo_2/actions"), r"demo_2 has no actions \[T, A\]"),
        (drop("data/demo_10/obs/object"), "demo_10 has other keys or shapes than demo_2"),
        (
            put("data/demo_2/obs/object", np.zeros((6, 10))),
            r"demo_2 has 7 actions, and obs/object has the shape \[6, 10",
        ),
        (put("data/demo_2/rewards", np.array(["no"] * 7, "S")), "the robomimic file .* cannot be read .* not convert"),
        (put("data/demo_2/rewards", np.full(7, np.nan)), "demo_2 of .* has an action or a reward that is no number"),
        (lambda file: file["data/demo_0"].attrs.__setitem__("num_samples", 9), "30 actions, and says that it has 9"),
        (lambda file: file["data"].attrs.__setitem__("env_args", "["), "env_args is no JSON object with env_kwargs"),
        (put("mask/train", np.array([], "S6")), "holds no demonstrations of mask 'train'"),
        (put("mask/train", np.array([b"demo_3"])), "mask train names demo_3, which is not there"),
        (drop("mask"), "has no mask 'train'; there are none"),
        (put("data/demo_2/rewards", h5py.ExternalLink("/of/others.hdf5", "x")), "rewards lies in another file"),
        (put("data/demo_2/rewards", h5py.SoftLink("/data/demo_2/rewards")), "the robomimic file .* cannot be read"),
        (lambda file: file.create_dataset("x", (7,), "f8", external="/dev/zero"), "the rows of x lie in other files"),
        (lambda file: file.create_dataset("x", (10**9,), "f8", chunks=(9,)), "x has the shape .* no file of this size"),
    ],
)
def test_a_damaged_or_foreign_file_is_one_sentence(lift, damage, sentence):
    with h5py.File(lift, "r+") as file:
        damage(file)
    with pytest.raises(ConfigError, match=sentence) as raised:
        [RobomimicFile(name).episode(0) for name in (f"{lift}:train", str(lift))]
    assert "\n" not in str(raised.value)


def test_a_file_that_was_cut_or_is_none_is_one_sentence(lift, tmp_path):
    lift.write_bytes(lift.read_bytes()[:2000])
    for path in (lift, tmp_path / "nowhere.hdf5"):
        with pytest.raises(ConfigError, match="cannot be read"):
            RobomimicFile(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "mask/all"])
def test_a_file_from_which_no_reader_returns_is_one_sentence(tmp_path, monkeypatch, name):
    path = tmp_path / "low_dim.hdf5"
    with h5py.File(path, "w") as file:
        if name == "data":
            file.create_group(name).attrs["env_args"] = "{}"
        else:
            file[name] = ["demo_0"]
    robomimic._check_ends(path)
    data = bytearray(path.read_bytes())
    data[data.index(b"GCOL") + 24] = 255  # libhdf5 1.14 goes round in a circle there
    path.write_bytes(data)
    monkeypatch.setattr(robomimic, "LOOK_S", 2)
    with pytest.raises(ConfigError, match="cannot be read: who looked at it was ended by SIGXCPU"):
        RobomimicFile(str(path))
