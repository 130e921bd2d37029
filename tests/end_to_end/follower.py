"""Another host in miniature: executes the calls that come over a socket, and says how many results were the same.

`python -m tests.end_to_end.follower PORT`; the last line it prints is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys

from jaxpage.replay import replay


def main(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        found = replay(connection.makefile("rb"))
    print(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
