"""`python -m fn lighthouse` and `island`, and what `connect` refuses. torchft is not needed for this."""

from __future__ import annotations

import shlex
import socket
import sys
from typing import Any

import pytest

import fn
import fn.adapters.torchft as adapter
from fn.__main__ import main

STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the programs that would have been run: the command, and the environment."""
    programs: list[Any] = []
    monkeypatch.setattr("os.execvpe", lambda path, command, environment: programs.append((command, environment)))
    monkeypatch.setattr("fn.tools.islands.find_spec", lambda name: name)  # it counts as installed
    for name in ("GLOO_SOCKET_IFNAME", "TORCHFT_LIGHTHOUSE", "RUST_LOG"):
        monkeypatch.delenv(name, raising=False)
    return programs


def test_island_prints_the_line_that_it_runs(ran, capsys):
    main(["island", "--lighthouse", "127.0.0.1:4000", "--ranks", "2", "--allow", "lr", "train.py", "--steps", "a b"])
    ((command, environment),) = ran
    assert command == [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "100", "train.py", "--steps", "a b"]
    there, interface = environment["TORCHFT_LIGHTHOUSE"], environment["GLOO_SOCKET_IFNAME"]
    assert (there, interface) == ("http://127.0.0.1:4000", "lo")
    own = "RUST_LOG=error FN_ISLAND_ALLOW=lr GLOO_SOCKET_IFNAME=lo"
    variables = f"TORCHFT_LIGHTHOUSE=http://127.0.0.1:4000 {STORE} {own}"
    assert capsys.readouterr().out == f"{variables} {shlex.join(command)}\n"


def test_the_lighthouse_prints_what_is_typed_elsewhere(ran, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path: f"/bin/{name}")
    main(["lighthouse", "--port", "4000", "--islands", "2", "--wait", "1.5", "--heartbeat", "2.5"])
    ((command, _),) = ran
    options = {"--bind": "[::]:4000", "--min_replicas": "2", "--join_timeout_ms": "1500"}
    assert {**options, "--heartbeat_timeout_ms": "2500"} == dict(zip(command[1::2], command[2::2], strict=True))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("on each machine:  python -m fn island --lighthouse ")
    assert first.endswith(":4000 train.py")
    assert second == f"RUST_LOG=error {shlex.join(command)}"


def test_an_island_is_not_started_again_and_again_without_torchft(ran, capsys, monkeypatch):
    monkeypatch.setattr("fn.tools.islands.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["island", "--lighthouse", "127.0.0.1:4000", "train.py"])
    assert not ran
    assert "expected an installed one, which islands need, but got none; pip install torchft" in capsys.readouterr().err


def test_an_island_takes_the_lighthouse_of_the_environment(ran, monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:5000")
    main(["island", "train.py"])
    assert ran[0][1]["TORCHFT_LIGHTHOUSE"] == "http://127.0.0.1:5000"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("island", "script: expected a script, such as train.py"),
        ("island --lighthouse :4000 train.py", "--lighthouse: expected host:port, but got ':4000'"),
        ("island --lighthouse 127.0.0.1:port train.py", "--lighthouse: expected host:port"),
        ("island --lighthouse a..b:29 train.py", "--lighthouse: expected an address that this machine knows a way to"),
        ("lighthouse", "expected an installed torchft"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(line, said, ran, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert not ran
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_an_island_names_a_lighthouse_to_which_it_knows_no_way(ran, capsys, monkeypatch):
    def unknown(*args: Any, **more: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    with pytest.raises(SystemExit, match="2"):
        main(["island", "--lighthouse", "nowhere:29", "train.py"])
    assert not ran
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--lighthouse: expected an address that this machine knows a way to, but got nowhere:29 " in said
    assert "(Name or service not known); check the name and the network of this machine: ping nowhere; " in said
    assert said.endswith("python -m fn lighthouse prints its address")


def test_connect_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(TypeError, match=r"schedule: expected fn.every\(h\) or fn.every_seconds.* quorum_timeout"):
        adapter.connect(fn.freeze_after(3))
    with pytest.raises(ValueError, match=r"lighthouse: expected host:port, but got ''; start one with python -m fn"):
        adapter.connect(fn.every(3))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"connect: expected the ranks .* one of 2 processes .* init_process_group"):
        adapter.connect(fn.every(3), lighthouse="127.0.0.1")
