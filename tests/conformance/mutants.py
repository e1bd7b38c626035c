"""Single mistakes in the tile loop and in a ring, each as the edit that makes it. GALLERY also has
those in decoding and in the Triton kernels.

These are typical mistakes in a hand-written loop: the maximum, the rescaling, the order, the sum,
the mask, the tail, the scale, lse, the heads, the backward pass. Edits with `survives` change no
result, and its sentence says why. Mistakes that other projects shipped are in shipped.py.
"""

from pathlib import Path
from typing import Any

import torch

from conformance.properties import PROPERTIES, SLOW
from tests.conformance.mutants_decoding import DECODING_MUTANTS
from tests.conformance.mutants_kernels import KERNEL_MUTANTS
from tests.conformance.mutation import Mutant, loop, mask, ring, smallest_cover, softmax
from tests.conformance.shipped import SHIPPED, SHIPPED_IN_RINGS
from training.environment import measured_on
from training.files import write_json

MATRIX_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kill matrix is made


def write_matrix(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows in the order of GALLERY, with the environment and the properties that cover
    them.
    """
    where = measured_on(MATRIX_DEVICE)
    order = [mutant.name for mutants in GALLERY.values() for mutant in mutants]
    rows = sorted(rows, key=lambda row: order.index(row["name"]))
    names = [name for name in PROPERTIES if name not in SLOW]
    write_json(
        path,
        {"environment": where, "properties": names, "cover": smallest_cover(rows), "mutants": rows},
    )


# the lines that several mistakes are made in
NEXT_MAX = "return torch.maximum(self.row_max, tile_max)"
TILE_MAX = "next_max = self.next_max(scores.amax(-1, keepdim=True))"
ALPHA = "return torch.exp(self.row_max - finite(next_max))"
P = "p = torch.exp(scores - finite(next_max))"
ROW_SUM = "row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)"
ACC = "acc = alpha * self.acc + weighted_sum(p, v)"
NEXT_STATE = "return replace(self, row_max=next_max, row_sum=row_sum, acc=acc)"
EMPTY = (
    "torch.full_like(row_sum, -torch.inf),\n"
    "            row_sum,\n"
    "            row_sum.new_zeros((*q.shape[:-1], value_dim or q.shape[-1])),"
)
RESULT = "return self.acc / row_sum, (self.row_max + torch.log(row_sum)).squeeze(-1)"
GUARD = "return torch.where(row_max == -torch.inf, 0.0, row_max)"
FILL = "scores.masked_fill(~self.visible.mask(rows, keys).unsqueeze(2), -torch.inf)"
SCORES = "q_rows.to(self.dtype) @ k_keys.to(self.dtype).mT * self.scale"
UPDATE = "state = state.update(scores, v[..., keys, :])"
KEYS = "j = torch.arange(self.num_keys, device=self.lo.device)[keys]"
VISIBLE = "((j >= self.lo[:, rows, None]) & (j < self.hi[:, rows, None]))"
TILES = "for j in range(self.first // block_kv * block_kv, self.last, block_kv):"
KEY_TILE = "yield slice(j, end), j < self.full_first or end > self.full_last"
CHANGE = "change = document_ids[:, 1:] != document_ids[:, :-1]"
SIDES = "window if isinstance(window, tuple)"
PACKED = "position = i + last - of_queries[end]"
BIAS = "scores = scores - (self.slopes * (i - j))"
SLOPES = "slopes.view(num_kv_heads, num_heads // num_kv_heads, 1, 1)"
FIRST, LAST = (
    "            self.lo[:, starts].amin(0),\n",
    "            self.hi[:, stops - 1].amax(0),\n",
)
FULL_LAST = "            self.hi[:, starts].amin(0),\n"

# edits that more than one mutant shares
WITHOUT_ALPHA = (ALPHA, "return torch.ones_like(next_max)")
OWN_MAX = (NEXT_MAX, "return torch.where(tile_max == -torch.inf, self.row_max, tile_max)")
LOCAL_SOFTMAX = (P, "p = scores.softmax(-1).nan_to_num()")
EVERY_TILE = (
    (FIRST, "            torch.zeros_like(starts),\n"),
    (LAST, "            torch.full_like(starts, self.num_keys),\n"),
)
RELATIVE_KEYS = (KEYS, "j = torch.arange(len(range(self.num_keys)[keys]), device=self.lo.device)")
RELATIVE_ROWS = (
    VISIBLE,
    VISIBLE.replace("[:, rows, None]", "[:, : self.lo[:, rows].shape[1], None]"),
)

MUTANTS = (
    # the maximum
    Mutant(
        "no_max",
        "No maximum is subtracted.",
        softmax((NEXT_MAX, "return torch.where(tile_max == -torch.inf, self.row_max, 0.0)")),
    ),
    Mutant(
        "max_overwritten",
        "The maximum is the last tile's, not the running one.",
        softmax((NEXT_MAX, "return tile_max")),
    ),
    Mutant(
        "max_not_kept",
        "The new maximum is used but not stored.",
        softmax((NEXT_STATE, NEXT_STATE.replace("=next_max", "=self.row_max"))),
    ),
    Mutant(
        "max_of_first_tile",
        "The maximum of the first tile is kept for good.",
        softmax(
            (NEXT_MAX, "return torch.where(self.row_max == -torch.inf, tile_max, self.row_max)")
        ),
    ),
    Mutant(
        "max_of_all_rows",
        "One maximum for the whole tile instead of one a row.",
        softmax(
            (
                TILE_MAX,
                "next_max = self.next_max(scores.amax((-2, -1), "
                "keepdim=True).expand_as(self.row_max))",
            )
        ),
    ),
    Mutant(
        "max_unscaled",
        "The maximum is taken before the scores are scaled.",
        softmax(
            (TILE_MAX, TILE_MAX.replace("keepdim=True)", "keepdim=True) * v.shape[-1] ** 0.5"))
        ),
    ),
    Mutant(
        "max_starts_at_zero",
        "row_max starts at 0.",
        softmax((EMPTY, EMPTY.replace("torch.full_like(row_sum, -torch.inf)", "row_sum"))),
    ),
    Mutant(
        "max_starts_at_minus_1e4",
        "row_max starts at a large negative number.",
        softmax((EMPTY, EMPTY.replace("-torch.inf", "-1e4"))),
    ),
    # the rescaling
    Mutant(
        "no_rescale",
        "Each tile subtracts its own maximum and nothing is rescaled.",
        softmax(OWN_MAX, WITHOUT_ALPHA),
    ),
    Mutant("no_alpha", "The maximum runs, the past sums are not rescaled.", softmax(WITHOUT_ALPHA)),
    Mutant(
        "alpha_on_sum_only", "acc is not rescaled.", softmax((ACC, ACC.replace("alpha * ", "")))
    ),
    Mutant(
        "alpha_on_acc_only",
        "row_sum is not rescaled.",
        softmax((ROW_SUM, ROW_SUM.replace("alpha * ", ""))),
    ),
    Mutant(
        "alpha_inverted",
        "alpha = exp(new - old).",
        softmax((ALPHA, "return torch.exp(finite(next_max) - finite(self.row_max))")),
    ),
    Mutant("alpha_squared", "The past sums are rescaled twice.", softmax((ALPHA, ALPHA + " ** 2"))),
    Mutant(
        "no_beta",
        "p subtracts the tile's own maximum, the past is scaled to the running one.",
        softmax((P, P.replace("next_max", "scores.amax(-1, keepdim=True)"))),
    ),
    # the sums
    Mutant(
        "sum_of_last_tile",
        "row_sum forgets the earlier tiles.",
        softmax((ROW_SUM, ROW_SUM.replace("alpha * self.row_sum + ", ""))),
    ),
    Mutant(
        "acc_of_last_tile",
        "acc forgets the earlier tiles.",
        softmax((ACC, ACC.replace("alpha * self.acc + ", ""))),
    ),
    Mutant(
        "sum_is_mean",
        "row_sum adds the mean of p.",
        softmax((ROW_SUM, ROW_SUM.replace("p.sum", "p.mean"))),
    ),
    Mutant(
        "not_normalised",
        "The division at the end is missing.",
        softmax((RESULT, RESULT.replace("self.acc / row_sum", "self.acc"))),
    ),
    Mutant(
        "normalised_too_early",
        "acc is divided in every tile, and its weight is forgotten.",
        softmax(
            (ACC, "acc = (alpha * self.acc + weighted_sum(p, v)) / row_sum.clamp_min(1e-30)"),
            (RESULT, RESULT.replace("self.acc / row_sum", "self.acc")),
        ),
    ),
    Mutant(
        "local_softmax_summed",
        "Each tile is normalised on its own and the results are added.",
        softmax(LOCAL_SOFTMAX, WITHOUT_ALPHA, (ROW_SUM, "row_sum = torch.ones_like(self.row_sum)")),
    ),
    Mutant(
        "local_softmax_averaged",
        "Each tile is normalised on its own and the results are averaged.",
        softmax(LOCAL_SOFTMAX, WITHOUT_ALPHA),
    ),
    Mutant(
        "acc_starts_at_one",
        "acc starts at 1.",
        softmax((EMPTY, EMPTY.replace("new_zeros", "new_ones"))),
    ),
    Mutant(
        "state_not_reset",
        "A query tile starts from the state of the one before.",
        loop(
            (
                "state = self.empty(q_rows, v)",
                "state = self.visible.__dict__.get(q_rows.shape) or self.empty(q_rows, v)",
            ),
            (
                "        return state\n\n    def finish",
                "        self.visible.__dict__[q_rows.shape] = state\n        return state\n\n"
                "    def finish",
            ),
        ),
    ),
    Mutant(
        "values_misaligned",
        "Every key gets its neighbour's value.",
        loop((UPDATE, UPDATE.replace("v[", "v.roll(1, -2)["))),
    ),
    Mutant(
        "low_precision_statistics",
        "Scores and sums are kept in the inputs' dtype.",
        loop(
            ("else statistics_dtype(q),", "else q.dtype,"),
            ('recompute=not exact or softmax_dtype == "input"', "recompute=True"),
        ),
    ),
    Mutant(
        "low_precision_lse",
        "lse is rounded to the inputs' dtype.",
        loop(
            (
                "lse.to(torch.promote_types(lse.dtype, torch.float32))",
                "lse.to(q_rows.dtype).to(lse.dtype)",
            )
        ),
        dtype=torch.bfloat16,
    ),
    # exponentials and scale
    Mutant(
        "exp2",
        "exp2 without the factor log2(e).",
        softmax((ALPHA, ALPHA.replace("exp", "exp2")), (P, P.replace("exp", "exp2"))),
    ),
    Mutant("exp2_in_p_only", "exp2 for p, exp for alpha.", softmax((P, P.replace("exp", "exp2")))),
    Mutant(
        "no_scale",
        "The scores are not scaled.",
        loop((SCORES, SCORES.replace(" * self.scale", ""))),
    ),
    Mutant(
        "scale_twice", "The scores are scaled twice, as by 1 / D.", loop((SCORES, SCORES + "**2"))
    ),
    # masks
    Mutant("no_guard", "-inf - -inf is not caught.", softmax((GUARD, "return row_max"))),
    Mutant(
        "mask_is_minus_1e9",
        "Hidden scores are -1e9 instead of -inf.",
        loop((FILL, FILL.replace("-torch.inf", "-1e9"))),
    ),
    Mutant(
        "no_rescale_mask_is_minus_1e9",
        "no_rescale, and a hidden tile's best key counts like any other's.",
        (
            *softmax(OWN_MAX, WITHOUT_ALPHA),
            *mask(*EVERY_TILE),
            *loop((FILL, FILL.replace("-torch.inf", "-1e9"))),
        ),
    ),
    Mutant("mask_is_zero", "Hidden scores are 0.", loop((FILL, FILL.replace("-torch.inf", "0.0")))),
    Mutant(
        "mask_relative",
        "The mask counts rows and keys from the start of the tile.",
        mask(RELATIVE_KEYS, RELATIVE_ROWS),
    ),
    Mutant(
        "mask_relative_keys",
        "The mask counts keys from the start of the tile.",
        mask(RELATIVE_KEYS),
    ),
    Mutant(
        "mask_relative_rows",
        "The mask counts rows from the start of the tile.",
        mask(RELATIVE_ROWS),
    ),
    Mutant(
        "mask_sees_next",
        "A query sees one key too many.",
        mask((VISIBLE, VISIBLE.replace("j < ", "j <= "))),
    ),
    Mutant(
        "mask_hides_own",
        "A query does not see its own key.",
        mask((VISIBLE, VISIBLE.replace("j < ", "j + 1 < "))),
    ),
    Mutant(
        "mask_after_max",
        "The maximum is taken over the hidden scores too.",
        (
            *loop(
                (
                    f"scores = {FILL}",
                    f"unmasked, scores = scores, {FILL}\n            scores.tile_max = "
                    "unmasked.amax(-1, keepdim=True)",
                )
            ),
            *softmax(
                (
                    TILE_MAX,
                    "next_max = self.next_max(getattr(scores, 'tile_max', scores.amax(-1, "
                    "keepdim=True)))",
                )
            ),
        ),
    ),
    Mutant(
        "mask_top_left",
        "Queries are aligned with the first keys.",
        mask(("position = i + num_keys - num_queries", "position = i")),
    ),
    Mutant(
        "window_off_by_one",
        "The window is a key too wide.",
        mask(("(position - left)", "(position - left - 1)")),
    ),
    Mutant(
        "window_right_off_by_one",
        "A window to both sides is a key too wide on the right.",
        mask((SIDES, "(window[0], window[1] + 1) if isinstance(window, tuple)")),
    ),
    Mutant(
        "window_sides_swapped",
        "A window to both sides has left and right in the wrong order.",
        mask((SIDES, "window[::-1] if isinstance(window, tuple)")),
    ),
    Mutant(
        "key_lengths_ignored",
        "Padding counts as keys.",
        mask(("hi = torch.minimum(hi, key_lengths[:, None])", "pass")),
    ),
    Mutant(
        "key_lengths_of_first_sequence",
        "All sequences are as long as the first.",
        mask(("key_lengths[:, None]", "key_lengths[:1, None]")),
    ),
    Mutant(
        "lengths_ignored_in_the_backward",
        "The backward pass takes the longest sequence's lengths for all.",
        loop(
            (
                "scores, derivative = self.scores(q_rows,",
                "longest = replace(self.visible, hi=self.visible.hi.amax(0, True))\n"
                "                scores, derivative = replace(self, visible=longest).scores(\n"
                "                    q_rows,",
            )
        ),
    ),
    Mutant(
        "packed_top_left",
        "Packed sequences align their queries with their first keys.",
        mask((PACKED, "position = i + first - of_queries[end - 1]")),
    ),
    Mutant(
        "packed_as_one",
        "Packed sequences align their queries as if they were one.",
        mask((PACKED, "pass")),
    ),
    Mutant(
        "packed_boundary",
        "A packed sequence's first query belongs to the sequence before.",
        mask((", i, right=True)", ", i.clamp(min=1))")),
    ),
    Mutant(
        "packed_sees_back",
        "A packed sequence sees those before it.",
        mask(("first, last = of_keys[end - 1], of_keys[end]", "last = of_keys[end]")),
    ),
    Mutant(
        "acc_of_the_keys_width",
        "The output has the keys' width.",
        softmax((EMPTY, EMPTY.replace("value_dim or ", ""))),
    ),
    Mutant(
        "window_unmasked",
        "Tiles at the left edge of a window are not masked.",
        mask((KEY_TILE, KEY_TILE.replace("j < self.full_first or ", ""))),
    ),
    Mutant(
        "diagonal_unmasked",
        "Tiles on the diagonal are not masked.",
        mask((KEY_TILE, KEY_TILE.replace(" or end > self.full_last", ""))),
    ),
    Mutant(
        "diagonal_skipped",
        "Tiles on the diagonal are skipped.",
        mask(
            (KEY_TILE, f"if end <= self.full_last or j <= self.first:\n                {KEY_TILE}")
        ),
    ),
    Mutant(
        "documents_see_back",
        "A document sees those before it.",
        mask(
            ("start = torch.where(is_first, i, 0).cummax(1).values", "start = torch.zeros_like(lo)")
        ),
    ),
    Mutant(
        "documents_end_nowhere",
        "A document sees those after it.",
        mask(("torch.minimum(hi, end)", "hi")),
    ),
    Mutant(
        "documents_only_rise",
        "A document begins only where the id is larger.",
        mask((CHANGE, CHANGE.replace("!=", ">"))),
    ),
    Mutant(
        "documents_return",
        "An id that comes again continues the document that had it.",
        mask(
            (
                "start = torch.where(is_first, i, 0).cummax(1).values",
                "start = (document_ids.unsqueeze(2) == document_ids.unsqueeze(1)).int().argmax(-1)",
            )
        ),
    ),
    Mutant(
        "bounds_of_first_row",
        "The last tile is chosen for the tile's first row.",
        mask((LAST, LAST.replace("stops - 1", "starts"))),
    ),
    Mutant(
        "bounds_of_last_row",
        "The first tile is chosen for the tile's last row.",
        mask((FIRST, FIRST.replace("starts", "stops - 1"))),
    ),
    Mutant(
        "bounds_of_first_sequence",
        "The tiles are chosen for the first sequence of the batch.",
        mask((FIRST, FIRST.replace(".amin(0)", "[0]")), (LAST, LAST.replace(".amax(0)", "[0]"))),
    ),
    Mutant(
        "unmasked_too_far",
        "Tiles count as wholly visible when their last row sees all of them.",
        mask((FULL_LAST, FULL_LAST.replace("starts", "stops - 1"))),
    ),
    # tails
    Mutant(
        "tail_dropped",
        "A last tile that is not full is left out.",
        mask((TILES, TILES.replace("self.last,", "self.last - block_kv + 1,"))),
    ),
    Mutant(
        "tail_padded",
        "A last tile that is not full is filled up with keys of score 0.",
        loop(
            (
                UPDATE,
                "pad = keys.stop - keys.start - scores.shape[-1]\n"
                "        v_keys = torch.nn.functional.pad(v[..., keys, :], (0, 0, 0, pad))\n"
                "        state = state.update(torch.nn.functional.pad(scores, (0, pad)), v_keys)",
            )
        ),
    ),
    # heads, biases
    Mutant(
        "heads_in_turn",
        "Query heads take the key/value heads in turn.",
        loop(
            (
                "q = q.reshape(batch, num_kv_heads, groups, num_queries, head_dim)",
                "q = q.unflatten(1, (groups, num_kv_heads)).transpose(1, 2)",
            )
        ),
    ),
    Mutant(
        "alibi_backwards",
        "The bias grows with the distance.",
        loop((BIAS, BIAS.replace("scores - ", "scores + "))),
    ),
    Mutant(
        "alibi_absolute",
        "The bias counts |i - j|, so later keys lose too.",
        loop((BIAS, BIAS.replace("(i - j)", "(i - j).abs()"))),
    ),
    Mutant(
        "alibi_rounded",
        "The slopes are rounded to bfloat16.",
        loop((".detach().to(statistics_dtype(q))", ".detach().bfloat16().to(statistics_dtype(q))")),
    ),
    Mutant(
        "alibi_heads_in_turn",
        "The query heads of a group get the slopes in turn.",
        loop(
            (
                SLOPES,
                "slopes.view(num_heads // num_kv_heads, num_kv_heads, 1, 1).transpose(0, 1)",
            )
        ),
    ),
    Mutant(
        "softcap_cancels",
        "tanh(x) is 1 - 2 / (1 + exp(2 x)), which cancels near 0.",
        loop(
            (
                "torch.tanh(scores / self.softcap)",
                "1 - 2 / (1 + torch.exp(2 * scores / self.softcap))",
            )
        ),
    ),
    Mutant(
        "score_mod_first_sequence",
        "A score_mod always gets b = 0.",
        loop(("b = torch.arange(scores.shape[0],", "b = torch.zeros(scores.shape[0],")),
    ),
    Mutant(
        "score_mod_key_head",
        "A score_mod gets the key/value head as h.",
        loop(
            (
                "h = torch.arange(scores.shape[1] * scores.shape[2], device=scores.device).view(\n"
                "                    *scores.shape[1:3], 1, 1\n"
                "                )",
                "h = torch.arange(scores.shape[1], device=scores.device).view(-1, 1, 1, 1)",
            )
        ),
    ),
    Mutant(
        "alibi_top_left",
        "The bias counts from the first key.",
        loop(("[rows, None] + num_keys - num_queries", "[rows, None]")),
    ),
    # lse and the backward pass
    Mutant(
        "lse_adds_sum",
        "lse = row_max + row_sum.",
        softmax((RESULT, RESULT.replace("torch.log(row_sum)", "row_sum"))),
    ),
    Mutant(
        "lse_without_max",
        "lse = log(row_sum).",
        softmax((RESULT, RESULT.replace("self.row_max + ", ""))),
    ),
    Mutant(
        "lse_base_two",
        "lse is half in base two.",
        softmax((RESULT, RESULT.replace("torch.log(", "torch.log2("))),
    ),
    Mutant(
        "backward_without_delta",
        "ds = p * dp.",
        loop(("(do_rows @ v_keys.mT - delta)", "(do_rows @ v_keys.mT)")),
    ),
    Mutant(
        "backward_without_lse",
        "What flows back through lse is lost.",
        loop(("delta = delta - d_lse[..., rows].unsqueeze(-1)", "pass")),
    ),
    Mutant(
        "backward_without_scale",
        "The scores' gradient is not scaled.",
        loop(("- delta) * self.scale", "- delta)")),
    ),
    Mutant(
        "backward_without_softcap",
        "The softcap has no derivative.",
        loop(("ds = ds * derivative", "pass")),
    ),
    Mutant(
        "backward_without_guard",
        "A row without a key rebuilds p from lse = -inf.",
        loop(
            (
                "torch.where(lse_rows == -torch.inf, torch.inf, lse_rows)",
                "lse_rows",
            )
        ),
    ),
    Mutant(
        "dk_of_first_head",
        "dk counts the first query head of a group only.",
        loop(("(ds.mT @ q_rows).sum(2, keepdim=True)", "(ds.mT @ q_rows)[:, :, :1]")),
    ),
    Mutant(
        "dv_of_last_tile",
        "dv is overwritten by every query tile.",
        loop(("dv[..., keys, :] += (p.mT", "dv[..., keys, :] = (p.mT")),
    ),
    # no mistakes
    Mutant(
        "alpha_not_on_first_tile",
        "The first tile does not rescale the empty state.",
        softmax(
            (
                ROW_SUM,
                ROW_SUM.replace(
                    "alpha * self.row_sum",
                    "torch.where(self.row_max == -torch.inf, 1.0, alpha) * self.row_sum",
                ),
            )
        ),
        survives="the empty state's sum is 0, and 0 times anything finite is 0",
    ),
    Mutant(
        "sum_starts_at_one",
        "row_sum starts at 1.",
        softmax(
            (
                EMPTY,
                EMPTY.replace(" row_sum,\n", " torch.ones_like(row_sum),\n"),
            )
        ),
        survives="the first key a row sees multiplies the sum by alpha = exp(-inf) = 0, and a row "
        "without a key is not divided by it",
    ),
    Mutant(
        "no_skip",
        "Tiles that no row sees are visited all the same.",
        mask(*EVERY_TILE),
        survives="the mask hides every key of them, and the guarded maximum makes them worth "
        "nothing: "
        "it only takes longer",
    ),
    *SHIPPED,
)


def _of_ring(
    name: str, says: str, *edits: tuple[str, str, str], survives: str | None = None
) -> Mutant:
    return Mutant(name, says, edits, survives, backend="ring")


BLOCK_BACKWARD = "return blocks.backward(*known, part.visible, **self.settings)"
SEARCH = "torch.searchsorted(keys, ends[:, rows].contiguous())"
CHUNKS = "torch.cat((chunks[rank], chunks[-1 - rank]))"
NEXT_KEYS = "held = arrived[0] if leaving else held"
BLOCK = "rows, block, max_score = self._block(rank, source, q, held)"
MERGED = "merged.add(rows, block)"

# what went wrong in rings that people trained with, and its neighbours
RING_MUTANTS = (
    _of_ring(
        "stale_keys_in_the_backward",
        "The backward pass uses the rank's own keys in every hop.",
        *ring((NEXT_KEYS, "pass")),
    ),
    _of_ring(
        "local_lse_in_the_backward",
        "p is rebuilt from the lse of the block, not of the whole row.",
        *ring(
            (
                BLOCK_BACKWARD,
                "state, _ = blocks.forward(q, k, v, part.visible, look=False, **self.settings); "
                "lse = state.finalize()[1]; return blocks.backward(q, k, v, out, lse, d_out, "
                "d_lse, part.visible, **self.settings)",
            )
        ),
    ),
    _of_ring(
        "gradient_one_hop_short",
        "dk and dv stop at the rank before their own.",
        *ring(("add_all(own, slice(0, k.shape[2]), home())", "home()")),
    ),
    _of_ring(
        "gradient_stays",
        "dk and dv of the hops before are not added.",
        *ring(("arrived[len(leaving) :])", "[])")),
    ),
    _of_ring(
        "middle_row_left_out",
        "The first row of the later half gets no gradient from the keys of its rank, and they none "
        "from it.",
        *ring(("slice(half, None)", "slice(half + 1, None)")),
    ),
    _of_ring(
        "only_the_last_dq",
        "dq is that of the last hop.",
        *ring(("dq.add(part.rows", "dq = Total(q, fused); dq.add(part.rows")),
    ),
    _of_ring(
        "positions_of_the_rank",
        "Queries count from 0 on every rank.",
        *ring(("ends[:, rows]", "ends[:, : len(rows)]")),
    ),
    _of_ring(
        "one_key_too_many",
        "The search ends behind the key that it looks for.",
        *ring((SEARCH, SEARCH[:-1] + ", right=True)")),
    ),
    _of_ring(
        "halves_swapped",
        "A rank's late chunk stands before its early one.",
        *ring((CHUNKS, "torch.cat((chunks[-1 - rank], chunks[rank]))")),
    ),
    _of_ring(
        "sent_the_other_way",
        "Keys go to the rank before, and are taken for those of another.",
        *ring(("previous[rank - 1]", "previous[(rank + 1) % len(previous)]")),
    ),
    _of_ring(
        "own_maximum",
        "The merge keeps the maximum of the first hop, and nothing is brought to its scale.",
        (
            "online_softmax",
            "alpha, beta = (torch.exp(state.row_max - finite(next_max)) for state in (self, "
            "other))",
            "alpha, beta = 1.0, 1.0",
        ),
    ),
    _of_ring(
        "merged_by_exp",
        "The merge subtracts no maximum.",
        (
            "online_softmax",
            "        next_max = torch.maximum(self.row_max, other.row_max)\n"
            "        alpha, beta = (torch.exp(state.row_max - finite(next_max)) for state in "
            "(self, other))",
            "        next_max = torch.where(torch.maximum(self.row_max, other.row_max) == "
            "-torch.inf, -torch.inf, 0.0)\n"
            "        alpha, beta = torch.exp(self.row_max), torch.exp(other.row_max)",
        ),
    ),
    _of_ring(
        "mean_of_ranks",
        "The results of the ranks are averaged.",
        *ring(
            (
                MERGED,
                "block = replace(block, row_sum=torch.ones_like(block.row_sum), row_max="
                f"torch.zeros_like(block.row_max), acc=block.finalize()[0]); {MERGED}",
            )
        ),
    ),
    _of_ring(
        "one_hop_too_few",
        "The keys of the next rank are never seen.",
        *ring(
            (
                BLOCK,
                "if hop and hop + 1 == self.world:\n                arriving()\n"
                f"                break\n            {BLOCK}",
            )
        ),
    ),
    _of_ring(
        "last_row_left_out",
        "The last of the rows that see a block is not computed.",
        *ring(("slice(int(rows[0]), int(rows[-1]) + 1)", "slice(int(rows[0]), int(rows[-1]))")),
    ),
    _of_ring(
        "last_key_left_out",
        "The last of the keys that are seen of a block does not count.",
        *ring(("int(hi[filled].max())", "int(hi[filled].max()) - 1")),
    ),
    _of_ring(
        "first_rows_merged",
        "What the last rows made of a block is merged into the first ones.",
        *ring(
            (
                "getattr(state, name)[..., rows, :]",
                "getattr(state, name)[..., : block.acc.shape[2], :]",
            )
        ),
    ),
    _of_ring(
        "other_halves",
        "A rank has the r-th chunk of each half.",
        *ring((CHUNKS, "torch.cat((chunks[rank], chunks[world + rank]))")),
        survives="a ring is right for any sorted positions; the ranks compute unequally much",
    ),
    _of_ring(
        "later_keys_first",
        "The states are merged the other way round.",
        *ring(
            ("self.merge(state, block)", "self.merge(block, state)"),
            ("merge(replace(state, **past), block)", "merge(block, replace(state, **past))"),
        ),
        survives="the merge is commutative",
    ),
    *SHIPPED_IN_RINGS,
)

# by the file of results/ that has their matrix
GALLERY = {
    "mutants": MUTANTS,
    "mutants_ring": RING_MUTANTS,
    "mutants_decoding": DECODING_MUTANTS,
    "mutants_kernels": KERNEL_MUTANTS,
}
