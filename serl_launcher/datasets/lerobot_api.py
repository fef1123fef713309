"""Every call into lerobot's datasets that differs between its versions: 0.4.4 on Python 3.11, 0.6.1 on newer ones.

Each import is silenced. `upload` alone asks somebody on the network.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from serl_client.errors import ConfigError

from serl_launcher.datasets.names import MANIFEST
from serl_launcher.datasets.tables import reading

OLD = "v2.1"
DESCRIBING = "info.json", "tasks.jsonl", "episodes.jsonl"  # in meta/ of v2.1
OWN = "data/*", "meta/*", "videos/*", MANIFEST  # the files of a dataset, in a folder or on the hub
CONVERTED = "converted_from"  # in meta/ of a conversion: the fingerprint of what was converted
CONVERTERS = "lerobot.scripts.convert_dataset_v21_to_v30", "lerobot.datasets.v30.convert_dataset_v21_to_v30"


def dataset_class() -> Any:
    """Import LeRobotDataset, silenced, and without access to the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("SVT_LOG", "1")
    import av.logging
    import datasets
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    datasets.disable_progress_bars()
    av.logging.set_libav_level(av.logging.ERROR)
    return LeRobotDataset


def create(
    folder: Path, fps: Any, features: Mapping[str, Any], codec: str | None, robot_type: str | None = None,
    copy: Callable[[str, Path, Path], None] | None = None,
) -> Any:  # fmt: skip
    """Return a new LeRobotDataset to be written into `folder`. codec: of videos; None: images as PNG.

    copy: makes the video of an episode in place of the encoder, as copy(camera, folder of its images, file to make).
    """
    more = _encoder(codec) if codec else {}
    dataset = dataset_class().create(
        "retake/shard", fps, features, root=folder, robot_type=robot_type, use_videos=codec is not None,
        encoder_threads=1, **more,
    )  # fmt: skip
    if copy:
        writer = dataset.writer if importlib.util.find_spec("lerobot.datasets.dataset_writer") else dataset

        def copied(camera: str, episode: int) -> Path:
            images = writer._get_image_file_dir(episode, camera)
            video = Path(tempfile.mkdtemp(dir=folder)) / f"{episode}.mp4"
            copy(camera, images, video)
            shutil.rmtree(images)
            return video

        writer._encode_temporary_episode_video = copied
    return dataset


def encode(images: Path | str, video: Path, fps: Any, codec: str) -> None:
    """Encode the files `frame-000000.png` and so on of a folder. Raises ValueError if there is no such codec here."""
    from lerobot.datasets.video_utils import encode_video_frames

    (encoder,) = _encoder(codec).values()
    encode_video_frames(images, video, fps, encoder, encoder_threads=1)


def _encoder(codec: str) -> dict[str, Any]:
    """The argument of LeRobotDataset.create that names a codec; as the 4th of encode_video_frames it is another."""
    if importlib.util.find_spec("lerobot.configs.video") is None:
        return {"vcodec": codec}
    encoder = importlib.import_module("lerobot.configs.video").RGBEncoderConfig
    return {"rgb_encoder": encoder(vcodec=codec)}


def merge(target: Path, folders: Sequence[Path]) -> None:
    """Merge datasets into the new folder `target`. Raises LookupError, ValueError or ArrowException if lerobot
    cannot."""
    from lerobot.datasets.aggregate import aggregate_datasets

    names = [f"retake/{i}" for i in range(len(folders))]
    aggregate_datasets(names, "retake/merged", roots=[folder.resolve() for folder in folders], aggr_root=target)


def upload(folder: Path, name: str, *, private: bool, replace: bool) -> str:
    """Upload a dataset to the hub as `name`, with the token that this user has there; return its address.

    replace: a dataset that is there gives way to this one; its files that this one does not have are deleted. LeRobot's
    own push_to_hub would put a licence on it, and asks another server than the user's for its page.
    Raises ConfigError if there is no token, if the hub refuses it, if `name` is there and not as private as asked, or
    if it holds a dataset and is not to be replaced.
    """
    os.environ["HF_HUB_OFFLINE"] = "0"
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, RevisionNotFoundError
    from lerobot.datasets import utils

    io_utils: Any = utils
    if importlib.util.find_spec("lerobot.datasets.io_utils"):  # its newer version reads a type of its own there
        io_utils = importlib.import_module("lerobot.datasets.io_utils")
    hub, info = HfApi(token=True), json.loads((folder / "meta/info.json").read_text())
    there: Any = {"repo_id": name, "repo_type": "dataset"}
    card = str(utils.create_lerobot_dataset_card(dataset_info=io_utils.load_info(folder), repo_id=name))
    try:
        address = hub.create_repo(**there, private=private, exist_ok=True)
        if bool(hub.repo_info(**there).private) != private:
            raise ConfigError(
                f"{name} is {'public' if private else 'private'} on the hub: change that in its settings there, "
                f"{'say' if private else 'leave out'} --public, or name another dataset"
            )
        if not replace and "meta/info.json" in hub.list_repo_files(**there):
            raise ConfigError(
                f"{name} holds a dataset already: say --replace to put this one in its place (what it holds stays in "
                "its history there), or name another"
            )
        hub.upload_folder(**there, folder_path=folder, ignore_patterns=["images/*"], delete_patterns=[*OWN])
        if not (folder / "README.md").exists():
            hub.upload_file(**there, path_or_fileobj=card.encode(), path_in_repo="README.md")
        tag = info["codebase_version"]  # lerobot reads the commit that has the tag of its format
        with suppress(RevisionNotFoundError):
            hub.delete_tag(**there, tag=tag)
        hub.create_tag(**there, tag=tag)
    except LocalTokenNotFoundError:
        raise ConfigError("the hub needs your token: run `hf auth login` here, or set HF_TOKEN") from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"the hub does not take {name}: {error}. Name it user/dataset, as yours there") from None
    return str(address)


def fingerprint(folder: Path) -> str:
    """Return the hash of the files that say what a dataset of v2.1 holds: its description, tasks and episodes."""
    found, meta = hashlib.sha256(), folder / "meta"
    with reading(folder):
        for path in sorted(path for pattern in DESCRIBING for path in meta.glob(pattern)):
            found.update(f"{path.relative_to(meta)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def converter() -> str:
    """Return the module that converts a dataset of v2.1 to v3.0."""
    if importlib.util.find_spec("lerobot") is None:
        return CONVERTERS[0]
    return next(name for name in CONVERTERS if importlib.util.find_spec(name))


def how_to_convert(version: str) -> str:
    """Return what to do with a dataset of another format than v3.0."""
    if version != OLD:
        return f"lerobot converts {OLD} alone: bring it there first, with the lerobot of its time"
    return f"a plan takes it by `convert: true` in its source; by hand convert it with python -m {converter()}"


def is_old(folder: Path) -> bool:
    """Return whether this is a dataset of v2.1, which `converted` takes."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / "meta/info.json").read_text()).get("codebase_version") == OLD
    return False


def read_from(dataset: str | Path, convert: bool) -> Path:
    """Return the place from which a plan's dataset is read. With `convert`, one of v2.1 is read from the folder beside
    it that `converted` makes, also once that of v2.1 is gone."""
    place = Path(dataset)
    made = place.resolve().with_name(f"{place.resolve().name}-v3.0")
    return made if convert and (is_old(place) or (made.exists() and not place.exists())) else place


def converted(folder: Path) -> Path:
    """Let lerobot convert a dataset of v2.1; return the new folder, as `read_from` does. It may be there already.

    The dataset itself is only read: the converter gets links to its files, because it moves what it has converted.
    Raises ConfigError if it fails, with the converter's last line, if it cannot be written, and if the dataset has
    changed since the folder that is there was made.
    """
    target = read_from(folder, convert=True)
    if target.exists():
        _check_current(target, folder)
        return target
    try:
        with tempfile.TemporaryDirectory(
            ".part", f"{target.name}.", target.parent, ignore_cleanup_errors=True
        ) as aside:
            _convert(folder, made := Path(aside) / "dataset")
            try:
                made.rename(target)
            except OSError:
                if not target.exists():  # else another learner has made it meanwhile
                    raise
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}. Make room there, or copy {folder} elsewhere") from None
    return target


def _check_current(target: Path, folder: Path) -> None:
    """Raise ConfigError if a dataset has changed since it was converted. A conversion that does not tell counts as of
    the dataset that is there."""
    if not folder.exists():
        return
    origin, kept = fingerprint(folder), target / "meta" / CONVERTED
    if not kept.exists():
        with suppress(OSError):
            kept.write_text(origin)
    elif kept.read_text() != origin:
        raise ConfigError(
            f"{folder} has changed since it was converted: remove {target}, then run the same command again"
        )


def _convert(folder: Path, made: Path) -> None:
    origin, aside = fingerprint(folder), made.parent
    shutil.copytree(folder.resolve(), made, copy_function=os.symlink)
    root = made if converter() == CONVERTERS[0] else aside
    command = [sys.executable, "-W", "ignore", "-m", converter(), f"--repo-id={made.name}", "--push-to-hub=false"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_DATASETS_CACHE": str(aside / "cache")}
    done = subprocess.run([*command, f"--root={root}"], capture_output=True, text=True, env=offline)
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"lerobot cannot convert {folder}: {said}. Take another dataset")
    (made / "meta" / CONVERTED).write_text(origin)
