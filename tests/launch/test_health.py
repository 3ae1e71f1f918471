# SPDX-License-Identifier: Apache-2.0
"""The image's health check against real HTTP servers."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fork import ROOT


@pytest.fixture
def server():
    """Answers /health with ``server.status``, anything else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(self.server.status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    found = HTTPServer(("127.0.0.1", 0), Handler)
    found.status = 200
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def check(**environment):
    command = [sys.executable, "-I", ROOT / "docker/health.py"]
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (204, 1), (500, 1), (503, 1)])
def test_healthy_is_200_alone(server, status, code):
    server.status = status
    url = f"http://127.0.0.1:{server.server_port}/health"
    done = check(SM120_HEALTH_URL=url)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert not code or url in done.stderr


def test_nobody_there(server):
    port = server.server_port
    server.shutdown()
    server.server_close()
    done = check(SM120_HEALTH_URL=f"http://127.0.0.1:{port}/health")
    assert done.returncode == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("url", ["nonsense", "", "http://"])
def test_a_wrong_address_is_said(url):
    done = check(SM120_HEALTH_URL=url)
    assert done.returncode == 1 and done.stderr and "Traceback" not in done.stderr
