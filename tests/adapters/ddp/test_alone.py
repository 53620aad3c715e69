"""A model that communicates in its backward pass, beside the thread that sends its gradients."""

from __future__ import annotations

import pytest
import torch

from fn.adapters.ddp.data_parallel import check_alone

NORMALISED = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))


def test_over_nccl_it_is_refused_by_the_name_of_its_layer():
    with pytest.raises(ValueError, match=r"over nccl in its backward pass, but got SyncBatchNorm '1'; use"):
        check_alone(NORMALISED, "nccl")


def test_over_gloo_it_is_not_for_its_exchanges_do_not_wait_on_a_device():
    check_alone(NORMALISED, "gloo")


def test_a_model_that_says_nothing_is_no_danger():
    check_alone(torch.nn.Linear(2, 2), "nccl")
