"""Quantised tables of checkpoints, as the tools that make them name and shape their tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

from flashwarp.errors import ArgumentError, DtypeError, FileFormatError
from flashwarp.torch import offload
from support.safetensors_files import save

ROWS, DIM = 300, 192
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def model(dtype=torch.float32):
    with torch.device("meta"):
        made = nn.ModuleDict({"table": nn.Embedding(ROWS, DIM, dtype=dtype)})
    return made.eval()


def rows_of(path, dtype=torch.float32):
    """All rows that the offloaded table looks up."""
    made = model(dtype)
    with offload(made, "table", path, device="cpu", host_memory="1 MiB", gpu_memory="1 MiB"):
        return made["table"](torch.arange(ROWS))


def packed(rows=ROWS):
    codes = torch.randint(0, 256, (rows, DIM // 2), dtype=torch.uint8)
    return codes, VALUES[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(1)


def e4m3(rows=ROWS):
    return (torch.rand(rows, DIM // 16) * 4 + 0.1).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["weight", "weight_packed"])
def test_nvfp4(tmp_path, name, dtype):
    """As ModelOpt and vLLM multiply by the factor, and compressed-tensors divides by it."""
    codes, values = packed()
    scales = e4m3()
    each = scales.float().repeat_interleave(16, 1)
    factor = "weight_scale_2" if name == "weight" else "weight_global_scale"
    number = torch.tensor([0.017]) if name == "weight" else torch.tensor([1234.5])
    expected = values * each * number if name == "weight" else values * (each / number)

    path = save(tmp_path / "x.safetensors", {f"table.{name}": codes, "table.weight_scale": scales,
                           f"table.{factor}": number})  # fmt: skip

    assert torch.equal(rows_of(path, dtype), expected.to(dtype))


def test_mxfp4(tmp_path):
    codes, values = packed()
    scales = torch.randint(110, 140, (ROWS, DIM // 32), dtype=torch.uint8)
    expected = values * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)

    for held in (scales, scales.view(torch.float8_e8m0fnu)):
        path = save(
            tmp_path / "x.safetensors", {"table.weight_packed": codes, "table.weight_scale": held}
        )
        assert torch.equal(rows_of(path), expected)


def test_numbers_of_four_bits_with_a_shape_of_numbers(tmp_path):
    """The format's own F4 counts numbers, not bytes."""
    codes, values = packed()
    scales = e4m3()
    expected = values * scales.float().repeat_interleave(16, 1) * 0.5

    path = save(
        tmp_path / "x.safetensors",
        {"table.weight": codes, "table.weight_scale": scales,
         "table.weight_scale_2": torch.tensor(0.5)},
        {"table.weight": ("F4", [ROWS, DIM])},
    )  # fmt: skip

    assert torch.equal(rows_of(path), expected)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("parts", [[ROWS], [128, ROWS - 128], [256, 44]])
def test_blocks_of_rows_and_columns(tmp_path, stored, parts):
    weight = (torch.randn(ROWS, DIM) * 5).to(stored)
    scales = torch.rand(3, 2)
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:ROWS, :DIM]
    tensors = {}
    for number, part in enumerate(weight.split(parts)):
        base = f"table.shard_{number}." if len(parts) > 1 else "table."
        first = sum(parts[:number]) // 128
        tensors[base + "weight"] = part
        tensors[base + "weight_scale_inv"] = scales[first : first + -(-len(part) // 128)]

    assert torch.equal(rows_of(save(tmp_path / "x.safetensors", tensors)), weight.float() * each)


def test_parts_of_packed_tables_have_one_factor(tmp_path):
    codes, values = packed()
    scales = e4m3()
    each = scales.float().repeat_interleave(16, 1)

    def tensors(*numbers):
        made = {}
        for i, rows in enumerate([slice(0, 100), slice(100, ROWS)]):
            made[f"table.shard_{i}.weight"] = codes[rows]
            made[f"table.shard_{i}.weight_scale"] = scales[rows]
            made[f"table.shard_{i}.weight_scale_2"] = torch.tensor(numbers[i])
        return made

    assert torch.equal(
        rows_of(save(tmp_path / "x.safetensors", tensors(0.25, 0.25))), values * each * 0.25
    )
    with pytest.raises(FileFormatError, match="2 different factors"):
        rows_of(save(tmp_path / "x.safetensors", tensors(0.25, 0.5)))


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        ({}, DtypeError, "no scales"),
        ({"weight_scale": e4m3()}, FileFormatError, "neither weight_scale_2 nor"),
        ({"weight_scale": e4m3(), "weight_scale_2": torch.ones(2)}, FileFormatError, "one number"),
        ({"weight_scale": e4m3().double()}, DtypeError, "scales must be"),
        ({"weight_scale": e4m3(ROWS - 1), "weight_scale_2": torch.ones(1)}, FileFormatError, "row"),
        (
            {"weight_scale": e4m3(), "weight_scale_2": torch.ones(1),
             "weight_global_scale": torch.ones(1)},
            FileFormatError, "2 different factors",
        ),
        ({"weight_scale": e4m3(), "scale": e4m3()}, ArgumentError, "could have the scales"),
    ],
)  # fmt: skip
def test_packed_tables_that_are_incomplete_are_refused(tmp_path, tensors, error, match):
    codes, _ = packed()
    named = {f"table.{name}": tensor for name, tensor in tensors.items()}

    with pytest.raises(error, match=match):
        rows_of(save(tmp_path / "x.safetensors", {"table.weight": codes, **named}))


def test_packed_rows_of_another_width_are_refused(tmp_path):
    codes, _ = packed()

    with pytest.raises(FileFormatError, match="has not rows of 192 elements"):
        rows_of(
            save(
                tmp_path / "x.safetensors",
                {"table.weight": codes[:, :-1], "table.weight_scale": e4m3()},
            )
        )
