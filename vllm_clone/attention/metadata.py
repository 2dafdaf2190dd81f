"""What attention must know about a step. T tokens, R requests, B blocks per row; suffixes name the axes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step as one KV cache group sees it; every layer of the group shares the object.

    The tokens of row r are ``query_start_loc_R1[r]`` up to ``query_start_loc_R1[r + 1]``; the last of them sits at
    position ``seq_lens_R[r] - 1`` of its sequence. Prefill, chunked prefill and decode rows may be mixed.
    """

    query_start_loc_R1: torch.Tensor
    """int32 [R + 1], starts with 0 and ends with the number of tokens."""
    seq_lens_R: torch.Tensor
    """int32 [R], tokens in the cache after this step."""
    block_table_RB: torch.Tensor
    """int32 [R, B], block ids in sequence order; entries beyond a row's length are not read."""
    slot_mapping_T: torch.Tensor
    """int64 [T], block id × block size + offset of each token's key and value; -1 stores nothing."""
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    """Tokens that count; a padded step carries more rows of q, k and v than this."""
