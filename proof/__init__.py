# SPDX-License-Identifier: Apache-2.0
"""The engine proof: a real vLLM engine on a GPU, stock against fork. See README.md."""
