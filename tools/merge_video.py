"""Makes a time-lapse of many episodes in one mp4: one after the other, or several at once in a grid."""

import argparse
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from serl_client.errors import ConfigError
from serl_client.spec import Array

from serl_launcher.datasets.recording import write_mp4
from serl_launcher.datasets.tables import video_of
from serl_launcher.error_log import in_one_sentence


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", type=Path, help="mp4 files, and folders of them (runs/x/videos)")
    parser.add_argument("--out", type=Path, default=Path("merged.mp4"), help="the mp4 to write (merged.mp4)")
    parser.add_argument("--speed", type=positive, default=8, help="show every n-th frame, and each episode's last (8)")
    parser.add_argument("--grid", type=grid, default=(1, 1), help="rows x columns of episodes at once (1x1)")
    options = parser.parse_args()
    print(merge(options.inputs, options.out, speed=options.speed, grid=options.grid))


def merge(inputs: list[Path], out: Path, *, speed: int, grid: tuple[int, int]) -> str:
    """Write `out` and tell what is in it; holds one frame of each episode of the grid at a time.

    Raises ConfigError when there is nothing to merge, or a file is no video.
    """
    paths = found(inputs, out)
    fps, height, width = size(paths[0])
    count = grid[0] * grid[1]
    pages = [paths[first : first + count] for first in range(0, len(paths), count)]
    tiles = (tile(frames, grid) for page in pages for frames in together(page, speed, height, width))
    write_mp4(out, tiles, fps)
    return f"{out}: {len(paths)} episodes"


def found(inputs: list[Path], out: Path) -> list[Path]:
    """The videos among the inputs, by name; never the one that is to be written."""
    videos = [path for given in inputs for path in (given.glob("*.mp4") if given.is_dir() else [given])]
    paths = sorted((path for path in videos if path.resolve() != out.resolve()), key=lambda path: path.name)
    if not paths:
        raise ConfigError(f"no .mp4 in {', '.join(map(str, inputs))}: evaluated episodes are in a run's folder videos")
    return paths


def size(path: Path) -> tuple[float, int, int]:
    """(frames per second, height, width) of a video."""
    with opened(path) as container:
        stream = container.streams.video[0]
        return float(stream.average_rate), stream.height, stream.width


def together(page: list[Path], speed: int, height: int, width: int) -> Iterator[list[Array]]:
    """A frame of each video of a page, as long as any goes on; one that has ended stands still."""
    shown: list[Array] = [np.zeros((height, width, 3), np.uint8)] * len(page)
    for images in zip_longest(*(lapse(path, speed, height, width) for path in page)):
        shown = [before if image is None else image for before, image in zip(shown, images, strict=True)]
        yield shown


def lapse(path: Path, speed: int, height: int, width: int) -> Iterator[Array]:
    """[H, W, 3] uint8: every n-th frame and the last one, which tells how the episode ended."""
    with opened(path) as container:
        frame, number = None, -1
        for number, frame in enumerate(container.decode(video=0)):
            if number % speed == 0:
                yield frame.to_ndarray(format="rgb24", width=width, height=height)
        if frame is not None and number % speed:
            yield frame.to_ndarray(format="rgb24", width=width, height=height)


def tile(images: list[Array], grid: tuple[int, int]) -> Array:
    """The images in rows and columns, the rest of the grid black."""
    rows, columns = grid
    height, width, _ = images[0].shape
    canvas = np.zeros((rows, height, columns, width, 3), np.uint8)
    for index, image in enumerate(images):
        canvas[index // columns, :, index % columns] = image
    return canvas.reshape(rows * height, columns * width, 3)


def opened(path: Path) -> Any:
    """The open container of a video. Raises ConfigError for a file that is none."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        raise ConfigError("av is not installed: install it with `. examples/install.sh --extra data`") from None
    try:
        container = av.open(str(path))
        video_of(container).thread_count = 1  # beside a trainer, and one buffered frame instead of many
    except (FFmpegError, OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a video that can be read: {error}") from None
    return container


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def grid(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return positive(rows), positive(columns)


if __name__ == "__main__":
    main()
