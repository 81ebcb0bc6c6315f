"""Which torch is known here: what these modules rely on is no promise of torch's."""

from __future__ import annotations

import torch

from flashwarp.errors import ArgumentError

KNOWN_VERSIONS = ("2.13",)
"""Releases whose checkpoints were tested."""


def check_version() -> None:
    """Raise ArgumentError if torch is of a version that is not known.

    Another version may store tensors in another form: checkpoints would be written wrongly.
    """
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    if release not in KNOWN_VERSIONS:
        raise ArgumentError(
            f"torch is of version {torch.__version__}, whose checkpoints flashwarp.dcp does not "
            f"know: install torch {' or '.join(KNOWN_VERSIONS)}, or save with torch's own "
            "FileSystemWriter"
        )
