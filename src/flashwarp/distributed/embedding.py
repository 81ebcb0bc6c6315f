"""`Embedding`: rows of a table whose shards lie on the ranks of a torch.distributed program.

Each rank converts the rows that others ask of it, so that weights alone travel. Gradients go to the
ranks that have their rows when an optimizer steps: there they are those of an ordinary table.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from flashwarp.config import flag, integer
from flashwarp.distributed import records
from flashwarp.distributed.array import ShardedArray
from flashwarp.distributed.asking import Asked
from flashwarp.distributed.moving import Call
from flashwarp.errors import ArgumentError
from flashwarp.interop.torch import embedding
from flashwarp.interop.torch.checks import check_tensors

# What numpy has of as many bytes.
_KINDS = {torch.float32: np.float32, torch.float16: np.uint16, torch.bfloat16: np.uint16}


class Embedding(torch.nn.Module):  # type: ignore[misc]
    """Rows of a sharded table, as `flashwarp.torch.Embedding` returns those of one file.

    Optimizers of `flashwarp.torch` train it; `create_table` makes one that they can train.

    Parameters
    ----------
    table : ShardedArray
        Of two axes. The caller closes it, after the module's last call.
    dim : int, optional
        The first `dim` elements of a row are its weights. Default: all, if `create_table` has put
        no state of an optimizer behind them.
    dtype : torch.dtype, optional
        What forward returns: float32, float16 or bfloat16. Default: that of the table.
    padding_idx : int, optional
        An id whose row gets no gradient; negative ones count from the end.
    average : bool
        Whether gradients of a rank's loss are divided by the number of ranks, as those of
        DistributedDataParallel: then a step is that of the mean of all ranks' losses, else of
        their sum.

    Attributes
    ----------
    table : ShardedArray
    local : flashwarp.torch.Embedding
        The shard of this rank. Its `pending` has the gradients that a step has brought here.
    num_embeddings, embedding_dim : int
        Rows of the whole table, and weights of a row.

    Raises
    ------
    CheckpointError
        On all ranks, if the table is writable and its shards were trained for different numbers of
        steps, as after a kill: restore all of them from one checkpoint.
    ArgumentError, DtypeError
        For an array that is no table, and for arguments that do not fit it.
    RankLostError, ClosedError

    Notes
    -----
    Collective, as the calls of `ShardedArray`: making the module, forward, and the step of an
    optimizer that trains it. All ranks make as many steps, also one without gradients. Backward is
    not: it keeps the gradients until the step. The gradients of a row are added up in the order of
    ranks, and on each in the order of ids: so SGD gives the bits of one process that has the ids
    of all ranks, one rank behind the other, if the loss gives each id the same gradient. A model
    that `torch.compile` compiles calls the module as it is.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed as dist
    >>> import flashwarp as fw, flashwarp.distributed, flashwarp.torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> folder = tempfile.mkdtemp()
    >>> fw.distributed.create_table(folder, 1000, 16, optimizer="adam")
    >>> with fw.distributed.ShardedArray.open(folder, "r+", device="cpu") as x:
    ...     table = fw.distributed.Embedding(x, dim=16)
    ...     optimizer = fw.torch.Adam(table, lr=0.01)
    ...     table(torch.tensor([3, 5])).square().sum().backward()
    ...     optimizer.step()
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        table: ShardedArray,
        *,
        dim: int | None = None,
        dtype: torch.dtype | None = None,
        padding_idx: int | None = None,
        average: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(table, ShardedArray):
            raise ArgumentError(
                f"a sharded table is a flashwarp.distributed.ShardedArray, not "
                f"{type(table).__name__}: open its folder by ShardedArray.open"
            )
        table._check_usable()
        self.table = table
        self.num_embeddings = table.shape[0]
        self._average = flag("average", average)

        def make() -> tuple[str, Any, _Shard]:
            padding = _padding(table, padding_idx)
            shard = _Shard(table.local, dim=dim, dtype=dtype, padding_idx=padding[1])
            self.padding_idx = padding[0]
            record = records.told(records.path_of(table.local)) if table.local.writable else None
            return what, [record], shard

        ranks, what = table._ranks, f"open {table._name} as a table"
        with ranks.together():
            shard, told = ranks.agree(what, make)
            ranks.step("compare the records", lambda: records.agreed([each for (each,) in told]))
        self.local = shard
        self.embedding_dim = shard.embedding_dim
        shard._bring_all = weakref.WeakMethod(self._bring)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the rows of ids, wherever they are. Collective.

        Parameters
        ----------
        input : torch.Tensor
            int64 or int32 ids of any shape, on the table's device: those that this rank wants,
            perhaps none.

        Returns
        -------
        torch.Tensor
            Of shape ``input.shape + (embedding_dim,)``.

        Raises
        ------
        BoundsError, IndexDtypeError, ArgumentError, StorageError
            On all ranks, if one cannot take part.
        RankLostError, ClosedError
        """
        if self.local._trains and torch.is_grad_enabled():
            rows: torch.Tensor = _Rows.apply(self.local._anchor, input, self)
            return rows
        return self._look_up(input)

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        self.table._check_usable()
        places = []

        def ask() -> list[Asked]:
            check_tensors(input=ids)
            self.table.check()
            wanted, inverse = ids.unique(return_inverse=True)
            places.append(inverse)
            return [Asked(_Weights(self.local), self.table._save.dealing, wanted)]

        ranks = self.table._ranks
        with ranks.together():
            rows = Call(ranks, f"look up in {self.table._name}").gather(ask)[0]
        result: torch.Tensor = rows.view(self.local.dtype)[places[0]]
        return result

    # Gradients.

    def _keep(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        if self._average:
            gradients = gradients / self.table.ranks
        self.local._kept.append((ids, gradients))

    def _bring(self) -> None:
        """Bring gradients to the ranks that have their rows. Collective."""
        kept = list(self.local._kept)
        table, dim, place = self.table, self.embedding_dim, self.table._rows.place
        table._check_usable()
        none = torch.empty(0, dtype=torch.int64, device=place)
        ids = torch.cat([none, *(each for each, _ in kept)])
        none = torch.empty(0, dim, device=place)
        values = torch.cat([none, *(each.float() for _, each in kept)])
        owner, places = table._save.dealing.owners(ids)
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=table.ranks).tolist()
        ranks = table._ranks
        with ranks.together():
            # One more, so that all ranks make a step if one has gradients, even without ids.
            told = ranks.enter(
                f"a step of {table._name}", sizes=[count + bool(kept) for count in counts]
            )
            theirs = [max(each - 1, 0) for each in told]
            got = ranks.swap(places[order], counts, theirs)
            sizes = ([each * dim for each in those] for those in (counts, theirs))
            rows = ranks.swap(values[order].view(-1), *sizes).view(-1, dim)
        # Only now: a step that all ranks refuse can be made again.
        del self.local._kept[: len(kept)]
        if any(told):
            self.local._keep(got, rows)

    def extra_repr(self) -> str:
        """Describe the table in the module's representation."""
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.table!r}"


class _Shard(embedding.Embedding):
    """The table of one rank. An optimizer finds it inside of the module."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Ids of the whole table, and gradients, that are for any rank.
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bring_all: Any = lambda: None

    def _collect(self) -> None:
        bring = self._bring_all()
        if bring is None:
            raise ArgumentError(
                "the sharded module of the table is gone, and its gradients with it"
            )
        bring()

    def _forget(self) -> None:
        super()._forget()
        self._kept.clear()


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, ids: torch.Tensor, module: Embedding) -> Any:
        found = module._look_up(ids)
        # The caller may change its ids before backward.
        ctx.ids, ctx.module = ids.reshape(-1).long().clone(), module
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        module, ids = ctx.module, ctx.ids
        rows = gradient.reshape(-1, module.embedding_dim)
        if module.padding_idx is not None:
            rows = rows.masked_fill((ids == module.padding_idx).unsqueeze(-1), 0)
        module._keep(ids, rows)
        return None, None, None


class _Weights:
    """The weights of a shard, converted, as messages take them."""

    def __init__(self, shard: embedding.Embedding) -> None:
        self._lookup = shard._lookup
        self.dtype = np.dtype(_KINDS[shard.dtype])
        self.shape = shard.num_embeddings, shard.embedding_dim
        self.place = torch.device(shard.array.device.name)

    def read(self, ids: torch.Tensor, message: torch.Tensor, _waits: bool) -> None:
        """Read weights to the bytes of a message; on a GPU in the order of its stream."""
        out = message.view(self._lookup.dtype).view(len(ids), self.shape[1])
        self._lookup.run(ids, None, None, out)


def _padding(table: ShardedArray, given: int | None) -> tuple[int | None, int | None]:
    """Return the padding of the whole table, and of this rank's shard."""
    if given is None:
        return None, None
    rows = table.shape[0]
    number = integer("padding_idx", given, -rows, rows - 1) % rows
    owner, place = table._save.dealing.owners(torch.tensor([number]))
    return number, int(place) if int(owner) == table.rank else None
