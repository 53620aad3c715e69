"""A model that communicates in its backward pass, beside the thread that sends its gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.tensor import DTensor, Replicate

import fn
from fn.adapters.ddp.data_parallel import check_alone

NORMALISED = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))


def test_over_nccl_it_is_refused_by_the_name_of_its_layer():
    with pytest.raises(ValueError, match=r"over nccl in its backward pass, but got SyncBatchNorm '1'; use"):
        check_alone(NORMALISED, "nccl")


def test_over_gloo_it_is_not_for_its_exchanges_do_not_wait_on_a_device():
    check_alone(NORMALISED, "gloo")


def test_a_model_that_says_nothing_is_no_danger():
    check_alone(torch.nn.Linear(2, 2), "nccl")


def test_a_single_queue_of_a_device_is_refused_over_nccl_only(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    wanted = "more than 1 where fn communicates over nccl behind the backward pass, but got 1; with one connection"
    with pytest.raises(ValueError, match=f"CUDA_DEVICE_MAX_CONNECTIONS: expected to be {wanted}"):
        check_alone(torch.nn.Linear(2, 2), "nccl")
    check_alone(torch.nn.Linear(2, 2), "gloo")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    check_alone(torch.nn.Linear(2, 2), "nccl")


def overlapped_dtensors() -> str:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False))
    model[1].weight = torch.nn.Parameter(DTensor.from_local(model[1].weight.detach(), mesh, [Replicate()]))
    with fn.bind(mesh):
        opt = fn.Optimizer(model[0].parameters(), partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_after(9))
    try:
        fn.adapters.ddp.overlap(model, opt)
    except TypeError as error:
        return str(error)
    return "taken"


def test_a_dtensor_is_refused_by_its_name_before_anything_is_sent():
    (said,) = {*run(2, overlapped_dtensors)}
    wanted = "model: expected a model of whole tensors, whose gradients nobody else reduces, but got the parameter "
    assert said.startswith(f"{wanted}'1.weight', a DTensor on ")
    assert said.endswith("; use fn.adapters.fsdp.compress, which sends them in codes behind the backward pass")
