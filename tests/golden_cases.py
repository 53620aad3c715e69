"""The recorded trajectories of `tests/golden`: what they hold, and how an array of ours is compared with theirs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fn import tree
from fn.adapters.deepspeed.transforms import ParamGroup

FOLDER = Path(__file__).parent / "golden"


def recorded_weight(state: Any, which: int, betas: Sequence[float] | None = None) -> float:
    """Return what a moment is multiplied by to be as recorded: Adam's are stored bias-corrected here, and not there.

    Args: which: 0 for the first moment, 1 for the second.
    """
    ages = tree.fields(state, "ages")
    # simulated ranks with states of their own have an age each, all alike
    return 1 - (betas or (0.9, 0.999))[which] ** int(ages[0][which].max()) if ages else 1.0


def recorded_form(state: Any, field: str, betas: Sequence[float] | None = None) -> list[Tensor]:
    """Return the leaves of mu or nu as recorded."""
    weight = recorded_weight(state, int(field == "nu"), betas)
    return [x * weight for x in tree.fields(state, field)[0]]


def recordings(folder: Path, *indices: str) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Return the rows of index files of a folder, each with its arrays, of files that are those that were recorded."""
    rows = [row for index in indices for row in json.loads((folder / index).read_text())["cases"]]
    for row in rows:
        assert hashlib.sha256((folder / row["file"]).read_bytes()).hexdigest() == row["sha256"]
    return [(row, dict(np.load(folder / row["file"]))) for row in rows]


class Recording(NamedTuple):
    """A recording: its row of the index, and its arrays by name."""

    row: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def hyper(self) -> dict[str, Any]:
        found: dict[str, Any] = self.row["hyper"]
        return found

    @property
    def world(self) -> int:
        return int({**self.row.get("hyper", {}), **self.row}["world"])

    @property
    def count(self) -> int:
        return len({**self.row.get("hyper", {}), **self.row}["shapes"])

    def each(self, name: str) -> list[Tensor]:
        """Return an array of each tensor."""
        return [torch.from_numpy(self.arrays[f"p{i}.{name}"].copy()) for i in range(self.count)]


class Case(Recording):
    """A recording of DeepSpeed's optimizers, whose params are in groups."""

    @property
    def counts(self) -> list[int]:
        """Return how many parameters each group has."""
        return [len(group["shapes"]) for group in self.row["groups"]]

    def split(self, values: list[Any]) -> tuple[list[Any], ...]:
        """Return a list of one value per parameter as a tuple of lists, one per group."""
        rest = iter(values)
        return tuple([next(rest) for _ in range(count)] for count in self.counts)

    def params(self) -> tuple[list[Tensor], ...]:
        return self.split([torch.from_numpy(self.arrays[f"p{i}.init"].copy()) for i in range(sum(self.counts))])

    def gradients(self, call: int, rank: int | None = None) -> tuple[list[Tensor], ...]:
        """Return the local gradients of a call, of all ranks (W, ...) or of one."""
        found = [self.arrays[f"p{i}.grad"][call] for i in range(sum(self.counts))]
        return self.split([torch.from_numpy((g if rank is None else g[rank]).copy()) for g in found])

    def groups(self) -> list[ParamGroup]:
        """Return the param groups as the numerics take them; learning rates are 0-d tensors to be filled."""
        found = []
        for j, group in enumerate(self.row["groups"]):
            hyper = {**self.row["hyper"], **group}
            mask = self.arrays.get(f"g{j}.exp_avg_mask")
            found.append(
                ParamGroup(
                    torch.tensor(float(hyper["lr"])),
                    *hyper["betas"],
                    hyper["eps"],
                    hyper["weight_decay"],
                    tuple(int(np.prod(shape)) for shape in group["shapes"]),
                    None if mask is None else torch.from_numpy(mask),
                    bool(group.get("non_freeze", False)),
                    hyper.get("max_coeff", 10.0),
                    hyper.get("min_coeff", 0.01),
                )
            )
        return found


def load_cases(*optimizers: str) -> list[Case]:
    """Return all recordings of these optimizers, as the index lists them."""
    rows = json.loads((FOLDER / "index.json").read_text())["cases"]
    return [Case(row, dict(np.load(FOLDER / row["file"]))) for row in rows if row["optimizer"] in optimizers]


def names(cases: list[Case]) -> list[str]:
    return [case.row["name"] for case in cases]


def assert_close(found: Any, recorded: np.ndarray, what: str) -> None:
    """Hold an array against a recorded one: 1e-6 * max(1, largest magnitude), NaN equal to NaN."""
    found = np.asarray(found.numpy() if isinstance(found, Tensor) else found, dtype=np.float64)
    recorded = np.asarray(recorded, dtype=np.float64)
    magnitude = np.nanmax(np.abs(recorded), initial=1.0) if recorded.size else 1.0
    assert found.shape == recorded.shape, f"{what}: shape {found.shape} against {recorded.shape}"
    np.testing.assert_allclose(found, recorded, rtol=0, atol=1e-6 * max(1.0, magnitude), err_msg=what)


def record(state: Any, params: Any, optimizer: str, world: int) -> dict[str, Tensor]:
    """Return the arrays of a state under the recordings' names; leaves as they are, with or without a rank axis."""
    found: dict[str, Tensor] = {}
    moments = [leaf for mu in tree.fields(state, "mu") for leaf in tree.leaves(mu)]
    squares = [leaf for nu in tree.fields(state, "nu") for leaf in tree.leaves(nu)]
    for i, (p, m, v) in enumerate(zip(tree.leaves(params), moments, squares, strict=True)):
        found |= {f"p{i}.param": p, f"p{i}.exp_avg": m, f"p{i}.exp_avg_sq": v}
    workers = [leaf for worker in tree.fields(state, "worker") for leaf in tree.leaves(worker)]
    servers = [leaf for server in tree.fields(state, "server") for leaf in tree.leaves(server)]
    if optimizer == "onebit_lamb":
        return found | _record_lamb(state, moments, workers[0], servers[0])
    for i, (e, d) in enumerate(zip(workers, servers, strict=True)):
        found |= {f"p{i}.worker_error": e, f"p{i}.server_error": d}
    if optimizer == "zero_one_adam":
        went = [leaf for steps in tree.fields(state, "went") for leaf in tree.leaves(steps)]
        found |= {f"p{i}.momentum_accumulator": u for i, u in enumerate(went)}
    return found


def _record_lamb(state: Any, moments: list[Tensor], worker: Tensor, server: Tensor) -> dict[str, Tensor]:
    found = {"flat.worker_error": worker, "flat.server_error": server}
    columns = {"exp_avg_sq_fresh": "nu_fresh", "scaling_coeff": "scaling", "lamb_coeff_freeze": "coefficient"}
    for theirs, ours in {**columns, "last_factor": "factor"}.items():
        for i, leaf in enumerate(tree.leaves(tree.fields(state, ours)[0])):
            found[f"p{i}.{theirs}"] = leaf
    found["lamb_coeffs"] = torch.stack([c.reshape(-1)[0] for c in tree.leaves(tree.fields(state, "ratio")[0])])
    return found
