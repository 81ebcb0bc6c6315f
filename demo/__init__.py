"""The demo: four real uses of arrays larger than memory, each checked and compared.

`features` gathers rows in mini-batches, `graph` searches a graph breadth first, `table` asks a
query of columns, `checkpoint` saves states. The two in the middle are also small libraries:
`BreadthFirstSearch` and `filtered_sums` run kernels that read arrays on demand.
"""

from __future__ import annotations

from demo.check import CheckFailed
from demo.graph import BreadthFirstSearch
from demo.table import filtered_sums

__all__ = ["BreadthFirstSearch", "CheckFailed", "filtered_sums"]
