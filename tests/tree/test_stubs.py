"""The types of the C++ extension say what its bindings do."""

from __future__ import annotations

from support.stubs import STUB, generate


def test_stub_is_that_of_the_bindings() -> None:
    assert STUB.read_text() == generate(), "make stubs writes it anew"
