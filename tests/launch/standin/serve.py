# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``vllm serve MODEL ARGV…`` in a virtual environment: answers /health."""

import http.server
import os
import sys

with open(os.environ["WITNESS"], "a") as log:
    log.write(f"engine venv {' '.join(sys.argv[2:])}\n")


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
