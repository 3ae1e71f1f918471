# SPDX-License-Identifier: Apache-2.0
"""The rest of the path, beside attention and indexer: gates ``ops``, ``memory`` and
``toolchain``, and what of them was not evaluated.

A ``--capability`` is a hypothetical target: its toolchain is not this machine's, and
its memory is known only where the options say it.
"""

from typing import Any

from vllm.models.deepseek_v41.nvidia import sm120_rank_model as rank_model
from vllm.models.deepseek_v41.nvidia import sm120_selftest_memory as memory
from vllm.models.deepseek_v41.nvidia import sm120_selftest_ops as ops
from vllm.models.deepseek_v41.nvidia import sm120_selftest_switches as switches
from vllm.models.deepseek_v41.nvidia import sm120_selftest_toolchain as toolchain
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import (
    Fact,
    Refusal,
    Report,
)

GATES = ("memory", "ops", "toolchain")


class Path:
    """What the gates share: the target, and the models of its ranks.

    Args:
        report: gets facts, rows, refusals and warnings.
        options: the self-test's own.
        config: the VllmConfig.
        capability: of the target.
    """

    def __init__(
        self, report: Report, options: Any, config: Any, capability: tuple[int, int]
    ) -> None:
        self.report = report
        self.options = options
        self.config = config
        self.capability = capability
        self.hypothetical = capability if options.capability else None
        self.ranks: list[rank_model.RankModel] | None = None
        self.left = dict.fromkeys(GATES, "something before it was refused")
        self._say_what_is_left()

    def select(self) -> None:
        """The implementation of each op, and switches that mislead. Before the KV plan,
        which changes the configuration."""
        real = self.hypothetical is None
        switches.add(self.report, self.config, self.capability, real)
        if real:
            toolchain.check(self.report, self.capability)
            self._done("toolchain")
        else:
            self._done("toolchain", "--capability is a hypothetical target")
        try:
            with rank_model.as_target(self.hypothetical):
                self.ranks = rank_model.build(self.config)
                if self.options.calls is None:
                    ops.add(self.report, ops.choices(self.ranks, self.hypothetical))
        except rank_model.CannotBuild as error:
            if real and rank_model.deep_gemm_assumed():
                self.report.refusals.append(Refusal("ops", str(error)))
            self._done("ops", f"the model cannot be built here: {error}")
            self._done("memory", f"the model cannot be built here: {error}")
            return
        self._done("ops", None if self.options.calls is None else "--calls narrows")

    def remember(self, plan: Any) -> None:
        """What the ranks hold, once the KV cache is planned."""
        if self.ranks is None:
            return
        device, host = self._sizes()
        found = memory.needs(self.ranks, plan)
        memory.check(self.report, found, self.config, self.capability, device, host)
        missing = "no size is given (--device-memory-gib)" if device is None else None
        self._done("memory", missing)

    def _sizes(self) -> tuple[int | None, int | None]:
        """Bytes of a GPU and of the host: as given, else what this machine has."""
        given = self.options.device_memory_gib, self.options.host_memory_gib
        device, host = (int(g * memory.GIB) if g else None for g in given)
        if self.hypothetical is None and (device is None or host is None):
            gpus, here = memory.sizes_here(self.config)
            device, host = device or gpus, host or here
        return device, host

    def _done(self, gate: str, why_not: str | None = None) -> None:
        if why_not is None:
            self.left.pop(gate, None)
        else:
            self.left[gate] = why_not
        self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        why = "; ".join(f"{gate}: {said}" for gate, said in sorted(self.left.items()))
        self.report.facts["not_evaluated"] = Fact(
            sorted(self.left), why or "every gate was evaluated"
        )
