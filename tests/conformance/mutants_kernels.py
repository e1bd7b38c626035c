"""Single mistakes in the Triton kernels: flash attention, its intervals, and the split kernel of
decoding. On a CPU they run in Triton's interpreter.
"""

from tests.conformance.mutation import Mutant

# lines that several mistakes are made in
ROW_SUM = "row_sum = alpha * row_sum + tl.sum(p, 1)"
ACC = "acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)"
SHIFT = 'row_max = tl.where(row_max == float("-inf"), 0.0, row_max)'
POSITION, KV_HEAD = "position = rows + (M - N)", "kv_head = head // groups"
BASE_E = "scale * math.log2(math.e)"
MASKED = "CAUSAL, INTERVALS, True, SCORE_MOD, PROBABILITY, SCORE_GRADIENT, BLOCK_KV, BLOCK_D,"
OF_BATCH = "lo_ptr += batch * stride_interval"
FORWARD_KIND = "kind = kind_of(q.device, tensors, kernel_choice, looked, wide, *settings)"
SINK, SINK_IN_ROWS = "tl.load(sinks_ptr + head) * 1.4426950408889634", "acc *= kept[:, None]"
BACKWARD_KIND = "kind = kind_of(q.device, tensors, kernel_choice, packed, wide, *settings)"
FIRST_TILE = "tl.where(later < 0, 0, left_over + later // (section * num_tiles) * section)"
DERIVATIVE_OF_CAP = "return cap * capped, derivative"
ROWS, LEFT = (
    "hi_ptr, length, N, window, CAUSAL, INTERVALS",
    "lo = tl.maximum(past + n + 1 - window, 0)",
)
ONE_PIECE = "*map(in_one_piece, given[3:])"
LENGTH = "length = tl.minimum(given.to(tl.int32), M)"
KEYS, PAGE = "tl.cast(keys, tl.int64) * stride_n", "tl.cast(page, tl.int64) * stride_page"
GRID = "tiles = tl.cdiv(last - grid, BLOCK_KV)"
SMALL_PAGE = "tl.load(table_ptr + keys // PAGE_SIZE, mask=inside, other=0)"


def kernel(
    module: str, name: str, says: str, *edits: tuple[str, str], survives: str | None = None
) -> Mutant:
    of_module = tuple((f"kernels.{module}".rstrip("."), *edit) for edit in edits)
    return Mutant(name, says, of_module, survives, backend="triton")


FORWARD = (
    kernel(
        "forward",
        "kernel_alpha_on_acc_only",
        "row_sum is not rescaled.",
        (ROW_SUM, ROW_SUM.replace("alpha * ", "")),
    ),
    kernel(
        "forward",
        "kernel_alpha_on_sum_only",
        "acc is not rescaled.",
        (ACC, ACC.replace(" * alpha[:, None]", "")),
    ),
    kernel("softmax", "kernel_no_guard", "-inf - -inf is not caught.", (SHIFT, "pass")),
    kernel(
        "softmax",
        "kernel_max_of_last_tile",
        "The maximum is the last tile's.",
        ("next_max = tl.maximum(row_max, tile_max)", "next_max = tile_max"),
    ),
    kernel(
        "forward",
        "kernel_max_starts_at_zero",
        "row_max starts at 0.",
        (
            'row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)',
            "row_max = tl.zeros([BLOCK_Q], tl.float32)",
        ),
    ),
    kernel(
        "forward",
        "kernel_lse_in_base_two",
        "lse is left in base two (vllm#52796).",
        ("* 0.6931471805599453  # back", "# back"),
    ),
    kernel(
        "forward",
        "kernel_sink_in_base_e",
        "A sink's logit is not converted to base two.",
        (SINK, "tl.load(sinks_ptr + head)"),
    ),
    kernel(
        "forward",
        "kernel_sink_of_next_head",
        "Every head has its neighbour's sink.",
        (SINK, SINK.replace("head", "(head + 1) % num_heads")),
    ),
    kernel(
        "forward",
        "kernel_sink_leaves_output",
        "The output is not rescaled where the sink is above all scores.",
        (SINK_IN_ROWS, "pass"),
    ),
    kernel(
        "op",
        "kernel_sink_gradient_without_delta",
        "The sink's gradient is its probability.",
        ("return -(p * delta).sum((0, 2))", "return p.sum((0, 2))"),
    ),
    kernel(
        "portable",
        "kernel_scale_in_base_e",
        "Scores are scaled for base e, and exponentials are in base two.",
        (f"num_queries, num_keys, scale, {BASE_E},", "num_queries, num_keys, scale, scale,"),
    ),
    kernel(
        "forward",
        "kernel_heads_in_turn",
        "Query heads take the key/value heads in turn.",
        (KV_HEAD, "kv_head = head % (num_heads // groups)"),
    ),
    kernel(
        "forward",
        "kernel_values_of_first_head",
        "All query heads take the values of the first key/value head.",
        ("load_tile(v_desc, batch, kv_head,", "load_tile(v_desc, batch, 0,"),
    ),
    kernel(
        "forward",
        "kernel_head_never_run",
        "The order of work leaves out some heads and does others twice.",
        (FIRST_TILE, FIRST_TILE.replace("left_over + ", "")),
    ),
)
MASKS = (
    kernel(
        "forward",
        "kernel_top_left",
        "Queries are aligned with the first keys.",
        (POSITION, "position = rows"),
    ),
    kernel(
        "forward",
        "kernel_tail_of_keys_counts",
        "Rows that fill up the last tile of keys count with score 0.",
        ("visible = j < M", "visible = j >= 0"),
    ),
    kernel(
        "forward",
        "kernel_diagonal_unmasked",
        "The tile on the diagonal counts as one that all rows see.",
        (
            "full_last = tl.minimum(M, tl.maximum(0, start_q + 1 + M - N))",
            "full_last = tl.minimum(M, tl.maximum(0, start_q + BLOCK_KV + M - N))",
        ),
    ),
    kernel(
        "forward",
        "kernel_last_key_skipped",
        "A tile with one key of a query tile's last row is skipped.",
        (
            "tl.maximum(0, start_q + BLOCK_Q + M - N)",
            "tl.maximum(0, start_q + BLOCK_Q - 1 + M - N)",
        ),
    ),
    kernel(
        "forward",
        "kernel_left_edge_unmasked",
        "Tiles at the left edge of a window count as ones that all rows see.",
        (
            "tl.minimum(tl.cdiv(tl.load(lo_ptr + bottom), BLOCK_KV), tl.cdiv(last, BLOCK_KV))",
            "tl.minimum(tl.load(lo_ptr + bottom) // BLOCK_KV, tl.cdiv(last, BLOCK_KV))",
        ),
    ),
    kernel(
        "forward",
        "kernel_right_edge_lost",
        "The masked tiles behind those that all rows see are taken for those before them.",
        ("start = step + (full_last - full_first)", "start = step"),
    ),
    kernel(
        "forward",
        "kernel_intervals_of_first_sequence",
        "All sequences have the mask of the first (pytorch#139462).",
        (OF_BATCH, "lo_ptr += 0"),
    ),
    kernel(
        "intervals",
        "kernel_window_too_wide",
        "A window that is loaded is a key too wide (transformers#39408).",
        ("lo = tl.maximum(hi - window, 0)", "lo = tl.maximum(hi - window - 1, 0)"),
    ),
    kernel(
        "intervals",
        "kernel_window_kept_by_length",
        "A window is kept for its lengths alone.",
        (
            "num_queries, num_keys, causal, *window\n",
            "num_queries, num_keys, causal, len(window)\n",
        ),
    ),
    kernel(
        "intervals",
        "kernel_two_sided_window_is_causal",
        "A window to both sides is taken for one to the left.",
        ("sides = window[0], window[1]", "sides = window[0], 0"),
    ),
    kernel(
        "intervals",
        "kernel_document_begins_in_its_block",
        "A document that began before the rows of a program is not looked for.",
        (
            "lo = tl.maximum(lo, tl.maximum(start, found))",
            "lo = tl.maximum(lo, tl.maximum(start, begin))",
        ),
    ),
    kernel(
        "intervals",
        "kernel_document_ends_in_its_block",
        "A document ends with the rows of a program.",
        ("hi = tl.minimum(end, found)", "hi = tl.minimum(end, begin + BLOCK)"),
    ),
    kernel(
        "intervals",
        "kernel_ids_contiguous",
        "Ids are read as if they were contiguous.",
        (
            "(0, 0) if document_ids is None else document_ids.stride()",
            "(0, 0) if document_ids is None else (num_queries, 1)",
        ),
    ),
)
BACKWARD = (
    kernel(
        "backward",
        "kernel_dkdv_top_left",
        "dk and dv align queries with the first keys.",
        ("(rows + (M - N))[None, :]", "rows[None, :]"),
    ),
    kernel(
        "backward",
        "kernel_dq_not_masked",
        "dq counts hidden keys.",
        (MASKED, MASKED.replace("True", "False")),
    ),
    kernel(
        "backward",
        "kernel_backward_without_guard",
        "A row without a key rebuilds p from lse = -inf.",
        (
            'tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)',
            "lse * 1.4426950408889634",
        ),
    ),
    kernel(
        "backward",
        "kernel_lse_gradient_reversed",
        "What flows back through lse is added to delta.",
        ("delta -= tl.load(", "delta += tl.load("),
    ),
    kernel(
        "backward",
        "kernel_dk_of_first_head",
        "dk and dv count the first query head of a group only.",
        ("for group in tl.range(0, GROUPS):", "for group in tl.range(0, 1):"),
    ),
    kernel(
        "backward",
        "kernel_dk_not_scaled",
        "dk misses the scale.",
        ("M, dk * scale, D", "M, dk, D"),
    ),
    kernel(
        "portable",
        "kernel_backward_in_base_e",
        "The backward pass rebuilds p from scores of another base.",
        (
            f"sizes = (num_queries, num_keys, scale, {BASE_E})",
            "sizes = (num_queries, num_keys, scale, scale)",
        ),
    ),
    kernel(
        "intervals",
        "kernel_query_ranges_one_short",
        "The last query that sees a tile of keys is left out.",
        (
            "tl.store(ranges_ptr + batch * bounds + bound, below,",
            "tl.store(ranges_ptr + batch * bounds + bound, below - (bound % 4 == 3),",
        ),
    ),
    kernel(
        "score_mods",
        "kernel_softcap_without_derivative",
        "The softcap has no derivative.",
        (DERIVATIVE_OF_CAP, "return cap * capped, derivative * 0 + 1"),
    ),
    kernel(
        "op",
        "kernel_lse_gradient_contiguous",
        "The gradient of lse is read as if it were contiguous.",
        ("d_lse = None if d_lse is None else d_lse.contiguous()", "pass"),
    ),
    kernel(
        "op",
        "kernel_last_stride_ignored",
        "A view whose last stride is not 1 is read as if it were.",
        (
            "if last == 1 and all(aligned) and x.data_ptr() % 16 == 0:\n        return x",
            "if all(aligned) and x.data_ptr() % 16 == 0:\n        return x if last == 1 else "
            "x.as_strided(x.shape, (*outer, 1))",
        ),
    ),
)
PLANS = (
    kernel(
        "op",
        "kernel_plan_without_settings",
        "A launch is kept for shapes alone: another mask or scale gets the first one's.",
        (FORWARD_KIND, FORWARD_KIND.replace(", *settings", "")),
    ),
    kernel(
        "op",
        "kernel_backward_plan_without_settings",
        "A launch of the backward pass is kept for shapes alone.",
        (BACKWARD_KIND, BACKWARD_KIND.replace(", *settings", "")),
    ),
)
SPLIT = (
    kernel(
        "decoding",
        "split_lengths_of_whole_pages",
        "The last page is read to its end.",
        (LENGTH, LENGTH.replace("given.to(tl.int32)", "(given.to(tl.int32) + 7) // 8 * 8")),
    ),
    kernel(
        "decoding",
        "split_positions_of_the_room",
        "Queries stand at the end of the room.",
        (ROWS, ROWS.replace("length", "M")),
    ),
    kernel(
        "decoding",
        "split_window_from_the_first_key",
        "A window counts as if the queries were the first.",
        (LEFT, LEFT.replace("past + ", "")),
    ),
    kernel(
        "decoding",
        "split_not_causal",
        "Several new tokens see one another.",
        (
            "hi = tl.minimum(past + n + 1, length) if CAUSAL else",
            "hi = tl.zeros_like(n) + length if CAUSAL else",
        ),
    ),
    kernel(
        "decoding",
        "split_table_of_the_first_sequence",
        "All sequences have the pages of the first.",
        ("table_ptr += batch * stride_table", "table_ptr += 0"),
    ),
    kernel(
        "decoding",
        "split_small_pages_as_one",
        "A tile of several pages reads the rows of its first one.",
        (SMALL_PAGE, SMALL_PAGE.replace("keys //", "(start + 0 * keys) //")),
    ),
    kernel(
        "decoding",
        "split_table_contiguous",
        "A table is read as if it were contiguous.",
        (ONE_PIECE, "in_one_piece(cache_lengths), block_table"),
    ),
    kernel(
        "decoding",
        "split_lengths_contiguous",
        "Lengths are read as if they were contiguous.",
        (ONE_PIECE, "cache_lengths, in_one_piece(block_table)"),
    ),
    kernel(
        "decoding",
        "split_rows_in_32_bits",
        "The offset of a row overflows 32 bits.",
        (KEYS, KEYS + " % 2147483648"),
    ),
    kernel(
        "decoding",
        "split_pages_in_32_bits",
        "The offset of a page overflows 32 bits.",
        (PAGE, PAGE + " % 2147483648"),
    ),
    kernel(
        "decoding",
        "split_last_tile_lost",
        "A last tile that is not full belongs to no split.",
        (GRID, "tiles = (last - grid) // BLOCK_KV"),
    ),
    kernel(
        "decoding",
        "split_heads_in_turn",
        "Query heads take the key/value heads in turn.",
        ("kv_head * GROUPS + rows % GROUPS", "kv_head + rows % GROUPS * num_kv_heads"),
    ),
    kernel(
        "decoding",
        "split_not_rescaled",
        "acc is not rescaled.",
        (ACC, ACC.replace(" * alpha[:, None]", "")),
    ),
    kernel(
        "decoding",
        "split_merged_without_lse",
        "Every part counts alike.",
        ("p = tl.exp2(part_lse - shift)", 'p = tl.where(part_lse == float("-inf"), 0.0, 1.0)'),
    ),
    kernel(
        "decoding",
        "split_merged_in_base_e",
        "Parts with lse in base two are merged as if in base e (vllm#52796).",
        ("p = tl.exp2(part_lse - shift)", "p = tl.exp(part_lse - shift)"),
    ),
    kernel(
        "decoding",
        "split_merged_lse_transposed",
        "The merge takes lse for that of another head (vllm-project/flash-attention#87).",
        (
            "row = ((batch * num_kv_heads * GROUPS + head) * N + n) * SPLITS + split",
            "row = ((batch * N + n) * num_kv_heads * GROUPS + head) * SPLITS + split",
        ),
    ),
    kernel(
        "decoding",
        "split_lse_of_one_in_base_two",
        "With one split lse is left in base two.",
        ("lse *= 0.6931471805599453", "lse *= 1.0"),
    ),
    kernel(
        "decoding",
        "split_empty_row_is_nan",
        "A sequence without keys divides by 0 in the merge.",
        ("tl.where(row_sum == 0.0, 1.0, row_sum)", "row_sum"),
    ),
    kernel(
        "decoding",
        "split_batch_by_query_heads",
        "The merge writes to the sequence that a count of key/value heads says.",
        (
            "n, head = row % N, row // N % num_heads",
            "n, head = row // num_heads % N, row % num_heads",
        ),
    ),
    kernel(
        "",
        "split_softcap_dropped",
        "The cap is for prefill alone.",
        (
            "mod, params = score_change(q.device, softcap, None, None)",
            "mod, params = score_change(q.device, None, None, None)",
        ),
    ),
    kernel(
        "",
        "split_two_sided_window_of_the_room",
        "A window to both sides counts from the room.",
        (
            '"window": window, "cache_lengths": cache_lengths}',
            '"window": window, "key_lengths": cache_lengths}',
        ),
    ),
)
HARMLESS = (
    kernel(
        "forward",
        "kernel_first_tiles_first",
        "The shortest tiles of a causal mask start first.",
        ("start_q = (num_tiles - 1 - tile) * BLOCK_Q", "start_q = tile * BLOCK_Q"),
        survives="the order of programs changes no result: it only takes longer",
    ),
    kernel(
        "backward",
        "kernel_lse_past_the_end_is_zero",
        "Rows past the last query rebuild p from lse = 0.",
        (
            'load_rows(ptr, start, limit, float("-inf"), BLOCK)',
            "load_rows(ptr, start, limit, 0.0, BLOCK)",
        ),
        survives="d_out and delta of such a row are 0, and so is all that p is multiplied with",
    ),
    kernel(
        "backward",
        "kernel_tail_of_keys_unmasked_in_dk",
        "The keys past the last one are not masked for dk and dv.",
        ("if start_kv + BLOCK_KV > M:", "if start_kv > M:"),
        survives="each key has its own row of dk and dv, and those past the last are not stored",
    ),
    kernel(
        "backward",
        "kernel_ragged_queries_masked",
        "Queries of the last tile are masked all the same.",
        ("tl.where(full_last == N, N + BLOCK_Q - 1, full_last) // BLOCK_Q", "full_last // BLOCK_Q"),
        survives="the mask hides nothing there",
    ),
)

KERNEL_MUTANTS = (*FORWARD, *MASKS, *BACKWARD, *PLANS, *SPLIT, *HARMLESS)
# what `make test` tries, a few of each kind
QUICK = (
    *("kernel_alpha_on_sum_only", "kernel_tail_of_keys_counts", "kernel_plan_without_settings"),
    *("split_merged_without_lse", "split_table_of_the_first_sequence"),
)
# tried before the other properties: they take least time for what they catch
FIRST = (
    *("cache and pages", "N != M", "mask positions", "optional arguments", "wider calls"),
    *("rows without a key", "strides and views", "logits - 120", "call history"),
)
