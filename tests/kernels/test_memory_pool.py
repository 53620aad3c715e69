"""Leased buffers: ordinary tensors whose memory comes back."""

from __future__ import annotations

import gc
import io
import pickle
import threading

import pytest
import torch

from fn.kernels import memory_pool

CPU = torch.device("cpu")
LARGE = (3, 1 << 20)


@pytest.fixture(autouse=True)
def _empty_pool():
    memory_pool.clear()
    yield
    memory_pool.clear()


def test_memory_comes_back_when_the_last_view_dies_and_serves_the_next_lease():
    x = memory_pool.empty(LARGE, torch.float32, CPU)
    address, view = x.data_ptr(), x[1:]
    del x
    assert memory_pool.free_bytes() == 0
    del view
    assert memory_pool.free_bytes() == 3 * 4 << 20
    assert memory_pool.empty(LARGE, torch.float32, CPU).data_ptr() == address


def test_the_tensors_are_ordinary():
    x = memory_pool.empty(LARGE, torch.float32, CPU).fill_(2)
    assert x.is_contiguous()
    assert x.data_ptr() % 64 == 0
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file), x)
    y = x.clone().share_memory_()
    assert torch.equal(x.share_memory_(), y)
    x = memory_pool.empty(LARGE, torch.float32, CPU).requires_grad_()
    x.sum().backward()
    assert x.grad is not None


def test_threads_never_share_a_block():
    faults = []

    def work(value):
        for _ in range(50):
            x = memory_pool.empty((1 << 18,), torch.float32, CPU).fill_(value)
            if not bool((x == value).all()):
                faults.append(value)

    threads = [threading.Thread(target=work, args=(float(k),)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults
    gc.collect()
    assert memory_pool.free_bytes() <= 2 * 4 * 4 << 18  # each thread holds one, and asks for the next


def test_a_kernel_allocates_nothing_in_steady_state():
    pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    n = 1 << 19
    x, valid = torch.randn(1, n), torch.tensor([[n]])
    error, sent = torch.zeros(1, n), torch.zeros(1, 1)
    seen = set()
    for _ in range(6):
        error, _, _ = torch.ops.fn.sign_encode_feedback(x, error, sent, valid, [1, n], 0)
        seen.add(error.data_ptr())
    assert len(seen) == 2
