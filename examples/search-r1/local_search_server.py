"""A search engine over a file of passages, good enough to learn with: BM25, standard library only.

    python examples/search-r1/local_search_server.py --corpus corpus.jsonl --port 8000

The corpus has one JSON object per line with ``contents``. ``POST /retrieve`` with ``{"queries": [..], "topk": 3}``
answers ``{"result": [[{"document": {"contents": ..}, "score": ..}, ..], ..]}``, the protocol of Search-R1's retrievers:
a dense index can take this server's place without a change elsewhere. ``GET /health`` answers 200.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["Bm25", "make_server", "read_corpus"]

_WORD = re.compile(r"\w+")
_MAX_BODY_BYTES = 1 << 20


class Bm25:
    """Okapi BM25 (Robertson & Zaragoza 2009, eq. 3.15) with an inverted index."""

    def __init__(self, passages: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        self.passages = list(passages)
        counts = [Counter(_words(text)) for text in self.passages]
        lengths = [sum(count.values()) for count in counts]
        # 1.0 avoids a division by zero if no passage has a word.
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                # tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length))
                weight = times * (k1 + 1) / (times + k1 * (1 - b + b * length / mean))
                self._postings[word].append((number, weight))

    def search(self, query: str, topk: int) -> list[tuple[str, float]]:
        """The best passages with their scores, best first, equal ones in corpus order. Empty without a common word."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            postings = self._postings.get(word, [])
            # idf, with 1 added inside the logarithm so that frequent words never count against a passage
            idf = math.log(1 + (len(self.passages) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, weight in postings:
                scores[number] += idf * weight
        best = heapq.nsmallest(topk, scores.items(), key=lambda item: (-item[1], item[0]))
        return [(self.passages[number], score) for number, score in best]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def read_corpus(path: Path) -> list[str]:
    """Passages of a JSONL file.

    Raises:
        ValueError: a line is not a JSON object with ``contents``. Names file and line.
    """
    passages = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                passages.append(str(json.loads(line)["contents"]))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f'{path}:{number} is no JSON object with "contents": {line[:80]!r}') from error
    if not passages:
        raise ValueError(f"{path} has no passage")
    return passages


def make_server(index: Bm25, host: str, port: int) -> ThreadingHTTPServer:
    """A server that is bound and not yet serving. Port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        # Keeps connections open between requests.
        protocol_version = "HTTP/1.1"
        # Headers and body are two writes: Nagle's algorithm would hold the second one back for up to 40 ms.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if self.path != "/retrieve" or length > _MAX_BODY_BYTES:
                # The body is left unread, and would pass for the next request of this connection.
                self.close_connection = True
                return self._answer(404 if self.path != "/retrieve" else 413, {"error": "POST /retrieve, below 1 MiB"})
            try:
                body = json.loads(self.rfile.read(length))
                queries, topk = [str(query) for query in body["queries"]], int(body.get("topk") or 3)
            except (ValueError, KeyError, TypeError) as error:
                return self._answer(400, {"error": f'expected {{"queries": [..], "topk": n}}: {error}'})
            hits = [index.search(query, topk) for query in queries]
            rows = [[{"document": {"contents": text}, "score": score} for text, score in found] for found in hits]
            self._answer(200, {"result": rows})

        def _answer(self, status: int, reply: Any) -> None:
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Log nothing: a run sends thousands of requests."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    try:
        index = Bm25(read_corpus(options.corpus))
    except (OSError, ValueError) as error:
        parser.error(f"--corpus {error}")
    server = make_server(index, options.host, options.port)
    print(f"{len(index.passages)} passages at http://{options.host}:{server.server_address[1]}/retrieve", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
