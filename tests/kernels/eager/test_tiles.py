"""Codes by torch functions, tile by tile, are the reference's: however rows and segments are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fn.kernels import reference
from fn.kernels.eager import tiled_ints, tiled_signs, tiles

DTYPES = (torch.float32, torch.float64)


def draw(rows: int, runs: list[int], dtype: torch.dtype, ranks: int) -> dict[str, Tensor]:
    """Return arguments by name; the first row has no padding, others more or less of it."""
    seeded = torch.Generator().manual_seed(sum(runs) + rows)
    widths = torch.tensor([w for c, w in zip(runs[::2], runs[1::2], strict=True) for _ in range(c)]).long()
    n, segments = reference.row_length(runs), len(widths)
    valid = (torch.rand((rows, segments), generator=seeded) * (widths + 1)).long()
    valid[:1] = widths
    x, buffer = (torch.randn((rows, n), generator=seeded, dtype=dtype) for _ in range(2))
    x[:, :3], buffer[:, 1:4] = -0.0, -0.0
    sent = torch.rand((rows, segments), generator=seeded, dtype=dtype)
    bits = torch.randint(0, 256, (rows, ranks, reference.bytes_for(n)), dtype=torch.uint8, generator=seeded)
    scales = torch.rand((rows, ranks, segments), generator=seeded, dtype=dtype)
    return {"x": x, "buffer": buffer, "sent": sent, "bits": bits, "scales": scales, "valid": valid}


def check(rows: int, runs: list[int], dtype: torch.dtype, ranks: int = 2) -> None:
    """Hold every kernel against its reference: results and what is written are equal, sums but for rounding."""
    a = draw(rows, runs, dtype, ranks)
    of = {
        "sign_encode": (a["x"],),
        "sign_encode_feedback": (a["x"], a["buffer"], a["sent"]),
        "sign_encode_feedback_": (a["x"], a["buffer"], a["sent"]),
        "sign_residual": (a["x"], a["sent"]),
        "sign_residual_": (a["x"], a["sent"]),
        "sign_serve": (a["bits"], a["scales"], a["buffer"], a["sent"]),
        "sign_decode": (a["bits"][:, 0], a["scales"][:, 0]),
        "sign_decode_mean": (a["bits"], a["scales"]),
    }
    assert of.keys() == tiled_signs.KERNELS.keys()
    for name, args in of.items():
        theirs, ours = [t.clone() for t in args], [t.clone() for t in args]
        expected = getattr(reference, name)(*theirs, a["valid"], runs)
        found = tiled_signs.KERNELS[name](*ours, a["valid"], runs)
        expected, found = ([*(r if isinstance(r, tuple) else (r,))] for r in (expected, found))
        if "encode" in name or "serve" in name:
            torch.testing.assert_close(found.pop(), expected.pop(), rtol=1e-6, atol=0.0)
        for one, other in zip([*found, *ours], [*expected, *theirs], strict=True):
            assert (one is None and other is None) or torch.equal(one, other), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "runs", [[], [1, 0], [1, 5], [3, 7, 1, 13], [1, 70001], [2, 70000, 5, 8], [1000, 1024], [0, 8, 1, 8]]
)
def test_signs_by_tiles_are_the_references(runs, dtype):
    for rows in (1, 3):
        check(rows, runs, dtype)


def test_a_buffer_that_was_sent_with_scale_zero_is_an_error():
    a = draw(2, [3, 40], torch.float32, 1)
    args = a["x"], a["buffer"], torch.zeros_like(a["sent"]), a["valid"], [3, 40]
    for found, expected in zip(
        tiled_signs.sign_encode_feedback(*args), reference.sign_encode_feedback(*args), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9000)), max_size=3).map(lambda pairs: [*sum(pairs, ())])


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 4), runs=RUNS, ranks=st.integers(1, 3), dtype=st.sampled_from(DTYPES))
def test_small_tiles_change_nothing(rows, runs, ranks, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", 4096)
        check(rows, runs, dtype, ranks)


def check_ints(rows: int, runs: list[int], dtype: torch.dtype, width: int, spoil: float | None = None) -> None:
    """Hold every integer kernel against its reference: all is equal."""
    a = draw(rows, runs, torch.float32 if dtype.itemsize == 2 else dtype, 2)
    x, valid, sent = a["x"].to(dtype), a["valid"], a["sent"]
    x[:, 4:7] = 0.0
    if spoil is not None:
        x[:, -1:] = spoil
    n = x.shape[1]
    seeded = torch.Generator().manual_seed(n)
    error = torch.randint(-128, 128, (rows, n), dtype=torch.int8, generator=seeded)
    codes = torch.randint(-128, 128, (rows, 2, n * width // 8), dtype=torch.int8, generator=seeded)
    codes = codes.view(torch.uint8) if width == 4 else codes
    of = {
        "quantize": (x, valid, runs, width),
        "quantize_feedback": (x, error, sent, 0.8, valid, runs, width),
        "dequantize": (codes[:, 0], a["scales"][:, 0], valid, runs, width),
        "dequantize_mean": (codes, a["scales"], valid, runs, width),
    }
    assert of.keys() == tiled_ints.KERNELS.keys()
    for name, args in of.items():
        expected, found = getattr(reference, name)(*args), tiled_ints.KERNELS[name](*args)
        for one, other in zip(*([r] if isinstance(r, Tensor) else r for r in (found, expected)), strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True, msg=name)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("spoil", [None, float("nan"), float("inf"), -float("inf"), 1e-44])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_integers_by_tiles_are_the_references(dtype, width, spoil):
    for runs in ([], [1, 6], [3, 7, 1, 13], [300, 256, 1, 40], [0, 8, 2, 8]):
        for rows in (1, 3):
            check_ints(rows, runs, dtype, width, spoil)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 4), runs=RUNS, width=st.sampled_from([4, 8]), dtype=st.sampled_from(DTYPES))
def test_small_tiles_change_no_integers(rows, runs, width, dtype):
    runs = [min(v, 700) for v in runs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", 1024)
        check_ints(rows, [*runs, 1, reference.row_length(runs) % 2], dtype, width)


def test_a_segment_wider_than_a_tile_is_left_to_the_next_row():
    args = torch.ones(1, tiles.TILE + 8), torch.full((1, 1), tiles.TILE + 8), [1, tiles.TILE + 8], 8
    assert tiled_ints.quantize(*args) is NotImplemented
