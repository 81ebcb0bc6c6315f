"""Mistakes in `flashwarp/array/async.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/array/async.cuh"

MUTANTS = (
    Mutant(
        "token-done-unmoved",
        "    if (arrived) {\n      status_ = finish();\n",
        "    if (arrived) {\n      status_ = nvme::kSuccess;\n",
        "a token is over before its elements are in the buffer",
        "async",
    ),
    Mutant(
        "token-stores-twice",
        "base::opaque(&detail::move_part<true>)(cache_, volume_, span_, detail::lines::kPartial);",
        "base::opaque(&detail::move_part<true>)(cache_, volume_, span_, detail::lines::kAll);",
        "whole lines that were stored at once are stored again, over what came in between",
        "spans",
    ),
    Mutant(
        "sync-past-a-begun-write",
        "pending && (in_flight || (dirty && !taken));",
        "pending && in_flight;",
        "a sync returns while a write-back that another warp began is in flight",
        "files",
    ),
)
