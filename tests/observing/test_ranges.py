"""Ranges for profilers: off, calls are untouched; on, they are marked; absent, it is said."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from flashwarp.errors import ArgumentError, MissingFileError
from flashwarp.observing import ranges


def pipeline() -> type[Any]:
    names = ranges._METHODS["Pipeline"]
    return type("Pipeline", (), {name: (lambda self, name=name: name) for name in names})


def test_without_the_variable_calls_are_untouched() -> None:
    kind = pipeline()
    before = dict(vars(kind))

    assert vars(ranges.marked(kind)) == before


def test_calls_are_ranges_of_our_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def annotate(name: str, domain: str) -> Any:
        seen.append((domain, name))
        return lambda function: lambda self: f"marked {function(self)}"

    monkeypatch.setenv("FLASHWARP_NVTX", "1")
    library: Any = types.SimpleNamespace(annotate=annotate)
    monkeypatch.setitem(sys.modules, "nvtx", library)

    assert ranges.marked(pipeline())().take() == "marked take"
    assert ("flashwarp", "Pipeline.take") in seen


def test_the_package_marks_calls_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvtx", reason="nvtx is an extra")
    import flashwarp as fw

    monkeypatch.setenv("FLASHWARP_NVTX", "1")
    for name in ranges._METHODS:
        real = getattr(fw, name)
        marked = ranges.marked(type(name, (), dict(vars(real))))
        assert all(callable(getattr(marked, each)) for each in ranges._METHODS[name])


def test_an_absent_library_and_a_wrong_value_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWARP_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(MissingFileError, match=r"flashwarp\[nvtx\]"):
        ranges.marked(pipeline())

    monkeypatch.setenv("FLASHWARP_NVTX", "on")
    with pytest.raises(ArgumentError, match="FLASHWARP_NVTX"):
        ranges.marked(pipeline())
