# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of four nodes, 127.0.0.11 to .14, until standard input ends. Prints its
address and the process numbers of each node's raylet as one line of JSON."""

import json
import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

cluster = Cluster()
raylets = {}
for number in range(1, 5):
    address = f"127.0.0.1{number}"
    node = cluster.add_node(
        node_ip_address=address,
        num_cpus=1,
        object_store_memory=80 << 20,
        include_dashboard=False,
        resources={f"host{number}": 1},
    )
    raylets[address] = node.all_processes["raylet"][0].process.pid
print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
sys.stdin.read()
cluster.shutdown()
