"""Structures of C++ as classes of ctypes."""

from __future__ import annotations

import ctypes

import pytest

from flashwarp import _native
from flashwarp.device.layouts import fields_of, size_of

# Members that begin a sector or a cache line; what lies before them is padding.
_ALIGNED = 32
# Reserved words, which no list names.
_RESERVED_MAX = 4


@pytest.mark.parametrize("name", _native.layouts())
def test_no_field_is_missing_between_those_that_are_listed(name: str) -> None:
    _, members = _native.layouts()[name]

    end = 0
    for member, offset, nbytes, _ in members:
        assert 0 <= offset - end <= _RESERVED_MAX or offset % _ALIGNED == 0, member
        end = offset + nbytes


def test_fields_have_the_compilers_offsets_and_padding() -> None:
    class Failure(ctypes.Structure):
        _fields_ = fields_of("failure")

    class Record(ctypes.Structure):
        _fields_ = fields_of("error_record", commands=Failure, indices=Failure)

    class Update(ctypes.Structure):
        _fields_ = fields_of("update_params")

    assert Failure.limit.offset == 24
    assert ctypes.sizeof(Failure) == size_of("failure") == 32
    assert len(Record().indices) == 8
    assert ctypes.sizeof(Record) == 512
    assert isinstance(Update().epsilon, float)
    assert Update.rows.size == size_of("row_params")
