"""Imports that do not look for garbage."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For the imports of torch and torch._dynamo, in a process that is ours alone.

    They make some hundred thousand objects that stay. Python would look among them for garbage again and again. So
    it looks at none of them, now or later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
