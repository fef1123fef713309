"""Reads the files of a LeRobot dataset: JSON, tables, and the images in tables and videos."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.errors import ConfigError, RetakeError
from serl_client.spec import DTYPES, Array, Feature

IMAGES = ("image", "video")
CHANNELS = (1, 3, 4)


@contextmanager
def reading(path: Path, part: str = "") -> Iterator[None]:
    """Turn whatever a damaged file sets off into a ConfigError that names `path`, or the `part` of it that is read.

    No list of such errors would be whole: they come from readers of JSON, Parquet, HDF5, images and videos.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RetakeError) and str(path) in str(error):
            raise
        said = " ".join(str(error).split())
        raise ConfigError(f"{part or path} cannot be read ({type(error).__name__}): {said}") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return found
    except (OSError, RecursionError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} holds no LeRobot dataset: {name} cannot be read ({reason})") from None


def read_table(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Any:
    """Read a table (pyarrow.Table), of its columns those whose names are `wanted`."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = [name for name in parquet.read_schema(path).names if wanted(name)]
        return parquet.ParquetFile(path).read(columns=names)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Was its recording finished (finalize)?") from None


def numbers(column: Any, name: str) -> Array:
    """Return the numbers of a table's column (pyarrow.ChunkedArray), flat. Raises ValueError if it has others."""
    import pyarrow as pa

    values = column.combine_chunks()
    while (extended := isinstance(values, pa.ExtensionArray)) or pa.types.is_nested(values.type):
        values = values.storage if extended else values.flatten()
    array = values.to_numpy(zero_copy_only=False)
    if values.null_count or array.dtype.kind not in "biuf":
        raise ValueError(f"{name} has rows that are no number")
    return array


def entry_names(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that info.json gives the entries of a column; empty if it gives none."""
    names = entry.get("names")
    if isinstance(names, Mapping):  # older ones: {"motors": [...]}
        names = next(iter(names.values()), None)
    return tuple(map(str, names)) if isinstance(names, Sequence) and not isinstance(names, str) else ()


def feature(entry: Mapping[str, Any], rename: Mapping[str, str]) -> Feature | None:
    """Return the Feature of one column of info.json; None for one that a store cannot hold (see `why_not`).

    rename: {an entry's name: another one}. The axes of an image have names in info.json, and here none.
    """
    shape, names = tuple(entry["shape"]), entry_names(entry)
    if entry["dtype"] in IMAGES:
        is_first = names[0].startswith("channel") if names else shape[0] in CHANNELS and shape[-1] not in CHANNELS
        return None if _is_depth(entry) else Feature((*shape[1:], shape[0]) if is_first else shape, "uint8")
    if entry["dtype"] not in DTYPES:
        return None
    names = tuple(rename.get(name, name) for name in names)
    with suppress(ConfigError, TypeError):  # others may mean something else by `units`: then it is unsaid
        return Feature(shape, entry["dtype"], names, units=entry.get("units", ()))
    return Feature(shape, entry["dtype"], names)


def why_not(entry: Mapping[str, Any]) -> str:
    """Return why a store cannot hold a column of info.json."""
    return "it holds depths" if _is_depth(entry) else f"it holds neither numbers nor images ({entry['dtype']})"


def _is_depth(entry: Mapping[str, Any]) -> bool:
    said = [entry.get("info") or {}, entry.get("video_info") or {}]
    return any(each.get(name) for each in said for name in ("is_depth_map", "video.is_depth_map"))


def still_images(cells: Iterable[Any], path: Callable[[str], Path], shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield the images of a table's column, uint8 [H, W, 3]. Raises ConfigError for one that is not of this shape."""
    from PIL import Image

    for cell in cells:
        still = cell.as_py()
        source = io.BytesIO(still["bytes"]) if still["bytes"] else path(still["path"])
        with Image.open(source) as image:
            if image.size != shape[1::-1]:  # before it is unpacked: it may say that it is a gigabyte
                raise ConfigError(f"it has an image of {[*image.size[::-1], 3]}, not {[*shape]}")
            yield np.asarray(image.convert("RGB"))


def video_of(container: Any) -> Any:
    """Return the video stream of an open file. Raises ValueError for none, or without a decoder: PyAV crashes then."""
    if not container.streams.video:
        raise ValueError("it has no pictures")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise ValueError("FFmpeg knows no decoder of its codec here: encode it anew, as h264 for instance")
    return stream


def video_images(path: Path, begin: float, fps: float, wanted: Array) -> Iterator[Array]:
    """Yield frames of a video, uint8 [H, W, 3]. Raises ConfigError if one is missing.

    begin: seconds, where frame 0 is. wanted: [T] their numbers, none lower than the one before it.
    """
    import av
    from av.error import FFmpegError

    found = 0
    try:
        with av.open(str(path)) as container:
            stream = video_of(container)
            assert stream.time_base is not None
            container.seek(int((begin + wanted[0] / fps) / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                place = round((frame.time - begin) * fps)
                if place > wanted[found]:
                    break
                image = frame.to_ndarray(format="rgb24") if place == wanted[found] else None
                while image is not None and wanted[found] == place:
                    yield image
                    if (found := found + 1) == len(wanted):
                        return
    except (FFmpegError, OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    raise ConfigError(f"{path} has no frame {wanted[found]} of this episode: the dataset is not whole")
