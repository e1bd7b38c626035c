"""Single mistakes of kinds that other projects shipped, as edits like those of
tests.conformance.mutants.

Some lie in memory: state from an earlier call, unwritten memory, offsets and strides, rows that
share something. Others lie in sinks, windows, documents, biases, decoding and the merge of states.
"""

import torch

from tests.conformance.mutation import Mutant, kept, loop, mask, naive, ring, sink, softmax

# lines that several mistakes are made in
INTERVALS = "return VisibleKeys(lo, hi, num_keys)"
OUTPUTS = "return torch.cat(outs, -2), torch.cat(lses, -1)"
SAVED, CONTEXT = (
    "ctx.save_for_backward(q, k, v, out, lse)",
    "        ctx.loop = loop\n        return",
)
FROM_LSE = "return *ctx.loop.backward_from_lse(*ctx.saved_tensors, *gradients), None"
BEFORE_TILES = "tiles = self.visible.query_tiles(self.block_q)\n        if self.kv_outer"
ZERO_GRADIENTS = (
    "dk, dv = torch.zeros_like(k, dtype=self.dtype), torch.zeros_like(v, dtype=self.dtype)\n"
    "        for tile in self.visible.query_tiles(self.block_q):\n            rows"
)
TILE = "outputs = [self.query_tile(q[..., tile.rows, :], k, v, tile) for tile in tiles]"
DQ = "dq_rows += ds @ k_keys"
BACKWARD_SCORES = "self.scores(q_rows, k_keys, rows, keys, needs_mask)"
TILE_MAX = "next_max = self.next_max(scores.amax(-1, keepdim=True))"
TOTAL = "total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])"
SHARE = "share = torch.exp(lse - finite(total))"
SUNK = "return (out * share.unsqueeze(-1)).to(out.dtype), total"
WINDOW, SIDES = "(position - left).clamp(first, last)", "left, right = sides(window, causal=causal)"
VISIBLE = "visible_keys(q, k, causal=causal, **mask)"
NO_SUM, NO_ACC = "            row_sum,\n            row_sum.new_zeros", "row_sum.new_zeros((*q"
DOCUMENTS = "if document_ids is not None:\n        change"
CAPPED, CAP = "scores = self.softcap * capped", "derivative = 1 - capped * capped"
BIAS = "(self.slopes * (i - j)).to(self.dtype)"
SCORE_MOD = "self.score_mod(scores, b, h, i, j)"
FOLDED = "out, lse = (x.flatten(1, 2) for x in function.apply(q, k, v, loop))"
SLOPES = "slopes = alibi_slopes.detach().to(statistics_dtype(q))"
GROUPED = "return q, k.unsqueeze(2), v.unsqueeze(2)"
DELTA = "(do_rows * out[..., rows, :].to(self.dtype)).sum(-1, keepdim=True)"
DV, KEYS_WIDTH = "dv[..., keys, :] += (p.mT @ do_rows)", "keys, : q.shape[-1]]"
MERGED_MAX = "next_max = torch.maximum(self.row_max, other.row_max)"
MERGED_SUM = "row_sum=alpha * self.row_sum + beta * other.row_sum"
MERGED_ACC = "acc=alpha * self.acc + beta * other.acc"
MERGE_SCALES = (
    "alpha, beta = (torch.exp(state.row_max - finite(next_max)) for state in (self, other))"
)


def before_tiles(line: str) -> tuple[tuple[str, str, str], ...]:
    """Edits that insert a line at the start of the forward pass."""
    return loop((BEFORE_TILES, f"{line}\n        {BEFORE_TILES}"))


def late(name: str, says: str, condition: str) -> Mutant:
    """A mutant in which rows share a maximum, which shows only if one row is far greater."""
    return Mutant(
        name,
        says,
        softmax((TILE_MAX, TILE_MAX.replace("keepdim=True)", f"keepdim=True){condition}"))),
    )


CALLS = (
    Mutant(
        "output_reused",
        "A call writes into the output of the last call of that shape, as graphs with static "
        "buffers do.",
        loop(
            (
                OUTPUTS,
                f"out = {kept('(q.shape, q.dtype)', 'torch.empty_like(q)')}.data\n"
                "        return out.copy_(torch.cat(outs, -2)), torch.cat(lses, -1)",
            )
        ),
    ),
    Mutant(
        "lse_in_a_workspace",
        "All layers write lse into one workspace.",
        loop(
            (
                OUTPUTS,
                "lse = torch.cat(lses, -1)\n"
                f"        kept = {kept('(lse.shape, lse.dtype)', 'torch.empty_like(lse)')}.data\n"
                "        return torch.cat(outs, -2), kept.copy_(lse)",
            )
        ),
    ),
    Mutant(
        "saved_on_the_class",
        "What the backward pass needs is kept beside the function instead of in its context.",
        loop(
            (SAVED, "BackwardFromLse.saved = q, k, v, out, lse"),
            (FROM_LSE, FROM_LSE.replace("ctx.saved_tensors", "BackwardFromLse.saved")),
        ),
    ),
    Mutant(
        "settings_on_the_class",
        "The backward pass takes the mask of the last forward pass.",
        loop(
            (
                SAVED + "\n" + CONTEXT,
                SAVED + "\n        BackwardFromLse.loop = loop\n        return",
            ),
            (FROM_LSE, FROM_LSE.replace("ctx.loop", "BackwardFromLse.loop")),
        ),
    ),
    Mutant(
        "mask_kept_by_address",
        "A mask is kept for the address of its document_ids, as block masks are.",
        mask(
            (
                INTERVALS,
                "key = document_ids is not None and document_ids.data_ptr()\n"
                "    key = key, num_queries, num_keys, causal, window\n"
                f"    return {kept('key', 'VisibleKeys(lo, hi, num_keys)')}",
            )
        ),
    ),
    Mutant(
        "mask_kept_by_shape",
        "A mask is kept for its lengths alone.",
        mask(
            (
                INTERVALS,
                f"return {kept('(num_queries, num_keys)', 'VisibleKeys(lo, hi, num_keys)')}",
            )
        ),
    ),
    Mutant(
        "keys_kept_by_address",
        "Keys are made ready once for an address, as a descriptor is.",
        loop(
            (
                GROUPED,
                f"k = {kept('(k.data_ptr(), k.shape)', 'k.clone()')}\n    {GROUPED}",
            )
        ),
    ),
    Mutant(
        "slopes_kept",
        "The slopes of the first call with as many heads stay.",
        loop((SLOPES, f"slopes = {kept('len(alibi_slopes)', SLOPES.partition(' = ')[2])}")),
    ),
    Mutant(
        "gradients_accumulate",
        "dk is added to what the call before left.",
        loop(
            (
                ZERO_GRADIENTS,
                ZERO_GRADIENTS.replace(
                    "torch.zeros_like(k, dtype=self.dtype)",
                    kept("k.shape", "torch.zeros_like(k, dtype=self.dtype)"),
                ),
            )
        ),
    ),
)
MEMORY = (
    Mutant(
        "acc_uninitialised",
        "acc starts as it is found, because alpha is 0 (cudnn-frontend#1131: NaN times 0).",
        softmax((NO_ACC, NO_ACC.replace("zeros", "empty"))),
    ),
    Mutant(
        "sum_uninitialised",
        "row_sum starts as it is found, because alpha is 0.",
        softmax((NO_SUM, NO_SUM.replace("row_sum,", "torch.empty_like(row_sum),"))),
    ),
    Mutant(
        "workspace_not_cleared",
        "row_sum lies in a workspace, which is zero while it is new (flash-attention's varlen "
        "backward: right alone, NaN after other tests).",
        softmax(
            (
                NO_SUM,
                NO_SUM.replace(
                    "row_sum,", "row_sum.new_empty(2**24)[: row_sum.numel()].view_as(row_sum),"
                ),
            )
        ),
    ),
    Mutant(
        "dq_uninitialised",
        "dq is added to what is found.",
        loop(("dq_rows = torch.zeros_like(q_rows)", "dq_rows = torch.empty_like(q_rows)")),
    ),
    Mutant(
        "dv_uninitialised",
        "dv is added to what is found.",
        loop((ZERO_GRADIENTS, ZERO_GRADIENTS.replace("zeros_like(v", "empty_like(v"))),
    ),
    Mutant(
        "tiles_without_keys_not_written",
        "A query tile that sees no key returns before it has written its output.",
        loop(
            (
                TILE,
                "outputs = [\n"
                "                self.query_tile(q[..., tile.rows, :], k, v, tile)\n"
                "                if tile.first < tile.last\n"
                "                else (torch.empty_like(q[..., tile.rows, :]), "
                "q.new_full(q[..., tile.rows, 0].shape, -torch.inf, dtype=self.dtype))\n"
                "                for tile in tiles\n"
                "            ]",
            )
        ),
    ),
    Mutant(
        "tail_read_past_the_end",
        "A last tile reads whole rows past the end, whose weight is 0 (flash-attention's varlen).",
        loop(
            (
                "state = state.update(scores, v[..., keys, :])",
                "state = state.update(scores, v[..., keys, :])\n"
                "        steps, end = v.stride(), v.storage_offset() + v.shape[-2] * v.stride(-2)\n"
                "        size = *v.shape[:-2], keys.stop - v.shape[-2], v.shape[-1]\n"
                "        last = end + sum(s * (n - 1) for s, n in zip(steps, size))\n"
                "        if size[-2] > 0 and last < v.untyped_storage().nbytes() // v.itemsize:\n"
                "            more = 0 * v.as_strided(size, steps, end).sum(-2, keepdim=True)\n"
                "            state = replace(state, acc=state.acc + more)",
            )
        ),
    ),
)
STRIDES = (
    Mutant(
        "strides_in_32_bits",
        "A stride is kept in 32 bits (mlx#2894).",
        before_tiles(
            "q, k, v = (x.as_strided(x.shape, [s % 2**31 for s in x.stride()], x.storage_offset()) "
            "for x in (q, k, v))"
        ),
    ),
    Mutant(
        "offsets_in_32_bits",
        "Row times stride overflows 32 bits (pytorch#162588).",
        before_tiles(
            "n, step = torch.arange(k.shape[-2]), k.stride(-2)\n"
            "        k = torch.stack([k[..., (i * step % 2**31) // step, :] for i in n], -2)"
        ),
    ),
    Mutant(
        "values_with_strides_of_keys",
        "v is read with the strides of k.",
        before_tiles(
            "flat = v.as_strided((v.untyped_storage().nbytes() // v.itemsize,), (1,), 0)\n"
            "        offsets = torch.zeros((), dtype=torch.int64)\n"
            "        for size, stride in zip(v.shape, k.stride()):\n"
            "            offsets = offsets[..., None] + torch.arange(size) * stride\n"
            "        v = flat[(offsets + v.storage_offset()) % len(flat)]"
        ),
    ),
    Mutant(
        "broadcast_keys_misread",
        "Keys that a batch shares by a stride of 0 are read wrongly where one stands alone in its "
        "tile (pytorch#191937, M mod 32 = 1).",
        before_tiles(
            "if k.stride(0) == 0 and k.shape[-2] % 32 == 1:\n            k = k.roll(1, -2)"
        ),
    ),
    Mutant(
        "contiguous_assumed",
        "q is read as if it were contiguous.",
        before_tiles(
            "q = q.as_strided(q.shape, torch.empty(q.shape, device='meta').stride(), "
            "q.storage_offset())"
        ),
    ),
    Mutant(
        "gradient_contiguous_assumed",
        "d_out is read as if it were contiguous: out.sum() hands in an expanded number.",
        loop(
            (
                FROM_LSE,
                "d_out, d_lse = gradients\n"
                "        steps = torch.empty(d_out.shape, device='meta').stride()\n"
                "        d_out = torch.cat((d_out.as_strided((d_out.untyped_storage().nbytes() // "
                "d_out.itemsize,), (1,), 0), d_out.new_ones(d_out.numel())))"
                ".as_strided(d_out.shape, steps)\n"
                "        " + FROM_LSE.replace("*gradients", "d_out, d_lse"),
            )
        ),
    ),
)
ROWS = (
    late(
        "max_of_the_batch",
        "The sequences of a batch share a maximum.",
        ".amax(0, keepdim=True).expand_as(self.row_max)",
    ),
    late(
        "max_of_the_heads",
        "The key/value heads share a maximum.",
        ".amax(1, keepdim=True).expand_as(self.row_max)",
    ),
    late(
        "max_of_the_group",
        "The query heads of a group share a maximum.",
        ".amax(2, keepdim=True).expand_as(self.row_max)",
    ),
    Mutant(
        "mask_of_first_sequence",
        "All sequences of a batch have the mask of the first (pytorch#139462).",
        mask(
            (
                "self.lo[:, rows, None]) & (j < self.hi[:, rows, None]",
                "self.lo[:1, rows, None]) & (j < self.hi[:1, rows, None]",
            )
        ),
    ),
    Mutant(
        "lse_transposed",
        "lse has the heads of a group in the other order (vllm-project/flash-attention#87).",
        loop(
            (
                FOLDED,
                "out, lse = function.apply(q, k, v, loop)\n"
                "        out, lse = out.flatten(1, 2), lse.transpose(1, 2).flatten(1, 2)",
            )
        ),
    ),
    Mutant(
        "dv_of_first_head",
        "dv counts the first query head of a group only.",
        loop(("(p.mT @ do_rows).sum(2, keepdim=True)", "(p.mT @ do_rows)[:, :, :1]")),
    ),
    Mutant(
        "dk_is_mean_of_group",
        "dk is the mean over the query heads of a group.",
        loop(("(ds.mT @ q_rows).sum(2", "(ds.mT @ q_rows).mean(2")),
    ),
)
LENGTHS = (
    Mutant(
        "half_tile_filled_up",
        "The backward pass fills up a tile of keys that is half full with keys of score 0: NaN "
        "where exp(0 - lse) overflows (pytorch#196678, N mod 128 = 64).",
        loop(
            (
                DQ,
                f"{DQ}\n"
                "                if 2 * k_keys.shape[-2] == self.block_kv:\n"
                "                    dq_rows += 0 * torch.exp(-lse_rows)",
            )
        ),
    ),
    Mutant(
        "one_query_overflows",
        "The backward pass of a single query fills up keys with score 0: NaN in dk where "
        "exp(0 - lse) overflows (cudnn-frontend#1072, lse = -122).",
        loop(
            (
                DQ,
                f"{DQ}\n"
                "                if q.shape[-2] == 1:\n"
                "                    dk[..., keys, :] += 0 * torch.exp(-lse_rows).sum(2, True)",
            )
        ),
    ),
    Mutant(
        "one_key_filled_up",
        "A tile with one key is filled up with keys of score -100.",
        softmax(
            (
                "row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)",
                "row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)\n"
                "        if scores.shape[-1] == 1:\n"
                "            row_sum = row_sum + torch.exp(-100 - finite(next_max))",
            )
        ),
    ),
    Mutant(
        "single_query_sees_no_window",
        "One query alone takes a path that knows no window.",
        mask((SIDES, SIDES.replace("window,", "window if num_queries > 1 else None,"))),
    ),
    Mutant(
        "few_queries_not_causal",
        "A few queries against a cache take the path of one, which needs no mask.",
        mask(
            (SIDES, SIDES + "\n    right = None if 1 < num_queries < min(5, num_keys) else right")
        ),
    ),
)
SINKS = (
    Mutant(
        "sink_not_shifted",
        "exp(sink) is added without the maximum.",
        sink(
            (TOTAL, "total = torch.log(torch.exp(lse) + torch.exp(sinks.to(lse.dtype))[:, None])")
        ),
    ),
    Mutant(
        "sink_missing_in_lse",
        "lse does not count the sink.",
        sink((SUNK, SUNK.replace("total", "lse"))),
    ),
    Mutant(
        "sink_missing_in_output",
        "The sink is in lse alone.",
        sink((SHARE, "share = torch.ones_like(lse)")),
    ),
    Mutant(
        "sink_without_gradient",
        "The sink is a constant to the backward pass.",
        sink((TOTAL, TOTAL.replace("sinks.to", "sinks.detach().to"))),
    ),
    Mutant(
        "sink_share_without_gradient",
        "Scores lose what flows back through the sink's share.",
        sink((SHARE, SHARE.replace("lse - finite(total)", "lse - finite(total)).detach("))),
    ),
    Mutant(
        "sink_of_next_head",
        "Every head has its neighbour's sink.",
        sink((TOTAL, TOTAL.replace("sinks.to", "sinks.roll(1).to"))),
    ),
    Mutant(
        "sink_twice",
        "Two splits of the keys count the sink each.",
        sink((TOTAL, TOTAL + "\n    total = torch.logaddexp(total, sinks.to(lse.dtype)[:, None])")),
    ),
    Mutant(
        "sink_scaled",
        "The sink is scaled as scores are.",
        sink((TOTAL, TOTAL.replace("[:, None]", "[:, None] * out.shape[-1] ** -0.5"))),
    ),
    Mutant(
        "sink_in_base_two",
        "The sink is taken for one in base two.",
        sink((TOTAL, TOTAL.replace("[:, None]", "[:, None] * 0.6931471805599453"))),
    ),
    Mutant(
        "sink_narrow",
        "The sink is rounded to the inputs' dtype.",
        sink((TOTAL, TOTAL.replace("sinks.to(", "sinks.to(out.dtype).to("))),
        dtype=torch.bfloat16,
    ),
    Mutant(
        "sink_missing_for_one_query",
        "One query alone takes a path without the sink (mlx#3452).",
        sink((SUNK, f"if out.shape[2] == 1:\n        return out, lse\n    {SUNK}")),
    ),
    Mutant(
        "sink_needs_a_key",
        "A row without a key has lse = -inf, and not its sink.",
        sink((TOTAL, TOTAL + "\n    total = torch.where(lse == -torch.inf, lse, total)")),
    ),
)
MASKS = (
    Mutant(
        "window_one_short",
        "The window leaves out the query itself (transformers#39408).",
        mask((WINDOW, WINDOW.replace("left)", "left - 1)"))),
    ),
    Mutant(
        "window_of_whole_tiles",
        "The window begins with a tile.",
        mask((WINDOW, WINDOW + " // 16 * 16")),
    ),
    Mutant(
        "window_from_first_key",
        "The window counts as if there were as many queries as keys (sglang#26513).",
        mask((WINDOW, WINDOW.replace("position", "i"))),
    ),
    Mutant(
        "window_or_documents",
        "A window is dropped where there are documents.",
        mask((SIDES, SIDES.replace("window,", "window if document_ids is None else None,"))),
    ),
    Mutant(
        "documents_or_window",
        "Documents are dropped where there is a window.",
        mask((DOCUMENTS, DOCUMENTS.replace("None:", "None and window is None:", 1))),
    ),
    Mutant(
        "documents_in_32_bits",
        "Ids are compared in 32 bits.",
        mask(
            (DOCUMENTS, DOCUMENTS.replace(":\n", ":\n        document_ids = document_ids.int()\n"))
        ),
    ),
    Mutant(
        "documents_as_floats",
        "Ids are compared as float32.",
        mask(
            (
                DOCUMENTS,
                DOCUMENTS.replace(":\n", ":\n        document_ids = document_ids.float()\n"),
            )
        ),
    ),
    Mutant(
        "documents_of_first_sequence",
        "All sequences have the documents of the first.",
        mask(
            (
                DOCUMENTS,
                DOCUMENTS.replace(
                    ":\n", ":\n        document_ids = document_ids[:1].expand_as(document_ids)\n"
                ),
            )
        ),
    ),
    Mutant(
        "documents_begin_late",
        "The first token of a document is hidden from the others.",
        mask(
            (
                "lo, hi = torch.maximum(lo, start)",
                "lo, hi = torch.maximum(lo, torch.minimum(start + 1, i))",
            )
        ),
    ),
    Mutant(
        "left_edge_one_late",
        "A tile that begins a key before all rows see it is not masked.",
        mask(("j < self.full_first or", "j + 1 < self.full_first or")),
    ),
    Mutant(
        "backward_always_causal",
        "The backward pass masks as if every call were causal (triton#4541).",
        loop(
            (
                FROM_LSE,
                "see, n = ctx.loop.visible, gradients[0].shape[-2]\n"
                "        own = torch.arange(1, n + 1)[None] + see.num_keys - n\n"
                "        hi = torch.minimum(see.hi, own).maximum(see.lo)\n"
                "        loop = replace(ctx.loop, visible=replace(see, hi=hi))\n"
                "        " + FROM_LSE.replace("ctx.loop", "loop"),
            )
        ),
    ),
    Mutant(
        "backward_without_mask",
        "The backward pass does not mask.",
        loop((BACKWARD_SCORES, BACKWARD_SCORES.replace("needs_mask", "False"))),
    ),
)
SCORES = (
    Mutant(
        "alibi_scaled",
        "The bias is scaled as the scores are.",
        loop((BIAS, BIAS.replace("self.slopes", "self.scale * self.slopes"))),
    ),
    Mutant(
        "alibi_heads_reversed",
        "The heads have the slopes in reverse.",
        loop((BIAS, BIAS.replace("self.slopes", "self.slopes.flip(0, 1)"))),
    ),
    Mutant(
        "alibi_in_tile",
        "The bias counts keys from the start of the tile.",
        loop((BIAS, BIAS.replace("i - j", "i - j + j[0]"))),
    ),
    Mutant(
        "alibi_narrow",
        "The bias is kept in the inputs' dtype.",
        loop((BIAS, BIAS.replace(".to(self.dtype)", ".to(q_rows.dtype).to(self.dtype)"))),
        dtype=torch.bfloat16,
    ),
    Mutant(
        "softcap_before_scale",
        "The cap is on scores that are not scaled.",
        loop(
            ("torch.tanh(scores / self.softcap)", "torch.tanh(scores / self.scale / self.softcap)")
        ),
    ),
    Mutant(
        "softcap_not_undone",
        "tanh is not multiplied by the cap.",
        loop((CAPPED, "scores = capped")),
    ),
    Mutant(
        "softcap_derivative_of_scores",
        "The derivative is that of tanh(score).",
        loop((CAP, "derivative = 1 - torch.tanh(scores) ** 2")),
    ),
    Mutant(
        "score_mod_unscaled",
        "A score_mod gets scores that are not scaled.",
        loop((SCORE_MOD, SCORE_MOD.replace("scores,", "scores / self.scale,"))),
    ),
    Mutant(
        "score_mod_top_left",
        "A score_mod gets the position among the queries.",
        loop((SCORE_MOD, SCORE_MOD.replace("i, j", "i - (num_keys - num_queries), j"))),
    ),
    Mutant(
        "score_mod_in_tile",
        "A score_mod gets the position in the tile.",
        loop((SCORE_MOD, SCORE_MOD.replace("i, j", "i, j - j[0]"))),
    ),
    Mutant(
        "dk_not_scaled",
        "dk misses the scale.",
        loop(("(ds.mT @ q_rows)", "(ds.mT @ q_rows / self.scale)")),
    ),
    Mutant(
        "lse_gradient_reversed",
        "What flows back through lse is subtracted.",
        loop(("delta = delta - d_lse", "delta = delta + d_lse")),
    ),
)
WIDER = (
    Mutant(
        "window_left_unlimited_is_none",
        "A left side of -1 is taken for 0.",
        mask(
            (
                SIDES,
                SIDES.replace(
                    "window,",
                    "(max(window[0], 0), window[1]) if isinstance(window, tuple) else window,",
                ),
            )
        ),
    ),
    Mutant(
        "window_right_of_the_queries",
        "The right side of a window counts from the position among the queries.",
        mask(("(position + right + 1)", "((position if right == 0 else i) + right + 1)")),
    ),
    Mutant(
        "lengths_or_window",
        "key_lengths are dropped where there is a window.",
        mask(
            (
                "if key_lengths is not None:",
                "if key_lengths is not None and window is None:",
            )
        ),
    ),
    Mutant(
        "lengths_move_positions",
        "The causal mask of a padded sequence counts from its own length.",
        mask(
            (
                SIDES,
                "if key_lengths is not None:\n"
                "        position = i + key_lengths[:, None] - num_queries\n"
                f"    {SIDES}",
            )
        ),
    ),
    Mutant(
        "length_of_0_is_all",
        "A sequence of no keys sees all.",
        mask(
            (
                "torch.minimum(hi, key_lengths[:, None])",
                "torch.minimum(hi, torch.where(key_lengths == 0, num_keys, key_lengths)[:, None])",
            )
        ),
    ),
    Mutant(
        "packed_keys_cut_as_queries",
        "The packed keys are cut where the queries are.",
        mask(("of_keys[end - 1], of_keys[end]", "of_queries[end - 1], of_queries[end]")),
    ),
    Mutant(
        "packed_window_sees_back",
        "The window of a packed sequence reaches into the one before.",
        mask((WINDOW, "(position - left).clamp(torch.zeros_like(last), last)")),
    ),
    Mutant(
        "delta_of_the_keys_width",
        "delta sums as many columns of the output as the keys have.",
        loop((DELTA, DELTA.replace(".sum(", "[..., : q.shape[-1]].sum("))),
    ),
    Mutant(
        "dv_of_the_keys_width",
        "Columns of dv past the keys' width are not written.",
        loop(
            (DV, DV.replace("keys, :]", KEYS_WIDTH).replace("rows)", "rows)[..., : q.shape[-1]]"))
        ),
    ),
)
SPECIFICATIONS = (
    Mutant(
        "naive_narrow",
        "The matrix of scores has the inputs' dtype.",
        naive(
            ("dtype = statistics_dtype(q)", "dtype = q.dtype"),
            ("lse = scores.logsumexp(-1)", "lse = scores.logsumexp(-1).float()"),
        ),
        dtype=torch.bfloat16,
        backend="naive",
    ),
    Mutant(
        "naive_empty_row_is_mean",
        "A row without a key is the mean of the values (mlx#2626).",
        naive((".softmax(-1).masked_fill(no_key, 0.0)", ".softmax(-1)")),
        backend="naive",
    ),
    Mutant(
        "naive_empty_row_is_nan",
        "A row without a key is NaN.",
        naive(
            (
                "p = scores.masked_fill(no_key, 0.0).softmax(-1).masked_fill(no_key, 0.0)",
                "p = scores.softmax(-1)",
            )
        ),
        backend="naive",
    ),
    Mutant(
        "naive_mask_is_minus_1e4",
        "Hidden scores are -1e4, as a mask that is added.",
        naive(
            (
                "scores = scores.masked_fill(~visible, -torch.inf)",
                "scores = scores.masked_fill(~visible, -1e4)",
            )
        ),
        backend="naive",
    ),
    Mutant(
        "naive_heads_in_turn",
        "Query heads take the key/value heads in turn.",
        naive(
            (
                "k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)",
                "k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)",
            )
        ),
        backend="naive",
    ),
    Mutant(
        "naive_not_causal",
        "causal has no effect (jax#19237).",
        naive((VISIBLE, VISIBLE.replace("=causal", "=False"))),
        backend="naive",
    ),
)
HARMLESS = (
    # no mistakes
    Mutant(
        "grid_from_first_key",
        "Tiles of keys begin with the first that a row sees.",
        mask(("range(self.first // block_kv * block_kv,", "range(self.first,")),
        survives="a tile may be any keys, as long as each is in one",
    ),
    Mutant(
        "whole_tiles_masked_too",
        "The last tile that all rows see is masked all the same.",
        mask(("end > self.full_last", "end >= self.full_last")),
        survives="its mask hides nothing",
    ),
    Mutant(
        "query_tiles_of_key_size",
        "Tiles of queries are as long as those of keys.",
        loop((BEFORE_TILES, BEFORE_TILES.replace("block_q", "block_kv"))),
        survives="rows do not depend on one another, so any tile of them will do",
    ),
    Mutant(
        "empty_queries_not_skipped",
        "lse = -inf becomes 0 in the backward pass of a row that sees no key.",
        loop(
            (
                "torch.where(lse_rows == -torch.inf, torch.inf, lse_rows)",
                "torch.where(lse_rows == -torch.inf, 0.0, lse_rows)",
            )
        ),
        survives="every score of such a row is -inf, so exp(score - 0) is 0 as well",
    ),
)

SHIPPED = (
    *CALLS,
    *MEMORY,
    *STRIDES,
    *ROWS,
    *LENGTHS,
    *SINKS,
    *MASKS,
    *SCORES,
    *WIDER,
    *SPECIFICATIONS,
    *HARMLESS,
)


def _merge(name: str, says: str, before: str, after: str) -> Mutant:
    return Mutant(name, says, softmax((before, after)), backend="ring")


SHIPPED_IN_RINGS = (
    _merge(
        "first_maximum_kept",
        "The merge keeps the first maximum.",
        MERGED_MAX,
        "next_max = torch.where(self.row_max == -torch.inf, other.row_max, self.row_max)",
    ),
    _merge(
        "merge_without_guard",
        "Two states without a key merge to NaN.",
        MERGE_SCALES,
        MERGE_SCALES.replace("finite(next_max)", "next_max"),
    ),
    _merge(
        "merged_sum_only",
        "The merge rescales the sums alone.",
        MERGED_ACC,
        "acc=self.acc + other.acc",
    ),
    _merge(
        "merged_acc_only",
        "The merge rescales acc alone.",
        MERGED_SUM,
        "row_sum=self.row_sum + other.row_sum",
    ),
    _merge(
        "merged_in_base_two",
        "lse of another kernel is merged as if in base e (vllm#52796).",
        MERGE_SCALES,
        MERGE_SCALES.replace("torch.exp(", "torch.exp2("),
    ),
    _merge(
        "last_block_only", "The merge keeps the later block.", MERGED_ACC, "acc=beta * other.acc"
    ),
    Mutant(
        "window_of_the_rank",
        "A window begins a key late on every other rank.",
        ring(
            (
                "torch.searchsorted(keys, ends[:, rows].contiguous())",
                "torch.searchsorted(keys, ends[:, rows].contiguous() + "
                "(rank != source) * (ends is self.visible.lo))",
            )
        ),
        backend="ring",
    ),
)
