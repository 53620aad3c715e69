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


def backend_of(arguments: argparse.Namespace, ranks: int) -> str:
    """Return the backend that was asked for, else the device's; gloo where ranks have to share devices."""
    device = device_of(arguments)
    shared = device.type != "cpu" and ranks > torch.accelerator.device_count()
    return arguments.backend or ("gloo" if shared else fn.kernels.communication_backend(device.type))


def of_rank(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank of this machine, and make it the current one; ranks may have to share it."""
    if device.type == "cpu":
        return device
    found = torch.device(device.type, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(found.index)
    return found


def threads(device: torch.device) -> str:
    """Return how a table names where a rank computes: a thread, or a device."""
    return "a thread" if device.type == "cpu" else f"a {device.type} device"
