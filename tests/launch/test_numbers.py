"""Numbers are packed for kernels as `struct` packs them, and what does not fit is refused."""

import math
import struct

import pytest

from flashwarp import _native

NUMBERS = {
    "e": [
        0.0,
        65504.0,
        65519.99,
        65520.0,
        -65520.0,
        2.0**-25,
        2.0**-25 * 1.01,
        1 + 2**-11 + 2**-40,
    ],
    "f": [0.1, 1 + 2**-24 + 2**-50, 3.4028235e38, 3.5e38, 1e-46],
    "d": [0.1, 1e308],
}


@pytest.mark.parametrize("code", NUMBERS)
def test_numbers_are_packed_as_struct_does(code: str) -> None:
    for number in [*NUMBERS[code], 1e300, math.inf, -math.inf]:
        try:
            expected = struct.pack(f"<{code}", number)
        except OverflowError:
            expected = None
        packed = _native.number_bytes("f", struct.calcsize(code), number)
        assert packed == expected, number
