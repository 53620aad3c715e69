"""The accelerator table: who is asked, who is believed, and what is said when nobody is."""

from __future__ import annotations

import sys
import threading
import warnings
from importlib.metadata import PackageNotFoundError

import pytest
import ranks
import torch

import fn
from fn import kernels
from fn.kernels import bits, layout, reference

table = sys.modules["fn.kernels.table"]
ROW = kernels.Accelerator("cpu", {"pack_bits": bits.pack_bits}, provider="mine")


@pytest.fixture
def registered():
    rows = []

    def register(row):
        kernels.register(row)
        rows.append(row)

    yield register
    for row in rows:
        kernels.unregister(row)


def provider(op, device="cpu"):
    return [cell.provider for cell in table.cells(op, device)]


def test_a_registered_row_comes_first_and_leaves_the_other_ops_alone(registered):
    before = provider("unpack_bits")
    registered(ROW)
    assert provider("pack_bits")[0] == "mine"
    assert provider("unpack_bits") == before
    assert kernels.table().providers["cpu"]["pack_bits"] == "mine"


def test_two_functions_make_a_whole_device(registered):
    calls = []

    def pack(x):
        calls.append("pack")
        return reference.codes.pack_bits(x)

    def unpack(bits, n, dtype):
        calls.append("unpack")
        return reference.codes.unpack_bits(bits, n, dtype)

    registered(kernels.Accelerator("cpu", {"pack_bits": pack, "unpack_bits": unpack}))
    x, valid, runs = torch.randn(2, 20), torch.tensor([[20], [13]]), [1, 20]
    bits, sums = reference.codes.sign_encode(x, valid, runs, 0)
    decoded = reference.codes.sign_decode_mean(bits[:, None], sums.float()[:, None], valid, runs, 0)
    assert set(calls) == {"pack", "unpack"}
    torch.testing.assert_close(
        decoded, torch.where(x >= 0, sums.float(), -sums.float()) * layout.padding_mask(x, valid, runs)
    )


@pytest.mark.parametrize("wrong", [
    lambda x: bits.pack_bits(x) ^ 1, lambda x: bits.pack_bits(x)[:, :-1], lambda x: 1 / 0, lambda x: None,
    lambda x: torch.from_numpy(__import__("numpy").packbits((x >= 0).numpy(), axis=-1)),
], ids=["bit", "shape", "raises", "nothing", "big-endian"])  # fmt: skip
def test_a_kernel_is_believed_only_with_the_known_answer(registered, wrong):
    registered(kernels.Accelerator("cpu", {"pack_bits": wrong}, provider="wrong"))
    with pytest.warns(UserWarning, match="'pack_bits' of 'wrong' for 'cpu' is not used"):
        assert "wrong" not in provider("pack_bits")
    assert torch.ops.fn.pack_bits(torch.tensor([[1.0, -1.0, 1.0]])).tolist() == [[5]]
    assert any("wrong pack_bits is not used" in note for note in kernels.table().notes)


def test_a_kernel_may_decline(registered):
    def picky(x):
        return bits.pack_bits(x) if x.dtype == torch.float32 else NotImplemented

    registered(kernels.Accelerator("cpu", {"pack_bits": picky}, provider="picky"))
    assert provider("pack_bits")[0] == "picky"
    assert torch.ops.fn.pack_bits(torch.ones(1, 9, dtype=torch.float64)).tolist() == [[255, 1]]


def test_a_thread_that_asks_while_a_kernel_is_tried_waits_for_the_answer(registered):
    """It went on with the reference: of two ranks that communicate on two threads, one then rounded otherwise."""
    tried, found = threading.Event(), {}

    def ask(thread):
        found[thread] = provider("pack_bits")

    second = threading.Thread(target=ask, args=("second",))

    def pack(x):
        if not tried.is_set():
            tried.set()
            found["itself"] = provider("pack_bits")
            second.start()
            second.join(0.3)  # as long as it takes to answer without having waited
        return bits.pack_bits(x)

    registered(kernels.Accelerator("cpu", {"pack_bits": pack}, provider="slow"))
    ask("first")
    second.join()
    assert found["itself"] == []
    assert found["first"][0] == "slow"
    assert found["second"] == found["first"]


def test_a_row_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^kernels: expected names in the table, .*, but got .*fly"):
        kernels.register(kernels.Accelerator("cpu", {"fly": bits.pack_bits}))
    with pytest.raises(TypeError, match=r"^row: .*got dict"):
        kernels.register({"pack_bits": bits.pack_bits})


@pytest.mark.parametrize(("op", "args", "error", "argument"), [
    ("sign_encode", (torch.ones(1, 8, dtype=torch.int32), torch.tensor([[8]]), [1, 8], 0), TypeError, "x"),
    ("sign_encode", (torch.ones(1, 8), torch.tensor([[8]]), [1, 16], 0), ValueError, "x"),
    ("sign_encode", (torch.ones(1, 8), torch.tensor([[8.0]]), [1, 8], 0), TypeError, "valid"),
    ("sign_encode", (torch.ones(1, 8), torch.tensor([[8, 8]]), [1, 8], 0), ValueError, "valid"),
    ("sign_encode", (torch.ones(1, 8), torch.tensor([[8]], device="meta"), [1, 8], 0), ValueError, "valid"),
    ("sign_decode_mean", (torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([[8]]), [1, 8], 0), TypeError, "bits"),
    ("sign_residual", (torch.ones(1, 8), torch.ones(1, 2), torch.tensor([[8]]), [1, 8], 0), ValueError, "scales"),
    ("sign_residual", (torch.ones(1, 16), torch.ones(1, 1), torch.tensor([[16]]), [1, 16], 8), ValueError, "scales"),
    ("sign_encode", (torch.ones(1, 16), torch.tensor([[16]]), [1, 16], 12), ValueError, "block"),
    ("quantize", (torch.ones(1, 8), torch.tensor([[8]]), [1, 8], 5), ValueError, "width"),
    ("quantize", (torch.ones(1, 7), torch.tensor([[7]]), [1, 7], 4), ValueError, "runs"),
    ("dequantize_mean", (torch.ones(1, 1, 8, dtype=torch.uint8), torch.ones(1, 1, 1), torch.tensor([[8]]), [1, 8], 4),
     ValueError, "codes"),
])  # fmt: skip
def test_bad_input_raises_with_the_arguments_name(op, args, error, argument):
    with pytest.raises(error, match=rf"^{argument}: "):
        getattr(torch.ops.fn, op)(*args)


def test_the_table_is_text_and_html():
    found = kernels.table()
    assert "sign_encode_feedback" in repr(found)
    assert '<td style="text-align: left">sign_encode_feedback</td>' in found._repr_html_()
    assert set(found.providers["cpu"]) == set(table.SCHEMAS)


def test_a_device_without_a_row_runs_the_reference(monkeypatch):
    monkeypatch.setattr(table, "devices", lambda: ["mps"])
    assert set(kernels.table().providers["mps"].values()) == {"reference"}


def loaded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cuda", "xpu", "npu"):
            table.rows(device)


def test_loading_a_missing_extra_says_nothing_and_breaks_nothing():
    ranks.run(1, loaded)  # a process that has loaded none of them yet


def test_the_accelerator_can_be_chosen():
    here = kernels.get_accelerator()
    try:
        kernels.set_accelerator("meta")
        assert kernels.device_name() == "meta:0"
        assert kernels.device_name(3) == "meta:3"
        assert kernels.on_accelerator(torch.ones(1, device="meta"))
        assert not kernels.on_accelerator(torch.ones(1))
        assert not kernels.on_accelerator([1])
    finally:
        kernels.set_accelerator(None)
    assert kernels.get_accelerator() == here


def test_pinning_is_safe_without_an_accelerator():
    x = torch.ones(3)
    assert torch.equal(kernels.pin_memory(x), x)
    if torch.accelerator.current_accelerator() is None:
        assert kernels.pin_memory(x) is x


def test_a_backend_and_a_transport_are_two_things(registered):
    assert kernels.communication_backend("cpu") == "gloo"
    assert kernels.compressed_transport("cpu") == "gloo"
    registered(kernels.Accelerator("toy", {}, communication_backend="toyccl", compressed_transport="gloo"))
    assert kernels.communication_backend("toy") == "toyccl"
    assert kernels.compressed_transport("toy") == "gloo"
    try:
        kernels.set_communication_backend("toy", "mpi")
        assert kernels.communication_backend("toy") == "mpi"
    finally:
        kernels.set_communication_backend("toy", None)
    assert kernels.communication_backend("nothing-known") == "gloo"


def test_the_command_line_prints_the_table(capsys, monkeypatch):
    from fn import __main__ as command

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, "version", missing)
    command.main(["table"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in command.OPTIONAL)
    assert max(map(len, out.splitlines())) <= 100
    assert f"torch                        {torch.__version__}" in out
    assert "sign_encode" in out
    assert fn.__version__ in out


@pytest.mark.parametrize("device_type", ["cuda:0", torch.device("cpu"), None])
def test_a_row_for_what_is_no_device_type_is_refused(device_type):
    """It would never be asked for anything."""
    with pytest.raises(ValueError, match=r"device_type: expected the name of a device type, .*, but got"):
        kernels.register(kernels.Accelerator(device_type, {}))


def test_a_row_that_is_not_registered_is_named():
    with pytest.raises(ValueError, match=r"row: .*got 'mine' for 'cpu', which is not registered"):
        kernels.unregister(kernels.Accelerator("cpu", {}, provider="mine"))
