"""`torch.nn.parallel.DistributedDataParallel`, with the communication of `fn`.

    model = DistributedDataParallel(model)
    opt = fn.adapters.ddp.optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(1000), lr=1e-3)

DDP then sends nothing: the optimizer does, behind the backward pass. `keep_local` and `overlap` are the parts of it,
for an optimizer that is made elsewhere; `overlap` takes a model without DDP, too, and then no gradient is copied.
`average_gradients` averages gradients in codes for any optimizer.
"""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from fn.adapters.ddp.backward_pass import BucketGradients, DdpHook, GradientHooks
from fn.adapters.ddp.buckets import bucketed, enough, split
from fn.adapters.ddp.gradient_averaging import GradientAverage, coded_average
from fn.adapters.ddp.overlapped import Overlap
from fn.adapters.labels import labels_of
from fn.adapters.optim.core import land
from fn.adapters.optim.groups import check_make
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.shards import is_dtensor
from fn.arguments import checked
from fn.base import Phase, Transform, chain
from fn.collectives.agreement import check_agreement, describe
from fn.collectives.axis import ALONE, bind, ranks_around
from fn.collectives.carriers import group_of
from fn.collectives.codecs.codec import Codec
from fn.collectives.comm_thread import bind_twin, seconds_per_byte
from fn.collectives.feedback import Feedback
from fn.collectives.transports.registry import registered
from fn.errors import expected
from fn.schedules import Schedule
from fn.transforms.average import average as exact_average

AXIS = "data"
"""The name of the axis of a model's ranks."""

THREADS = 3
"""Threads that communicate behind a backward pass over gloo: while some wait for the wire, another encodes."""

LEAST_WIRE_SECONDS = 0.03
"""Below this time on the wire hiding it costs as much as it saves, where a rank has a single core."""


def keep_local(model: Any) -> Any:
    """Let DDP leave gradients alone: each rank keeps its own, and the optimizer communicates.

    Args: model: a `DistributedDataParallel` without a communication hook, or what `torch.compile` made of one.
    Returns: the model. `no_sync` goes on working and changes nothing.
    Raises: TypeError if it is none; RuntimeError if it has a hook already. From then on `backward` raises ValueError
        for parameters that were given another memory format under DDP, which would mix up their elements.

    >>> import torch, fn
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> fn.adapters.ddp.keep_local(model) is model
    True
    >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
    >>> model.module.weight.grad.tolist()
    [[1.0, 2.0]]
    >>> dist.destroy_process_group()
    """
    wrapped, gradients_of = _check(model), BucketGradients()

    def looked_at(state: Any, bucket: Any) -> Any:
        if not isinstance(bucket, tuple) and bucket.buffer().layout == torch.strided:
            gradients_of(bucket)  # for what it refuses
        return _left_alone(state, bucket)

    _hook(wrapped, _unless_joining(wrapped, looked_at))
    return model


@checked("least_wire_seconds")
def overlap(
    model: nn.Module, optimizer: Optimizer, *, scaler: Any = None, least_wire_seconds: float = LEAST_WIRE_SECONDS
) -> Overlap:
    """Let an optimizer communicate behind the backward pass, one param group after the other.

    The numbers are those of the serial step, bit for bit. All ranks must call it, once; it measures the wire. A phase
    whose messages are on the wire for a shorter time than `least_wire_seconds` is not overlapped after its first step,
    and a warning in the log says so.

    Args:
        model: a `DistributedDataParallel` without a communication hook; a `bucket_cap_mb` of 4 to 16 lets gradients
            go early. Or a plain module, which starts from the same numbers on all ranks: nothing is copied into
            buckets then, gradients must stay as they are from `backward` to `step`, and accumulation goes into
            `no_sync` of what is returned.
        optimizer: over parameters of the model, with gradients of each rank's own. A param group travels as one:
            see `bucketed`.
        scaler: the `torch.amp.GradScaler` that scales the loss, if one does.
        least_wire_seconds: 0 overlaps in any case.
    Returns: what runs it; `is_on(phase)`, `bytes` and `wire_seconds(phase)` say what was decided and why.
    Raises: TypeError if the model or the optimizer is of another type; ValueError if the optimizer clips by
        `max_norm`, has parameters that are not the model's, or an axis that is not the model's process group, or if
        the model itself communicates in its backward pass, over another backend than gloo; RuntimeError if the model
        has a hook already.

    From then on `backward` raises as behind `keep_local`, and `optimizer.step` raises ValueError if gradients were
    changed after backward, by clipping for one: their update is computed already. Do not catch that and go on: this
    rank's connections are closed then, so the others raise `PeerLost`. What follows from another learning rate or state
    than that of the backward pass is computed anew.

    >>> import torch, fn
    >>> import torch.distributed as dist
    >>> from functools import partial
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> with fn.bind({"data": dist.group.WORLD}):
    ...     opt = fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_after(100))
    >>> running = fn.adapters.ddp.overlap(model, opt)
    >>> for _ in range(2):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     opt.step()
    >>> running.bytes[fn.Phase.WARMUP], running.is_on(fn.Phase.WARMUP)   # a single rank sends nothing
    (0, False)
    >>> fn.adapters.ddp.close(opt)
    >>> dist.destroy_process_group()
    """
    model = _uncompiled(model)
    if not isinstance(model, nn.Module):
        raise TypeError(expected("model", "a DistributedDataParallel or another module", type(model).__name__))
    if not isinstance(optimizer, Optimizer):
        raise TypeError(expected("optimizer", "an fn.Optimizer", type(optimizer).__name__))
    if len(optimizer.units) != len(optimizer.param_groups):
        raise ValueError(expected("optimizer", "one that steps param groups one by one", type(optimizer).__name__))
    if optimizer.max_norm is not None:
        cure = "use keep_local(model) in place of overlap, for the global norm is known only after the backward pass"
        raise ValueError(f"optimizer: clips by max_norm; {cure}")
    if any(isinstance(part, DistributedDataParallel) for part in model.modules() if part is not model):
        wanted, got = "a module without a DistributedDataParallel inside", f"{type(model).__name__}, which holds one"
        raise TypeError(expected("model", wanted, got, "pass that part itself, for it averages gradients"))
    _refuse_shards(model)
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    _check_params(params, optimizer.param_groups)
    _warn_of_others(model, optimizer)
    axis, group = _axis(model, optimizer)
    check_alone(model, _backend(group, params[0].device))
    bindings = [bind_twin(axis, group) for _ in range(_threads(group, params[0].device))]
    # Measured on the group that is used later: its connections are open then.
    with bindings[0]:
        rate = seconds_per_byte(axis, params[0].device)
    running = Overlap(params, optimizer, bindings, scaler, rate, least_wire_seconds)
    if isinstance(model, DistributedDataParallel) and _is_reduced_in_python(model):
        _hook(model, _unless_joining(model, _left_alone))  # nobody tells of a pass, so `step` sends all of it
    elif isinstance(model, DistributedDataParallel):
        hook = DdpHook(running)
        _hook(model, _unless_joining(model, lambda state, bucket: hook(_dense(bucket))))
    else:
        GradientHooks(params, running)
    # Last, so that an optimizer whose overlap is refused above goes on with serial steps.
    optimizer.ahead = running.ahead
    return running


@checked("optimizer")
def close(optimizer: Optimizer | GradientAverage) -> None:
    """End the threads of `overlap`, and give back their process groups; wait for a mean that is on its way.

    The next `overlap` over the same ranks takes these groups: torch keeps every group, with its descriptors and
    threads, until `dist.destroy_process_group()`. All ranks must call it alike, at the same step and not in one.
    Training can go on, with the same numbers; steps communicate in `step`. Called again it does nothing. Rounds with a
    delay share one thread, and one group for each axis, among all optimizers of the same axes.

    Args: optimizer: of `optimizer` or `overlap`; or what `average_gradients` returned, without which nobody averages:
        the model's next backward pass is refused, with a ValueError.
    """
    running: Any = optimizer
    if isinstance(optimizer, Optimizer):
        running = getattr(optimizer.ahead, "__self__", None)
    if isinstance(running, Overlap | GradientAverage):
        running.close()
    if isinstance(optimizer, Optimizer):  # last, for it raises what was raised on the way
        land(optimizer)


@checked("params", "elements", "least_wire_seconds")
def optimizer(
    model: Any,
    make: Callable[..., Transform],
    *,
    params: Iterable[Any] | None = None,
    scaler: Any = None,
    elements: int | None = None,
    least_wire_seconds: float = LEAST_WIRE_SECONDS,
    **options: Any,
) -> Optimizer:
    """Make an optimizer for a DDP model that communicates behind the backward pass.

    Args:
        model: a `DistributedDataParallel` without a communication hook. In a single process also a plain module, which
            is what accelerate makes of one there: steps are then those of one rank, which sends nothing.
        make: a named optimizer, such as `fn.onebit_adam`; it is given axis="data", the model's process group, and if it
            takes labels, as `fn.dion` does, those of `fn.labels_of(model)`.
        params: parameters of the model, named or not, or param groups of them; None: all. They are split into groups
            of about `elements`, the last first: see `bucketed`. Nobody averages the gradients of others; a warning
            names one that requires them.
        elements: as for `bucketed`. scaler, least_wire_seconds: as for `overlap`.
        **options: schedule, lr and whatever else `fn.Optimizer` takes. With `max_norm` nothing is overlapped: the
            norm is known after the backward pass only.
    Raises: as `bucketed`, `overlap` and `fn.Optimizer`; RuntimeError if the model has a hook already. `backward` raises
        as behind `keep_local`.

    >>> import torch, fn
    >>> model = torch.nn.Linear(2, 1)                    # a single process: no rank to send to, no DDP around it
    >>> opt = fn.adapters.ddp.optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(1), lr=0.1)
    >>> for _ in range(3):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     opt.step()
    >>> opt.steps, opt.phase.value
    (3, 'compressed')
    """
    plain = isinstance(model, nn.Module) and not isinstance(_uncompiled(model), DistributedDataParallel)
    alone = plain and ranks_around() == 1
    make, group = check_make(make, "fn.onebit_adam"), None if alone else _check(model).process_group
    made = over_ranks(model, make, bucketed(model.parameters() if params is None else params, elements), group, options)
    if alone:
        return made
    if made.max_norm is None:
        overlap(model, made, scaler=scaler, least_wire_seconds=least_wire_seconds).maker = "fn.adapters.ddp.optimizer"
    else:
        keep_local(model)
        _warn_of_others(_check(model), made)
    return made


def over_ranks(
    model: nn.Module,
    make: Callable[..., Transform],
    params: Any,
    group: dist.ProcessGroup | None,
    options: dict[str, Any],
) -> Optimizer:
    """Make an optimizer that communicates over a group, None for a rank that is alone, with the labels of a model.

    The factors of PEFT's adapters are "other": a product of two orthogonal factors is no orthogonal step.
    """
    argument = inspect.signature(make).parameters.get("labels")
    if argument is not None and argument.default is None:  # nobody said which: here the module is known
        parts = [getattr(x, name) for x in model.modules() for name in getattr(x, "adapter_layer_names", ())]
        factors = {id(p) for part in parts for p in part.parameters()}
        labels = labels_of(model)
        labels.update((name, "other") for name, p in model.named_parameters() if id(p) in factors)
        options = {"labels": labels, **options}
    # Inside of `bind`: the optimizer takes the axes that are bound when it is made.
    with nullcontext() if group is None else bind({AXIS: group}):
        return Optimizer(params, partial(make, axis=AXIS), **options)


@checked("schedule", "elements", "servers")
def average_gradients(
    model: Any,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
    *,
    average: Callable[..., Transform] | None = None,
    schedule: Schedule | None = None,
    scaler: Any = None,
    elements: int | None = None,
    servers: bool = True,
) -> GradientAverage:
    """Let DDP average gradients in codes, behind the backward pass, for any optimizer.

    What travels together is fixed by the order of the model's parameters, so errors outlive the rearrangement of
    DDP's buckets. Under torch._dynamo.config.optimize_ddp = "python_reducer" each gradient travels alone, and nothing
    is hidden behind the backward pass. `no_sync` adds gradients up and communicates once. Gradients are averaged when
    `backward` returns, so `clip_grad_norm_` clips by the global norm of their mean. Parameters that are thawed later
    are not averaged, as under DDP, with a warning.

    Args:
        model: a `DistributedDataParallel` without a communication hook.
        codec, feedback: as for `compressed_average`; `fn.int4()` with `fn.damped()` is LoCo.
        average: in place of a codec, what makes the average of the compressed phase; it is given axis="data". PowerSGD
            is `partial(fn.low_rank_average, rank=4)`, with two messages for each bucket of `elements`.
        schedule: step -> Phase; in the warm-up the mean is exact. None: always compressed.
        scaler: the `torch.amp.GradScaler` that scales the loss, if one does: gradients are unscaled before they are
            encoded and scaled again after that.
        elements: that travel together, at least; None as for `bucketed`.
        servers: as for `compressed_average`; False is faster for two ranks.
    Returns: what runs it; `state_dict` and `load_state_dict` continue it, on another number of ranks, too.
    Raises: TypeError if the model is of another type, or average makes no transform; ValueError if both codec and
        average are given, or none; ValueError, on all ranks, if they disagree. From then on
        `backward` raises as behind `keep_local`, and what fails behind it: `PeerLost` if a rank ends. Errors and steps
        are then as before, and gradients of no use. What all ranks raised can be caught, and the pass taken again after
        `zero_grad`, with `no_sync` from its first batch on.

    >>> import torch, fn
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> mean = fn.adapters.ddp.average_gradients(model, fn.int8(), fn.damped(), schedule=fn.freeze_after(1))
    >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
    >>> model.module.weight.grad.tolist(), mean.steps, mean.phase.value
    ([[1.0, 2.0]], 1, 'compressed')
    >>> fn.adapters.ddp.close(mean)
    >>> dist.destroy_process_group()
    """
    model = _check(model)
    in_codes = coded_average(AXIS, codec, feedback, average, servers)
    group = model.process_group
    names = {p: name for name, p in model.module.named_parameters() if p.requires_grad}
    params = [*names]
    _check_params(params, [])
    check_alone(model, _backend(group, params[0].device))
    schedule = schedule or (lambda step: Phase.COMPRESSED)
    transform = chain(exact_average(AXIS), in_codes)
    elements = enough(params[0].device) if elements is None else elements
    # Without a reducer gradients come one by one, and nobody says which of them is the last of a pass.
    in_python = _is_reduced_in_python(model)
    buckets = [[p] for p in params] if in_python else split(params, elements)
    with bind({AXIS: group}), torch.no_grad():
        check_agreement(AXIS, {"elements": elements, **describe(schedule)}, params[0].device)
        states = tuple(transform.init([p.detach() for p in bucket]) for bucket in buckets)
    frozen = [p for p in model.module.parameters() if not p.requires_grad]
    running = GradientAverage(buckets, names, transform, states, bind_twin(AXIS, group), schedule, scaler, frozen)
    hook = DdpHook(running)
    if in_python:
        _hook(model, lambda state, bucket: running.on_gradient(*bucket))
    else:
        _hook(model, lambda state, bucket: hook(_dense(bucket)))  # DDP reads annotations of anything else
    return running


def _uncompiled(model: Any) -> Any:
    """Return the module that `torch.compile` has wrapped, as trainers do; another model as it is."""
    return getattr(model, "_orig_mod", model)


def _check(model: Any) -> DistributedDataParallel:
    model = _uncompiled(model)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(expected("model", "a DistributedDataParallel", type(model).__name__))
    return model


def _is_reduced_in_python(model: DistributedDataParallel) -> bool:
    """Return whether DDP was made under torch._dynamo.config.optimize_ddp = "python_reducer".

    Its hook is then called inside of compiled graphs, with a pair (gradient, parameter).
    """
    return bool(getattr(model, "_use_python_reducer", False))


def _left_alone(state: Any, bucket: Any) -> Any:
    """Return gradients as they are, to either of DDP's reducers."""
    return None if isinstance(bucket, tuple) else noop_hook(state, bucket)


def _dense(bucket: Any) -> Any:
    if bucket.buffer().layout != torch.strided:
        shapes = ", ".join(str(tuple(p.shape)) for p in bucket.parameters())
        got, cure = f"a sparse one for the parameter of shape {shapes}", "use torch.nn.Embedding(..., sparse=False)"
        raise TypeError(expected("gradients", "dense ones", got, cure))
    return bucket


def _check_params(params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> None:
    if not params:
        raise ValueError("model: has no parameters that require gradients")
    known = {id(p) for p in params}
    for g, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            if p.requires_grad and id(p) not in known:
                raise ValueError(f"optimizer: parameter {i} of param group {g} is none of the model's")


def _warn_of_others(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn of parameters whose gradients nobody averages: DDP leaves all alone, and the optimizer has others."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    aside = getattr(model, "parameters_to_ignore", ())
    names = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in known]
    if names := [name for name in names if name not in aside]:
        which = f"params: {len(names)} of the model's that require gradients, {names[0]!r} for one"
        hint = "give it all of them, in param groups with other hyper-parameters perhaps, or set requires_grad to False"
        text = "are not the optimizer's, and nobody averages their gradients over the ranks"
        warnings.warn(f"{which}, {text}; {hint}", stacklevel=3)


def _axis(model: nn.Module, optimizer: Optimizer) -> tuple[str, dist.ProcessGroup]:
    """Return the optimizer's axis and its process group, which is the model's if that is in DDP."""
    bound = {axis: optimizer.binding.axes[axis] for axis in optimizer.axes}
    sizes = {axis: size for axis, (size, _, _) in bound.items()}
    size = model.process_group.size() if isinstance(model, DistributedDataParallel) else None
    if len(sizes) != 1 or size not in (None, *sizes.values()):
        wanted = "communication over one axis" + ("" if size is None else f" of the model's {size} ranks")
        raise ValueError(expected("optimizer", wanted, f"the axes {sizes}"))
    ((axis, (_, _, transport)),) = bound.items()
    if isinstance(model, DistributedDataParallel):
        return axis, model.process_group
    if transport == ALONE or transport in registered:
        raise ValueError(expected("optimizer", f"a process group for the axis {axis!r}", f"{transport!r}"))
    return axis, group_of(transport)


def _threads(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many threads may communicate at a time, each over a group of its own; the same on all ranks.

    Several only over gloo. NCCL's exchanges are kernels that wait for each other on the device: where ranks start those
    of two groups in different orders, each may wait for what the other cannot start any more. Threads keep no order.
    """
    return THREADS if _backend(group, device) == "gloo" else 1


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    return str(group._get_backend(device).name())


def _refuse_shards(model: nn.Module) -> None:
    """Refuse DTensors, which lie in shards: FSDP2 sends their gradients itself, inside of the backward pass."""
    for name, p in model.named_parameters():
        if is_dtensor(p):
            wanted = "a model of whole tensors, whose gradients nobody else reduces"
            got = f"the parameter {name!r}, a DTensor on {p.device_mesh}"
            cure = "use fn.adapters.fsdp.compress, which sends them in codes behind the backward pass"
            raise TypeError(expected("model", wanted, got, cure))


def check_alone(model: nn.Module, backend: str) -> None:
    """Refuse a model that itself communicates in its backward pass, other than over gloo.

    Ranks may start its exchanges and those of our thread in different orders, and then wait for each other for good.

    Nor are a device's queues shared then: with one connection, an exchange waits for the kernels that were queued
    before it on any stream, and these for another exchange, whose order on other ranks is another one.

    Raises: ValueError that names what communicates, or what lets kernels wait for it.
    """
    if backend == "nccl" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        wanted = f"to be more than 1 where fn communicates over {backend} behind the backward pass"
        cure = (
            "with one connection its kernels share a queue with those of the backward pass, so that nothing overlaps "
            "and ranks may wait for each other for good; unset it before CUDA starts, or use fn.adapters.ddp.keep_local"
        )
        raise ValueError(expected("CUDA_DEVICE_MAX_CONNECTIONS", wanted, "1", cure))
    norms = (name for name, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm))
    communicating = next((f"SyncBatchNorm {name!r}" for name in norms), "")
    if isinstance(model, DistributedDataParallel) and model.find_unused_parameters:
        communicating = communicating or "find_unused_parameters=True"
    if communicating and backend != "gloo":
        wanted = f"nothing but fn that communicates over {backend} in its backward pass"
        cure = "use fn.adapters.ddp.keep_local and an fn.Optimizer, which communicates in step"
        raise ValueError(expected("model", wanted, communicating, cure))


def _unless_joining(model: DistributedDataParallel, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a hook that refuses `model.join()`: ranks that have joined take no steps, in which the others wait."""
    reference = weakref.ref(model)  # DDP keeps its hook where Python sees no cycle

    def allowed() -> Callable[[Any, Any], Any]:
        join = getattr(reference(), "_join_config", None)
        if join is not None and join.enable and not join.throw_on_early_termination:
            text = "is in join(), where ranks without data take no steps, but the optimizer needs all of them in each"
            hint = "give all ranks as many batches, or stop with the first: join(throw_on_early_termination=True)"
            raise ValueError(f"model: {text}; {hint}")
        return hook

    return lambda state, bucket: allowed()(state, bucket)


def _hook(model: DistributedDataParallel, hook: Callable[[Any, Any], Any]) -> None:
    if _is_reduced_in_python(model):  # a compiler would trace threads and messages
        hook = torch._dynamo.disable(hook)
    try:
        model.register_comm_hook(None, hook)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        text = "has a communication hook already, perhaps of an earlier optimizer, and DDP takes one for good"
        hint = "in the place of an old optimizer, wrap the module anew: DistributedDataParallel(model.module)"
        several = "several at a time: keep_local(model) once, and each an fn.Optimizer, which communicates in step"
        raise RuntimeError(f"model: {text}; {hint}; {several}") from error
