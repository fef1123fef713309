"""Copies the video of an episode from one LeRobot dataset into another, without encoding it again.

LeRobot encodes each episode by itself and appends it to a file. So an episode begins with a key frame, and its packets
can be cut out of that file.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array

from serl_launcher.datasets.reader import Dataset, Episode
from serl_launcher.datasets.tables import reading, video_of
from serl_launcher.replay.views import EpisodeInfo

ENCODERS = {"av1": "libsvtav1", "h264": "h264"}  # codec of a video: LeRobot's name of its encoder. Not hevc: LeRobot
# often fails to append its videos


class Differs(Exception):
    """No video of this episode shows the images that it should."""


class Origins:
    """Finds the episode of a dataset that an episode of the store was imported from.

    datasets: {source: the place of its dataset}, as in a plan. One that is gone, or robomimic's, is no origin.
    """

    def __init__(self, datasets: Mapping[str, str]) -> None:
        self._places = dict(datasets)
        self._opened: dict[str, Dataset | None] = {}

    def dataset(self, source: str) -> Dataset | None:
        """Return the dataset of a source; None if it has none that can be read."""
        if source not in self._opened:
            self._opened[source] = None
            with suppress(ConfigError):
                self._opened[source] = Dataset(Path(self._places[source])) if source in self._places else None
        return self._opened[source]

    @property
    def first(self) -> Episode | None:
        """The first episode of the first dataset that can be read."""
        for source in self._places:
            with suppress(ConfigError, IndexError):
                if dataset := self.dataset(source):
                    return dataset.episode(0)
        return None

    def __call__(self, info: EpisodeInfo) -> Episode | None:
        """Return where an episode came from; None if nobody imported it, or it cannot be read."""
        dataset = self.dataset(info.source)
        if dataset is None:
            return None
        begin = re.escape(f"dataset-{info.source}-{dataset.name[:100]}-")  # the importer's names
        found = re.fullmatch(rf"{begin}(\d{{6,}})(-[a-z]\w*)?(~\d+)?", info.id)
        if not found or int(found[1]) >= len(dataset.lengths):
            return None
        with suppress(ConfigError):
            return dataset.episode(int(found[1]))
        return None


def generation(episode: Episode | None) -> int:
    """Return how often the images of an episode went through a codec, as far as its dataset says. None: never."""
    if episode is None:
        return 0
    with suppress(ConfigError), reading(episode.dataset.folder):
        manifest = episode.dataset.manifest or {}
        return int((manifest.get("images") or {})["encodings"])
    return int(bool(_videos(episode.dataset)))


def kinds(episode: Episode) -> dict[str, Any]:
    """Return what the videos of an episode must share with others to be appended to them: {camera: (codec, ...)}.

    Raises ConfigError if one cannot be read.
    """
    import av

    found = {}
    for name in _videos(episode.dataset):
        path, _ = episode.video(name)
        with reading(path), av.open(str(path)) as container:
            stream = video_of(container)
            context = stream.codec_context
            size = stream.width, stream.height, stream.pix_fmt, stream.time_base
            found[name] = context.codec.canonical_name, *size, context.extradata
    return found


def joined(episodes: Iterable[Episode | None]) -> str | None:
    """Return the encoder of the videos of these episodes; None unless each has some, and all can be in one file."""
    shared: dict[str, Any] | None = None
    try:
        for episode in episodes:
            found = kinds(episode) if episode else {}
            if not found or found != (shared or found):
                return None
            shared = found
    except ConfigError:
        return None
    codecs = {kind[0] for kind in (shared or {}).values()}
    return ENCODERS.get(codecs.pop()) if len(codecs) == 1 else None


def take(episode: Episode, camera: str, images: Path, video: Path) -> None:
    """Copy the video of an episode that shows exactly the images in a folder into the file `video`.

    camera: its name, unless it has another one in that dataset. images: `frame-000000.png` and so on.
    Raises Differs if no video of the episode shows them.
    """
    for name in sorted(_videos(episode.dataset), key=lambda name: name != camera):
        with suppress(ConfigError):
            copy(episode, name, video)
            if _shows(video, images):
                return
    raise Differs(f"no video of {episode.where} shows what {camera} does")


def copy(episode: Episode, name: str, target: Path) -> None:
    """Write the packets of an episode's video, from the column `name`, into a file. ConfigError: it cannot be read."""
    import av

    (path, begin), fps = episode.video(name), episode.dataset.recorded_fps
    with reading(path), av.open(str(path)) as source, av.open(str(target), "w") as made:
        stream = video_of(source)
        assert stream.time_base is not None
        copied = made.add_stream_from_template(stream, opaque=True)
        copied.time_base = stream.time_base
        first, after = ((begin + (step - 0.5) / fps) / stream.time_base for step in (0, len(episode)))
        source.seek(int(begin / stream.time_base), stream=stream)
        packets = [
            packet for packet in itertools.takewhile(lambda p: p.dts is None or p.dts < after, source.demux(stream))
            if packet.pts is not None and packet.dts is not None and first <= packet.pts < after
        ]  # fmt: skip
        offset = min(packet.pts for packet in packets if packet.pts is not None)
        for packet in packets:
            packet.pts, packet.dts, packet.stream = (packet.pts or 0) - offset, (packet.dts or 0) - offset, copied
            made.mux(packet)


def _shows(video: Path, images: Path) -> bool:
    import av
    from PIL import Image

    def frames() -> Iterator[Array]:
        with reading(video), av.open(str(video)) as container:
            for frame in container.decode(video_of(container)):
                yield frame.to_ndarray(format="rgb24")

    def stills() -> Iterator[Array]:
        for path in sorted(images.iterdir()):
            with Image.open(path) as image:
                yield np.asarray(image.convert("RGB"))

    nothing = np.empty(0, np.uint8)
    return all(np.array_equal(*pair) for pair in itertools.zip_longest(frames(), stills(), fillvalue=nothing))


def _videos(dataset: Dataset) -> list[str]:
    kinds = {name: dataset.info["features"][dataset.original(name)]["dtype"] for name in dataset.cameras}
    return [name for name, kind in kinds.items() if kind == "video"]
