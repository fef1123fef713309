"""What came in as a video goes out as that video, and a run's episodes join the dataset that the run began with."""

import json
import shutil
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from pyarrow import parquet
from serl_client import Outcome, Stamp
from serl_client.errors import ConfigError

from serl_launcher.datasets import footage, lerobot_api, plain, shards
from serl_launcher.datasets.export import export_run, imported
from serl_launcher.datasets.reader import Dataset
from tests.shared.common import PATIENCE, STATE
from tests.shared.here import thread
from tests.shared.tools import called, typed

from .exporting import Run, needs_lerobot, opened
from .lerobots import CAMERA, as_of_last_year

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.slow, needs_lerobot]

REAL = 1e9  # seconds, when a robot's clock began


class Begun(Run):
    """A run that began with the dataset `first`: it is in the source `demo`, and `online` an arm did `second`."""

    def __init__(self, folder, first, second, slow=1.0, damaged=None):
        super().__init__(folder, first.spec(), datasets={"demo": str(first.folder)}, count=4)
        words = {"plan": {"sources": {"online": {"capacity": 400}, "demo": {"dataset": str(first.folder)}}}}
        OmegaConf.save(OmegaConf.create(words), folder / "config.yaml")
        self.store.lives.hello("dataset-demo", "outbox2", "B", [])
        came = chain(*(episode.segments(self.spec, f"dataset-demo-{first.name}-{i:06d}", Stamp(2, "demonstrate", 0))
                       for i, episode in enumerate(first)))  # fmt: skip
        for seq, segment in enumerate(came):
            segment.observation[CAMERA][0, 0, 0] ^= seq == damaged
            self.store.stage("B", seq, segment)
        self.store.commit()
        for i, episode in enumerate(second):
            done = episode.segments(self.spec, f"e{i}", Stamp(1, "practise", 3))
            self.add(*(replace(segment, time=REAL + slow * segment.time) for segment in done))
            self.add(Outcome(f"e{i}", i % 2 == 0))
        self.work(rest=True)


def seen(folder):
    """What LeRobot shows of a dataset, [frames, C, H, W]."""
    dataset, _ = opened(folder)
    return np.stack([dataset[i][CAMERA].numpy() for i in range(len(dataset))])


def diagnosed(folder):
    """What lerobot-doctor, which is not of lerobot's house, says of a dataset: {check: severity}."""
    doctor = [Path(sys.executable).with_name("lerobot-doctor"), "check", folder, "--json"]
    said = subprocess.run(doctor, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert said.stdout, said.stderr
    return {check["name"]: check["severity"] for check in json.loads(said.stdout)["checks"]}


def test_an_imported_episode_keeps_its_video_and_what_went_twice_through_a_codec_says_so(tmp_path, made):
    first = made["first"]
    run = Begun(tmp_path / "run", first, made["second"])
    [shard] = (run.folder / "datasets/demo").iterdir()
    assert np.array_equal(seen(shard), seen(first.folder)), "each pixel, as LeRobot decodes both"
    stored = {place.name: run.manifest(name, place.name)["images"]["encodings"]
              for place in (run.folder / "datasets").iterdir() for name in run.shards(place.name)}  # fmt: skip
    assert stored == {"demo": 1, "online": 1}
    run.judge("dataset-demo-first-000001", True)
    assert run.manifest(shard.name, "demo")["version"] == 2
    assert np.array_equal(seen(shard), seen(first.folder)), "a verdict encodes nothing"
    other = Begun(tmp_path / "other", first, [], damaged=3)
    [name] = other.shards("demo")
    assert other.manifest(name, "demo")["images"]["encodings"] == 2, "one pixel of one image is another one"


@pytest.mark.parametrize("kind", ["first", "pictures"])
def test_a_runs_own_episodes_are_merged_by_lerobot_with_the_dataset_that_it_began_with(tmp_path, made, kind):
    first, second = made[kind], made["second"]
    run = Begun(tmp_path / "run", first, second)
    run.store.close()
    out, whole = tmp_path / "plain", tmp_path / "whole"
    status, said = called("data", "export", run.folder, "--plain", out)
    assert status == 0, said
    assert f"{out}: 3 episodes, 33 frames" in said
    assert "1 of them are failures" in said
    assert "2 episodes came from a dataset and are not in it" in said
    theirs, mine = first.info, Dataset(out).info
    assert (mine["features"], mine["robot_type"], mine["fps"]) == (theirs["features"], "so_follower", 10)
    status, said = called("data", "merge", whole, first.folder, out)
    assert status == 0, said
    online = [Dataset(path) for path in export_run(run.folder, 4) if path.parent.name == "online"]
    expected = [*first, *chain(*online)]
    names = {name: name for name in first.features}
    for episode, original in zip(Dataset(whole), expected, strict=True):
        plain.check_same(episode, original, names)
    assert [episode.column(STATE)[0, 0] for episode in Dataset(out)] == [0, 1, 2]
    assert called("data", "export", run.folder, "--plain", out)[0] == 1, "nothing is written over"
    for folder in (out, whole, *export_run(run.folder, 4)):
        assert set(diagnosed(folder).values()) <= {"PASS", "WARN"}, "WARN: episodes are short, or stand still"
    made_of = plain.write(tmp_path / "good", [shard.folder for shard in online], imported(run.folder), True)
    assert (made_of.episodes, made_of.frames, made_of.failures) == (2, 28, 0)


def test_a_dataset_that_was_converted_is_read_from_where_it_was_converted_to(tmp_path, made):
    old = as_of_last_year(made["first"], tmp_path / "old")
    first = Dataset(lerobot_api.converted(old))
    run = Begun(tmp_path / "run", first, made["second"])
    words = {"plan": {"sources": {"online": {"capacity": 400}, "demo": {"dataset": str(old), "convert": True}}}}
    OmegaConf.save(OmegaConf.create(words), run.folder / "config.yaml")
    run.store.close()
    shutil.rmtree(run.folder / "datasets")
    shutil.rmtree(old)  # to save space: what it was converted to is there
    status, said = called("data", "export", run.folder, "--plain", tmp_path / "plain")
    assert status == 0, said
    assert f"merge ALL {first.folder} " in said
    [shard] = (run.folder / "datasets/demo").iterdir()
    assert np.array_equal(seen(shard), seen(first.folder)), "its videos were copied"


def test_what_would_spoil_the_users_dataset_is_not_written(tmp_path, made, caplog):
    run = Begun(tmp_path / "run", made["first"], made["second"], slow=1.3)
    run.store.close()
    folders, begun, out = export_run(run.folder, 4), imported(run.folder), tmp_path / "plain"
    for words, reason in (
        ({"calibration": "arm.json"}, "is in percent, and the run has made degrees"),
        ({"dataset": str(made["low"].folder.parent / "gone")}, "holds no LeRobot dataset"),
        ({"dataset": str(made["slow"].folder)}, "has 5 rows per second, the run 10"),
        ({"dataset": str(made["small"].folder)}, r"is \[32, 32, 3\], that of the run \[64, 64, 3\]"),
    ):
        with pytest.raises(ConfigError, match=reason):
            plain.write(out, folders, {"demo": begun["demo"] | words}, False)
        assert not list(tmp_path.glob("plain*"))
    other = replaced(made["first"].folder, tmp_path / "up", "observation.images.front", "observation.images.up")
    words = {"demo": {"dataset": str(other), "rename": {"observation.images.up": CAMERA}}}
    plain.write(tmp_path / "renamed", folders, words, False)
    assert Dataset(tmp_path / "renamed").info["features"] == Dataset(other).info["features"]
    plain.write(out, folders, {}, False)
    features = json.loads((out / "meta/info.json").read_text())["features"]
    assert set(features) - set(plain.INDICES) == {STATE, "action", CAMERA}
    assert "its rate is not 10 rows per second: LeRobot will show its rows at 10" in caplog.text


@pytest.mark.parametrize("codec", ["libsvtav1", "h264"])
def test_an_episode_is_cut_out_of_the_midst_of_a_video_to_the_frame(tmp_path, codec):
    shape = {"dtype": "video", "shape": (64, 64, 3), "names": ["height", "width", "channels"]}
    data = lerobot_api.create(tmp_path / "data", 10, {CAMERA: shape}, codec)
    for episode, length in enumerate((7, 12, 5, 1)):
        for step in range(length):
            data.add_frame({CAMERA: np.full((64, 64, 3), 40 * episode + 5 * step, np.uint8), "task": "see"})
        shards.save(data)
    data.finalize()
    for number, episode in enumerate(Dataset(tmp_path / "data")):
        images, video = tmp_path / f"{number}", tmp_path / f"{number}.mp4"
        images.mkdir()
        for step, image in enumerate(episode.images(CAMERA)):
            Image.fromarray(image).save(images / f"frame-{step:06d}.png")
        footage.take(episode, CAMERA, images, video)
        (images / f"frame-{len(episode) - 1:06d}.png").unlink()
        with pytest.raises(footage.Differs):
            footage.take(episode, CAMERA, images, video)


def replaced(folder, target, name, other):
    """A copy of a dataset in which a camera has another name."""
    shutil.copytree(folder, target)
    (target / "videos" / name).rename(target / "videos" / other)
    info = target / "meta/info.json"
    info.write_text(info.read_text().replace(name, other))
    for path in target.glob("meta/episodes/*/*.parquet"):
        table = parquet.read_table(path)
        parquet.write_table(table.rename_columns([n.replace(name, other) for n in table.column_names]), path)
    return target


class Hub(BaseHTTPRequestHandler):
    """Takes what the hub's own client sends."""

    def do_GET(self):
        known = {"id": "me/pick", "sha": "0" * 40, "private": self.server.private, "downloads": 0, "likes": 0}
        files = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.server.files]
        self.answer(files if "/tree/" in self.path else known | {"tags": [], "siblings": [], "xetEnabled": False})

    def do_DELETE(self):
        self.server.asked.append((self.path, self.headers["Authorization"], b"{}"))
        self.answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        answer = {"url": f"{self.server.address}/datasets/me/pick", "files": [], "errors": [], "warnings": []}
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            answer["files"] = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
        if "/commit/" in self.path:
            answer |= {"success": True, "commitOid": "0" * 40, "commitUrl": f"{answer['url']}/commit/{'0' * 40}"}
        self.answer(answer)

    def answer(self, answer):
        said = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stub of the hub on loopback; this user has no token."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.private, server.files = True, []
        server.asked, server.address = [], f"http://127.0.0.1:{server.server_port}"
        for name, value in (("HF_ENDPOINT", server.address), ("HF_HOME", str(tmp_path / "home"))):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        with thread(server.serve_forever):
            yield server
            server.shutdown()


def test_a_dataset_goes_to_the_hub_when_its_user_says_so_whole_and_for_nobody_else(made, hub, monkeypatch):
    folder = made["first"].folder
    status, said = typed("data", "upload", folder, "me/pick")
    assert (status, hub.asked) == (1, [])
    assert "the hub needs your token: run `hf auth login`" in said
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    status, said = typed("data", "upload", folder, "me/pick")
    assert status == 0, said
    assert said.strip().endswith(f"{hub.address}/datasets/me/pick")
    assert {token for _, token, _ in hub.asked} == {"Bearer hf_mine"}
    [asked] = [json.loads(body) for path, _, body in hub.asked if path == "/api/repos/create"]
    assert asked["type"] == "dataset"
    assert asked.get("private") or asked.get("visibility") == "private"  # the word of the hub's newer client
    lines = [json.loads(line) for path, _, body in hub.asked if "/commit/" in path for line in body.splitlines()]
    sent = {line["value"]["path"]: b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"}
    assert "LeRobot" in sent.pop("README.md").decode()
    files = (path for path in folder.rglob("*") if path.is_file())
    assert sent == {str(path.relative_to(folder)): path.read_bytes() for path in files}
    paths = [(path.rpartition("/")[2], json.loads(body).get("tag")) for path, _, body in hub.asked if "/tag/" in path]
    assert paths == [("v3.0", None), ("main", "v3.0")], "the tag of an earlier upload is moved"


def test_a_dataset_that_is_there_gives_way_on_a_word_alone_and_nobody_else_sees_it(made, hub, monkeypatch):
    folder, gone = made["first"].folder, ["data/chunk-000/file-007.parquet", "retake.json"]
    for name, value in (("HF_TOKEN", "hf_mine"), ("HF_HUB_OFFLINE", "0")):
        monkeypatch.setenv(name, value)
    for name, value in (("ENDPOINT", hub.address), ("HF_HUB_OFFLINE", False)):  # what this process has read before
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    hub.files = ["README.md", ".gitattributes", "notes.txt", "meta/info.json", *gone]
    status, told = called("data", "upload", folder, "me/pick")
    assert (status, [path for path, _, _ in hub.asked]) == (1, ["/api/repos/create"])
    assert "me/pick holds a dataset already: say --replace to put this one in its place" in told
    assert called("data", "upload", folder, "me/pick", "--replace")[0] == 0
    lines = [json.loads(line) for path, _, body in hub.asked if "/commit/" in path for line in body.splitlines()]
    assert sorted(line["value"]["path"] for line in lines if line["key"] == "deletedFile") == gone
    for hub.private, words, said in ((True, ["--public"], "private"), (False, [], "public")):
        hub.asked.clear()
        status, told = called("data", "upload", folder, "me/pick", *words)
        assert (status, [path for path, _, _ in hub.asked]) == (1, ["/api/repos/create"])
        assert f"me/pick is {said} on the hub: change that in its settings there" in told
