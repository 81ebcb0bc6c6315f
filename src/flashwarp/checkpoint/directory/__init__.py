"""The directory of a checkpoint: versions as files that are complete and checked, or not there.

`docs/formats.md` describes the files. A version appears by the rename of its manifest,
which comes last; every chunk of data has a checksum in it.
"""

from flashwarp.checkpoint.directory.catalog import Catalog
from flashwarp.checkpoint.directory.copying import Copied, copy_versions
from flashwarp.checkpoint.directory.directory import Directory
from flashwarp.checkpoint.directory.prune import Finding
from flashwarp.checkpoint.directory.reader import VersionReader
from flashwarp.checkpoint.directory.remote import RemoteDirectory
from flashwarp.checkpoint.directory.writer import VersionWriter

__all__ = [
    "Catalog",
    "Copied",
    "Directory",
    "Finding",
    "RemoteDirectory",
    "VersionReader",
    "VersionWriter",
    "copy_versions",
]
