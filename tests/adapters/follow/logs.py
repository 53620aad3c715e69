"""Logs for tests: small runs, written through `LogWriter`, and a plain file server that shows a folder."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from pathlib import Path

import torch

from fn.adapters.follow.log_reader import LogReader
from fn.adapters.follow.log_writer import LogWriter

HEADER = {"method": "lion_vote", "shapes": [[8], [4, 2]], "dtypes": ["float32", "bfloat16"], "torch": "2.13"}


def records(step, life=0):
    """Return what was heard in a step; in another life of the trainer something else."""
    return [(("gather", "unit", 0), [bytes([step % 256, life]) * 9, b""]), (("psum", 3), [f"{step} {life}".encode()])]


def write(folder, steps, life=0, *, snapshots=(), **options):
    """Write the frames of some steps, and close the log."""
    log = LogWriter(folder, HEADER, first_step=steps.start, **options)
    for step in steps:
        if step in snapshots:
            log.snapshot(step, tensors(step, life))
        log.frame(step, "compressed", {"lr": step / 8}, records(step, life), f"{step:x}" if step % 5 == 0 else None)
    log.close()


def tensors(step, life=0):
    return {"weight": torch.full((2, 3), step + life / 2), "bias": torch.tensor([1.5], dtype=torch.bfloat16)}


def check(reader: LogReader, steps, life=0):
    """Compare frames with those that were written."""
    for step in steps:
        frame = reader.frame(step)
        assert frame.records == records(step, life)
        digest = f"{step:x}" if step % 5 == 0 else None
        assert frame[:3] + frame[4:] == (step, "compressed", {"lr": step / 8}, digest)


class _Plain(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *said):
        pass


class _WithRanges(_Plain):
    """As nginx does: a part of a file for those who ask for one."""

    def do_GET(self):
        path, asked = Path(self.translate_path(self.path)), self.headers.get("Range")
        if asked is None or not path.is_file():
            super().do_GET()
            return
        data, start = path.read_bytes(), int(asked.removeprefix("bytes=").rstrip("-"))
        self.server.parts.append(len(data) - start)
        part = data[start:]
        self.send_response(206 if part else 416)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@contextlib.contextmanager
def served(folder, ranges=False):
    """Serve a folder on this machine: yields its URL and the lengths of the parts that were asked for."""
    handler = functools.partial(_WithRanges if ranges else _Plain, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.parts = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.parts
        finally:
            server.shutdown()
            thread.join()
