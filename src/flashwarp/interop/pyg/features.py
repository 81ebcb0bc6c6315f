"""`FeatureStore`: PyG's feature store over arrays, which are read row by row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch_geometric.data import FeatureStore as _FeatureStore
from torch_geometric.data import TensorAttr

from flashwarp.array.array import Array
from flashwarp.array.opening import create
from flashwarp.array.opening import open as open_array
from flashwarp.errors import ArgumentError, DtypeError
from flashwarp.interop.torch import operators
from flashwarp.storage import files

Key: TypeAlias = tuple[Any, str]

_NOT_NUMPYS = {
    torch.bfloat16: torch.uint16,
    **dict.fromkeys(
        (
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
        ),
        torch.uint8,
    ),
}
"""Types that numpy lacks, and the integers of which files have their bits."""


class _Listed(TensorAttr):  # type: ignore[misc]
    """A name that the store has told a loader, which gives it ids of nodes as its index."""


class FeatureStore(_FeatureStore):  # type: ignore[misc]
    """Features of nodes or edges that stay in their files, for PyG's loaders.

    Parameters
    ----------
    arrays : mapping, optional
        Arrays by their names, such as "x"; or, in a graph of several types, by group and name, such
        as ("paper", "x"). They stay the caller's, who closes them.
    folder : path-like, optional
        Where `put_tensor` makes a ``.npy`` file for a tensor whose name is new, and opens it for
        reading. The store closes these.
    device : Device or str, optional
        Where these are opened; see `flashwarp.open`.
    stored : mapping, optional
        By the names in `arrays`: what the elements are, if an array has them as integers, because
        numpy has no such type, as bfloat16 and FP8. What `put_tensor` stores so is known.

    Notes
    -----
    ``get_tensor`` reads the rows of an index, on the device of the array, in the order of torch's
    current stream. An index that is a tensor elsewhere is copied there. Without an index it reads
    all rows. ``put_tensor`` takes a `flashwarp.Array` as it is; of a tensor it stores rows, into an
    array that is open for writing, or into a new file. ``remove_tensor`` leaves the file alone.

    A store whose arrays can be pickled can be used in workers of a loader.

    Examples
    --------
    >>> import numpy as np, torch, flashwarp as fw, flashwarp.pyg
    >>> np.save("x.npy", np.arange(20.0, dtype="f4").reshape(10, 2))
    >>> with fw.open("x.npy", device="cpu") as x:
    ...     store = fw.pyg.FeatureStore({"x": x})
    ...     store[None, "x", torch.tensor([3, 0])].tolist()
    [[6.0, 7.0], [0.0, 1.0]]
    """

    def __init__(
        self,
        arrays: Mapping[Any, Array] | None = None,
        *,
        folder: files.PathLike | None = None,
        device: Any = None,
        stored: Mapping[Any, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        self._folder = None if folder is None else Path(files.check_name(folder))
        self._arrays: dict[Key, Array] = {}
        self._device = device
        self._made: dict[Key, Array] = {}
        for name, array in ({} if arrays is None else arrays).items():
            if not isinstance(array, Array):
                raise ArgumentError(f"{name!r}: {type(array).__name__} is no flashwarp.Array")
            self._arrays[_key_of(name)] = array
        self._stored: dict[Key, torch.dtype] = {}
        for name, dtype in ({} if stored is None else stored).items():
            key = _key_of(name)
            if key not in self._arrays:
                raise ArgumentError(f"stored= names {name!r}, which is not among the arrays")
            self._set_stored(key, dtype)

    def _set_stored(self, key: Key, dtype: torch.dtype) -> None:
        """Note what the integers of an array are."""
        own = self._arrays[key].dtype
        if own.kind not in "iu" or own.itemsize != getattr(dtype, "itemsize", 0):
            raise DtypeError(f"{key}: {own} holds no elements of {dtype}, which are integers there")
        self._stored[key] = dtype

    def __repr__(self) -> str:
        arrays = ", ".join(
            f"{key[1] if key[0] is None else key}: {list(array.shape)} "
            f"{self._stored.get(key, array.dtype)}"
            for key, array in self._arrays.items()
        )
        return f"{type(self).__name__}({arrays})"

    def close(self) -> None:
        """Close the arrays that the store has made. May be called twice."""
        for array in self._made.values():
            array.close()

    # What PyG asks of a store.

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        key = (attr.group_name, attr.attr_name)
        rows = len(self._arrays[key]) if key in self._arrays else None
        index = _rows_of(attr.index, rows)
        if isinstance(tensor, Array):
            if index is not None:
                raise ArgumentError(f"{key}: an array is put whole, with index=None")
            self._forget(key)
            self._arrays[key] = tensor
            return True
        values = tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(np.array(tensor))
        array = self._arrays.get(key)
        if array is None:
            self._make(key, values, index)
            return True
        if index is None:
            if tuple(values.shape) != array.shape:
                raise ArgumentError(
                    f"{key} has shape {array.shape}, the tensor {tuple(values.shape)}: remove it "
                    "first, or give index= the rows"
                )
            index = slice(None)
        values = values.to(self._stored.get(key, values.dtype))
        array[index if isinstance(index, slice) else np.asarray(index.cpu())] = _bits(values)
        return True

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Any]:
        # PyG's loaders ask so, for what `get_all_tensor_attrs` has named.
        self._check_nodes([each for each in attrs if isinstance(each, _Listed)])
        return [self._get_tensor(each) for each in attrs]

    def _check_nodes(self, listed: list[_Listed]) -> None:
        """Raise ArgumentError if ids of one kind would choose rows of another kind."""
        groups: dict[int, Any] = {}
        lengths: dict[Any, tuple[int, str]] = {}
        for attr in listed:
            name, rows = attr.attr_name, len(self._array(attr))
            other = groups.setdefault(id(attr.index), attr.group_name)
            if other != attr.group_name:
                raise ArgumentError(
                    f"the same ids for {name!r} of {attr.group_name!r} and of {other!r}: a sampler "
                    "without types gives all groups one type's ids; give it edge_type=, and the "
                    "loader input_nodes=(type, ids)"
                )
            most, first = lengths.setdefault(attr.group_name, (rows, name))
            if rows != most or not {"edge", "edges"}.isdisjoint(name.split("_")):
                raise ArgumentError(
                    f"{name!r} of {rows} rows beside {first!r} of {most} rows: PyG's loaders index "
                    "all with the ids of nodes, and features of edges would be those of others. "
                    "Keep these in a store of their own, and read them by their edges' places"
                )

    def _get_tensor(self, attr: TensorAttr) -> Any:
        array = self._array(attr)
        index = _rows_of(attr.index, len(array))
        place = operators.torch_device(array.device)
        if isinstance(attr.index, np.ndarray):
            return array[attr.index]
        if isinstance(index, torch.Tensor):
            rows = operators.gather(array, index.to(place))
        else:
            rows = torch.from_numpy(np.asarray(array[... if index is None else index])).to(place)
        stored = self._stored.get((attr.group_name, attr.attr_name))
        return rows if stored is None else rows.view(stored)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._forget((attr.group_name, attr.attr_name))

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        array = self._arrays.get((attr.group_name, attr.attr_name))
        if array is None:
            return None
        index = _rows_of(attr.index, len(array))
        if index is None:
            return array.shape
        if isinstance(index, slice):
            return (len(range(*index.indices(len(array)))), *array.shape[1:])
        return (*index.shape, *array.shape[1:])

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Return the names of all arrays; PyG calls this."""
        return [_Listed(*key) for key in self._arrays]

    # Arrays.

    def _array(self, attr: TensorAttr) -> Array:
        try:
            return self._arrays[attr.group_name, attr.attr_name]
        except KeyError:
            known = ", ".join(map(repr, self._arrays)) or "nothing"
            raise KeyError(
                f"({attr.group_name!r}, {attr.attr_name!r}) is not in the store, which has {known}"
            ) from None

    def _make(self, key: Key, values: torch.Tensor, index: object) -> None:
        if self._folder is None or index is not None:
            raise ArgumentError(
                f"{key} is not in the store: put a flashwarp.Array, or all rows into a store that "
                "was made with folder="
            )
        name = ".".join(str(part) for part in key if part is not None)
        if "/" in name:
            raise ArgumentError(f"{key} would be a file in another folder: put a flashwarp.Array")
        path = self._folder / f"{name}.npy"
        rows = _bits(values)
        # What the store itself has made, and removed, it may replace.
        with create(
            path, rows.dtype, rows.shape, overwrite=key in self._made, device="cpu"
        ) as written:
            written[...] = rows
        self._made[key] = self._arrays[key] = open_array(path, device=self._device)
        if values.dtype in _NOT_NUMPYS:
            self._set_stored(key, values.dtype)

    def _forget(self, key: Key) -> bool:
        array = self._arrays.pop(key, None)
        self._stored.pop(key, None)
        if array is not None and array is self._made.get(key):
            array.close()
        return array is not None


def _bits(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array of numpy: integers for what numpy lacks."""
    held = values.detach().cpu()
    found: np.ndarray[Any, Any] = held.view(_NOT_NUMPYS.get(held.dtype, held.dtype)).numpy()
    return found


def _key_of(name: Any) -> Key:
    if isinstance(name, str):
        return None, name
    if isinstance(name, tuple) and len(name) == 2 and isinstance(name[1], str):
        return name
    raise ArgumentError(f"{name!r}: name an array 'x', or (group, 'x')")


def _rows_of(index: Any, rows: int | None) -> torch.Tensor | slice | None:
    """Return which of `rows` an index of PyG means; None for all of them."""
    if index is None or (isinstance(index, slice) and index == slice(None)):
        return None
    if isinstance(index, slice):
        return index
    if isinstance(index, int):
        return torch.tensor([index])
    found = index if isinstance(index, torch.Tensor) else torch.from_numpy(np.asarray(index))
    if found.dtype is torch.bool:
        if rows is not None and found.shape != (rows,):
            raise ArgumentError(f"a mask of shape {tuple(found.shape)} for {rows} rows")
        return found.nonzero().view(-1)
    return found
