"""A server in this process that speaks as much of S3 as a directory of checkpoints needs.

Objects are in memory. `fails` decides for each request whether it ends with status 503.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape


class S3Server:
    """Serves one bucket at `endpoint` until the end of the ``with`` statement."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        self.fails: Callable[[int], bool] = lambda number: False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> S3Server:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        place = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                place.requests.append(f"{self.command} {self.path}")
                if place.fails(len(place.requests)):
                    self.reply(503)
                    return
                url = urlsplit(self.path)
                key = unquote(url.path).removeprefix("/bucket").lstrip("/")
                query = parse_qs(url.query, keep_blank_values=True)
                getattr(self, f"answer_{self.command.lower()}")(key, query, body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

            def answer_head(self, key: str, query: Any, body: bytes) -> None:
                self.answer_get(key, query, body)

            def answer_get(self, key: str, query: Any, body: bytes) -> None:
                if "list-type" in query:
                    prefix = query.get("prefix", [""])[0]
                    self.reply(200, place.listing(prefix, "delimiter" in query))
                elif key not in place.objects:
                    self.reply(404)
                elif "Range" in self.headers:
                    first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                    content = place.objects[key]
                    part = content[first : last + 1]
                    where = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
                    self.reply(206, part, {"Content-Range": where})
                else:
                    self.reply(200, place.objects[key])

            def answer_put(self, key: str, query: Any, body: bytes) -> None:
                if "partNumber" in query:
                    place.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
                else:
                    place.objects[key] = body
                self.reply(200)

            def answer_post(self, key: str, query: Any, body: bytes) -> None:
                if "delete" in query:
                    keys = [unescape(k) for k in re.findall(r"<Key>(.*?)</Key>", body.decode())]
                    for each in keys:
                        place.objects.pop(each, None)
                    gone = "".join(f"<Deleted><Key>{escape(k)}</Key></Deleted>" for k in keys)
                    self.reply(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
                elif "uploads" in query:
                    place.uploads[key] = {}
                    self.reply(
                        200,
                        f"<InitiateMultipartUploadResult><UploadId>{escape(key)}</UploadId>"
                        "</InitiateMultipartUploadResult>".encode(),
                    )
                else:
                    parts = place.uploads.pop(query["uploadId"][0])
                    place.objects[key] = b"".join(parts[number] for number in sorted(parts))
                    self.reply(
                        200,
                        b"<CompleteMultipartUploadResult><ETag>x</ETag>"
                        b"</CompleteMultipartUploadResult>",
                    )

            def answer_delete(self, key: str, query: Any, body: bytes) -> None:
                if "uploadId" in query:
                    place.uploads.pop(query["uploadId"][0], None)
                else:
                    place.objects.pop(key, None)
                self.reply(204)

            def reply(
                self, status: int, body: bytes = b"", headers: dict[str, str] | None = None
            ) -> None:
                self.send_response(status)
                self.send_header("ETag", '"x"')
                self.send_header("Last-Modified", "Mon, 23 Nov 2026 09:00:00 GMT")
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler

    def listing(self, prefix: str, directly: bool) -> bytes:
        """The objects below a prefix as XML; with `directly`, those of folders as folders."""
        folders, contents = set(), []
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            head, slash, _ = key[len(prefix) :].partition("/")
            if slash and directly:
                folders.add(f"{prefix}{head}/")
            else:
                contents.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
                    "<LastModified>2026-11-23T09:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
                )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
            for each in sorted(folders)
        )
        return f"<ListBucketResult>{''.join(contents)}{common}</ListBucketResult>".encode()
