"""Inputs of graphs: generators by name, Matrix Market, edge lists, `.npz`, folders.

Nothing in text and archives is trusted: a damaged file, a vertex number out of range and a matrix
that is not square raise `FileFormatError`, which names the place.
"""

from __future__ import annotations

import gzip
import re
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flashwarp.errors import ArgumentError, FileFormatError, MissingFileError
from flashwarp.graphs import order
from flashwarp.graphs.build import MEMORY_BYTES, write_csr
from flashwarp.graphs.csr import CsrGraph, check_replaceable
from flashwarp.graphs.edges import VERTICES_MAX, Edges, EdgeSource
from flashwarp.graphs.generate import EDGE_FACTOR, kronecker, uniform
from flashwarp.graphs.memory import source_in_memory
from flashwarp.storage import files

_GENERATORS = {"kron": kronecker, "urand": uniform}
_TEXT_BYTES = 16 << 20
_CHUNK_EDGES = 1 << 20
# A line of numbers is short: a file without line ends is no edge list.
_LINE_BYTES_MAX = 1 << 16
_COMMENT = re.compile(rb"^[^\S\n]*[#%].*$", re.MULTILINE)


def load(
    what: files.PathLike | Any,
    folder: files.PathLike,
    *,
    edge_factor: int = EDGE_FACTOR,
    seed: int = 1,
    symmetric: bool | None = None,
    by_degree: bool = False,
    memory_bytes: int = MEMORY_BYTES,
    vertices: int | None = None,
    reverse: bool = False,
) -> CsrGraph:
    r"""Make a graph from `what`, or open it if it is a graph's folder.

    Parameters
    ----------
    what : path-like or graph in memory
        ``kron:SCALE`` or ``urand:SCALE``; a folder made by this function; or a file: Matrix Market
        (``.mtx``, needs scipy), ``.npz`` as `scipy.sparse.save_npz` writes it, else an edge list:
        text with two vertices a line, counted from 0, and optionally a weight; lines that begin
        with ``#`` or ``%`` are skipped. Text may be compressed (``.gz``). Or a graph in memory: its
        edges as an array or tensor of shape ``(2, count)``, sources first; a sparse matrix of
        scipy; or a ``Data`` of PyG, with its ``edge_weight``.
    folder : path-like
        Where its files go, in place of a graph that is there; not used if `what` is a folder,
        unless `by_degree` orders its graph.
    edge_factor, seed : int
        For generated graphs: edges drawn for each vertex, and the seed of the random stream.
    symmetric : bool, optional
        Store the edges of a file in both directions (True), or as they are (False). Default: both
        for an edge list, as they are for a graph in memory; a matrix in a file must have them.
        Generated graphs always are.
    by_degree : bool
        Number the vertices by falling degree, so that searches read less from a file; see
        `graphs.by_degree`. Takes twice the time and, meanwhile, twice the disk.
    memory_bytes : int
        Edges held in memory before they are sorted by way of files.
    vertices : int, optional
        Of edges in memory, how many vertices there are. Default: as many as the edges name.
    reverse : bool
        Let the list of a vertex have the sources of edges that end there, from which samplers of
        PyG take messages, not the targets of those that begin there. The edges of a file are then
        stored as they are, unless `symmetric` is given.

    Returns
    -------
    CsrGraph
        Lists sorted, without loops; of duplicate edges the first counts.

    Raises
    ------
    MissingFileError
        When there is no such file.
    ExistingFileError
        When `folder` has files of a graph's names that are none. They stay as they are.
    ArgumentError
        When a matrix has an entry in one direction only, and `symmetric` is not given; when a graph
        in memory is none.
    FileFormatError
        When a file is damaged, or says what cannot be. All of a file is looked at before a list is
        written, and all of a folder, its neighbours included, before this returns: one pass.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "triangle.txt").write_text("0 1\n1 2\n2 0\n")
    >>> load(folder / "triangle.txt", folder / "triangle").in_memory().tolist()
    [1, 2, 0, 2, 0, 1]
    """
    folder = Path(files.check_name(folder))
    path = Path(files.check_name(what)) if files.is_path(what) else None
    if path is not None and path.is_dir():
        if reverse:
            raise ArgumentError("reverse= is for graphs that are made, and this one is there")
        found = CsrGraph.open(path)
        found.check()
        if not by_degree or found.labels is not None:
            return found
        return order.by_degree(found, folder, memory_bytes=memory_bytes)
    if path is not None and vertices is not None:
        raise ArgumentError(
            "vertices= is for edges in memory: a graph from a file has those that it names"
        )
    if reverse and symmetric is None:
        symmetric = False
    source = (
        source_of(what, edge_factor=edge_factor, seed=seed, symmetric=symmetric)
        if path is not None
        else source_in_memory(what, vertices, bool(symmetric))
    )
    if reverse:
        edges = (Edges(each.target, each.source, each.weight) for each in source.edges)
        source = replace(source, edges=edges, degrees=None)
    if not by_degree:
        return write_csr(source, folder, memory_bytes)
    check_replaceable(folder)
    with files.writing(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".as-given-") as scratch:
        given = write_csr(source, Path(scratch), memory_bytes)
        return order.by_degree(given, folder, memory_bytes=memory_bytes)


def source_of(
    what: files.PathLike,
    *,
    edge_factor: int = EDGE_FACTOR,
    seed: int = 1,
    symmetric: bool | None = None,
) -> EdgeSource:
    """Return the edges that `load` would store; the parameters are the same."""
    what = files.check_name(what)
    name, colon, scale = what.partition(":")
    if colon and name in _GENERATORS:
        if not scale.isdecimal():
            raise ArgumentError(f"{what!r}: the scale is a number, as in {name}:20")
        return _GENERATORS[name](int(scale), edge_factor, seed)
    path = Path(what)
    if not path.exists():
        generators = " or ".join(f"{known}:SCALE" for known in _GENERATORS)
        raise MissingFileError(f"{what} is no file, and not {generators} either")
    if not path.is_file():
        raise FileFormatError(f"{what} is neither a regular file nor a folder: copy it into a file")
    suffixes = [s for s in path.suffixes if s != ".gz"]
    if suffixes[-1:] == [".mtx"]:
        return _matrix_market(path, symmetric)
    if suffixes[-1:] == [".npz"]:
        return _npz(path, symmetric)
    return _edge_list(path, symmetric is None or symmetric)


def _square(path: Path, shape: Any) -> int:
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] % 1 != 0:
        raise FileFormatError(f"{path} holds a matrix of shape {tuple(shape)}, which is no graph")
    if not 1 <= shape[0] <= VERTICES_MAX:
        raise FileFormatError(f"{path} has {shape[0]} vertices, not 1 to {VERTICES_MAX}")
    return int(shape[0])


def _in_chunks(
    path: Path, vertices: int, row: NDArray[Any], column: NDArray[Any], weight: NDArray[Any] | None
) -> Iterator[Edges]:
    """Cut arrays into edges, and check what their vertices are."""
    if len(row) != len(column) or (weight is not None and len(weight) != len(row)):
        raise FileFormatError(f"{path}: its arrays have different lengths")
    for first in range(0, len(row), _CHUNK_EDGES):
        part = slice(first, first + _CHUNK_EDGES)
        for ends in (row[part], column[part]):
            outside = (ends < 0) | (ends >= vertices)
            if outside.any():
                raise FileFormatError(
                    f"{path}: edge {first + int(outside.argmax())} has vertex "
                    f"{int(ends[outside][0])}, and there are {vertices} vertices"
                )
        yield Edges(
            row[part].astype(np.uint32),
            column[part].astype(np.uint32),
            None if weight is None else weight[part].astype(np.float32),
        )


def _matrix(
    path: Path,
    vertices: int,
    row: NDArray[Any],
    column: NDArray[Any],
    weight: NDArray[Any] | None,
    symmetric: bool | None,
) -> EdgeSource:
    """Return the entries of a matrix as edges; which directions they have must be known."""
    if symmetric is None:
        for _ in _in_chunks(path, vertices, row, column, weight):
            pass  # checks what the vertices are
        there, back = _entries(row, column, weight), _entries(column, row, weight)
        if not all(map(np.array_equal, there, back)):
            raise ArgumentError(
                f"{path} is not symmetric: give symmetric=False to keep its edges as they are, or "
                "symmetric=True to store each in both directions"
            )
    edges = _in_chunks(path, vertices, row, column, weight)
    return EdgeSource(vertices, edges, bool(symmetric), weight is not None)


def _entries(
    row: NDArray[Any], column: NDArray[Any], weight: NDArray[Any] | None
) -> tuple[NDArray[Any], ...]:
    """Return the places of a matrix that have an entry, in order, and the first value of each."""
    keys = row.astype(np.uint64) << np.uint64(32) | column.astype(np.uint64)
    places, first = np.unique(keys, return_index=True)
    return (places,) if weight is None else (places, weight[first])


# Matrix Market.


def _matrix_market(path: Path, symmetric: bool | None) -> EdgeSource:
    try:
        from scipy.io import mmread
    except ImportError as error:
        raise MissingFileError(
            f"reading {path} needs scipy: pip install 'flashwarp[graphs]'"
        ) from error
    try:
        with warnings.catch_warnings():
            # Later versions return another class, which has the same members.
            warnings.simplefilter("ignore", DeprecationWarning)
            matrix = mmread(str(path))
    # A parser of text from anywhere: whatever it meets is the file's fault.
    except Exception as error:
        raise FileFormatError(f"{path} is not a readable Matrix Market file: {error}") from error
    if not hasattr(matrix, "row"):
        raise FileFormatError(f"{path} holds a dense matrix, not the edges of a graph")
    vertices = _square(path, matrix.shape)
    values = _real(path, matrix.data)
    # A pattern has no values: scipy makes all of them one.
    weight = None if np.all(values == 1) else values
    return _matrix(path, vertices, matrix.row, matrix.col, weight, symmetric)


def _real(path: Path, values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind not in "biuf":
        raise FileFormatError(f"{path} holds values of {values.dtype}: weights are real numbers")
    return values


# scipy.sparse.save_npz, without scipy.


def _npz(path: Path, symmetric: bool | None) -> EdgeSource:
    try:
        # Opened here: numpy forgets to close what it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            parts = {name: archive[name] for name in archive.files}
        kind = parts["format"].item()
        kind = kind.decode("ascii") if isinstance(kind, bytes) else str(kind)
        vertices = _square(path, parts["shape"])
        data = _real(path, parts["data"])
        if kind == "coo":
            row, column = parts["row"], parts["col"]
        elif kind in ("csr", "csc"):
            row, column = _expand(path, vertices, parts["indptr"], parts["indices"])
            if kind == "csc":
                row, column = column, row
        else:
            raise FileFormatError(f"{path} holds a matrix in format {kind!r}, not csr, csc or coo")
    except FileFormatError:
        raise
    # As above: an archive can claim anything of its arrays, also that they fill all memory.
    except Exception as error:
        raise FileFormatError(f"{path} is not a sparse matrix of scipy: {error}") from error
    if data.ndim != 1:
        raise FileFormatError(f"{path}: its values have {data.ndim} axes, not one")
    for ends in (row, column):
        if ends.ndim != 1 or ends.dtype.kind not in "iu":
            raise FileFormatError(f"{path}: indices are one axis of integers")
    weight = None if np.all(data == 1) else data
    return _matrix(path, vertices, row, column, weight, symmetric)


def _expand(
    path: Path, vertices: int, starts: NDArray[Any], indices: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the row of every entry, and its column."""
    rising = starts.shape == (vertices + 1,) and starts.dtype.kind in "iu"
    if not rising or starts[0] != 0 or (starts[1:] < starts[:-1]).any():
        raise FileFormatError(f"{path}: its row starts are not {vertices + 1} rising numbers")
    if starts[-1] != len(indices):
        raise FileFormatError(f"{path}: rows end at {starts[-1]} of {len(indices)} entries")
    starts = starts.astype(np.int64)
    return np.repeat(np.arange(vertices), starts[1:] - starts[:-1]), indices


# Edge lists.


def _edge_list(path: Path, symmetric: bool) -> EdgeSource:
    # Twice over the file: how many vertices there are is known only at its end.
    vertices, weighted = 0, False
    for table in _tables(path):
        weighted = table.shape[1] > 2
        vertices = max(vertices, int(table[:, :2].max()) + 1)
    if vertices == 0:
        raise FileFormatError(f"{path} has no edges")

    def edges() -> Iterator[Edges]:
        for table in _tables(path):
            weight = table[:, 2] if weighted else None
            yield from _in_chunks(path, vertices, table[:, 0], table[:, 1], weight)

    return EdgeSource(vertices, edges(), symmetric, weighted)


def _tables(path: Path) -> Iterator[NDArray[Any]]:
    """Yield the numbers of some lines at a time: two columns or three, the same in all."""
    columns, lines = 0, 0
    for block in _blocks(path):
        # A line of comments stays a line, so that errors can name it.
        text = _COMMENT.sub(b"", block)
        numbers = _numbers_a_line(text)
        counts = numbers[numbers > 0]
        if len(counts):
            columns = columns or int(counts[0])
            if columns not in (2, 3) or (counts != columns).any():
                wrong = numbers[(numbers > 0) & ((numbers != columns) | (columns not in (2, 3)))]
                at = lines + int(np.flatnonzero(numbers == wrong[0])[0]) + 1
                raise FileFormatError(
                    f"{path}, line {at}: {int(wrong[0])} numbers, not two vertices and perhaps a "
                    "weight, separated by spaces, as in every line"
                )
            yield _parse(path, text, lines, columns)
        lines += len(numbers)


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines."""
    rest = b""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while block := file.read(_TEXT_BYTES):
                head, newline, tail = (rest + block).rpartition(b"\n")
                if newline:
                    yield head + newline
                rest = tail
                if len(rest) > _LINE_BYTES_MAX:
                    raise FileFormatError(f"{path} has a line of {len(rest)} bytes: no edge list")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileFormatError(f"{path} is damaged: {error}") from error
    if rest:
        yield rest + b"\n"


def _numbers_a_line(text: bytes) -> NDArray[np.int64]:
    data = np.frombuffer(text, np.uint8)
    blank = data <= 32
    begins = ~blank
    begins[1:] &= blank[:-1]
    ends = np.flatnonzero(data == 10)
    return np.diff(np.cumsum(begins, dtype=np.int64)[ends], prepend=0)


def _parse(path: Path, text: bytes, line: int, columns: int) -> NDArray[Any]:
    dtype = np.int64 if columns == 2 else np.float64
    try:
        with warnings.catch_warnings():
            # What numpy cannot read it warns of, and returns what came before.
            warnings.simplefilter("error", DeprecationWarning)
            table = np.fromstring(text.decode("ascii"), dtype=dtype, sep=" ").reshape(-1, columns)
    except (ValueError, DeprecationWarning, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}, after line {line}: not numbers: {error}") from error
    ends = table[:, :2]
    if columns == 3 and not (ends == np.floor(ends)).all():
        raise FileFormatError(f"{path}, after line {line}: a vertex is a whole number")
    if (ends < 0).any() or (ends >= VERTICES_MAX).any():
        bad = ends[(ends < 0) | (ends >= VERTICES_MAX)][0]
        raise FileFormatError(
            f"{path}, after line {line}: vertex {bad:.0f}, and vertices are numbered from 0 to "
            f"{VERTICES_MAX - 1}: number them, as numpy.unique(edges, return_inverse=True) does"
        )
    return cast(NDArray[Any], table)
