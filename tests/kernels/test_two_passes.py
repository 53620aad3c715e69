"""Codes first, the error later: the two passes compute what the one pass does, every bit of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fn.kernels import ops

RUNNERS = {"kernels": ops.direct, "references": lambda op, *args: ops.REFERENCES[op](*args)}
DESCENT = (1e-6, 0.1, 1e-2, 0.5, 0.25)

sizes = st.lists(st.integers(0, 300) | st.sampled_from([4096, 4097, 16392]), min_size=1, max_size=4)
seeds = st.integers(0, 2**31)


def rows(sizes, ranks, padding_counts):
    """Return valid and runs of tensors laid out for so many ranks."""
    widths = [-(-n // (ranks * 8)) * 8 for n in sizes]
    valid = [[w if padding_counts else min(max(n - r * w, 0), w) for n, w in zip(sizes, widths, strict=True)]
             for r in range(ranks)]  # fmt: skip
    return torch.tensor(valid), [x for w in widths for x in (1, w)]


def same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("runner", RUNNERS)
@given(
    sizes, st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.9, 0.3, 0.0]), st.booleans(), st.booleans(), seeds
)
def test_of_a_worker(runner, sizes, ranks, messages, decay, padding_counts, keep_zeros, seed):
    run, g = RUNNERS[runner], torch.Generator().manual_seed(seed)
    valid, runs = rows(sizes, ranks, padding_counts)
    params, mu, nu, grads = ([torch.randn(n, generator=g) for n in sizes] for _ in range(4))
    nu = [v.clamp(min=0) for v in nu]
    error = torch.randn(ranks, sum(runs[1::2]), generator=g)
    scales, mean = torch.rand(valid.shape, generator=g), torch.rand((ranks, messages, len(sizes)), generator=g)
    theirs = torch.randint(0, 256, (ranks, messages, error.shape[1] // 8), dtype=torch.uint8, generator=g)
    b, *codes = run("momentum_encode", mu, grads, decay, error, torch.zeros_like(scales), valid, runs)
    same_bits(run("momentum_signs", mu, grads, decay, error, valid, runs), codes)
    message = theirs, mean, valid, runs, *DESCENT, keep_zeros
    once, again = ([[x.clone() for x in tensors] for tensors in (params, mu)] for _ in range(2))
    run("sign_residual_", b, scales, valid, runs)
    run("onebit_adam_", *once, nu, *message, [])
    run("onebit_adam_feedback_", *again, nu, grads, decay, error, scales, *message)
    same_bits([error, *again[0], *again[1]], [b, *once[0], *once[1]])


@pytest.mark.parametrize("runner", RUNNERS)
@given(sizes, st.integers(1, 4), st.booleans(), seeds)
def test_of_a_server(runner, sizes, ranks, padding_counts, seed):
    run, g = RUNNERS[runner], torch.Generator().manual_seed(seed)
    valid, runs = rows(sizes, 2, padding_counts)
    error, sent = torch.randn(2, sum(runs[1::2]), generator=g), torch.rand(valid.shape, generator=g)
    bits = torch.randint(0, 256, (2, ranks, error.shape[1] // 8), dtype=torch.uint8, generator=g)
    scales = torch.rand((2, ranks, valid.shape[1]), generator=g)
    b, *codes = run("sign_serve", bits, scales, error, torch.zeros_like(sent), valid, runs)
    same_bits(run("serve_signs", bits, scales, error, valid, runs), codes)
    run("sign_residual_", b, sent, valid, runs)
    run("serve_feedback_", error, bits, scales, sent, valid, runs)
    same_bits([error], [b])
