# SPDX-License-Identifier: Apache-2.0
"""``python -m fork``."""

from fork.cli import main

main()
