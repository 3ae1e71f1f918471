# SPDX-License-Identifier: Apache-2.0
"""Whether the server in this container is up: exit 0 where its /health answers 200.

With the standard library alone: no curl is needed. SM120_HEALTH_URL names another address
than vLLM's default, for a server with `--port` or `--host`.
"""

import os
import sys
import urllib.request

URL = "http://127.0.0.1:8000/health"


def main():
    """Asks, past any proxy, and exits."""
    url = os.environ.get("SM120_HEALTH_URL", URL)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        status = opener.open(url, timeout=10).status
    except (OSError, ValueError) as error:
        sys.exit(f"{url}: {error}")
    if status != 200:
        sys.exit(f"{url}: answered {status}")


if __name__ == "__main__":
    main()
