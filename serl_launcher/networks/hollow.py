"""While memory is counted (training/memory.py), algorithms are built under modes of torch in which no tensor has a
value. What reads files has to know of it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

Call = TypeVar("Call", bound=Callable[..., Any])


def is_hollow() -> bool:
    """Return whether new tensors have no values."""
    made = torch.empty(0)
    return made.is_meta or isinstance(made, FakeTensor)


def apart(call: Call) -> Call:
    """Run a function on a thread of its own, where tensors have values: such modes are the thread's."""

    @wraps(call)
    def run(*arguments: Any, **words: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call, *arguments, **words).result()

    return run  # type: ignore[return-value]
