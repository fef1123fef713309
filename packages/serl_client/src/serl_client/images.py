"""Crops and resizes images, for cameras and for datasets, so that a policy sees both alike."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from serl_client.errors import ConfigError
from serl_client.spec import Array


def cut(image: Array, crop: tuple[int, ...] | None, size: tuple[int, ...] | None) -> Array:
    """Return what `crop` and `size` leave of an image, uint8 [H, W, C], as a fresh array.

    crop: top, left, height and width in pixels. size: height and width after it; smaller images are averages.
    Raises ValueError for a crop outside of the image.
    """
    shape = cut_shape(image.shape, crop, None)
    if crop:
        image = image[crop[0] : crop[0] + shape[0], crop[1] : crop[1] + shape[1]]
    if size and tuple(image.shape[:2]) != size:
        image = _resized(image, *size)
    return np.array(image, np.uint8)


def cut_shape(shape: Sequence[int], crop: tuple[int, ...] | None, size: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape that `cut` leaves of an image of this one. Raises ValueError as it does."""
    if crop:
        top, left, height, width = crop
        if min(height, width) < 1 or top + height > shape[0] or left + width > shape[1]:
            raise ValueError(f"crop {list(crop)} lies outside of an image of {list(shape[:2])}")
        shape = height, width, shape[2]
    return (*(size or shape[:2]), shape[2])


def pixels(where: str, written: Any, count: int) -> tuple[int, ...]:
    """Return the numbers of a crop or a size. Raises ConfigError, which names `where`, unless there are so many."""
    is_list = isinstance(written, Sequence) and len(written) == count
    if not is_list or not all(isinstance(number, int) and number >= 0 for number in written):
        raise ConfigError(f"{where} should be {count} whole numbers, not {written}")
    return tuple(written)


def _resized(image: Array, height: int, width: int) -> Array:
    try:
        import cv2
    except ModuleNotFoundError:
        raise ConfigError(
            "size needs opencv: run `. examples/install.sh --extra robots` here (--extra data for a dataset)"
        ) from None
    made: Any = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    return made.reshape(height, width, -1)
