# SPDX-License-Identifier: Apache-2.0
"""What every rank is at, while a launch runs: a live table, or lines where there is no
terminal. Goes to standard error: standard output is the result's."""

import threading
import time

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from sm120_launch.plan import LaunchPlan, RankPlan

_COLOURS = {"PASS": "green", "FAIL": "red", "NOT RUN": "yellow", "NO ANSWER": "red", "up": "green"}


class Board:
    """A context manager; ``told`` may be called from any thread."""

    def __init__(self, plan: LaunchPlan, console: Console, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        # By number and host: stopping also reaches hosts that have left the plan.
        self._lines = {(rank.rank, rank.host): ("waiting", self._begun) for rank in plan.ranks}
        self._live: Live | None = None

    def __enter__(self) -> "Board":
        if self._console.is_terminal and not self._quiet:
            self._live = Live(get_renderable=self._render, console=self._console)
            self._live.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def told(self, rank: RankPlan, line: str) -> None:
        with self._lock:
            before, _ = self._lines.get((rank.rank, rank.host), ("", 0.0))
            if line == before:
                return
            self._lines[rank.rank, rank.host] = (line, time.monotonic())
            # Without a terminal, an output's own lines would be too many.
            passing = line.startswith(("self-test: ", "staging: "))
            if self._live is None and not self._quiet and not passing:
                text = f"rank {rank.rank} on {rank.host}: {line}"
                self._console.print(escape(text), highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table()
        table.add_column("rank", justify="right")
        table.add_column("host")
        table.add_column("at", overflow="ellipsis", no_wrap=True, ratio=1)
        table.add_column("for", justify="right")
        now = time.monotonic()
        with self._lock:
            for (rank, host), (line, since) in self._lines.items():
                colour = next((c for word, c in _COLOURS.items() if line.startswith(word)), None)
                text = escape(line)
                shown = f"[{colour}]{text}[/]" if colour else text
                table.add_row(str(rank), escape(host), shown, f"{now - since:.0f} s")
        return Group(table)
