"""What the native storage of an image calls: by a number for each failure, and weakly."""

from __future__ import annotations

import errno
import gc
import logging
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


def weakly_called(image: T, method: Callable[[T], None]) -> Callable[[], int]:
    """Return a method for the controller's threads, which gives an errno value.

    It does not keep the image alive.
    """
    reference = weakref.ref(image)

    def call() -> int:
        alive = reference()
        return errno.ECANCELED if alive is None else _number_of(alive, method)

    return call


def _number_of(image: T, method: Callable[[T], None]) -> int:
    # What the collector ends may wait for the kernel that waits for this call.
    collects = gc.isenabled()
    gc.disable()
    try:
        method(image)
    except OSError as error:
        _log.error("%s", error)
        return error.errno or errno.EIO
    except Exception:
        _log.exception("an image")
        return errno.EIO
    finally:
        if collects:
            gc.enable()
    return 0
