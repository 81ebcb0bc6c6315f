"""Quantised tables: blocks of rows and columns with one scale, NVFP4, MXFP4 and their bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import flashwarp as fw
import flashwarp.torch
from flashwarp.errors import ArgumentError, DtypeError

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

ROWS = 300
# OCP Microscaling Formats, version 1.0, table 5: the eight magnitudes of E2M1.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = torch.tensor([*E2M1, *(-each for each in E2M1)])


def packed(rows, dim, seed=1):
    """Rows of packed numbers of 4 bits, and their values."""
    made = torch.randint(0, 256, (rows, -(-dim // 2)), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))  # fmt: skip
    values = VALUES[torch.stack([made & 15, made >> 4], -1).long()].flatten(1)
    return made, values[:, :dim]


def saved(folder, tensor, name="x.npy"):
    """Save bytes of a tensor, as integers unless numpy has its type."""
    whole = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    np.save(folder / name, whole.numpy())
    return folder / name


def table(path, **options):
    options = {"device": "cpu", "cache": "64 KiB", "line": 512, **options}
    return fw.torch.Embedding(path, **options)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def ids(*shape, seed=2):
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(*shape, dtype=torch.float32, seed=3):
    made = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 4 + 0.01
    if dtype == torch.float8_e8m0fnu:
        return torch.randint(100, 150, shape, dtype=torch.uint8).view(dtype)
    return made.to(dtype)


# Bits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_pair_of_numbers_of_four_bits_is_converted(tmp_path, dtype):
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    expected = VALUES[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(1).to(dtype)

    with table(saved(tmp_path, codes), stored=torch.float4_e2m1fn_x2, dtype=dtype) as x:
        assert x.embedding_dim == 32
        assert torch.equal(bits(x(torch.arange(16))), bits(expected))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
@pytest.mark.parametrize("of_array", [False, True])
def test_each_scale_of_eight_bits_is_converted(tmp_path, stored, of_array):
    codes = torch.arange(256, dtype=torch.uint8)
    path = saved(tmp_path, torch.ones(256, 4))
    scales = saved(tmp_path, codes, "s.npy") if of_array else codes

    with table(path, scales=scales, stored_scales=stored) as x:
        found = x(torch.arange(256))[:, 0]

    expected = codes.view(stored).float()
    numbers = ~expected.isnan()
    assert torch.equal(bits(found[numbers]), bits(expected[numbers]))
    assert found[~numbers].isnan().all()


# Blocks.


@pytest.mark.parametrize("of_array", [False, True])
@pytest.mark.parametrize(
    ("stored", "block", "dim"),
    [
        (torch.float8_e4m3fn, (128, 128), 256),
        (torch.float8_e5m2, (128, 128), 200),  # the last block is narrower
        (torch.int8, (64, 32), 96),
        (torch.float8_e4m3fn, (1, 24), 60),
        (torch.float8_e4m3fn, (2, 7), 33),
        (torch.bfloat16, (4, 3), 21),
        (torch.float32, (512, 5), 13),  # one block has all rows
    ],
)
def test_rows_are_multiplied_by_the_scale_of_their_block(tmp_path, stored, block, dim, of_array):
    weight = (torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(1)) * 9).to(stored)
    whole = weight.view(torch.int16) if stored == torch.bfloat16 else weight
    scales = scales_of(-(-ROWS // block[0]), -(-dim // block[1]))
    each = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:ROWS, :dim]
    expected = weight.float() * each
    given = saved(tmp_path, scales, "s.npy") if of_array else scales

    with table(saved(tmp_path, whole), stored=stored, scales=given, scale_block=block,
               dtype=torch.float32) as x:  # fmt: skip
        index = ids(400)
        assert torch.equal(bits(x(index)), bits(expected[index]))
        assert torch.equal(x(torch.arange(ROWS)), expected)


def test_blocks_count_rows_of_the_table_and_not_of_its_array(tmp_path):
    weight = torch.randn(ROWS, 16)
    scales = scales_of(5, 2)
    each = scales.repeat_interleave(16, 0).repeat_interleave(8, 1)[:70]

    with fw.open(saved(tmp_path, weight), device="cpu") as array:
        x = fw.torch.Embedding(array, rows=range(30, 100), scales=scales, scale_block=(16, 8))
        assert torch.equal(x(torch.arange(70)), weight[30:100] * each)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_scaled_blocks(tmp_path, mode):
    codes, values = packed(ROWS, 48)
    scales = scales_of(ROWS, 3, dtype=torch.float8_e4m3fn)
    rows = values * scales.float().repeat_interleave(16, 1) * 0.37
    index = ids(20, 6)
    expected = torch.nn.functional.embedding_bag(index, rows, mode=mode)

    bag = fw.torch.EmbeddingBag(saved(tmp_path, codes), mode=mode, device="cpu", scales=scales,
                                stored=torch.float4_e2m1fn_x2, global_scale=0.37)  # fmt: skip

    torch.testing.assert_close(bag(index), expected, rtol=1e-6, atol=1e-6)
    bag.close()


# NVFP4 and MXFP4.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_array", [False, True])
@pytest.mark.parametrize("dim", [16, 160, 2048])
def test_nvfp4_rows(tmp_path, dim, of_array, dtype):
    """Number times scale is exact; the product with the scale of the table is rounded once."""
    codes, values = packed(ROWS, dim)
    scales = scales_of(ROWS, dim // 16, dtype=torch.float8_e4m3fn)
    whole = torch.tensor([0.0123])
    expected = (values * scales.float().repeat_interleave(16, 1) * whole).to(dtype)
    given = saved(tmp_path, scales, "s.npy") if of_array else scales

    with table(saved(tmp_path, codes), stored=torch.float4_e2m1fn_x2, scales=given, dtype=dtype,
               stored_scales=torch.float8_e4m3fn, global_scale=whole) as x:  # fmt: skip
        index = ids(500)
        assert torch.equal(bits(x(index)), bits(expected[index]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 96, 1024])
def test_mxfp4_rows(tmp_path, dim, dtype):
    codes, values = packed(ROWS, dim)
    scales = scales_of(ROWS, dim // 32, dtype=torch.float8_e8m0fnu)
    expected = (values * scales.float().repeat_interleave(32, 1)).to(dtype)

    with table(saved(tmp_path, codes), stored=torch.float4_e2m1fn_x2, scales=scales, dtype=dtype
               ) as x:  # fmt: skip
        index = ids(500)
        assert torch.equal(bits(x(index)), bits(expected[index]))


@pytest.mark.parametrize("dim", [1, 7, 30, 161])
def test_packed_rows_of_any_width_straddle_lines(tmp_path, dim):
    codes, values = packed(ROWS, dim)

    with table(saved(tmp_path, codes), stored=torch.float4_e2m1fn_x2, dim=dim) as x:
        assert torch.equal(x(torch.arange(ROWS)), values)


@pytest.fixture(scope="module")
def reference():
    return pytest.importorskip(
        "compressed_tensors.quantization.lifecycle.forward",
        reason="compressed-tensors is not installed",
    )


def arguments(**options):
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(symmetric=True, **options)


def test_nvfp4_rows_are_those_of_compressed_tensors(reference, tmp_path):
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    codes, _ = packed(ROWS, 64)
    scales = scales_of(ROWS, 4, dtype=torch.float8_e4m3fn)
    whole = torch.tensor([1792.7])
    args = arguments(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    values = unpack_fp4_from_uint8(codes, ROWS, 64, dtype=torch.float32)
    expected = reference.dequantize(values, scales.float(), args=args, global_scale=whole)

    with table(saved(tmp_path, codes), stored=torch.float4_e2m1fn_x2, scales=scales,
               global_divisor=whole) as x:  # fmt: skip
        assert torch.equal(bits(x(torch.arange(ROWS))), bits(expected))


def test_mxfp4_rows_are_those_of_compressed_tensors(reference, tmp_path):
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    codes, _ = packed(ROWS, 64)
    scales = scales_of(ROWS, 2, dtype=torch.float8_e8m0fnu)
    args = arguments(num_bits=4, type="float", strategy="group", group_size=32,
                     scale_dtype=torch.uint8)  # fmt: skip
    state = {"weight_packed": codes, "weight_scale": scales.view(torch.uint8)}
    expected = MXFP4PackedCompressor.decompress(state, QuantizationScheme(targets=[], weights=args))

    with table(saved(tmp_path, codes), stored=torch.float4_e2m1fn_x2, scales=scales,
               dtype=expected["weight"].dtype) as x:  # fmt: skip
        assert torch.equal(bits(x(torch.arange(ROWS))), bits(expected["weight"]))


def test_blocks_are_those_of_compressed_tensors(reference, tmp_path):
    weight = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = scales_of(2, 3)
    args = arguments(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    expected = reference.dequantize(weight, scales, args=args, dtype=torch.float32)

    with table(saved(tmp_path, weight), stored=torch.float8_e4m3fn, scales=scales,
               scale_block=(128, 128)) as x:  # fmt: skip
        assert torch.equal(bits(x(torch.arange(256))), bits(expected))


# Misuse.


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"scale_block": (128, 128)}, ArgumentError, "scale_block= is for tables with scales"),
        ({"global_scale": 2.0}, ArgumentError, "global_scale= is for tables with scales"),
        ({"global_divisor": 2.0}, ArgumentError, "global_divisor= is for"),
        ({"stored_scales": torch.float32}, ArgumentError, "stored_scales= is for"),
        ({"scales": torch.ones(3, 1), "scale_block": (100, 32)}, ArgumentError, "power of two"),
        ({"scales": torch.ones(3, 1), "scale_block": (128, 16)}, ArgumentError, r"need \(3, 2\)"),
        ({"scales": torch.ones(3, 1), "scale_block": (0, 16)}, ArgumentError, "scale_block=0"),
        ({"scales": torch.ones(3, 1), "scale_block": (128,)}, ArgumentError, "give .rows, columns"),
        ({"scales": torch.ones(3, 1), "scale_block": 128}, ArgumentError, "scale_block=128"),
        ({"scales": torch.ones(3, 1), "scale_block": "ab"}, ArgumentError, "scale_block='ab'"),
        ({"scales": torch.ones(ROWS, 32)}, ArgumentError, "no whole bytes"),
        ({"scales": torch.ones(()), "global_scale": math.nan}, ArgumentError, "global_scale=nan"),
        ({"scales": torch.ones(()), "global_scale": "x"}, ArgumentError, "global_scale='x'"),
        ({"scales": torch.ones(()), "global_scale": torch.ones(2)}, ArgumentError, "one number"),
        ({"scales": torch.ones(()), "global_divisor": 0}, ArgumentError, "divided"),
        ({"scales": torch.ones(()), "global_divisor": 1, "global_scale": 1}, ArgumentError, "two"),
        ({"scales": torch.ones(()), "stored_scales": torch.int8}, DtypeError, "int8"),
        ({"scales": torch.ones(()), "stored_scales": torch.bfloat16}, DtypeError, "as integers"),
        ({"scales": torch.ones(ROWS, dtype=torch.uint8)}, DtypeError, "stored_scales="),
        ({"dim": 33}, ArgumentError, "between 1 and 32"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path, options, error, match):
    codes, _ = packed(ROWS, 32)

    with pytest.raises(error, match=match):
        table(saved(tmp_path, codes), stored=torch.float4_e2m1fn_x2, **options)


def test_packed_numbers_need_bytes(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 4), np.float32))

    with pytest.raises(DtypeError, match="integer dtype of 1 bytes"):
        table(tmp_path / "x.npy", stored=torch.float4_e2m1fn_x2)
