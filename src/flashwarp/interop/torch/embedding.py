"""`Embedding` and `EmbeddingBag`: torch's modules of that name, over tables larger than memory.

A module owns no parameter: its rows stay in the storage of a `flashwarp.Array`, and forward reads
those that it needs. If the array is writable, backward leaves the gradients of the rows in
`pending`, for an optimizer that stores to the array.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch

from flashwarp import endings
from flashwarp.array.array import Array
from flashwarp.array.opening import open as open_array
from flashwarp.checkpoint.nested import note_rows
from flashwarp.config import choice, flag
from flashwarp.errors import ArgumentError, CopyError, DtypeError, ReadOnlyError
from flashwarp.interop.torch.checks import (
    REFUSED,
    TableLike,
    check_bags,
    check_dim_is_given,
    check_refused,
    check_shape,
    check_stream,
    check_table,
    check_tensors,
    dim_of,
    in_host_memory,
    padding_of,
    rows_of,
    stored_of,
)
from flashwarp.interop.torch.gradients import Kept, Part, look_up_bags, look_up_rows
from flashwarp.interop.torch.lookups import COMPUTED, NUMBERS, TensorLookup, look_up
from flashwarp.interop.torch.operators import check_plain, torch_device
from flashwarp.interop.torch.scaling import ScalesLike, Scaling
from flashwarp.storage import files, safetensors
from flashwarp.storage.memory import Memory
from flashwarp.table.lookup import Pooling, Scales, Table

Mode: TypeAlias = Literal["sum", "mean", "max"]

_POOLINGS = {"sum": Pooling.SUM, "mean": Pooling.MEAN, "max": Pooling.MAX}

# What torch's modules are made from, and ours find in the file.
_SIZES = ("num_embeddings", "embedding_dim")

# Of safetensors files, those that `open` opens as integers.
_TYPES = {
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class _TableModule(endings.Scoped, torch.nn.Module):  # type: ignore[misc]
    """What both modules have in common: a table, and who closes it."""

    _pooling = Pooling.NONE

    def __init__(
        self,
        table: TableLike | None = None,
        *sizes: object,
        scales: ScalesLike | None = None,
        scale_block: tuple[int, int] | None = None,
        stored_scales: torch.dtype | None = None,
        global_scale: float | torch.Tensor | None = None,
        global_divisor: float | torch.Tensor | None = None,
        rows: range | None = None,
        dim: int | None = None,
        dtype: torch.dtype | None = None,
        stored: torch.dtype | None = None,
        padding_idx: int | None = None,
        last_offset: bool = False,
        _freeze: bool | None = None,
        **opening: Any,
    ) -> None:
        super().__init__()
        for name in REFUSED.keys() & opening.keys():
            check_refused(name, opening.pop(name))
        named = [opening.pop(each) for each in _SIZES if each in opening]
        table = check_table(type(self).__name__, table, [*sizes, *named])
        if isinstance(table, torch.Tensor):
            stored = table.dtype if stored is None else stored
            table = in_host_memory(table)
        if _freeze is not None and files.is_path(table):
            opening.setdefault("mode", "r" if flag("freeze", _freeze) else "r+")
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._opened: list[Array] = []
        scaling = Scaling(scale_block, stored_scales, global_scale, global_divisor)
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self.close)
            self.array = array = self._array_of(table, opening)
            check_shape(array.shape)
            self.rows = rows_of(rows, array.shape[0])
            self.num_embeddings, width = len(self.rows), array.shape[1]
            if stored is None and opening.get("tensor") is not None and files.is_path(table):
                stored = _TYPES.get(safetensors.find(table, opening["tensor"]).dtype)
            self.stored = stored_of(array, stored)
            # For copies in other processes, and deep ones: what the array does not say.
            self._options: dict[str, Any] = {
                "scale_block": scale_block, "stored_scales": stored_scales,
                "global_scale": global_scale, "global_divisor": global_divisor, "rows": rows,
                "dim": dim, "dtype": dtype, "stored": self.stored, "padding_idx": padding_idx,
            }  # fmt: skip
            number = NUMBERS[self.stored]
            check_dim_is_given(dim, array)
            self.embedding_dim = dim_of(dim, width * array.dtype.itemsize * 8 // number.bits)
            self.dtype = self._result(dtype)
            self.padding_idx = padding_of(padding_idx, self.num_embeddings)
            self.scales = scales
            factors = self._scales_of(scales, scaling)
            self.table = Table(
                array, number, self.embedding_dim, self.rows, self.padding_idx, factors
            )
            self._lookup = TensorLookup(
                [self.table], self.dtype, self._pooling, last_offset=last_offset, keep=self._keep
            )
            self._single = TensorLookup([self.table], torch.float32)
            # Backward comes to inputs that need a gradient, and ids cannot.
            place = torch_device(array.device)
            self._anchor = torch.zeros((), requires_grad=True, device=place)
            self._trains = array.writable
            if _freeze is not None:
                self.requires_grad_(not flag("freeze", _freeze))
            unless_made.pop_all()

    def _array_of(self, table: TableLike, opening: dict[str, Any]) -> Array:
        if isinstance(table, Array):
            if opening:
                raise ArgumentError(
                    f"{', '.join(opening)}: the array is open, and these are for a path"
                )
            table._turns.check_usable()
            return table
        if isinstance(table, np.ndarray):
            rows = np.ascontiguousarray(table)
            check_shape(rows.shape)
            held = Memory(rows, writable=False)
            opened = open_array(held, dtype=rows.dtype, shape=rows.shape, **opening)
        else:
            opened = open_array(table, **opening)
        self._opened.append(opened)
        return opened

    def _result(self, dtype: torch.dtype | None) -> torch.dtype:
        if dtype is None:
            return self.stored if self.stored in COMPUTED else torch.float32
        if not isinstance(dtype, torch.dtype) or dtype not in COMPUTED:
            raise DtypeError(
                f"dtype={dtype!r}: rows are converted to float32, float16 or bfloat16 of torch"
            )
        return dtype

    def _scales_of(self, scales: ScalesLike | None, scaling: Scaling) -> Scales | None:
        if scales is None:
            scaling.check_unused()
            return None
        if files.is_path(scales):
            scales = open_array(scales, cache=self.array.cache)
            self._opened.append(scales)
        if isinstance(scales, torch.Tensor):
            check_plain(scales=scales)
            scales = scales.detach().contiguous()
        elif not isinstance(scales, Array):
            raise ArgumentError(
                f"scales is a path, a flashwarp.Array or a tensor, not {type(scales).__name__}"
            )
        # Kernels read a tensor as long as the module lives.
        self.scales = scales
        stored = NUMBERS[self.stored]
        return scaling.scales(scales, self.array, self.num_embeddings, self.embedding_dim, stored)

    @classmethod
    def from_pretrained(cls, embeddings: TableLike, freeze: bool = True, **options: Any) -> Self:
        """Return a module over rows that exist, as torch's method of this name does.

        Parameters
        ----------
        embeddings : torch.Tensor, numpy.ndarray, path-like or flashwarp.Array
            The rows. A tensor or a numpy array lies in host memory, is shared as torch shares it,
            and must not change. Its rows are read from there through the cache.
        freeze : bool
            False: backward leaves gradients for an optimizer, and a path is opened with mode "r+".
            A tensor has no room for the state of optimizers, and stays as it is: ReadOnlyError.
            ``create_table(path, *weights.shape, init=weights)`` makes a table that is trained.
        **options
            As for the module: `padding_idx`, `cache`, `device` and others.

        Raises
        ------
        ArgumentError
            Also for those of torch's options that tables in a storage do not have: `max_norm`,
            `scale_grad_by_freq`, `sparse=False`.

        Examples
        --------
        >>> import torch, flashwarp.torch
        >>> weights = torch.arange(8.0).reshape(4, 2)
        >>> with flashwarp.torch.Embedding.from_pretrained(weights, device="cpu") as table:
        ...     table(torch.tensor([3])).tolist()
        [[6.0, 7.0]]
        """
        if not flag("freeze", freeze) and isinstance(embeddings, torch.Tensor | np.ndarray):
            raise ReadOnlyError(
                "freeze=False: rows are trained in a file, which has room for the state of their "
                "optimizer. Make it once, by flashwarp.torch.create_table(path, *weights.shape, "
                f'init=weights), and then {cls.__name__}(path, dim=weights.shape[1], mode="r+")'
            )
        return cls(embeddings, _freeze=freeze, **options)

    # Training.

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Say whether forward records what backward needs; raises ReadOnlyError if it cannot."""
        if flag("requires_grad", requires_grad) and not self.array.writable:
            raise ReadOnlyError(
                'the table is read-only, so it cannot be trained: open it with mode="r+"'
            )
        self._trains = bool(requires_grad)
        super().requires_grad_(self._trains)
        return self

    def _part(self) -> Part:
        return Part(self._lookup, self._single, self._trains)

    def _keep(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        if not self.array.writable:
            raise ReadOnlyError(
                'the table is read-only, so its gradients lead nowhere: open it with mode="r+"'
            )
        # The caller may change its ids before a step: they may be a buffer for those of each batch.
        self.pending.append(Kept(ids.clone(), gradients, self.array.device))

    def _collect(self) -> None:
        """Bring to `pending` what other processes have for it, before a step."""

    def _forget(self) -> None:
        """Drop all gradients that backward has left."""
        self.pending.clear()

    # Ahead, and the end.

    def prefetch(self, ids: torch.Tensor, stream: object = None) -> None:
        """Start fetching the rows of ids into the cache; does not wait for their data.

        Parameters
        ----------
        ids : torch.Tensor
            As forward takes them: those of a later step.
        stream : optional
            GPU only: where the work is queued. Default: torch's current stream.

        Notes
        -----
        On a stream of its own a prefetch runs beside the present step, whose rows it may evict from
        a cache that is too small for both. Lines that find no free frame, or whose set others lock
        again and again, are skipped.
        """
        check_tensors(ids=ids)
        self._single.prefetch(ids, None, check_stream(stream, self.array.device))

    def close(self) -> None:
        """Close the arrays that the module has opened. Afterwards forward raises ClosedError.

        Raises CaptureError while a CUDA graph reads the table, which then stays open: delete the
        graph, and call it again.
        """
        while self._opened:
            self._opened[-1].close()
            self._opened.pop()
        for name in ("_lookup", "_single"):
            if name in self.__dict__:
                self.__dict__[name].close()

    def __copy__(self) -> Self:
        raise self._not_copied("two modules would close one array")

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Say how to open a read-only table again, in another process or for a deep copy."""
        if self.array._recipe is None or self.array.writable:
            raise self._not_copied("only a read-only table that was opened from a path is")
        if type(self) not in (Embedding, EmbeddingBag):
            raise self._not_copied("a class of yours may have more than its table")
        options = {**self._options, "scales": self.scales}
        return _opened_again, (type(self), self.array, options, self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._trains and hasattr(destination, "_metadata"):
            note_rows(destination._metadata[prefix[:-1]])

    def _not_copied(self, why: str) -> CopyError:
        return CopyError(
            f"a module over {self.array!r} cannot be copied or pickled ({why}): save the "
            "state_dict of the model, which has no rows, and open the table again where you need it"
        )

    def extra_repr(self) -> str:
        """Describe the table in the module's representation."""
        facts = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            facts += f", padding_idx={self.padding_idx}"
        return f"{facts}, dtype={self.dtype}, stored={self.stored}, array={self.array!r}"


class Embedding(_TableModule):
    """Rows of a table in a storage, as `torch.nn.Embedding` returns those of a parameter.

    Parameters
    ----------
    table : path-like, flashwarp.Array, torch.Tensor or numpy.ndarray
        Of shape ``(rows, width)``. A path is opened with `flashwarp.open`, and closed by `close`.
        Of a tensor or a numpy array see `from_pretrained`.
    scales : path-like, flashwarp.Array or torch.Tensor, optional
        Factors of the rows: one, one for each row, or one for each row and block of columns, of
        shape ``(rows, blocks)``. float32, float16, bfloat16, which an array has as uint16, or FP8
        (`stored_scales`). A tensor stays in memory; a path or an array is read through the cache.
    scale_block : (int, int), optional
        Rows, a power of two, and columns that share a scale, such as ``(128, 128)``. The scales
        have shape ``(ceil(rows / block rows), ceil(dim / block columns))``.
    stored_scales : torch.dtype, optional
        What the scales are, if they are integers: float8_e4m3fn (NVFP4), float8_e8m0fnu (MXFP4) or
        a float of as many bytes.
    global_scale, global_divisor : float or torch.Tensor, optional
        Another factor of all rows, as NVFP4 has it. A weight is its number times its scale, and
        that times `global_scale`, which some files call weight_scale_2; or its number times the
        quotient of scale and `global_divisor`, which others call weight_global_scale.
    rows : range, optional
        Which rows of the array are the table's; id 0 is the first of them. Default: all.
    dim : int, optional
        The first `dim` elements of a row are its weights. What follows, such as the state of an
        optimizer, is not read. Default: all, if `create_table` has put no state there.
    dtype : torch.dtype, optional
        What forward returns: float32, float16 or bfloat16. Default: that of the table, if it is one
        of these, else float32. Rows are converted while they are read.
    stored : torch.dtype, optional
        What the elements are, if the array has them as integers of as many bytes, because numpy has
        no such type: float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, or float4_e2m1fn_x2, of
        which a byte has two, the first in its low half. Default: the array's dtype.
    padding_idx : int, optional
        An id whose row gets no gradient; negative ones count from the end. It is read like any
        other, as with torch.
    **opening
        For `flashwarp.open`, if the table is a path: `mode`, `cache`, `device`, `line` and others.
        With ``tensor=``, the name of a tensor in safetensors files, `stored` is what its file says.

    Attributes
    ----------
    array : Array
    num_embeddings, embedding_dim : int
        Rows, and weights of a row.
    padding_idx : int or None
    pending : list of (torch.Tensor, torch.Tensor)
        What backward has left for an optimizer: int64 ids ``[n]`` and gradients ``[n, dim]`` of
        their rows. An id may repeat. Optimizers take all of it. What a backward leaves during the
        capture of a CUDA graph is for a step in the same capture.

    Raises
    ------
    ArgumentError, DtypeError
        For an array that is no table, and for arguments that do not fit it.
    FlashwarpError
        What `flashwarp.open` raises.

    Notes
    -----
    A module has no parameters, and `state_dict` no rows: those stay in the storage. Methods may be
    called by several threads, as those of the array. A module over a read-only array that was
    opened from a path can be deep-copied and pickled: the copy opens the path again, and closes it.
    Other copies raise CopyError. Hooks are not copied.

    If the array is writable and gradients are recorded, the result requires a gradient. Rows of a
    read-only array never do. `requires_grad_` chooses otherwise.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np, torch
    >>> import flashwarp.torch
    >>> np.save("table.npy", np.arange(8, dtype="float32").reshape(4, 2))
    >>> with fw.torch.Embedding("table.npy", device="cpu") as table:
    ...     table(torch.tensor([[3, 1]])).tolist()
    [[[6.0, 7.0], [2.0, 3.0]]]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the rows of ids.

        Parameters
        ----------
        input : torch.Tensor
            int64 or int32 ids of any shape, on the array's device.

        Returns
        -------
        torch.Tensor
            Of shape ``input.shape + (embedding_dim,)``.

        Raises
        ------
        BoundsError
            On the CPU device, for an id below 0 or past the last row. On a GPU its row is zero, and
            the next call on the array, `Array.check` or `Array.wait` raises.
        IndexDtypeError, ArgumentError
            For ids of another dtype or on another device.
        ClosedError

        Notes
        -----
        On a GPU the call waits for nothing, in the order of torch's current stream. It can be part
        of a CUDA graph, whose replays read the present ids, and of `torch.compile`.
        """
        if not isinstance(input, torch.Tensor):
            check_tensors(input=input)
        if self._trains and torch.is_grad_enabled():
            return look_up_rows(self._lookup, (self._part(),), self._anchor, input)
        return look_up(self._lookup, input)


class EmbeddingBag(_TableModule):
    """Sums, means or maxima of bags of rows, as `torch.nn.EmbeddingBag` computes them.

    Parameters
    ----------
    table, scales, scale_block, stored_scales, global_scale, global_divisor, dim, dtype, stored
        As for `Embedding`, and `**opening`.
    mode : {"mean", "sum", "max"}
        How the rows of a bag become one. A bag without rows gives zeros.
    padding_idx : int, optional
        An id that is no part of any bag; negative ones count from the end.
    include_last_offset : bool
        Whether `offsets` have one more, the end of the last bag.

    Attributes
    ----------
    array, num_embeddings, embedding_dim, padding_idx, pending
        As of `Embedding`. The gradients are those of the rows that were pooled; of the padding
        they are zero.

    Notes
    -----
    Sums are made in float32, in the order of the ids, and converted once. So a sum of float32 rows
    has the bits of torch's on a GPU; with `per_sample_weights`, and for means, the last bit may
    differ, because compilers and CPUs round products and quotients differently.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np, torch
    >>> import flashwarp.torch
    >>> np.save("bags.npy", np.arange(8, dtype="float32").reshape(4, 2))
    >>> with fw.torch.EmbeddingBag("bags.npy", mode="sum", device="cpu") as table:
    ...     table(torch.tensor([3, 1, 0]), torch.tensor([0, 2])).tolist()
    [[8.0, 10.0], [0.0, 1.0]]
    """

    def __init__(
        self,
        table: TableLike | None = None,
        *sizes: object,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(mode, str) and mode in ("r", "r+"):
            raise ArgumentError(
                f"mode={mode!r}: of a bag, mode= says how its rows become one: 'mean', 'sum' or "
                "'max'; from_pretrained(path, freeze=False) opens the table for training"
            )
        choice("mode", mode, list(_POOLINGS))
        self._pooling = _POOLINGS[mode]
        last = flag("include_last_offset", include_last_offset)
        super().__init__(table, *sizes, last_offset=last, **options)
        self.mode = mode
        self.include_last_offset = last
        self._options |= {"mode": mode, "include_last_offset": last}

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - as torch names it
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one row for each bag of ids.

        Parameters
        ----------
        input : torch.Tensor
            int64 or int32 ids on the array's device. With two axes each row is a bag.
        offsets : torch.Tensor, optional
            For ids of one axis: where each bag begins. The first is 0.
        per_sample_weights : torch.Tensor, optional
            A factor for each id, of the shape of `input`. For ``mode="sum"``.

        Returns
        -------
        torch.Tensor
            Of shape ``(bags, embedding_dim)``.

        Raises
        ------
        BoundsError
            As `Embedding.forward` raises it; also for offsets that decrease, or lie past the ids.
            The error names the offset, and the bag is empty.
        IndexDtypeError, DtypeError, ArgumentError, ClosedError
        """
        check_bags(input, offsets, per_sample_weights, self._pooling, 2)
        needs = self._trains or (
            per_sample_weights is not None and per_sample_weights.requires_grad
        )
        if needs and torch.is_grad_enabled():
            return look_up_bags(
                *(self._lookup, (self._part(),), self._anchor),
                *(input, offsets, per_sample_weights),
            )
        return look_up(self._lookup, input, offsets, per_sample_weights)


def _opened_again(
    kind: type[_TableModule], array: Array, options: dict[str, Any], training: bool
) -> _TableModule:
    """Make a module that came by a pickle, or is a deep copy; it owns its arrays."""
    made = kind(array, **options)
    made._opened += [each for each in (array, options["scales"]) if isinstance(each, Array)]
    made.train(training)
    return made
