"""`Reader`: loads checkpoints of `Writer`, and hands out no byte whose checksum differs."""

from __future__ import annotations

import io
import logging
import os
import pickle
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from flashwarp import _native
from flashwarp.errors import DamagedVersionError
from flashwarp.interop.torch.dcp.checksums import Item, check_item, find
from flashwarp.interop.torch.dcp.relied import check_torch
from flashwarp.storage import files

_log = logging.getLogger(__name__)


class Reader(FileSystemReader):  # type: ignore[misc]
    """Reads a checkpoint of `Writer`, checking each item before torch sees it.

    Give it to ``dcp.load`` as `storage_reader`. The metadata file is a pickle, as torch's own: it
    is unpickled after its checksum was compared. That finds damage; it is no protection from who
    may write to the folder.

    Parameters
    ----------
    path : path-like
        The folder of the checkpoint. The ``checkpoint_id`` of a load takes its place.

    Raises
    ------
    ArgumentError
        torch lacks what this relies on; the error says what.

    Notes
    -----
    What is damaged raises torch's ``CheckpointException`` around a `DamagedVersionError`, or, for
    the metadata file, around torch's ``AssertionError`` with its text (torch before 2.13: without;
    the text is logged). An item is read into memory as a whole, as torch's own reader does.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed.checkpoint as dcp
    >>> import flashwarp.dcp
    >>> folder = tempfile.mkdtemp()
    >>> state = {"weight": torch.arange(4.0)}
    >>> _ = dcp.save(state, storage_writer=flashwarp.dcp.Writer(folder), no_dist=True)
    >>> again = {"weight": torch.zeros(4)}
    >>> dcp.load(again, storage_reader=flashwarp.dcp.Reader(folder), no_dist=True)
    >>> again["weight"]
    tensor([0., 1., 2., 3.])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_torch()
        super().__init__(files.check_name(path))
        self._items: dict[tuple[str, int], Item] = {}
        self._damage: DamagedVersionError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of another folder if one is named."""
        super().reset(checkpoint_id)
        self._items = {}
        self._damage = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Read and check the metadata file."""
        # torch asks again, for files of this rank alone. They could be older ones.
        if self._damage is not None:
            raise self._damage
        try:
            content, checksums = find(Path(self.path), kwargs.get("rank"))
        except DamagedVersionError as error:
            self._damage = error
            # Before 2.13, torch says no more than that there is no metadata.
            _log.error("%s cannot be loaded: %s", self.path, error)
            raise
        self._items = {
            (name, item.offset): item for name, items in checksums.files.items() for item in items
        }
        metadata: Metadata = pickle.loads(content)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        path = Path(self.path) / sinfo.relative_path
        item = self._items.get((sinfo.relative_path, sinfo.offset))
        if item is None or item.nbytes != sinfo.length:
            raise DamagedVersionError(str(path), f"nothing is known of its byte {sinfo.offset}")
        file.seek(item.offset)
        content = file.read(item.nbytes)
        check_item(path, item, _native.crc32c(content))
        return io.BytesIO(content)
