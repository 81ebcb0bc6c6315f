"""What takes the place of a parameter: it answers lookups, and holds no rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from flashwarp.config import flag, integer
from flashwarp.errors import ArgumentError, ClosedError, CopyError, ReadOnlyError
from flashwarp.interop.torch.checks import check_tensors
from flashwarp.interop.torch.embedding import Embedding, EmbeddingBag
from flashwarp.interop.torch.offloading.plan import Plan
from flashwarp.interop.torch.offloading.table import ModelTable, OpenedTable

# Pairs of events that are kept until a GPU has passed them.
_TIMINGS_MAX = 256
_TIMED_EVERY = 16

# Ways of pooling that a weight keeps: modes, kinds of offsets, paddings.
_BAGS_MAX = 64


class _AllRowsError(ArgumentError, AttributeError):
    """Somebody asked for what needs all rows; `hasattr` says that a weight does not have it."""


def _refuse(what: str) -> NoReturn:
    raise _AllRowsError(
        f"{what} would need all rows of an offloaded table at once: only embedding and "
        "embedding_bag of torch.nn.functional look rows up"
    )


class TableWeight:
    """The weight of an offloaded table: it has its shape, dtype and device, but no memory.

    `embedding` and `embedding_bag` of `torch.nn.functional` look its rows up. Any other function of
    torch raises ArgumentError, since it would need the whole table.

    Attributes
    ----------
    shape, dtype, device
        Of the rows that lookups return.
    requires_grad : bool
        Whether the parameter was to be trained. If so, a module in training refuses lookups while
        gradients are recorded; set it to False if the table is to stay as it is.
    """

    is_meta = is_sparse = is_quantized = is_nested = False
    is_leaf = True
    layout = torch.strided
    grad = None

    def __init__(
        self, table: ModelTable, arrays: OpenedTable, plan: Plan, device: torch.device
    ) -> None:
        dtype = table.weight.dtype
        self._options = {"dtype": dtype, **table.lookup_options(arrays, device)}
        self._array = arrays.rows
        self.rows = Embedding(self._array, **self._options)
        self._bags: dict[tuple[object, ...], EmbeddingBag] = {}
        for module in table.modules:
            if isinstance(module, torch.nn.EmbeddingBag):  # compilers cannot make it later
                self._bag(module.mode, module.include_last_offset, module.padding_idx)
        self.name = table.name
        self.shape = torch.Size(table.weight.shape)
        self.dtype, self.device, self.ndim = dtype, device, 2
        self.requires_grad = bool(table.weight.requires_grad)
        self._module = table.modules[0]
        self._plan = plan
        self.clock = Clock()
        self.closed = False
        self.left_out = False
        self._files = sorted({tensor.path for tensor in table.tensors})
        self._hooks = [
            module.register_state_dict_pre_hook(self._refuse_state) for module in table.modules
        ]

    def _refuse_state(self, _module: torch.nn.Module, prefix: str, _keep_vars: bool) -> None:
        """Refuse to make a state that lacks the rows, unless it is to lack them."""
        if not self.left_out:
            raise CopyError(
                f"the state_dict of the model would lack the offloaded table {prefix}weight, whose "
                f"rows are in {', '.join(self._files)}: save rest() of what offload has returned, "
                "and keep these files; or close it, and load the table, to save everything"
            )

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look rows up, or refuse what torch was asked for."""
        del types
        if func in (torch.nn.functional.embedding, torch.nn.functional.embedding_bag):
            given = dict(zip(("input", "weight"), args, strict=False)) | dict(kwargs or {})
            found = given["weight"]
            bags = func is torch.nn.functional.embedding_bag
            if given.get("max_norm") is not None:
                raise ArgumentError(
                    "max_norm= changes rows when they are looked up, and those of an offloaded "
                    "table stay as they are"
                )
            if isinstance(found, cls) and bags:
                return found.look_up_bags(**given)
            if isinstance(found, cls):
                return found.look_up(given["input"])
        _refuse(getattr(func, "__name__", repr(func)))

    def __getattr__(self, name: str) -> Any:
        """Refuse what a tensor has and this weight has not."""
        if hasattr(torch.Tensor, name):
            _refuse(name)
        raise AttributeError(f"a TableWeight has no {name!r}")

    def __bool__(self) -> bool:
        """Refuse, as a tensor of several elements does."""
        _refuse("its truth")

    def __eq__(self, other: object) -> bool:
        """Whether it is the same weight; comparisons of elements are refused."""
        if other is None or isinstance(other, TableWeight):
            return self is other
        _refuse("==")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles."""
        raise CopyError(
            f"the offloaded table {self.name!r} cannot be copied or pickled: close what offload "
            "returned first, or offload the copy"
        )

    __hash__ = object.__hash__

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`, of any shape."""
        return self._timed(self.rows, ids)

    def look_up_bags(
        self,
        input: torch.Tensor,  # noqa: A002 - as torch names it
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return one row for each bag of ids, as `torch.nn.functional.embedding_bag` is called."""
        bags = self._bag(mode, include_last_offset, padding_idx)
        return self._timed(bags, input, offsets, per_sample_weights)

    def _bag(self, mode: str, last_offset: bool, padding: int | None) -> EmbeddingBag:
        """Return the module that pools so. There are few, since tables are used in few ways."""
        options: dict[str, Any] = {
            "mode": mode,
            "include_last_offset": last_offset,
            "padding_idx": padding,
        }
        key = tuple(options.values())
        try:
            return self._bags[key]
        except (KeyError, TypeError):
            made = EmbeddingBag(self._array, **options, **self._options)
        if len(self._bags) < _BAGS_MAX:
            self._bags[key] = made
        return made

    def _timed(self, rows: torch.nn.Module, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        """Look up by a module."""
        check_tensors(input=ids)
        if self.closed:
            raise ClosedError(f"the table {self.name!r} was offloaded, and is closed")
        if self.requires_grad and self._module.training and torch.is_grad_enabled():
            raise ReadOnlyError(
                f"{self.name!r} is in training, and reads its rows from a checkpoint, which stays "
                "as it is: use model.eval(), torch.no_grad(), or requires_grad_(False) of the "
                "module or the model"
            )
        found: torch.Tensor
        if torch.compiler.is_compiling():
            found = rows(ids, *more)
            return found
        if self._plan.checks_lookups:
            self._plan.check_rows(ids.numel())
        begin = self.clock.begin(ids)
        # Past the hooks of modules, which nobody can have added to this one.
        found = rows.forward(ids, *more)
        if begin is not None:
            self.clock.end(begin)
        return found

    def close(self) -> None:
        """Look up no more."""
        self.closed = True
        while self._hooks:
            self._hooks.pop().remove()
        for each in (self.rows, *self._bags.values()):
            each.close()

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one length."""
        return self.shape if dim is None else self.shape[integer("dim", dim, -2, 1)]

    def requires_grad_(self, requires_grad: bool = True) -> TableWeight:
        """Say whether modules in training refuse lookups; see `requires_grad`."""
        self.requires_grad = flag("requires_grad", requires_grad)
        return self

    @property
    def is_cuda(self) -> bool:
        """Whether rows come to a GPU."""
        return bool(self.device.type == "cuda")

    @staticmethod
    def is_floating_point() -> bool:
        """Return True: lookups return floats."""
        return True

    def dim(self) -> int:
        """Return the number of axes."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return int(self.shape.numel())

    def element_size(self) -> int:
        """Return the bytes of an element of the rows that lookups return."""
        return int(self.dtype.itemsize)

    nelement = numel

    def __repr__(self) -> str:
        return f"TableWeight({self.name!r}, {list(self.shape)}, {self.dtype}, {self.device})"


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        _refuse(name)

    return refuse


# What Python looks up in the class, and not by __getattr__.
_OPERATORS = (
    "abs array complex contains delitem dlpack float ge getitem gt index int invert iter le len lt "
    "ne neg pos reversed setitem "
    "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor "
    "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor "
    "radd rand rfloordiv rlshift rmatmul rmod rmul ror rpow rrshift rsub rtruediv rxor"
)
for _name in _OPERATORS.split():
    setattr(TableWeight, f"__{_name}__", _refusal(_name))


class Clock:
    """How long eager lookups of a table took."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._lookups = 0
        self._pending: list[tuple[Any, Any]] = []

    def begin(self, ids: torch.Tensor) -> Any:
        """Begin to time a lookup; None: this one is not timed.

        On a GPU one of 16 is, by events, because these take 10 us of the host. None is in captures.
        """
        if not ids.is_cuda:
            return time.perf_counter()
        self._lookups += 1
        if self._lookups % _TIMED_EVERY != 1 or torch.cuda.is_current_stream_capturing():
            return None
        if len(self._pending) >= _TIMINGS_MAX:
            self._collect(wait=False)
        if len(self._pending) >= _TIMINGS_MAX:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, begin: Any) -> None:
        """End it."""
        if isinstance(begin, float):
            self.seconds += time.perf_counter() - begin
            self.count += 1
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._pending.append((begin, event))

    def _collect(self, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][1].query()):
            first, last = self._pending.pop(0)
            last.synchronize()
            self.seconds += first.elapsed_time(last) / 1e3
            self.count += 1

    def mean(self) -> float | None:
        """Return the mean seconds of a lookup, or None; waits for the GPU."""
        self._collect(wait=True)
        return self.seconds / self.count if self.count else None
