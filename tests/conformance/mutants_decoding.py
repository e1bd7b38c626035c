"""Single mistakes in the specification of decoding over a cache: lengths and tables of another step
or sequence, positions, splits and their merge. mutants_kernels.py has those in the kernel.
"""

from tests.conformance.mutation import Mutant, kept, mask

MERGE = "state = state.merge(part)"
LENGTHS = "cache_lengths=cache_lengths)\n    count"
POSITION = "position = i + last - num_queries"
ROOM = "last = cache_lengths.long()[:, None].expand(-1, num_queries)"
PAGES = "own = pages[block_table.long()"
GATHERED = "k, v = gathered(k, block_table), gathered(v, block_table)"
TILES = "(last - first + block_kv - 1) // block_kv"
OWN = "(j >= start) & (j < end)"
UNWRITTEN = ".masked_fill(~seen.any(2).unsqueeze(-1), 0.0)"
CAP = "scores = softcap * torch.tanh(scores / softcap)"
GROUPS = "q.unflatten(1, (k.shape[1], -1))"
ORDER = "own.transpose(1, 2).flatten(2, 3)"


def decoding(name: str, says: str, *edits: tuple[str, str], survives: str | None = None) -> Mutant:
    return Mutant(name, says, tuple(("decoding", *edit) for edit in edits), survives)


DECODING_MUTANTS = (
    # lengths
    decoding(
        "lengths_kept",
        "The lengths of an earlier step stay, as those that a graph has captured.",
        (LENGTHS, LENGTHS.replace("=cache_lengths", "=" + kept("id(k)", "cache_lengths.clone()"))),
    ),
    decoding(
        "lengths_without_the_new_token",
        "A length does not count the query itself: the cache is written a step late.",
        (LENGTHS, LENGTHS.replace("=cache_lengths", "=(cache_lengths - 1).clamp(min=0)")),
    ),
    decoding(
        "lengths_of_whole_pages",
        "The last page is read to its end.",
        (LENGTHS, LENGTHS.replace("=cache_lengths", "=(cache_lengths + 7) // 8 * 8")),
    ),
    decoding(
        "lengths_of_the_longest",
        "All sequences are as long as the longest.",
        (LENGTHS, LENGTHS.replace("=cache_lengths", "=cache_lengths.amax().expand(len(q))")),
    ),
    decoding(
        "unwritten_values_read",
        "Room that nobody has written has weight 0, and 0 times NaN is NaN.",
        (UNWRITTEN, ""),
    ),
    # positions
    Mutant(
        "positions_of_the_room",
        "Queries stand at the end of the room, not at that of their sequence.",
        mask((POSITION, "position = i + num_keys - num_queries")),
    ),
    Mutant(
        "positions_top_left",
        "Queries count from the first key.",
        mask((POSITION, "position = i")),
    ),
    Mutant(
        "positions_of_the_first_sequence",
        "All queries stand where those of the first sequence do.",
        mask((POSITION, POSITION.replace("last", "last[:1]"))),
    ),
    Mutant(
        "lengths_hide_nothing",
        "A length moves the queries, and hides no key.",
        mask((POSITION, POSITION + "\n        last = torch.full_like(last, num_keys)")),
    ),
    # pages
    decoding(
        "pages_in_order_of_the_pool",
        "Pages are read in their order in memory.",
        (PAGES, PAGES.replace("table", "table.sort().values")),
    ),
    decoding(
        "table_one_off",
        "An entry of the table is read for its neighbour.",
        (PAGES, PAGES.replace("table", "table.roll(1, 1)")),
    ),
    decoding(
        "table_of_the_first_sequence",
        "All sequences have the pages of the first.",
        (PAGES, PAGES.replace("table", "table[:1].expand_as(block_table)")),
    ),
    decoding(
        "table_kept",
        "The table of an earlier step stays.",
        (PAGES, PAGES.replace("block_table", kept("id(block_table)", "block_table.clone()"))),
    ),
    decoding(
        "values_in_order_of_the_pool",
        "The table is used for the keys alone.",
        (GATHERED, GATHERED.replace("v, block_table", "v, block_table.sort().values")),
    ),
    decoding(
        "heads_inside_of_pages",
        "A page's heads are taken for its rows.",
        (ORDER, "own.flatten(1, 3).unflatten(1, (-1, pages.shape[1])).transpose(1, 2)"),
    ),
    decoding(
        "unused_entry_read",
        "An entry of a page that a sequence does not have is read.",
        (".clamp(0, len(pages) - 1)]", "]"),
    ),
    # splits
    decoding(
        "split_tile_lost",
        "A last tile that is not full belongs to no split.",
        (TILES, "(last - first) // block_kv"),
    ),
    decoding(
        "splits_overlap",
        "The key at the edge of two splits counts twice.",
        (OWN, OWN.replace("j < end", "j <= end")),
    ),
    decoding(
        "splits_of_the_first_query",
        "What the first of several queries sees is shared among the splits.",
        ("visible.hi.amax(1, keepdim=True)", "visible.hi.amin(1, keepdim=True)"),
    ),
    decoding("last_split_kept", "The last split is the result.", (MERGE, "state = part")),
    decoding(
        "splits_added",
        "Splits are added without their maxima.",
        (
            MERGE,
            "state = OnlineSoftmax(torch.maximum(state.row_max, part.row_max), "
            "state.row_sum + part.row_sum, state.acc + part.acc)",
        ),
    ),
    decoding(
        "splits_averaged",
        "Splits are merged without lse: their outputs are averaged.",
        (
            MERGE,
            "state = state.merge(OnlineSoftmax((part.row_max * 0).nan_to_num(nan=-torch.inf), "
            "(part.row_sum > 0).to(dtype), part.finalize()[0]))",
        ),
    ),
    # the rest of the call
    decoding("decoding_without_scale", "Scores are not scaled.", (".mT * scale", ".mT")),
    decoding("decoding_without_softcap", "The cap is for prefill alone.", (CAP, "scores = scores")),
    decoding(
        "decoding_window_ignored",
        "One query alone takes a path that knows no window.",
        ("causal=causal, window=window, cache", "causal=causal, window=None, cache"),
    ),
    decoding(
        "decoding_not_causal",
        "Several new tokens see one another.",
        ("visible_keys(q, k, causal=causal,", "visible_keys(q, k, causal=False,"),
    ),
    decoding(
        "decoding_heads_in_turn",
        "Query heads take the key/value heads in turn.",
        (
            GROUPS + ",",
            "q.unflatten(1, (-1, k.shape[1])).transpose(1, 2),",
        ),
    ),
    # no mistakes
    decoding(
        "splits_from_first_key",
        "Splits share all keys that the cache has room for.",
        (
            "visible.hi.amax(1, keepdim=True)",
            "torch.full_like(visible.hi[:, :1], visible.num_keys)",
        ),
        survives="a split of keys that a sequence does not see is an empty state, and merging it "
        "changes nothing",
    ),
    decoding(
        "merged_from_the_last",
        "The splits are merged the other way round.",
        (MERGE, "state = part.merge(state)"),
        survives="the merge is commutative",
    ),
)
