"""The names and schemas of all kernels; `reference` says what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_SEGMENTS = "Tensor valid, int[] runs"
_SIGNS = f"{_SEGMENTS}, int block"
_DESCENT = "float eps, float weight_decay, float lr, float max_step"

SCHEMAS: Mapping[str, str] = MappingProxyType(
    {
        "pack_bits": "(Tensor x) -> Tensor",
        "unpack_bits": "(Tensor bits, int n, ScalarType dtype) -> Tensor",
        "sign_encode": f"(Tensor x, {_SIGNS}) -> (Tensor, Tensor)",
        "sign_encode_feedback": f"(Tensor x, Tensor buffer, Tensor sent, {_SIGNS}) -> (Tensor, Tensor, Tensor)",
        "sign_encode_feedback_": f"(Tensor(a!) x, Tensor buffer, Tensor sent, {_SIGNS}) -> (Tensor, Tensor)",
        "sign_residual": f"(Tensor b, Tensor scales, {_SIGNS}) -> Tensor",
        "sign_residual_": f"(Tensor(a!) b, Tensor scales, {_SIGNS}) -> ()",
        "sign_serve": f"(Tensor bits, Tensor scales, Tensor buffer, Tensor sent, {_SIGNS}) -> "
        "(Tensor, Tensor, Tensor)",
        "sign_decode_mean": f"(Tensor bits, Tensor scales, {_SIGNS}) -> Tensor",
        "quantize": f"(Tensor x, {_SEGMENTS}, int width) -> (Tensor, Tensor)",
        "quantize_feedback": f"(Tensor x, Tensor error, Tensor error_scales, float beta, {_SEGMENTS}, int width) -> "
        "(Tensor, Tensor, Tensor, Tensor)",
        "dequantize_mean": f"(Tensor codes, Tensor scales, {_SEGMENTS}, int width) -> Tensor",
        "quantize_fp8": f"(Tensor x, {_SEGMENTS}, int mantissa) -> (Tensor, Tensor)",
        "dequantize_fp8": f"(Tensor codes, Tensor scales, {_SEGMENTS}, int mantissa) -> Tensor",
        "momentum_encode": f"(Tensor[] mu, Tensor[] grads, float decay, Tensor buffer, Tensor sent, {_SIGNS}) -> "
        "(Tensor, Tensor, Tensor)",
        "momentum_rows": "(Tensor[] mu, Tensor[] grads, float decay, Tensor? factors, int rows, int[] runs) -> Tensor",
        "drift": "(Tensor[] params, Tensor[] anchors, Tensor[] mu, Tensor[] grads, Tensor[] nu, float decay, "
        "float eps, float lr, int rows, int[] runs) -> Tensor",
        "onebit_adam_": f"(Tensor(a!)[] params, Tensor(b!)[] mu, Tensor[] nu, Tensor bits, Tensor scales, {_SIGNS}, "
        f"{_DESCENT}, bool keep_zeros, Tensor(c!)[] copies) -> ()",
        "adamw_": "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] mu, Tensor(c!)[] nu, float b1, float b2, "
        f"{_DESCENT}, bool frozen) -> ()",
        "onebit_lamb_moments_": "(Tensor[] params, Tensor[] averages, Tensor scaling, Tensor(a!)[] mu, Tensor[] nu, "
        "Tensor(b!)[] fresh, float b1, float b2, float eps, float weight_decay, float max_step) -> Tensor",
        "lamb_step_": "(Tensor(a!)[] params, Tensor[] mu, Tensor[] nu, Tensor rates, float eps, float weight_decay, "
        "float max_step) -> ()",
        "largest_magnitude": "(Tensor[] grads) -> Tensor",
        "elementwise_": "(str rule, Tensor(a!)[] results, Tensor[] operands, Tensor[] scalars, int[] places, "
        "float[] numbers) -> ()",
        "sums_of_squares": "(Tensor[] tensors) -> Tensor",
        "adamw_into_": f"(Tensor(a!)[] new, Tensor[] rows, Tensor[] old, float b1, float b2, {_DESCENT}, "
        "bool frozen) -> Tensor",
    }
)
"""Every kernel by name, with its schema."""

_ARGUMENTS = {name: schema[1 : schema.rindex(") ->")].split(", ") for name, schema in SCHEMAS.items()}

ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: tuple(argument.split()[-1] for argument in arguments) for name, arguments in _ARGUMENTS.items()}
)
"""The names of a kernel's arguments."""

DECODING = ("sign_decode_mean", "dequantize_mean", "dequantize_fp8", "elementwise_")
"""Kernels whose results all ranks must have alike: a mean of what they sent each other, and how it moves them."""

WRITTEN: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {name: tuple(i for i, a in enumerate(arguments) if "!" in a) for name, arguments in _ARGUMENTS.items()}
)
"""The positions of the arguments that a kernel writes."""

ON_LISTS = tuple(name for name, arguments in _ARGUMENTS.items() if any("Tensor" in a and "[] " in a for a in arguments))
"""Kernels on lists of tensors, a step of an optimizer at a time.

They, and those with a trailing underscore, which write in place, serve owners of buffers and never a simulation: under
`vmap` they raise.
"""
