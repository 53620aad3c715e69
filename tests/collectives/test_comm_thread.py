"""The thread that communicates while others compute: how it ends."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch

from fn.collectives.axis import Binding
from fn.collectives.comm_thread import CommunicationThread


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_a_thread_that_was_closed_is_gone_in_the_operating_system_too():
    """What C++ keeps for the thread is destroyed after Python calls it ended; here that takes 0.3 s."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    destroy = ctypes.cast(libc.usleep, ctypes.c_void_p)
    assert libc.pthread_key_create(ctypes.byref(key), destroy) == 0
    thread = CommunicationThread(Binding({}), torch.device("cpu"))

    def slow_to_end() -> int:
        assert libc.pthread_setspecific(key, ctypes.c_void_p(300_000)) == 0  # microseconds
        return threading.get_native_id()

    task = f"/proc/self/task/{thread.submit(slow_to_end).result()}"
    assert os.path.exists(task)
    thread.close()
    assert not os.path.exists(task)
