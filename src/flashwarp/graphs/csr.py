"""A graph on disk: a folder with `offsets.npy`, `neighbours.npy` and optional `weights.npy`.

The list of vertex v is neighbours[offsets[v]:offsets[v + 1]]. Offsets are int64, neighbours uint32,
weights float32. Offsets are read into memory, 8 bytes for each vertex; the rest is an `Array`.

This is version 1 of the format, which has no other file. In version 2 vertices are numbered by
falling degree: `labels.npy` (uint32) has the user's label of each vertex, and `graph.json` the
version. One of the two without the other is an error, so that numbers never pass for labels.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwarp.array.array import Array
from flashwarp.array.opening import open as open_array
from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError, FileFormatError, MissingFileError
from flashwarp.storage import files
from flashwarp.storage.npy import read_layout

OFFSETS, NEIGHBOURS, WEIGHTS = "offsets.npy", "neighbours.npy", "weights.npy"
_LABELS, _FORMAT = "labels.npy", "graph.json"
_BY_DEGREE = {"version": 2, "order": "degree"}
_NAMES = (OFFSETS, NEIGHBOURS, WEIGHTS, _LABELS, _FORMAT)

# Much longer than what `finish` writes.
_FORMAT_BYTES_MAX = 4096

# Entries that `check` reads at a time.
_CHECK_ENTRIES = 1 << 24


@dataclass(frozen=True)
class CsrGraph:
    """A graph in a folder, with checked offsets.

    Attributes
    ----------
    folder : Path
        Where the files are.
    offsets : ndarray of int64
        One more than vertices, in memory.
    weighted : bool
        Whether there is a weight for each entry.
    labels : ndarray of uint32 or None
        The user's label of each vertex; None if labels and numbers are the same. Files, offsets,
        degrees and kernels use numbers; `vertex_of`, `by_label` and `by_vertex` convert.

    Examples
    --------
    >>> import tempfile
    >>> from flashwarp import graphs
    >>> graph = graphs.load("kron:6", tempfile.mkdtemp())
    >>> graph.vertices, len(graph.in_memory()) == graph.entries
    (64, True)
    """

    folder: Path
    offsets: NDArray[np.int64]
    weighted: bool
    labels: NDArray[np.uint32] | None = None

    def __repr__(self) -> str:
        size = f"{self.vertices} vertices, {self.entries} entries"
        weighted, labels = self.weighted * ", weighted", ", labels" * (self.labels is not None)
        return f"CsrGraph({str(self.folder)!r}, {size}{weighted}{labels})"

    @classmethod
    def open(cls, folder: files.PathLike) -> CsrGraph:
        """Open a folder.

        Raises
        ------
        MissingFileError
            When a file is absent.
        FileFormatError
            When the files do not fit together: offsets that do not begin with 0, that fall, or
            that end elsewhere than the lists; or not one weight or label each. `open` reads offsets
            and labels. `check` and `in_memory` check neighbours. Device code does not check them,
            so call `check` for a folder that you have not made.
        """
        folder = Path(files.check_name(folder))
        offsets: NDArray[np.int64] = _read(folder / OFFSETS, np.int64)
        if len(offsets) == 0 or offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
            raise FileFormatError(f"{folder / OFFSETS}: offsets begin with 0 and never fall")
        entries = _entries_of(folder / NEIGHBOURS, np.uint32)
        weighted = (folder / WEIGHTS).exists()
        if offsets[-1] != entries:
            raise FileFormatError(
                f"{folder}: the offsets end at {offsets[-1]}, and there are {entries} neighbours"
            )
        if weighted and _entries_of(folder / WEIGHTS, np.float32) != entries:
            raise FileFormatError(f"{folder}: there is not one weight for each neighbour")
        return cls(folder, offsets, weighted, _load_labels(folder, len(offsets) - 1))

    @property
    def vertices(self) -> int:
        """Number of vertices."""
        return len(self.offsets) - 1

    @property
    def entries(self) -> int:
        """Length of all lists together; an undirected edge counts twice."""
        return int(self.offsets[-1])

    @functools.cached_property
    def degrees(self) -> NDArray[np.int64]:
        """Length of each list."""
        return np.diff(self.offsets)

    @functools.cached_property
    def _vertices(self) -> NDArray[np.uint32]:
        """The number of each label."""
        assert self.labels is not None
        numbers = np.empty(self.vertices, np.uint32)
        numbers[self.labels] = np.arange(self.vertices, dtype=np.uint32)
        return numbers

    def vertex_of(self, label: int) -> int:
        """Return the number of the vertex with this label."""
        label = integer("label", label)
        if not 0 <= label < self.vertices:
            raise ArgumentError(f"{label} is not one of {self.vertices} vertices")
        return label if self.labels is None else int(self._vertices[label])

    def labels_of(self, vertices: NDArray[Any]) -> NDArray[np.uint32]:
        """Return the labels of these vertices."""
        found: NDArray[np.uint32] = vertices.astype(np.uint32)
        return found if self.labels is None else self.labels[found]

    def by_label(self, values: NDArray[Any]) -> NDArray[Any]:
        """Reorder values of vertices, from vertex numbers to labels."""
        return values if self.labels is None else values[self._vertices]

    def by_vertex(self, values: NDArray[Any]) -> NDArray[Any]:
        """Reorder values of vertices, from labels to vertex numbers."""
        return values if self.labels is None else values[self.labels]

    def smallest_labels(self, roots: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return, for each label, the smallest label of its component.

        `roots` names one vertex of the component for each vertex, the same for all of a component.
        """
        roots = self.by_label(roots)
        smallest = np.empty(self.vertices, np.uint32)
        # Of several values for one place numpy keeps the last: here, that of the smallest label.
        smallest[roots[::-1]] = np.arange(self.vertices, dtype=np.uint32)[::-1]
        return smallest[roots]

    @property
    def neighbours_path(self) -> Path:
        """The file with the lists."""
        return self.folder / NEIGHBOURS

    @property
    def weights_path(self) -> Path:
        """The file with the weights."""
        return self.folder / WEIGHTS

    def neighbours(self, **options: Any) -> Array:
        """Open the lists as an array; options are those of `flashwarp.open`."""
        return open_array(self.neighbours_path, **options)

    def list_offsets(self, **options: Any) -> Array:
        """Open the offsets as an array, for kernels; options are those of `flashwarp.open`."""
        return open_array(self.folder / OFFSETS, **options)

    def weights(self, **options: Any) -> Array:
        """Open the weights as an array; options are those of `flashwarp.open`."""
        if not self.weighted:
            raise ArgumentError(f"the graph in {self.folder} has no weights")
        return open_array(self.weights_path, **options)

    def in_memory(self) -> NDArray[np.uint32]:
        """Read all lists into memory, and check them as `check` does."""
        lists: NDArray[np.uint32] = _read(self.neighbours_path, np.uint32)
        self._check_part(0, lists)
        return lists

    def matrix(self) -> Any:
        """Return the scipy matrix of the whole graph, in memory; without weights, all are one.

        Rows and columns are the user's labels.
        """
        from scipy.sparse import csr_matrix

        # csgraph converts anything but float64 at every call.
        if self.weighted:
            values = np.load(self.weights_path).astype(np.float64)
        else:
            values = np.ones(self.entries, np.float64)
        shape = (self.vertices, self.vertices)
        columns = self.labels_of(self.in_memory())
        matrix = csr_matrix((values, columns, self.offsets), shape=shape)
        return matrix if self.labels is None else matrix[self._vertices]

    def pick_sources(self, count: int, seed: int, degree_min: int = 3) -> list[int]:
        """Pick random labels of at least `degree_min` neighbours, three as in the BaM paper."""
        count = integer("count", count, 0, self.vertices)
        seed = integer("seed", seed, 0, SIZE_MAX)
        eligible = np.flatnonzero(self.by_label(self.degrees) >= degree_min)
        if len(eligible) < count:
            raise ArgumentError(
                f"{len(eligible)} vertices have {degree_min} neighbours or more, not {count}"
            )
        picked = np.random.default_rng(seed).choice(eligible, size=count, replace=False)
        return [int(vertex) for vertex in picked]

    def check(self) -> None:
        """Read all lists once; raise FileFormatError for a neighbour that is no vertex."""
        lists = np.load(self.neighbours_path, mmap_mode="r")
        for first in range(0, self.entries, _CHECK_ENTRIES):
            self._check_part(first, lists[first : first + _CHECK_ENTRIES])

    def _check_part(self, first: int, lists: NDArray[np.uint32]) -> None:
        wrong = np.flatnonzero(lists >= self.vertices)
        if len(wrong):
            at = int(wrong[0])
            raise FileFormatError(
                f"{self.neighbours_path}: entry {first + at} is {lists[at]}, and there are "
                f"{self.vertices} vertices"
            )


def check_replaceable(folder: Path) -> None:
    """Raise ExistingFileError if a file that a graph would replace is none of a graph's."""
    files.check_replaceable(folder, _NAMES, CsrGraph.open)


def save_labels(folder: Path, labels: NDArray[np.uint32]) -> None:
    """Write what makes lists in a folder a graph of version 2."""
    np.save(folder / _LABELS, labels)
    (folder / _FORMAT).write_text(json.dumps(_BY_DEGREE) + "\n")


def publish(made: Path, folder: Path) -> None:
    """Move the files of a graph to their folder, in place of an earlier graph.

    The offsets go first and come last: with files of both, no graph is there.
    """
    for name in _NAMES:
        (folder / name).unlink(missing_ok=True)
    for name in reversed(_NAMES):
        if (made / name).exists():
            (made / name).replace(folder / name)


def _load_labels(folder: Path, vertices: int) -> NDArray[np.uint32] | None:
    named, there = folder / _FORMAT, (folder / _LABELS).exists()
    if not named.exists():
        if there:
            raise FileFormatError(f"{folder}: {_LABELS} without {_FORMAT}: not written to its end")
        return None
    try:
        with named.open() as file:
            found = json.loads(file.read(_FORMAT_BYTES_MAX))
    except (ValueError, RecursionError, OSError) as error:
        raise FileFormatError(f"{named} is damaged: {error}") from error
    if found != _BY_DEGREE:
        raise FileFormatError(f"{named} says {found}: a graph of another version of flashwarp")
    labels: NDArray[np.uint32] = _read(folder / _LABELS, np.uint32)
    if len(labels) != vertices:
        raise FileFormatError(f"{folder}: there is not one label for each of {vertices} vertices")
    seen = np.zeros(vertices, bool)
    seen[labels[labels < vertices]] = True
    if not seen.all():
        missing = int(np.flatnonzero(~seen)[0])
        raise FileFormatError(f"{folder / _LABELS}: no vertex has label {missing}")
    return labels


def _read(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    """Read a file with one axis of this dtype, or raise."""
    _entries_of(path, dtype)
    try:
        whole: NDArray[Any] = np.load(path)
    except MemoryError as error:
        nbytes = path.stat().st_size
        raise FileFormatError(f"{path} has {nbytes} bytes, more than memory") from error
    return whole


def _entries_of(path: Path, dtype: type[np.generic]) -> int:
    """Return the length of a file with one axis of this dtype, or raise."""
    if not path.exists():
        raise MissingFileError(f"{path} is missing: a graph is a folder with {OFFSETS} and more")
    if not path.is_file():
        raise FileFormatError(f"{path} is not a regular file, and not a part of a graph")
    layout = read_layout(str(path))
    if layout.dtype != dtype or len(layout.shape) != 1:
        raise FileFormatError(
            f"{path} holds {layout.dtype} of shape {layout.shape}, not one axis of "
            f"{np.dtype(dtype)}"
        )
    return layout.shape[0]
