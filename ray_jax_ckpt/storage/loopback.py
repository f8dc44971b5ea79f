"""Files of any pyarrow filesystem for tensorstore, which knows only some: over HTTP, on this machine's loopback.

What tensorstore reads is ranges of files, so nothing is staged on disk: a rank of many that needs little of a large
checkpoint reads little. The paths begin with a secret, because others on the machine can connect too.
"""

from __future__ import annotations

import http.server
import os
import re
import secrets
import threading
import urllib.parse
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow.fs as pafs

from ray_jax_ckpt.errors import CheckpointError
from ray_jax_ckpt.storage.described import check, check_size, is_description
from ray_jax_ckpt.storage.filesystem import describe, join, reading
from ray_jax_ckpt.storage.manifest import FileRecord
from ray_jax_ckpt.storage.segments import PIECE_BYTES, Segment, read_block
from ray_jax_ckpt.storage.streams import Deadline, retried

_CACHED_BLOCKS = 4
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Files(Protocol):
    """Files by their path below a directory."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        ...

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Any]:
        """The bytes of a range, in pieces of bounded size."""
        ...


class PlainFiles:
    """Files as they are. Any thread may call it.

    Args:
        filesystem: Where they are.
        path: Of their directory.
        timeout_s: Bound of each piece.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str, timeout_s: float) -> None:
        self._filesystem, self._path, self._timeout_s = filesystem, path, timeout_s

    def size(self, name: str) -> int | None:
        """See `Files`."""
        path = join(self._path, name)
        what = f"Looking at {describe(self._filesystem, path)}"

        def look() -> int | None:
            with reading(what):
                info = self._filesystem.get_file_info(path)
            return info.size if info.type == pafs.FileType.File else None

        return retried(look, Deadline.after(self._timeout_s), what)

    def pieces(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """See `Files`."""
        path = join(self._path, name)
        what = f"Reading {describe(self._filesystem, path)}"
        for first in range(start, stop, PIECE_BYTES):
            size = min(PIECE_BYTES, stop - first)

            def read(first: int = first, size: int = size) -> bytes:
                with reading(what), self._filesystem.open_input_file(path) as file:
                    return file.read_at(size, first)

            yield retried(read, Deadline.after(self._timeout_s), what)


class VerifiedFiles:
    """Files of a manifest, of which every byte is compared with its digest. Any thread may call it.

    Args:
        filesystem: Where they are.
        path: Of the checkpoint.
        records: The manifest's.
        timeout_s: Bound of each block.
    """

    def __init__(
        self, filesystem: pafs.FileSystem, path: str, records: Mapping[str, FileRecord], timeout_s: float
    ) -> None:
        self._filesystem, self._path, self._records, self._timeout_s = filesystem, path, records, timeout_s
        self._blocks: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
        # Requests for the same block come together; it is to be read once.
        self._lock = threading.Lock()

    def size(self, name: str) -> int | None:
        """See `Files`."""
        record = self._records.get(name)
        return None if record is None else record.size

    def pieces(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """See `Files`."""
        segment = Segment.of_file(join(self._path, name), self._records[name])
        for run in segment.runs(start, stop):
            block = self._block(name, segment, run)
            yield memoryview(block)[max(start - run[0], 0) : stop - run[0]]

    def _block(self, name: str, segment: Segment, run: tuple[int, int, str]) -> bytearray:
        with self._lock:
            key = (name, run[0])
            if key not in self._blocks:
                while len(self._blocks) >= _CACHED_BLOCKS:
                    self._blocks.popitem(last=False)
                self._blocks[key] = read_block(self._filesystem, segment, run, Deadline.after(self._timeout_s))
            self._blocks.move_to_end(key)
            return self._blocks[key]


class FileServer:
    """Serves files until it is closed.

    Attributes:
        error: What the first file that could not be read raised: HTTP would lose it.
    """

    def __init__(self, files: Files) -> None:
        self.error: CheckpointError | None = None
        self._secret = secrets.token_urlsafe(24)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler(files))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True, name="rjc-loopback"
        )
        _never_by_proxy("127.0.0.1")
        self._thread.start()

    def spec(self, name: str) -> dict[str, Any]:
        """The kvstore, for tensorstore, of what is below a path; a directory's ends with "/"."""
        base = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {"driver": "http", "base_url": base, "path": urllib.parse.quote(f"/{self._secret}/{name}")}

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self, files: Files) -> type[http.server.BaseHTTPRequestHandler]:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # An answer is a head and a body: they must not wait for each other's acknowledgement.
            wbufsize = 1 << 16
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

            def do_GET(self) -> None:
                """Answers with a file or a range of it."""
                try:
                    self._answer()
                except CheckpointError as error:
                    server.error = server.error or error
                    # What is not answered in full is asked for once more and fails then.
                    self.close_connection = True

            def _answer(self) -> None:
                prefix, name = f"/{server._secret}/", urllib.parse.unquote(self.path)
                size = files.size(name.removeprefix(prefix)) if name.startswith(prefix) and not server.error else None
                if size is None:
                    self.send_response(404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                found = _RANGE.fullmatch(self.headers.get("Range", ""))
                start, stop = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
                pieces: Iterable[Any] = files.pieces(name.removeprefix(prefix), start, stop)
                if is_description(name):
                    # Also of a part: tensorstore asks for all of it.
                    check_size(size, name.removeprefix(prefix))
                    pieces = [b"".join(pieces)]
                    if (start, stop) == (0, size):
                        check(pieces[0], name.removeprefix(prefix))
                self.send_response(206 if found else 200)
                if found:
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
                self.send_header("Content-Length", str(max(0, stop - start)))
                self.send_header("ETag", '"1"')
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)

        return Handler


def _never_by_proxy(host: str) -> None:
    """A proxy for the world outside cannot serve this machine's loopback; tensorstore's HTTP client asks these."""
    for name in ("no_proxy", "NO_PROXY"):
        hosts = os.environ.get(name, "")
        if any(os.environ.get(proxy) for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")) and (
            host not in hosts.split(",")
        ):
            os.environ[name] = f"{hosts},{host}".strip(",")
