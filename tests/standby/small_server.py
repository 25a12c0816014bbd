"""A server that is one for attaching: an HTTP port, schedulers in processes of their own, no SGLang.

Run as ``python small_server.py sglang.launch_server [--ranks N] [--starting] [--no-hicache] ...`` by any Python
from 3.10 on. It prints its port and its schedulers' process ids, answers each line that it reads with what its
schedulers say of themselves, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("word")
    parser.add_argument("--role", default="server")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--starting", action="store_true", help="the schedulers never end their constructor")
    parser.add_argument("--not-listening", action="store_true")
    parser.add_argument("--no-hicache", action="store_true")
    parser.add_argument("--asleep", action="store_true", help="the main thread runs no Python")
    parser.add_argument("--quiet", action="store_true", help="the server does not say whether it has HiCache")
    given = parser.parse_args()
    if given.role == "server":
        serve(given)
    else:
        schedule(given)


def serve(given: argparse.Namespace) -> None:
    """Start the schedulers, answer, and end everything when the input ends."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/server_info" or given.quiet:
                self.send_error(404)
                return
            body = json.dumps({"version": "0.0", "enable_hierarchical_cache": not given.no_hicache}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    children = []
    for rank in range(given.ranks):
        title = f"sglang::scheduler_TP{rank}"
        command = [title, __file__, "word", *sys.argv[2:], "--role", "scheduler", "--rank", str(rank)]
        child = subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        children.append(child)
    port = 0
    if not given.not_listening:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"port": port, "schedulers": [child.pid for child in children]}), flush=True)
    for _ in sys.stdin:
        said = []
        for child in children:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(b"\n")
            child.stdin.flush()
            said.append(json.loads(child.stdout.readline()))
        print(json.dumps(said), flush=True)
    for child in children:
        child.kill()
        child.wait()


def schedule(given: argparse.Namespace) -> None:
    """One scheduler: its loop on the main thread, and others that want the GIL, too."""
    from fakes import HiRadixCache, Scheduler, sglang

    originals = (Scheduler.__init__, Scheduler.get_next_batch_to_run, HiRadixCache.match_prefix)
    paths, names = list(sys.path), set(vars(sys.modules["__main__"]))

    def answer() -> None:
        for _ in sys.stdin:
            functions = (Scheduler.__init__, Scheduler.get_next_batch_to_run, HiRadixCache.match_prefix)
            state = {
                "originals": all(a is b for a, b in zip(functions, originals)),  # noqa: B905 - of Python 3.10, too
                "same_path": sys.path == paths,
                "new_names": sorted(set(vars(sys.modules["__main__"])) - names),
                "threads": sorted(thread.name for thread in threading.enumerate()),
                "kvwitness": getattr(sys.modules.get("kvwitness.patches"), "__file__", None),
            }
            print(json.dumps(state), flush=True)
        os._exit(0)

    def busy() -> None:
        while True:
            sum(range(20_000))
            time.sleep(0.002)

    with sglang():
        for number in range(3):
            threading.Thread(target=busy, daemon=True, name=f"busy-{number}").start()
        threading.Thread(target=answer, daemon=True, name="answer").start()
        print("up", flush=True)
        if given.starting:

            class Starting(Scheduler):
                def __init__(self) -> None:
                    while True:
                        time.sleep(0.001)

            code = Starting.__init__.__code__
            Starting.__init__.__code__ = code.replace(co_qualname="Scheduler.__init__")
            Starting()
        scheduler = Scheduler()
        scheduler.server_args.tp_size = given.ranks
        scheduler.tp_rank = given.rank  # type: ignore[attr-defined]
        if given.no_hicache:
            scheduler.tree_cache.cache_controller = None
        if given.asleep:
            subprocess.Popen(["sleep", "60"]).wait()
        while True:
            scheduler.get_next_batch_to_run()
            time.sleep(0.001)


if __name__ == "__main__":
    main()
