# SPDX-License-Identifier: Apache-2.0
"""Teacher forcing under speculative decoding, where vLLM's trace replay is refused.

The drafter's proposals are replaced by the imposed tokens before the target verifies
them, and verification accepts them all; log-probabilities are the target's own, from
the logits of each position. The draft's base logits (before its Markov bias) are read
for the imposed tokens, and kept with what the target says.

Works on the engine in this process, in eager mode: model runner V2's sampler, rejection
sampler and speculator of vLLM 0.33.0.
"""

from typing import Any

import torch

KEY = "forced_tokens"
"""In SamplingParams.extra_args: prompt and continuation, one list."""


class Forcing:
    """Imposes tokens on the requests that bring them."""

    def __init__(self, runner: Any) -> None:
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        self.states = runner.req_states
        width = runner.max_model_len + 64
        self.table = torch.zeros(
            (runner.max_num_reqs, width), dtype=torch.int64, device=runner.device
        )
        self.ends: dict[int, int] = {}
        self.drafts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._sampler(runner.sampler)
        self._verification(rejection_sampler)
        self._drafter(runner.speculator)

    def _at(self, index: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        position = position.long().clamp(0, self.table.shape[1] - 1)
        return self.table[index.long().clamp(min=0), position]

    def _sampler(self, sampler: Any) -> None:
        add_request, sample = sampler.add_request, sampler.sample

        def added(req_idx: int, params: Any) -> None:
            imposed = (params.extra_args or {}).get(KEY)
            if imposed is not None:
                self.table[req_idx].zero_()
                self.table[req_idx, : len(imposed)] = torch.tensor(imposed).to(self.table.device)
                self.ends[req_idx] = len(imposed)
            add_request(req_idx, params)

        def sampled(logits: Any, expanded: Any, idx: Any, idx_np: Any, pos: Any, *rest, **kwargs):
            tokens, processed = sample(logits, expanded, idx, idx_np, pos, *rest, **kwargs)
            return self._at(idx, pos + 1).to(tokens.dtype), processed

        sampler.add_request, sampler.sample = added, sampled

    def _verification(self, module: Any) -> None:
        verify = module.rejection_sample

        def accepted(processed, drafts, proposed, cu_num_logits, pos, idx, *rest, **kwargs):
            sampled, counts = verify(
                processed, drafts, proposed, cu_num_logits, pos, idx, *rest, **kwargs
            )
            first = pos[cu_num_logits[:-1].long()] + 1
            steps = torch.arange(sampled.shape[1], device=pos.device)
            imposed = self._at(idx[:, None], first[:, None] + steps[None, :])
            return imposed.to(sampled.dtype), cu_num_logits.diff().to(counts.dtype)

        module.rejection_sample = accepted

    def _drafter(self, speculator: Any) -> None:
        propose, logits = speculator.propose, speculator.model.compute_draft_logits

        def proposed(batch: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
            drafts = propose(batch, *rest, **kwargs)
            after = self.states.total_len.gpu[batch.idx_mapping.long()]
            steps = torch.arange(drafts.shape[1], device=drafts.device)
            imposed = self._at(batch.idx_mapping[:, None], after[:, None] + steps[None, :])
            return imposed.to(drafts.dtype)

        def asked(hidden: torch.Tensor) -> torch.Tensor:
            found = logits(hidden)
            count = found.shape[0]
            index = speculator.sample_idx_mapping[:count].clone()
            position = speculator.sample_pos[:count].clone()
            said = found.float().log_softmax(-1)
            said = said.gather(1, self._at(index, position)[:, None])[:, 0]
            self.drafts.append((index, position, said))
            return found

        speculator.propose = proposed
        speculator.model.compute_draft_logits = asked

    def taken(self) -> list[float]:
        """The draft's log-probabilities of imposed tokens since last asked, by request
        index, position and the order in which they were drafted."""
        found = []
        for order, (index, position, said) in enumerate(self.drafts):
            rows = zip(index.tolist(), position.tolist(), said.tolist(), strict=True)
            found += [(i, p, order, s) for i, p, s in rows if p < self.ends.get(i, 0)]
        self.drafts.clear()
        return [said for *_, said in sorted(found)]
