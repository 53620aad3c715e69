"""`python -m fn doctor`: two that agree, and what it says of machines and networks that are set up wrongly."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import fn
from fn.tools import doctor

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def wrong(found: list[doctor.Finding]) -> dict[str, str]:
    return {check: text for ok, check, text in found if not ok}


def commanded(command: list[str], **variables: str) -> tuple[int, list[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(fn.__file__).parents[1]), **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("WRONG")]


def peer(answer: bytes, *, stays: bool = False) -> tuple[str, int]:
    """Answer every call with some bytes, as a peer that is set up wrongly does; end with the test's process.

    Args: stays: whether it stays on the line, and reads no more.
    """
    server, callers = socket.create_server((HOST, 0)), list[socket.socket]()

    def serve() -> None:
        while True:
            caller, _ = server.accept()
            caller.recv(64)
            caller.sendall(answer)
            if stays:
                callers.append(caller)
            else:
                caller.close()

    threading.Thread(target=serve, daemon=True).start()
    return HOST, int(server.getsockname()[1])


def facts(**changes: object) -> bytes:
    address = ["127.0.0.1", free_port()]
    mine = {"fn": fn.__version__, "torch": doctor.torch.__version__, "python": "3.13.1", "address": address}
    return json.dumps({**mine, **changes}).encode() + b"\n"


def test_two_that_call_each_other_find_nothing() -> None:
    one, other = free_port(), free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: list(doctor.findings((HOST, other), one)))
        second = pool.submit(lambda: list(doctor.findings((HOST, one), other)))
    checks = [f.check for f in first.result()]
    assert checks == [f.check for f in second.result()]
    to, back = ["to the peer", "peer's versions", "to its ranks"], ["from the peer", "from its ranks"]
    assert checks[-7:] == [*to, "speed to it", *back, "speed from it"]
    ours = {"open files", "shared memory"}  # of the machine that runs this test
    assert not wrong(first.result()).keys() - ours
    assert not wrong(second.result()).keys() - ours
    here, there = ({check: text for _, check, text in found.result()} for found in (first, second))
    assert re.fullmatch(r"\d+\.\d\d MB/s", here["speed to it"])
    assert (here["speed to it"], here["speed from it"]) == (there["speed from it"], there["speed to it"])


def test_a_peer_that_is_not_there() -> None:
    found = wrong(list(doctor.findings((HOST, free_port()), free_port(), timeout=0.5)))
    assert "run doctor there at the same time" in found["to the peer"]
    assert "firewall of this machine" in found["from the peer"]
    assert "from its ranks" in found


def test_a_peer_with_another_torch() -> None:
    found = wrong(list(doctor.findings(peer(facts(torch="2.0.1")), free_port(), timeout=0.5)))
    assert found["peer's versions"].endswith("install the same torch on both")
    assert "torch 2.0.1" in found["peer's versions"]


def test_a_peer_with_another_build_of_the_same_torch_is_fine() -> None:
    build = doctor.torch.__version__.partition("+")[0] + "+cu130"
    assert "peer's versions" not in wrong(list(doctor.findings(peer(facts(torch=build)), free_port(), timeout=0.5)))


def test_a_peer_whose_firewall_has_one_port_open() -> None:
    found = wrong(list(doctor.findings(peer(facts()), free_port(), timeout=0.5)))
    assert "to the peer" not in found
    assert "which its gloo announces, does not answer" in found["to its ranks"]
    assert "GLOO_SOCKET_IFNAME" in found["to its ranks"]


@pytest.mark.parametrize("end", ["hangs up", "says nothing", "says something else"])
def test_a_peer_to_which_no_long_messages_come_through(end: str) -> None:
    said = {"hangs up": b"{}\n", "says nothing": b"{}\n", "says something else": b"{}\nHTTP/1.1 400\n"}[end]
    there = facts(address=peer(said, stays=end != "hangs up"))
    found = wrong(list(doctor.findings(peer(there), free_port(), timeout=0.5)))
    assert "to its ranks" not in found
    fault = {"hangs up": "(it hung up|.*reset.*|Broken pipe)", "says nothing": "timed out"}.get(
        end, "could not convert.*"
    )
    assert re.fullmatch(rf"not measured \({fault}\); long messages are lost .* MTU .*", found["speed to it"])


def test_a_peer_that_calls_and_sends_nothing() -> None:
    port, timeout = free_port(), 3.0
    with ThreadPoolExecutor() as pool:
        here = pool.submit(lambda: list(doctor.findings((HOST, free_port()), port, timeout=timeout)))
        for _ in range(100):
            with suppress(OSError), socket.create_connection((HOST, port)) as call:
                call.sendall(b"fn doctor\n")
                theirs = json.loads(call.makefile("rb").readline())["address"]
                break
            threading.Event().wait(0.02)
        with socket.create_connection(tuple(theirs)) as call:
            call.sendall(b"fn doctor\n")
            call.makefile("rb").readline()
    found = wrong(here.result())
    assert "from its ranks" not in found
    assert found["speed from it"].startswith("not measured (the peer sent nothing, or not all); ")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b'{"fn": "1"}\n', b"[1, 2]\n"])
def test_something_else_listens_at_the_peers_port(answer: bytes) -> None:
    found = wrong(list(doctor.findings(peer(answer), free_port(), timeout=0.5)))
    assert "to the peer" in found or "not that of this version" in found["peer's versions"]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        found = wrong(list(doctor.findings((HOST, free_port()), taken, timeout=0.5)))
    assert f"{taken} cannot be listened on" in found["port"]


def test_the_command_finds_a_low_limit_of_files_and_an_interface_that_is_not_there() -> None:
    program = f"ulimit -S -n 256; exec {sys.executable} -m fn doctor"
    code, lines = commanded(["sh", "-c", program], GLOO_SOCKET_IFNAME="eth77")
    assert code == 1
    assert any("open files" in line and "ulimit -n 65536" in line for line in lines)
    assert any("'eth77'" in line and "unset it, or name one of" in line for line in lines)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, to mount /dev/shm")
def test_the_command_finds_a_small_shared_memory() -> None:
    program = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} -m fn doctor"
    code, lines = commanded(["unshare", "-m", "sh", "-c", program])
    assert code == 1
    assert any("64 MiB free" in line and "--shm-size" in line for line in lines)


def test_a_name_that_stands_for_no_machine_and_an_address_that_nobody_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = wrong(list(doctor.findings(("no-such-host.invalid", 1), free_port(), timeout=0.3)))
    assert "no other machine reaches it" in found["address"]
    assert "does not answer" in found["to the peer"]


@pytest.mark.parametrize("text", ["host:port", ":29500"])
def test_the_command_refuses_a_peer_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from fn.__main__ import main

    with pytest.raises(SystemExit):
        main(["doctor", "--peer", text])
    assert f"--peer: expected host or host:port, but got {text!r}" in capsys.readouterr().err
