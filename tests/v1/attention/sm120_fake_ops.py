# SPDX-License-Identifier: Apache-2.0
"""Stand-in kernels for the ops, on a CPU: a right one for each, and its planted faults.

The right ones round where the real ones do (TF32, e4m3, bf16), so that the bounds are
tried too, and are written on their own: element by element, or by vLLM's torch functions.
"""

import faulthandler
import importlib.util
import math
import os
import sys
import time
from pathlib import Path

import torch

if str(Path(__file__).parent) not in sys.path:  # a child process imports it, too
    sys.path.append(str(Path(__file__).parent))

import sm120_fake_device as fake

torch.set_num_threads(1)  # tests run side by side

hyper = fake.load("sm120_op_hyper")
gemm = fake.load("sm120_op_gemm")
cache_ops = fake.load("sm120_op_cache")
logits_op = fake.load("sm120_op_logits")
topk_ops = fake.load("sm120_op_topk")
sampler_op = fake.load("sm120_op_sampler")
reference = fake.load("sm120_op_reference")
packed = fake.packed

# Small shapes of every op.
SHAPES = {
    "hc_prenorm": hyper.Prenorm(5, 512, 24, 4),
    "hc_fused": hyper.HyperFused(4, 256, 4, 20, 1e-6, 1e-20),
    "mxfp8": gemm.Mxfp8Linear("shared down", 3, 256, 576),
    "experts": gemm.Experts(6, 2, 5, 256, 128),
    "kv_insert": cache_ops.KVInsert(11, 3, 4, 64, 38016),
    "compressor": cache_ops.Compressor(19, 2, 64, 38016),
    "compressor 1": cache_ops.Compressor(19, 1, 64, 38016),
    "indexer_store": cache_ops.IndexerStore(20, 2, 64, 9216),
    "prefill_logits": logits_op.PrefillLogits(9, 4, 64, 150, 9216),
    "topk": topk_ops.TopK(9, 1000, 900, 32),
    "candidates": topk_ops.Candidates(8, 1000, 900, 16, 8),
    "sampler": sampler_op.Sampler(64, 1000),
}


def vllm_torch():
    """vLLM's own torch functions of the hyper-connection: its file, without vLLM."""
    found = importlib.util.find_spec("vllm")
    path = Path(found.origin).parent / "model_executor" / "kernels" / "mhc" / "torch.py"
    spec = importlib.util.spec_from_file_location("mhc_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prenorm(op):
    def call(given):
        fn = given["fn"].contiguous().view(torch.int32) + 0x1000
        tf32 = (fn & ~0x1FFF).view(torch.float32)
        x = given["x"].float()
        return {"out": x @ tf32.T, "sqrsum": x.square().sum(1, keepdim=True)}

    return call


def hyper_fused(op):
    mhc = vllm_torch()

    def call(given):
        streams = mhc.mhc_post_torch(given["x"], given["residual"], given["post"], given["mixture"])
        post, mixture, hidden, pre = mhc.mhc_pre_delayed_torch(
            streams,
            given["fn"],
            given["scale"],
            given["base"],
            op.norm_eps,
            op.eps,
            op.eps,
            op.post_factor,
            op.rounds,
            given["pre"],
        )
        hidden = torch.nn.functional.rms_norm(
            hidden.float(), (op.hidden,), given["norm"].float(), op.norm_eps
        )
        return {
            "streams": streams,
            "post": post.squeeze(-1),
            "mixture": mixture.flatten(1),
            "hidden": hidden.bfloat16(),
            "next_pre": pre,
            "mean": streams.float().mean(1).bfloat16(),
        }

    return call


def e4m3(values, group):
    """Rounded to e4m3 with one power of two for each ``group`` values."""
    parts = values.double().unflatten(-1, (-1, group))
    exponent = (parts.abs().amax(-1, keepdim=True) / 448).log2().ceil()
    scale = exponent.exp2()
    return ((parts / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def mxfp8(op):
    def call(given):
        scales = torch.exp2(given["scales"].double() - 127).repeat_interleave(32, 1)
        weight = given["weight"].double() * scales
        return {"out": (e4m3(given["x"], 32) @ weight.T).bfloat16()}

    return call


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def fp4(data, scales):
    low = torch.tensor(E2M1, dtype=torch.float64)[(data % 16).long()]
    high = torch.tensor(E2M1, dtype=torch.float64)[(data // 16).long()]
    out = torch.empty(*data.shape[:-1], data.shape[-1] * 2, dtype=torch.float64)
    out[..., 0::2], out[..., 1::2] = low, high
    return out * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


def experts(op):
    def call(given):
        weights = {
            int(e): [fp4(given[f"w{n}"][e], given[f"s{n}"][e]) for n in ("13", "2")]
            for e in given["ids"].unique()
        }
        x, middle = e4m3(given["x"], 128), e4m3(given["middle"], 128)
        first = torch.zeros(*given["ids"].shape, 2 * op.inner, dtype=torch.bfloat16)
        second = torch.zeros(*given["ids"].shape, op.hidden, dtype=torch.bfloat16)
        for token, ids in enumerate(given["ids"].tolist()):
            for slot, expert in enumerate(ids):
                w13, w2 = weights[expert]
                first[token, slot] = w13 @ x[token]
                second[token, slot] = w2 @ middle[token, slot]
        return {"x8": x, "middle8": middle, "first": first, "second": second}

    return call


def turned(row, angles):
    """GPT-J rotation of one row's last 64 values, pair by pair."""
    out = row.double().clone()
    for pair in range(32):
        cos, sin = float(angles[pair]), float(angles[32 + pair])
        even, odd = float(row[-64 + 2 * pair]), float(row[-63 + 2 * pair])
        out[-64 + 2 * pair] = even * cos - odd * sin
        out[-63 + 2 * pair] = odd * cos + even * sin
    return out


def write_record(cache, page, slot, values):
    """One record's 584 bytes, packed alone and put where the page has them."""
    data = packed.pack_records(values[None], 1)[0]
    block, row = divmod(slot, page)
    cache[block, row * 576 : row * 576 + 576] = data[:576]
    cache[block, page * 576 + row * 8 : page * 576 + row * 8 + 8] = data[576:584]


def kv_insert(op, write=write_record):
    def call(given):
        cache = cache_ops._copy(given["cache"])
        q = torch.zeros(op.tokens, op.padded_heads, 512, dtype=torch.bfloat16)
        for token in range(op.tokens):
            angles = given["cos_sin"][given["positions"][token]]
            for head in range(op.heads):
                q[token, head] = turned(given["q"][token, head], angles)
            slot = int(given["slots"][token])
            if slot >= 0:
                write(cache, op.page, slot, turned(given["kv"][token], angles))
        return op.outputs(given, q, cache)

    return call


def compressor(op, write=write_record):
    def call(given):
        cache, ring = cache_ops._copy(given["cache"]), given["ring"].clone()
        latent = torch.zeros(op.tokens, 512, dtype=torch.bfloat16)
        starts = given["starts"].tolist()
        for request in range(3):
            for token in range(starts[request], starts[request + 1]):
                position, row = int(given["positions"][token]), given["rows"][token]
                if op.ratio == 1:
                    pooled = row
                    if given["slots"][token] < 0:
                        continue
                else:
                    block = int(given["ring_slots"][token]) // op.capacity
                    before = ring[block, (position - 1) % op.capacity].clone()
                    ring[block, position % op.capacity] = row
                    if position % 2 == 0:
                        continue
                    gate = torch.sigmoid(row[512:] - before[512:])
                    pooled = gate * row[:512] + (1 - gate) * before[:512]
                size = math.sqrt(float(pooled.double().square().mean()) + op.eps)
                latent[token] = pooled / size * given["norm"].float()
                slot = int(given["slots"][token])
                if slot >= 0:
                    angles = given["cos_sin"][position - position % op.ratio]
                    write(cache, op.page, slot, turned(latent[token], angles))
        return op.outputs(given, latent, ring, cache)

    return call


def write_key(cache, page, slot, values):
    data = packed.pack_index_keys(values[None], 1)[0]
    block, row = divmod(slot, page)
    cache[block, row * 128 : row * 128 + 128] = data[:128]
    cache[block, page * 128 + row * 4 : page * 128 + row * 4 + 4] = data[128:132]


def indexer_store(op, write=write_key):
    def call(given):
        cache = cache_ops._copy(given["cache"])
        for token in range(op.tokens):
            position, slot = int(given["positions"][token]), int(given["slots"][token])
            if slot < 0 or (position + 1) % op.ratio:
                continue
            row = given["rows"][token].float()
            size = math.sqrt(float(row.double().square().mean()) + op.eps)
            normed = (row / size * given["norm"].float()).bfloat16()
            angles = given["cos_sin"][position - position % op.ratio]
            write(cache, op.page, slot, turned(normed, angles).bfloat16())
        return op.outputs(given, cache)

    return call


def prefill_logits(op):
    def call(given):
        values = packed.unpack_index_keys(given["cache"], op.page, op.slots(given))
        starts, ends = given["starts"].tolist(), given["ends"].tolist()
        widest = max(e - s for s, e in zip(starts, ends, strict=True))
        logits = torch.full((op.tokens, widest), math.nan)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            dots = given["q"][row].float() @ values[start:end].float().T
            logits[row, : end - start] = (given["weights"][row] @ dots.relu()).float()
        return {"keys": values, "logits": logits}

    return call


def topk(op):
    def call(given):
        out = torch.full((op.tokens, op.k), -1, dtype=torch.int32)
        for row, length in enumerate(given["lengths"].flatten().tolist()):
            order = sorted(range(length), key=lambda i: -float(given["logits"][row, i]))
            out[row, : min(op.k, length)] = torch.tensor(order[: op.k], dtype=torch.int32)
        return {"indices": out}

    return call


def candidates(op):
    def call(given):
        blocks = torch.full((op.tokens, op.blocks), -1, dtype=torch.int32)
        masked = torch.full_like(given["logits"], -math.inf)
        for row, length in enumerate(given["lengths"].tolist()):
            logits = given["logits"][row]
            best = {}
            for column in range(length):
                block = column // op.block
                best[block] = max(best.get(block, -math.inf), float(logits[column]))
            if length:
                best[(length - 1) // op.block] = math.inf
            chosen = sorted(best, key=lambda b: -best[b])[: op.blocks]
            blocks[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            for column in range(length):
                if column // op.block in chosen:
                    masked[row, column] = logits[column]
        return {"blocks": blocks, "masked": masked}

    return call


def sampler(op):
    def call(given):
        logits = given["logits"].clone()
        logits[logits < logits.topk(op.top_k).values[-1]] = -math.inf
        chances, order = logits.softmax(0).sort(descending=True)
        keep = int((chances.cumsum(0) < op.top_p).sum()) + 1
        drawn = torch.multinomial(chances[:keep], op.tokens * op.draws, replacement=True)
        return {"tokens": order[drawn].view(op.draws, op.tokens)}

    return call


def once(make):
    """Computes once for the same inputs: repeats of a right kernel are not the point."""

    def kernel(op):
        call, known = make(op), {}

        def cached(given):
            if known.get("given") is not given:
                known.update(given=given, got=call(given))
            return known["got"]

        return cached

    return kernel


RIGHT = {
    "hc_prenorm": prenorm,
    "hc_fused": hyper_fused,
    "mxfp8": mxfp8,
    "experts": experts,
    "kv_insert": kv_insert,
    "compressor": compressor,
    "compressor 1": compressor,
    "indexer_store": indexer_store,
    "prefill_logits": prefill_logits,
    "topk": topk,
    "candidates": candidates,
    "sampler": sampler,
}
RIGHT = {name: once(make) for name, make in RIGHT.items()}


def on_inputs(make, change):
    """A kernel that sees inputs changed by ``change(op, given)``."""
    return lambda op: lambda given: make(op)(change(op, dict(given)))


def on_outputs(make, change):
    """A kernel whose outputs are changed by ``change(op, given, got)``, in place."""

    def kernel(op):
        def call(given):
            got = {name: tensor.clone() for name, tensor in make(op)(given).items()}
            change(op, given, got)
            return got

        return call

    return kernel


def put(name, at, value):
    def change(op, given, got):
        got[name][at] = value

    return change


def swapped(*names):
    return lambda op, given: given | {names[0]: given[names[1]], names[1]: given[names[0]]}


def altered(name, change):
    return lambda op, given: given | {name: change(given[name])}


def _no_last_group(op, given):
    """As where the scales of a K tail that is no whole tile are not read."""
    scales = given["scales"].clone()
    scales[:, -2:] = 0
    return given | {"scales": scales}


def _one_record_off(write):
    return lambda cache, page, slot, values: write(
        cache, page, (slot + 1) % (cache.shape[0] * page), values
    )


def _interleaved(cache, page, slot, values):
    """A record's scales behind its own data."""
    data = packed.pack_records(values[None], 1)[0]
    block, row = divmod(slot, page)
    cache[block, row * 584 : row * 584 + 584] = data[:584]


def _scale_one_up(cache, page, slot, values):
    write_record(cache, page, slot, values)
    block, row = divmod(slot, page)
    cache[block, page * 576 + row * 8] += 1


def _stray_byte(write):
    """Writes into another layer's page, behind this one."""

    def stray(cache, page, slot, values):
        write(cache, page, slot, values)
        cache.as_strided((1,), (1,), 3)[0] = 0

    return stray


def _key_scale_next(cache, page, slot, values):
    write_key(cache, page, slot, values)
    block, row = divmod(slot, page)
    cache[block, page * 128 + row * 4 + 3] += 1


def _greedy(op, given, got):
    got["tokens"][:] = given["logits"].argmax()


def _second_token_never(op, given, got):
    order = given["logits"].argsort(descending=True)
    got["tokens"][got["tokens"] == order[1]] = order[0]


def _outside(op, given, got):
    got["tokens"][3, 5] = given["logits"].argsort(descending=True)[op.top_k]


def _past_the_end(op, given, got):
    got["indices"][0, 0] = int(given["lengths"][0])


def _twice(op, given, got):
    got["indices"][0, 1] = got["indices"][0, 0]


def _smallest_missed(op, given, got):
    taken = set(got["indices"][0].tolist())
    order = given["logits"][0, : int(given["lengths"][0])].argsort()
    got["indices"][0, -1] = next(i for i in order.tolist() if i not in taken)


def _newest_missing(op, given, got):
    newest = (int(given["lengths"][0]) - 1) // op.block
    taken = set(got["blocks"][0].tolist())
    other = next(b for b in range(newest) if b not in taken)
    got["blocks"][0][got["blocks"][0] == newest] = other


def _logit_kept(op, given, got):
    row = got["masked"][0]
    hidden = (row == -math.inf).nonzero()[0]
    row[hidden] = given["logits"][0, hidden]


def _tail_kept(op, given, got):
    got["masked"][1, int(given["lengths"][1])] = 1e30


def _half(fn):
    return (torch.arange(fn.shape[1]) < fn.shape[1] * 3 // 4).float()


def _nan_logit(op, given, got):
    got["logits"][0, 0] = math.nan


def _doubled_row(name):
    def change(op, given, got):
        got[name][-1] *= 2

    return change


FAULTS = {
    "hc_prenorm": {
        "last element dropped": on_inputs(
            prenorm, altered("x", lambda x: torch.cat((x[:, :-1], 0 * x[:, -1:]), 1))
        ),
        "a split dropped": on_inputs(prenorm, altered("fn", lambda fn: fn * _half(fn))),
        "last row doubled": on_outputs(prenorm, _doubled_row("out")),
        "no square": on_outputs(prenorm, _doubled_row("sqrsum")),
        "unwritten": on_outputs(prenorm, put("out", (0, 0), math.nan)),
    },
    "hc_fused": {
        "mixture transposed": on_inputs(hyper_fused, altered("mixture", lambda m: m.mT)),
        "streams swapped": on_inputs(hyper_fused, altered("residual", lambda r: r.roll(1, 1))),
        "pre not carried": on_inputs(hyper_fused, altered("pre", torch.ones_like)),
        "scales swapped": on_inputs(hyper_fused, altered("scale", lambda s: s.roll(1))),
        "a Sinkhorn too few": on_outputs(hyper_fused, _doubled_row("mixture")),
        "mean is a sum": on_outputs(hyper_fused, _doubled_row("mean")),
    },
    "mxfp8": {
        "tail scales": on_inputs(mxfp8, _no_last_group),
        "scales one row off": on_inputs(mxfp8, altered("scales", lambda s: s.roll(1, 0))),
        "scales one group off": on_inputs(mxfp8, altered("scales", lambda s: s.roll(1, 1))),
        "a row unwritten": on_outputs(mxfp8, put("out", 1, 0.0)),
        "not a number": on_outputs(mxfp8, put("out", (2, 3), math.nan)),
    },
    "experts": {
        "next expert": on_inputs(experts, altered("ids", lambda ids: (ids + 1) % 5)),
        "nibbles swapped": on_inputs(experts, altered("w13", lambda w: (w % 16) * 16 + w // 16)),
        "scales of another expert": on_inputs(experts, altered("s2", lambda s: s.roll(1, 0))),
        "a group's scale": on_inputs(experts, altered("s13", lambda s: s.roll(1, 2))),
        "gate and up swapped": on_inputs(experts, altered("w13", lambda w: w.roll(128, 1))),
        "a row unwritten": on_outputs(experts, put("second", (5, 1), math.nan)),
    },
    "kv_insert": {
        "one slot off": lambda op: kv_insert(op, _one_record_off(write_record)),
        "interleaved scales": lambda op: kv_insert(op, _interleaved),
        "scale one up": lambda op: kv_insert(op, _scale_one_up),
        "outside of its page": lambda op: kv_insert(op, _stray_byte(write_record)),
        "sine's sign": on_inputs(
            kv_insert, altered("cos_sin", lambda c: torch.cat((c[:, :32], -c[:, 32:]), 1))
        ),
        "position one off": on_inputs(kv_insert, altered("positions", lambda p: (p + 1) % 512)),
        "padding not zero": on_outputs(kv_insert, put("q", (0, 3, 0), 1.0)),
    },
    "compressor": {
        "ring one row off": on_inputs(compressor, altered("ring", lambda r: r.roll(1, 1))),
        "gate upside down": on_inputs(
            compressor,
            altered("rows", lambda r: torch.cat((r[:, :512], -r[:, 512:]), 1)),
        ),
        "one slot off": lambda op: compressor(op, _one_record_off(write_record)),
        "interleaved scales": lambda op: compressor(op, _interleaved),
        "outside of its page": lambda op: compressor(op, _stray_byte(write_record)),
        "own position": on_inputs(compressor, altered("cos_sin", lambda c: c.roll(-1, 0))),
        "ring not written": on_outputs(compressor, put("ring", (3, 7), 0.0)),
    },
    "compressor 1": {
        "norm ignored": on_inputs(compressor, altered("norm", torch.ones_like)),
        "scale one up": lambda op: compressor(op, _scale_one_up),
        "ring written": on_outputs(compressor, put("ring", (0, 0, 0), 0.5)),
    },
    "indexer_store": {
        "one slot off": lambda op: indexer_store(op, _one_record_off(write_key)),
        "scale doubled": lambda op: indexer_store(op, _key_scale_next),
        "outside of its page": lambda op: indexer_store(op, _stray_byte(write_key)),
        "norm ignored": on_inputs(indexer_store, altered("norm", torch.ones_like)),
        "every position": on_inputs(indexer_store, altered("positions", lambda p: p | 1)),
    },
    "prefill_logits": {
        "a page off": on_inputs(prefill_logits, altered("table", lambda t: t.roll(1, 1))),
        "requests swapped": on_inputs(prefill_logits, altered("table", lambda t: t.flip(0))),
        "heads swapped": on_inputs(prefill_logits, altered("weights", lambda w: w.roll(1, 1))),
        "one key off": on_inputs(prefill_logits, altered("starts", lambda s: (s - 1).clamp_min(0))),
        "not a number": on_outputs(prefill_logits, _nan_logit),
        "one row doubled": on_outputs(prefill_logits, _doubled_row("logits")),
    },
    "topk": {
        "past the end": on_outputs(topk, _past_the_end),
        "twice": on_outputs(topk, _twice),
        "one missed": on_outputs(topk, _smallest_missed),
        "one too few": on_outputs(topk, put("indices", (2, 0), -1)),
        "ends ignored": on_inputs(topk, altered("lengths", lambda n: torch.full_like(n, 900))),
    },
    "candidates": {
        "newest missing": on_outputs(candidates, _newest_missing),
        "a logit kept": on_outputs(candidates, _logit_kept),
        "tail kept": on_outputs(candidates, _tail_kept),
        "unwritten": on_outputs(candidates, put("blocks", (0, 0), -7)),
        "ends ignored": on_inputs(
            candidates, altered("lengths", lambda n: torch.full_like(n, 900))
        ),
    },
    "sampler": {
        "greedy": on_outputs(sampler, _greedy),
        "one token never": on_outputs(sampler, _second_token_never),
        "outside of top-k": on_outputs(sampler, _outside),
        "past the vocabulary": on_outputs(sampler, put("tokens", (0, 0), 1000)),
        "flattened": on_inputs(sampler, altered("logits", lambda x: x / 2)),
    },
}


class Race:
    """A kernel whose outputs have one bit turned in its 13th call."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, 0

    def __call__(self, given):
        got = self.kernel(given)
        self.calls += 1
        if self.calls == 13:
            name = next(n for n in ("logits", "first", "indices", *got) if n in got)
            got[name] = got[name].clone()
            got[name].view(torch.uint8)[0, 0] ^= 1
        return got


# Made in a child, by name.


def right_topk(op):
    return topk(op)


def crash(op):
    def call(given):
        faulthandler.disable()  # pytest's, which would print a page
        os.write(2, b"CUDA error: an illegal memory access was encountered\n")
        os.abort()

    return call


def hang(op):
    return lambda given: time.sleep(3600)


class _HangsLater:
    def __init__(self, op):
        self.kernel, self.calls = topk(op), 0

    def __call__(self, given):
        self.calls += 1
        if self.calls > 1:
            time.sleep(3600)
        return self.kernel(given)


def hangs_later(op):
    """Right once, and then it hangs: no compiler, that."""
    return _HangsLater(op)


def slow_first(op):
    """Compiles for two seconds."""

    def call(given):
        if not call.warm:
            time.sleep(2)
            call.warm = True
        return topk(op)(given)

    call.warm = False
    return call


def no_library(op):
    raise ImportError("No module named 'deep_gemm'")


def no_entry(op):
    return torch.ops._C.an_op_that_no_build_has
