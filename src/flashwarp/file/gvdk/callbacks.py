"""What the native storage of an image calls: by a number for each failure, and weakly."""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


def number_of(act: Callable[[], None]) -> int:
    """Call a function for the controller's threads, and return why it failed."""
    try:
        act()
    except OSError as error:
        _log.error("%s", error)
        return error.errno or errno.EIO
    except Exception:
        _log.exception("an image")
        return errno.EIO
    return 0


def weakly(image: T, method: Callable[..., int]) -> Callable[..., int]:
    """Return a method of an image that does not keep it alive."""
    reference = weakref.ref(image)

    def call(*arguments: int) -> int:
        alive = reference()
        return errno.ECANCELED if alive is None else method(alive, *arguments)

    return call
