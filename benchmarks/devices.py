"""The flags `--device` and `--backend`, and what follows from them: by default the accelerator and its own backend."""

from __future__ import annotations

import argparse

import torch

import fn


def add_device(parser: argparse.ArgumentParser, *, backend: bool = False) -> None:
    """Give a script the flag `--device`, and `--backend` if its ranks are processes."""
    parser.add_argument("--device", metavar="TYPE", help="cpu, cuda, xpu, ...; default: the accelerator, else cpu")
    if backend:
        parser.add_argument("--backend", metavar="NAME", help="of process groups; default: the device's own")


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Return the device that was asked for, else the accelerator, else the CPU; `fn` takes it for the accelerator."""
    if arguments.device:
        fn.kernels.set_accelerator(arguments.device)
    return torch.device(fn.kernels.get_accelerator().type)


def backend_of(arguments: argparse.Namespace) -> str:
    """Return the backend that was asked for, else that of the device."""
    return arguments.backend or fn.kernels.communication_backend(device_of(arguments).type)


def of_rank(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank of this machine, and make it the current one; ranks may have to share.

    Over gloo they can; NCCL refuses two ranks on one device.
    """
    if device.type == "cpu":
        return device
    found = torch.device(device.type, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(found.index)
    return found


def named(device: torch.device) -> str:
    """Return what a table calls a device: nothing for a CPU, which all older figures are of."""
    return "" if device.type == "cpu" else f", {device.type}"
