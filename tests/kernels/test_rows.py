"""The rows of torch, NumPy and Numba, and those of devices that are not here: they compute what the reference does."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import fn
from fn import kernels
from fn.kernels import bits, known_answers, reference
from fn.testing.kernels import small_arguments

SIZES = (0, 1, 7, 8, 9, 1023)


def test_the_numpy_row_conforms():
    assert fn.testing.conformance(bits.numpy("cpu"))


@pytest.mark.slow
def test_the_row_of_torchs_functions_of_lists_conforms(monkeypatch):
    from fn.kernels import foreach

    monkeypatch.setattr(foreach, "CHUNK_OF_CPU", 100)
    assert fn.testing.conformance(foreach.row("cpu"), sizes=SIZES)


@pytest.mark.slow
def test_the_functions_of_lists_of_accelerators_conform():
    from fn.kernels import foreach

    kinds = {f.__name__: f for f in foreach.ON_ACCELERATORS}
    row = kernels.Accelerator("cpu", kinds, provider="torch")
    assert fn.testing.conformance(row, sizes=(0, 9, 1023))
    for name, kernel in kinds.items():
        assert known_answers.complaint(name, kernel, torch.device("cpu")) is None
        empty = [[torch.zeros(0)] if isinstance(a, list) else a for a in known_answers.examples(name)[0]]
        assert kernel(*empty) is NotImplemented


@pytest.mark.slow
def test_the_numba_row_conforms(monkeypatch):
    """The longest rows are several blocks, and go past what passes for the cache."""
    pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    from fn.kernels.cpu import blocks, numba

    monkeypatch.setattr(blocks, "LARGER_THAN_CACHE", 20_000)
    assert fn.testing.conformance(numba.row("cpu"), sizes=(*SIZES, 20_003))


@pytest.mark.slow
@pytest.mark.parametrize("op", kernels.reference.REFERENCES)
def test_an_op_is_traced_with_dynamic_shapes(op):
    """The part of torch's checks of ops that does not depend on the row, and that the kit therefore leaves to us."""
    (args, *_) = small_arguments(op)
    torch.library.opcheck(getattr(torch.ops.fn, op).default, args, test_utils="test_aot_dispatch_dynamic")


def test_the_sign_kernels_of_torch_npu_are_called_as_documented(monkeypatch):
    library = types.ModuleType("torch_npu")

    def pack(x, size):
        assert x.dtype == torch.float32
        assert x.shape[0] % 8 == 0
        return reference.codes.pack_bits(x.view(1, -1)).view(size, -1)

    def unpack(bits, size, dtype):
        return reference.codes.unpack_bits(bits.view(1, -1), bits.numel() * 8, dtype).view(size, -1)

    monkeypatch.setattr(library, "npu_sign_bits_pack", pack, raising=False)
    monkeypatch.setattr(library, "npu_sign_bits_unpack", unpack, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    row = bits.npu("npu")
    for op in row.kernels:
        assert known_answers.complaint(op, row.kernels[op], torch.device("cpu")) is None
    assert fn.testing.conformance(row._replace(device_type="cpu"), sizes=(0, 1, 9, 1023))
    assert row.communication_backend == "hccl"


def test_intel_gpus_communicate_over_native_torch_xpu():
    assert kernels.communication_backend("xpu") == "xccl"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_cupy_row_conforms_on_the_gpu():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    assert fn.testing.conformance(bits.cupy("cuda"))
