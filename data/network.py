"""Does a server answer within a second?

The libraries that download vocabularies and datasets retry for half a minute, or have no timeout at
all. Behind a closed network that looks like a hang, so our code asks here first.
"""

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def answers(url: str, timeout: float = 5.0) -> bool:
    """Whether the host of `url`, or its proxy, accepts a connection within `timeout` seconds."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme)
    if proxy and not proxy_bypass(target.hostname):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (target.hostname, target.port or (443 if target.scheme == "https" else 80))
    connected = threading.Event()

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection(address, timeout=timeout).close()
            connected.set()

    # resolving a name has no timeout, so it runs in a thread that we can leave behind
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout)
    return connected.is_set()
