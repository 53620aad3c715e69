"""DeepSpeed's LoCo and qgZ: every array of every public case bit for bit, and what its domain leaves out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn.adapters.deepspeed import loco_quant_reduce, quant_reduce
from fn.adapters.deepspeed.loco import StoredError, reduce_tensor

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = {row["name"]: row for row in json.loads((GOLDEN / "index_loco.json").read_text())["cases"]}
LOCO = [name for name, row in CASES.items() if row["optimizer"] == "loco"]
QGZ = [name for name, row in CASES.items() if row["optimizer"] == "qgz"]
AXES = {"local_axis": "local", "node_axis": "node"}


def load(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return CASES[name], dict(np.load(GOLDEN / CASES[name]["file"]))


def on_grid(f, row, in_dims: Any = 0, out_dims: Any = 0):
    inner = fn.simulate(f, "local", row["local"], in_dims=in_dims, out_dims=out_dims)
    return fn.simulate(inner, "node", row["nodes"], in_dims=in_dims, out_dims=out_dims)


def gradients(row, arrays, step: int) -> list[torch.Tensor]:
    """Return (N, L, shape) for every tensor; rank n L + l is row (n, l)."""
    grid = (row["nodes"], row["local"])
    return [torch.from_numpy(arrays[f"p{i}.grad"][step]).unflatten(0, grid) for i in range(len(row["shapes"]))]


def by_rank(x: torch.Tensor) -> np.ndarray:
    return x.flatten(0, 1).numpy()


def groups(row, i: int) -> int:
    return max(*row["shapes"][i][:2], row["world"])


def same(found: torch.Tensor, arrays, name: str, step: int) -> None:
    recorded = arrays[name][step]
    ours = by_rank(found)
    assert ours.dtype == recorded.dtype, name
    assert ours.shape == recorded.shape, name
    assert np.array_equal(ours.view(np.uint8), recorded.view(np.uint8)), f"{name} in step {step}"


def test_the_cases_are_all_here():
    assert len(LOCO) == 7
    assert len(QGZ) == 1
    assert {(row["nodes"], row["local"]) for row in CASES.values()} == {(2, 2), (2, 1), (1, 4), (2, 4)}


@pytest.mark.parametrize("name", LOCO)
def test_loco_is_reproduced_bit_for_bit(name):
    """Results, stored errors, and by `reduce_tensor` what was sent and what was kept before it was stored."""
    row, arrays = load(name)
    hyper = {"err_beta": row["err_beta"], "reset_T": row["reset_T"], **AXES}
    first = partial(loco_quant_reduce, errors=None, **hyper)
    empty = StoredError(torch.zeros(0), torch.zeros(0))
    dims = fn.rank_dims(fn.adapters.deepspeed.LocoErrors(*[(empty,) * len(row["shapes"])] * 2, torch.zeros(())))
    errors: Any = None
    for step in range(row["steps"]):
        g, before = gradients(row, arrays, step), errors
        if errors is None:
            outputs, errors = on_grid(first, row, out_dims=(0, dims))(g)
        else:
            f = lambda g, e: loco_quant_reduce(g, e, **hyper)  # noqa: E731
            outputs, errors = on_grid(f, row, in_dims=(0, dims), out_dims=(0, dims))(g, errors)
        for i, out in enumerate(outputs):
            same(out, arrays, f"p{i}.out", step)
            for stage, stored in (("intra", errors.intra[i]), ("inter", errors.inter[i])):
                same(stored.codes, arrays, f"p{i}.{stage}_codes", step)
                same(stored.scales, arrays, f"p{i}.{stage}_scale", step)
            told = before is None or bool(arrays[f"p{i}.reset"][step])
            check_traffic(row, arrays, i, step, g[i], errors if told else before, told)


def check_traffic(row, arrays, i, step, g, errors, reset) -> None:
    def trace(g, e1, e2):
        known = [StoredError(e.codes, e.scales * (not reset)) for e in (e1, e2)]
        return reduce_tensor(g, groups(row, i), (known[0], known[1]), row["err_beta"], "local", "node")

    done = on_grid(trace, row)(g, errors.intra[i], errors.inter[i])
    for stage, wire, name in ((done.intra, "wire1", "intra"), (done.inter, "wire2", "inter")):
        same(stage.codes, arrays, f"p{i}.{wire}", step)
        same(stage.scales, arrays, f"p{i}.{wire}_scale", step)
        same(stage.kept, arrays, f"p{i}.{name}_half", step)


@pytest.mark.parametrize("name", QGZ)
def test_qgz_is_reproduced_bit_for_bit(name):
    row, arrays = load(name)
    for step in range(row["steps"]):
        g = gradients(row, arrays, step)
        for i, out in enumerate(on_grid(lambda g: quant_reduce(g, **AXES), row)(g)):
            same(out, arrays, f"p{i}.out", step)
            f = lambda g, i=i: reduce_tensor(g, groups(row, i), None, 0.0, "local", "node")  # noqa: E731
            done = on_grid(f, row)(g[i])
            for stage, wire in ((done.intra, "wire1"), (done.inter, "wire2")):
                same(stage.codes, arrays, f"p{i}.{wire}", step)
                same(stage.scales, arrays, f"p{i}.{wire}_scale", step)


def test_no_array_of_any_case_is_left_out():
    checked = {"grad", "out", "reset", "wire1", "wire1_scale", "wire2", "wire2_scale"}
    checked |= {f"{stage}_{kind}" for stage in ("intra", "inter") for kind in ("half", "codes", "scale")}
    for row in CASES.values():
        assert {name.split(".")[1] for name in row["arrays"]} <= checked


GRID = {"nodes": 2, "local": 2}


def test_what_is_not_quantised_there_is_the_exact_mean_here():
    """One dimension, or a numel that 2 W does not divide: part n L + l, zeros behind the end."""
    shapes = [(10,), (5, 3), (0, 4), ()]
    g = [torch.randn(2, 2, *shape).half() for shape in shapes]
    outputs, errors = on_grid(lambda g: loco_quant_reduce(g, **AXES), GRID)(g)
    plain = on_grid(lambda g: quant_reduce(g, **AXES), GRID)(g)
    for out, again, x in zip(outputs, plain, g, strict=True):
        mean = x.float().mean((0, 1)).flatten().half()
        found = out.flatten()
        assert torch.equal(found[: mean.shape[0]], mean)
        assert not found[mean.shape[0] :].any()
        assert torch.equal(out, again)
    assert all(e.codes.shape[-1] == 0 for e in (*errors.intra, *errors.inter))
    assert not errors.counter.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_are_reduced_in_their_own_precision(dtype):
    g = [torch.randn(2, 2, 16, 16).to(dtype)]
    (out,), errors = on_grid(lambda g: loco_quant_reduce(g, **AXES), GRID)(g)
    assert out.dtype == dtype
    sums = g[0].float().sum((0, 1)).flatten() / 2  # L times the mean
    assert (out.flatten().float() - sums).abs().max() < 1.5
    assert errors.intra[0].codes.any()


@pytest.mark.parametrize(
    ("hyper", "tensors", "kind", "text"),
    [
        ({"err_beta": 1.0}, [torch.ones(16, 16)], ValueError, r"^err_beta: .*got 1.0"),
        ({"reset_T": -1}, [torch.ones(16, 16)], ValueError, r"^reset_T: .*got -1"),
        ({}, [torch.ones(16, 16), torch.ones(6, 8)], ValueError, r"^tensors\[1\]: .*got 8 groups of 6 .*\(6, 8\)"),
        ({}, [torch.ones(10, 8)], ValueError, r"^tensors\[0\]: .*got 10 groups .*\(10, 8\)"),
        ({}, [torch.ones(16, 16, dtype=torch.int32)], TypeError, r"^tensors\[0\]: .*got torch.int32"),
    ],
)
def test_what_there_goes_wrong_in_silence_is_refused(hyper, tensors, kind, text):
    g = [t.expand(2, 2, *t.shape).contiguous() for t in tensors]
    with pytest.raises(kind, match=text):
        on_grid(lambda g: loco_quant_reduce(g, **AXES, **hyper), GRID)(g)


def test_errors_of_other_tensors_are_refused():
    def f(g):
        _, errors = loco_quant_reduce(g, **AXES)
        return loco_quant_reduce([g[0][:8]], errors, **AXES)

    with pytest.raises(ValueError, match=r"^errors: intra has codes of \[256\] elements.*need \[128\]"):
        on_grid(f, GRID)([torch.randn(2, 2, 16, 16).half()])


def replay(name: str) -> list[tuple[list[torch.Tensor], Any]]:
    row, arrays = load(name)
    hyper = {"err_beta": row["err_beta"], "reset_T": row["reset_T"], **AXES}
    found, errors = [], None
    with fn.bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))):
        for step in range(row["steps"]):
            rank = dist.get_rank()
            g = [torch.from_numpy(arrays[f"p{i}.grad"][step, rank]) for i in range(len(row["shapes"]))]
            outputs, errors = loco_quant_reduce(g, errors, **hyper)
            found.append((outputs, errors))
    return found


def test_two_nodes_of_two_processes_reproduce_a_case_bit_for_bit():
    name = "loco_n2l2_reset"
    _, arrays = load(name)
    for rank, steps in enumerate(ranks.run(4, replay, name)):
        for step, (outputs, errors) in enumerate(steps):
            for i, out in enumerate(outputs):
                assert np.array_equal(out.numpy(), arrays[f"p{i}.out"][step, rank])
                assert np.array_equal(errors.inter[i].codes.numpy(), arrays[f"p{i}.inter_codes"][step, rank])
                assert np.array_equal(errors.intra[i].codes.numpy(), arrays[f"p{i}.intra_codes"][step, rank])
