"""What Python, numpy and notebooks ask of any array, answered by reading blocks of rows."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from flashwarp import config, endings
from flashwarp.array.attachment import Attachment
from flashwarp.array.keys import rows_at_once
from flashwarp.errors import ArgumentError, CopyError, FlashwarpError
from flashwarp.launch.rows import RowFormat

_OF_TENSORS = frozenset(("numpy", "to", "cpu", "cuda", "float", "half", "bfloat16", "norm"))
_INSTEAD = "take rows, x[a:b], or all, numpy.asarray(x), or compute in a kernel"


class Protocols(endings.Closing):
    """The base of `Array` that has no state: lengths, iteration, copies in memory, and tables."""

    _attachment: Attachment
    _format: RowFormat

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the array is closed."""

    @abstractmethod
    def __getitem__(self, key: object) -> Any: ...

    def __len__(self) -> int:
        if not self._format.shape:
            raise TypeError("an array without axes has no length")
        return self._format.shape[0]

    def __deepcopy__(self, memo: object) -> Self:
        try:
            recipe = pickle.dumps(self)
        except CopyError:
            return super().__deepcopy__(memo)
        copied: Self = pickle.loads(recipe)
        return copied

    def __repr__(self) -> str:
        facts = f"shape={self._format.shape} dtype={self._format.dtype}"
        if "_attachment" not in self.__dict__:
            return f"<{'closed' if self.closed else 'unopened'} flashwarp.Array {facts}>"
        state, attachment = "closed " if self.closed else "", self._attachment
        device = attachment.device.name
        return f"<{state}flashwarp.Array {attachment.place} {facts} device={device!r}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: what the array is, its route, and its counters.

        Opens no array, and raises no failure of an earlier call. Reading the counters of an array
        on a GPU waits for what the library's own stream has queued.
        """
        from flashwarp.array.explanation import html_table, live_facts

        facts: dict[str, object] = {
            "shape": self._format.shape,
            "dtype": self._format.dtype,
            "bytes": self._format.nbytes,
        }
        if "_attachment" not in self.__dict__:
            state = "closed" if self.closed else "unopened"
            return html_table(f"flashwarp.Array, {state}", facts)
        facts["path"] = self._attachment.place
        if self.closed or self._attachment.in_child:
            state = "closed" if self.closed else "of another process"
            return html_table(f"flashwarp.Array, {state}", facts)
        try:
            facts |= live_facts(self._attachment)
        except FlashwarpError as error:  # a notebook shows the table all the same
            facts["error"] = error
        return html_table("flashwarp.Array", facts)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Copy the whole array to memory, by one read; `numpy.asarray` and the like call this.

        Blocks. Raises ArgumentError if the array has more bytes than `config.asarray_bytes`: code
        for arrays in memory is rarely meant for one that does not fit there. Also raises it for
        ``copy=False``, because the data is not in memory.
        """
        if copy is False:
            raise ArgumentError("the array is not in memory: numpy can have it only by a copy")
        nbytes, limit = self._format.nbytes, config.current("asarray_bytes").asarray_bytes
        if nbytes > limit:
            raise ArgumentError(
                f"an array of {nbytes} bytes is not copied to memory unasked: at most {limit} "
                "(FLASHWARP_ASARRAY_BYTES); x[...] reads all of it, x[10:20] or gather() some rows"
            )
        held: npt.NDArray[Any] = self[...]
        return held if dtype is None else held.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Export a copy in host memory, for `torch.as_tensor`; raises as `__array__` does."""
        copy = options.pop("copy", None)
        return self.__array__(copy=copy).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of memory of the copy that `__dlpack__` exports: host memory."""
        return 1, 0  # kDLCPU

    def __iter__(self) -> Iterator[Any]:
        """Iterate over copies of the rows, which are read in blocks of `config.key_bytes`."""
        return self._each_row(range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        """Iterate from the last row to the first."""
        return self._each_row(range(len(self) - 1, -1, -1))

    def _each_row(self, numbers: range) -> Iterator[Any]:
        step = rows_at_once(self._format)
        for start in range(0, len(numbers), step):
            part = numbers[start : start + step]
            low, high = sorted((part[0], part[-1]))
            for row in self[low : high + 1][:: numbers.step]:
                # A view would keep its whole block.
                yield row.copy() if isinstance(row, np.ndarray | np.void) else row

    def __contains__(self, item: object) -> bool:
        """Return whether an element or row equals `item`, as numpy does: one pass over the data."""
        axes, own = np.ndim(item), len(self._format.shape)  # type: ignore[arg-type]
        if axes >= max(1, own):
            raise ArgumentError(
                f"an item with {axes} axes in an array with {own}: (x[...] == item).any() "
                "compares all"
            )
        step = rows_at_once(self._format)
        keys = (
            [slice(i, i + step) for i in range(0, len(self), step)] if self._format.shape else [...]
        )
        return any(bool(np.any(self[key] == item)) for key in keys)

    def _no_arithmetic(self, other: object) -> Any:
        """Refuse what numpy would compute; with its own arrays it does, by `__array__`."""
        if isinstance(other, Protocols) or type(other) in (bool, int, float, complex):
            raise TypeError(f"an array in a storage has no arithmetic: {_INSTEAD}")
        return NotImplemented

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _no_arithmetic
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = _no_arithmetic
    __pow__ = __and__ = __or__ = __lt__ = __le__ = __gt__ = __ge__ = _no_arithmetic

    def _no_member(self, name: str) -> AttributeError:
        known = not name.startswith("_") and (hasattr(np.ndarray, name) or name in _OF_TENSORS)
        hint = f", unlike one in memory: {_INSTEAD}" if known else ""
        return AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __bool__(self) -> bool:
        """Raise ArgumentError: numpy's truth value would need all elements."""
        raise ArgumentError(
            "an array has no truth value: compare with None, ask for len(x), or for x[...].any()"
        )
