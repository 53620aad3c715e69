"""Parameters as views of flat buffers: the same values and gradients, and no more memory than promised."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from ledger_device import LedgerDevice
from torch import nn

import fn
from fn.adapters.flatten import FlatParameters

BF16 = torch.bfloat16


def memory(p):
    return p.untyped_storage()._cdata


def same(a, b):
    return a.dtype == b.dtype and (a.stride() == b.stride() or not a.numel()) and torch.equal(a, b)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))


@st.composite
def parameters(draw):
    """Parameters of all kinds: any shape, dense or not, frozen or not, in several dtypes."""
    found = []
    for shape in draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6)):
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64]))
        x = torch.randn([2 * n for n in shape]).mul(9).to(dtype)
        form = draw(st.sampled_from(["dense", "transposed", "gaps", "slice"]))
        if form == "transposed":
            x = x.permute(list(reversed(range(x.ndim))))
        elif form == "gaps":
            x = x[tuple(slice(None, None, 2) for _ in shape)]
        elif form == "slice" and shape:
            x = x[shape[0] :]
        found.append(nn.Parameter(x, requires_grad=draw(st.booleans()) and dtype.is_floating_point))
    return found


@given(parameters(), st.sampled_from([None, BF16, torch.float64]), st.booleans())
def test_values_stay_and_the_way_back_restores_dtypes_and_strides(params, dtype, gradients):
    before = [p.detach().clone() for p in params]
    needs = [p.requires_grad for p in params]
    flat = fn.flatten_parameters(params, dtype, gradients=gradients)
    for p, old in zip(params, before, strict=True):
        target = dtype if dtype is not None and old.is_floating_point() else old.dtype
        assert p.is_contiguous()
        assert p.dtype == target
        assert memory(p) == memory(flat.buffers[target, p.device])
        assert torch.equal(p, old.to(target))
        assert (p.grad is not None) == (gradients and p.requires_grad)
    assert [p.requires_grad for p in params] == needs
    assert len(flat.buffers) == len({p.dtype for p in params})
    flat.restore()
    for p, old in zip(params, before, strict=True):
        target = dtype if dtype is not None and old.is_floating_point() else old.dtype
        assert same(p.detach(), old.to(target).to(old.dtype))
    assert len({memory(p) for p in params if p.numel()}) == sum(p.numel() > 0 for p in params)
    assert flat.buffers == flat.gradients == {}


def test_a_tied_module_has_one_piece_and_one_gradient():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    flat = fn.flatten_parameters(model, None, gradients=True)
    model(torch.ones(1, 4)).sum().backward()
    assert flat.gradients[torch.float32, torch.device("cpu")].shape == (16,)
    assert model[1].weight is model[0].weight
    assert model[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_is_bitwise_the_same_with_accumulated_gradients(set_to_none):
    models = [net(), net()]
    flat = fn.flatten_parameters(models[1], None, gradients=True)
    opts = [fn.Optimizer(model.parameters(), partial(fn.adamw, axis="data"), lr=0.1) for model in models]
    for _ in range(4):
        x = torch.randn(2, 8, 5)
        for model, opt in zip(models, opts, strict=True):
            for half in x:
                model(half).square().mean().backward()
            opt.step()
        opts[0].zero_grad()
        if set_to_none:
            opts[1].zero_grad()  # drops the views, which come back below
        flat.zero_grad()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
        assert memory(q.grad) == memory(flat.gradients[torch.float32, q.device])
        assert not q.grad.any()


def test_gradients_that_exist_are_kept():
    params = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(1))]
    for p in params[:2]:
        p.grad = torch.randn(p.shape)
    before = [p.grad.clone() for p in params[:2]]
    for gradients in (False, True):
        flat = fn.flatten_parameters(params, gradients=gradients)
        assert all(torch.equal(p.grad, g.to(BF16)) for p, g in zip(params, before, strict=False))
        assert (params[2].grad is None) == (not gradients)
        flat.restore()
        assert all(torch.equal(p.grad, g.to(BF16).float()) for p, g in zip(params, before, strict=False))
    assert memory(params[0].grad) != memory(params[1].grad)


SIZES = [(64, 33), (5,), (0, 3), (1000,), (40, 40), ()]


@pytest.mark.parametrize("old", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [torch.bfloat16, torch.float32, None])
def test_a_device_holds_no_more_than_the_larger_form_and_the_largest_parameter(old, new):
    """And is enough: torch refuses to give its parameters memory of the host, which DeepSpeed does first.

    Differs: fn.adapters.flatten.flatten_parameters: DeepSpeed gives parameters host memory on the way, which
        only CUDA and the CPU allow, and does not undo.
    """
    values = [torch.randn(size).to(old) for size in SIZES]
    with LedgerDevice() as device:
        forms = [x.t() if x.ndim == 2 else x for x in values]
        params = [nn.Parameter(device.put(x), requires_grad=i != 3) for i, x in enumerate(forms)]
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            params[0].data = torch.zeros(forms[0].shape, dtype=old)
        model, largest = device.live, max(x.nbytes for x in values)
        flat = FlatParameters(params, new, False)
        buffers = sum(b.nbytes for b in flat.buffers.values())
        assert device.live == buffers == sum(x.numel() for x in values) * (new or old).itemsize
        assert device.peak <= max(model, buffers) + largest
        for p, x in zip(params, forms, strict=True):
            assert p.is_meta
            assert torch.equal(device.values(p), x.to(new or old))
        device.peak = device.live
        flat.restore()
        assert device.live == model
        assert device.peak <= max(model, buffers) + largest
        for p, x in zip(params, forms, strict=True):
            assert torch.equal(device.values(p), x.to(new or old).to(old))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_gpu_holds_no_more_than_the_larger_form_and_the_largest_parameter(dtype):
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    params = [nn.Parameter(torch.randn(1 << 20, device="cuda").view(1024, 1024).t()) for _ in range(8)]
    values = [p.detach().cpu() for p in params]
    torch.cuda.reset_peak_memory_stats()
    flat = fn.flatten_parameters(params, dtype)
    (buffer,) = flat.buffers.values()
    assert torch.cuda.memory_allocated() - base == buffer.nbytes
    assert torch.cuda.max_memory_allocated() - base <= max(8 << 22, buffer.nbytes) + (1 << 22)
    assert all(torch.equal(p.cpu(), x.to(dtype)) for p, x in zip(params, values, strict=True))
    flat.restore()
    assert all(torch.equal(p.cpu(), x.to(dtype).float()) for p, x in zip(params, values, strict=True))


TIED = torch.zeros(4)


@pytest.mark.parametrize(
    ("params", "options", "error", "says"),
    [
        (lambda: [torch.randn(3), torch.ones(2, requires_grad=True) * 2], {}, ValueError, "1 .* was computed"),
        (lambda: [torch.randn(3, device="meta")], {}, ValueError, "parameter 0 is on the meta device"),
        (lambda: [torch.randn(3).to_sparse()], {}, TypeError, "parameter 0 .*got Tensor, torch.sparse_coo"),
        (lambda: [torch.randn(3), 4], {}, TypeError, "parameter 1 .*got int"),
        (lambda: [torch.randn(3)], {"dtype": torch.int8}, TypeError, "dtype: .*got torch.int8"),
        (lambda: [TIED[:3], torch.randn(2), TIED[2:]], {}, ValueError, "got one for 0 and 2; to tie them"),
        (lambda: [TIED[3:].view(torch.int32), TIED], {}, ValueError, "got one for 0 and 1; to tie them"),
    ],
)
def test_what_cannot_be_flattened_is_refused_and_left_alone(params, options, error, says):
    given = params()
    datas = [p.data_ptr() for p in given if isinstance(p, torch.Tensor) and not p.is_sparse]
    with pytest.raises(error, match=says):
        fn.flatten_parameters(given, **options)
    assert [p.data_ptr() for p in given if isinstance(p, torch.Tensor) and not p.is_sparse] == datas


def test_what_was_moved_or_restored_is_not_restored():
    model = net()
    flat = fn.flatten_parameters(model)
    model.double()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="parameter 0 is not a view"):
        flat.restore()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    other = fn.flatten_parameters(model)
    other.restore()
    with pytest.raises(ValueError, match="parameter 0 is not a view"):
        other.restore()
